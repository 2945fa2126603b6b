"""Kernels run where nothing can be kept on disk, and say so."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from numba.core.ccallback import CFunc

from replicas.kernels import elementwise, team
from replicas.kernels.team import Kernel


def test_without_a_folder_for_the_cache_a_kernel_is_compiled_and_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locator(compiled: CFunc) -> None:
        raise RuntimeError("cannot cache function 'rms_norm_rows': no locator available")

    monkeypatch.setattr(CFunc, "enable_caching", no_locator)
    before = elementwise.silu_mul_rows
    monkeypatch.setattr(elementwise, "silu_mul_rows", Kernel(before.function, before.arguments))
    with caplog.at_level(logging.WARNING):
        got = elementwise.silu_mul(torch.ones(1, 32))
    assert got[0, 0].item() == pytest.approx(0.731059)  # 1 / (1 + 1 / e)
    assert "set NUMBA_CACHE_DIR to a folder that can be written" in caplog.text


def test_a_folder_that_is_named_receives_the_code(tmp_path: Path) -> None:
    program = "from replicas.kernels import elementwise\nelementwise.silu_mul_rows.address"
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)})
    assert [file.suffix for file in sorted(tmp_path.rglob("elementwise*"))] == [".nbc", ".nbi"]


def test_code_that_was_kept_is_of_the_same_sources_or_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's own file is not all that it is made of: what it calls lies in others."""

    def hits() -> int:
        kernel = Kernel(elementwise.silu_mul_rows.function, elementwise.silu_mul_rows.arguments)
        assert kernel.address
        return int(kernel._compiled.cache_hits)

    hits()
    assert hits() == 1
    with monkeypatch.context() as other:
        other.setattr(team, "_sources", lambda: "of another kernels/simd.py")
        assert hits() == 0
        assert hits() == 1
    assert hits() == 0
