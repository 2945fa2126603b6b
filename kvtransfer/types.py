"""What the parts of a hand-off say to each other: values, and the two protocols that tie them together.

Owns:      nothing; these are frozen values, and protocols with one contract suite each.

    engine (replicas/disagg) ──orders──> KvTransfer ──orders──> RankPort, one per rank ──> TransferAgent (NIXL or memcpy)
                             <──events──            <──events──

A *room* is one hand-off: one sequence's pages from one prefill replica to one decode replica. ``generation`` tells the
tries of one room apart, ``incarnation`` the lives of one process: a late word of an earlier one is dropped.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

PageIds = npt.NDArray[np.int32]  # [n] pages of one pool; the same ids on every rank
Digests = npt.NDArray[np.uint64]  # [n] one per page


class Verify(enum.Enum):
    """Which pages the receiver checks against the sender's digests before it uses them."""

    OFF = "off"
    LAST = "last"  # the last page of a hand-off
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Where an engine's transfer desk listens; travels in the ticket."""

    host: str
    port: int
    incarnation: str  # new with every start of the process


@dataclass(frozen=True, slots=True, kw_only=True)
class PdTicket:
    """Made by the router for one request; both legs carry it."""

    room: int  # random, 63 bits
    generation: int  # of the try
    prefill: PeerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What the other side must know of one rank to write into its pool, or to be written from."""

    rank: int
    agent: str  # name, new with every incarnation
    metadata: bytes  # of the agent; trusted input, only ever taken from an authenticated peer
    base_address: int  # of page 0
    num_pages: int  # page 0, the sink, included
    device: int  # 0 for host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferMeta:
    """What the pages themselves do not say (SPEC H12); comes with the last of them. ``version`` guards its meaning."""

    rid: str
    fingerprint: str  # of the sender's layout; the receiver refuses another
    prompt_len: int
    token_range: tuple[int, int]  # tokens whose K/V was handed over: [first, prompt_len); first is page-aligned
    cached_prefix_len: int  # tokens that the receiver had already and were skipped
    first_token: int
    first_logprob: tuple[float, tuple[tuple[int, float], ...]] | None = None  # logprob, ((token id, logprob), ...)
    cached_tokens: dict[str, int] = field(default_factory=dict)  # reused by the sender, by tier ("device", ...)
    version: int = 1


# -- engine -> KvTransfer -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveOrder:
    """Decode side: its row and pages are granted; ask the peer for the K/V."""

    room: int
    generation: int
    rid: str
    peer: PeerAddress
    num_tokens: int  # of the sequence, prefix included
    first_page: int  # pages [0, first_page) of the sequence are here already
    pages: PageIds  # [n] where pages [first_page, first_page + n) go; n may be 0
    deadline_s: float  # from now; the room fails then, whatever the peer does


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOrder:
    """Prefill side: the request of this room has arrived here; tell when its receiver has opened."""

    room: int
    generation: int
    rid: str
    num_tokens: int
    deadline_s: float  # from now, for the receiver to open


# -- KvTransfer -> engine -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReady:
    """The receiver has granted pages; send from page ``first_page`` of the sequence on."""

    room: int
    first_page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDone:
    """The receiver has verified everything. The last event of the room: its pages may go."""

    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """No more will be sent. Pages stay pinned until `SendDrained`."""

    room: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDrained:
    """After `SendFailed`: nothing reads the room's pages any more. The last event of the room."""

    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """All pages are here and verified. The last event of the room: its pages are the receiver's alone."""

    room: int
    meta: KVTransferMeta
    transfer_s: float  # from the peer's first page to the last
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveFailed:
    """The K/V will not come. The pages may still be written to: quarantine them until `ReceiveDrained`."""

    room: int
    reason: str
    bad_pages: tuple[int, ...] = ()  # of this pool, whose digest was wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveDrained:
    """After `ReceiveFailed`: nobody can write to the pages any more. The last event of the room."""

    room: int


TransferEvent = SendReady | SendDone | SendFailed | SendDrained | Received | ReceiveFailed | ReceiveDrained


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """Counters only grow; gauges are as of now."""

    rooms_receiving: int = 0
    rooms_sending: int = 0
    rooms_draining: int = 0  # failed, pages not yet safe
    peers: int = 0
    sent_bytes: int = 0
    sent_pages: int = 0
    received_pages: int = 0
    sends_done: int = 0
    sends_failed: int = 0
    receives_done: int = 0
    receives_failed: int = 0
    digest_mismatches: int = 0
    late_messages: int = 0  # of another generation, incarnation or an ended room; dropped
    oldest_drain_s: float = 0.0  # how long the oldest quarantined room has been waiting


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
        """The rest, which may be no page at all, and the word that it is all. -> SendDone, or SendFailed + SendDrained."""
        ...

    def abort_send(self, room: int, reason: str) -> None:
        """The request cannot be served here. -> SendFailed, SendDrained, unless the last event is out already."""
        ...

    def drain_events(self) -> list[TransferEvent]:
        """What happened since the last call, in order."""
        ...

    def stats(self) -> TransferStats: ...

    def close(self) -> None:
        """Say goodbye to all peers and stop. Rooms that are open end without events."""
        ...


# -- KvTransfer -> RankPort and back ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRanks:
    """A peer engine as its hello told it."""

    incarnation: str
    fingerprint: str
    tp: int
    ranks: tuple[RankInfo, ...]  # [tp]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOrder:
    """Copy pages of this rank to all ranks of the peer that hold any of its heads."""

    order_id: int
    incarnation: str  # of the peer
    room: int
    generation: int
    page_offset: int  # of the first page, counted from the room's first
    src_pages: PageIds  # [n]
    dst_pages: PageIds  # [n]
    last: bool  # no more after this; n may be 0 then
    meta: bytes = b""  # with ``last``, from rank 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectOrder:
    """This rank's pool will be written to: where the room's pages lie, to verify them as they come."""

    room: int
    generation: int
    incarnation: str  # of the peer
    pages: PageIds  # [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The order has ended well on all its destinations: its source is not read any more."""

    order_id: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFailed:
    """The order has ended badly; ``drained`` says that its source is not read any more."""

    order_id: int
    reason: str
    drained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Pages of a room have been written by one rank of the peer, and were verified."""

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


class RankPort(Protocol):
    """The transfer side of one rank: its pool, its agent, its digests. Used from the transfer thread only."""

    info: RankInfo

    def connect(self, peer: PeerRanks) -> None:
        """Idempotent per incarnation. Raises: PeerLost."""
        ...

    def disconnect(self, incarnation: str) -> None:
        """Forget a peer that is dead or said goodbye; its orders in flight end as failed. Idempotent."""
        ...

    def write(self, order: WriteOrder) -> None:
        """-> Written or WriteFailed, at a later `poll`."""
        ...

    def expect(self, order: ExpectOrder) -> None: ...

    def forget(self, room: int, generation: int) -> None:
        """Drop the expectation; what arrives later is not reported."""
        ...

    def poll(self) -> Sequence[PortEvent]:
        """What happened; also moves what is in flight. Microseconds when idle."""
        ...

    @property
    def num_in_flight(self) -> int: ...

    def close(self) -> None: ...


def group_runs(src: PageIds, dst: PageIds) -> list[tuple[int, int, int]]:
    """(source page, destination page, length) of maximal runs in which both sides go up by one (SPEC H09).

    ``src``, ``dst``: [n]. Order is kept; the runs cover every pair once.
    """
    if len(src) != len(dst):
        raise ValueError(f"{len(src)} source pages and {len(dst)} destination pages: one for each is wanted")
    if not len(src):
        return []
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(src)]))
    return [(int(src[s]), int(dst[s]), int(e - s)) for s, e in zip(starts, ends, strict=True)]
