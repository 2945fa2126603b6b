"""Where the process of a rank after the first can be asked whether it lives.

Owns:      a listener, and the answer to whoever proves that it knows the cluster's token.
Never:     has rooms. To be closed after the agent: a refusal is the proof that nothing here writes any more.
Thread:    the follower's transfer thread, which calls `serve` in every turn.
"""

import time

from kvtransfer.layout import KvLayout
from kvtransfer.peers.link import SocketLinks
from kvtransfer.peers.wire import Hello, Message
from kvtransfer.types import PeerAddress, TransferSettings

STEP_S = 0.02  # how often the listener is looked at


class Alive:
    def __init__(self, settings: TransferSettings, layout: KvLayout, *, host: str, name: str) -> None:
        """``name``: new with every life. Raises: OSError."""
        self._links = SocketLinks(
            host, token=settings.token, call_timeout_s=settings.call_timeout_s, now=time.monotonic()
        )
        self.address = PeerAddress(host=host, port=self._links.port, incarnation=name)
        self._links.introduce(Hello(address=self.address, purpose="probe", layout=layout, ranks=()))
        self._next_s = 0.0

    def serve(self) -> None:
        """Never blocks."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + STEP_S
            self._links.serve(self._links.wait(0.0), self, now)
            self._links.expire(now)

    def link_up(self, link: int, hello: Hello) -> None:
        """Who wants rooms is wrong here."""
        self._links.close(link)

    def link_down(self, link: int, reason: str, *, refused: bool = False) -> None: ...

    def heard(self, link: int, message: Message) -> None: ...

    def close(self) -> None:
        self._links.close_connections()
        self._links.close_listener()
