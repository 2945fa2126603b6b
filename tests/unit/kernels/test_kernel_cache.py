"""Kernels run where nothing can be kept on disk, and say so."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from replicas.kernels import elementwise
from replicas.kernels.team import Kernel


def test_without_a_folder_for_the_cache_a_kernel_is_compiled_and_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_kernel = numba.cfunc

    def no_locator(signature: Any, *, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function 'rms_norm_rows': no locator available")
        return compile_kernel(signature, **options)

    monkeypatch.setattr(numba, "cfunc", no_locator)
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
