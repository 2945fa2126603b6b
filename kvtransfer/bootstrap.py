"""The first words on a connection: each side proves that it knows the cluster's token, then says who it is.

Owns:      the order of the first messages, and what is believed before they are through: nothing.
Never:     sends a hello (it carries agents' metadata) to a side that has not proven itself.
Invariant: `peer` is set only after the other side's proof and its hello. No encryption: the token authenticates, the
           network is the cluster's own.

    who listens                       who dials
    Challenge(nonce)  ─────────────>
                      <─────────────  Answer(nonce, HMAC(token, dial, both nonces))
    Welcome(HMAC(token, listen, both nonces)), Hello ──>
                      <─────────────  Hello
"""

import hashlib
import hmac
import secrets

from kvtransfer.errors import BadMessage, NotAuthenticated
from kvtransfer.wire import MAX_FRAME_BYTES, MAX_STRANGER_BYTES, Answer, Challenge, Hello, Message, Welcome


class Handshake:
    """One side's part of it; messages in, messages out."""

    def __init__(self, *, dialling: bool, token: bytes, hello: Hello) -> None:
        self.peer: Hello | None = None
        self.max_bytes = MAX_STRANGER_BYTES  # of the next frame from the other side
        self._dialling = dialling
        self._token = token
        self._hello = hello
        self._nonce = secrets.token_hex(16)
        self._theirs = ""
        self._proven = False

    def start(self) -> list[Message]:
        return [] if self._dialling else [Challenge(nonce=self._nonce)]

    def heard(self, message: Message) -> list[Message]:
        """What to answer. Raises: NotAuthenticated, BadMessage; the connection is to be closed then."""
        if isinstance(message, Hello) and self._proven:
            self.peer = message
            return []
        if self._proven:
            raise BadMessage(f"a hello is wanted, there is a {type(message).__name__}")
        if isinstance(message, Challenge) and self._dialling and not self._theirs:
            self._theirs = message.nonce
            return [Answer(nonce=self._nonce, mac=self._mac("dial"))]
        if isinstance(message, Answer) and not self._dialling:
            self._theirs = message.nonce
            self._require("dial", message.mac)
            return [Welcome(mac=self._mac("listen")), self._hello]
        if isinstance(message, Welcome) and self._dialling and self._theirs:
            self._require("listen", message.mac)
            return [self._hello]
        raise BadMessage(f"a {type(message).__name__} does not come now")

    def _mac(self, side: str) -> str:
        nonces = (self._theirs, self._nonce) if self._dialling else (self._nonce, self._theirs)
        text = "|".join(("manta-transfer", side, *nonces))
        return hmac.new(self._token, text.encode(), hashlib.sha256).hexdigest()

    def _require(self, side: str, mac: str) -> None:
        if not hmac.compare_digest(self._mac(side).encode(), mac.encode()):
            raise NotAuthenticated("the other side does not know the cluster's token: give all replicas the same one")
        self._proven = True
        self.max_bytes = MAX_FRAME_BYTES
