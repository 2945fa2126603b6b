"""Every library can be held to AVX2, as `python -m tests.under_avx2` does: CI's AVX-512 machine tests both."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core import config

from replicas.kernels.simd import compiled_for, compiles_for
from tests.under_avx2 import ARITHMETIC, AVX2

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import torch
import torch.nn.functional as F
from replicas.kernels import elementwise, simd, tiles
from replicas.kernels.int8_tiles import cpu_has_vnni

assert simd.compiled_for() == "haswell +avx2,+fma"
assert not tiles.MANY_REGISTERS and not cpu_has_vnni()
assert torch.backends.cpu.get_cpu_capability() == "AVX2"
assert elementwise.argmax_rows.address
assembly = elementwise.argmax_rows._compiled._library.get_asm_str()
assert "ymm" in assembly and "zmm" not in assembly
x, weight = torch.ones(64, 256), torch.ones(256, 256)
assert F.linear(x, weight).eq(256).all()
print("held to AVX2")
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86-64")
def test_kernels_and_pytorch_can_be_held_to_avx2(tmp_path: Path) -> None:
    """Registers of 256 bits in the code, eight pairs of them in the tiles; kernels are kept on disk by CPU name."""
    environment = os.environ | AVX2 | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout == "held to AVX2\n", run.stderr


def test_what_is_run_so_is_there() -> None:
    assert [name for name in ARITHMETIC if not (ROOT / name).exists()] == []


def test_kernels_are_compiled_for_what_the_environment_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM would end the process at an instruction that is missing or forbidden."""
    monkeypatch.setattr(config, "CPU_FEATURES", "+fma,-avx512f")
    assert not compiles_for("avx512f")
    assert compiled_for().endswith(" +fma,-avx512f")
    assert not compiles_for("a-feature-of-no-cpu")
