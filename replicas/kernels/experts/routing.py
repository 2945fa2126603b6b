"""Which experts compute a token, from the router's logits, on a CPU.

Owns:      scores (softmax, sigmoid), the choice among groups and experts, and the weights of the chosen.
Invariant: a token's choice depends on its own logits alone, to the last bit: PyTorch's operations take another way
           through the last elements of a tensor, so that a row's scores hang on its place among others, and a choice
           between two equal experts with them. Of equals the first is chosen.
Thread:    all of the team, where there are enough logits.
Source:    DeepSeek-V2, section 2.2 (arXiv:2405.04434); DeepSeek-V3, section 2.1.2 (arXiv:2412.19437).
"""

import math
from typing import Any

import torch
from numba import carray
from torch import Tensor

from replicas.kernels.simd import load1, store1, store_i64
from replicas.kernels.team import inlined, kernel, struct, team_for, team_size, thread_id

LOGITS_OF_TEAM = 4096  # fewer are one thread's work
LOWEST = -math.inf
TINY = 1e-20  # beside a sum of weights that may be 0: sigmoids can
# scores, ranked: [tokens, experts], made here; bias: 0, or the address of [experts]; ids, weights: [tokens, top_k]
RouteArgs = struct(
    "RouteArgs",
    "logits bias scores ranked best ids weights tokens experts top_k groups top_groups two sigmoid normalize",
    floats="scaling",
)


@inlined
def highest(at: int, count: int) -> int:
    """Find the place of the first of the largest of ``count`` floats."""
    place, most = 0, load1(at)
    for i in range(1, count):
        value = load1(at + 4 * i)
        if value > most:
            place, most = i, value
    return place


@inlined
def score_row(logits: int, scores: int, count: int, sigmoid: int) -> None:
    """Compute scores [count] of logits [count]."""
    peak, total = load1(logits + 4 * highest(logits, count)), 0.0
    for i in range(0, 4 * count, 4):
        if sigmoid:
            store1(scores + i, 1.0 / (1.0 + math.exp(-load1(logits + i))))
        else:
            power = math.exp(load1(logits + i) - peak)
            store1(scores + i, power)
            total += power
    if not sigmoid:
        for i in range(0, 4 * count, 4):
            store1(scores + i, load1(scores + i) / total)


@inlined
def keep_groups(ranked: int, best: int, count: int, groups: int, top_groups: int, two: int) -> None:
    """Leave the experts of the ``top_groups`` best groups in ranked [count]. best: [2, groups] to work with."""
    size = count // groups
    for g in range(groups):
        group = ranked + 4 * g * size
        first = highest(group, size)
        score = load1(group + 4 * first)
        if two:
            second = LOWEST
            for i in range(size):
                if i != first:
                    second = max(second, load1(group + 4 * i))
            score += second
        store1(best + 4 * g, score)
        store1(best + 4 * (groups + g), 0.0)
    for _ in range(top_groups):
        g = highest(best, groups)
        store1(best + 4 * g, LOWEST)
        store1(best + 4 * (groups + g), 1.0)
    for i in range(count):
        if load1(best + 4 * (groups + i // size)) == 0.0:
            store1(ranked + 4 * i, LOWEST)


@kernel(RouteArgs)
def route_rows(pointer: Any) -> None:
    """A row of logits after the other."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    for t in range(a.tokens * me // threads, a.tokens * (me + 1) // threads):
        row = 4 * t * a.experts
        scores, ranked, weights = a.scores + row, a.ranked + row, a.weights + 4 * t * a.top_k
        score_row(a.logits + row, scores, a.experts, a.sigmoid)
        for i in range(0, 4 * a.experts, 4):
            store1(ranked + i, load1(scores + i) + (load1(a.bias + i) if a.bias else 0.0))
        if a.top_groups < a.groups:
            keep_groups(ranked, a.best + 8 * t * a.groups, a.experts, a.groups, a.top_groups, a.two)
        total = 0.0
        for j in range(a.top_k):
            expert = highest(ranked, a.experts)
            weight = load1(scores + 4 * expert)
            store1(ranked + 4 * expert, LOWEST)
            store_i64(a.ids + 8 * (t * a.top_k + j), expert)
            store1(weights + 4 * j, weight)
            total += weight
        factor = a.scaling / (total + TINY) if a.normalize else a.scaling
        for j in range(0, 4 * a.top_k, 4):
            store1(weights + j, load1(weights + j) * factor)


def route(
    logits: Tensor, bias: Tensor | None, *, top_k: int, groups: int, top_groups: int, two: bool, sigmoid: bool,
    normalize: bool, scaling: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Choose each token's experts, by descending score: the softmax of its logits, or their ``sigmoid``.

    Args:    logits: [T, E] fp32, contiguous, on the CPU; bias: [E] fp32, added to the scores for the choice alone.
             groups: in which experts lie, and top_groups: of which they are chosen, by their best expert or their best
             ``two``. normalize: the weights of the chosen sum to 1, before they are multiplied by ``scaling``.
    Returns: ids [T, top_k] int64, and their weights [T, top_k] fp32.
    """
    tokens, experts = logits.shape
    work = torch.empty(2 * tokens * (experts + groups))
    ids, weights = torch.empty(tokens, top_k, dtype=torch.int64), torch.empty(tokens, top_k)
    scores = work.data_ptr()
    arguments = RouteArgs(
        logits=logits.data_ptr(), bias=0 if bias is None else bias.data_ptr(), scores=scores,
        ranked=scores + 4 * tokens * experts, best=scores + 8 * tokens * experts, ids=ids.data_ptr(),
        weights=weights.data_ptr(), tokens=tokens, experts=experts, top_k=top_k, groups=groups,
        top_groups=top_groups, two=int(two), sigmoid=int(sigmoid), normalize=int(normalize), scaling=scaling,
    )  # fmt: skip
    team_for(logits.numel(), LOGITS_OF_TEAM).run(route_rows, arguments)
    return ids, weights
