"""The router's values: queries, replica reports, cache events, decisions and outcomes.

Owns:      nothing; these are frozen values, and the one error a choice can end in. All costs are estimates, in seconds.
Never:     holds a connection, a handle or a tensor; a replica is a string here.
Invariant: ``Pair.prefill_id`` is set iff the prompt is computed there and handed over. The first of a decision's
           `legs` is at its replica and carries its number; the prefill leg, if any, comes second.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvtransfer.pages import NO_KEYS, PageKeys, Tier

TokenIds = Sequence[int] | npt.NDArray[np.int32]  # [L] token ids
Floats = npt.NDArray[np.float64]  # [n] one a replica
Ints = npt.NDArray[np.int64]  # [n]


class Role(enum.Enum):
    """The role of a replica. Each could serve whole requests; a prefill replica only computes prompts for others."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


class NoReplica(Exception):
    """No replica may take the request now; the message lists the replicas and why each was passed over."""

    retryable = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouteQuery:
    """The part of a request that choosing a replica needs."""

    rid: str
    token_ids: TokenIds  # [L] the tokenised prompt
    salt: str = ""  # cache_salt: prefixes are shared only within one salt
    max_new_tokens: int = 128
    priority: int = 0
    session_id: str = ""  # of several equal replicas, the one that had this session last; "" for none
    allowed: frozenset[str] | None = None  # None: every replica
    excluded: frozenset[str] = frozenset()  # for example those that a retry has already tried
    max_wait_s: float = float("inf")  # a longer queue is not accepted for the sake of other requests
    objective_s: float = float("inf")  # its first token should come within this time
    offline: bool = False  # a batch request, which gives way to every other request
    tenant: str = ""  # among whose requests and those of others replicas divide what they compute
    weight: float = 1.0  # of that tenant
    one_replica: str = ""  # why one replica must do all of it; "" where prefill and decode may be apart
    adapter: str = ""  # identity of the adapter (LoRA) that it needs; "": the model as it is

    def __post_init__(self) -> None:
        if len(self.token_ids) == 0:
            raise ValueError(f"request {self.rid} has no tokens; tokenise the prompt before choosing a replica")

    def permits(self, replica_id: str) -> bool:
        return replica_id not in self.excluded and (self.allowed is None or replica_id in self.allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """The last report of a replica about itself."""

    replica_id: str
    time_s: float  # when it was measured, on the router's clock
    num_running: int = 0
    num_waiting: int = 0  # requests whose prompts are still to be computed there
    num_receiving: int = 0  # requests whose prompts are computed elsewhere: they wait for K/V or for pages
    queued_uncached_tokens: int = 0  # prompt tokens queued that no cache holds
    late_uncached_tokens: int = 0  # of those, of late requests, before which one goes that can be in time
    late_factor: float = 0.0  # of the bound of late requests, which others pass; 0: none is passed
    pool_utilization: float = 0.0  # share of the KV pool that a new request cannot have, 0 to 1
    pool_pages: int = 0  # capacity of its KV pool; with 0 the router's index holds nothing for it
    free_pages: int = 0  # of those, the pages that hold nothing, not even cached tokens
    page_size: int = 16  # tokens a page; other than the router's, the index holds nothing for it
    prefill_tokens_per_s: float = 0.0  # 0 until measured
    rate_step_tokens: float = 0.0  # prompt tokens of the steps on which that was measured; 0: not reported
    decode_step_s: float = 0.0  # 0 until measured
    tokens_per_step: float = 1.0  # of a request in such a step: beyond 1 where drafts come true
    max_running_requests: int = 0  # 0: no limit was reported
    healthy: bool = True
    accepting: bool = True  # False while it drains, or has given memory back
    released: bool = False  # it has
    silent: bool = False  # no report has come for too long; then it is not healthy
    role: Role = Role.UNIFIED
    page_bytes: int = 0  # of K and V, all ranks; 0: not reported
    token_bytes: int = 0  # of a token where layers with a window keep a share of the pages; 0: as of a page
    border_bytes: int = 0  # what these keep of a window; or of recurrent states
    host_pages: int = 0  # capacity of its host tier
    store: str = ""  # the store that it reads and writes; replicas with the same one share its pages; "": none at work
    host_s_per_token: float = 0.0  # to load from the host; 0 until measured, as are the next two
    store_s_per_token: float = 0.0  # to read from the store into the host
    store_latency_s: float = 0.0  # of such a read, before its bytes
    adapters: frozenset[str] = frozenset()  # identities of those that it holds
    adapter_load_s: float = 0.0  # to load another; 0 until measured
    fetches: bool = False  # it sends cached pages to other replicas, and takes theirs (fetch.py)
    part: str = ""  # what a page has beside K and V that all layers see: window, state; "": nothing
    border_pages: int = 0  # pages before a border whose parts a request needs to go on there

    @property
    def may_take(self) -> bool:
        return self.healthy and self.accepting

    @property
    def state(self) -> str:
        if self.silent:
            return "silent"
        if not self.healthy:
            return "unhealthy"
        if self.released:
            return "released"
        return "accepting" if self.accepting else "draining"


@dataclass(frozen=True, slots=True, eq=False)
class KeysStored:
    """``tier`` is now the best of a replica that holds these pages; STORE: the store it shares has them.

    A replica's events are numbered from 1 without gaps.
    """

    seq: int
    keys: PageKeys  # [n] the salt is part of a key
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True, eq=False)
class KeysRemoved:
    """These pages left a replica's own tiers; STORE: the store it shares has them not."""

    seq: int
    keys: PageKeys  # [n]
    tier: Tier = Tier.DEVICE  # the last of its own that held them; or STORE
    idle_s: float = 0.0  # since they were last used
    tenant: str = ""  # whose request needed the room; "": of several tenants, or none


@dataclass(frozen=True, slots=True)
class KeysCleared:
    """A replica's own tiers are empty."""

    seq: int


@dataclass(frozen=True, slots=True, eq=False)
class KeysParted:
    """These pages of a replica's device, or their copies on its host, have a part now, or none any more
    (`ReplicaView.part`)."""

    seq: int
    keys: PageKeys  # [n]
    there: bool
    tier: Tier = Tier.DEVICE


IndexEvent = KeysStored | KeysRemoved | KeysCleared | KeysParted


@dataclass(frozen=True, slots=True, eq=False)
class IndexSnapshot:
    """Everything in a replica's cache after event ``seq``."""

    seq: int
    keys: PageKeys  # [n] on the device, in any order
    host_keys: PageKeys = field(default_factory=lambda: NO_KEYS)  # on the host alone
    store_keys: PageKeys = field(default_factory=lambda: NO_KEYS)  # that it knows to be in its store; there may be more
    part_keys: PageKeys = field(default_factory=lambda: NO_KEYS)  # of those on the device, the ones that have a part
    host_part_keys: PageKeys = field(default_factory=lambda: NO_KEYS)  # those whose copy on the host has one


# One number of one replica, or an array of them, one element a replica: each quantity is defined once for both.
FloatT = TypeVar("FloatT", float, Floats)
IntT = TypeVar("IntT", int, Ints)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadEstimate(Generic[FloatT]):
    """The load of replicas now: their last reports, corrected by what was sent since and by the reports' age."""

    in_flight: FloatT  # requests this router sent there that have not ended; whole numbers, as are the next four
    requests_since: FloatT  # of those, sent after the report was measured
    tokens_since: FloatT  # predicted uncached prompt tokens of ``requests_since``
    ended_since: FloatT  # requests sent before the report that ended after it
    num_requests: FloatT  # running and waiting; never less than this router itself has open
    num_busy: FloatT  # of those, delayed by a prompt computed there: all but those that wait for K/V from elsewhere
    num_waiting: FloatT  # of those, waiting for their prompts to be computed: not whole, a queue drains by tokens
    queued_tokens: FloatT  # uncached prompt tokens still to compute
    late_tokens: FloatT  # of those, of late requests, which others go before
    prefill_tokens_per_s: FloatT  # > 0
    rate_error: FloatT  # by which share that may be wrong
    share: FloatT  # of what waits, the part that goes before a request: other tenants have no more than its own
    rate_step_tokens: FloatT  # prompt tokens of the steps on which that was measured; 0 until a replica has reported it
    decode_step_s: FloatT
    decode_token_s: FloatT  # between two tokens of a request
    fixed_step_s: FloatT  # of any step, however few its tokens
    utilization: FloatT  # share of the pool that a new request cannot have
    pool_tokens: FloatT  # 0 if not reported
    free_tokens: FloatT  # of those, in pages that hold nothing
    max_requests: FloatT  # that run at once; infinite if not reported

    def at(self: "LoadEstimate[Floats]", index: int) -> "LoadEstimate[float]":
        return LoadEstimate(**_row(self, index))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms(Generic[FloatT, IntT]):
    """The parts of an estimated time to first token, and what they are made of (policies.py; their names: terms.py)."""

    queued_tokens: FloatT  # uncached prompt tokens before ours
    passed_tokens: FloatT  # and of late requests, before which ours goes since it can be in time there
    device_tokens: IntT  # of our prompt, on the replica's device
    host_tokens: IntT  # after those, on its host, if loading them is quicker than computing them; else 0
    store_tokens: IntT  # after those, in its store, likewise
    fetched_tokens: IntT  # after those of device and host, from another replica, if that is quicker; else 0
    # of our prompt, whose K and V the device has, and a part not (`ReplicaView.part`): it cannot go on behind them
    gone_tokens: IntT
    own_tokens: IntT  # of our prompt, to be computed
    prefill_tokens_per_s: FloatT  # the rate believed now
    queue_s: FloatT
    own_s: FloatT
    load_s: FloatT  # to load the host's and the store's tokens
    fetch_s: FloatT  # how much longer than the queue the fetch takes, which goes on meanwhile
    adapter_s: FloatT  # to load its adapter, where the replica neither holds nor loads it
    step_s: FloatT  # what our step takes however few its tokens are, as far as the rate of full steps lacks it
    decode_s: FloatT  # decode steps of running requests that ours waits for
    pressure_s: FloatT  # wait for pages or a place among the running
    way_s: FloatT  # the request to the replica, and its token back; the same everywhere
    ttft_s: FloatT  # queue + own + load + fetch + adapter + step + decode + pressure + way
    # no part of our time: what computing a prefix anew adds to the waits of others, summed over them, what a fetch
    # costs its donor's requests, and loading again the adapter that makes room for ours
    behind_s: FloatT

    @property
    def wait_s(self) -> FloatT:
        """Time until the prompt could begin, whatever the prompt itself takes."""
        return self.queue_s + self.decode_s + self.pressure_s

    @property
    def cost_s(self) -> FloatT:
        """What `estimated_ttft` compares."""
        return self.ttft_s + self.behind_s

    def at(self: "Terms[Floats, Ints]", index: int) -> "Terms[float, int]":
        return Terms(**_row(self, index))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairTerms(Generic[FloatT, IntT]):
    """What a request costs at a decode replica: computed there, or received (pair.py; their names: terms.py)."""

    cached_tokens: IntT  # of the prompt, predicted
    own_tokens: IntT  # uncached: computed there, or transferred
    transfer_pages: IntT
    transfer_bytes: IntT
    # received
    transfer_s: FloatT
    overhead_s: FloatT
    load_s: FloatT  # to load what its lower tiers hold; part of ttft too, as the next two
    adapter_s: FloatT  # to load its adapter
    pressure_s: FloatT  # wait for pages or a place
    # computed there
    ttft_s: FloatT  # queue, own tokens, load, decode step in progress, pressure: the candidate's terms
    stall_s: FloatT  # what its requests lose together while it computes
    # either way
    slower_s: FloatT  # slower steps beside those that run there
    local_cost_s: FloatT  # ttft + stall + slower
    receive_cost_s: FloatT  # transfer + overhead + load + pressure + slower, without the prefill replica's part

    def at(self: "PairTerms[Floats, Ints]", index: int) -> "PairTerms[float, int]":
        return PairTerms(**_row(self, index))


def _row(columns: LoadEstimate[Floats] | Terms[Floats, Ints] | PairTerms[Floats, Ints], index: int) -> dict[str, Any]:
    """Every field's element ``index`` as a Python number."""
    return {each.name: getattr(columns, each.name)[index].item() for each in fields(columns)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica that may take the request: its report, its load as estimated, and what the request would cost there."""

    view: ReplicaView
    load: LoadEstimate[float]
    overlap_tokens: int  # prompt tokens that it need not compute: whole pages of all tiers, fewer than the prompt
    terms: Terms[float, int]

    @property
    def replica_id(self) -> str:
        return self.view.replica_id

    @property
    def ended_by(self) -> str:
        """What ends the hit on its device: "full", K and V of all layers; or "window" or "state", which are gone where
        K and V are there."""
        return self.view.part if self.terms.gone_tokens else "full"

    @property
    def num_requests(self) -> int:
        return round(self.load.num_requests)

    @property
    def queued_tokens(self) -> int:
        """Uncached prompt tokens that must be computed there before ours."""
        return round(self.terms.queued_tokens)


class Reason(enum.Enum):
    """The reason why a replica was chosen."""

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
    MORE_FREE = "more_free_pages"  # of those whose estimates differ by less than rates are known
    TIE = "tie_broken_at_random"


class PairReason(enum.Enum):
    """Why the prompt is handed over, or is not."""

    TRANSFER = "kv_transfer_costs_less"
    ALWAYS = "kv_transfer_always"  # a setting
    LOCAL = "local_costs_less"
    NO_PREFILL = "no_prefill_replica"
    ONE_REPLICA = "needs_one_replica"  # Pair.why says what in the request needs it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """Where the prompt of a request is computed that decodes at the decision's replica, and why."""

    prefill_id: str | None  # None: the decode replica does all of it
    prefill_number: int  # of the prefill leg in the router's books; of no meaning without one
    reason: PairReason
    why: str = ""  # with ONE_REPLICA: what in the request
    best_prefill_id: str | None = None  # where the prompt would be computed soonest, taken or not
    prefill_s: float | None = None  # and how long until that is done
    link_bytes_per_s: float  # as estimated
    link_measured: bool  # else assumed
    decode_ids: Sequence[str]  # [D]
    costs: PairTerms[Floats, Ints]  # [D] of every decode replica
    chosen: PairTerms[float, int]  # the row of the one taken

    def rows(self) -> Iterator[tuple[str, PairTerms[float, int]]]:
        """Each decode replica with its terms."""
        return ((replica_id, self.costs.at(index)) for index, replica_id in enumerate(self.decode_ids))

    @property
    def kv_transfer_cost_s(self) -> float | None:
        """Of the chosen replica; None where no prefill replica may take the request."""
        return None if self.prefill_s is None else self.prefill_s + self.chosen.receive_cost_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFetch:
    """The pages of a prompt that its replica gets from another one, since that is quicker than computing them."""

    donor_id: str
    end_tokens: int  # of the prompt, in whole pages: its replica has the first ones, and fetches the others
    num_tokens: int  # expected to be fetched
    num_bytes: int
    took_s: float  # expected, from the order to the last page
    compute_s: float  # to compute them instead
    within_s: float  # afterwards they are computed
    donor_ttft_s: float  # when the first token would come where they are; infinite: it may not take the request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """The replica that a request goes to, and everything that decided it."""

    number: int  # grows with this router's decisions; a retry of a request is a decision of its own
    rid: str
    replica_id: str  # that makes the tokens: of a pair, the decode replica
    policy: str
    reason: Reason
    compared: tuple[str, ...]
    candidates: Sequence[Candidate]  # all that could take it, by id (prefill replicas first); made when asked for
    num_tokens: int  # prompt length
    overlap_tokens: int  # predicted to be cached where the prompt is computed, in all tiers
    host_tokens: int = 0  # of those, on its host
    store_tokens: int = 0  # of those, in its store
    load_s: float = 0.0  # predicted for loading both
    predicted_ttft_s: float
    shortest_wait_s: float  # until the prompt could begin, at any candidate, whatever the prompt itself takes
    best_overlap: tuple[str, int]  # the replica predicted to hold most of the prompt, and how many tokens
    keys: PageKeys  # [num_tokens // page_size] of the prompt's whole pages
    time_s: float  # on the router's clock
    objective_s: float = float("inf")  # for its first token
    overrun: float = 1.0  # measured over predicted TTFT of late: waits may be so much longer than estimated
    dry_run: bool = False  # made by explain_only: nothing was sent
    pair: Pair | None = None  # how, where prefill and decode are apart
    gone_tokens: int = 0  # behind which it cannot go on where the prompt is computed (`Terms.gone_tokens`)
    prefill_tokens_per_s: float = 0.0  # there, as believed
    fetch: PageFetch | None = None

    @property
    def prefill_id(self) -> str | None:
        """The replica that computes the prompt and hands it over; None where one replica does all."""
        return None if self.pair is None else self.pair.prefill_id

    @property
    def given_up(self) -> int:
        """The cached tokens that the replica with the best overlap has and the winner lacks."""
        return self.best_overlap[1] - self.overlap_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteLeg:
    """The part of a decision that one replica does; the router keeps books for each."""

    replica_id: str
    number: int
    own_tokens: int  # predicted to be computed there
    overlap_tokens: int  # predicted to be cached there


def legs(decision: Decision) -> tuple[RouteLeg, ...]:
    """Return the one leg, or the decode leg and then the prefill leg."""
    own_tokens, pair = decision.num_tokens - decision.overlap_tokens, decision.pair
    if pair is None or pair.prefill_id is None:
        return (RouteLeg(replica_id=decision.replica_id, number=decision.number, own_tokens=own_tokens,
                    overlap_tokens=decision.overlap_tokens),)  # fmt: skip
    return (
        RouteLeg(replica_id=decision.replica_id, number=decision.number, own_tokens=0,
            overlap_tokens=pair.chosen.cached_tokens),
        RouteLeg(replica_id=pair.prefill_id, number=pair.prefill_number, own_tokens=own_tokens,
            overlap_tokens=decision.overlap_tokens),
    )  # fmt: skip


class Ending(enum.Enum):
    """How a decision's request has ended."""

    OK = "ok"
    CANCELLED = "cancelled"
    ERROR = "error"  # the replica died or refused; the request may be tried elsewhere
    MOVED = "moved"  # it waited, and its replica gave it back for another one


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOutcome:
    """The end of a decision's request, and what it measured."""

    ending: Ending
    cached_tokens: int = 0  # prompt tokens the replica did not have to compute
    ttft_s: float | None = None  # from the decision to the first token; None if there was none
    engine_s: float | None = None  # of it, at the replica, by its own clock; None if it told nothing
    kv_transfer_failed: bool = False  # so the decode replica computed the prompt; ``cached_tokens`` are its own
