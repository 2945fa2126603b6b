"""Norm, SiLU and rope kernels against PyTorch, the vector exp against numpy, and how a team shares tasks."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numba import carray

from replicas.kernels import elementwise
from replicas.kernels.register_tiles import transpose16
from replicas.kernels.simd import exp, load, store, take_next
from replicas.kernels.team import Team, kernel, struct

ProbeArgs = struct("ProbeArgs", "x out n counter")


@kernel(ProbeArgs)
def exp_all(pointer: Any) -> None:
    a = carray(pointer, 1)[0]
    i = take_next(a.counter)
    while i < a.n // 16:
        store(a.out + 64 * i, exp(load(a.x + 64 * i)))
        i = take_next(a.counter)


@kernel(ProbeArgs)
def transpose(pointer: Any) -> None:
    a = carray(pointer, 1)[0]
    transpose16(a.x, 64, a.out, 64)


@pytest.mark.parametrize("threads", [1, 2])
def test_vector_exp_is_exact_to_two_units_in_the_last_place(threads: int) -> None:
    x = np.linspace(-87.0, 88.0, 16 * 5000).astype(np.float32)
    out, counter = np.zeros_like(x), np.zeros(1, np.int64)
    arguments = ProbeArgs(x=x.ctypes.data, out=out.ctypes.data, n=len(x), counter=counter.ctypes.data)
    Team(threads).run(exp_all, arguments)
    exact = np.exp(x.astype(np.float64))
    assert float(np.max(np.abs(out - exact) / exact)) < 2.4e-7
    assert counter[0] == 5000 + threads  # each thread asked once too often, and no task ran twice


def test_vector_exp_neither_overflows_nor_becomes_nan_outside_its_range() -> None:
    x = np.tile(np.array([-1e30, -100.0, 100.0, 1e30], np.float32), 4)
    out, counter = np.zeros_like(x), np.zeros(1, np.int64)
    Team(1).run(exp_all, ProbeArgs(x=x.ctypes.data, out=out.ctypes.data, n=16, counter=counter.ctypes.data))
    assert np.isfinite(out).all()
    assert float(out[:2].max()) < 1.3e-38
    assert float(out[2:4].min()) > 1e38


@pytest.mark.parametrize("tokens", [1, 9, 700])
def test_the_clamped_gate_is_that_of_gpt_oss_and_what_is_no_number_stays_none(tokens: int) -> None:
    """Gate and up in turn, beyond the limit of 7 on both sides; 700 tokens are shared by threads."""
    gate_up = 9 * torch.randn(tokens, 128)
    gate_up[0, 3], gate_up[0, 8] = float("nan"), float("nan")  # up of the second output, gate of the fifth
    gate, up = gate_up[:, ::2].clamp(max=7.0), gate_up[:, 1::2].clamp(-7.0, 7.0)
    wanted = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    got = elementwise.clamped_swiglu(gate_up, 7.0, 1.702)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert got[0].isnan().nonzero().flatten().tolist() == [1, 4]
    assert torch.equal(elementwise.clamped_swiglu(gate_up[-1:], 7.0, 1.702), got[-1:]) or tokens == 1


def test_a_block_of_16_by_16_is_transposed() -> None:
    x = np.arange(256, dtype=np.float32).reshape(16, 16)
    out = np.zeros_like(x)
    Team(1).run(transpose, ProbeArgs(x=x.ctypes.data, out=out.ctypes.data))
    assert np.array_equal(out, x.T)


def test_a_team_of_no_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="num_threads = 0; allowed: 1 or more"):
        Team(0)


@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_rms_norm_equals_pytorch_on_rows_and_on_heads_of_a_fused_product(tokens: int) -> None:
    x, weight = torch.randn(tokens, 576) * 3, torch.randn(576)
    assert torch.allclose(elementwise.rms_norm(x, weight, 1e-5), F.rms_norm(x, (576,), weight, 1e-5), atol=1e-5)
    heads = torch.randn(tokens, 15, 64)[:, 9:12]  # [T, 3, 64], strided
    assert elementwise.serves(heads)
    got = elementwise.rms_norm(heads, weight[:64], 1e-5)
    assert torch.allclose(got, F.rms_norm(heads, (64,), weight[:64], 1e-5), atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_silu_mul_equals_pytorch(tokens: int) -> None:
    x = torch.randn(tokens, 2 * 1536) * 5
    gate, up = x.chunk(2, dim=-1)
    assert torch.allclose(elementwise.silu_mul(x), F.silu(gate) * up, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_rotate_equals_its_formula(tokens: int) -> None:
    x = torch.randn(tokens, 15, 64)[:, :9]
    cos, sin = torch.randn(tokens, 1, 64), torch.randn(tokens, 1, 64)
    assert torch.allclose(elementwise.rotate(x, cos, sin), x * cos + x.roll(32, dims=-1) * sin, atol=1e-5)


def test_kernels_say_which_tensors_are_not_for_them() -> None:
    assert elementwise.serves(torch.zeros(2, 32))
    assert not elementwise.serves(torch.zeros(2, 24))
    assert not elementwise.serves(torch.zeros(2, 16), halves=True)
    assert not elementwise.serves(torch.zeros(2, 32, dtype=torch.bfloat16))
    assert not elementwise.serves(torch.zeros(32, 2).T)
    assert not elementwise.serves(torch.zeros(2, 16, 3).transpose(1, 2))
