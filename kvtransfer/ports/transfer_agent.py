"""The interface of a transfer library: writes pages into a peer's pool, and notifies the peer when they have landed.

Owns:      the protocol of an agent, and the life of one transfer.
Invariant: a released transfer never reaches the library again; one that the library still works on is never released.
Thread:    one thread uses an agent and its transfers: the process's transfer thread.

    NEW ──post──> POSTED ──poll──> DONE ──┐
     └──────────────┴─────────────> FAILED ┴──release──> RELEASED

There is no cancel: bytes of a posted write land even after the library has dropped it (measured over CMA and tcp,
with a stopped peer that woke up again). A transfer that does not end is kept, with its pages, until the peer is dead.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.layout import PageSlice
from kvtransfer.types import PageIds, WriteTimes


class TransferState(enum.Enum):
    """Where one transfer is in its life."""

    NEW = "new"
    POSTED = "posted"  # the source is read, the destination written, at any time
    DONE = "done"  # all bytes have landed, and the note is sent
    FAILED = "failed"  # the source is no longer read; the peer's endpoint is broken
    RELEASED = "released"


LEGAL_MOVES: dict[TransferState, frozenset[TransferState]] = {
    TransferState.NEW: frozenset({TransferState.POSTED, TransferState.DONE, TransferState.FAILED}),
    TransferState.POSTED: frozenset({TransferState.DONE, TransferState.FAILED}),
    TransferState.DONE: frozenset({TransferState.RELEASED}),
    TransferState.FAILED: frozenset({TransferState.RELEASED}),
    TransferState.RELEASED: frozenset(),
}
TERMINAL = frozenset({TransferState.DONE, TransferState.FAILED})


class NativeTransfer(Protocol):
    """The library's handle of one write, as an agent wraps it. Any exception means that it has failed for good."""

    def post(self) -> bool:
        """Start it. True when it is done already."""
        ...

    def check(self) -> bool:
        """Is it done? Also moves it: a note leaves at the check that finds the data gone."""
        ...

    def times(self) -> WriteTimes | None:
        """How long it took, once it is done and before it is released; None where the library does not measure it."""
        ...

    def release(self) -> None: ...


class Transfer:
    """One posted write of one peer. The only holder of the library's handle, which it drops when released."""

    def __init__(self, peer: str, native: NativeTransfer) -> None:
        self.peer = peer
        self.state = TransferState.NEW
        self.reason = ""  # why it failed
        self.times: WriteTimes | None = None  # once it is done
        self._native: NativeTransfer | None = native

    def post(self) -> TransferState:
        """Start it, once."""
        if self.state is not TransferState.NEW:
            raise AssertionError(f"a transfer is posted once; this one to {self.peer} is {self.state.value}")
        return self._advance(first=True)

    def poll(self) -> TransferState:
        """The state as of now. After the end it asks the library nothing."""
        if self.state in TERMINAL:
            return self.state
        if self.state is not TransferState.POSTED:
            raise AssertionError(f"only a posted transfer is polled; this one to {self.peer} is {self.state.value}")
        return self._advance(first=False)

    def release(self) -> None:
        """Give the library's handle back. Only after the end: a write in flight cannot be called back."""
        self._move(TransferState.RELEASED)
        native, self._native = self._native, None
        assert native is not None
        native.release()

    def _advance(self, *, first: bool) -> TransferState:
        assert self._native is not None
        try:
            done = self._native.post() if first else self._native.check()
        except Exception as error:  # noqa: BLE001  whatever the library raises, the endpoint is lost
            self.reason = f"{type(error).__name__}: {error}"
            self._move(TransferState.FAILED)
            return self.state
        if done:
            self.times = self._native.times()
            self._move(TransferState.DONE)
        elif first:
            self._move(TransferState.POSTED)
        return self.state

    def _move(self, to: TransferState) -> None:
        if to not in LEGAL_MOVES[self.state]:
            raise AssertionError(f"a transfer to {self.peer} cannot go from {self.state.value} to {to.value}")
        self.state = to


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePool:
    """One rank of a peer, as a destination: its agent, its pool, and what of each page goes there."""

    agent: str
    metadata: bytes
    base_address: int
    num_pages: int
    page_bytes: int
    device: int
    slices: tuple[PageSlice, ...]


class TransferAgent(Protocol):
    """One rank's end of the transfer library. Its name is new with every start of the process."""

    name: str
    metadata: bytes  # what a peer needs to reach it

    def add_peer(self, pool: RemotePool) -> None:
        """Get ready to write there; idempotent. Raises: PeerLost."""
        ...

    def remove_peer(self, agent: str) -> None:
        """Forget a peer that is dead, said goodbye, or whose endpoint is broken. Posted transfers to it fail at their
        next poll. Idempotent."""
        ...

    def fence(self, agent: str, host: str) -> None:
        """Have nothing land here that ``agent``, whose machine ``host`` is dead, has sent and that has not reached
        this machine: it may only be cut off, and resend when it is back. Idempotent."""
        ...

    def write(self, agent: str, src_pages: PageIds, dst_pages: PageIds, note: bytes) -> Transfer:
        """Copy pages [n], n >= 1, to those of the peer; it gets ``note`` when they are there. The transfer is posted:
        it may be DONE or FAILED already."""
        ...

    def send_note(self, agent: str, note: bytes) -> None:
        """A note with no pages. Raises: PeerLost."""
        ...

    def take_notes(self) -> Sequence[tuple[str, bytes]]:
        """(agent that sent it, note) of all that have come; also moves what others write here."""
        ...

    def close(self) -> None:
        """Release everything. Say goodbye to the peers before."""
        ...
