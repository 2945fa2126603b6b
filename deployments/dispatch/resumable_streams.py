"""Streams of events that outlive their connection, for the clients that asked for it.

Owns:      the events that a client may still lack, within bounds.
Never:     knows HTTP or the JSON of an event; keeps anything for a client that did not ask (http/streaming.py).
Invariant: a stream is found only by the key that opened it. At most MOST_STREAMS + MOST_FIRST are kept, each
           with at most MOST_BYTES of events that were sent or wait for a client that is away; while one reads slowly,
           half of that waits.
Thread:    the router's event loop.

    opened ──> read by a connection <──> detached, for ``reconnect_s`` at most ──> expired: its request is aborted
                                    └──> ended: kept for ``reconnect_s``, since its last bytes may have been lost
"""

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from deployments.dispatch.event_ids import StreamGone
from deployments.record.route_log import RequestWatch, tell

MOST_STREAMS, MOST_FIRST = 256, 64  # of one router; and so many more, each the only one of its key
MOST_BYTES = 512 << 10  # of one stream: some 2,000 events of text
WAITED_LONG = f"more than {MOST_BYTES >> 10} KiB waited for this stream's client"
MOST_GONE = 1000  # streams of which it is known that they were there


class Event(NamedTuple):
    """One event of a stream."""

    id: str  # "" where no client can go on from it
    data: bytes  # as it is sent


class ResumableStream:
    """The events of one answer, made by a task of its own and read by one connection at a time, the newest."""

    def __init__(
        self,
        batches: AsyncGenerator[list[Event], None],
        error_events: Callable[[Exception], list[Event]],
        *,
        after: str,
        body: bytes,
        headers: Mapping[str, str],
    ) -> None:
        """``after``: the id of the event before its first, "" without one. ``body``: a digest of the request's.
        ``headers``: of the answer, for each connection."""
        self.body = body
        self.headers = headers
        self.failure: Exception | None = None  # before its first event
        self.ended = False
        self.connection: Connection | None = None
        self._after = after  # the id of the event before those that are kept
        self._events: deque[Event] = deque()
        self._num_dropped = 0  # before those
        self._num_bytes = 0
        self._num_read = 0
        self._unread_bytes = 0
        self.news, self._room = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(self._run(batches, error_events))

    @property
    def num_events(self) -> int:
        """The events that have come, kept or not."""
        return self._num_dropped + len(self._events)

    @property
    def num_bytes(self) -> int:
        """The bytes of the events that are kept."""
        return self._num_bytes

    @property
    def is_delivered(self) -> bool:
        """Whether a connection has taken all of it."""
        return self.ended and self._num_read == self.num_events

    @property
    def is_full(self) -> bool:
        """Whether more waits for its client than is kept for one that is away."""
        return self._unread_bytes > MOST_BYTES

    @property
    def is_away(self) -> bool:
        """Whether it waits for its client."""
        return self.connection is None and not self.is_delivered

    def is_for(self, body: bytes, last_event: str) -> bool:
        """Whether a client that sends the request again means this stream: it has had some of it, or none has."""
        same = self.body == body and self.failure is None
        return same and (last_event != "" or self.connection is None or not self._num_read)

    def index_after(self, event_id: str) -> int | None:
        """Find the event behind the one called ``event_id``; "": the first of all. None: it is not kept."""
        if event_id == self._after:
            return self._num_dropped
        if not event_id:
            return None
        ids = [event.id for event in self._events]
        return self._num_dropped + ids.index(event_id) + 1 if event_id in ids else None

    def attach(self, index: int) -> "Connection":
        """Give the stream, from event ``index`` on, to a new connection; another one ends."""
        self.connection = Connection(self, index)
        self._num_read = index
        self.news.set()
        return self.connection

    def take(self, index: int) -> tuple[bytes, int]:
        """Return the events from ``index`` on, and the index behind them."""
        data = b"".join(event.data for event in islice(self._events, index - self._num_dropped, None))
        self._num_read, self._unread_bytes = self.num_events, 0
        self._room.set()
        return data, self._num_read

    def detach(self) -> None:
        self.connection = None
        self._room.set()

    def stop(self) -> None:
        """End its request, if that runs, and its connection."""
        self._task.cancel()
        self.connection = None
        self.news.set()

    async def _run(
        self, batches: AsyncGenerator[list[Event], None], error_events: Callable[[Exception], list[Event]]
    ) -> None:
        try:
            async with contextlib.aclosing(batches):
                async for batch in batches:
                    await self._keep(batch)
        except Exception as error:  # noqa: BLE001 - the status may be sent: only an event can carry the error then
            if self.num_events:
                self._add(error_events(error))
            else:
                self.failure = error
        finally:
            self.ended = True
            self.news.set()

    async def _keep(self, batch: Sequence[Event]) -> None:
        """Add events, and wait while a connection reads slowly. Raises: StreamGone if too much waits without one."""
        if self.connection is None and self._unread_bytes + _size(batch) > MOST_BYTES:
            raise StreamGone(WAITED_LONG)
        self._add(batch)
        while self.connection is not None and self._unread_bytes > MOST_BYTES // 2:
            self._room.clear()
            await self._room.wait()

    def _add(self, batch: Sequence[Event]) -> None:
        num_bytes = _size(batch)
        self._events.extend(batch)
        self._num_bytes += num_bytes
        self._unread_bytes += num_bytes
        while self._num_bytes > MOST_BYTES and self._num_dropped < self._num_read:
            self._after, data = self._events.popleft()
            self._num_bytes -= len(data)
            self._num_dropped += 1
        self.news.set()


def _size(batch: Sequence[Event]) -> int:
    return sum(len(event.data) for event in batch)


class Connection:
    """The place of one connection in a stream."""

    def __init__(self, stream: ResumableStream, index: int) -> None:
        self.stream = stream
        self._index = index

    async def begun(self) -> None:
        """Wait for an event. Raises: the error that came instead of the first."""
        await self._until_news()
        if self.stream.failure is not None:
            raise self.stream.failure

    async def more(self) -> bytes:
        """Wait for events. Returns: those that have come; none at the end, or where another connection took over."""
        await self._until_news()
        if self.stream.connection is not self:
            return b""
        data, self._index = self.stream.take(self._index)
        return data

    async def _until_news(self) -> None:
        stream = self.stream
        while stream.connection is self and self._index == stream.num_events and not stream.ended:
            stream.news.clear()
            await stream.news.wait()


Key = tuple[str, str]  # the caller's name, and the request's


class ResumableStreams:
    """The streams of one router that outlive their connections."""

    def __init__(self, *, reconnect_s: float = 30.0, watch: RequestWatch | None = None) -> None:
        """``reconnect_s``: how long a stream is kept without a connection; 0: it ends with its connection."""
        self._reconnect_s = reconnect_s
        self._watch = watch if watch is not None else RequestWatch()
        self._streams: dict[Key, ResumableStream] = {}
        self._timers: dict[ResumableStream, asyncio.TimerHandle] = {}  # of those without a connection
        self._gone: OrderedDict[Key, str] = OrderedDict()  # why, the oldest first

    def find(self, key: Key) -> ResumableStream | None:
        return self._streams.get(key)

    def why_gone(self, key: Key) -> str | None:
        """Say why the stream called so is not kept any more; None if there was none."""
        return self._gone.get(key)

    def has_room(self, key: Key) -> bool:
        """Whether one more can be kept. Where it is needed, the one that waits the longest, of the key with most, makes
        room; a key with half of all has room only in the place of its own, unless there are no keys (""). Where none
        makes room, a key that has no stream has a place of its own."""
        owners = Counter(owner for owner, _ in self._streams)
        has_half = key[0] != "" and owners[key[0]] >= MOST_STREAMS // 2
        if key in self._streams or (len(self._streams) < MOST_STREAMS and not has_half):
            return True
        names = {stream: each for each, stream in self._streams.items()}
        waiting = [names[each] for each in self._timers if not has_half or names[each][0] == key[0]]
        if not waiting:
            return key[0] != "" and not owners[key[0]] and len(self._streams) < MOST_STREAMS + MOST_FIRST
        self._drop(
            max(waiting, key=lambda each: (self._streams[each].is_delivered, owners[each[0]])),
            f"a router keeps {MOST_STREAMS} at a time, and others came",
        )
        return True

    def add(self, key: Key, stream: ResumableStream) -> Connection:
        """Keep ``stream``, in the place of another of this name, and attach its first connection."""
        if key in self._streams:
            self._forget(key)
        self._gone.pop(key, None)
        self._streams[key] = stream
        return self.attach(stream, 0)

    def attach(self, stream: ResumableStream, index: int) -> Connection:
        """Give ``stream`` from event ``index`` on to a new connection."""
        self._end_timer(stream)
        connection = stream.attach(index)
        self._tell()
        return connection

    def detach(self, connection: Connection) -> None:
        """Keep the stream of a connection that has ended, for as long as is set."""
        stream = connection.stream
        if stream.connection is not connection:
            return  # another one has it, or it is gone
        stream.detach()
        key = next((each for each, kept in self._streams.items() if kept is stream), None)
        if key is None:
            stream.stop()  # another one has its name
            return
        if stream.failure is not None:
            del self._streams[key]
            return
        if stream.is_full:
            self._drop(key, WAITED_LONG)
            return
        self._wait(key, stream, f"its client was away for more than {self._reconnect_s:g} s")

    def resumed(self, how: str) -> None:
        """Count a client that came back: its stream was ``kept``, or its request runs ``again``."""
        tell(self._watch.stream_resumed, how)

    def stop(self) -> None:
        """End all: the server stops."""
        for key in list(self._streams):
            self._drop(key, "the router stopped")

    def _wait(self, key: Key, stream: ResumableStream, why: str) -> None:
        """Keep ``stream`` for as long as is set, and drop it then."""
        self._timers[stream] = asyncio.get_running_loop().call_later(self._reconnect_s, self._drop, key, why, stream)
        self._tell()

    def _forget(self, key: Key) -> None:
        """Let another stream have this name. Where it is being read, that goes on, for this one connection."""
        stream = self._streams.pop(key)
        if self._end_timer(stream):
            stream.stop()

    def _drop(self, key: Key, why: str, stream: ResumableStream | None = None) -> None:
        """End what is kept under ``key``, if it is ``stream`` where one is given."""
        found = self._streams.get(key)
        if found is None or (stream is not None and found is not stream):
            return
        if found.is_away:
            tell(self._watch.stream_expired)
        del self._streams[key]
        self._end_timer(found)
        found.stop()
        self._gone[key] = why
        if len(self._gone) > MOST_GONE:
            self._gone.popitem(last=False)
        self._tell()

    def _end_timer(self, stream: ResumableStream) -> bool:
        """Return whether ``stream`` had no connection."""
        timer = self._timers.pop(stream, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def _tell(self) -> None:
        tell(self._watch.streams_detached, sum(stream.is_away for stream in self._timers))
