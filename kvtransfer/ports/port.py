"""The transfer side of one rank: its pool, its agent, what it owes its peers and what it waits for.

Owns:      which peers are connected, and which part of a page goes to or comes from each of their ranks.
Never:     decides about rooms (the transfer service), or when a wait is over.
Invariant: a rank writes only the heads that it has, and only into pools of its own fingerprint; what it reports has
           been verified as `Verify` says.
Thread:    the transfer thread; may be made in another. Digests of larger posts are made in a thread of its own
           ("manta-digest"), one post ahead of the writes: both leave the interpreter free while they work.

A peer's agent is told to the transfer library at the first write to it: a rank that is only written to needs no
endpoint of its own, and none is left behind when the writer restarts.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from kvtransfer.errors import IncompatibleLayout, PeerLost
from kvtransfer.layout import PageSlice, head_slices
from kvtransfer.ports.checksum import Spans, destination_spans, page_digests, source_spans
from kvtransfer.ports.memory import KvMemory
from kvtransfer.ports.notes import Note, pack
from kvtransfer.ports.notification_inbox import NotificationInbox, Source, num_digests
from kvtransfer.ports.outbox import OpenOrder, Outbox, Post
from kvtransfer.ports.rank_port import Digests, ExpectOrder, NoteCounts, PeerRanks, PortEvent, RankInfo, WriteOrder
from kvtransfer.ports.transfer_agent import RemotePool, TransferAgent
from kvtransfer.types import PageIds, Verify

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


class AgentPort:
    """A `RankPort` over any `TransferAgent`."""

    def __init__(
        self,
        memory: KvMemory,
        rank: int,
        agent: TransferAgent,
        *,
        verify: Verify = Verify.ALL,
        pages_per_write: int = 16,
    ) -> None:
        self.info = RankInfo(
            rank=rank,
            agent=agent.name,
            metadata=agent.metadata,
            base_address=memory.base_address,
            num_pages=memory.num_pages,
            device=memory.device,
        )
        self._memory = memory
        self._agent = agent
        self._verify = verify
        self._pages_per_write = pages_per_write
        self._peers: dict[str, _Peer] = {}  # by incarnation
        self._spans: dict[str, Spans] = {}  # by agent of a destination
        self._outbox = Outbox(agent, self._make_note)
        self._inbox = NotificationInbox(memory, verify)
        self._digester = ThreadPoolExecutor(max_workers=1, thread_name_prefix="manta-digest")

    @property
    def num_in_flight(self) -> int:
        """Orders that have not ended."""
        return self._outbox.num_open

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
            slices = head_slices(layout, rank, theirs, info.rank)
            if not slices:
                continue
            destinations.append(_Destination(info=info, slices=slices, spans=source_spans(slices)))
            incoming = destination_spans(head_slices(theirs, info.rank, layout, rank))
            self._inbox.add_source(info.agent, Source(incarnation=peer.incarnation, rank=info.rank, spans=incoming))
        self._peers[peer.incarnation] = _Peer(ranks=peer, destinations=tuple(destinations))

    def disconnect(self, incarnation: str) -> None:
        """The peer is dead, said goodbye, or its endpoint broke: its orders end as failed and drained."""
        peer = self._peers.pop(incarnation, None)
        if peer is None:
            return
        agents = [destination.info.agent for destination in peer.destinations]
        self._outbox.drop(incarnation, agents, f"peer {incarnation} was disconnected")
        self._inbox.drop(incarnation)
        for agent in agents:
            self._spans.pop(agent, None)

    def write(self, order: WriteOrder) -> None:
        """-> Written or WriteFailed, at a later `poll`. Raises: ValueError for pages that this pool does not have."""
        peer = self._peers.get(order.incarnation)
        if peer is None:
            self._outbox.refuse(order, f"peer {order.incarnation} is not connected")
            return
        if len(order.src_pages) != len(order.dst_pages):
            raise ValueError(f"{len(order.src_pages)} pages go to {len(order.dst_pages)}: one for each is wanted")
        self._memory.require_pages(order.src_pages)
        limit = min(to.info.num_pages for to in peer.destinations)
        if len(order.dst_pages) and not 0 <= int(order.dst_pages.min()) <= int(order.dst_pages.max()) < limit:
            self._outbox.refuse(order, f"peer {order.incarnation} wants pages that its pool of {limit} does not have")
            return
        try:
            self._add_to_agent(peer)
        except PeerLost as error:
            self._outbox.refuse(order, str(error))
            return
        self._outbox.add(order, [post for to in peer.destinations for post in self._posts(order, to)])

    def expect(self, order: ExpectOrder) -> None:
        self._inbox.expect(order)

    def forget(self, room: int, generation: int) -> None:
        self._inbox.forget(room, generation)

    def poll(self) -> Sequence[PortEvent]:
        """Notes first, so that what has come is known before a deadline is looked at."""
        for agent, note in self._agent.take_notes():
            self._inbox.take(agent, note)
        return [*self._inbox.arrived(), *self._outbox.poll()]

    def close(self) -> None:
        self._digester.shutdown(wait=True, cancel_futures=True)
        self._agent.close()

    def check(self) -> None:
        """The invariants of this object."""
        self._inbox.check()
        self._outbox.check()

    def _add_to_agent(self, peer: _Peer) -> None:
        """Raises: PeerLost."""
        if peer.added:
            return
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
            self._spans[to.info.agent] = to.spans
        peer.added = True

    def _posts(self, order: WriteOrder, to: _Destination) -> list[Post]:
        """The order for one destination; a note alone when there is no page and it is the last."""
        num_pages, step = len(order.src_pages), self._pages_per_write
        starts = range(0, num_pages, step) if num_pages else range(1 if order.last else 0)
        opened = OpenOrder(order=order)
        posts = [
            Post(
                open_order=opened,
                agent=to.info.agent,
                page_offset=order.page_offset + start,
                src_pages=order.src_pages[start : start + step],
                dst_pages=order.dst_pages[start : start + step],
                last=order.last and start + step >= num_pages,
                num_bytes=len(order.src_pages[start : start + step]) * to.bytes_per_page,
            )
            for start in starts
        ]
        for post in posts:
            if post.num_bytes >= DIGEST_AHEAD_BYTES and self._verify is Verify.ALL:
                post.digests = self._digester.submit(self._digests, post.src_pages, post.agent)
        return posts

    def _digests(self, src_pages: PageIds, agent: str) -> Digests:
        """Of the last pages of a post, as many as `Verify` wants."""
        num_skipped = len(src_pages) - num_digests(self._verify, len(src_pages))
        return page_digests(self._memory, src_pages[num_skipped:], self._spans[agent])

    def _make_note(self, post: Post) -> bytes:
        order = post.open_order.order
        return pack(
            Note(
                room=order.room,
                generation=order.generation,
                src_rank=self.info.rank,
                page_offset=post.page_offset,
                num_pages=len(post.src_pages),
                last=post.last,
                digests=post.digests.result() if post.digests else self._digests(post.src_pages, post.agent),
                meta=order.meta if post.last else b"",
            )
        )
