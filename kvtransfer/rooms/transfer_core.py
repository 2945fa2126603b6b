"""The transfer service without its thread, sockets and clock: the rooms of both sides, and the peers.

Owns:      the wiring; the events that wait for the engine. The direction of a link decides which side gets its
           messages: the engine that dialled is the receiver.
Never:     blocks, sleeps or reads a clock: `kv_transfer.py` sets the time, and tests set another.
Invariant: check() of all parts; a port learns of a peer at its hello and forgets it at its proven death only.
Thread:    the transfer thread.
"""

import logging
from collections.abc import Sequence

from kvtransfer.errors import BadMessage, IncompatibleLayout, PeerLost
from kvtransfer.layout import KvLayout
from kvtransfer.peers.peer_table import Links, PeerTable
from kvtransfer.peers.wire import Abort, Ack, Bye, Drained, Fail, Message, Open, PeerHello, Ping, Posted, encode_meta
from kvtransfer.ports.rank_port import Arrived, PeerRanks, RankPort
from kvtransfer.rooms.receiving import ReceivingRooms
from kvtransfer.rooms.sending import SendingRooms
from kvtransfer.types import (
    KVTransferMeta,
    PageIds,
    ReceiveOrder,
    SendOrder,
    TransferEvent,
    TransferSettings,
    TransferStats,
)

log = logging.getLogger(__name__)


class TransferCore:
    """Both sides of all rooms of one engine. Call, in this order: what ports, links and the engine report; then
    `expire`; then `post_writes`."""

    def __init__(
        self, settings: TransferSettings, layout: KvLayout, ports: Sequence[RankPort], links: Links, now: float
    ) -> None:
        if [port.info.rank for port in ports] != list(range(layout.tp)):
            raise ValueError(f"one port for each of {layout.tp} ranks is wanted, in order")
        self.now = now
        self.events: list[TransferEvent] = []
        self._layout = layout
        self._ports = ports
        self._incompatible: dict[str, str] = {}  # incarnation -> why
        self.peers = PeerTable(settings, links, self)
        self.sending = SendingRooms(
            layout,
            settings,
            ports,
            events=self.events,
            send=lambda incarnation, message: self.peers.send(incarnation, message, outgoing=False),
        )
        self.receiving = ReceivingRooms(
            layout,
            ports,
            events=self.events,
            send=lambda incarnation, message: self.peers.send(incarnation, message, outgoing=True),
        )

    # the engine's orders

    def receive(self, order: ReceiveOrder) -> None:
        incarnation = order.peer.incarnation
        refusal = self.peers.want(order.peer, self.now) or self._incompatible.get(incarnation, "")
        self.receiving.receive(order, self.now, refusal=refusal)

    def abort_receive(self, room: int) -> None:
        self.receiving.abort(room, self.now)

    def expect_send(self, order: SendOrder) -> None:
        self.sending.expect(order, self.now)

    def send(self, room: int, page_offset: int, pages: PageIds, meta: KVTransferMeta | None) -> None:
        self.sending.send(room, page_offset, pages, None if meta is None else encode_meta(meta), self.now)

    def abort_send(self, room: int, reason: str) -> None:
        self.sending.abort(room, reason, self.now)

    def peer_is_dead(self, incarnation: str) -> None:
        if (address := self.peers.address(incarnation)) is not None:
            for port in self._ports:
                port.fence(incarnation, address.host)
            self.peers.declare_dead(incarnation, self.now)

    # reports of links and ports

    def link_up(self, link: int, hello: PeerHello) -> None:
        self.peers.link_up(link, hello, self.now)

    def link_down(self, link: int, reason: str, *, refused: bool = False) -> None:
        self.peers.link_down(link, reason, self.now, refused=refused)

    def heard(self, link: int, message: Message) -> None:
        """Pass a message on. Raises: BadMessage for one of the wrong direction; the link must be closed then."""
        end = self.peers.end_of(link)
        if end is None:
            return  # closed meanwhile
        incarnation, outgoing = end
        self.peers.heard(link, self.now)
        if isinstance(message, Ping) or (isinstance(message, Posted) and outgoing):
            return
        if isinstance(message, Bye):
            self.link_down(link, "the peer has shut down")
        elif isinstance(message, Open | Abort | Ack) and not outgoing:
            self.sending.heard(incarnation, message, self.now)
        elif isinstance(message, Fail | Drained) and outgoing:
            self.receiving.heard(incarnation, message, self.now)
        else:
            raise BadMessage(f"a {type(message).__name__} does not belong here")

    def poll_ports(self) -> bool:
        """Take the ports' events. Returns: whether there were any."""
        any_event = False
        for rank, port in enumerate(self._ports):
            for event in port.poll():
                any_event = True
                if isinstance(event, Arrived):
                    self.receiving.arrived(rank, event, self.now)
                elif (broken := self.sending.wrote(rank, event, self.now)) is not None:
                    self._reconnect(broken)
        return any_event

    # reports of the peer table

    def peer_up(self, hello: PeerHello, *, outgoing: bool) -> None:
        incarnation = hello.address.incarnation
        ranks = PeerRanks(
            incarnation=incarnation, fingerprint=hello.layout.fingerprint, tp=hello.layout.tp, ranks=hello.ranks
        )
        try:
            self._layout.require_compatible(hello.layout)
            numbers = [rank.rank for rank in hello.ranks]
            if len(numbers) != hello.layout.tp or numbers != list(range(len(numbers))):
                raise IncompatibleLayout(f"the hello names {len(hello.ranks)} ranks, its tp is {hello.layout.tp}")
            for port in self._ports:
                port.connect(ranks)
        except IncompatibleLayout as error:
            log.warning("peer %s: %s", incarnation, error)
            self._incompatible[incarnation] = str(error)
            if outgoing:
                self.receiving.peer_down(incarnation, str(error), self.now)
        except PeerLost as error:
            self.peers.drop(incarnation, str(error), self.now)
            return
        refusal = self._incompatible.get(incarnation, "")
        if not outgoing:
            self.sending.receiver_up(ranks, refusal)
        elif not refusal:
            self.receiving.peer_up(incarnation, hello.layout, self.now)

    def peer_down(self, incarnation: str, reason: str, *, outgoing: bool) -> None:
        if outgoing:
            self.receiving.peer_down(incarnation, reason, self.now)
        else:
            self.sending.receiver_down(incarnation, reason, self.now)

    def peer_dead(self, incarnation: str, reason: str) -> None:
        self.receiving.peer_dead(incarnation, reason, self.now)
        self.sending.receiver_dead(incarnation, reason, self.now)
        self.peer_forgotten(incarnation)

    def peer_forgotten(self, incarnation: str) -> None:
        self.sending.receiver_dead(incarnation, "out of reach", self.now)
        self._incompatible.pop(incarnation, None)
        for port in self._ports:
            port.disconnect(incarnation)

    def _reconnect(self, ranks: PeerRanks) -> None:
        """Replace a failed endpoint, which stays failed (notes/nixl.md section 4): forget the peer and connect anew."""
        self.receiving.peer_broken(ranks.incarnation, "the transfer endpoint of the peer has failed", self.now)
        try:
            for port in self._ports:
                port.disconnect(ranks.incarnation)
                port.connect(ranks)
        except PeerLost as error:
            self.peers.drop(ranks.incarnation, str(error), self.now)

    def has_business(self, incarnation: str) -> bool:
        return self.receiving.has_business(incarnation) or self.sending.has_business(incarnation)

    # the loop

    def expire(self) -> None:
        """Fail what is past its deadline; after everything else, so that what came in time counts."""
        self.peers.tick(self.now)
        self.sending.expire(self.now)
        self.receiving.expire(self.now)

    def post_writes(self, *, holds_back: bool) -> bool:
        return self.sending.post_writes(self.now, holds_back=holds_back)

    @property
    def next_s(self) -> float:
        """When `expire` has something to do next."""
        return min(self.peers.next_s, self.sending.next_s, self.receiving.next_s)

    @property
    def num_open(self) -> int:
        """Rooms whose last event or message is still to come."""
        return self.sending.num_rooms + self.receiving.num_rooms

    def fail_all(self, reason: str) -> None:
        self.sending.fail_all(reason, self.now)
        self.receiving.fail_all(reason, self.now)

    def stats(self) -> TransferStats:
        receiving, sending = self.receiving, self.sending
        notes = [port.note_counts for port in self._ports]
        return TransferStats(
            rooms_receiving=receiving.num_rooms - len(receiving.quarantine),
            rooms_sending=sending.num_rooms - sending.num_draining,
            rooms_draining=len(receiving.quarantine) + sending.num_draining,
            peers=self.peers.num_up,
            sent_bytes=sending.sent_bytes,
            sent_pages=sending.sent_pages,
            received_pages=receiving.received_pages,
            received_bytes=receiving.received_bytes,
            sends_done=sending.num_done,
            sends_failed=sending.num_failed,
            receives_done=receiving.num_done,
            receives_failed=receiving.num_failed,
            digest_mismatches=receiving.num_mismatches,
            late_messages=sending.num_late + receiving.num_late + sum(of.late + of.malformed for of in notes),
            early_notes=sum(of.early for of in notes),
            oldest_drain_s=receiving.quarantine.oldest_s(self.now),
        )

    def check(self) -> None:
        self.peers.check()
        self.sending.check()
        self.receiving.check()
