"""The candidates of one decision as arrays, so that a thousand of them cost little more than eight.

Owns:      a copy of what was known of each candidate at the decision; nothing changes it afterwards.
Never:     chooses.
Invariant: every array has one element a candidate, in order of replica ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from routing.types import Candidate, ReplicaView, Sent, Terms

Floats = npt.NDArray[np.float64]  # [n]
Ints = npt.NDArray[np.int64]  # [n]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimates:
    """`Terms` of all candidates."""

    own_tokens: Ints  # [n]
    queue_s: Floats  # [n]
    own_s: Floats  # [n]
    decode_s: Floats  # [n]
    pressure_s: Floats  # [n]
    ttft_s: Floats  # [n] their sum
    behind_s: Floats  # [n] what is added to the waits of others, summed over them
    cost_s: Floats  # [n] ttft_s + behind_s

    @property
    def wait_s(self) -> Floats:
        """Until the prompt could be begun [n], whatever the prompt itself takes."""
        return self.ttft_s - self.own_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Standing:
    """What is believed of each candidate now: the reports corrected by what was sent since and by their age."""

    views: Sequence[ReplicaView]  # [n]
    in_flight: Floats  # [n] whole numbers, as are the next three
    requests_since: Floats  # [n]
    tokens_since: Floats  # [n]
    ended_since: Floats  # [n]
    num_requests: Floats  # [n] running and waiting
    num_busy: Floats  # [n] of those, whom a prompt computed there holds up: not who waits for K/V from elsewhere
    num_waiting: Floats  # [n] of those, whose prompts wait to be computed: not whole, a queue drains by tokens
    queued_tokens: Floats  # [n] uncached prompt tokens still to compute
    prefill_tokens_per_s: Floats  # [n] > 0
    decode_step_s: Floats  # [n]
    utilization: Floats  # [n] share of the pool that a new request cannot have
    pool_tokens: Floats  # [n] 0 if not told
    max_requests: Floats  # [n] that run at once; infinite if not told

    def __len__(self) -> int:
        return len(self.views)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates(Sequence[Candidate]):
    """What a policy sees, and what a decision keeps: a sequence that makes a `Candidate` when asked for it."""

    standing: Standing
    overlap_tokens: Ints  # [n]
    estimates: Estimates

    def __len__(self) -> int:
        return len(self.standing)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        standing, estimates = self.standing, self.estimates
        return Candidate(
            view=standing.views[index],
            sent=Sent(
                in_flight=int(standing.in_flight[index]),
                requests_since=int(standing.requests_since[index]),
                tokens_since=int(standing.tokens_since[index]),
                ended_since=int(standing.ended_since[index]),
            ),
            overlap_tokens=int(self.overlap_tokens[index]),
            num_requests=round(float(standing.num_requests[index])),
            terms=Terms(
                queued_tokens=float(standing.queued_tokens[index]),
                own_tokens=int(estimates.own_tokens[index]),
                prefill_tokens_per_s=float(standing.prefill_tokens_per_s[index]),
                queue_s=float(estimates.queue_s[index]),
                own_s=float(estimates.own_s[index]),
                decode_s=float(estimates.decode_s[index]),
                pressure_s=float(estimates.pressure_s[index]),
                behind_s=float(estimates.behind_s[index]),
            ),
        )

    def replica_id(self, index: int) -> str:
        return self.standing.views[index].replica_id
