"""What a decision over prefill and decode replicas was made of.

Owns:      nothing; frozen values. All costs are estimates, in seconds.
Invariant: ``Pair.prefill_id`` is set iff the prompt is computed there and handed over.

What is compared is the cost of a request: the time until its first token, and what it takes from those that run.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]  # [D] one a decode replica
Ints = npt.NDArray[np.int64]  # [D]


class PairReason(enum.Enum):
    """Why the prompt is handed over, or is not."""

    HAND_OFF = "hand_off_costs_less"
    ALWAYS = "hand_off_always"  # a setting
    LOCAL = "local_costs_less"
    NO_PREFILL = "no_prefill_replica"
    ONE_REPLICA = "needs_one_replica"  # what in the request asks for it stands in Pair.why


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTerms:
    """What a request would cost at one decode replica: computed there, or received."""

    replica_id: str
    cached_tokens: int  # of the prompt, predicted
    own_tokens: int  # uncached: computed there, or transferred
    transfer_pages: int
    transfer_bytes: int
    # computed there
    ttft_s: float  # queue, own tokens, decode step in progress, pressure: the candidate's terms
    stall_s: float  # what its requests lose together while it computes
    # received
    transfer_s: float
    overhead_s: float
    # either way
    pressure_s: float  # wait for pages or a place
    load_s: float  # slower steps beside those that run there
    local_cost_s: float
    receive_cost_s: float  # without the prefill replica's part


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairCosts:
    """`PairTerms` of all decode replicas as arrays."""

    replica_ids: Sequence[str]  # [D]
    cached_tokens: Ints
    own_tokens: Ints
    transfer_pages: Ints
    page_bytes: Ints
    link_bytes_per_s: float
    ttft_s: Floats
    stall_s: Floats
    transfer_s: Floats
    overhead_s: float
    pressure_s: Floats
    load_s: Floats

    @property
    def local_s(self) -> Floats:
        return self.ttft_s + self.stall_s + self.load_s

    @property
    def receive_s(self) -> Floats:
        return self.transfer_s + self.overhead_s + self.pressure_s + self.load_s

    def __len__(self) -> int:
        return len(self.replica_ids)

    def row(self, index: int) -> PairTerms:
        return PairTerms(
            replica_id=self.replica_ids[index],
            cached_tokens=int(self.cached_tokens[index]),
            own_tokens=int(self.own_tokens[index]),
            transfer_pages=int(self.transfer_pages[index]),
            transfer_bytes=int(self.transfer_pages[index] * self.page_bytes[index]),
            ttft_s=float(self.ttft_s[index]),
            stall_s=float(self.stall_s[index]),
            transfer_s=float(self.transfer_s[index]),
            overhead_s=self.overhead_s,
            pressure_s=float(self.pressure_s[index]),
            load_s=float(self.load_s[index]),
            local_cost_s=float(self.local_s[index]),
            receive_cost_s=float(self.receive_s[index]),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """Who computes the prompt of a request that decodes at the decision's replica, and why."""

    prefill_id: str | None  # None: the decode replica does all of it
    prefill_number: int  # of the prefill leg in the router's books; of no meaning without one
    reason: PairReason
    why: str = ""  # with ONE_REPLICA: what in the request
    best_prefill_id: str | None = None  # where the prompt would be computed soonest, taken or not
    prefill_s: float | None = None  # and how long until that is done
    shortest_wait_s: float  # at the best of all that may be taken, whatever the prompt itself takes
    link_bytes_per_s: float  # believed
    link_measured: bool  # else assumed
    costs: PairCosts  # of every decode replica
    chosen: PairTerms  # the row of the one taken

    @property
    def hand_off_cost_s(self) -> float | None:
        """Of the chosen replica; None where no prefill replica may take the request."""
        return None if self.prefill_s is None else self.prefill_s + self.chosen.receive_cost_s
