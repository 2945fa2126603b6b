"""What one router knows of the replicas: how busy each is, which pages each holds, and how far its events have come.

Owns:      the three books of that (load.py, tiers.py, and a feed for each replica: the number of the last event
           applied, events that came too early, requests that ended lately); a replica has one column in all.
           Also what requests have shown: running means of the errors of predictions, how much later than predicted they
           begin of late, how long they are on their way, and the rates of KV transfers and fetches (fetch.py).
Never:     chooses; fetches a snapshot: it says when one is needed; corrects a prediction: an error must stay visible.
Invariant: a replica is in all three books or in none. Each event is applied once, in the order of the numbers. In sync,
           the index's confirmed pages are those of the replica's cache after event ``seq``, and what else is expected
           comes from decisions that are open or ended lately.
Thread:    the router's own.

    unknown ──event 1, or a snapshot──> in sync ──a number is missing──> gap ──it turns up, or a snapshot──> in sync
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from kvtransfer.pages import NO_KEYS, PageKeys, Tier
from routing.fetch import MOST_DONORS, BytesAsked, Donors, Fetches, quickest
from routing.index import KEY_BITS, Borders, Reach, TierIndex, pages_of
from routing.load import Eligible, Load
from routing.page_owners import Pages
from routing.policies import Candidates, HeldTokens, estimate, held_tokens
from routing.types import (
    Decision,
    Floats,
    IndexEvent,
    IndexSnapshot,
    KeysParted,
    KeysRemoved,
    KeysStored,
    LoadEstimate,
    PageFetch,
    ReplicaView,
    Role,
    RouteLeg,
    RouteOutcome,
    RouteQuery,
)
from routing.why import Departure, Departures, MissCause

# Events kept while one is missing: some seconds' worth. With more, only a snapshot helps, which has their pages too.
MAX_EARLY = 10_000
# A request's last pages are in the next batch of its replica, or in the one after if a batch was already on its way.
BATCHES_UNTIL_SETTLED = 2
# Until the first transfer: a 10 Gbit/s network. One host by shared memory makes 2 to 4e9 (notes on NIXL).
ASSUMED_BYTES_PER_S = 1e9
TELLING_BYTES = 1 << 20  # the time of a smaller one is that of its messages, not of its bytes
# Pages also wait for the sender to compute them, so a slow transfer says little about the link. Nor does the fastest:
# its time runs from when the first pages were seen, so what had arrived by then counts as bytes and not as time.
BELIEVED = 0.75
KEPT = 32
PAIRS = 4096  # of which rates are kept
DOUBLED_S = 15.0  # without any transfer, links are believed to be twice as fast: so that a slow one is tried again
HELD_S, HELD_MOST_S = 2.0, 8.0  # that a pair is left alone after it failed, and at most


@dataclass(frozen=True, slots=True)
class _Ended:
    batch: int  # how many had come when it ended
    number: int  # its decision
    keys: PageKeys


class Feed:
    """The state of one replica's event stream; ``replica`` is its number in the index."""

    def __init__(
        self,
        index: TierIndex,
        replica: int,
        is_open: Callable[[int], bool],
        left: Callable[..., Departure | None] = lambda cause, **fields: None,
    ) -> None:
        """``is_open`` tells whether the request of a decision, by its number, has not ended yet. ``left`` makes a
        `Departure` from this replica, now, of its cause and other fields."""
        self._left = left
        self._index = index
        self._replica = replica
        self._is_open = is_open
        self.seq: int | None = None  # of the last event applied; None: the replica's pages are unknown
        self._early: dict[int, IndexEvent] = {}
        self._num_batches = 0
        self._ended: deque[_Ended] = deque()

    @property
    def in_sync(self) -> bool:
        return self.seq is not None and not self._early

    def apply(self, events: Iterable[IndexEvent]) -> bool:
        """Apply a batch. Return False if an earlier event is missing, or nothing is known yet: fetch a snapshot."""
        self._num_batches += 1
        for event in events:
            if self.seq is None and event.seq == 1:
                self._begin(IndexSnapshot(0, NO_KEYS))  # nothing came before it: the cache was empty
            if self.seq is None or event.seq > self.seq:
                self._early[event.seq] = event
        self._drain()
        if len(self._early) > MAX_EARLY:
            self._early.clear()
            self.seq = None
        self._settle()
        return self.in_sync

    def apply_snapshot(self, snapshot: IndexSnapshot) -> bool:
        """Start over from ``snapshot`` and the events that came since. Return False if one of those is missing."""
        if self.seq is None or snapshot.seq >= self.seq:
            self._begin(snapshot)  # most of its pages have not left
            self._index.stored(self._replica, pages_of(snapshot.store_keys), Tier.STORE)
            self._early = {seq: event for seq, event in self._early.items() if seq > snapshot.seq}
            self._drain()
        return self.in_sync

    def end(self, number: int, keys: PageKeys) -> None:
        """Record that the request of decision ``number`` ended: its expected pages are confirmed soon, or dropped."""
        if self.seq is not None:  # else `_begin` drops them
            self._ended.append(_Ended(self._num_batches, number, keys))

    def _begin(self, snapshot: IndexSnapshot, how: Departure | None = None) -> None:
        """Set the pages of the replica's own tiers; what it had left ``how``. Requests that ended while the feed was
        out of sync add no pages."""
        unsettled = {ended.number for ended in self._ended}
        self._index.replace(
            self._replica, snapshot, keeps=lambda number: number in unsettled or self._is_open(number), how=how
        )
        self.seq = snapshot.seq

    def _drain(self) -> None:
        while self.seq is not None and (event := self._early.pop(self.seq + 1, None)) is not None:
            self.seq = seq = event.seq
            match event:
                case KeysStored(keys=keys, tier=tier):
                    if not self._index.stored(self._replica, pages_of(keys), tier):
                        self.seq = None  # more than it can hold: the index has pages that the replica has no longer
                case KeysRemoved(keys=keys, tier=tier, idle_s=idle_s, tenant=tenant):
                    how = self._left(MissCause.EVICTED, tier=tier, idle_s=idle_s, tenant=tenant)
                    self._index.removed(self._replica, pages_of(keys), tier, how)
                case KeysParted(keys=keys, there=there, tier=tier):
                    self._index.parted(self._replica, pages_of(keys), there=there, tier=tier)
                case _:  # nothing was running there: the pages that open decisions expect are still to come
                    self._begin(IndexSnapshot(seq, NO_KEYS), self._left(MissCause.RESTARTED))

    def _settle(self) -> None:
        while self._ended and self._num_batches >= self._ended[0].batch + BATCHES_UNTIL_SETTLED:
            ended = self._ended.popleft()
            self._index.unexpect(self._replica, pages_of(ended.keys), number=ended.number)


class FleetState:
    """The replicas of the last `update`, without those forgotten since."""

    def __init__(self, page_size: int, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.load = Load()
        self._clock = clock
        self._departures = Departures()
        self.apart = False  # some replica is for prefill or decode alone
        self.way = Way()
        self.links = LinkRates(clock)
        self.asked = BytesAsked()
        self.reused = 0.0  # share of prompt tokens that were cached where they went: a mean of the last ones
        self._fetches = False  # some replica can fetch from another
        self._page_size = page_size
        self._index = TierIndex(self._departures)
        self._feeds: dict[str, Feed] = {}

    def update(self, views: Iterable[ReplicaView]) -> None:
        """Take ``views`` as the replicas that exist now."""
        now = {view.replica_id: view for view in views}
        for replica_id in self.load.ids - now.keys():
            self.forget(replica_id)
        new = [view for replica_id, view in now.items() if replica_id not in self.load.ids]
        for replica_id in self.load.ids:
            self._hear(now[replica_id])
        if new:
            self._join(new)

    def report(self, view: ReplicaView) -> None:
        """Take the ``view`` of one replica, known or new."""
        if view.replica_id in self.load.ids:
            self._hear(view)
        else:
            self._join([view])

    def forget(self, replica_id: str) -> None:
        """Remove the replica, if it is known."""
        if self._feeds.pop(replica_id, None) is not None:
            self._index.leave(self.load.column(replica_id), self._left(replica_id, MissCause.RESTARTED))
            self.load.forget(replica_id)
            self._look_at_roles()

    def departure(self, key: int) -> Departure | None:
        """Return how the page of ``key`` last left a replica, if that is known."""
        page = key & int(KEY_BITS)
        return self._index.departure(page) or self._departures.entries.get(page)

    def holder_beside(self, key: int, decision: Decision) -> str:
        """Return a replica that holds the page of ``key`` and could not take the request of ``decision``; "" if there
        is none."""
        page = key & int(KEY_BITS)
        if not self._index.is_held(page):
            return ""
        others = self.load.ids - {*decision.compared, decision.replica_id}
        return next((each for each in others if self._index.is_held(page, self.load.column(each))), "")

    def _left(self, replica_id: str, cause: MissCause, **fields: Any) -> Departure:
        return Departure(cause=cause, replica_id=replica_id, time_s=self._clock(), **fields)

    def feed(self, replica_id: str) -> Feed | None:
        """Return what takes a replica's events; None if the replica is not known."""
        return self._feeds.get(replica_id)

    def candidates(
        self,
        query: RouteQuery,
        eligible: Eligible,
        usable: Pages,
        now_s: float,
        *,
        max_new_tokens: int,
        waits: Sequence[RouteLeg] = (),
        tries: int | None = None,
        donors: Eligible | None = None,
    ) -> Candidates:
        """Return what ``query``, whose ``usable`` pages a cache may hold, would meet at each of ``eligible``.

        Args: waits: its open legs, if it was sent before and waits: where they are it would keep its place. tries: the
              only one that may fetch, to find out whether links that were slow are quicker by now. donors: those that
              others may fetch from; None: nothing is fetched.
        """
        reach = self._index.reach(usable, eligible.columns)
        load = self.load.estimate(eligible, now_s, before=[leg.number for leg in waits])
        num_tokens = len(query.token_ids)
        held = held_tokens(reach, load, eligible.loading, page_size=self._page_size)
        if not query.offline:
            own_tokens = num_tokens - held.device - held.host - held.store
            numbers = [leg.number for leg in waits]
            self.load.shared(load, eligible, (query.tenant, query.weight), own_tokens, numbers)
        if self._fetches and donors is not None and not query.one_replica:
            there = (reach, load)
            if donors is not eligible:
                there = self._index.reach(usable, donors.columns), self.load.estimate(donors, now_s)
            found = self._donors(held, eligible, donors, *there, usable, hopes=tries is not None)
            fetches = None if found is None else self._fetch(found, held, load, eligible, num_tokens)
            if fetches is not None and tries is not None:
                fetches = fetches.without(np.arange(len(held.device)) != tries)
            held = replace(held, fetches=fetches)
        for leg in waits:  # the index expects that all of its prompt will be there: by itself
            at = eligible.columns == self.load.column(leg.replica_id)
            held.device[at] = np.minimum(held.device[at], leg.overlap_tokens)
            if held.fetches is not None:
                held = replace(held, fetches=held.fetches.without(at))
        terms = estimate(
            load, held, num_tokens=num_tokens, adapter_s=self.load.adapter_s(eligible, query.adapter),
            max_new_tokens=max_new_tokens, way_s=self.way.seconds, objective_s=query.objective_s,
        )  # fmt: skip
        return Candidates(
            views=eligible.views, load=load, overlap_tokens=num_tokens - terms.own_tokens, terms=terms,
            fetches=held.fetches,
        )  # fmt: skip

    def _donors(
        self, held: HeldTokens, receivers: Eligible, donors: Eligible, reach: Reach, load: LoadEstimate[Floats],
        usable: Pages, *, hopes: bool,
    ) -> Donors | None:  # fmt: skip
        """Return those of ``donors`` that have more of a prompt than one of ``receivers``; None if there is none."""
        if self.links.unsure and self.asked.of:
            return None
        ps = self._page_size
        able = np.array([view.fetches for view in receivers.views], dtype=np.bool_)
        first = int(((held.device + held.host) // ps).min(where=able, initial=len(usable)))
        asked, asked_there = (
            np.array([self.asked.of[view.replica_id] for view in of.views], dtype=np.float64)
            for of in (receivers, donors)
        )
        most = np.lexsort((asked_there, -reach.own))
        at = [int(each) for each in most if donors.views[each].fetches and reach.own[each] > first][:MOST_DONORS]
        if not at:
            return None
        columns = donors.columns[at]
        known = [self._index.confirmed(usable, int(each), first) for each in columns]
        rest_s = np.where(
            load.queued_tokens > 0, load.rate_step_tokens / load.prefill_tokens_per_s, load.decode_step_s
        ) * np.minimum(load.num_requests, 1.0)  # fmt: skip
        ids = [donors.views[each].replica_id for each in at]
        return Donors(
            ids=ids,
            itself=receivers.columns[:, None] == columns,
            device_tokens=np.minimum(reach.device[at], known) * ps,
            tokens=np.minimum(reach.own[at], known) * ps,
            host_s_per_token=donors.loading[0, at],
            wait_s=rest_s[at] / 2,
            num_running=np.maximum(load.num_requests - load.num_waiting, 0.0)[at],
            bytes_per_s=self.links.rates(ids, [view.replica_id for view in receivers.views], hopes=hopes),
            asked_bytes=np.maximum(asked[:, None], asked_there[at]),
        )

    def _fetch(
        self, donors: Donors, held: HeldTokens, load: LoadEstimate[Floats], eligible: Eligible, num_tokens: int
    ) -> Fetches:
        views = eligible.views
        return quickest(
            donors,
            load,
            num_tokens=num_tokens,
            base_tokens=held.device + held.host,
            store_tokens=held.store,
            store_s=held.store_s,
            sent_bytes=np.array(
                [
                    (view.fetches * (view.token_bytes or view.page_bytes / self._page_size), view.border_bytes)
                    for view in views
                ]
            ).T,
            reused=self.reused,
        )

    def send(
        self, leg: RouteLeg, pages: Pages, query: RouteQuery, *, now_s: float, fetch: PageFetch | None = None
    ) -> None:
        """Open ``leg`` of ``query`` at its replica, which will soon hold ``pages`` and the adapter."""
        if fetch is not None:
            self.asked.begin(leg.number, fetch, leg.replica_id)
        tokens = leg.own_tokens
        self.load.send(
            leg.replica_id, number=leg.number, uncached_tokens=tokens, now_s=now_s, adapter=query.adapter,
            tenant=(query.tenant, query.weight),
        )  # fmt: skip
        self._index.expect(self.load.column(leg.replica_id), pages, number=leg.number)

    def end(self, leg: RouteLeg, keys: PageKeys, *, begun: bool = True) -> bool:
        """Close ``leg`` of a prompt with ``keys``, computed if it has ``begun``. Return False if it was not open."""
        if self.asked.of:
            self.asked.end(leg.number)
        share = leg.overlap_tokens / max(leg.overlap_tokens + leg.own_tokens, 1)
        self.reused += (share - self.reused) / WINDOW
        was_open = self.load.end(leg.number, begun=begun)
        if was_open:
            self._feeds[leg.replica_id].end(leg.number, keys)
        return was_open

    def num_pages(self, replica_id: str) -> tuple[int, int]:
        """Return the (confirmed, only expected) pages of a known replica."""
        return self._index.num_pages(self.load.column(replica_id))

    def pages(self, replica_id: str) -> set[int]:
        """Return those pages. Walks the whole index."""
        return self._index.pages(self.load.column(replica_id))

    def check(self) -> None:
        """Raises AssertionError if a book does not add up, or they differ."""
        self.load.check()
        self._index.check()
        self.asked.check()
        assert self._feeds.keys() == self.load.ids

    def _hear(self, view: ReplicaView) -> None:
        column = self.load.column(view.replica_id)
        self.load.report(view)
        if self._index.sizes(column) != self._sizes(view):
            self._index.leave(column, self._left(view.replica_id, MissCause.RESTARTED))
            self._index_anew(view)
        elif self._index.store(column) != view.store:
            self._index.use_store(column, view.store)

    def _join(self, views: list[ReplicaView]) -> None:
        self.load.join(views)
        for view in views:
            self._index_anew(view)
        self._look_at_roles()

    def _look_at_roles(self) -> None:
        self.apart = any(view.role is not Role.UNIFIED for view in self.load.views)
        self._fetches = sum(view.fetches for view in self.load.views) > 1

    def _index_anew(self, view: ReplicaView) -> None:
        column = self.load.column(view.replica_id)
        capacity, host_pages = self._sizes(view)
        borders = Borders(view.border_pages, at_ends=view.part == "state") if view.part and capacity else None
        self._index.join(column, capacity=capacity, host_pages=host_pages, borders=borders)
        self._index.use_store(column, view.store)
        self._feeds[view.replica_id] = Feed(
            self._index, column, self.load.is_open, partial(self._left, view.replica_id)
        )

    def _sizes(self, view: ReplicaView) -> tuple[int, int]:
        """Return how many pages the index may hold of the replica's device and host."""
        fits = view.page_size == self._page_size and view.pool_pages > 0
        return (view.pool_pages, view.host_pages) if fits else (0, 0)


WINDOW = 200  # requests: enough for a mean, few enough to see a change within minutes


@dataclass(slots=True)
class PredictionErrors:
    """Means of actual minus predicted: a positive bias means that the router predicts too little."""

    num: int = 0  # outcomes seen, ever
    cached_bias_tokens: float = 0.0
    cached_abs_tokens: float = 0.0
    ttft_bias_s: float = 0.0
    ttft_abs_s: float = 0.0
    predicted_ttft_s: float = 0.0  # means of both, to hold the errors against
    actual_ttft_s: float = 0.0

    def record(self, decision: Decision, outcome: RouteOutcome) -> None:
        """Add an outcome to the means; one without a first token is ignored."""
        if outcome.ttft_s is None:
            return
        self.num += 1
        weight = 1.0 / min(self.num, WINDOW)  # a plain mean until the window is full
        tokens = outcome.cached_tokens - _predicted(decision, outcome)
        seconds = outcome.ttft_s - decision.predicted_ttft_s
        self.cached_bias_tokens += weight * (tokens - self.cached_bias_tokens)
        self.cached_abs_tokens += weight * (abs(tokens) - self.cached_abs_tokens)
        self.ttft_bias_s += weight * (seconds - self.ttft_bias_s)
        self.ttft_abs_s += weight * (abs(seconds) - self.ttft_abs_s)
        self.predicted_ttft_s += weight * (decision.predicted_ttft_s - self.predicted_ttft_s)
        self.actual_ttft_s += weight * (outcome.ttft_s - self.actual_ttft_s)


def _predicted(decision: Decision, outcome: RouteOutcome) -> int:
    """Return how many tokens were predicted to be cached where the prompt was computed in the end."""
    if outcome.kv_transfer_failed and decision.pair is not None:
        return decision.pair.chosen.cached_tokens
    return decision.overlap_tokens


# What is predicted and what comes are both sums of seconds, so that long waits count; half of them is forgotten in the
# time in which a queue that is too long comes or goes.
OVERRUN_HALF_S = 20.0
TRUE_S = 5.0  # seconds predicted rightly that are always added: a few short requests say little of a long queue
MOST_OVERRUN = 4.0
MEASURED_S = 60.0  # for so long a first token that came too late is a reason to expect another


class Overrun:
    """How much later than predicted first tokens have come of late; the estimate itself is not corrected by it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._actual_s = self._predicted_s = self._as_of_s = 0.0
        self._longest_s = self._longest_at_s = 0.0  # the longest wait of late, and when it ended

    @property
    def factor(self) -> float:
        """Measured over predicted, from 1 to MOST_OVERRUN."""
        kept = self._kept()
        ratio = (kept * self._actual_s + TRUE_S) / (kept * self._predicted_s + TRUE_S)
        return min(max(ratio, 1.0), MOST_OVERRUN)

    def beyond(self, most_s: float) -> float:
        """Return `factor`, or 1 where no first token has come later than ``most_s`` of late: an estimate that was wrong
        may be right by now, so that only a wait that was measured refuses another."""
        measured = self._clock() - self._longest_at_s <= MEASURED_S and self._longest_s > most_s
        return self.factor if measured else 1.0

    def record(self, predicted_s: float, actual_s: float) -> None:
        if actual_s >= self._longest_s or self._clock() - self._longest_at_s > MEASURED_S:
            self._longest_s, self._longest_at_s = actual_s, self._clock()
        kept = self._kept()
        self._actual_s, self._predicted_s = kept * self._actual_s + actual_s, kept * self._predicted_s + predicted_s
        self._as_of_s = self._clock()

    def _kept(self) -> float:
        return float(0.5 ** ((self._clock() - self._as_of_s) / OVERRUN_HALF_S))


KEPT = 32


class Way:
    """The time that a request and its first token are on their way, channel and event loops included: what is missing
    in the times that replicas tell."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=KEPT)

    @property
    def seconds(self) -> float:
        """The median of the last KEPT requests; 0 before the first. A busy loop delays some by far more."""
        return median(self._seconds) if self._seconds else 0.0

    def record(self, outcome: RouteOutcome) -> None:
        """Add an outcome; one whose replica did not tell its part is ignored."""
        if outcome.ttft_s is not None and outcome.engine_s is not None:
            self._seconds.append(max(outcome.ttft_s - outcome.engine_s, 0.0))


class LinkRates:
    """The rates of KV transfers and, apart from them, of fetches between replicas, for which a donor spares a part of
    its time alone; and the pairs whose last fetch failed."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._clock = clock
        self._rates: deque[float] = deque(maxlen=KEPT)  # of KV transfers
        self._fetched: deque[float] = deque(maxlen=KEPT)  # of fetches, of all pairs
        self._of: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()  # of fetches, by donor and receiver
        self._held: dict[tuple[str, str], tuple[float, float]] = {}  # until when, and for how long
        self._last_s = 0.0  # the last fetch that told something; before the first, the last KV transfer

    @property
    def measured(self) -> bool:
        """Whether `bytes_per_s` was measured."""
        return bool(self._rates)

    @property
    def stale(self) -> bool:
        """Whether what fetches are believed to take was measured, but not of late."""
        return bool(self._rates or self._fetched) and self._clock() - self._last_s > DOUBLED_S

    @property
    def unsure(self) -> bool:
        """Whether nothing has shown of late what links carry: then one fetch at a time is to find out."""
        return not (self._rates or self._fetched) or self.stale

    @property
    def bytes_per_s(self) -> float:
        """The rate that a share BELIEVED of the last KEPT KV transfers do not exceed."""
        return _believed(self._rates) if self._rates else ASSUMED_BYTES_PER_S

    def record(self, num_bytes: int, transfer_s: float) -> None:
        """Add the rate of a completed KV transfer: ``num_bytes`` from its first page to its last in ``transfer_s``."""
        if num_bytes >= TELLING_BYTES and transfer_s > 0:
            self._rates.append(num_bytes / transfer_s)
            if not self._fetched:
                self._last_s = self._clock()

    def fetched(self, pair: tuple[str, str], num_bytes: int, took_s: float, *, late: bool = False) -> None:
        """Add the rate of a fetch from one replica of ``pair`` to the other. If it was ``late``, fewer bytes than tell
        something do."""
        num_bytes = max(num_bytes, TELLING_BYTES * late)
        if num_bytes < TELLING_BYTES or took_s <= 0:
            return
        self._last_s = self._clock()
        self._fetched.append(num_bytes / took_s)
        self._of.setdefault(pair, deque(maxlen=KEPT // 4)).append(num_bytes / took_s)
        self._of.move_to_end(pair)
        if len(self._of) > PAIRS:
            self._of.popitem(last=False)

    def failed(self, pair: tuple[str, str]) -> None:
        """Leave ``pair``, whose fetch failed, alone for a while."""
        now_s = self._clock()
        held_s = min(2 * self._held.get(pair, (0.0, HELD_S / 2))[1], HELD_MOST_S)
        self._held = {each: held for each, held in self._held.items() if held[0] + HELD_MOST_S > now_s}
        self._held[pair] = now_s + held_s, held_s

    def rates(self, donors: Sequence[str], receivers: Sequence[str], *, hopes: bool = False) -> Floats:
        """Return [receivers, donors] bytes/s of fetches; 0 for a pair that is left alone. ``hopes``: as quick as they
        may be by now, rather than as measured."""
        now_s, known = self._clock(), self._fetched or self._rates
        hope = 2.0 ** min((now_s - self._last_s) / DOUBLED_S, 10.0) if hopes and known else 1.0
        most = max(ASSUMED_BYTES_PER_S, max(known, default=0.0))
        unmeasured = _believed(known) if known else ASSUMED_BYTES_PER_S
        found = np.full((len(receivers), len(donors)), min(hope * unmeasured, most))
        if self._of or self._held:
            row = {each: at for at, each in enumerate(receivers)}
            column = {each: at for at, each in enumerate(donors)}
            for (donor, receiver), rates in self._of.items():
                if donor in column and receiver in row:
                    found[row[receiver], column[donor]] = min(hope * _believed(rates), most)
            for (donor, receiver), (until_s, _) in self._held.items():
                if donor in column and receiver in row and now_s < until_s:
                    found[row[receiver], column[donor]] = 0.0
        return found


def _believed(rates: deque[float]) -> float:
    return sorted(rates)[int(BELIEVED * (len(rates) - 1))]
