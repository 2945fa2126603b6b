"""What `Peers` wants of the sockets below it, and of the rooms above it.

Owns:      nothing; two protocols.
"""

from typing import Literal, Protocol

from kvtransfer.peers.wire import Hello, Message
from kvtransfer.types import PeerAddress

Purpose = Literal["rooms", "probe"]


class Links(Protocol):
    """Authenticated connections, by number. Calls never block, and never call back."""

    def dial(self, address: PeerAddress, purpose: Purpose) -> int:
        """-> `Peers.link_up` or `Peers.link_down` with this number, within call_timeout_s."""
        ...

    def send(self, link: int, message: Message) -> None:
        """In order, as long as the link lives."""
        ...

    def close(self, link: int) -> None:
        """No word of it comes any more. Idempotent."""
        ...


class PeerWatcher(Protocol):
    def peer_up(self, hello: Hello, *, outgoing: bool) -> None: ...

    def peer_down(self, incarnation: str, reason: str, *, outgoing: bool) -> None:
        """The connection is lost or, if outgoing, could not be had."""
        ...

    def peer_dead(self, incarnation: str, reason: str) -> None:
        """All its processes are, and what they sent has landed."""
        ...

    def peer_forgotten(self, incarnation: str) -> None: ...

    def has_business(self, incarnation: str) -> bool:
        """Whether something waits for its word or its death."""
        ...
