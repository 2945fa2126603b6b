"""`doctor`: each fault and each warning once, by facts that are given; and one look at this machine."""

import dataclasses
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deployments.command import doctor
from deployments.command.doctor import Facts, Level
from tests.unit.deployments.listening import answering

GIB = 1 << 30
WELL = Facts(
    settings="serve_config.yaml", settings_problem="", address="127.0.0.1:8000", port_problem="", port_has_manta=False,
    cores=4, cores_limit=None, ram_bytes=8 * GIB, shm_bytes=2 * GIB, haproxy_problem="", torch_cuda=None, gpus=(),
    gpu_problem="", gpus_wanted=False, nvcc=None, model="models/tiny", model_problem="", model_is_here=True,
    weights_bytes=GIB, time_s=1_800_000_000.0, newest_file_s=1_790_000_000.0, clock_is_synchronised=True,
    versions=(("ray", "==2.60.0", "2.60.0"), ("torch", "==2.13.0", "2.13.0+cpu"), ("rich", ">=13", "14.0")),
)  # fmt: skip
H200 = ("NVIDIA H200, 143771 MiB, 570.1",)


def amiss(**changed: Any) -> list[tuple[str, Level]]:
    found = doctor.judge(dataclasses.replace(WELL, **changed))
    assert all(bool(each.advice) == (each.level is not Level.OK) for each in found)
    return [(each.check, each.level) for each in found if each.level is not Level.OK]


def test_a_machine_that_is_well_has_a_line_for_each_check_and_no_advice() -> None:
    found = doctor.judge(WELL)
    assert amiss() == []
    assert [each.check for each in found] == [
        "settings", "port", "model", "cores", "memory", "/dev/shm", "HAProxy", "clock", "torch build", "GPU", "ray",
        "torch",
    ]  # fmt: skip
    gpu = doctor.judge(dataclasses.replace(WELL, gpus=H200, torch_cuda="12.9", nvcc="/usr/bin/nvcc", gpus_wanted=True))
    assert [each.text for each in gpu if each.check in ("torch build", "GPU", "nvcc")] == [
        "for CUDA 12.9", "NVIDIA H200, 143771 MiB, 570.1", "/usr/bin/nvcc",
    ]  # fmt: skip
    assert {each.level for each in gpu} == {Level.OK}


@pytest.mark.parametrize(
    ("check", "changed"),
    [
        ("settings", {"settings_problem": "there is no file other.yaml", "model": ""}),
        ("port", {"port_problem": "127.0.0.1:8000 cannot be listened on (in use); process 7 (python) listens there"}),
        ("model", {"model_problem": "model.path = 'x': there is no such folder"}),
        ("memory", {"ram_bytes": 2 * GIB - 1}),
        ("clock", {"time_s": 1_700_000_000.0}),
        ("torch build", {"gpus_wanted": True, "gpus": H200, "nvcc": "/usr/bin/nvcc"}),
        ("GPU", {"gpus_wanted": True, "torch_cuda": "12.9"}),
        ("GPU", {"gpus_wanted": True, "torch_cuda": "12.9", "gpu_problem": "nvidia-smi fails: driver mismatch"}),
        ("torch", {"versions": (("torch", "==2.13.0", "2.12.0"),)}),
        ("nixl", {"versions": (("nixl", "==1.5.1", None),)}),
        ("rich", {"versions": (("rich", ">=13", "12.6"),)}),
    ],
)
def test_each_fault_is_found_alone(check: str, changed: dict[str, Any]) -> None:
    assert amiss(**changed) == [(check, Level.FAULT)]


@pytest.mark.parametrize(
    ("check", "changed"),
    [
        ("port", {"port_problem": "it is taken; stop it", "port_has_manta": True}),
        ("cores", {"cores": 1}),
        ("cores", {"cores_limit": 1.5}),
        ("/dev/shm", {"shm_bytes": 64 << 20}),
        ("/dev/shm", {"shm_bytes": None}),
        ("HAProxy", {"haproxy_problem": "no HAProxy was found"}),
        ("clock", {"clock_is_synchronised": False}),
        ("torch build", {"gpus": H200, "nvcc": "/usr/bin/nvcc"}),
        ("GPU", {"gpu_problem": "nvidia-smi fails: no devices"}),
        ("nvcc", {"gpus": H200, "torch_cuda": "12.9"}),
    ],
)
def test_each_warning_is_found_alone(check: str, changed: dict[str, Any]) -> None:
    assert amiss(**changed) == [(check, Level.WARNING)]


def test_replicas_on_a_gpu_need_no_ram_for_the_weights() -> None:
    assert amiss(ram_bytes=GIB, gpus_wanted=True, gpus=H200, torch_cuda="12.9", nvcc="/nvcc") == []


def test_the_exit_status_is_1_on_a_fault_alone(capsys: pytest.CaptureFixture[str]) -> None:
    warned = doctor.judge(dataclasses.replace(WELL, cores=1))
    assert doctor.report(warned, as_json=False) == 0
    assert capsys.readouterr().out.endswith("0 faults, 1 warning\n")
    failed = doctor.judge(dataclasses.replace(WELL, ram_bytes=0))
    assert doctor.report(failed, as_json=True) == 1
    [memory] = [each for each in json.loads(capsys.readouterr().out) if each["level"] == "fault"]
    assert memory["check"] == "memory"
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = {each["check"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 1
    assert found["model"]["text"].endswith("has no weights")
    assert found["cores"]["text"].split(",")[0] == str(len(os.sched_getaffinity(0)))
    assert found["ray"]["level"] == "ok"
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "packaging.requirements" in imported
    assert not imported & {"ray", "torch", "transformers", "pydantic"}


def test_a_taken_port_is_told_apart_from_another_manta(tmp_path: Path) -> None:
    model = str(tmp_path)
    for body, has_manta in ((b'{"data": [{"id": "tiny"}]}', True), (b"hello", False)):
        with answering(lambda *_, body=body: (200, body)) as port:  # type: ignore[misc]
            facts = doctor.measure(settings(tmp_path, port=port, model=model))
        assert (bool(facts.port_problem), facts.port_has_manta) == (True, has_manta)


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
    facts = doctor.measure(settings(tmp_path, port=1, model="nobody/nothing", gpus=1))
    assert facts.gpus_wanted
    assert not facts.model_is_here
