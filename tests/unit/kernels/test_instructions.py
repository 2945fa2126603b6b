"""MANTA_CPU holds kernels, PyTorch and its libraries to an instruction set: CI's AVX-512 machine tests AVX2 too."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import llvmlite.binding
import pytest
import torch
from numba.core import config

from replicas.kernels import instructions
from replicas.kernels.simd import compiled_for, compiles_for, instruction_set
from tests.under_avx2 import ARITHMETIC

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import torch
import torch.nn.functional as F
from replicas.kernels import elementwise, simd, tiles
from replicas.kernels.int8_tiles import cpu_has_vnni

assert tiles.MANY_REGISTERS == ("avx512" in simd.instruction_set()) and not cpu_has_vnni()
assert elementwise.argmax_rows.address
assembly = elementwise.argmax_rows._compiled._library.get_asm_str()
x, weight = torch.ones(64, 256), torch.ones(256, 256)
assert F.linear(x, weight).eq(256).all()
print(simd.instruction_set(), torch.backends.cpu.get_cpu_capability(), "zmm" in assembly, "ymm" in assembly)
"""


def run(program: str, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    known = {name for each in instructions.SETS.values() for name in each.variables}
    kept = {name: value for name, value in os.environ.items() if name not in known}
    environment = kept | {"NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, *program.split()] if program.startswith("-m") else [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("name", "said"), [("avx2", "avx2 AVX2 False True"), ("avx512", "avx512 AVX512 True")])
def test_kernels_and_pytorch_can_be_held_to_an_instruction_set(name: str, said: str, tmp_path: Path) -> None:
    """Registers of 256 or 512 bits in the code; kernels are kept on disk by CPU name."""
    if name not in instructions.allowed():
        pytest.skip(f"this CPU cannot run {name}")
    done = run(PROGRAM, tmp_path, MANTA_CPU=name)
    assert done.stdout.startswith(said), done.stderr


@pytest.mark.skipif(not os.environ.get("MANTA_CPU"), reason="this run is not held to anything")
def test_these_tests_are_held_to_it() -> None:
    wanted = os.environ["MANTA_CPU"].replace("native", instructions.allowed()[-2])
    assert instruction_set().startswith(wanted)
    assert torch.backends.cpu.get_cpu_capability().lower() == wanted


def test_what_a_process_is_held_to_its_children_are_too() -> None:
    """Ray's workers and peers inherit the environment; those of peers know no MANTA_CPU."""
    name = instructions.allowed()[0]
    held = {} if name == instructions.NATIVE else dict(instructions.SETS[name].variables)
    environment = {"MANTA_CPU": name, "ATEN_CPU_CAPABILITY": "default", "HOME": "/root"}
    instructions.hold(environment)
    assert environment == {"MANTA_CPU": name, "HOME": "/root"} | held
    environment["MANTA_CPU"] = "native"
    instructions.hold(environment)
    assert environment == {"MANTA_CPU": "native", "HOME": "/root"}


def test_without_a_name_the_environment_stays_as_it_is() -> None:
    environment = {"NUMBA_CPU_NAME": "haswell"}
    instructions.hold(environment)
    assert environment == {"NUMBA_CPU_NAME": "haswell"}


@pytest.mark.parametrize(
    ("name", "why"), [("sse9", "is unknown"), ("avx512", rf"cannot run on this CPU \({platform.machine()}\)")]
)
def test_a_name_that_cannot_be_is_refused_with_what_can(name: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "allowed", lambda: ["avx2", "native"])
    with pytest.raises(ValueError, match=rf"MANTA_CPU={name} {why}; allowed here: avx2, native"):
        instructions.hold({"MANTA_CPU": name})


@pytest.mark.parametrize("program", ["-m deployments check", "-m benchmarks kernels"])
def test_programs_refuse_it_in_one_line(program: str, tmp_path: Path) -> None:
    done = run(program, tmp_path, MANTA_CPU="sse9")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"MANTA_CPU=sse9 is unknown; allowed here: {', '.join(instructions.allowed())}\n"


def test_no_cpu_but_x86_64_has_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert instructions.allowed() == ["native"]


def test_what_is_run_so_is_there() -> None:
    assert [name for name in ARITHMETIC if not (ROOT / name).exists()] == []


def test_kernels_are_compiled_for_what_the_environment_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM would end the process at an instruction that is missing or forbidden."""
    monkeypatch.setattr(config, "CPU_FEATURES", "+fma,-avx512f")
    assert not compiles_for("avx512f")
    assert compiled_for().endswith(" +fma,-avx512f")
    assert not compiles_for("a-feature-of-no-cpu")
    assert instruction_set() == platform.machine()


def test_a_new_entry_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    feature = next(filter(compiles_for, llvmlite.binding.get_host_cpu_features()))  # not one that MANTA_CPU forbids
    variables = {"NUMBA_CPU_NAME": "toy", "NUMBA_CPU_FEATURES": f"+{feature}"}
    toy = instructions.InstructionSet(machines=(platform.machine(),), feature=feature, variables=variables)
    monkeypatch.setitem(instructions.SETS, "toy", toy)
    environment = {"MANTA_CPU": "toy"}
    instructions.hold(environment)
    assert environment == {"MANTA_CPU": "toy", **variables}
    assert instruction_set().startswith("toy")  # the newest entry is the widest
