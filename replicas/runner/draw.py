"""One random token per row: temperature, top-k, top-p, min-p, and the draw.

Owns:      the random numbers: noise is a hash of (seed, position, token id).
Never:     looks at another row; keeps state.
Invariant: a row's token is a function of its logits, parameters, seed and position.
Thread:    engine thread of rank 0.

Cuts, in order: temperature, top-k, top-p, min-p. Top-p counts probability in the whole distribution after temperature,
not within what top-k left, and min-p is relative to the most likely token, as in SGLang's sampler
(``top_k_top_p_min_p_sampling_from_probs_torch`` in srt/layers/sampler.py; FlashInfer calls it "joint"). vLLM and
Transformers count top-p within what top-k left, which keeps fewer tokens when both are set. Of equals, the lowest ids
are kept.

The draw is Gumbel-max (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030): the kept token with the largest
log p + noise. One uniform number through the inverse CDF has the same distribution, but there rounding of the logits (a
cache hit, another batch shape) moves all boundaries after it and in a flat tail the token changes; here it changes only
when the two best tie within the rounding.

A step need not hash every token nor sort a vocabulary: the device gives the HEAD most likely tokens and the mass below
them. A row without cuts lets all tokens below the head draw as one (the largest of their perturbed log p has Gumbel law
again) and one by one only if they win; a row whose cuts reach below the head is done from all its logits on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replicas.scheduler.plan import SampleRow
from replicas.types import TokenIds

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

HEAD = 64  # tokens that leave the device; on a CPU, torch.topk of 256 takes 7 times as long
MIN_TEMPERATURE = 1e-6  # float32 stays exact enough; anything colder is greedy but for exact ties
_STRIDE = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio
_BELOW_HEAD = np.array([1 << 40], dtype=np.uint64)  # "token" whose noise those below the head share


def uniform(seeds: Keys, positions: Keys, tokens: Keys) -> Floats:
    """Numbers in (0, 1), one per (seed, position, token) of the broadcast arrays.

    Source: the finaliser of splitmix64 (Steele, Lea, Flood 2014), once per coordinate.
    """
    bits = _mix(_mix(_mix(seeds + _STRIDE) + positions * _STRIDE) + tokens * _STRIDE + _STRIDE)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(x: Keys) -> Keys:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class _Rules:
    """Parameters of R rows as columns [R, 1]."""

    temperature: Floats
    top_k: Ints
    top_p: Floats  # inf where it cuts nothing, so that rounding does not
    log_min_p: Floats
    seeds: Keys
    positions: Keys

    @staticmethod
    def of(rows: Sequence[SampleRow], vocab_size: int) -> "_Rules":
        params = [row.params for row in rows]
        with np.errstate(divide="ignore"):  # min_p 0 becomes -inf: keeps all
            return _Rules(
                temperature=np.array([[max(p.temperature, MIN_TEMPERATURE)] for p in params]),
                top_k=np.array([[min(p.top_k or vocab_size, vocab_size)] for p in params], dtype=np.int64),
                top_p=np.array([[p.top_p if p.top_p < 1.0 else np.inf] for p in params]),
                log_min_p=np.log(np.array([[p.min_p] for p in params])),
                seeds=np.array([[p.seed] for p in params], dtype=np.uint64),
                positions=np.array([[row.position] for row in rows], dtype=np.uint64),
            )

    def cuts(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """[R, 1] rows that any cut applies to."""
        return (self.top_k < vocab_size) | np.isfinite(self.top_p) | np.isfinite(self.log_min_p)

    def row(self, r: int) -> "_Rules":
        s = slice(r, r + 1)
        return _Rules(
            self.temperature[s], self.top_k[s], self.top_p[s], self.log_min_p[s], self.seeds[s], self.positions[s]
        )

    def keeps(self, ranks: Ints, log_p: Floats, before: Floats, total: Floats) -> npt.NDArray[np.bool_]:
        """[R, n] tokens that survive, given their ranks, log p relative to the peak, and the mass before them."""
        return (ranks < self.top_k) & (before < self.top_p * total) & (log_p >= self.log_min_p)

    def noise(self, ids: npt.NDArray[np.integer]) -> Floats:
        """Standard Gumbel noise [R, n] of tokens ``ids``."""
        return -np.log(-np.log(uniform(self.seeds, self.positions, ids.astype(np.uint64))))


@dataclass(frozen=True, slots=True)
class _Head:
    """The most likely tokens of R rows; log p is relative to the peak of its row."""

    log_p: Floats  # [R, HEAD] descending, equals by id; -inf where the token is not above ``bound``
    ids: Ints  # [R, HEAD]
    bound: Floats  # [R, 1] log p of the most likely token below the head, so that equals never stand on both sides
    mass_below: Floats  # [R, 1] sum of exp(log p) of the tokens below


def draw(logits: Tensor, peaks: npt.NDArray[np.float64], rows: Sequence[SampleRow]) -> TokenIds:
    """Token ids [R] for ``rows``, from ``logits`` [R, V] whose largest are ``peaks`` [R], all finite."""
    vocab_size = logits.shape[1]
    if vocab_size == 1:
        return np.zeros(len(rows), dtype=np.int32)
    rules = _Rules.of(rows, vocab_size)
    scale = torch.from_numpy(np.hstack((peaks[:, None], rules.temperature)).astype(np.float32)).to(logits.device)
    scaled = (logits - scale[:, :1]).div_(scale[:, 1:])  # [R, V] log p relative to the peak
    head = _take_head(scaled)

    mass = np.exp(head.log_p)
    through = mass.cumsum(axis=1)
    total = through[:, -1:] + head.mass_below
    kept = rules.keeps(np.arange(mass.shape[1])[None], head.log_p, through - mass, total) & (mass > 0)
    perturbed = np.where(kept, head.log_p + rules.noise(head.ids), -np.inf)
    best = perturbed.argmax(axis=1)[:, None]
    token_ids = np.take_along_axis(head.ids, best, axis=1)[:, 0].astype(np.int32)

    num_head = np.count_nonzero(mass > 0, axis=1)[:, None]
    reaches_below = rules.keeps(num_head, head.bound, through[:, -1:], total) & (head.mass_below > 0)
    with np.errstate(divide="ignore"):
        rest = np.log(head.mass_below) + rules.noise(_BELOW_HEAD[None])  # [R, 1]
    rest_wins = rest > np.take_along_axis(perturbed, best, axis=1)
    cuts = rules.cuts(vocab_size)
    for r in np.flatnonzero(reaches_below & (rest_wins | cuts)).tolist():
        log_p, rule = scaled[r].cpu().numpy(), rules.row(r)
        ids = _kept_ids(log_p, rule, total[r]) if cuts[r, 0] else np.flatnonzero(log_p <= head.bound[r])
        token_ids[r] = ids[np.argmax(log_p[ids] + rule.noise(ids[None])[0])]
    return token_ids


def _take_head(scaled: Tensor) -> _Head:
    """Split ``scaled`` [R, V] in two on its device, and fetch what is small in one copy."""
    num = min(HEAD, scaled.shape[1] - 1)
    top = scaled.topk(num + 1, dim=-1)
    below = scaled.exp().masked_fill_(scaled > top.values[:, -1:], 0.0).sum(dim=-1, keepdim=True)
    fetched = torch.cat((top.values.double(), top.indices.double(), below.double()), dim=1).cpu().numpy()
    log_p, ids = fetched[:, :num], fetched[:, num + 1 : -2].astype(np.int64)
    bound = fetched[:, num : num + 1]
    log_p = np.where(log_p > bound, log_p, -np.inf)
    order = np.lexsort((ids, -log_p), axis=-1)
    return _Head(
        log_p=np.take_along_axis(log_p, order, axis=1),
        ids=np.take_along_axis(ids, order, axis=1),
        bound=bound,
        mass_below=fetched[:, -1:],
    )


def _kept_ids(log_p: npt.NDArray[np.float32], rules: _Rules, total: Floats) -> Ints:
    """Ids that the cuts of one row keep, from all of its ``log_p`` [V]."""
    ranked = np.sort(log_p)[::-1].astype(np.float64)
    mass = np.exp(ranked)
    kept = rules.keeps(np.arange(len(ranked)), ranked, mass.cumsum() - mass, total) & (mass > 0)
    num_kept = int(np.count_nonzero(kept))
    edge = ranked[num_kept - 1]
    above = np.flatnonzero(log_p > edge)
    return np.concatenate((above, np.flatnonzero(log_p == edge)[: num_kept - len(above)]))
