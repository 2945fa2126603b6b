"""Streams of events that outlive their connection, for the clients that asked for it.

Owns:      the events that a client may still lack, within bounds; the ids of events, with which any router can go on.
Never:     knows HTTP or the JSON of an event; keeps anything for a client that did not ask (http/streaming.py).
Invariant: a stream is found only by the key that opened it. At most MOST_STREAMS are kept, each with at most MOST_BYTES
           of events that were sent or wait for a client that is away; while one reads slowly, half of that waits.
Thread:    the router's event loop.

    opened ──> read by a connection <──> detached, for ``reconnect_s`` at most ──> expired: its request is aborted
                                    └──> ended: kept for ``reconnect_s``, since its last bytes may have been lost

The id of an event says how far each choice had come, so that another router can run the request again and leave out
what its client has had, wherever the deltas of the new run are cut:

    NUMBER:TOKENS.CHARACTERS.CRC32[e],...[+EVENTS[@CHOICE.TOKENS.CHARACTERS]]

that is its number in the stream, and of each choice the output so far (``e``: it has ended). Where one delta makes
several events, all but the last say how many of them there were, and where the delta began; without a place, they are
of those behind the end of all choices. The checksum is of the text: an answer that does not come out the same, as can
happen where numbers are rounded, is refused and never continued with other text.
"""

import asyncio
import contextlib
import re
import sys
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from deployments.dispatch.route_log import RequestWatch, tell
from replicas.errors import InvalidRequest, MantaError
from replicas.types import TokenDelta

MOST_STREAMS = 256  # of one router
MOST_BYTES = 512 << 10  # of one stream: some 2,000 events of text
MOST_CHOICES = 8  # of one stream: each event's id names the places of all
MOST_GONE = 1000  # streams of which it is known that they were there
ALL = sys.maxsize

_PLACE = r"(\d{1,9})\.(\d{1,9})\.([0-9a-f]{8})(e?)"
_ID = re.compile(rf"(\d{{1,9}}):({_PLACE}(?:,{_PLACE})*)(?:\+(\d{{1,4}})(?:@(\d)\.(\d{{1,9}})\.(\d{{1,9}}))?)?")


class StreamGone(MantaError):
    """The rest of a stream is not there any more, or cannot be made as it was."""

    http_status = 410
    code = "stream_gone"


class Event(NamedTuple):
    """One event of a stream."""

    id: str  # "" where no client can go on from it
    data: bytes  # as it is sent


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a choice has come."""

    num_tokens: int = 0
    num_characters: int = 0
    checksum: int = 0  # CRC-32 of the text in UTF-8
    ended: bool = False

    def after(self, delta: TokenDelta) -> "Reached":
        return Reached(
            self.num_tokens + len(delta.token_ids),
            self.num_characters + len(delta.text),
            zlib.crc32(delta.text.encode(), self.checksum),
            delta.finish is not None,
        )

    def covers(self, other: "Reached") -> bool:
        enough = self.num_tokens >= other.num_tokens and self.num_characters >= other.num_characters
        return enough and self.ended >= other.ended

    def __str__(self) -> str:
        return f"{self.num_tokens}.{self.num_characters}.{self.checksum:08x}{'e' if self.ended else ''}"


class Begun(NamedTuple):
    """Where the delta began of which a client has had some events, and not all."""

    choice: int
    num_tokens: int
    num_characters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """What a client has had of a stream: the id of its last event, read."""

    number: int
    places: tuple[Reached, ...]
    num_events: int = 0  # of the delta that began at ``begun``, or of the events behind all choices
    begun: Begun | None = None

    @staticmethod
    def read(text: str, *, num_choices: int) -> "Cursor":
        """Read the id of an event. Raises: InvalidRequest."""
        found = _ID.fullmatch(text)
        if found is None or found[2].count(",") != num_choices - 1:
            raise InvalidRequest(f"Last-Event-ID: {text[:64]!r} is not the id of an event of this stream")
        places = tuple(
            Reached(int(tokens), int(characters), int(checksum, 16), bool(ended))
            for tokens, characters, checksum, ended in re.findall(_PLACE, found[2])
        )
        *_, num_events, choice, num_tokens, num_characters = found.groups()
        begun = None if choice is None else Begun(int(choice), int(num_tokens), int(num_characters))
        if begun is not None and begun.choice >= num_choices:
            raise InvalidRequest(f"Last-Event-ID: {text[:64]!r} names a choice that this request does not have")
        return Cursor(number=int(found[1]), places=places, num_events=int(num_events or 0), begun=begun)

    def __str__(self) -> str:
        part = f"+{self.num_events}" if self.num_events else ""
        begun = "" if self.begun is None else "@" + ".".join(map(str, self.begun))
        return f"{self.number}:{','.join(map(str, self.places))}{part}{begun}"


@dataclass(frozen=True, slots=True)
class _Cut:
    """A place up to which a client has had something of a choice."""

    place: Reached
    num_had: int  # events of what ends here
    is_checked: bool = True


class Numbering:
    """Gives the events of one run their ids, after cutting its deltas where the client's last event ended."""

    def __init__(self, after: Cursor | None, *, num_choices: int) -> None:
        """``after``: what the client has had of the stream; None: nothing."""
        self._number = 0 if after is None else after.number
        self._places = [Reached()] * num_choices
        self._begun: Begun | None = None  # of the newest piece
        self._come = [Reached()] * num_choices  # with what is held
        self._held: list[list[TokenDelta]] = [[] for _ in range(num_choices)]  # what has come before a cut
        self._cuts: list[list[_Cut]] = [[] for _ in range(num_choices)]
        self._num_last_had = 0
        if after is None:
            return
        self._cuts = [[_Cut(place, ALL)] if place != Reached() else [] for place in after.places]
        if after.begun is not None:
            choice = after.begun.choice
            self._cuts[choice] = [_Cut(after.places[choice], after.num_events)]
            if after.begun[1:] != (0, 0):
                begin = Reached(after.begun.num_tokens, after.begun.num_characters)
                self._cuts[choice].insert(0, _Cut(begin, ALL, is_checked=False))
        else:
            self._num_last_had = after.num_events

    def pieces(self, delta: TokenDelta) -> Iterator[tuple[TokenDelta, int]]:
        """Yield ``delta`` in pieces, each with how many of its events the client has had. Raises: StreamGone."""
        index = delta.index
        cuts = self._cuts[index]
        self._come[index] = self._come[index].after(delta)
        while cuts:
            place, cut, held = self._places[index], cuts[0], self._held[index]
            held.append(delta)
            if not self._come[index].covers(cut.place):
                if delta.finish is not None:
                    raise _other_text()
                return
            delta = _joined(held)
            held.clear()
            first, rest = _split(delta, place, cut.place)
            if (cut.is_checked and place.after(first) != cut.place) or (cut.place.ended and rest is not None):
                raise _other_text()
            del cuts[0]
            yield self._piece(first), cut.num_had
            if rest is None:
                return
            delta = rest
        yield self._piece(delta), 0

    def ids(self, num_events: int, num_had: int) -> list[str]:
        """Number the events of the newest piece, but the first ``num_had`` of them."""
        return self._ids(num_events, num_had, self._begun, whole=num_events)

    def last_ids(self, num_events: int) -> list[str]:
        """Number the events behind the end of all choices, but those that the client has had."""
        return self._ids(num_events, self._num_last_had, None, whole=ALL)

    @property
    def num_last_had(self) -> int:
        return self._num_last_had

    def _piece(self, delta: TokenDelta) -> TokenDelta:
        place = self._places[delta.index]
        self._begun = Begun(delta.index, place.num_tokens, place.num_characters)
        self._places[delta.index] = place.after(delta)
        return delta

    def _ids(self, num_events: int, num_had: int, begun: Begun | None, *, whole: int) -> list[str]:
        ids, places = [], tuple(self._places)
        for count in range(num_had + 1, num_events + 1):
            self._number += 1
            if count == whole:
                ids.append(str(Cursor(number=self._number, places=places)))
            else:
                ids.append(str(Cursor(number=self._number, places=places, num_events=count, begun=begun)))
        return ids


def _joined(deltas: list[TokenDelta]) -> TokenDelta:
    """Merge them two by two, since each merge copies both: of an answer's length the work is n log n."""
    while len(deltas) > 1:
        pairs = zip(deltas[::2], deltas[1::2], strict=False)
        deltas = [one.merge(other) for one, other in pairs] + (deltas[-1:] if len(deltas) % 2 else [])
    return deltas[0]


def _split(delta: TokenDelta, begin: Reached, cut: Reached) -> tuple[TokenDelta, TokenDelta | None]:
    """Cut ``delta``, which begins at ``begin``, at ``cut``; None: nothing is left behind it."""
    tokens, characters = cut.num_tokens - begin.num_tokens, cut.num_characters - begin.num_characters
    rest = replace(
        delta,
        token_ids=delta.token_ids[tokens:],
        text=delta.text[characters:],
        logprobs=delta.logprobs[tokens:],
        prompt_logprobs=(),
        finish=None if cut.ended else delta.finish,
    )
    first = replace(
        delta,
        token_ids=delta.token_ids[:tokens],
        text=delta.text[:characters],
        logprobs=delta.logprobs[:tokens],
        finish=delta.finish if cut.ended else None,
    )
    return first, rest if rest.token_ids or rest.text or rest.finish is not None else None


def _other_text() -> StreamGone:
    return StreamGone("the answer came out differently this time: send the request again, without Last-Event-ID")


class KeptStream:
    """The events of one answer, made by a task of its own and read by one connection at a time, the newest."""

    def __init__(
        self,
        batches: AsyncGenerator[list[Event], None],
        error_event: Callable[[Exception], bytes],
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
        self._task = asyncio.create_task(self._run(batches, error_event))

    @property
    def num_events(self) -> int:
        """The events that have come, kept or not."""
        return self._num_dropped + len(self._events)

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

    async def _run(self, batches: AsyncGenerator[list[Event], None], error_event: Callable[[Exception], bytes]) -> None:
        try:
            async with contextlib.aclosing(batches):
                async for batch in batches:
                    num_bytes = self._unread_bytes + sum(len(event.data) for event in batch)
                    if self.connection is None and num_bytes > MOST_BYTES:
                        raise StreamGone(f"more than {MOST_BYTES >> 10} KiB waited for this stream's client")
                    self._add(batch)
                    while self.connection is not None and self._unread_bytes > MOST_BYTES // 2:
                        self._room.clear()
                        await self._room.wait()
        except Exception as error:  # noqa: BLE001 - the status may be sent: only an event can carry the error then
            if self.num_events:
                self._add([Event("", error_event(error))])
            else:
                self.failure = error
        finally:
            self.ended = True
            self.news.set()

    def _add(self, batch: Sequence[Event]) -> None:
        self._events.extend(batch)
        num_bytes = sum(len(event.data) for event in batch)
        self._num_bytes += num_bytes
        self._unread_bytes += num_bytes
        while self._num_bytes > MOST_BYTES and self._num_dropped < self._num_read:
            self._after, data = self._events.popleft()
            self._num_bytes -= len(data)
            self._num_dropped += 1
        self.news.set()


class Connection:
    """The place of one connection in a stream."""

    def __init__(self, stream: KeptStream, index: int) -> None:
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


class KeptStreams:
    """The streams of one router that outlive their connections."""

    def __init__(self, *, reconnect_s: float = 30.0, watch: RequestWatch | None = None) -> None:
        """``reconnect_s``: how long a stream is kept without a connection; 0: it ends with its connection."""
        self._reconnect_s = reconnect_s
        self._watch = watch if watch is not None else RequestWatch()
        self._streams: dict[Key, KeptStream] = {}
        self._timers: dict[KeptStream, asyncio.TimerHandle] = {}  # of those without a connection
        self._gone: OrderedDict[Key, str] = OrderedDict()  # why, the oldest first

    def find(self, key: Key) -> KeptStream | None:
        return self._streams.get(key)

    def why_gone(self, key: Key) -> str | None:
        """Say why the stream called so is not kept any more; None if there was none."""
        return self._gone.get(key)

    def has_room(self, key: Key) -> bool:
        """Whether one more can be kept. Where it is needed, the one that waits the longest, of the key with most, makes
        room; a key with half of all has room only in the place of its own, unless there are no keys ("")."""
        owners = Counter(owner for owner, _ in self._streams)
        has_half = key[0] != "" and owners[key[0]] >= MOST_STREAMS // 2
        if key in self._streams or (len(self._streams) < MOST_STREAMS and not has_half):
            return True
        names = {stream: each for each, stream in self._streams.items()}
        waiting = [names[each] for each in self._timers if not has_half or names[each][0] == key[0]]
        if not waiting:
            return False
        self._drop(
            max(waiting, key=lambda each: (self._streams[each].is_delivered, owners[each[0]])),
            f"a router keeps {MOST_STREAMS} streams, and others came",
        )
        return True

    def add(self, key: Key, stream: KeptStream) -> Connection:
        """Keep ``stream``, in the place of another of this name, and attach its first connection."""
        if key in self._streams:
            self._forget(key)
        self._gone.pop(key, None)
        self._streams[key] = stream
        return self.attach(stream, 0)

    def attach(self, stream: KeptStream, index: int) -> Connection:
        """Give ``stream`` from event ``index`` on to a new connection."""
        timer = self._timers.pop(stream, None)
        if timer is not None:
            timer.cancel()
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
            self._drop(key, f"more than {MOST_BYTES >> 10} KiB waited for this stream's client")
            return
        timer = asyncio.get_running_loop().call_later(self._reconnect_s, self._expire, key, stream)
        self._timers[stream] = timer
        self._tell()

    def resumed(self, how: str) -> None:
        """Count a client that came back: its stream was ``kept``, or its request runs ``again``."""
        tell(self._watch.stream_resumed, how)

    def stop(self) -> None:
        """End all: the server stops."""
        for key in list(self._streams):
            self._drop(key, "the router stopped")

    def _expire(self, key: Key, stream: KeptStream) -> None:
        self._drop(key, f"its client was away for more than {self._reconnect_s:g} s (router.reconnect_s)", stream)

    def _forget(self, key: Key) -> None:
        """Let another stream have this name. Where it is being read, that goes on, for this one connection."""
        stream = self._streams.pop(key)
        timer = self._timers.pop(stream, None)
        if timer is not None:
            timer.cancel()
            stream.stop()

    def _drop(self, key: Key, why: str, stream: KeptStream | None = None) -> None:
        """End what is kept under ``key``, if it is ``stream`` where one is given."""
        found = self._streams.get(key)
        if found is None or (stream is not None and found is not stream):
            return
        if found.is_away:
            tell(self._watch.stream_expired)
        del self._streams[key]
        timer = self._timers.pop(found, None)
        if timer is not None:
            timer.cancel()
        found.stop()
        self._gone[key] = why
        if len(self._gone) > MOST_GONE:
            self._gone.popitem(last=False)
        self._tell()

    def _tell(self) -> None:
        tell(self._watch.streams_detached, sum(stream.is_away for stream in self._timers))
