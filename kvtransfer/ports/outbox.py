"""The writes that one rank owes its peers: cut into posts, a few in flight for each peer, rooms in turn.

Owns:      orders that have not ended, their posts, and their transfers.
Never:     knows layouts or digests (port.py makes the note).
Invariant: of each order exactly one of `Written` and ``WriteFailed(drained=True)`` is reported, as its last word, when
           no post of it is in flight; before the latter, ``WriteFailed(drained=False)`` at most once.
Thread:    the transfer thread.

A write blocks this thread while it copies (CMA), so that one `poll` posts a few at most and the service gets its turn.
A peer that hangs holds MAX_IN_FLIGHT posts until it is dropped; other peers go on.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvtransfer.errors import PeerLost
from kvtransfer.ports.rank_port import Digests, PortEvent, WriteFailed, WriteOrder, Written
from kvtransfer.ports.transfer_agent import TERMINAL, Transfer, TransferAgent, TransferState
from kvtransfer.types import PageIds, WriteTimes

MAX_IN_FLIGHT = 4  # posts for each agent of a peer; a post ends with the peer's next turn, which may be late
POSTS_PER_POLL = 2


@dataclass(slots=True, kw_only=True, eq=False)
class OpenOrder:
    """An order that has not ended."""

    order: WriteOrder
    num_bytes: int = 0  # written so far
    times: list[WriteTimes] = field(default_factory=list)  # of its writes that are done, where the library says
    num_queued: int = 0  # posts
    num_in_flight: int = 0
    reason: str | None = None  # why it failed


@dataclass(slots=True, kw_only=True, eq=False)
class Post:
    """At most pages_per_write pages of an order, to one agent."""

    open_order: OpenOrder
    agent: str
    page_offset: int  # counted from the room's first page
    src_pages: PageIds  # [n]
    dst_pages: PageIds  # [n]
    last: bool
    num_bytes: int
    digests: Future[Digests] | None = None  # where they are made ahead
    transfer: Transfer | None = None


@dataclass(slots=True, eq=False)
class _Lane:
    """What one room still has to send to one agent, in order."""

    posts: deque[Post] = field(default_factory=deque)


class Outbox:
    """Posts in turn; see the module's head."""

    def __init__(self, agent: TransferAgent, make_note: Callable[[Post], bytes]) -> None:
        self._agent = agent
        self._make_note = make_note
        self._orders: dict[int, OpenOrder] = {}
        self._lanes: dict[tuple[str, int, int], _Lane] = {}  # by agent, room, generation
        self._turn: deque[tuple[str, int, int]] = deque()  # keys of the lanes; the first is next
        self._in_flight: list[Post] = []
        self._load: dict[str, int] = {}  # posts in flight by agent
        self._broken: dict[str, str] = {}  # incarnation -> why; until it is dropped
        self._events: list[PortEvent] = []

    @property
    def num_open(self) -> int:
        return len(self._orders)

    def add(self, order: WriteOrder, posts: Sequence[Post]) -> None:
        """``posts`` of ``order``; none at all is an order with nothing to do."""
        assert order.order_id not in self._orders, f"order {order.order_id} is open already"
        opened = OpenOrder(order=order, num_queued=len(posts))
        self._orders[order.order_id] = opened
        for post in posts:
            post.open_order = opened
        if order.incarnation in self._broken:
            self._fail(opened, self._broken[order.incarnation])
            return
        for post in posts:
            key = (post.agent, order.room, order.generation)
            if key not in self._lanes:
                self._lanes[key] = _Lane()
                self._turn.append(key)
            self._lanes[key].posts.append(post)
        self._end_if_over(opened)

    def refuse(self, order: WriteOrder, reason: str) -> None:
        """An order that cannot be begun."""
        self._events.append(WriteFailed(order_id=order.order_id, reason=reason, drained=True))

    def drop(self, incarnation: str, agents: Sequence[str], reason: str) -> None:
        """A peer is gone, and so are its ``agents``: all its orders end as failed and drained."""
        for agent in agents:
            self._agent.remove_peer(agent)
        for opened in list(self._orders.values()):
            if opened.order.incarnation == incarnation:
                self._fail(opened, reason)
        for post in [post for post in self._in_flight if post.open_order.order.incarnation == incarnation]:
            self._check(post)
            if post in self._in_flight:  # an agent that was removed fails its transfers; keep what has not
                raise AssertionError(f"a transfer to {post.agent} is in flight after the agent was removed")
        self._broken.pop(incarnation, None)

    def poll(self) -> list[PortEvent]:
        """Check what is in flight, post what may go, and tell what has ended."""
        for _ in range(POSTS_PER_POLL):
            for post in list(self._in_flight):  # a post blocks, and a note leaves at a check
                self._check(post)
            if not self._post_next():
                break
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """The invariants of this object."""
        for opened in self._orders.values():
            here = [post for post in self._in_flight if post.open_order is opened]
            assert len(here) == opened.num_in_flight, "posts in flight are counted"
            assert opened.num_in_flight or opened.num_queued, "an order without posts has ended"
            assert opened.reason is None or opened.num_in_flight, "a failed order stays only while something is read"
        assert len(self._turn) == len(self._lanes) == len(set(self._turn)), "each lane has one turn"
        for agent, load in self._load.items():
            assert load == sum(post.agent == agent for post in self._in_flight) <= MAX_IN_FLIGHT, agent

    def _post_next(self) -> bool:
        """Post one: the first lane in turn that has a post and may send it. False when there is none."""
        for _ in range(len(self._turn)):
            key = self._turn[0]
            self._turn.rotate(-1)
            posts = self._lanes[key].posts
            while posts and posts[0].open_order.reason is not None:
                posts.popleft()
            if not posts:
                del self._lanes[key]
                self._turn.remove(key)
            elif self._load.get(key[0], 0) < MAX_IN_FLIGHT:
                self._post(posts.popleft())
                return True
        return False

    def _post(self, post: Post) -> None:
        opened = post.open_order
        opened.num_queued -= 1
        note = self._make_note(post)
        if not len(post.src_pages):
            try:
                self._agent.send_note(post.agent, note)
            except PeerLost as error:
                self._break(opened.order.incarnation, str(error))
            self._end_if_over(opened)
            return
        post.transfer = self._agent.write(post.agent, post.src_pages, post.dst_pages, note)
        opened.num_in_flight += 1
        self._in_flight.append(post)
        self._load[post.agent] = self._load.get(post.agent, 0) + 1
        if post.transfer.state in TERMINAL:
            self._finish(post)

    def _check(self, post: Post) -> None:
        assert post.transfer is not None
        if post.transfer.poll() in TERMINAL:
            self._finish(post)

    def _finish(self, post: Post) -> None:
        assert post.transfer is not None
        opened = post.open_order
        state, reason, times = post.transfer.state, post.transfer.reason, post.transfer.times
        post.transfer.release()
        self._in_flight.remove(post)
        self._load[post.agent] -= 1
        if not self._load[post.agent]:
            del self._load[post.agent]
        opened.num_in_flight -= 1
        if state is TransferState.DONE:
            opened.num_bytes += post.num_bytes
            opened.times += [] if times is None else [times]
        else:
            self._break(opened.order.incarnation, f"the write to {post.agent} failed: {reason}")
        self._end_if_over(opened)

    def _break(self, incarnation: str, reason: str) -> None:
        """An endpoint failed: nothing more reaches that peer until it is dropped and added again."""
        self._broken.setdefault(incarnation, reason)
        for opened in list(self._orders.values()):
            if opened.order.incarnation == incarnation:
                self._fail(opened, reason)

    def _fail(self, opened: OpenOrder, reason: str) -> None:
        if opened.reason is not None:
            return
        opened.reason, opened.num_queued = reason, 0
        if opened.num_in_flight:
            self._events.append(WriteFailed(order_id=opened.order.order_id, reason=reason, drained=False))
        self._end_if_over(opened)

    def _end_if_over(self, opened: OpenOrder) -> None:
        order_id = opened.order.order_id
        if opened.num_queued or opened.num_in_flight or order_id not in self._orders:
            return
        del self._orders[order_id]
        if opened.reason is None:
            self._events.append(Written(order_id=order_id, num_bytes=opened.num_bytes, times=tuple(opened.times)))
        else:
            self._events.append(WriteFailed(order_id=order_id, reason=opened.reason, drained=True))
