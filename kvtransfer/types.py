"""The orders, events and settings of KV transfers: frozen values.

Owns:      nothing. The protocols: rooms/transfer_service.py, ports/rank_port.py, ports/transfer_agent.py.

    engine (replicas/disagg) ──orders──> KvTransfer ──orders──> RankPort, one per rank (ports.py) ──> TransferAgent
                             <──events──            <──events──

A *room* is one KV transfer: one sequence's pages from a prefill replica to a decode replica; or one fetch: pages of a
prompt from a replica that has cached them (a *donor*) to one that has not. ``generation`` counts
the tries of one room, ``incarnation`` is new with every start of a process: messages of an earlier one are dropped.
"""

import enum
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, lt=2**31)]
PageIds = npt.NDArray[np.int32]  # [n] pages of one pool; the same ids on every rank


class Verify(enum.Enum):
    """Which pages the receiver checks against the sender's digests before it uses them."""

    OFF = "off"
    LAST = "last"  # the last page of a KV transfer
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Where an engine's transfer service listens; travels in the ticket."""

    host: str
    port: Annotated[int, Meta(ge=0, lt=2**16)]
    incarnation: str  # new with every start of the process


@dataclass(frozen=True, slots=True, kw_only=True)
class PdTicket:
    """One try of one KV transfer, made by the router; both legs carry it."""

    room: int  # random, 63 bits
    generation: int  # of the try
    prefill: PeerAddress  # of a fetch, the donor's
    end_len: int = 0  # of a fetch: the tokens of the prompt, in whole pages, that the receiver has afterwards
    within_s: float = 0.0  # of a fetch: what has not come by then is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The tokens whose pages a receiver fetches: what a donor's cache finds them by."""

    salt: str  # the namespace, its adapter's part included
    token_ids: bytes = field(repr=False)  # [n * page_size] i32, little endian


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferMeta:
    """What the decode side needs besides the pages (SPEC H12); it comes with the last of them."""

    rid: str
    fingerprint: str  # of the sender's layout; the receiver refuses another
    prompt_len: Count
    token_range: tuple[Count, Count]  # tokens whose K/V was handed over: [first, prompt_len); first is page-aligned
    cached_prefix_len: Count  # tokens that the receiver had already and were skipped
    first_token: Count
    first_logprob: tuple[float, tuple[tuple[Count, float], ...]] | None = None  # logprob, ((token id, logprob), ...)
    cached_tokens: dict[str, Count] = field(default_factory=dict)  # reused by the sender, by tier: device, host, store


# engine -> KvTransfer


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
    deadline_s: float  # without a page, from now or from the last that came: the room fails then; of a fetch, in all
    prefix: Prefix | None = None  # a fetch: the peer has no leg of the request, and sends what its cache has of this


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOrder:
    """Prefill side: the request of this room has arrived; report when its receiver has opened the room."""

    room: int
    generation: int
    rid: str
    num_tokens: int
    deadline_s: float  # from now, for the receiver to open


# KvTransfer -> engine


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReady:
    """The receiver has granted pages; send from page ``first_page`` of the sequence on."""

    room: int
    first_page: int
    prefix: Prefix | None = None  # a fetch: no leg waits for it. Send what is there with `send_last`, or abort the room


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDone:
    """The receiver has verified everything. The last event of the room: its pages may be freed."""

    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFailed:
    """No more will be sent. Pages stay pinned until `SendDrained`."""

    room: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDrained:
    """After `SendFailed`: no write reads the room's pages. The last event of the room."""

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
    """The room failed. The pages may still be written to: quarantine them until `ReceiveDrained`."""

    room: int
    reason: str
    bad_pages: tuple[int, ...] = ()  # of this pool, whose digest was wrong
    num_bytes: int = 0  # that had come


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveDrained:
    """After `ReceiveFailed`: no peer can write to the pages. The last event of the room."""

    room: int


TransferEvent = SendReady | SendDone | SendFailed | SendDrained | Received | ReceiveFailed | ReceiveDrained


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """The settings of one transfer service; every wait has its limit here."""

    host: str  # address of this machine that the peers reach; the transfer service listens there and nowhere else
    token: bytes = field(repr=False)  # secret of the cluster: a peer that does not know it gets no metadata
    verify: Verify = Verify.ALL
    transport: Literal["auto", "tcp"] = "auto"  # auto: shared memory copies (CMA) on one host, else what UCX finds
    # last bounds (heartbeats find death and hangs): the first includes decode's queue, the second prefill's
    open_timeout_s: float = 180.0  # prefill side: for the receiver to get row and pages, and open the room
    room_timeout_s: float = 180.0  # decode side: from row and pages to the first page, and from each to the next
    call_timeout_s: float = 5.0  # for a hello or a reply
    heartbeat_s: float = 1.0
    heartbeat_misses: int = 3  # after this many silent periods every room with that peer fails
    rank_timeout_s: float = 10.0  # the port of a rank in another process: silent for so long, the service ends
    pages_per_write: int = 16  # a write blocks the transfer thread while it copies


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTimes:
    """How long one write of pages took."""

    post_s: float  # of this thread's processor time, to post it; over CMA that is the copy
    wire_s: float  # until it had arrived, the post included, by the transfer library's own clock


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
    received_bytes: int = 0
    sends_done: int = 0
    sends_failed: int = 0
    receives_done: int = 0
    receives_failed: int = 0
    digest_mismatches: int = 0
    late_messages: int = 0  # of another generation, incarnation or an ended room, or not to be read; dropped, any rank
    early_notes: int = 0  # of pages that came, kept until their room is expected; any rank
    oldest_drain_s: float = 0.0  # how long the oldest quarantined room has been waiting
