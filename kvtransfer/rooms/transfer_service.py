"""The interface between an engine and its transfer service, and the states of a room.

Owns:      the protocol that `KvTransfer` (kv_transfer.py) implements and replicas/disagg uses; `KVPoll` and its legal
           moves, of which each room (sender.py, receiver.py) keeps one.
Invariant: monotone: a room moves forward or fails, and never leaves FAILED or SUCCESS.

    BOOTSTRAPPING ──> WAITING_FOR_INPUT ──> TRANSFERRING ──> SUCCESS
          │                  │                   │
          └──────────────────┴───────────────────┴──> FAILED, then drained: its pages are safe again

                     decode side (KVReceiver)               prefill side (KVSender)
    BOOTSTRAPPING      not connected to the peer yet          the leg or the open is missing
    WAITING_FOR_INPUT  open is sent, no page has arrived      SendReady is out, the engine gave no page yet
    TRANSFERRING       pages arrive                           pages are written
    SUCCESS            all pages and meta are verified        acknowledged, and every write has ended

Every wait, its owner and its limit:
    a decode leg, for row and pages            replicas/disagg        open_timeout_s; then it is computed there, and the
      (before there is a room)                                          prefill leg aborted
    a stranger's hello, our own dial           peers/link.py          call_timeout_s
    a prefill leg, for its open                KVSender               SendOrder.deadline_s
    an open, for its prefill leg               KVSender               open_timeout_s
    a room, from receive() to its first page,  KVReceiver             ReceiveOrder.deadline_s: room_timeout_s; prefill's
      and from each page to the next                                    queue included, so a last bound
    a sender, from its last written page to    KVSender               Open.deadline_s + call_timeout_s (a backstop)
      the acknowledgement
    a peer's heartbeat                         peers/peer_table.py    heartbeat_s * heartbeat_misses
    the heartbeat of a rank's own port         replicas/runner        rank_timeout_s; then the service ends, and the
      (remote_port.py)                                                  replica is replaced
    pages in quarantine                        rooms/receiving.py     none: only the peer's Drained or its proven death
    goodbye                                    rooms/kv_transfer.py   call_timeout_s

Source: SGLang's KVPoll, where ranks agree by all-reduce MIN; here one service sees the ports of all ranks.
"""

import enum
from collections.abc import Callable
from typing import Protocol

from kvtransfer.types import (
    KVTransferMeta,
    PageIds,
    PeerAddress,
    ReceiveOrder,
    SendOrder,
    TransferEvent,
    TransferStats,
    WriteTimes,
)


class TransferService(Protocol):
    """Both sides of any number of rooms of one engine. Methods never block, and belong to the engine's thread; a peer
    that misbehaves is an event, never an exception."""

    address: PeerAddress
    holds_back: bool  # requests decode here: copy for fetches in a part of the time alone
    on_event: Callable[[], None]  # called on the transfer thread when `drain_events` has something; must not block

    def receive(self, order: ReceiveOrder) -> None:
        """-> exactly one of Received, or ReceiveFailed and later ReceiveDrained."""
        ...

    def abort_receive(self, room: int) -> None:
        """The request has ended. -> ReceiveFailed then ReceiveDrained, unless the room's last event is out already."""
        ...

    def expect_send(self, order: SendOrder) -> None:
        """-> SendReady, or SendFailed and SendDrained."""
        ...

    def send_pages(self, room: int, page_offset: int, pages: PageIds) -> None:
        """Send pages [page_offset, page_offset + n) of the sequence; their K/V lies in ``pages`` and is final.

        Sends start at SendReady.first_page and have no holes. A room that has failed meanwhile ignores it.
        """
        ...

    def send_last(self, room: int, page_offset: int, pages: PageIds, meta: KVTransferMeta) -> None:
        """Send the last pages, maybe none, and the meta. -> SendDone, or SendFailed and SendDrained."""
        ...

    def abort_send(self, room: int, reason: str) -> None:
        """The request cannot be served here. -> SendFailed, SendDrained, unless the last event is out already."""
        ...

    def peer_is_dead(self, incarnation: str) -> None:
        """The supervisor of a peer's machine reports that it is dead, whose address refuses no dial. What the peer has
        sent and is still on its way is kept from landing; after the grace its rooms drain, unless a hello of its own
        comes before. Any thread; idempotent."""
        ...

    def out_of_reach(self) -> tuple[PeerAddress, ...]:
        """Return the peers that cannot be reached while rooms wait for their answer or their death. Any thread."""
        ...

    def drain_events(self) -> list[TransferEvent]:
        """What happened since the last call, in order."""
        ...

    def stats(self) -> TransferStats: ...

    def drain_write_times(self) -> list[WriteTimes]:
        """The times of writes that have ended well since the last call, at most 4,096 of them."""
        ...

    @property
    def error(self) -> BaseException | None:
        """What ended the service, if it was not `close`: no room will ever succeed here. Any thread."""
        ...

    def close(self) -> None:
        """Say goodbye to all peers and stop. Rooms that are open end without events."""
        ...


class KVPoll(enum.IntEnum):
    """The state of one room (SPEC H02)."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


LEGAL_MOVES: dict[KVPoll, frozenset[KVPoll]] = {
    KVPoll.BOOTSTRAPPING: frozenset({KVPoll.WAITING_FOR_INPUT, KVPoll.FAILED}),
    KVPoll.WAITING_FOR_INPUT: frozenset({KVPoll.TRANSFERRING, KVPoll.FAILED}),
    KVPoll.TRANSFERRING: frozenset({KVPoll.SUCCESS, KVPoll.FAILED}),
    KVPoll.SUCCESS: frozenset(),
    KVPoll.FAILED: frozenset(),
}


def move(state: KVPoll, to: KVPoll) -> KVPoll:
    """``to``, if that is a legal move."""
    assert to in LEGAL_MOVES[state], f"a room cannot go from {state.name} to {to.name}"
    return to
