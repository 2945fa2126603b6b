"""Kernels are compiled once and kept, by one process of several; where nothing can be kept on disk they say so."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import filelock
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


def test_of_two_processes_that_want_a_kernel_one_compiles_it(tmp_path: Path) -> None:
    """Both have what they need for it before either may begin."""
    program = (
        "import sys; from replicas.kernels.elementwise import argmax_rows as kernel\n"
        "print(flush=True); sys.stdin.readline(); kernel.address; print(kernel._compiled.cache_hits)"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert sorted(process.communicate()[0] for process in processes) == ["0\n", "1\n"]
    assert [file.suffix for file in sorted(tmp_path.rglob("elementwise*"))] == [".nbc", ".nbi"]


def test_a_process_that_hangs_while_it_compiles_stops_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(team, "COMPILING_S", 0.01)
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    kernel = Kernel(elementwise.silu_mul_rows.function, elementwise.silu_mul_rows.arguments)
    assert kernel.address
    [folder] = {file.parent for file in tmp_path.rglob("*.nbi")}
    with filelock.FileLock(folder / ".silu_mul_rows.lock"):
        again = Kernel(elementwise.silu_mul_rows.function, elementwise.silu_mul_rows.arguments)
        assert again.address
    assert (kernel._compiled.cache_hits, again._compiled.cache_hits) == (0, 1)
