"""Gated delta rule and causal convolution on the states of a packed step's requests, token by token in fp32.

Owns:      the two kernels: a state is read from one place of its pool and written to another.
Never:     chooses places (memory/state_pool.py does), or splits a request over threads: they share heads and channels.
Invariant: what a token gives, and the state behind it, have one value whatever the prompt's chunks and the step's other
           requests: sums run over the rows of a state in order, and over the convolution's inputs from the oldest.
Thread:    any.
Source:    gated delta rule: Yang et al. 2024 (arXiv:2412.06464), equation 10; with a decay of each row: Kimi Team 2025
           (arXiv:2510.26692).
"""

import math
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from replicas.kernels.simd import (
    W,
    add,
    div,
    exp,
    fma,
    hsum,
    load,
    load1,
    load_i64,
    mul,
    splat,
    store,
    sub,
    take_next,
)
from replicas.kernels.team import inlined, kernel, struct, team, team_size, thread_id

TILE = 2 * W  # columns of a state that a thread takes at once: with four sums of them, what registers hold
VECTOR = 4 * W  # bytes
EPS = 1e-6  # that Transformers and FLA add to squares of queries and keys

# rows are a stride (bytes) apart; segments: [N, 4] int64, start, end, place that is read (-1: none), place written
ConvArgs = struct("ConvArgs", "x x_stride out weight bias states place_bytes segments num_segments channels taps silu")
DeltaArgs = struct(
    "DeltaArgs",
    "q q_stride k k_stride v v_stride decay decay_size beta out states place_bytes segments num_segments heads k_heads "
    "size v_size counter",
)


@kernel(ConvArgs)
def convolve_rows(pointer: Any) -> None:
    """x, out [T, channels]; weight [taps, channels]; a state is the last ``taps`` inputs [taps, channels]."""
    a = carray(pointer, 1)[0]
    vectors = a.channels // W
    me, threads, pitch = thread_id(), team_size(), 4 * a.channels
    low, high = VECTOR * (vectors * me // threads), VECTOR * (vectors * (me + 1) // threads)
    for n in range(a.num_segments):
        at = a.segments + 32 * n
        start, end, read = load_i64(at), load_i64(at + 8), load_i64(at + 16)
        old, new = a.states + read * a.place_bytes, a.states + load_i64(at + 24) * a.place_bytes
        for t in range(start, end):
            for c in range(low, high, VECTOR):
                total = load(a.bias + c) if a.bias else splat(0.0)
                for tap in range(a.taps):
                    source = t - a.taps + 1 + tap
                    if source >= start:
                        total = fma(load(a.x + source * a.x_stride + c), load(a.weight + tap * pitch + c), total)
                    elif read >= 0:
                        row = old + (source - start + a.taps) * pitch
                        total = fma(load(row + c), load(a.weight + tap * pitch + c), total)
                if a.silu:
                    total = div(total, add(splat(1.0), exp(mul(total, splat(-1.0)))))
                store(a.out + t * pitch + c, total)
        for tap in range(a.taps):
            source = end - a.taps + tap
            for c in range(low, high, VECTOR):
                value = splat(0.0)
                if source >= start:
                    value = load(a.x + source * a.x_stride + c)
                elif read >= 0:
                    value = load(old + (source - start + a.taps) * pitch + c)
                store(new + tap * pitch + c, value)


@kernel(DeltaArgs)
def delta_rows(pointer: Any) -> None:
    """q, k [T, k_heads, size], v and out [T, heads, v_size], decay [T, heads, decay_size], beta [T, heads]; a state is
    [heads, size, v_size]. Threads take tiles of a head's columns, which do not depend on each other."""
    a = carray(pointer, 1)[0]
    tiles = a.v_size // TILE
    task = take_next(a.counter)
    while task < a.heads * tiles:
        for n in range(a.num_segments):
            _advance(a, a.segments + 32 * n, task // tiles, task % tiles * 2 * VECTOR)
        task = take_next(a.counter)


@inlined
def _advance(a: Any, segment: int, head: int, column: int) -> None:
    """Run one segment's tokens on the columns of a head that begin at ``column`` bytes.

    With S the state before a token, G its decay of each row and d = beta (v - S'Gk): the state behind it is G S + k d',
    and it gives S'Gq + (q'k) d. So both sums over S run in the pass that brings S up to the token before.
    """
    start, end, read = load_i64(segment), load_i64(segment + 8), load_i64(segment + 16)
    pitch, num_rows = 4 * a.v_size, a.size
    place = (head * num_rows * pitch) + column
    new = a.states + load_i64(segment + 24) * a.place_bytes + place
    old = new if read < 0 else a.states + read * a.place_bytes + place
    if read < 0:
        for i in range(num_rows):
            store(new + i * pitch, splat(0.0))
            store(new + i * pitch + VECTOR, splat(0.0))
    of_head, wide = 4 * (head // (a.heads // a.k_heads)) * num_rows, head * pitch + column
    fade_step = 4 if a.decay_size > 1 else 0  # from a row to the next
    before, faded, d0, d1 = a.k, a.decay, splat(0.0), splat(0.0)
    for t in range(start, end):
        q, k = a.q + t * a.q_stride + of_head, a.k + t * a.k_stride + of_head
        fade = a.decay + 4 * (t * a.heads + head) * a.decay_size
        m0, m1, r0, r1 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
        if t == start:
            for i in range(num_rows):
                s0, s1 = load(old + i * pitch), load(old + i * pitch + VECTOR)
                g = load1(fade + i * fade_step)
                key, query = splat(load1(k + 4 * i) * g), splat(load1(q + 4 * i) * g)
                m0, m1, r0, r1 = fma(s0, key, m0), fma(s1, key, m1), fma(s0, query, r0), fma(s1, query, r1)
        else:
            for i in range(num_rows):
                key, decay = splat(load1(before + 4 * i)), splat(load1(faded + i * fade_step))
                s0 = fma(key, d0, mul(load(old + i * pitch), decay))
                s1 = fma(key, d1, mul(load(old + i * pitch + VECTOR), decay))
                store(new + i * pitch, s0)
                store(new + i * pitch + VECTOR, s1)
                g = load1(fade + i * fade_step)
                key, query = splat(load1(k + 4 * i) * g), splat(load1(q + 4 * i) * g)
                m0, m1, r0, r1 = fma(s0, key, m0), fma(s1, key, m1), fma(s0, query, r0), fma(s1, query, r1)
            old = new
        kk, qq, qk = splat(0.0), splat(0.0), splat(0.0)
        for i in range(0, 4 * num_rows, VECTOR):
            x, y = load(k + i), load(q + i)
            kk, qq, qk = fma(x, x, kk), fma(y, y, qq), fma(x, y, qk)
        of_k = np.float32(1.0 / math.sqrt(hsum(kk) + EPS))
        of_q = np.float32(1.0 / math.sqrt((hsum(qq) + EPS) * num_rows))
        beta = splat(load1(a.beta + 4 * (t * a.heads + head)))
        v, out = a.v + t * a.v_stride + wide, a.out + t * a.heads * pitch + wide
        seen, given, own = splat(of_k), splat(of_q), splat(hsum(qk) * of_k * of_q)
        d0 = mul(sub(load(v), mul(m0, seen)), beta)
        d1 = mul(sub(load(v + VECTOR), mul(m1, seen)), beta)
        store(out, fma(d0, own, mul(r0, given)))
        store(out + VECTOR, fma(d1, own, mul(r1, given)))
        d0, d1, faded, before = mul(d0, seen), mul(d1, seen), fade, k
    for i in range(num_rows):
        key, decay = splat(load1(before + 4 * i)), splat(load1(faded + i * fade_step))
        store(new + i * pitch, fma(key, d0, mul(load(old + i * pitch), decay)))
        store(new + i * pitch + VECTOR, fma(key, d1, mul(load(old + i * pitch + VECTOR), decay)))


def serves(channels: int, size: int, v_size: int) -> bool:
    """Tell whether the kernels have vectors for a convolution's channels, and a head's rows and columns."""
    return channels % W == size % W == v_size % TILE == 0


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, segments: Tensor, *, silu: bool) -> Tensor:
    """Convolve x [T, C], C in a row, by weight [K, C] along each request's tokens; with ``silu``, take it of the sums.

    Args: states: [places, K, C], the last K inputs; segments: [N, 4]. Both contiguous. Returns: [T, C].
    """
    out = torch.empty(x.shape)
    arguments = ConvArgs(
        x=x.data_ptr(), x_stride=4 * x.stride(0), out=out.data_ptr(), weight=weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(), states=states.data_ptr(), place_bytes=4 * states.stride(0),
        segments=segments.data_ptr(), num_segments=len(segments), channels=x.shape[1], taps=len(weight), silu=silu,
    )  # fmt: skip
    team(torch.get_num_threads()).run(convolve_rows, arguments)
    return out


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor, segments: Tensor
) -> Tensor:
    """Run the gated delta rule along each request's tokens, queries and keys divided by their lengths.

    Args:    q, k: [T, K, D]; v: [T, H, Dv], H a multiple of K; a token's heads lie in a row.
             decay: [T, H], or [T, H, D] of each row (KDA), as a factor; beta: [T, H].
             states: [places, H, D, Dv]; segments: [N, 4]. All contiguous.
    Returns: [T, H, Dv].
    """
    out, counter = torch.empty(v.shape), torch.zeros(1, dtype=torch.int64)
    arguments = DeltaArgs(
        q=q.data_ptr(), q_stride=4 * q.stride(0), k=k.data_ptr(), k_stride=4 * k.stride(0), v=v.data_ptr(),
        v_stride=4 * v.stride(0), decay=decay.data_ptr(), decay_size=decay[0, 0].numel(), beta=beta.data_ptr(),
        out=out.data_ptr(), states=states.data_ptr(), place_bytes=4 * states.stride(0), segments=segments.data_ptr(),
        num_segments=len(segments), heads=v.shape[1], k_heads=k.shape[1], size=k.shape[2], v_size=v.shape[2],
        counter=counter.data_ptr(),
    )  # fmt: skip
    team(torch.get_num_threads()).run(delta_rows, arguments)
    return out
