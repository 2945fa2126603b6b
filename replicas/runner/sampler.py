"""Chooses tokens from logits, and computes logprobs.

Owns:      the order of edits: the mask of the constraint, which no other undoes, repetition penalty, frequency and
           presence penalties, logit bias, then the masks of allowed_token_ids, bad_words and min_new_tokens. Then a
           greedy row takes the largest logit; the others go through temperature, top-k, top-p, min-p and the draw: its
           noise is a hash of (seed, position, token id). Logprobs are the natural logarithm of softmax(logits) of the
           model's own logits, before any edit (vLLM's ``raw_logprobs``), but for the mask: those of a constrained
           output are over the tokens that the constraint allows, as OpenAI's, and alternatives that it does not allow
           are left out.
Never:     keeps state between steps, but for counts of tokens on a GPU (token_counts.py) and `Pooler`; reads more of
           a request than its SampleRow; changes the logits it is given, but for the mask of a constraint.
Invariant: a row's token is a function of that row alone; the batch, its order and its size do not enter.
Thread:    engine thread of rank 0.

Repetition penalty r divides positive logits and multiplies negative ones of every token in prompt and output (Keskar et
al. 2019, arXiv:1909.05858). Frequency and presence penalties subtract count * f + p for tokens of the output (OpenAI).
min_new_tokens and ignore_eos mask the ids that end a constrained output while another token is left: the grammar wins.
A bad word is a sequence of tokens: if the output ends with all of it but the last, that last token is masked (vLLM).

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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replicas.attention.page_lists import to_device
from replicas.kernels.elementwise import argmax
from replicas.kernels.token_mask import Words, mask_tokens
from replicas.runner.device_draw import HEAD, MIN_TEMPERATURE, sample_on_device
from replicas.runner.pooling import Pooler
from replicas.runner.token_counts import TokenCounts
from replicas.scheduler.plan import BROKEN, SampleRow
from replicas.types import SamplingParams, TokenIds, TokenLogprob

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

_STRIDE = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio
PROMPT_ROWS = 64  # of a prompt at once on a device: the keys of its logits take several times their memory
_BELOW_HEAD = np.array([1 << 40], dtype=np.uint64)  # "token" whose noise those below the head share


class _Entries:
    """Entries (row, token id, value) of a logits matrix, gathered over the rows to be applied in one operation."""

    def __init__(self) -> None:
        self._rows: list[npt.NDArray[np.int64]] = []
        self._ids: list[npt.NDArray[np.int64]] = []
        self._values: list[npt.NDArray[np.float32]] = []

    def add(self, row: int, ids: npt.NDArray[np.int64], values: npt.ArrayLike) -> None:
        self._rows.append(np.full(len(ids), row, dtype=np.int64))
        self._ids.append(ids)
        self._values.append(np.broadcast_to(np.asarray(values, dtype=np.float32), len(ids)))

    def on(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
        """Return ((rows [N], ids [N]), values [N]) on ``device``, or None if there are none."""
        if not self._rows:
            return None
        rows, ids, values = np.concatenate(self._rows), np.concatenate(self._ids), np.concatenate(self._values)
        where = to_device(np.stack((rows, ids)), device)
        return (where[0], where[1]), to_device(values, device)


def needs_edit(row: SampleRow) -> bool:
    """Tell whether ``edit_logits`` would change anything for ``row``, its constraint aside."""
    return row.params.edits_logits or bool(_early_stops(row))


def _early_stops(row: SampleRow) -> frozenset[int]:
    """Return the ids that may not end ``row`` yet. With ignore_eos only a constrained row has ids beside its own."""
    if row.num_output < row.params.min_new_tokens:
        return row.stop_ids
    return row.stop_ids.difference(row.params.stop_token_ids) if row.params.ignore_eos else frozenset()


def constraint_masks(rows: Sequence[SampleRow]) -> list[Words | None]:
    """Wait for the masks of the constrained rows. Returns: [S], None for a row that may be any token; [] if all may."""
    if all(row.mask is None for row in rows):
        return []
    masks = [None if row.mask is None else _left_by_stops(row, row.mask()) for row in rows]
    return [] if all(mask is None for mask in masks) else masks


def _left_by_stops(row: SampleRow, words: Words | None) -> Words | None:
    """Take the ids that may not end ``row`` yet out of its mask, while that leaves a token."""
    banned = _early_stops(row)
    if words is None or not banned:
        return words
    kept = words.copy()
    _clear(kept, banned)
    bad, allowed = _bad_ends(row), row.params.allowed_token_ids
    if allowed is not None:
        left = any(kept[token // 32] >> token % 32 & 1 for token in allowed if token not in bad)
    elif bad:
        others = kept.copy()
        _clear(others, bad)
        left = bool(others.any())
    else:
        left = bool(kept.any())
    return kept if left else words


def _clear(words: Words, token_ids: frozenset[int]) -> None:
    for token_id in token_ids:
        words.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)


def edit_logits(
    logits: Tensor,
    rows: Sequence[SampleRow],
    counted: TokenCounts | None = None,
    last_ids: Tensor | None = None,
    masks: Sequence[Words | None] = (),
) -> Tensor:
    """Copy ``logits`` [S, V] and apply each row's parameters; penalties by ``counted``, if given; ``masks`` [S], if
    any, are those of constraints, which were applied before.

    If the other masks leave a request no token but its stop ids, it cannot meet min_new_tokens: its stop ids stay.
    """
    vocab_size = logits.shape[1]
    repetition, additive, banned_ids = _Entries(), _Entries(), _Entries()
    allowed: dict[int, npt.NDArray[np.int64]] = {}  # by row
    for r, row in enumerate(rows):
        params = row.params
        if params.repetition_penalty != 1.0 and counted is None:
            seen = np.zeros(vocab_size, dtype=np.bool_)
            seen[row.prompt_ids] = True
            seen[row.output_ids] = True
            repetition.add(r, np.flatnonzero(seen), params.repetition_penalty)
        if (params.frequency_penalty or params.presence_penalty) and len(row.output_ids) and counted is None:
            ids, counts = np.unique(row.output_ids, return_counts=True)
            additive.add(r, ids.astype(np.int64), -(params.frequency_penalty * counts + params.presence_penalty))
        if params.logit_bias:
            tokens, biases = zip(*params.logit_bias, strict=True)
            additive.add(r, np.array(tokens, dtype=np.int64), biases)
        banned = _bad_ends(row)
        if params.allowed_token_ids is not None:
            allowed[r] = _ids(params.allowed_token_ids)
        early = _early_stops(row) if not masks or masks[r] is None else None
        if early:
            stopping = banned | early
            others = params.allowed_token_ids
            if len(stopping) < vocab_size if others is None else any(token not in stopping for token in others):
                banned = stopping
        if banned:
            banned_ids.add(r, np.fromiter(banned, dtype=np.int64), -np.inf)
    edited = logits.clone()
    if counted is not None:
        counted.penalise(edited, rows, last_ids)
    if (found := repetition.on(logits.device)) is not None:
        where, factors = found
        values = edited[where]
        edited[where] = torch.where(values > 0, values / factors, values * factors)
    if (found := additive.on(logits.device)) is not None:
        edited.index_put_(found[0], found[1], accumulate=True)
    for r, allowed_ids in allowed.items():
        index = to_device(allowed_ids, logits.device)
        kept = edited[r, index]
        edited[r] = -torch.inf
        edited[r, index] = kept
    if (found := banned_ids.on(logits.device)) is not None:
        edited.index_put_(found[0], found[1])
    return edited


@lru_cache(maxsize=16)
def _ids(token_ids: tuple[int, ...]) -> npt.NDArray[np.int64]:
    return np.array(token_ids, dtype=np.int64)


def _bad_ends(row: SampleRow) -> frozenset[int]:
    """Return the tokens that would complete a bad word."""
    words = row.params.bad_words
    if not words:
        return frozenset()
    longest = max(map(len, words))
    tail = tuple(row.output_ids[max(len(row.output_ids) - longest + 1, 0) :].tolist())
    return frozenset(word[-1] for word in words if word[:-1] == tail[len(tail) - len(word) + 1 :])


def token_logprobs(
    logits: Tensor, token_ids: TokenIds, num_tops: Sequence[int], *, ranked: bool = False
) -> list[TokenLogprob]:
    """Compute the logprobs of ``token_ids`` [n] under ``logits`` [n, V], each with its ``num_tops`` [n] best tokens.

    Alternatives are in order of probability, equals by id, so the first is the greedy token. ``ranked`` adds the rank
    of each of ``token_ids``.
    """
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)  # [n, 1]
    chosen = logits.gather(1, torch.from_numpy(np.asarray(token_ids, dtype=np.int64)).to(logits.device)[:, None])
    values = (chosen - normaliser)[:, 0].tolist()
    ranks = ((logits > chosen).sum(dim=-1) + 1).tolist() if ranked else [None] * len(values)
    num_top = min(max(num_tops, default=0), logits.shape[1])
    if num_top == 0:
        plain = zip(token_ids, values, ranks, strict=True)
        return [TokenLogprob(token_id=int(t), logprob=v, rank=rank) for t, v, rank in plain]
    top_ids = _most_likely(logits, num_top)  # [n, num_top]
    top_values = (logits.gather(1, torch.from_numpy(top_ids).to(logits.device)) - normaliser).tolist()
    return [
        TokenLogprob(token_id=int(t), logprob=v, top=tuple(zip(ids[:num], tops[:num], strict=True)), rank=rank)
        for t, v, ids, tops, num, rank in zip(
            token_ids, values, top_ids.tolist(), top_values, num_tops, ranks, strict=True
        )
    ]


def _most_likely(logits: Tensor, num: int) -> npt.NDArray[np.int64]:
    """Return the ids [n, num] of the largest logits, equals by id."""
    more = min(num + 1, logits.shape[1])
    values, ids = logits.topk(more, dim=-1)
    tied = values[:, num - 1] == values[:, -1] if more > num else values[:, 0] > torch.inf
    if bool((tied & (values[:, -1] > -torch.inf)).any()):
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :num].cpu().numpy()  # a tie at the edge
    host_values, host_ids = values[:, :num].cpu().numpy(), ids[:, :num].cpu().numpy()
    return np.take_along_axis(host_ids, np.lexsort((host_ids, -host_values), axis=-1), axis=-1)


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """The logprobs of a step's tokens on the device: of the rows that ask, n of them."""

    asked: list[int]  # [n] rows of the step
    rows: Sequence[SampleRow]  # all of the step
    tensors: tuple[Tensor, Tensor, Tensor]  # [n] of the tokens; [n, top] ids and logprobs of the most likely

    @staticmethod
    def of(logits: Tensor, tokens: Tensor, rows: Sequence[SampleRow]) -> "DeviceLogprobs":
        """Compute what `token_logprobs` does, without waiting; BROKEN tokens count as 0."""
        asked = [i for i, row in enumerate(rows) if row.return_logprobs]
        index = to_device(np.array(asked, np.int64), logits.device)
        own = logits if len(asked) == len(rows) else logits[index]
        normaliser = torch.logsumexp(own, dim=-1, keepdim=True)
        values = own.gather(1, tokens[index].clamp_min(0)[:, None]) - normaliser
        num_top = min(max(rows[i].top_logprobs for i in asked), logits.shape[1])
        ids = _ordered_keys(own).topk(num_top, dim=-1).indices if num_top else index[:, None][:, :0]
        return DeviceLogprobs(asked, rows, (values[:, 0], ids, own.gather(1, ids) - normaliser))

    def told(self, token_ids: TokenIds, fetched: Sequence[Tensor]) -> tuple[TokenLogprob | None, ...]:
        """Return the logprob of each row of the step, given its tokens and ``tensors`` on the host."""
        found: list[TokenLogprob | None] = [None] * len(self.rows)
        for i, value, ids, values in zip(self.asked, *(x.tolist() for x in fetched), strict=True):
            if token_ids[i] != BROKEN:
                num = self.rows[i].top_logprobs
                top = tuple(pair for pair in zip(ids[:num], values[:num], strict=True) if pair[1] > -math.inf)
                found[i] = TokenLogprob(token_id=int(token_ids[i]), logprob=value, top=top)
        return tuple(found)


@dataclass(frozen=True, slots=True)
class DevicePromptLogprobs:
    """The logprobs of tokens of a prompt on the device, as `Sampler.prompt_logprobs` has them on the host."""

    token_ids: TokenIds  # [E]
    tensors: tuple[Tensor, ...]  # [E] of the tokens; [E] their ranks; [E, top] ids and logprobs of the most likely

    @staticmethod
    @torch.inference_mode()
    def of(logits: Tensor, token_ids: TokenIds, num_top: int) -> "DevicePromptLogprobs":
        """Compute those of ``token_ids`` [E] under ``logits`` [E, V], without waiting."""
        targets = to_device(token_ids.astype(np.int64), logits.device)[:, None]
        parts = []
        for first in range(0, len(token_ids), PROMPT_ROWS):
            own, ids = logits[first : first + PROMPT_ROWS], targets[first : first + PROMPT_ROWS]
            normaliser, chosen = torch.logsumexp(own, dim=-1, keepdim=True), own.gather(1, ids)
            num = min(num_top, own.shape[1])
            tops = _ordered_keys(own).topk(num, dim=-1).indices if num else ids[:, :0]
            ranks = (own > chosen).sum(dim=-1) + 1
            parts.append(((chosen - normaliser)[:, 0], ranks, tops, own.gather(1, tops) - normaliser))
        return DevicePromptLogprobs(token_ids, tuple(torch.cat(each) for each in zip(*parts, strict=True)))

    def told(self, fetched: Sequence[Tensor]) -> tuple[TokenLogprob, ...]:
        """Return the logprob of each token, given ``tensors`` on the host."""
        columns = (self.token_ids.tolist(), *(x.tolist() for x in fetched))
        return tuple(
            TokenLogprob(token_id=token, logprob=value, rank=rank, top=tuple(zip(ids, values, strict=True)))
            for token, value, rank, ids, values in zip(*columns, strict=True)
        )


def _ordered_keys(logits: Tensor) -> Tensor:
    """int64 [n, V], all different: larger for a larger logit, and of equals for a lower id."""
    bits = (logits + 0.0).contiguous().view(torch.int32).long()  # + 0.0: one zero
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
    return (order << 32) - torch.arange(logits.shape[1], device=logits.device)


class Sampler:
    """Chooses the next token of each row; one per engine, on rank 0. It works in inference mode: logits that no graph
    replayed were made in it, and may be written in it alone."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._counts = TokenCounts(vocab_size, self.device)
        self.pooler = Pooler()

    @torch.inference_mode()
    def warm_up(self, logits: Tensor, *, on_device: bool = False) -> None:
        """Compile the kernels, so that no first request of its kind waits for them, and others with it. ``on_device``:
        those of `sample_on_device` too, for any number of rows."""
        argmax(logits)
        if on_device:
            params, none = SamplingParams(repetition_penalty=1.1, top_p=0.9), np.zeros(0, np.int32)
            row = SampleRow(params, position=1, num_output=0, stop_ids=frozenset(), prompt_ids=none, output_ids=none)
            Sampler(self.vocab_size, self.device).sample_on_device(logits, [row] * len(logits))
        mask_tokens(logits, [np.zeros(-(-logits.shape[1] // 32), np.int32)] * len(logits))

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> tuple[TokenIds, tuple[TokenLogprob | None, ...]]:
        """Choose one token per row, with its logprob if the row asks for it.

        Args:    logits: [S, V] float32; changed only where a constraint forbids a token.
        Returns: token ids [S], BROKEN for a row whose logits hold NaN or inf or are all masked: one request's overflow
                 must not end the others. logprobs [S], None for rows that did not ask (or are broken), or () if none
                 has one. Greedy ties go to the lowest id.
        """
        self._check_shape(logits, len(rows))
        if not rows:
            return np.empty(0, dtype=np.int32), ()
        masks = constraint_masks(rows)
        if masks:
            mask_tokens(logits, masks)
        edited = edit_logits(logits, rows, masks=masks) if any(needs_edit(row) for row in rows) else logits
        best = argmax(edited)[:, None]  # [S, 1]; the first of equals, and a NaN before any number
        peaks = edited.gather(1, best)[:, 0].double().cpu().numpy()  # [S]
        sound = np.isfinite(peaks)
        token_ids = np.where(sound, best[:, 0].cpu().numpy(), BROKEN).astype(np.int32)
        drawn = [i for i, row in enumerate(rows) if sound[i] and not row.params.greedy]
        if drawn:
            chosen = edited if len(drawn) == len(rows) else edited[torch.tensor(drawn, device=edited.device)]
            token_ids[drawn] = draw(chosen, peaks[drawn], [rows[i] for i in drawn])
        return token_ids, self._logprobs(logits, token_ids, rows)

    @torch.inference_mode()
    def sample_on_device(
        self, logits: Tensor, rows: Sequence[SampleRow], last_ids: Tensor | None = None
    ) -> tuple[Tensor, DeviceLogprobs | None]:
        """Choose tokens [S] int64 on the device, with the logprobs of rows that ask, and without waiting for it.

        Args: last_ids: the input ids of a decode step; the rows of one that follows another lack these tokens.
        """
        if not rows:
            return torch.empty(0, dtype=torch.int64, device=logits.device), None
        self._check_shape(logits, len(rows))
        masks, edits = constraint_masks(rows), any(needs_edit(row) for row in rows)
        if masks:
            mask_tokens(logits, masks)
        tokens = sample_on_device(edit_logits(logits, rows, self._counts, last_ids, masks) if edits else logits, rows)
        if edits:
            self._counts.add(tokens)
        asks = any(row.return_logprobs for row in rows)
        return tokens, DeviceLogprobs.of(logits, tokens, rows) if asks else None

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, target_ids: TokenIds, top_n: int = 0) -> tuple[TokenLogprob, ...]:
        """Compute logprobs and ranks of prompt tokens, with the ``top_n`` most likely alternatives.

        Args:    logits: [E, V]; row e was computed from the tokens before target e.
                 target_ids: [E] the prompt's own tokens at those positions. Position 0 has no context, so no row.
        """
        self._check_shape(logits, len(target_ids))
        return tuple(token_logprobs(logits, target_ids, [top_n] * len(target_ids), ranked=True))

    def _logprobs(
        self, logits: Tensor, token_ids: TokenIds, rows: Sequence[SampleRow]
    ) -> tuple[TokenLogprob | None, ...]:
        asked = [i for i, row in enumerate(rows) if row.return_logprobs and token_ids[i] != BROKEN]
        if not asked:  # all that ask may be broken
            return ()
        chosen = logits if len(asked) == len(rows) else logits[torch.tensor(asked, device=logits.device)]
        found: list[TokenLogprob | None] = [None] * len(rows)
        made = token_logprobs(chosen, token_ids[asked], [rows[i].top_logprobs for i in asked])
        for i, logprob in zip(asked, made, strict=True):
            found[i] = replace(logprob, top=tuple(pair for pair in logprob.top if pair[1] > -math.inf))
        return tuple(found)

    def _check_shape(self, logits: Tensor, num_rows: int) -> None:
        assert logits.shape == (num_rows, self.vocab_size), (
            f"logits are {tuple(logits.shape)}, wanted ({num_rows}, {self.vocab_size}): rows x vocabulary"
        )


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
