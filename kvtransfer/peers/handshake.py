"""The first words on a connection: each side proves that it knows the cluster's token, then says who it is.

Owns:      the order of the first messages, and what is believed before they are through: nothing.
Never:     sends a hello (it carries agents' metadata) to a side that has not proven itself.
Invariant: `peer` is set only after the other side's proof and its hello. No encryption: the token authenticates, the
           network is the cluster's own.

    who listens                       who dials
    Challenge(nonce, address)  ────>
                      <─────────────  ChallengeReply(nonce, address, HMAC(token, dial, both nonces, both addresses))
    Welcome(HMAC(token, listen, the same)), PeerHello ──>
                      <─────────────  PeerHello
The proofs name both ends, lives included: who passes them on to somebody else proves nothing there, and who dials takes
no answer from another address than the one it dialled.
"""

import hashlib
import hmac
import json
import secrets

from kvtransfer.errors import BadMessage, NotAuthenticated
from kvtransfer.peers.wire import (
    MAX_FRAME_BYTES,
    MAX_STRANGER_BYTES,
    Challenge,
    ChallengeReply,
    Message,
    PeerHello,
    Welcome,
)
from kvtransfer.types import PeerAddress


class Handshake:
    """One side's part of it; messages in, messages out."""

    def __init__(self, *, token: bytes, hello: PeerHello, dialled: PeerAddress | None = None) -> None:
        """``dialled``: for the side that dials, whom."""
        self.peer: PeerHello | None = None
        self.max_bytes = MAX_STRANGER_BYTES  # of the next frame from the other side
        self._dialled = dialled
        self._token = token
        self._hello = hello
        self._nonce = secrets.token_hex(16)
        self._theirs: tuple[str, PeerAddress] | None = None  # nonce, and who they say they are
        self._proven = False

    def start(self) -> list[Message]:
        return [] if self._dialled is not None else [Challenge(nonce=self._nonce, address=self._hello.address)]

    def heard(self, message: Message) -> list[Message]:
        """What to answer. Raises: NotAuthenticated, BadMessage; the connection is to be closed then."""
        if isinstance(message, PeerHello) and self._proven:
            if self._theirs is None or message.address != self._theirs[1]:
                raise BadMessage(f"a hello of {message.address} from who has proven to be another")
            self.peer = message
            return []
        if self._proven:
            raise BadMessage(f"a hello is wanted, there is a {type(message).__name__}")
        if isinstance(message, Challenge) and self._dialled is not None and self._theirs is None:
            if (message.address.host, message.address.port) != (self._dialled.host, self._dialled.port):
                raise BadMessage(f"{self._dialled} was dialled, and {message.address} answers")
            self._theirs = message.nonce, message.address
            return [ChallengeReply(nonce=self._nonce, address=self._hello.address, mac=self._mac("dial"))]
        if isinstance(message, ChallengeReply) and self._dialled is None:
            self._theirs = message.nonce, message.address
            self._require("dial", message.mac)
            return [Welcome(mac=self._mac("listen")), self._hello]
        if isinstance(message, Welcome) and self._dialled is not None and self._theirs is not None:
            self._require("listen", message.mac)
            return [self._hello]
        raise BadMessage(f"a {type(message).__name__} does not come now")

    def _mac(self, side: str) -> str:
        assert self._theirs is not None
        ends = [(self._nonce, self._hello.address), self._theirs]
        if self._dialled is None:
            ends.reverse()  # who dials comes first
        text = json.dumps(["manta-transfer", side, *((n, a.host, a.port, a.incarnation) for n, a in ends)])
        return hmac.new(self._token, text.encode(), hashlib.sha256).hexdigest()

    def _require(self, side: str, mac: str) -> None:
        if not hmac.compare_digest(self._mac(side).encode(), mac.encode()):
            raise NotAuthenticated("the other side does not know the cluster's token: give all replicas the same one")
        self._proven = True
        self.max_bytes = MAX_FRAME_BYTES
