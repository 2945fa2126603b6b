"""What a start says it is waiting for, from Serve's status and the replicas' log files."""

import contextlib
import os
import pty
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deployments.logs import WAITS_FOR_REPLICA
from deployments.startup import ReplicaLogs, board, lines


@dataclass
class Deployed:
    replica_states: dict[str, int] = field(default_factory=dict)
    message: str = ""


def write(folder: Path, replica: str, *said: str, end: str = "\n") -> None:
    with (folder / f"replica_manta_{replica}.log").open("a") as file:
        file.write("\n".join(f"INFO 2026-11-21 11:25:22,622 {replica} -- {text}" for text in said) + end)


def model(logs: ReplicaLogs, message: str = "", **states: int) -> str:
    logs.look()
    return lines("manta", {"ModelReplica": Deployed(states, message)}, logs)["manta/ModelReplica"]


def test_a_replica_goes_through_its_phases(tmp_path: Path) -> None:
    logs = ReplicaLogs(tmp_path)
    assert model(logs) == "manta: ModelReplica: waiting for Serve to start it"
    assert model(logs, STARTING=1) == "manta: ModelReplica: 0 of 1 ready; 1 starting"
    for said, phase in (
        ("Started initializing replica.", "setting up"),
        ("loading weights: 40 % (216 of 538 MB, 43 MB/s)", "loading weights, 40 % (216 of 538 MB, 43 MB/s)"),
        ("weights: 513 MiB in 5.5 s", "warming up"),
        (
            "attention: compiling FlashInfer's kernels, minutes, once on this machine",
            "compiling FlashInfer's kernels, minutes, once on this machine",
        ),
        ("attention: triton, since flashinfer failed", "warming up, attention: triton, since flashinfer failed"),
        ("warm-up: 0.7 s", "making its KV pool"),
    ):
        write(tmp_path, "ModelReplica_abc", said)
        assert model(logs, STARTING=1) == f"manta: ModelReplica: 0 of 1 ready; abc {phase}"
    write(tmp_path, "ModelReplica_abc", "Finished initializing replica.")
    assert model(logs, STARTING=1) == "manta: ModelReplica: 0 of 1 ready; abc has started"  # Serve will notice
    assert model(logs, RUNNING=1) == "manta: ModelReplica: 1 of 1 ready"
    assert model(logs, RUNNING=1, STARTING=1) == "manta: ModelReplica: 1 of 2 ready; 1 starting"


def test_replicas_are_told_apart_and_those_that_are_elsewhere_are_counted(tmp_path: Path) -> None:
    logs = ReplicaLogs(tmp_path)
    write(tmp_path, "ModelReplica_b", "weights: 513 MiB in 5.5 s")
    write(tmp_path, "ModelReplica_a", "loading weights: 10 % (54 of 538 MB, 43 MB/s)")
    assert model(logs, RUNNING=1, STARTING=3) == (
        "manta: ModelReplica: 1 of 4 ready; a loading weights, 10 % (54 of 538 MB, 43 MB/s); b warming up; 1 starting"
    )


def test_a_replica_that_failed_to_start_gives_way_to_its_successor(tmp_path: Path) -> None:
    logs = ReplicaLogs(tmp_path)
    write(tmp_path, "ModelReplica_a", "loading weights: 10 % (54 of 538 MB, 43 MB/s)")
    logs.look()
    write(tmp_path, "ModelReplica_z", "Started initializing replica.")
    said = "A replica failed to start. Retrying 2 more time(s). Error:\nTraceback\nreplicas.errors.InvalidConfig: no f"
    assert model(logs, STARTING=1, message=said) == (
        "manta: ModelReplica: 0 of 1 ready; z setting up (A replica failed to start. Retrying 2 more time(s). "
        "InvalidConfig: no f)"
    )


def test_files_of_earlier_applications_and_other_deployments_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, "ModelReplica_old", "loading weights: 10 % (54 of 538 MB, 43 MB/s)")
    logs = ReplicaLogs(tmp_path)
    write(tmp_path, "ModelReplica_Too_x", "warm-up: 0.7 s")
    write(tmp_path, "Router_r", WAITS_FOR_REPLICA)
    assert model(logs, STARTING=1) == "manta: ModelReplica: 0 of 1 ready; 1 starting"
    said = lines("manta", {"Router": Deployed({"STARTING": 1})}, logs)
    assert said == {"manta/Router": "manta: Router: 0 of 1 ready; r waiting for the first model replica"}
    assert lines("manta", {}, logs) == {"manta": "manta: being built"}


def test_half_a_line_is_read_when_it_is_whole_and_json_lines_say_the_same(tmp_path: Path) -> None:
    logs = ReplicaLogs(tmp_path)
    write(tmp_path, "ModelReplica_abc", "loading weights: 4", end="")
    assert model(logs, STARTING=1).endswith("; 1 starting")
    with (tmp_path / "replica_manta_ModelReplica_abc.log").open("a") as file:
        file.write('0 % (216 of 538 MB, 43 MB/s)\n{"message": "loading weights: 50 % (271 of 538 MB, 53 MB/s)"}\n')
    assert model(logs, STARTING=1).endswith("; abc loading weights, 50 % (271 of 538 MB, 53 MB/s)")


def test_without_log_files_serves_status_is_told(tmp_path: Path) -> None:
    """A cluster whose replicas are on other machines."""
    logs = ReplicaLogs(tmp_path / "nowhere")
    assert model(logs, STARTING=2, STOPPING=1) == "manta: ModelReplica: 0 of 3 ready; 2 starting; 1 stopping"


def test_elsewhere_than_on_a_terminal_each_line_is_said_when_it_changes() -> None:
    said: list[str] = []
    with board(said.append) as show:
        for now in ({"a": "a: 1", "b": "b: 1"}, {"a": "a: 1", "b": "b: 1"}, {"a": "a: 2", "b": "b: 1"}):
            show(now)
    assert said == ["a: 1", "b: 1", "a: 2"]


def _all_of(master: int) -> str:
    """What was written to a terminal whose other end is closed; it comes in pieces."""
    pieces = []
    with contextlib.suppress(OSError):  # EIO is the end
        while piece := os.read(master, 65536):
            pieces.append(piece)
    os.close(master)
    return b"".join(pieces).decode()


def test_on_a_terminal_lines_are_drawn_in_place_and_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        said: list[str] = []
        with board(said.append) as show:
            show({"a": "a: 1", "b": "b: 1"})
            show({"a": "a: 2", "b": "b: 1"})
    written = _all_of(master)
    assert said == []
    assert "  a: 1\r\n  b: 1" in written
    assert "\x1b[1A" in written.partition("a: 1")[2].partition("a: 2")[0]  # up, to draw over it
    assert written.rpartition("a: 2")[2].count("\x1b[2K") >= 2  # both lines are wiped
