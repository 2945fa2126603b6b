"""The transfer side of one rank: its pool, its agent, the writes it owes its peers and the pages it waits for.

Owns:      which peers are connected, which part of a page each of their ranks shares with this one; write orders that
           have not ended, and their transfers.
Never:     decides about rooms or whose turn it is (rooms/sending.py), or when a wait is over.
Invariant: a rank writes only the heads that it has, and only into pools of its own fingerprint; what it reports has
           been verified as `Verify` says. Of each order exactly one of `Written` and ``WriteFailed(drained=True)`` is
           reported, as its last event, when none of its posts is in flight; before the latter,
           ``WriteFailed(drained=False)`` at most once.
Thread:    the transfer thread; may be made in another. Digests of larger posts are made in a thread of its own
           ("manta-digest"), before the writes that need them: both release the interpreter while they work.

A peer's agent is added to the transfer library at the first write to it: a rank that is only written to needs no
endpoint of its own, and none is left behind when the writer restarts. A write blocks this thread while it copies (CMA),
so that one `poll` posts POSTS_PER_POLL at most and the service gets its turn.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from kvtransfer.errors import IncompatibleLayout, PeerLost
from kvtransfer.layout import MAX_COUNT, PageSlice, head_slices
from kvtransfer.ports.memory import KvMemory, Spans, destination_spans, page_digests, source_spans
from kvtransfer.ports.notifications import Note, NotificationInbox, Source, num_digests, pack
from kvtransfer.ports.rank_port import (
    Digests,
    ExpectOrder,
    NoteCounts,
    PeerRanks,
    PortEvent,
    RankInfo,
    WriteFailed,
    WriteOrder,
    Written,
)
from kvtransfer.ports.transfer_agent import TERMINAL, RemotePool, Transfer, TransferAgent, TransferState
from kvtransfer.types import Verify, WriteTimes

POSTS_PER_POLL = 2
DIGEST_AHEAD_BYTES = 1 << 21  # smaller posts are digested when they are made: a thread's turn costs more


@dataclass(frozen=True, slots=True, kw_only=True)
class _Destination:
    """A rank of a peer that holds heads of ours."""

    info: RankInfo
    slices: tuple[PageSlice, ...]
    spans: Spans  # of our page, what goes there

    @property
    def bytes_per_page(self) -> int:
        return sum(part.num_bytes for part in self.slices)


@dataclass(slots=True, kw_only=True)
class _Peer:
    ranks: PeerRanks
    destinations: tuple[_Destination, ...]
    added: bool = False  # to the agent


@dataclass(slots=True, kw_only=True, eq=False)
class _Post:
    """The pages of one order, for one rank of the peer."""

    to: _Destination
    digests: Future[Digests] | None = None  # where they are made ahead
    transfer: Transfer | None = None  # once it is posted


@dataclass(slots=True, kw_only=True, eq=False)
class _OpenOrder:
    """A write order that has not ended."""

    order: WriteOrder
    queued: list[_Post]
    in_flight: list[_Post] = field(default_factory=list)
    num_bytes: int = 0  # written so far
    times: list[WriteTimes] = field(default_factory=list)  # of its writes that are done, where the library says
    reason: str | None = None  # why it failed


class AgentPort:
    """A `RankPort` over any `TransferAgent`."""

    def __init__(self, memory: KvMemory, rank: int, agent: TransferAgent, *, verify: Verify = Verify.ALL) -> None:
        self.info = RankInfo(
            rank=rank,
            agent=agent.name,
            metadata=agent.metadata,
            base_address=memory.base_address,
            num_pages=memory.num_pages,
            device=memory.device,
            on_host=memory.on_host,
        )
        self._memory = memory
        self._agent = agent
        self._verify = verify
        self._peers: dict[str, _Peer] = {}  # by incarnation
        self._broken: dict[str, str] = {}  # incarnation whose endpoint failed -> why; until it is disconnected
        self._open: dict[int, _OpenOrder] = {}  # by order id, the oldest first
        self._events: list[PortEvent] = []
        self._inbox = NotificationInbox(memory, verify)
        self._digester = ThreadPoolExecutor(max_workers=1, thread_name_prefix="manta-digest")

    @property
    def num_in_flight(self) -> int:
        """Orders that have not ended."""
        return len(self._open)

    @property
    def note_counts(self) -> NoteCounts:
        return self._inbox.counts

    def connect(self, peer: PeerRanks) -> None:
        """Idempotent per incarnation. Raises: IncompatibleLayout. A dead peer shows at the first write."""
        if peer.incarnation in self._peers:
            return
        layout, rank = self._memory.layout, self.info.rank
        if peer.fingerprint != layout.fingerprint:
            raise IncompatibleLayout(
                f"pages here have the fingerprint {layout.fingerprint}, those of {peer.incarnation} "
                f"{peer.fingerprint}: compare the layouts in the hello"
            )
        theirs = replace(layout, tp=peer.tp)
        layout.require_compatible(theirs)
        destinations = []
        for info in peer.ranks:
            if slices := head_slices(layout, rank, theirs, info.rank):
                destinations.append(_Destination(info=info, slices=slices, spans=source_spans(slices)))
            if incoming := destination_spans(head_slices(theirs, info.rank, layout, rank)):
                self._inbox.add_source(info.agent, Source(incarnation=peer.incarnation, rank=info.rank, spans=incoming))
        self._peers[peer.incarnation] = _Peer(ranks=peer, destinations=tuple(destinations))

    def disconnect(self, incarnation: str) -> None:
        """The peer is dead, said goodbye, or its endpoint broke: its orders end as failed and drained."""
        peer = self._peers.pop(incarnation, None)
        if peer is None:
            return
        for to in peer.destinations:
            self._agent.remove_peer(to.info.agent)
        self._fail_all(incarnation, f"peer {incarnation} was disconnected")
        for opened in self._to(incarnation):
            for post in list(opened.in_flight):
                self._check(opened, post)
            assert not opened.in_flight, f"order {opened.order.order_id} is in flight after its agents were removed"
        self._broken.pop(incarnation, None)
        self._inbox.drop(incarnation)

    def fence(self, incarnation: str, host: str) -> None:
        """See `RankPort.fence`."""
        peer = self._peers.get(incarnation)
        for info in () if peer is None else peer.ranks.ranks:
            self._agent.fence(info.agent, host if info.alive_at is None else info.alive_at.host)

    def write(self, order: WriteOrder) -> None:
        """-> Written or WriteFailed, at a later `poll`. Raises: ValueError for pages that this pool does not have."""
        assert order.order_id not in self._open, f"order {order.order_id} is open already"
        peer = self._peers.get(order.incarnation)
        if peer is None:
            self._refuse(order, f"peer {order.incarnation} is not connected")
            return
        if len(order.src_pages) != len(order.dst_pages):
            raise ValueError(f"{len(order.src_pages)} pages go to {len(order.dst_pages)}: one for each is wanted")
        self._memory.require_pages(order.src_pages)
        limit = min((to.info.num_pages for to in peer.destinations), default=MAX_COUNT)
        if len(order.dst_pages) and not 0 <= int(order.dst_pages.min()) <= int(order.dst_pages.max()) < limit:
            self._refuse(order, f"peer {order.incarnation} wants pages that its pool of {limit} does not have")
        elif (reason := self._broken.get(order.incarnation) or self._add_to_agent(peer)) is not None:
            self._refuse(order, reason)
        else:
            has_posts = len(order.src_pages) > 0 or order.last
            opened = _OpenOrder(order=order, queued=[_Post(to=to) for to in peer.destinations] if has_posts else [])
            self._open[order.order_id] = opened
            self._make_digests_ahead(opened)
            self._end_if_over(opened)

    def expect(self, order: ExpectOrder) -> None:
        self._inbox.expect(order)

    def forget(self, room: int, generation: int) -> None:
        self._inbox.forget(room, generation)

    def poll(self) -> Sequence[PortEvent]:
        """Notes first, so that what has come is known before a deadline is looked at."""
        for agent, note in self._agent.take_notes():
            self._inbox.take(agent, note)
        for _ in range(POSTS_PER_POLL):
            for opened in list(self._open.values()):  # a post blocks, and a note leaves at a check
                for post in list(opened.in_flight):
                    self._check(opened, post)
            if not self._post_next():
                break
        events, self._events = self._events, []
        return [*self._inbox.arrived(), *events]

    def close(self) -> None:
        self._digester.shutdown(wait=True, cancel_futures=True)
        self._agent.close()

    def check(self) -> None:
        """The invariants of this object."""
        self._inbox.check()
        for opened in self._open.values():
            assert opened.in_flight or opened.queued, "an order without posts has ended"
            assert opened.reason is None or opened.in_flight, "a failed order stays only while its source is read"

    def _add_to_agent(self, peer: _Peer) -> str | None:
        """Make the peer's pools known to the agent, once. Returns: why it cannot be reached, or None."""
        if peer.added:
            return None
        try:
            for to in peer.destinations:
                self._agent.add_peer(
                    RemotePool(
                        agent=to.info.agent,
                        metadata=to.info.metadata,
                        base_address=to.info.base_address,
                        num_pages=to.info.num_pages,
                        page_bytes=replace(self._memory.layout, tp=peer.ranks.tp).page_bytes,
                        device=to.info.device,
                        slices=to.slices,
                    )
                )
        except PeerLost as error:
            return str(error)
        peer.added = True
        return None

    # write orders

    def _post_next(self) -> bool:
        """Post one of the oldest order that has any queued. Returns: whether there was one."""
        for opened in self._open.values():
            if opened.queued:
                self._post(opened, opened.queued.pop(0))
                return True
        return False

    def _post(self, opened: _OpenOrder, post: _Post) -> None:
        order, note = opened.order, self._make_note(opened.order, post)
        if not len(order.src_pages):
            try:
                self._agent.send_note(post.to.info.agent, note)
            except PeerLost as error:
                self._break(order.incarnation, str(error))
            self._end_if_over(opened)
            return
        post.transfer = self._agent.write(post.to.info.agent, order.src_pages, order.dst_pages, note)
        opened.in_flight.append(post)
        self._finish(opened, post, post.transfer)

    def _check(self, opened: _OpenOrder, post: _Post) -> None:
        assert post.transfer is not None
        post.transfer.poll()
        self._finish(opened, post, post.transfer)

    def _finish(self, opened: _OpenOrder, post: _Post, transfer: Transfer) -> None:
        """Book the end of ``transfer``, if it has ended."""
        if transfer.state not in TERMINAL:
            return
        state, reason, times = transfer.state, transfer.reason, transfer.times
        transfer.release()
        opened.in_flight.remove(post)
        if state is TransferState.DONE:
            opened.num_bytes += len(opened.order.src_pages) * post.to.bytes_per_page
            opened.times += [] if times is None else [times]
        else:
            self._break(opened.order.incarnation, f"the write to {post.to.info.agent} failed: {reason}")
        self._end_if_over(opened)

    def _break(self, incarnation: str, reason: str) -> None:
        """An endpoint failed: nothing more reaches that peer until it is disconnected and connected again."""
        self._broken.setdefault(incarnation, reason)
        self._fail_all(incarnation, reason)

    def _fail_all(self, incarnation: str, reason: str) -> None:
        """Fail the orders of one peer; those with a post in flight end when that does."""
        for opened in self._to(incarnation):
            if opened.reason is not None:
                continue
            opened.reason, opened.queued = reason, []
            if opened.in_flight:
                self._events.append(WriteFailed(order_id=opened.order.order_id, reason=reason, drained=False))
            self._end_if_over(opened)

    def _to(self, incarnation: str) -> list[_OpenOrder]:
        return [opened for opened in self._open.values() if opened.order.incarnation == incarnation]

    def _refuse(self, order: WriteOrder, reason: str) -> None:
        """Report an order that cannot be begun."""
        self._events.append(WriteFailed(order_id=order.order_id, reason=reason, drained=True))

    def _end_if_over(self, opened: _OpenOrder) -> None:
        order_id = opened.order.order_id
        if opened.queued or opened.in_flight or order_id not in self._open:
            return
        del self._open[order_id]
        if opened.reason is None:
            self._events.append(Written(order_id=order_id, num_bytes=opened.num_bytes, times=tuple(opened.times)))
        else:
            self._refuse(opened.order, opened.reason)

    # notes

    def _make_digests_ahead(self, opened: _OpenOrder) -> None:
        """Where they take longer than a thread's turn."""
        num_pages = len(opened.order.src_pages)
        for post in opened.queued:
            if num_pages * post.to.bytes_per_page >= DIGEST_AHEAD_BYTES and self._verify is Verify.ALL:
                post.digests = self._digester.submit(self._digests, opened.order, post.to)

    def _digests(self, order: WriteOrder, to: _Destination) -> Digests:
        """The digests of the last pages of an order, as many as `Verify` wants."""
        num_skipped = len(order.src_pages) - num_digests(self._verify, len(order.src_pages))
        return page_digests(self._memory, order.src_pages[num_skipped:], to.spans)

    def _make_note(self, order: WriteOrder, post: _Post) -> bytes:
        return pack(
            Note(
                room=order.room,
                generation=order.generation,
                src_rank=self.info.rank,
                page_offset=order.page_offset,
                num_pages=len(order.src_pages),
                last=order.last,
                digests=post.digests.result() if post.digests else self._digests(order, post.to),
                meta=order.meta if self.info.rank == 0 else b"",
            )
        )
