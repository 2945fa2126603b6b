"""The tokens that a client has received of one request, so that another replica can continue it; and its usage.

Owns:      the output ids delivered per choice, and which choices ended; what the prompts of one HTTP request, which is
           one request of its key, count with together.
Never:     talks to a replica.
Invariant: an id is delivered once, in order; text follows from ids alone, so that a resumed text has no seam.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from deployments.record.rids import with_try
from deployments.tenancy.quotas import Quotas, Reserved, SoFar
from deployments.tenancy.tenants import TenantKey
from replicas.errors import MantaError
from replicas.types import GenerateRequest, PdLeg, TokenDelta, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A request to a replica: the client's whole request, or one choice that another replica did not finish."""

    request: GenerateRequest
    choice: int | None  # None: the whole request, whose deltas carry their own index

    @property
    def is_prefill(self) -> bool:
        """Whether it is the prefill leg of a pair, which yields no token."""
        return self.request.kv_transfer is not None and self.request.kv_transfer.leg is PdLeg.PREFILL


class StraightWay(Protocol):
    """A client's connection that takes text at once, without waking what iterates between it and the channel."""

    def takes(self, index: int) -> bool:
        """Return whether text of choice ``index`` can be taken now: all before it has been."""
        ...

    def send(self, delta: TokenDelta) -> None:
        """Send the text of ``delta``, which has no finish."""
        ...


def _cached(usage: Usage) -> tuple[int, int, int, int]:
    return usage.cached_tokens, usage.host_tokens, usage.store_tokens, usage.kept_tokens


def left_after(request: GenerateRequest, waited_s: float) -> GenerateRequest:
    """Return ``request`` with what is left of its times after ``waited_s``, which count when it queues."""
    deadline_s, objective_s = request.deadline_s, request.objective_s
    return dataclasses.replace(
        request,
        waited_s=waited_s,
        deadline_s=None if deadline_s is None else max(deadline_s - waited_s, 0.001),
        objective_s=None if objective_s is None else max(objective_s - waited_s, 0.001),
    )


class Progress:
    """What one client request has received, over all tries."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.straight: StraightWay | None = None  # past which deltas need not be iterated, if the reader has one
        self.num_restored = 0  # tokens of those delivered, by `restore`
        self._ids: list[list[int]] = [[] for _ in range(request.sampling.n)]
        self._ended = [False] * request.sampling.n
        # per choice, by the replica that sent its first token; a resumed choice reuses its own output
        self._first_usage: list[Usage | None] = [None] * request.sampling.n
        self._prompt_logprobs_seen = [False] * request.sampling.n

    def restore(self, made: Mapping[int, Sequence[int]]) -> None:
        """Count ``made``, the output ids of choices from a run of another router, as delivered."""
        for choice, ids in made.items():
            self._ids[choice] += ids
        self.num_restored = self.num_delivered

    @property
    def done(self) -> bool:
        return all(self._ended)

    @property
    def started(self) -> bool:
        """Whether the client has received anything."""
        return any(self._ids) or any(self._ended)

    @property
    def uncached_tokens(self) -> int | None:
        """The prompt tokens that were computed for its first answer; None until something has come."""
        first = next((usage for usage in self._first_usage if usage is not None), None)
        return None if first is None else first.prompt_tokens - first.cached_tokens

    @property
    def num_delivered(self) -> int:
        return sum(map(len, self._ids))

    @property
    def longest(self) -> int:
        """The tokens of its longest choice."""
        return max(map(len, self._ids))

    def so_far(self) -> GenerateRequest:
        """Return the request with what was delivered as part of its prompt: a replica that caches this prefix continues
        from it. Of several choices, the longest that has not ended stands for all."""
        unfinished = [ids for ids, ended in zip(self._ids, self._ended, strict=True) if not ended]
        longest = max(unfinished, key=len, default=[])
        if not longest:
            return self.request
        ids = np.concatenate((self.request.token_ids, np.array(longest, dtype=np.int32)))
        return dataclasses.replace(self.request, token_ids=ids)

    def parts(self, *, number: int, waited_s: float) -> list[Part]:
        """Return what is left to ask for in try ``number``, ``waited_s`` after the request came."""
        left = left_after(self.request, waited_s)
        if not self.started:
            return [Part(request=dataclasses.replace(left, rid=with_try(left.rid, number)), choice=None)]
        return [
            Part(request=self._rest_of(left, choice, number), choice=choice)
            for choice, ended in enumerate(self._ended)
            if not ended
        ]

    def accept(self, delta: TokenDelta, choice: int | None) -> TokenDelta:
        """Turn ``delta`` of a part into the client's own: its rid, its choice, its counts."""
        index = delta.index if choice is None else choice
        assert not self._ended[index], f"{delta.rid}: choice {index} has ended"
        self._ids[index] += delta.token_ids
        self._ended[index] = delta.finish is not None
        if delta.token_ids:
            self._prompt_logprobs_seen[index] = True
            if self._first_usage[index] is None:
                self._first_usage[index] = delta.usage
        usage, first = delta.usage, self._first_usage[index]
        if first is not None and _cached(first) != _cached(usage):
            usage = dataclasses.replace(
                usage,
                cached_tokens=first.cached_tokens,
                host_tokens=first.host_tokens,
                store_tokens=first.store_tokens,
                kept_tokens=first.kept_tokens,
            )
        elif index == delta.index and delta.rid == self.request.rid:
            return delta  # of the first try: no copy for each token
        return dataclasses.replace(delta, rid=self.request.rid, index=index, usage=usage)

    def check(self) -> None:
        """Raises AssertionError if more was delivered than asked for."""
        assert all(len(ids) <= self.request.sampling.max_new_tokens for ids in self._ids)

    def _rest_of(self, left: GenerateRequest, choice: int, number: int) -> GenerateRequest:
        seen = self._prompt_logprobs_seen[choice]
        return dataclasses.replace(
            left,
            rid=with_try(left.rid, number, choice),
            sampling=left.sampling.for_choice(choice),
            resumed_ids=tuple(self._ids[choice]),
            prompt_logprobs_from=None if seen else left.prompt_logprobs_from,
        )


@dataclass(slots=True)
class Charge:
    """What one HTTP request counts with: an estimate of all its prompts from before the first is sent, and what they
    have used once the last has ended. Of one that another router ran before, what this one adds to it."""

    requests: Sequence[GenerateRequest]  # one for each prompt
    quotas: Quotas | None = None
    key: TenantKey | None = None  # None: nothing is counted
    uncached_len: int | None = None  # of several prompts together, estimated
    _reserved: Reserved | None = None
    _refusal: MantaError | None = None  # of one, and so of all that come to be sent until it has ended
    _sent: list[tuple[Progress, int]] = field(default_factory=list)  # and the uncached tokens of its prompt, estimated

    def sends(self, progress: Progress, uncached_len: int) -> None:
        """Count a prompt that is about to be sent. Raises: OverQuota, BeyondLimit."""
        if self.quotas is None or self.key is None:
            return
        if self._refusal is not None:
            raise self._refusal
        if self._reserved is None:
            samplings = [each.sampling for each in self.requests]
            try:
                self._reserved = self.quotas.reserve(
                    self.key,
                    input_tokens=uncached_len if self.uncached_len is None else self.uncached_len,
                    output_tokens=max(each.max_new_tokens for each in samplings),
                    choices=sum(each.n for each in samplings),
                    so_far=self._so_far,
                    is_rest=progress.num_restored > 0,  # it was counted when it came
                )
            except MantaError as error:
                self._refusal = error
                raise
        self._sent.append((progress, uncached_len))

    def end(self, *, failed: bool) -> None:
        """Count what has been used. Args: failed: here, not its client: what has not begun then counts nothing."""
        if self.quotas is None or self._reserved is None:
            return
        counted = [each for each in self._sent if each[0].started or not failed]
        if not counted:
            self.quotas.give_back(self._reserved)
            return
        self.quotas.settle(
            self._reserved,
            input_tokens=sum(_spent(progress, uncached_len) for progress, uncached_len in counted),
            output_tokens=sum(progress.num_delivered - progress.num_restored for progress, _ in counted),
            choices=sum(progress.request.sampling.n for progress, _ in counted),
        )

    def _so_far(self) -> SoFar:
        input_tokens = output_tokens = longest = 0
        for progress, _ in self._sent:
            input_tokens += _spent(progress, 0)
            output_tokens += progress.num_delivered - progress.num_restored
            longest = max(longest, progress.longest)
        return SoFar(input_tokens, output_tokens, longest)


def _spent(progress: Progress, uncached_len: int) -> int:
    """Count the prompt tokens that were computed for what ``progress`` has of this router."""
    if progress.num_restored:
        return 0
    return uncached_len if progress.uncached_tokens is None else progress.uncached_tokens
