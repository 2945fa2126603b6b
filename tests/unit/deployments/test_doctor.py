"""`doctor`: each fault and each warning once, by facts that are given; and one look at this machine."""

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from deployments.command import doctor
from deployments.command.doctor import Finding, Level
from tests.unit.deployments.listening import answering

GIB = 1 << 30
H200 = ("NVIDIA H200, 143771 MiB, 570.1",)
OK, WARNING, FAULT = Level.OK, Level.WARNING, Level.FAULT
NOW_S, BUILT_S = 1_800_000_000.0, 1_790_000_000.0


@pytest.mark.parametrize(
    ("found", "level"),
    [
        (doctor.port("h:1", "", has_manta=False), OK),
        (doctor.port("h:1", "h:1 is taken; stop it", has_manta=True), WARNING),
        (doctor.port("h:1", "h:1 is taken; stop it", has_manta=False), FAULT),
        (doctor.model("owner/name", "", None), OK),
        (doctor.model("models/tiny", "", 1), OK),
        (doctor.model("models/tiny", "", 0), FAULT),
        (doctor.model("models/tiny", "there is no such folder", None), FAULT),
        (doctor.http_proxies([]), OK),
        (doctor.http_proxies(["http_proxy"]), WARNING),
        (doctor.cores(2, None), OK),
        (doctor.cores(2, 2.0), OK),
        (doctor.cores(2, 1.5), WARNING),
        (doctor.cores(1, None), WARNING),
        (doctor.memory(2 * GIB, GIB, gpus_wanted=False), OK),
        (doctor.memory(2 * GIB - 1, GIB, gpus_wanted=False), FAULT),
        (doctor.memory(0, GIB, gpus_wanted=True), OK),
        (doctor.shared_memory(GIB), OK),
        (doctor.shared_memory(GIB - 1), WARNING),
        (doctor.shared_memory(None), WARNING),
        (doctor.proxy(""), OK),
        (doctor.proxy("no HAProxy was found"), WARNING),
        (doctor.clock(NOW_S, BUILT_S, is_synchronised=True), OK),
        (doctor.clock(NOW_S, BUILT_S, is_synchronised=False), WARNING),
        (doctor.clock(BUILT_S - 90_000, BUILT_S, is_synchronised=True), FAULT),
        (doctor.version(Requirement("torch==2.13.0"), "2.13.0+cpu"), OK),
        (doctor.version(Requirement("torch==2.13.0"), "2.12.0"), FAULT),
        (doctor.version(Requirement("nixl==1.5.1"), None), FAULT),
    ],
    ids=lambda value: value.text if isinstance(value, Finding) else value,
)
def test_each_check_finds_its_faults_and_says_what_to_do(found: Finding, level: Level) -> None:
    assert found.level is level
    assert bool(found.advice) == (level is not OK)


@pytest.mark.parametrize(
    ("facts", "wanted", "levels"),
    [
        ((None, (), "", None), False, {"torch build": OK, "GPU": OK}),
        (("12.9", H200, "", "/nvcc"), True, {"torch build": OK, "GPU": OK, "nvcc": OK}),
        ((None, H200, "", "/nvcc"), False, {"torch build": WARNING, "GPU": OK, "nvcc": OK}),
        ((None, H200, "", "/nvcc"), True, {"torch build": FAULT, "GPU": OK, "nvcc": OK}),
        (("12.9", (), "", None), False, {"torch build": OK, "GPU": OK}),
        (("12.9", (), "", None), True, {"torch build": OK, "GPU": FAULT}),
        (("12.9", (), "nvidia-smi fails", None), False, {"torch build": OK, "GPU": WARNING}),
        (("12.9", H200, "", None), True, {"torch build": OK, "GPU": OK, "nvcc": WARNING}),
    ],
)
def test_what_a_gpu_lacks_is_a_fault_where_the_settings_want_it(
    facts: tuple[Any, ...], wanted: bool, levels: dict[str, Level]
) -> None:
    found = list(doctor.gpu(*facts, wanted=wanted))
    assert {each.check: each.level for each in found} == levels
    assert all(bool(each.advice) == (each.level is not OK) for each in found)


def test_products_that_cannot_be_told_are_a_warning_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TELL", "raise OSError('no libgomp')")
    [found] = doctor.products(*doctor._products())
    assert (found.check, found.level) == ("products", WARNING)
    assert found.text == "cannot be told: OSError: no libgomp"


def test_the_exit_status_is_1_on_a_fault_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.report([doctor.cores(1, None)], as_json=False) == 0
    assert capsys.readouterr().out.endswith("0 faults, 1 warning\n")
    assert doctor.report([doctor.cores(4, None), doctor.memory(0, GIB, gpus_wanted=False)], as_json=True) == 1
    [cores, memory] = json.loads(capsys.readouterr().out)
    assert (cores["level"], memory["level"]) == ("ok", "fault")
    assert memory["text"] == "0.0 GiB available, one replica needs 2.0"


def settings(folder: Path, *, port: int, model: str, gpus: int = 0) -> str:
    file = folder / "some.yaml"
    file.write_text(
        f"http_options: {{host: 127.0.0.1, port: {port}}}\napplications:\n- name: manta\n  import_path: x\n"
        f"  args: {{model: {{path: {model}}}, replicas: {{gpus: {gpus}}}}}\n"
    )
    return str(file)


def test_this_machine_is_looked_at_without_ray_or_torch(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        holder.close()
        command = [sys.executable, "-X", "importtime", "-m", "deployments", "doctor", "--json"]
        command.append(settings(tmp_path, port=port, model=str(model)))
        env = {**os.environ, "RAY_TMPDIR": str(tmp_path / "new")}  # no Ray ever ran there
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=env)
    found = {each["check"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 1
    assert found["model"]["text"].endswith("has no weights")
    assert found["cores"]["text"].split(",")[0] == str(len(os.sched_getaffinity(0)))
    assert found["ray"]["level"] == "ok"
    assert found["bfloat16"]["text"].startswith(("by ", "widened "))
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "packaging.requirements" in imported
    assert not imported & {"ray", "torch", "transformers", "pydantic"}


def findings(file: str) -> dict[str, Finding]:
    return {each.check: each for each in doctor.examine(file)}


def test_a_taken_port_is_told_apart_from_another_manta(tmp_path: Path) -> None:
    for body, level in ((b'{"data": [{"id": "tiny"}]}', WARNING), (b"hello", FAULT)):
        with answering(lambda *_, body=body: (200, body)) as port:  # type: ignore[misc]
            assert findings(settings(tmp_path, port=port, model=str(tmp_path)))["port"].level is level


def test_a_file_that_is_not_there_is_a_fault_and_the_machine_is_looked_at_all_the_same(tmp_path: Path) -> None:
    found = findings(str(tmp_path / "none.yaml"))
    assert found["settings"].level is FAULT
    assert "model" not in found
    assert found["memory"].level is OK


def test_gpus_are_asked_of_nvidia_smi_and_its_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for script, told in (
        (f"echo '{H200[0]}'", (H200, "")),
        ("echo 'Driver/library version mismatch'; exit 18", ((), "nvidia-smi fails: Driver/library version mismatch")),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        assert doctor._gpus() == told
    found = findings(settings(tmp_path, port=1, model="nobody/nothing", gpus=1))
    assert found["GPU"].level is FAULT
    assert found["model"].text == "nobody/nothing, of the Hugging Face hub"


def test_a_session_of_ray_that_others_can_write_to_is_named(short_folder: Path) -> None:
    """Class 12: Ray gives it the mode 777; a private folder above it is enough. Where no Ray ever ran there is none."""
    session = short_folder / "ray" / "session_latest"
    assert list(doctor.ray_session(session)) == []
    (session / "sockets").mkdir(parents=True)
    session.chmod(0o777)
    short_folder.chmod(0o755)
    assert list(doctor.ray_session(session)) == []  # nobody listens: it has ended
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(str(session / "sockets" / "plasma_store"))
        raylet.listen()
        [found] = doctor.ray_session(session)
        assert (found.level, str(session) in found.text) == (WARNING, True)
        short_folder.chmod(0o700)
        assert list(doctor.ray_session(session)) == []


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder near the root: the path of a socket has a bound."""
    with tempfile.TemporaryDirectory(prefix="doctor-", dir="/tmp") as folder:
        yield Path(folder)


def test_a_token_of_ray_that_no_command_shows_is_named(tmp_path: Path) -> None:
    """A Ray of `serve run` leaves it there; `ray start --head` asks for it, and `serve deploy` shows none and fails."""
    running, token = tmp_path / "ray_current_cluster", tmp_path / ".ray" / "auth_token"
    home = {"HOME": str(tmp_path)}
    here, there = {**home, "RAY_AUTH_MODE": "token"}, {**home, "RAY_ADDRESS": "10.0.0.1:6379"}
    assert list(doctor.ray_token(there, running)) == []  # no token: the cluster asks for none, or for another's
    token.parent.mkdir()
    token.write_text("0f")
    assert list(doctor.ray_token(home, running)) == []  # no cluster
    (told,) = doctor.ray_token(there, running)
    assert "export RAY_AUTH_MODE=token" in told.advice
    running.touch()
    assert list(doctor.ray_token(home, running)) == [told]
    assert list(doctor.ray_token(here, running)) == []
    elsewhere = {"HOME": "/nowhere", "RAY_AUTH_TOKEN": "0f"}
    assert list(doctor.ray_token(elsewhere, running)) == [told]
