"""The draw of draw.py in the device's own operations: the host reads the tokens later, and nothing waits for it.

Owns:      the same rules, noise and cuts as draw.py, row for row; that file explains them.
Never:     reads a number from the device: which rows may need all their logits is known from their parameters.
Invariant: the token of a row is draw.py's, but where two tokens tie within the rounding of the device's logarithm, or
           one stands at the edge of top-p within the rounding of the sums: total and mass are added in another order.
Thread:    engine thread of rank 0.

A row without cuts is drawn as on the host: the head token by token, those below as one, and one by one if they win, for
which every token's noise is made here whether they win or not. A row with cuts is drawn from its tokens in order: from
the first HEAD of them if its top-k allows no more, else from the whole vocabulary, sorted.

Not for a step in which one row wants logprobs: all its rows are drawn on the host then (model_runner.py), which waits
for their logits, and no step is made ahead (scheduler/decode.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replicas.runner.draw import HEAD, MIN_TEMPERATURE
from replicas.scheduler.plan import BROKEN, SampleRow

ROWS_AT_ONCE = 64  # of a vocabulary of 128k, 64 MiB for each 8-byte number of a token; a few such at a time

_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number; products wrap as unsigned ones do
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_BELOW_HEAD = 1 << 40


@dataclass(frozen=True, slots=True)
class DrawRules:
    """The parameters of R rows that draw, on the device, as columns [R, 1]."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64
    top_p: Tensor  # float64, inf where it cuts nothing
    log_min_p: Tensor  # float64
    seeds: Tensor  # int64, bits of the unsigned number
    positions: Tensor  # int64

    @staticmethod
    def of(rows: Sequence[SampleRow], vocab_size: int, device: torch.device) -> "DrawRules":
        params = [row.params for row in rows]
        top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
        with np.errstate(divide="ignore"):
            log_min_p = np.log(np.array([p.min_p for p in params]))
        top_p = [p.top_p if p.top_p < 1.0 else np.inf for p in params]
        columns = np.array([top_p, log_min_p, [max(p.temperature, MIN_TEMPERATURE) for p in params]])
        numbers = np.array([top_k, [row.position for row in rows]], np.int64)
        seeds = np.array([p.seed for p in params], np.uint64).view(np.int64)
        packed = np.vstack((columns.view(np.int64), numbers, seeds))  # [6, R]; one copy
        on_device = _pinned(packed, device).to(device, non_blocking=True)
        floats = on_device[:3].view(torch.float64)
        return DrawRules(
            top_p=floats[0][:, None], log_min_p=floats[1][:, None], temperature=floats[2][:, None].float(),
            top_k=on_device[3][:, None], positions=on_device[4][:, None], seeds=on_device[5][:, None],
        )  # fmt: skip

    def keeps(self, ranks: Tensor, log_p: Tensor, before: Tensor, total: Tensor) -> Tensor:
        """Tell which tokens [R, n] survive, as in draw.py."""
        return (ranks < self.top_k) & (before < self.top_p * total) & (log_p >= self.log_min_p)

    def noise(self, ids: Tensor) -> Tensor:
        """Make standard Gumbel noise [R, n] float64 of tokens ``ids`` int64."""
        bits = _mix(_mix(_mix(self.seeds + _STRIDE) + self.positions * _STRIDE) + ids * _STRIDE + _STRIDE)
        uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53
        return -torch.log(-torch.log(uniform))


def sample_on_device(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Choose tokens [S] int64 of ``rows`` on the device of ``logits`` [S, V]; BROKEN if the largest logit is not
    finite."""
    peaks = logits.max(dim=-1, keepdim=True).values  # [S, 1]; a NaN before any number
    tokens = (logits == peaks).to(torch.int8).argmax(dim=-1)  # the first of equals
    vocab_size = logits.shape[1]
    for depth, chosen in _parts(rows, vocab_size):
        index = _index(chosen, logits.device)
        rules = DrawRules.of([rows[i] for i in chosen], vocab_size, logits.device)
        scaled = (logits[index] - peaks[index]).div_(rules.temperature)  # [R, V] log p relative to the peak
        drawn = _draw_uncut(scaled, rules) if depth == 0 else _draw_cut(scaled, rules, depth)
        tokens = tokens.index_copy(0, index, drawn)
    return torch.where(torch.isfinite(peaks[:, 0]), tokens, BROKEN)


def _parts(rows: Sequence[SampleRow], vocab_size: int) -> Iterator[tuple[int, list[int]]]:
    """Rows that draw, at most ROWS_AT_ONCE of a kind: how many of their tokens the cuts may keep; 0 without cuts."""
    kinds: dict[int, list[int]] = {}
    for i, row in enumerate(rows if vocab_size > 1 else ()):
        params = row.params
        if params.greedy:
            continue
        top_k = min(params.top_k or vocab_size, vocab_size)
        if top_k == vocab_size and params.top_p >= 1.0 and params.min_p <= 0.0:
            depth = 0
        else:
            depth = HEAD if top_k <= HEAD < vocab_size else vocab_size
        kinds.setdefault(depth, []).append(i)
    for depth, chosen in kinds.items():
        for start in range(0, len(chosen), ROWS_AT_ONCE):
            yield depth, chosen[start : start + ROWS_AT_ONCE]


def _draw_uncut(scaled: Tensor, rules: DrawRules) -> Tensor:
    """[R] from ``scaled`` [R, V]; the noise of tokens below the head counts only if they win together."""
    num = min(HEAD, scaled.shape[1] - 1)
    top = scaled.topk(num + 1, dim=-1)
    edge = top.values[:, -1:]  # [R, 1] equals never stand on both sides of the head's end
    below = scaled.exp().masked_fill_(scaled > edge, 0.0).sum(dim=-1, keepdim=True).double()
    log_p, ids = top.values[:, :num], top.indices[:, :num]
    perturbed = torch.where(log_p > edge, log_p.double() + rules.noise(ids), -torch.inf)
    value, place = perturbed.max(dim=1, keepdim=True)
    rest = torch.log(below) + rules.noise(torch.full_like(rules.seeds, _BELOW_HEAD))  # [R, 1]
    every = torch.arange(scaled.shape[1], device=scaled.device)
    one_by_one = torch.where(scaled <= edge, scaled.double() + rules.noise(every), -torch.inf).argmax(dim=1)
    return torch.where((rest > value)[:, 0], one_by_one, ids.gather(1, place)[:, 0])


def _draw_cut(scaled: Tensor, rules: DrawRules, depth: int) -> Tensor:
    """[R] from the ``depth`` first tokens of ``scaled`` [R, V], in order; of equals, the lowest ids come first."""
    total = scaled.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    if depth == scaled.shape[1]:
        values, ids = scaled.sort(dim=1, descending=True, stable=True)
    else:
        ids = _ordered_keys(scaled).topk(depth, dim=1).indices
        values = scaled.gather(1, ids)
    log_p = values.double()
    mass = log_p.exp()
    ranks = torch.arange(depth, device=scaled.device)
    kept = rules.keeps(ranks, log_p, mass.cumsum(dim=1) - mass, total) & (mass > 0)
    perturbed = torch.where(kept, log_p + rules.noise(ids), -torch.inf)
    return ids.gather(1, perturbed.argmax(dim=1, keepdim=True))[:, 0]


def _ordered_keys(scaled: Tensor) -> Tensor:
    """int64 [R, V], all different: larger for a larger value, and of equals for a lower id."""
    bits = scaled.view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
    return (order << 32) - torch.arange(scaled.shape[1], device=scaled.device)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _FACTORS[0]
    x = (x ^ _shift(x, 27)) * _FACTORS[1]
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Compute x >> bits of the unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _index(rows: Sequence[int], device: torch.device) -> Tensor:
    return _pinned(np.array(rows, np.int64), device).to(device, non_blocking=True)


def _pinned(array: np.ndarray, device: torch.device) -> Tensor:
    """Pin an array, so a GPU copies it while the host goes on; PyTorch keeps it until the copy is done."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
