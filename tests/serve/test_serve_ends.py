"""Starts that end before they serve: by Ctrl-C, or for settings that only a replica finds wrong; and deaths after."""

import signal
import socket
import time
from pathlib import Path

import pytest

from tests.serve.running import START_S, Running

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]
ENDS_S = 10.0


def test_ctrl_c_during_a_start_says_what_it_waits_for_and_ends_within_ten_seconds(tmp_path: Path) -> None:
    running = Running(tmp_path, replicas={"count": 1}, observatory=True)
    running.launch()
    running.until(lambda: "ModelReplica: " in running.log.read_text() or running.process_ended, START_S)
    assert not running.process_ended, running.log.read_text()
    interrupted_s = time.monotonic()
    left = running.stop()
    took_s = time.monotonic() - interrupted_s
    said = running.log.read_text()
    assert took_s < ENDS_S, said
    assert "stopping: nothing is served yet" in said
    assert said.rstrip().endswith("stopped")
    assert "Controller failed to shut down" not in said
    assert left == []


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """The first one comes while Serve starts."""
    running = Running(tmp_path, replicas={"count": 1}, observatory=True)
    running.launch()
    running.until(lambda: "starting Serve" in running.log.read_text() or running.process_ended, START_S)
    assert running.process is not None
    running.process.send_signal(signal.SIGINT)
    running.until(lambda: "Ctrl-C again stops at once" in running.log.read_text(), ENDS_S)
    again_s = time.monotonic()
    left = running.stop()
    took_s = time.monotonic() - again_s
    said = running.log.read_text()
    assert said.rstrip().endswith("stopped at once")
    assert took_s < ENDS_S / 2, said
    assert left == []


def test_a_setting_that_a_replica_finds_impossible_ends_the_start_at_its_first_try(tmp_path: Path) -> None:
    """Serve tries a replica three times."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        running = Running(tmp_path, replicas={"count": 1}, observability={"metrics_port": port})
        running.launch()
        running.until(lambda: running.process_ended, START_S)
    said = running.log.read_text()
    assert running.process is not None
    assert running.process.returncode == 1
    assert f"manta failed to start:\nInvalidConfig: observability.metrics_port = {port}" in said
    assert "Retrying 1 more" not in said
    assert "Traceback" not in said
    assert running.processes() == {}
