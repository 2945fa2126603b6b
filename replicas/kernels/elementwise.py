"""The operations between the matrix products, in one pass each, in fp32: RMS norm, SiLU times up and gpt-oss's gate,
rotary embedding, argmax.

Owns:      the kernels, as functions of tensors and as stages of a program (`VectorStage`), and how tokens are shared
           among threads: a few floats are not worth a second one.
Never:     as functions: changes its inputs; results are fresh tensors.
Invariant: a token's result does not depend on the other tokens. `argmax` gives torch.argmax's result, the first of
           equals, in a fifth to a fifteenth of its time; rows with NaN or inf, or all -inf, go to PyTorch itself.
Thread:    any.
"""

import ctypes
import math
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from replicas.kernels.simd import (
    W,
    add,
    at_least,
    at_most,
    div,
    evens,
    exp,
    fma,
    hmax,
    hsum,
    load,
    load1,
    maximum,
    mul,
    odds,
    splat,
    store,
    store_i64,
    sub,
)
from replicas.kernels.team import Kernel, inlined, kernel, struct, team_for, team_size, thread_id

FLOATS_OF_TEAM = 32 << 10  # fewer are one thread's work: they take ~5 us

# x and out are [tokens, heads, size]: heads of a token lie one behind the other, tokens a stride (bytes) apart
VectorArgs = struct(
    "VectorArgs", "x x_stride out out_stride tokens heads size weight cos sin term", floats="eps limit alpha"
)


@kernel(VectorArgs)
def rms_norm_rows(pointer: Any) -> None:
    """out may be x. ``term`` != 0: [tokens, size] that is added to x, in x, before (one head)."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    num_bytes = a.size * 4
    for t in range(a.tokens * me // threads, a.tokens * (me + 1) // threads):
        for h in range(a.heads):
            x, out = a.x + t * a.x_stride + h * num_bytes, a.out + t * a.out_stride + h * num_bytes
            if a.term:
                _add_row(x, a.term + t * num_bytes, num_bytes)
            squares = splat(0.0)
            for i in range(0, num_bytes, 4 * W):
                value = load(x + i)
                squares = fma(value, value, squares)
            factor = splat(1.0 / math.sqrt(hsum(squares) / a.size + a.eps))
            for i in range(0, num_bytes, 4 * W):
                store(out + i, mul(mul(load(x + i), factor), load(a.weight + i)))


@inlined
def _add_row(x: int, term: int, num_bytes: int) -> None:
    for i in range(0, num_bytes, 4 * W):
        store(x + i, add(load(x + i), load(term + i)))


@kernel(VectorArgs)
def silu_mul_rows(pointer: Any) -> None:
    """x is [tokens, 2, size]: gate, then up."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    for t in range(a.tokens * me // threads, a.tokens * (me + 1) // threads):
        gate, out = a.x + t * a.x_stride, a.out + t * a.out_stride
        for i in range(0, a.size * 4, 4 * W):
            value = load(gate + i)
            sigmoid = div(splat(1.0), add(splat(1.0), exp(mul(value, splat(-1.0)))))
            store(out + i, mul(mul(value, sigmoid), load(gate + a.size * 4 + i)))


@kernel(VectorArgs)
def clamped_swiglu_rows(pointer: Any) -> None:
    """x is [tokens, size, 2]: gate and up of each output side by side."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    most, least, one = splat(a.limit), splat(-a.limit), splat(1.0)
    for t in range(a.tokens * me // threads, a.tokens * (me + 1) // threads):
        row, out = a.x + t * a.x_stride, a.out + t * a.out_stride
        for i in range(0, a.size * 4, 4 * W):
            first, second = load(row + 2 * i), load(row + 2 * i + 4 * W)
            gate = at_most(evens(first, second), most)
            up = at_least(at_most(odds(first, second), most), least)
            sigmoid = div(one, add(one, exp(mul(gate, splat(-a.alpha)))))
            store(out + i, mul(add(up, one), mul(gate, sigmoid)))


@kernel(VectorArgs)
def rotate_rows(pointer: Any) -> None:
    """out = x * cos + (x's halves swapped) * sin, with one row of cos and sin a token; out may be x."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    half = a.size * 2  # bytes
    for t in range(a.tokens * me // threads, a.tokens * (me + 1) // threads):
        cos, sin = a.cos + t * a.size * 4, a.sin + t * a.size * 4
        for h in range(a.heads):
            x, out = a.x + t * a.x_stride + h * a.size * 4, a.out + t * a.out_stride + h * a.size * 4
            for i in range(0, half, 4 * W):
                first, second = load(x + i), load(x + half + i)
                store(out + i, fma(first, load(cos + i), mul(second, load(sin + i))))
                store(out + half + i, fma(second, load(cos + half + i), mul(first, load(sin + half + i))))


class VectorStage:
    """A kernel of this file as a stage of a program, on rows of tensors that the caller keeps."""

    def __init__(self, function: Kernel, x: Tensor, out: Tensor, *, heads: int = 1, size: int, **more: float) -> None:
        self._function = function
        self._arguments = VectorArgs(
            x=x.data_ptr(),
            x_stride=4 * x.stride(0),
            out=out.data_ptr(),
            out_stride=4 * out.stride(0),
            heads=heads,
            size=size,
            **more,
        )

    def prepare(self, num_rows: int, counter: int) -> tuple[Kernel, ctypes.Structure]:
        self._arguments.tokens = num_rows
        return self._function, self._arguments


def serves(x: Tensor, *, halves: bool = False) -> bool:
    """Tell whether the kernels can read x [T, size] or [T, heads, size], or its two ``halves`` each by itself."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.shape[-1] % (2 * W if halves else W) == 0
        and x.stride(-1) == 1
        and (x.dim() == 2 or (x.dim() == 3 and x.stride(1) == x.shape[2]))
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x [T, size] or [T, heads, size] by its root mean square, times weight [size] (contiguous)."""
    out = torch.empty(x.shape)
    _run(rms_norm_rows, x, out, weight=weight.data_ptr(), eps=eps)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(first half) * second half: [T, 2 size] -> [T, size]."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _run(silu_mul_rows, gate_up, out)
    return out


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """Compute (up + 1) * gate * sigmoid(alpha * gate), gate at most ``limit`` and up within it: [T, 2 size], gate and
    up in turn -> [T, size]."""
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _run(clamped_swiglu_rows, gate_up, out, limit=limit, alpha=alpha)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D] by cos, sin [T, 1, D] (contiguous, sin's first half negated)."""
    out = torch.empty(x.shape)
    _run(rotate_rows, x, out, cos=cos.data_ptr(), sin=sin.data_ptr())
    return out


def _run(function: Kernel, x: Tensor, out: Tensor, **more: float) -> None:
    heads = out.shape[1] if out.dim() == 3 else 1
    stage = VectorStage(function, x, out, heads=heads, size=out.shape[-1], **more)
    team_for(out.numel(), FLOATS_OF_TEAM).run(*stage.prepare(x.shape[0], 0))


BLOCK = 1024  # floats per comparison with the largest so far
SEARCHED_BY_TEAM = 64 << 10  # fewer are searched by one thread
LOWEST = -3.4028234663852886e38  # of a float: what -inf, of a token that is masked out, counts as
ArgmaxArgs = struct("ArgmaxArgs", "x x_stride out rows size")


@kernel(ArgmaxArgs)
def argmax_rows(pointer: Any) -> None:
    """out [rows] int64; -1 where the row holds NaN or inf, or nothing above LOWEST."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    for r in range(a.rows * me // threads, a.rows * (me + 1) // threads):
        row = a.x + r * a.x_stride
        lowest, zeros = splat(np.float32(LOWEST)), splat(0.0)
        best, place = hmax(at_least(load(row), lowest)), 0
        for start in range(0, a.size, BLOCK):
            top = lowest
            for i in range(start, min(start + BLOCK, a.size), W):
                value = at_least(load(row + 4 * i), lowest)
                top = maximum(top, value)
                zeros = add(zeros, sub(value, value))
            peak = hmax(top)
            if peak > best:
                best, place = peak, start
        if hsum(zeros) == 0.0 and best > np.float32(LOWEST):
            while load1(row + 4 * place) != best:
                place += 1
        else:
            place = -1
        store_i64(a.out + 8 * r, place)


def argmax(x: Tensor) -> Tensor:
    """Find the largest of each row as torch.argmax does: [S, V] -> [S] int64."""
    rows, size = x.shape
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.stride(1) != 1 or size % W or not rows:
        return torch.argmax(x, dim=-1)
    out = torch.empty(rows, dtype=torch.int64)
    arguments = ArgmaxArgs(x=x.data_ptr(), x_stride=4 * x.stride(0), out=out.data_ptr(), rows=rows, size=size)
    team_for(x.numel() if rows > 1 else 0, SEARCHED_BY_TEAM).run(argmax_rows, arguments)  # a row is one thread's
    odd = out < 0
    if bool(odd.any()):
        out[odd] = torch.argmax(x[odd], dim=-1)
    return out
