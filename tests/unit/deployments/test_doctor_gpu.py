"""`doctor --gpu`: each thing that a GPU's first start would stop at, by outputs of commands that are given."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.command import doctor, doctor_gpu
from deployments.command.doctor import Level
from deployments.command.doctor_gpu import Facts

ROOT = Path(__file__).parents[3]
SMI = "| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0     |"
GOOD = Facts(
    torch_cuda="13.0", driver_cuda="13.0", gpus=(("NVIDIA H100 80GB HBM3", 81_559, 81_000),), nvcc="13.0",
    toolkit="/usr/local/cuda", lacks=(), versions={"flashinfer-python": "0.7.2.post1"}, nixl_cuda=("12", "13"),
    has_compiler=True,
)  # fmt: skip


def trial() -> str:
    return "flashinfer the fastest that runs here"


def levels(facts: Facts, told: Callable[[], str | None] = trial) -> dict[str, Level]:
    """Of what is not ok."""
    found = list(doctor_gpu.findings(facts, told))
    assert all(bool(each.advice) == (each.level is not Level.OK) for each in found)
    return {each.check: each.level for each in found if each.level is not Level.OK}


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"torch_cuda": ""}, "torch build"),
        ({"driver_cuda": ""}, "driver"),
        ({"driver_cuda": "12.8"}, "driver"),
        ({"nvcc": ""}, "nvcc"),
        ({"nvcc": "12.8"}, "nvcc"),
        ({"lacks": ("libcudart.so",)}, "toolkit"),
        ({"versions": {}}, "FlashInfer"),
        ({"versions": {"flashinfer-python": "0.7.2", "flashinfer-jit-cache": "0.6.13+cu130"}}, "jit-cache"),
        ({"nixl_cuda": ("12",)}, "NIXL"),
        ({"has_compiler": False}, "C compiler"),
    ],
    ids=str,
)
def test_each_thing_that_is_missing_is_one_fault(change: dict[str, Any], check: str) -> None:
    assert levels(replace(GOOD, **change)) == {check: Level.FAULT}


def test_nothing_is_wrong_where_all_is_there_or_kernels_were_built_before() -> None:
    """A driver may run a newer CUDA than torch's."""
    built = {"flashinfer-python": "0.7.2", "flashinfer-jit-cache": "0.7.2+cu130"}
    for facts in (GOOD, replace(GOOD, driver_cuda="14.1"), replace(GOOD, nvcc="", versions=built)):
        assert levels(facts) == {}


def test_a_trial_that_takes_another_backend_or_fails_is_a_fault_and_a_gpu_in_use_a_warning() -> None:
    assert levels(GOOD, lambda: "triton since flashinfer failed in a trial step") == {"attention": Level.FAULT}
    assert levels(GOOD, lambda: None) == {"attention": Level.FAULT}
    assert levels(replace(GOOD, gpus=(("a GPU", 80_000, 71_000),))) == {"GPU 0": Level.WARNING}


def test_without_a_gpu_no_trial_runs() -> None:
    def never() -> str:
        raise AssertionError("nothing runs without a GPU")

    assert levels(replace(GOOD, gpus=(), driver_cuda=""), never) == {"driver": Level.FAULT}


def test_facts_are_read_from_what_commands_print(tmp_path: Path) -> None:
    """A toolkit that has nvcc and nothing else, in CUDA_HOME; two GPUs."""
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("")
    answers = {
        "nvidia-smi": SMI,
        "nvidia-smi --query-gpu=name,memory.total,memory.free --format=csv,noheader,nounits":
            "NVIDIA H100 80GB HBM3, 81559, 81006\nNVIDIA H100 80GB HBM3, 81559, 12\n",
        f"{nvcc} --version": "Cuda compilation tools, release 13.0, V13.0.88",
    }  # fmt: skip
    environment = {"CUDA_HOME": str(tmp_path), "PATH": ""}
    facts = doctor_gpu.measure(lambda command, _: answers.get(" ".join(command)), environment)
    assert (facts.driver_cuda, facts.nvcc, facts.toolkit) == ("13.0", "13.0", str(tmp_path))
    assert facts.gpus == (("NVIDIA H100 80GB HBM3", 81559, 81006), ("NVIDIA H100 80GB HBM3", 81559, 12))
    assert facts.lacks == ("libcudart.so", *doctor_gpu.HEADERS)
    for name in facts.lacks:
        place = tmp_path / ("lib64" if name.endswith(".so") else "include/cccl") / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    assert doctor_gpu.measure(lambda command, _: None, environment).lacks == ()
    assert doctor_gpu.measure(lambda command, _: None, environment).gpus == ()


def test_each_wait_for_a_server_on_a_gpu_ends_when_it_does() -> None:
    """The loops of docs/log/2026-11-29-gpu-by-hand.md, with a server that has ended and a port at which nobody is."""
    by_hand = (ROOT / "docs/log/2026-11-29-gpu-by-hand.md").read_text()
    waits = [line.strip().replace("localhost:8000", "localhost:9") for line in by_hand.splitlines() if "/ready" in line]
    assert len(waits) == 2
    assert "until" not in by_hand
    for wait in waits:
        script = f"true & server=$!; wait $server; {wait.replace('tail -40', 'echo ended:')}"
        told = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
        assert told.stdout.startswith("ended:")


def test_this_machine_without_a_driver_is_told_so_and_the_exit_status_is_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    found = list(doctor_gpu.examine(lambda command, _: None, {"PATH": ""}))
    assert doctor.report(found, as_json=False) == 1
    assert "fault    driver           nvidia-smi shows none" in capsys.readouterr().out
