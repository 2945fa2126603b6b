"""What one router knows of the replicas: how busy each is, which pages each holds, and how far its events have come.

Owns:      the three books of that (load.py, index.py, feed.py); a replica has one column number in all of them.
Never:     chooses.
Invariant: a replica is in all three books or in none.
Thread:    the router's own.
"""

from collections.abc import Iterable

from kvtransfer.pages import PageKeys
from routing.feed import Feed
from routing.index import PrefixIndex
from routing.load import Eligible, Load
from routing.pair import RouteLeg
from routing.policies import Candidates, estimate
from routing.runs import Pages
from routing.types import ReplicaView, Role, RouteQuery


class FleetState:
    """The replicas of the last `update`, without those forgotten since."""

    def __init__(self, page_size: int) -> None:
        self.load = Load()
        self.apart = False  # some replica is for prefill or decode alone
        self._page_size = page_size
        self._index = PrefixIndex()
        self._feeds: dict[str, Feed] = {}

    def update(self, views: Iterable[ReplicaView]) -> None:
        """Take ``views`` as the replicas that exist now."""
        now = {view.replica_id: view for view in views}
        for replica_id in self.load.ids - now.keys():
            self.forget(replica_id)
        new = [view for replica_id, view in now.items() if replica_id not in self.load.ids]
        for replica_id in self.load.ids:
            view, column = now[replica_id], self.load.column(replica_id)
            self.load.report(view)
            if self._index.capacity(column) != self._capacity(view):
                self._index.leave(column)
                self._index_anew(view)
        if new:
            self.load.join(new)
            for view in new:
                self._index_anew(view)
        self.apart = any(view.role is not Role.UNIFIED for view in now.values())

    def forget(self, replica_id: str) -> None:
        """Remove the replica, if it is known."""
        if self._feeds.pop(replica_id, None) is not None:
            self._index.leave(self.load.column(replica_id))
            self.load.forget(replica_id)

    def feed(self, replica_id: str) -> Feed | None:
        """Return what takes a replica's events; None if the replica is not known."""
        return self._feeds.get(replica_id)

    def candidates(
        self, query: RouteQuery, eligible: Eligible, usable: Pages, now_s: float, *, max_new_tokens: int
    ) -> Candidates:
        """Return what ``query``, whose ``usable`` pages a cache may hold, would meet at each of ``eligible``."""
        overlap_tokens = self._index.overlap(usable, eligible.columns) * self._page_size
        load = self.load.estimate(eligible, now_s)
        terms = estimate(load, overlap_tokens, num_tokens=len(query.token_ids), max_new_tokens=max_new_tokens)
        return Candidates(views=eligible.views, load=load, overlap_tokens=overlap_tokens, terms=terms)

    def send(self, leg: RouteLeg, pages: Pages, *, now_s: float) -> None:
        """Open ``leg`` at its replica, which will soon hold ``pages``."""
        self.load.send(leg.replica_id, number=leg.number, uncached_tokens=leg.own_tokens, now_s=now_s)
        self._index.expect(self.load.column(leg.replica_id), pages, number=leg.number)

    def end(self, leg: RouteLeg, keys: PageKeys) -> bool:
        """Close ``leg`` of a prompt with ``keys``. Return False if it was not open."""
        was_open = self.load.end(leg.number)
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
        assert self._feeds.keys() == self.load.ids

    def _index_anew(self, view: ReplicaView) -> None:
        column = self.load.column(view.replica_id)
        self._index.join(column, capacity=self._capacity(view))
        self._feeds[view.replica_id] = Feed(self._index, column, self.load.is_open)

    def _capacity(self, view: ReplicaView) -> int:
        return view.pool_pages if view.page_size == self._page_size else 0
