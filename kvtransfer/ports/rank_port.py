"""The orders and events between the transfer service and the ranks of one engine: each has a pool, an agent and a port.

Owns:      nothing; frozen values, and the protocol of a port.
Invariant: page ids are the same on every rank; a rank writes only the heads that it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtransfer.layout import MAX_COUNT
from kvtransfer.types import PageIds, PeerAddress, WriteTimes

Digests = npt.NDArray[np.uint64]  # [n] one per page


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a peer must know of one rank to write into its pool, or to be written to from it."""

    rank: int
    agent: str  # name, new with every incarnation
    metadata: bytes  # of the agent; trusted input, only ever taken from an authenticated peer
    base_address: int  # of page 0
    num_pages: int  # page 0, the sink, included
    device: int  # 0 for host memory
    on_host: bool = True  # peers do not need it
    alive_at: PeerAddress | None = None  # where its process answers until its agent is closed; None: the service's own

    def __post_init__(self) -> None:
        if not (0 <= self.rank < MAX_COUNT and 0 <= self.device < MAX_COUNT and 0 <= self.base_address < 2**63):
            raise ValueError(f"rank {self.rank}, device {self.device}, address {self.base_address}: none is negative")
        if not 0 < self.num_pages < MAX_COUNT:
            raise ValueError(f"{self.num_pages} pages: more than 0 and less than {MAX_COUNT} are wanted")

    @property
    def place(self) -> str:
        """Where the pool lies: "cpu", or "cuda:0"."""
        return "cpu" if self.on_host else f"cuda:{self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRanks:
    """The ranks of a peer engine, from its hello."""

    incarnation: str
    fingerprint: str
    tp: int
    ranks: tuple[RankInfo, ...]  # [tp]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOrder:
    """One write: copy pages of each rank to all ranks of the peer that hold any of its heads."""

    order_id: int
    incarnation: str  # of the peer
    room: int
    generation: int
    page_offset: int  # of the first page, counted from the room's first
    src_pages: PageIds  # [n]
    dst_pages: PageIds  # [n]
    last: bool  # no more after this; n may be 0 then
    meta: bytes = b""  # with ``last``; rank 0 sends it


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectOrder:
    """This rank's pool will be written to: where the room's pages lie, to verify them as they come."""

    room: int
    generation: int
    incarnation: str  # of the peer
    pages: PageIds  # [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The order has ended well on all its destinations: its source is free."""

    order_id: int
    num_bytes: int
    times: tuple[WriteTimes, ...] = field(default=(), compare=False)  # of each of its writes, where that is known


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFailed:
    """The order has failed; ``drained``: no write reads its source.

    An order that fails while a post of it is in flight is reported twice: at once with ``drained=False``, and when the
    last such post has ended, or its peer was disconnected, with ``drained=True``. The last event of every order is one
    `Written` or one ``WriteFailed(drained=True)``.
    """

    order_id: int
    reason: str
    drained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Pages of a room have been written by one rank of the peer, and were verified.

    Writes of one rank may pass each other: ``last`` can come before pages that lie in front of it.
    """

    room: int
    generation: int
    incarnation: str
    src_rank: int
    page_offset: int
    num_pages: int
    num_bytes: int
    last: bool
    bad_pages: tuple[int, ...]  # of this pool, whose digest was wrong
    meta: bytes = b""


PortEvent = Written | WriteFailed | Arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteCounts:
    """Notes of this rank's pool that could not be used when they came."""

    late: int = 0  # dropped: of a room or generation that is over, of another sender, or seen before
    malformed: int = 0  # dropped: not to be read
    early: int = 0  # as of now: kept until their room is expected


class RankPort(Protocol):
    """The transfer side of one rank: its pool, its agent, its digests. Used from the transfer thread only."""

    info: RankInfo

    def connect(self, peer: PeerRanks) -> None:
        """Idempotent per incarnation. Raises: PeerLost, IncompatibleLayout. After a `WriteFailed` whose reason is a
        broken endpoint, nothing reaches that incarnation until it was disconnected and connected again."""
        ...

    def disconnect(self, incarnation: str) -> None:
        """Forget a peer that is dead or said goodbye; its orders in flight end as failed. Idempotent."""
        ...

    def fence(self, incarnation: str, host: str) -> None:
        """Have nothing land here that a peer on the dead machine ``host`` has sent, except what has reached this
        machine. `disconnect` follows."""
        ...

    def write(self, order: WriteOrder) -> None:
        """-> Written or WriteFailed, at a later `poll`."""
        ...

    def expect(self, order: ExpectOrder) -> None: ...

    def forget(self, room: int, generation: int) -> None:
        """Drop the expectation; what arrives later is not reported."""
        ...

    def poll(self) -> Sequence[PortEvent]:
        """Return what happened; also advances what is in flight. Microseconds when idle."""
        ...

    @property
    def num_in_flight(self) -> int: ...

    @property
    def note_counts(self) -> NoteCounts:
        """As last known; of a rank in another process at most a heartbeat old."""
        ...

    def close(self) -> None: ...
