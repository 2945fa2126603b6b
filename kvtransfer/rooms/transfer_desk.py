"""The protocol between an engine and its transfer desk.

Owns:      nothing; `KvTransfer` (desk.py) implements it, replicas/disagg uses it.
"""

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


class KvTransferDesk(Protocol):
    """The transfer desk of one engine (`KvTransfer`): both sides of any number of rooms. Methods never block and may
    be called from one thread, the engine's; a peer that misbehaves is an event, never an exception."""

    address: PeerAddress

    def receive(self, order: ReceiveOrder) -> None:
        """-> exactly one of Received, or ReceiveFailed and later ReceiveDrained."""
        ...

    def abort_receive(self, room: int) -> None:
        """The request is gone. -> ReceiveFailed then ReceiveDrained, unless the room's last event is out already."""
        ...

    def expect_send(self, order: SendOrder) -> None:
        """-> SendReady, or SendFailed and SendDrained."""
        ...

    def send_pages(self, room: int, page_offset: int, pages: PageIds) -> None:
        """K/V of pages [page_offset, page_offset + n) of the sequence lies in ``pages`` and changes no more.

        Sends start at SendReady.first_page and have no holes. A room that has failed meanwhile ignores it.
        """
        ...

    def send_last(self, room: int, page_offset: int, pages: PageIds, meta: KVTransferMeta) -> None:
        """The rest, maybe no page at all, and the word that it is all. -> SendDone, or SendFailed and SendDrained."""
        ...

    def abort_send(self, room: int, reason: str) -> None:
        """The request cannot be served here. -> SendFailed, SendDrained, unless the last event is out already."""
        ...

    def peer_is_dead(self, incarnation: str) -> None:
        """Somebody who knows says that all processes of this peer have ended (its machine is gone: it cannot refuse).
        After the grace its rooms drain; a hello of its own until then says otherwise. From any thread; unknown or
        told twice is fine."""
        ...

    def drain_events(self) -> list[TransferEvent]:
        """What happened since the last call, in order."""
        ...

    def stats(self) -> TransferStats: ...

    def drain_write_times(self) -> list[WriteTimes]:
        """Of the writes that have ended well since the last call; the oldest are lost where nobody asks for long."""
        ...

    @property
    def error(self) -> BaseException | None:
        """What ended the desk, if it was not `close`: no room will ever succeed here. Any thread."""
        ...

    def close(self) -> None:
        """Say goodbye to all peers and stop. Rooms that are open end without events."""
        ...
