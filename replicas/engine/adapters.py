"""The adapters (LoRA) that one engine holds: loaded when a request asks for one, dropped when others need the room.

Owns:      which adapters are held, the requests that wait for theirs, and the thread that reads files.
Never:     runs or ends a request (engine.py does); drops an adapter that an open request has.
Invariant: what is held takes at most ``host_bytes``, and at most one adapter beside it is read, or was. `poll`
           returns each request once. A request that is returned without an error has its adapter until it ends.
Thread:    engine thread; `_read` runs on the thread that reads, which calls `on_ready`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from replicas.config import AdapterLimits
from replicas.engine.choice import Choice
from replicas.errors import AdapterNotReadable, InvalidAdapter, MantaError, Overloaded
from replicas.types import AdapterRef, AdapterStats, GenerateRequest

log = logging.getLogger(__name__)
WAIT_S = 60.0  # for an adapter: for the reading thread, the disk, and room beside those that are in use
SMOOTHING = 0.3  # of a new measurement of the seconds to load


@dataclass(frozen=True, slots=True, eq=False)
class ReadAdapter:
    """An adapter that was read, and that no rank has yet."""

    identity: str
    num_bytes: int  # of all ranks, as their kernels read it
    give: Callable[[], None]  # lets every rank hold it, for the steps that follow; the engine's thread


class AdapterPort(Protocol):
    """The adapters of all ranks (ranks.py)."""

    @property
    def limits(self) -> AdapterLimits: ...

    def read(self, ref: AdapterRef) -> ReadAdapter:
        """Read an adapter. Raises: InvalidAdapter, AdapterNotReadable."""
        ...

    def drop(self, identity: str) -> None:
        """Let every rank forget an adapter that no step has any more."""
        ...


@dataclass(slots=True, eq=False)
class Loading:
    """A request whose adapter is being loaded."""

    request: GenerateRequest
    ref: AdapterRef
    choices: Sequence[Choice]
    since_s: float
    error: MantaError | None = None


class HeldAdapters:
    """The adapters of one engine.

    One is read at a time, in the order of the requests, lines of batches last. One that was read and finds no room is
    kept until it has room, or until the request that it was read for has ended or is a line of a batch beside others.
    Those behind it that have to be read wait so long; those whose adapter is held go on.
    """

    def __init__(self, port: AdapterPort, clock: Callable[[], float]) -> None:
        self._port = port
        self.on_ready: Callable[[], None] = lambda: None
        self.waiting: list[Loading] = []  # until `poll`
        self._clock = clock
        self._held: dict[str, int] = {}  # identity -> bytes; the one used last is the last
        self._reading: tuple[Loading, Future[tuple[ReadAdapter, float]]] | None = None  # and the request it is for
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manta-adapters")
        self._num_loads = self._num_dropped = 0
        self._load_s = 0.0

    def holds(self, ref: AdapterRef) -> bool:
        """Tell whether an adapter is held; it counts as used now."""
        num_bytes = self._held.pop(ref.identity, None)
        if num_bytes is not None:
            self._held[ref.identity] = num_bytes
        return num_bytes is not None

    def start(self, request: GenerateRequest, ref: AdapterRef, choices: Sequence[Choice]) -> None:
        """Load the adapter of ``request``, which `poll` returns then."""
        self.waiting.append(Loading(request, ref, choices, self._clock()))
        if self._reading is None:
            self._begin(self.waiting[0])

    def poll(self, in_use: Callable[[], set[str]]) -> list[Loading]:
        """Return the requests that wait no longer; ``error`` of each says why it has no adapter, or is None.

        Args: in_use: gives the identities that open requests have.
        """
        now_s, used, done, waiting = self._clock(), in_use(), list[Loading](), list[Loading]()
        for task in self.waiting:
            over = all(choice.req.finish is not None for choice in task.choices)
            try:
                ready = over or self.holds(task.ref) or self._settle(task.ref, used)
                if not ready and now_s - task.since_s > WAIT_S:
                    raise Overloaded(f"its adapter was not loaded within {WAIT_S:g} s: try again later")
            except MantaError as error:
                task.error, ready = error, True
            (done if ready else waiting).append(task)
        self.waiting = waiting
        first = min(waiting, key=lambda task: task.request.offline, default=None)
        if self._reading is not None and self._reading[1].done():
            task = self._reading[0]
            if task not in waiting or (first is not None and first.request.offline < task.request.offline):
                self._reading = None
        if self._reading is None and first is not None:
            self._begin(first)
        return done

    def load(self, ref: AdapterRef, in_use: Callable[[], set[str]]) -> None:
        """Load an adapter now. Raises: as `AdapterPort.read`; Overloaded where those in use leave no room."""
        if not self.holds(ref) and not self._hold(*self._read(ref), in_use()):
            raise Overloaded("the adapters of open requests leave no room for another: try again later")

    def stats(self) -> AdapterStats:
        """Take a snapshot of the statistics."""
        return AdapterStats(
            held=tuple(self._held), num_bytes=sum(self._held.values()), num_loads=self._num_loads,
            num_dropped=self._num_dropped, load_s=self._load_s,
        )  # fmt: skip

    def close(self) -> None:
        """Let the thread end with what it reads."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self, task: Loading) -> None:
        """Read the adapter of a request on the thread, which has nothing to do."""
        future = self._thread.submit(self._read, task.ref)
        self._reading = task, future
        future.add_done_callback(lambda _: self.on_ready())

    def _settle(self, ref: AdapterRef, used: set[str]) -> bool:
        """Hold an adapter if it was read and has room. Raises: as `AdapterPort.read`."""
        if self._reading is None:
            return False
        task, future = self._reading
        return task.ref.identity == ref.identity and future.done() and self._hold(*future.result(), used)

    def _hold(self, adapter: ReadAdapter, read_s: float, used: set[str]) -> bool:
        """Make room, and hold an adapter. Returns: False where those in use leave none."""
        limits, needed = self._port.limits, adapter.num_bytes
        if needed > limits.host_bytes:
            raise InvalidAdapter(f"adapter: it takes {needed:,} bytes, adapters.host_bytes is {limits.host_bytes:,}")

        def fits() -> bool:
            return sum(self._held.values()) + needed <= limits.host_bytes and len(self._held) < limits.max_held

        for identity in [identity for identity in self._held if identity not in used]:
            if fits():
                break
            self._port.drop(identity)
            del self._held[identity]
            self._num_dropped += 1
        if not fits():
            return False
        began_s = time.monotonic()
        adapter.give()
        self._held[adapter.identity] = needed
        took_s = read_s + time.monotonic() - began_s
        self._load_s = took_s if self._num_loads == 0 else self._load_s + SMOOTHING * (took_s - self._load_s)
        self._num_loads += 1
        return True

    def _read(self, ref: AdapterRef) -> tuple[ReadAdapter, float]:
        """Read an adapter. Returns: it, and the seconds that this took."""
        began_s = time.monotonic()
        try:
            return self._port.read(ref), time.monotonic() - began_s
        except MantaError:
            raise
        except Exception as error:
            log.exception("an adapter could not be read")
            raise AdapterNotReadable(f"adapter: {ref.path} cannot be read here: {error!r:.200}") from error
