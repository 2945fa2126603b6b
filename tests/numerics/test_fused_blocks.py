"""A step of one program between two attention calls gives the bits of the layers called one by one."""

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from replicas.kernels.linear import FEW_ROWS
from tests.numerics import tiny
from tests.numerics.paged import open_model

SERVED = {"head_dim": 32, "intermediate_size": 80}  # sizes that the kernels take
PROMPTS = [*tiny.PROMPTS, [(7 * i) % tiny.VOCAB for i in range(FEW_ROWS + 26)]]


@pytest.fixture(params=["llama-tied-biased", "mistral", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tiny.save(request.param, tmp_path, **SERVED)
    return tmp_path


@pytest.mark.parametrize("chunk", [FEW_ROWS - 1, 3])
def test_programs_and_layers_give_the_same_bits(folder: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 4 to 12 tokens and of 36 to 189, so that buffers grow and each kind of product runs."""
    monkeypatch.setattr("replicas.layers.matmul.blas_is_faster", lambda num_threads: False)
    fused, layers = open_model(folder, attention="cpu"), open_model(folder, attention="cpu")
    assert fused.model.fused is not None
    assert fused.model.fused.max_rows > 0
    layers.model.fused = None
    for ours, theirs in zip(fused.prefill(PROMPTS, chunk=chunk), layers.prefill(PROMPTS, chunk=chunk), strict=True):
        assert torch.equal(ours, theirs)
    assert len(fused.model.fused.programs) == 3 + 1  # blocks, and what follows the last attention


def test_what_attention_returns_lives_until_it_has_been_read(tmp_path: Path) -> None:
    """A backend may return a fresh tensor (torch_native does): here its memory turns to NaN when nobody holds it."""
    tiny.save("llama", tmp_path, **SERVED)
    fused, layers = open_model(tmp_path, attention="cpu"), open_model(tmp_path, attention="cpu")
    assert fused.model.fused is not None
    layers.model.fused = None
    attend = fused.model.fused._attend

    def fleeting(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        memory = attend(layer, q, k, v).numpy().copy()
        result = torch.from_numpy(memory)
        weakref.finalize(result, memory.fill, np.nan)
        return result

    fused.model.fused._attend = fleeting
    for ours, theirs in zip(fused.prefill(PROMPTS, chunk=7), layers.prefill(PROMPTS, chunk=7), strict=True):
        assert torch.equal(ours, theirs)


def test_where_blas_is_faster_it_takes_the_steps_of_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicas.layers.matmul.blas_is_faster", lambda num_threads: True)
    tiny.save("llama", tmp_path, **SERVED)
    fused = open_model(tmp_path, attention="cpu").model.fused
    assert fused is not None
    assert fused.max_rows == FEW_ROWS - 1


def test_sizes_that_the_kernels_do_not_serve_leave_the_layers(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)  # heads of 16: a half of one is no vector
    fused = open_model(tmp_path, attention="cpu").model.fused
    assert fused is not None
    assert fused.max_rows < 1
