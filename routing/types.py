"""The router's values: queries, replica reports, cache events, decisions and outcomes.

Owns:      nothing; these are frozen values, and the one error a choice can end in. All costs are estimates, in seconds.
Never:     holds a connection, a handle or a tensor; a replica is a string here.
Invariant: ``Pair.prefill_id`` is set iff the prompt is computed there and handed over.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtransfer.pages import PageKeys

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


TokenIds = Sequence[int] | npt.NDArray[np.int32]  # [L] token ids


class Role(enum.Enum):
    """What a replica is for. Any of them could do all of a request; a prefill replica is only asked to hand over."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


class NoReplica(Exception):
    """No replica may take the request now. The message lists what there is and why each was passed over."""

    http_status = 503
    retryable = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouteQuery:
    """One request, as far as choosing a replica needs it."""

    rid: str
    token_ids: TokenIds  # [L] the tokenised prompt
    salt: str = ""  # cache_salt: prefixes are shared only within one salt
    max_new_tokens: int = 128
    priority: int = 0
    session_id: str = ""  # of several equal replicas, the one that had this session last; "" for none
    allowed: frozenset[str] | None = None  # None: every replica
    excluded: frozenset[str] = frozenset()  # for example those that a retry has already tried
    max_wait_s: float = float("inf")  # others' delay is no reason for a longer queue than this
    one_replica: str = ""  # why one replica must do all of it; "" where prefill and decode may be apart

    def __post_init__(self) -> None:
        if len(self.token_ids) == 0:
            raise ValueError(f"request {self.rid} has no tokens; tokenise the prompt before choosing a replica")

    def permits(self, replica_id: str) -> bool:
        return replica_id not in self.excluded and (self.allowed is None or replica_id in self.allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """The last that a replica said of itself."""

    replica_id: str
    time_s: float  # when it was measured, on the router's clock
    num_running: int = 0
    num_waiting: int = 0  # for their prompts to be computed there
    num_receiving: int = 0  # their prompts are computed elsewhere: they wait for K/V, or for pages to have it in
    queued_uncached_tokens: int = 0  # prompt tokens queued that no cache holds
    pool_utilization: float = 0.0  # share of the KV pool that a new request cannot have, 0 to 1
    pool_pages: int = 0  # capacity of its KV pool; with 0 the router's index holds nothing for it
    page_size: int = 16  # tokens a page; other than the router's, the index holds nothing for it
    prefill_tokens_per_s: float = 0.0  # 0 until measured
    decode_step_s: float = 0.0  # 0 until measured
    max_running_requests: int = 0  # 0: no limit was told
    healthy: bool = True
    accepting: bool = True  # False while it drains
    role: Role = Role.UNIFIED
    page_bytes: int = 0  # of K and V, all ranks; 0: not told

    @property
    def may_take(self) -> bool:
        return self.healthy and self.accepting

    @property
    def state(self) -> str:
        if not self.healthy:
            return "unhealthy"
        return "accepting" if self.accepting else "draining"


@dataclass(frozen=True, slots=True, eq=False)
class KeysStored:
    """These pages entered a replica's cache. A replica's events are numbered from 1 without gaps."""

    seq: int
    keys: PageKeys  # [n] the salt is part of a key


@dataclass(frozen=True, slots=True, eq=False)
class KeysRemoved:
    """These pages left a replica's cache."""

    seq: int
    keys: PageKeys  # [n]


@dataclass(frozen=True, slots=True)
class KeysCleared:
    """A replica's cache is empty."""

    seq: int


IndexEvent = KeysStored | KeysRemoved | KeysCleared


@dataclass(frozen=True, slots=True, eq=False)
class IndexSnapshot:
    """Everything in a replica's cache after event ``seq``."""

    seq: int
    keys: PageKeys  # [n], in any order


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What one router knows of a replica beyond the replica's last report."""

    in_flight: int = 0  # requests this router sent there that have not ended
    requests_since: int = 0  # of those, sent after the report was measured
    tokens_since: int = 0  # predicted uncached prompt tokens of ``requests_since``
    ended_since: int = 0  # requests sent before the report that ended after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The parts of one replica's estimated time to first token: tokens, and the seconds made of them (ttft.py)."""

    queued_tokens: float  # uncached prompt tokens before ours
    own_tokens: int  # uncached prompt tokens of ours
    prefill_tokens_per_s: float  # the rate believed now
    queue_s: float
    own_s: float
    decode_s: float  # decode steps of running requests that ours waits for
    pressure_s: float  # wait for pages or a place among the running
    behind_s: float  # no part of our time: what computing a prefix anew adds to the waits of others, summed over them

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.own_s + self.decode_s + self.pressure_s

    @property
    def cost_s(self) -> float:
        """What `estimated_ttft` compares."""
        return self.ttft_s + self.behind_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica that might have taken the request: its report, what was known beyond it, and what ours would cost."""

    view: ReplicaView
    sent: Sent
    overlap_tokens: int  # prompt tokens it is predicted to hold: whole pages, fewer than the prompt
    num_requests: int  # believed to run or wait there; never less than this router itself has open
    terms: Terms

    @property
    def replica_id(self) -> str:
        return self.view.replica_id

    @property
    def queued_tokens(self) -> int:
        """Uncached prompt tokens that must be computed there before ours."""
        return round(self.terms.queued_tokens)


class Reason(enum.Enum):
    """Why the winner won."""

    ONLY = "only_candidate"
    TURN = "next_in_turn"
    RANDOM = "drawn_at_random"
    SOONEST = "soonest_first_token"
    WAIT_ALLOWED = "soonest_of_those_allowed"  # elsewhere it would be sooner, behind a queue that is too long
    CHEAPEST = "lowest_cost"  # of a decode replica: pair.py
    LEAST_DELAY = "least_delay_for_all"
    LONGEST_PREFIX = "longest_prefix"
    BALANCE = "load_out_of_balance"
    FEWER_REQUESTS = "fewer_requests"
    FEWER_TOKENS = "fewer_queued_tokens"
    SESSION = "same_session"
    TIE = "tie_broken_at_random"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """Where a request goes, and everything that decided it."""

    number: int  # grows with this router's decisions; a retry of a request is a decision of its own
    rid: str
    replica_id: str  # that makes the tokens: of a pair, the decode replica
    policy: str
    reason: Reason
    compared: tuple[str, ...]
    candidates: Sequence[Candidate]  # all that might have taken it, by id (prefill replicas first); made when asked for
    num_tokens: int  # prompt length
    overlap_tokens: int  # predicted to be cached where the prompt is computed
    predicted_ttft_s: float
    best_overlap: tuple[str, int]  # the replica predicted to hold most of the prompt, and how many tokens
    keys: PageKeys  # [num_tokens // page_size] of the prompt's whole pages
    time_s: float  # on the router's clock
    dry_run: bool = False  # made by explain_only: nothing was sent
    pair: Pair | None = None  # how, where prefill and decode are apart

    @property
    def prefill_id(self) -> str | None:
        """The replica that computes the prompt and hands it over; None where one replica does all."""
        return None if self.pair is None else self.pair.prefill_id

    @property
    def shortest_wait_s(self) -> float:
        """Until the prompt could be begun, at the best candidate for that, whatever the prompt itself takes."""
        if self.pair is not None:
            return self.pair.shortest_wait_s
        return min(each.terms.ttft_s - each.terms.own_s for each in self.candidates)

    @property
    def given_up(self) -> int:
        """Cached tokens that the best overlap had more than the winner."""
        return self.best_overlap[1] - self.overlap_tokens


class Ending(enum.Enum):
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"  # the replica died or refused; the request may be tried elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOutcome:
    """What became of a decision."""

    ending: Ending
    cached_tokens: int = 0  # prompt tokens the replica did not have to compute
    ttft_s: float | None = None  # from the decision to the first token; None if there was none
    hand_off_failed: bool = False  # so the decode replica computed the prompt; ``cached_tokens`` are its own
