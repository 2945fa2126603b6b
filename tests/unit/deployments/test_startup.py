"""What a start says it is waiting for, from Serve's status and the replicas' log files."""

import contextlib
import io
import os
import pty
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import pytest

from deployments.command.announce import _engines, show_box
from deployments.command.startup import DeploymentProgress, ReplicaLogs, StartProgress, hopeless, lines
from deployments.logs import WAITS_FOR_REPLICA
from deployments.settings.schema import parse
from deployments.watch.observatory.serve_details import our_errors
from tests.harness import Clock


@dataclass
class Deployed:
    replica_states: dict[str, int] = field(default_factory=dict)
    message: str = ""


def write(folder: Path, replica: str, *said: str, end: str = "\n") -> None:
    with (folder / f"replica_manta_{replica}.log").open("a") as file:
        file.write("\n".join(f"INFO 2026-11-21 11:25:22,622 {replica} -- {text}" for text in said) + end)


def model(logs: ReplicaLogs, message: str = "", **states: int) -> str:
    logs.look()
    line = lines("manta", {"ModelReplica": Deployed(states, message)}, logs)["manta/ModelReplica"]
    return f"{line.name}: {line.text}"


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


def test_replicas_with_log_files_are_named_and_those_elsewhere_are_counted(tmp_path: Path) -> None:
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
    assert {key: line.text for key, line in said.items()} == {
        "manta/Router": "0 of 1 ready; r waiting for the first model replica"
    }
    assert {key: line.text for key, line in lines("manta", {}, logs).items()} == {"manta": "being built"}


def test_half_a_line_is_read_when_it_is_whole_and_json_lines_say_the_same(tmp_path: Path) -> None:
    logs = ReplicaLogs(tmp_path)
    write(tmp_path, "ModelReplica_abc", "loading weights: 4", end="")
    assert model(logs, STARTING=1).endswith("; 1 starting")
    with (tmp_path / "replica_manta_ModelReplica_abc.log").open("a") as file:
        file.write('0 % (216 of 538 MB, 43 MB/s)\n{"message": "loading weights: 50 % (271 of 538 MB, 53 MB/s)"}\n')
    assert model(logs, STARTING=1).endswith("; abc loading weights, 50 % (271 of 538 MB, 53 MB/s)")


def test_without_log_files_serves_status_is_shown(tmp_path: Path) -> None:
    """A cluster whose replicas are on other machines."""
    logs = ReplicaLogs(tmp_path / "nowhere")
    assert model(logs, STARTING=2, STOPPING=1) == "manta: ModelReplica: 0 of 3 ready; 2 starting; 1 stopping"


def test_that_a_start_takes_longer_than_serve_expects_is_not_said(tmp_path: Path) -> None:
    slow = (
        "Deployment 'ModelReplica' in application 'manta' has 2 replicas that have taken more than 30s to initialize.\n"
        "This may be caused by a slow __init__ or reconfigure method."
    )
    assert model(ReplicaLogs(tmp_path), STARTING=2, message=slow) == "manta: ModelReplica: 0 of 2 ready; 2 starting"


def test_what_a_replica_without_a_place_lacks_is_said_whole(tmp_path: Path) -> None:
    waits = (
        "Deployment 'ModelReplica' in application 'manta' has 1 replicas that have taken more than 30s to be "
        "scheduled. This may be due to waiting for the cluster to auto-scale or for a runtime environment to be "
        "installed. "
        'Resources required for each replica: {"CPU": 1.0, "GPU": 1.0}, total resources available: {"CPU": 1.5}. Use '
        "`ray status` for more details."
    )
    assert model(ReplicaLogs(tmp_path), STARTING=1, message=waits) == (
        "manta: ModelReplica: 0 of 1 ready; 1 starting "
        '(no place yet for 1 replica: each needs {"CPU": 1.0, "GPU": 1.0}, and Ray has {"CPU": 1.5} free)'
    )
    (tmp_path / "raylet.err").write_text("bash: line 1: old: No such file\n")
    logs = ReplicaLogs(tmp_path / "serve")
    assert "raylet.err" not in model(logs, STARTING=1, message=waits)  # of an earlier start
    with (tmp_path / "raylet.err").open("a") as file:
        file.write("bash: line 1: /home/me/my: No such file\n" * 2)
    assert model(logs, STARTING=1, message=waits).endswith(
        'Ray has {"CPU": 1.5} free; Ray\'s raylet.err: bash: line 1: /home/me/my: No such file)'
    )


def test_settings_that_are_impossible_end_a_start_and_what_may_pass_does_not() -> None:
    account = (
        "A replica failed to start. Retrying 2 more time(s). Error:\nTraceback (most recent call last):\n"
        '  File "x.py", line 1\nreplicas.errors.InvalidConfig: cache.page_size = 0; allowed: 1 to 1024 tokens\n'
        "parallel.tp = 2 does not split 9 query heads\n"
    )
    assert hopeless(account)
    assert our_errors(account) == [
        "InvalidConfig: cache.page_size = 0; allowed: 1 to 1024 tokens\nparallel.tp = 2 does not split 9 query heads"
    ]
    assert hopeless(account.replace("InvalidConfig", "UnsupportedModel"))
    assert not hopeless(account.replace("InvalidConfig", "EngineDead"))
    assert not hopeless("RuntimeError: InvalidConfig")


def test_elsewhere_than_on_a_terminal_each_phase_is_a_line_however_often_its_figures_change(tmp_path: Path) -> None:
    out, clock, logs = io.StringIO(), Clock(), ReplicaLogs(tmp_path)
    progress = StartProgress(out, clock=clock)
    progress.say("starting Serve")
    starting = {"ModelReplica": Deployed({"STARTING": 2})}
    for second, (replica, said) in enumerate(
        [
            ("a", "Started initializing replica."),
            ("b", "Started initializing replica."),
            *(("a", f"loading weights: {tenth}0 % (216 of 538 MB, 43 MB/s)") for tenth in range(1, 10)),
            ("b", "loading weights: 40 % (216 of 538 MB, 43 MB/s)"),
            ("a", "weights: 513 MiB in 5.5 s"),
        ]
    ):
        clock.now_s = float(second)
        write(tmp_path, f"ModelReplica_{replica}", said)
        logs.look()
        progress.show(lines("manta", starting, logs))
    progress.show(lines("manta", {"ModelReplica": Deployed({"STARTING": 1, "RUNNING": 1})}, logs))
    progress.show(lines("manta", {"ModelReplica": Deployed({"RUNNING": 2})}, logs))
    progress.close()
    assert out.getvalue().splitlines() == [
        "[  0.0 s] starting Serve",
        "[  0.0 s] manta: ModelReplica: setting up",
        "[  2.0 s] manta: ModelReplica: loading weights",
        "[ 12.0 s] manta: ModelReplica: warming up",
        "[ 12.0 s] manta: ModelReplica: 1 of 2 ready",
        "[ 12.0 s] manta: ModelReplica: 2 of 2 ready",
    ]


def _all_of(master: int) -> str:
    """What was written to a terminal whose other end is closed; it comes in pieces."""
    pieces = []
    with contextlib.suppress(OSError):  # EIO is the end
        while piece := os.read(master, 65536):
            pieces.append(piece)
    os.close(master)
    return b"".join(pieces).decode()


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, show: Callable[[TextIO], None]) -> str:
    """All that ``show`` writes to one of 200 columns."""
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with os.fdopen(slave, "w") as terminal:
        show(terminal)
    return _all_of(master)


def test_on_a_terminal_a_start_is_one_block_that_is_drawn_in_place_and_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def show(terminal: TextIO) -> None:
        progress = StartProgress(terminal, clock=Clock())
        progress.say("starting Serve")
        for percent in (10, 20):
            line = DeploymentProgress(name="manta", text=f"loading weights, {percent} %", phases=())
            progress.show({"manta": line})
            threading.Event().wait(0.6)  # rich draws four times a second
        progress.close()
        progress.say("ready")

    written = on_a_terminal(monkeypatch, show)
    block, _, rest = written.rpartition("20 %")
    assert "[  0.0 s] starting Serve\r\n  manta: loading weights, 10 %" in block
    assert "\x1b[1A" in block.partition("10 %")[2]  # up, to draw over it
    assert rest.count("\x1b[2K") >= 3  # its lines are wiped
    assert rest.endswith("[  0.0 s] ready\r\n")


def test_what_is_served_is_printed_in_a_box_on_a_terminal_and_in_plain_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [("model", "tiny on 2 replicas"), ("API", "http://127.0.0.1:8000/v1")]
    plain = io.StringIO()
    show_box("Manta 0.1.0", rows, plain)
    assert plain.getvalue() == (
        "\nManta 0.1.0\n  model     tiny on 2 replicas\n  API       http://127.0.0.1:8000/v1\n"
    )
    drawn = on_a_terminal(monkeypatch, lambda terminal: show_box("Manta 0.1.0", rows, terminal))
    assert drawn.startswith("╭─ Manta 0.1.0 ─")
    assert "http://127.0.0.1:8000/v1" in drawn


def test_the_box_says_device_dtype_attention_and_pool_once_for_replicas_that_are_alike() -> None:
    config = parse({"model": {"path": "models/tiny"}, "replicas": {"gpus": 1}})
    replica = {"dtype": "bfloat16", "tp": 2, "num_threads": 1, "attention": "triton", "pool": "16 tokens, 1 MiB"}
    assert _engines([replica, replica], config) == [
        ("computes", "on a GPU in bfloat16, 2 ranks, attention: triton, each of 2"),
        ("KV pool", "16 tokens, 1 MiB, each of 2"),
    ]
    on_cpu = parse({"model": {"path": "models/tiny"}})
    [computes, _] = _engines([{**replica, "tp": 1, "num_threads": 4, "dtype": "float32", "attention": "cpu"}], on_cpu)
    assert computes == ("computes", "on the CPU in float32, 4 threads, attention: cpu")
    alone = {**replica, "tp": 1, "attention": "cpu"}
    assert _engines([alone], on_cpu)[0][1] == "on the CPU in float32 with bfloat16 weights, attention: cpu"
    int4 = parse({"model": {"path": "models/tiny", "quantization": "int4"}})
    assert _engines([{**alone, "dtype": "float32"}], int4)[0][1] == (
        "on the CPU in float32 with 4-bit weights, attention: cpu"
    )
    assert _engines([{}], config) == []
    several = [{**alone, "pool": f"{size} tokens, 3,112 pages, 1 MiB"} for size in ("49,792", "49,808", "49,808")]
    assert _engines(several, on_cpu)[1:] == [("KV pool", "about 49,700 tokens, each of 3")]
    assert len(_engines([*several, {**alone, "pool": "16 tokens, 1 MiB"}], on_cpu)) == 4
