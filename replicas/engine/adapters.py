"""The adapters (LoRA) that one engine holds: loaded for requests that can start, dropped when others need the room.

Owns:      which adapters are held, since when requests find no room for theirs, and the thread that reads files.
Never:     runs, retracts or ends a request (scheduler.py and engine.py do).
Invariant: what is held takes at most ``host_bytes``, and at most one adapter beside it is read, or was. Only requests
           that hold pages keep an adapter from being dropped, and in one look those that are asked about first.
Thread:    engine thread; `_read` runs on the thread that reads, which calls `on_ready`.

The scheduler asks in each look at its queues (scheduler/prefill.py), in the order in which requests can start: so loads
come in that order, one at a time. A request whose adapter is not there is passed over.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from replicas.config import AdapterLimits
from replicas.errors import AdapterNotReadable, InvalidAdapter, MantaError, Overloaded
from replicas.request import Req
from replicas.types import AdapterRef, AdapterStats

log = logging.getLogger(__name__)
WAIT_S = 60.0  # for a file to be read; and then for room beside the adapters of requests that hold pages
PATIENCE_S = 5.0  # for that room, after which no other request starts whose adapter would take some of it
REFUSED_S = 10.0  # an adapter that could not be held is not tried again: each try costs those dropped for it
SMOOTHING = 0.3  # of a new measurement of the seconds to load


@dataclass(frozen=True, slots=True, eq=False)
class ReadAdapter:
    """An adapter that was read, and that no rank has yet."""

    identity: str
    num_bytes: int  # of all ranks, as their kernels read it
    # lets every rank hold it, for the steps that follow, or raises Overloaded; the engine's thread
    give: Callable[[], None]


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
class ReadingAdapter:
    """An adapter that is being read, or was and is not held yet."""

    ref: AdapterRef
    future: Future[tuple[ReadAdapter, float]]  # and the seconds that it took
    since_s: float
    done: bool = False  # when the look began
    short_s: dict[Req, float] = field(default_factory=dict)  # requests that found no room for it, and when first
    beside: Sequence[Req] = ()  # had pages when the first did


@dataclass(slots=True, eq=False)
class AdapterLook:
    """What one look at the requests that wait has found so far."""

    holders: Sequence[Req]  # had pages when it began
    kept: set[str] = field(default_factory=set)  # adapters of those asked about: dropped for none behind them
    wants: AdapterRef | None = None  # what the first of them lacks
    short: tuple[Req, int] | None = None  # the last request that found no room, and the bytes of its adapter
    barred: bool = False  # one found none for long: no other starts whose adapter would take some


class HeldAdapters:
    """The adapters of one engine; the scheduler's `AdapterRoom`.

    One is read at a time. It is kept until it has room, or until another request is the first that lacks its own.
    """

    def __init__(self, port: AdapterPort, clock: Callable[[], float]) -> None:
        self._port = port
        self.on_ready: Callable[[], None] = lambda: None
        self._clock = clock
        self._held: dict[str, int] = {}  # identity -> bytes; the one used last is the last
        self._reading: ReadingAdapter | None = None
        self._has_news = False
        self._look = AdapterLook(())
        self._unreadable: AdapterRef | None = None  # the last that was read failed: not read ahead of its turn
        self._refused: dict[AdapterRef, tuple[float, MantaError]] = {}  # could not be held: until when they are told so
        self._failed: list[tuple[Req, MantaError]] = []  # in this look
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manta-adapters")
        self._num_loads = self._num_dropped = 0
        self._load_s = 0.0

    def look(self, holders: Sequence[Req]) -> None:
        """Begin a look at the requests that wait; ``holders`` have pages. No step is under way."""
        self._look, reading = AdapterLook(holders), self._reading
        self._refused = {ref: each for ref, each in self._refused.items() if each[0] > self._clock()}
        if reading is not None and reading.future.done():
            reading.done = True
            self._unreadable = None if reading.future.exception() is None else reading.ref

    def ready(self, req: Req) -> bool:
        """Whether ``req`` may start, as for its adapter; if that is not held, it is loaded in its turn. To be asked in
        the order in which requests can start."""
        ref = req.asked.adapter
        if ref is None:
            return True
        if self._look.barred and not self._may_pass(ref):
            return False
        if not self._holds(ref):
            try:
                if not self._settle(req, ref):
                    return False
            except MantaError as error:
                self._failed.append((req, error.with_traceback(None)))  # whose frames keep the adapter
                return False
        self._look.kept.add(ref.identity)
        return True

    def hint(self, req: Req) -> None:
        """Read the adapter of ``req``, which waits for its turn, if none before it lacks its own."""
        ref = req.asked.adapter
        if ref is not None and ref != self._unreadable and ref not in self._refused and not self._holds(ref):
            self._look.wants = self._look.wants or ref

    def end_look(self) -> list[tuple[Req, MantaError]]:
        """Read what the first request lacks. Returns: the requests that get no adapter, and why; they wait still."""
        reading, wants = self._reading, self._look.wants
        failed, self._failed = self._failed, []
        if reading is not None and reading.done:
            is_lost = reading.future.exception() is not None
            self._reading = None if is_lost or wants not in (None, reading.ref) else reading
        if self._reading is None and wants is not None:
            self._reading = ReadingAdapter(wants, self._thread.submit(self._read, wants), self._clock())
            self._reading.future.add_done_callback(lambda _: self._tell())
        return failed

    def in_the_way(self, req: Req, lower: Sequence[Req], holders: Sequence[Req]) -> list[Req]:
        """Choose the requests of ``lower``, among the ``holders`` of pages, without whose adapters ``req``, which was
        asked about last, has room for its own; none where not even all of them would make it."""
        if self._look.short is None or self._look.short[0] is not req:
            return []
        pinned, gone = _identities(holders) | self._look.kept, set[str]()
        free = _identities(lower) - _identities(set(holders) - set(lower)) - self._look.kept
        for identity in [each for each in self._held if each in free]:
            gone.add(identity)
            if self._fits(self._look.short[1], pinned - gone):
                return [each for each in lower if _identities([each]) & gone]
        return []

    def poll(self) -> bool:
        """Whether an adapter has been read since the last call: it is time for a look."""
        has_news, self._has_news = self._has_news, False
        return has_news

    def load(self, ref: AdapterRef, holders: Sequence[Req]) -> None:
        """Load an adapter now: for replays and tests, as steps wait for it.

        Raises: as `AdapterPort.read`; Overloaded where those of ``holders`` leave no room.
        """
        if not self._holds(ref) and not self._hold(*self._read(ref), _identities(holders)):
            raise Overloaded("the adapters of running requests leave no room for another: try again later")

    def stats(self) -> AdapterStats:
        """Take a snapshot of the statistics."""
        return AdapterStats(
            held=tuple(self._held), num_bytes=sum(self._held.values()), num_loads=self._num_loads,
            num_dropped=self._num_dropped, load_s=self._load_s,
        )  # fmt: skip

    def close(self) -> None:
        """Let the thread end with what it reads."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _holds(self, ref: AdapterRef) -> bool:
        """Tell whether an adapter is held; it counts as used now."""
        num_bytes = self._held.pop(ref.identity, None)
        if num_bytes is not None:
            self._held[ref.identity] = num_bytes
        return num_bytes is not None

    def _settle(self, req: Req, ref: AdapterRef) -> bool:
        """Hold the adapter of ``req`` if it was read and has room, or have it read. Raises: as `AdapterPort.read`;
        Overloaded where a rank cannot hold it; that or AdapterNotReadable where it took its time."""
        reading, look = self._reading, self._look
        if ref in self._refused:
            raise self._refused[ref][1]
        if reading is not None and reading.ref == ref and reading.done:
            adapter, read_s = reading.future.result()
            in_use = _identities(look.holders) | look.kept
            try:
                is_held = self._hold(adapter, read_s, in_use)
            except MantaError as error:
                self._reading, self._refused[ref] = None, (self._clock() + REFUSED_S, error)
                raise
            if is_held:
                self._reading = None
                return True
            self._lacks_room(req, adapter.num_bytes, reading, [self._held[each] for each in in_use & set(self._held)])
        elif reading is not None and not reading.done and self._clock() - reading.since_s > WAIT_S:
            raise AdapterNotReadable(
                f"adapter: {reading.ref.path} was not read within {WAIT_S:g} s, and no other can be before: see "
                "whether its file system answers on this machine"
            )
        look.wants = look.wants or ref
        return False

    def _lacks_room(self, req: Req, num_bytes: int, reading: ReadingAdapter, in_use: Sequence[int]) -> None:
        """Note that ``req`` found no room beside adapters of ``in_use`` bytes. Raises: Overloaded where it has found
        none for long."""
        if not reading.short_s:
            reading.beside = self._look.holders
        waited_s = self._clock() - reading.short_s.setdefault(req, self._clock())
        if waited_s > WAIT_S:
            raise Overloaded(
                f"its adapter of {num_bytes:,} bytes had no room for {WAIT_S:g} s beside {len(in_use)} of running "
                f"requests, {sum(in_use):,} bytes: raise adapters.host_bytes ({self._port.limits.host_bytes:,}), add "
                "replicas, or try again later"
            )
        self._look.short = req, num_bytes
        self._look.barred |= waited_s > PATIENCE_S

    def _may_pass(self, ref: AdapterRef) -> bool:
        """Whether others may start before the request that is short of room: their adapter is the same, or is in its
        way as long as requests run that ran before."""
        reading = self._reading
        return reading is not None and (ref == reading.ref or ref.identity in _identities(reading.beside))

    def _tell(self) -> None:
        self._has_news = True
        self.on_ready()

    def _fits(self, num_bytes: int, beside: Iterable[str]) -> bool:
        """Whether an adapter has room beside some of those that are held."""
        others, limits = [self._held[each] for each in beside if each in self._held], self._port.limits
        return sum(others) + num_bytes <= limits.host_bytes and len(others) < limits.max_held

    def _hold(self, adapter: ReadAdapter, read_s: float, kept: set[str]) -> bool:
        """Make room beside ``kept``, and hold an adapter. Returns: False where there is none."""
        limits, needed = self._port.limits, adapter.num_bytes
        if needed > limits.host_bytes:
            raise InvalidAdapter(f"adapter: it takes {needed:,} bytes, adapters.host_bytes is {limits.host_bytes:,}")
        if not self._fits(needed, kept):
            return False
        for identity in [identity for identity in self._held if identity not in kept]:
            if self._fits(needed, self._held):
                break
            self._port.drop(identity)
            del self._held[identity]
            self._num_dropped += 1
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


def _identities(reqs: Iterable[Req]) -> set[str]:
    """The adapters of those requests that hold pages."""
    return {req.asked.adapter.identity for req in reqs if req.asked.adapter is not None and req.holding is not None}
