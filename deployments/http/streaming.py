"""The answers of the generating endpoints: server-sent events or one body, until the client disconnects.

    deltas ─> `Answer.written`: changes ─> a `Writer` ─> one body, a stream, a stream that can be resumed, a background
              response. A `StreamWriter` also takes text straight from the channel.

Owns:      the race between an answer and the client's disconnect; which deltas become which events; the parts and the
           token counts of an answer, which every form shows in its own words; which streams outlive their connection:
           those whose client says that it comes back (arrivals.py), of one prompt and few choices.
Never:     knows the JSON of an endpoint: its `Form` does.
Invariant: the answer's generators are closed on every path, so that a disconnect aborts the client's requests; of a
           client that comes back, resumable_streams.py does it in time.
Thread:    the router's event loop; bodies with many logprobs are encoded on another thread.
"""

import asyncio
import contextlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from json.encoder import encode_basestring
from types import MappingProxyType, coroutine
from typing import Any, Generic, NamedTuple, TypeVar, cast

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from deployments.dispatch.dispatcher import RequestDeltas
from deployments.dispatch.event_ids import MOST_CHOICES, Cursor, Numbering
from deployments.dispatch.progress import StraightWay
from deployments.dispatch.resumable_streams import Connection, Event, ResumableStream, ResumableStreams
from deployments.http.access import caller_of
from deployments.http.api_document import LINES
from deployments.http.arrivals import (
    ALIVE,
    LAST_EVENT,
    RESUME,
    Generations,
    generations_of,
    last_event_of,
    opening_of,
)
from deployments.http.http_errors import CLIENT_CLOSED, Busy, GenerationFailed, body_of, error_body
from deployments.http.service import service_of
from deployments.output.parts import Part, TextPart
from deployments.output.reading import ChoiceReading
from deployments.output.validation import SchemaPromise, SchemaWord
from deployments.record.rids import client_rid
from replicas.errors import Fault, InvalidRequest, RequestAborted
from replicas.types import GenerateRequest, TokenDelta, Usage

log = logging.getLogger(__name__)

SCHEMA_HEADER = "x-manta-schema"
DONE = b"data: [DONE]\n\n"
ALIVE_S = 1.0  # after which a stream that is kept, and has nothing to send, sends a comment
BODY = "http.response.body"
T = TypeVar("T")
Key = tuple[int, int]  # (number of the request within its HTTP request, choice)
Numbered = tuple[int, TokenDelta]  # with the number of its request
Payload = dict[str, Any]  # of an event
Queue = asyncio.Queue[tuple[int, TokenDelta | Exception | None]]


class ClientGone(RequestAborted):
    """The client closed its connection before the answer was complete."""

    def __init__(self) -> None:
        super().__init__("the client closed the connection")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
FEW_LOGPROBS = 100  # rows, each of a token and up to 20 alternatives
_MARK = "\0the text\0"  # never part of a model's name or an id


def sse(payload: dict[str, Any], *, named: bool = False, event_id: str = "") -> bytes:
    """Encode ``payload`` as one server-sent event; ``named``: by its type, as OpenAI's Responses and Anthropic do."""
    name = f"event: {payload['type']}\n".encode() if named else b""
    if event_id:
        name = f"id: {event_id}\n".encode() + name
    return name + b"data: " + _ENCODER.encode(payload).encode() + b"\n\n"


class TextEvents:
    """Server-sent events that differ in one text only; the rest is encoded once: 0.5 us an event instead of 7."""

    def __init__(self, payload_of: Callable[[str], dict[str, Any]], *, named: bool = False) -> None:
        """``payload_of``: the whole payload, with the given text in one place; ``named``: as of `sse`."""
        parts = sse(payload_of(_MARK), named=named).split(_ENCODER.encode(_MARK).encode())
        assert len(parts) == 2, f"the text stands in {len(parts) - 1} places"
        self._before, self._after = parts

    def event(self, text: str) -> bytes:
        return self._before + encode_basestring(text).encode() + self._after


class AnswerTokens(NamedTuple):
    """The tokens of an answer, or of as much as there is of it."""

    prompt: int
    cached: int  # of the prompts' tokens
    output: int
    reasoning: int  # of the output's tokens
    kept: int = 0  # of the prompts' tokens, those that the cache has got, or had


class Change(NamedTuple):
    """What one delta adds to a choice. In an answer that is not streamed, each choice is one change."""

    key: Key
    delta: TokenDelta  # where events are cumulative, of all that has come of the choice
    parts: Sequence[Part]  # of the text that is new
    begins: bool  # it is the first of its choice
    num_calls: int = 0  # tool calls of the choice so far
    schema: SchemaWord | None = None  # what became of the choice's schema, where a stream tells it at the end


class AnswerSoFar:
    """As much as has come of an answer: reads the deltas of its choices, each choice's in order."""

    def __init__(self, new_reading: Callable[[], ChoiceReading] | None, *, is_cumulative: bool = False) -> None:
        """``new_reading``: of each choice; None where each is all text."""
        self._new_reading = new_reading
        self._is_cumulative = is_cumulative
        self._latest: dict[Key, TokenDelta] = {}
        self._readings: dict[Key, ChoiceReading] = {}

    def add(self, number: int, delta: TokenDelta) -> Change:
        """Add the next delta of a choice of request ``number``. Returns: what it changes."""
        key = (number, delta.index)
        before = self._latest.get(key)
        if self._new_reading is None:
            parts: Sequence[Part] = [TextPart(delta.text)] if delta.text else []
            num_calls = 0
        else:
            reading = self._readings[key] = self._readings.get(key) or self._new_reading()
            parts, num_calls = reading.read(delta), reading.num_calls
        if self._is_cumulative and before is not None:
            delta = before.merge(delta)
        self._latest[key] = delta
        return Change(key, delta, parts, before is None, num_calls)

    @property
    def latest(self) -> Iterable[TokenDelta]:
        """The last delta of each choice."""
        return self._latest.values()

    @property
    def tokens(self) -> AnswerTokens:
        """Sum up: a prompt counts once, whatever its number of choices; every output counts."""
        shown: dict[int, Usage] = {}  # of each prompt: that of choice 0, which computes what the others share
        for (number, choice), delta in self._latest.items():
            if choice == 0 or number not in shown:
                shown[number] = delta.usage
        return AnswerTokens(
            prompt=sum(usage.prompt_tokens for usage in shown.values()),
            cached=sum(usage.cached_tokens for usage in shown.values()),
            output=sum(delta.usage.completion_tokens for delta in self._latest.values()),
            reasoning=sum(each.num_reasoning for each in self._readings.values()),
            kept=sum(usage.kept_tokens for usage in shown.values()),
        )


class Form(ABC):
    """The JSON of an endpoint's answer, whole or in events."""

    is_cumulative = False  # an event repeats all output of its choice so far, instead of only what is new
    is_lines = False  # an event is a line of JSON; such a stream ends with its last line, and cannot be resumed
    names_events = False  # an event has its type as its name; such a stream ends with its last event, others with DONE

    @property
    def only_text(self) -> bool:
        """Whether the events of a choice between its first and its last differ in their text alone."""
        return False

    @abstractmethod
    def whole(self, choices: Sequence[Change], so_far: AnswerSoFar) -> Any:
        """Make the body of an answer that is not streamed. Args: choices: sorted by their keys."""

    @abstractmethod
    def events(self, change: Change, so_far: AnswerSoFar) -> list[dict[str, Any]]:
        """Make the events of ``change``; none if it has nothing for the client."""

    def last_events(self, so_far: AnswerSoFar) -> list[dict[str, Any]]:
        """Make the events after the end of all choices."""
        return []

    def error_events(self, error: Exception) -> list[dict[str, Any]]:
        """Make the events that end a stream which has begun, where its request has failed."""
        return [body_of(error)[1]]


class Writer(ABC, Generic[T]):
    """Makes what is sent of an answer; each way to answer has its own."""

    tells_schema = True  # at the end of each choice, where no header can

    def __init__(self, form: Form) -> None:
        self.form = form

    def begin(self) -> T | None:
        """Write what comes before the first change."""
        return None

    @abstractmethod
    def write(self, change: Change, so_far: AnswerSoFar) -> T | None:
        """Write the next change; None or empty: nothing is sent yet. Many logprobs are written on another thread."""

    def end(self, so_far: AnswerSoFar) -> T | None:
        """Write what comes behind the end of all choices."""
        return None

    def payloads(self, change: Change, so_far: AnswerSoFar) -> list[Payload]:
        """Make the events of ``change``."""
        payloads = self.form.events(change, so_far)
        if change.schema is not None:
            payloads[-1:] = [each | {"manta": {"schema": change.schema}} for each in payloads[-1:]]
        return payloads


class WholeWriter(Writer[Response]):
    """Writes one body at the end."""

    tells_schema = False

    def __init__(self, form: Form) -> None:
        super().__init__(form)
        self.choices: list[Change] = []

    def write(self, change: Change, so_far: AnswerSoFar) -> None:
        self.choices.append(change)

    def end(self, so_far: AnswerSoFar) -> Response:
        return JsonAnswer(self.form.whole(self.choices, so_far))


class StreamWriter(Writer[bytes]):
    """Writes the bytes of a stream. Text goes straight, from the channel's callback to the client's connection in one
    call: it is a `StraightWay`.

    At 20 steps a second each layer between is out of the caches each time. What has more than text goes by the
    iterators, and so does all while the client is slow: then deltas merge.
    """

    def __init__(self, form: Form, *, shortens: bool = True) -> None:
        """``shortens``: events of text alone may be written without their payload."""
        super().__init__(form)
        self._shortens = shortens
        self._texts: dict[Key, TextEvents] = {}  # of the choices that have begun
        self._out: Send | None = None  # while the answer is open
        self._slow: asyncio.Task[None] | None = None  # waits until the client has read

    def write(self, change: Change, so_far: AnswerSoFar) -> bytes:
        delta, goes_on = change.delta, change.delta.finish is None
        if goes_on and change.key in self._texts:
            return self._texts[change.key].event(delta.text) if delta.text else b""
        events = self._joined(self.payloads(change, so_far))
        if goes_on and self._shortens and self.form.only_text:
            self._texts[change.key] = TextEvents(partial(self._text, change), named=self.form.names_events)
        return events

    def end(self, so_far: AnswerSoFar) -> bytes:
        closes = self.form.names_events or self.form.is_lines
        return self._joined(self.form.last_events(so_far)) + (b"" if closes else DONE)

    def error(self, error: Exception) -> bytes:
        """Write the end of a stream that has begun and fails."""
        return self._joined(self.form.error_events(error))

    def open(self, send: Send) -> None:
        """Begin to take text straight: all before it has been sent."""
        self._out = send

    def close(self) -> None:
        self._out = None
        if self._slow is not None:
            self._slow.cancel()

    def takes(self, index: int) -> bool:
        return self._out is not None and (0, index) in self._texts and (self._slow is None or self._slow.done())

    def send(self, delta: TokenDelta) -> None:
        assert self._out is not None, "an answer that is not open takes nothing"
        if not delta.text:
            return
        body = self._texts[0, delta.index].event(delta.text)
        sending = cast(Coroutine[Any, Any, None], self._out({"type": BODY, "body": body, "more_body": True}))
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return  # written, or buffered
        except OSError:
            self._out = None  # the client has gone; the answer's own task ends it
            return
        self._slow = asyncio.ensure_future(_resumed(sending, waits_for))

    def _joined(self, payloads: list[Payload]) -> bytes:
        if self.form.is_lines:
            return b"".join(_ENCODER.encode(payload).encode() + b"\n" for payload in payloads)
        return b"".join(sse(payload, named=self.form.names_events) for payload in payloads)

    def _text(self, change: Change, text: str) -> Payload:
        """Make the payload of an event of the choice of ``change``, which has begun, that has nothing but ``text``."""
        plain = replace(change.delta, text=text, finish=None, logprobs=(), prompt_logprobs=())
        later = Change(key=change.key, delta=plain, parts=[TextPart(text)], begins=False)
        [payload] = self.form.events(later, AnswerSoFar(None))
        return payload


@coroutine
def _resumed(begun: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Go on with a coroutine that was run up to its first wait."""
    yield waits_for
    yield from begun


class NumberedWriter(Writer[list[Event]]):
    """Writes the events, with their ids, that the client of a stream which can be resumed lacks."""

    def __init__(self, form: Form, numbering: Numbering) -> None:
        super().__init__(form)
        self._numbering = numbering
        self._num_had = 0  # of the events of the newest piece

    async def pieces(self, deltas: AsyncGenerator[Numbered, None]) -> AsyncGenerator[Numbered, None]:
        """Cut ``deltas`` where the client's last event ended."""
        async with contextlib.aclosing(deltas):
            async for number, delta in deltas:
                for piece, num_had in self._numbering.pieces(delta):
                    self._num_had = num_had
                    yield number, piece

    def write(self, change: Change, so_far: AnswerSoFar) -> list[Event]:
        payloads = self.payloads(change, so_far)
        ids = self._numbering.ids(len(payloads), self._num_had)
        return [self._event(*each) for each in zip(ids, payloads[self._num_had :], strict=True)]

    def end(self, so_far: AnswerSoFar) -> list[Event]:
        last = self.form.last_events(so_far)
        ids = self._numbering.last_ids(len(last) + (not self.form.names_events))
        events = [self._event(*each) for each in zip(ids, last[self._numbering.num_last_had :], strict=False)]
        if len(ids) > len(events):
            events.append(Event(ids[-1], f"id: {ids[-1]}\n".encode() + DONE))
        return events

    def error(self, error: Exception) -> list[Event]:
        """Write the end of a stream that fails."""
        return [Event("", sse(each, named=self.form.names_events)) for each in self.form.error_events(error)]

    def _event(self, event_id: str, payload: Payload) -> Event:
        if "sequence_number" in payload:  # one for each event, from 0 on
            payload = {**payload, "sequence_number": int(event_id.partition(":")[0]) - 1}
        return Event(event_id, sse(payload, named=self.form.names_events, event_id=event_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one HTTP request that generates, for one prompt or several."""

    requests: list[GenerateRequest]
    form: Form
    answer_id: str | None  # None if each prompt's part has an id of its own
    promise: SchemaPromise | None = None  # of each choice, if they were asked for by a schema
    new_reading: Callable[[], ChoiceReading] | None = None  # of each choice; None where each is all text

    async def respond(self, request: Request, *, streams: bool | None) -> Response:
        """Run the requests and answer in events or in one body.

        Raises: InvalidRequest for bad routing headers, or for the id of an event of another stream; StreamGone.
        """
        last_event = last_event_of(request.headers) if streams else None
        if last_event is not None:
            resumable = await self._resumable(request, last_event)
            if resumable is not None:
                return resumable
        generations = generations_of(request, self.answer_id)
        if not streams:
            return await answer(request, self._whole(generations))
        writer = StreamWriter(self.form, shortens=not self._validates)
        events = self.written(run(generations, self.requests, writer), writer)
        response = await stream(request, events, failed=writer.error, straight=writer)
        if self.promise is not None:
            response.headers[SCHEMA_HEADER] = self.promised_at_first
        if self.form.is_lines:
            response.headers["content-type"] = LINES
        return response

    async def written(self, deltas: AsyncGenerator[Numbered, None], writer: Writer[T]) -> AsyncGenerator[T, None]:
        """Yield what ``writer`` makes of the change of each of ``deltas``, and of the end of all."""
        so_far = AnswerSoFar(self.new_reading, is_cumulative=self.form.is_cumulative)
        said: dict[Key, list[str]] | None = {} if self._validates and writer.tells_schema else None
        if first := writer.begin():
            yield first
        async with contextlib.aclosing(deltas):
            async for number, delta in deltas:
                change = so_far.add(number, delta)
                if said is not None:
                    said.setdefault(change.key, []).append(delta.text)
                    if delta.finish is not None and self.promise is not None:
                        ended = "".join(said[change.key]), delta.finish
                        change = change._replace(schema=await self.promise.of([ended]))
                if piece := await made(partial(writer.write, change, so_far), [change.delta]):
                    yield piece
        if last := await made(partial(writer.end, so_far), so_far.latest):
            yield last

    @property
    def _can_resume(self) -> bool:
        """Whether ids of events can say how far a stream has come."""
        [asked, *others] = self.requests
        alone = not others and not self.form.is_lines
        return alone and asked.sampling.n <= MOST_CHOICES and asked.prompt_logprobs_from is None

    async def _resumable(self, request: Request, last_event: str) -> Response | None:
        """Answer with a stream that outlives its connection: the rest of one that is kept, or a new one. None: this one
        cannot, and its client has had nothing yet.

        Args: last_event: the id of the last event that the client has had, "" without one.
        """
        if not self._can_resume:
            if last_event:
                raise InvalidRequest(
                    f"{LAST_EVENT}: a stream of lines, of several prompts, of more than {MOST_CHOICES} choices, or "
                    "with logprobs of its prompt cannot be resumed"
                )
            return None
        [asked] = self.requests
        streams, key = service_of(request).streams, (caller_of(request).name, client_rid(asked.rid))
        kept, body = streams.find(key), request.url.path.encode() + request.state.body_digest
        if kept is not None and kept.is_for(body, last_event):
            index = kept.index_after(last_event)
            if index is not None:
                streams.resumed("kept")
                return await kept_answer(request, streams, streams.attach(kept, index))
        after = Cursor.read(last_event, num_choices=asked.sampling.n) if last_event else None
        if not streams.has_room(key):
            if last_event:
                raise Busy("as many streams as a router keeps are being read: try again later")
            return None
        generations = generations_of(request, self.answer_id)
        opening = opening_of(request)
        if opening.seed is None:
            opening = replace(opening, seed=asked.sampling.seed)
        version = "" if asked.adapter is None else asked.adapter.identity
        same = blake2b(f"{key} {opening} {version} ".encode() + body, digest_size=16)  # these: so is the answer
        sampling = replace(asked.sampling, seed=cast(int, opening.seed))
        asked = replace(asked, sampling=sampling, recall=same.hexdigest())
        headers = {RESUME: str(opening)}
        if self.promise is not None:
            headers[SCHEMA_HEADER] = self.promised_at_first
        resumes = bool(last_event) or RESUME in request.headers  # a client may have had its headers and no event
        deltas = merged([generations.resumed(asked) if resumes else generations.stream(asked)])
        writer = NumberedWriter(self.form, Numbering(after, num_choices=asked.sampling.n))
        batches = self.written(writer.pieces(deltas), writer)
        stream = ResumableStream(batches, writer.error, after=last_event, body=body, headers=headers)
        return await kept_answer(request, streams, streams.add(key, stream))

    async def _whole(self, generations: Generations) -> Response:
        writer = WholeWriter(self.form)
        [response] = [each async for each in self.written(joined(run(generations, self.requests)), writer)]
        if self.promise is not None:
            ended = [(each.delta.text, each.delta.finish) for each in writer.choices]
            response.headers[SCHEMA_HEADER] = await self.promise.of(ended)
        return response

    @property
    def promised_at_first(self) -> SchemaWord:
        """What can be said of a schema before the answer has come: a stop text may cut it anywhere."""
        may_be_cut = any(asked.sampling.stop for asked in self.requests)
        return "partial" if self.promise is None or may_be_cut else self.promise.at_first

    @property
    def _validates(self) -> bool:
        """Whether the last event of a choice says what became of its schema."""
        return self.promise is not None and self.promised_at_first == "partial" and not self.form.names_events


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await ``work``, and cancel it if the client disconnects first. Raises: ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, gone):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


class JsonAnswer(JSONResponse):
    """A JSON response, encoded in a third of the base's time: logprobs make answers of megabytes."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


async def made(make: Callable[[], T], deltas: Iterable[TokenDelta]) -> T:
    """Call ``make``, on another thread if ``deltas`` have many logprobs. Returns: its result."""
    num_logprobs = sum(len(delta.prompt_logprobs) + len(delta.logprobs) for delta in deltas)
    return make() if num_logprobs <= FEW_LOGPROBS else await asyncio.to_thread(make)


async def answer(request: Request, work: Awaitable[Response]) -> Response:
    """Await the response of ``work``; a client that disconnects first gets a 499."""
    try:
        return await until_gone(request.receive, work)
    except ClientGone as error:
        return JSONResponse(error_body(str(error), status=CLIENT_CLOSED), status_code=CLIENT_CLOSED)


async def stream(
    request: Request,
    events: AsyncGenerator[bytes, None],
    *,
    headers: Mapping[str, str] = MappingProxyType({}),
    failed: Callable[[Exception], bytes] | None = None,
    straight: StreamWriter | None = None,
) -> Response:
    """Answer with server-sent ``events``, and with those that go ``straight`` from the channel meanwhile.

    An error before the first of them is an ordinary error response; ``failed`` makes the events of a later one.
    """
    try:
        first = await until_gone(request.receive, anext(events))
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED)
    except BaseException:
        await events.aclose()
        raise
    return SseResponse(headers, first, events, failed, straight)


async def kept_answer(request: Request, streams: ResumableStreams, connection: Connection) -> Response:
    """Answer with the rest of a stream, which goes on without ``connection``. Raises: the error that came instead
    of its first event."""
    return await stream(request, _kept(streams, connection), headers=of_kept(connection.stream))


async def _kept(streams: ResumableStreams, connection: Connection) -> AsyncGenerator[bytes, None]:
    try:
        await connection.begun()
        yield await connection.more()
        while True:
            try:
                async with asyncio.timeout(ALIVE_S):
                    events = await connection.more()
            except TimeoutError:
                events = b": alive\n"  # a comment; with an empty line behind it OpenAI's SDK takes it for an event
            if not events:
                return
            yield events
    finally:
        streams.detach(connection)


def of_kept(stream: ResumableStream) -> dict[str, str]:
    """Return the headers of a response with the events of ``stream``."""
    return {**stream.headers, ALIVE: f"{ALIVE_S:g}"}


class EventsResponse(Response):
    """A response of server-sent events, without these."""

    media_type = "text/event-stream"

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]


class SseResponse(EventsResponse):
    """A response that sends ``first``, then ``events``; an error between them becomes events too.

    Its start passes the middlewares. Events go past them to what `Arrivals` was given: with 16 streams of 20 tokens a
    second their code is out of the caches each time.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        first: bytes,
        events: AsyncGenerator[bytes, None],
        failed: Callable[[Exception], bytes] | None,
        straight: StreamWriter | None,
    ) -> None:
        super().__init__(headers)
        self._first = first
        self._events = events
        self._failed = failed
        self._straight = straight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            try:
                with contextlib.suppress(ClientGone, OSError):
                    await until_gone(receive, self._send(send, scope["state"]["send_body"]))
            finally:
                if self._straight is not None:
                    self._straight.close()

    async def _send(self, start: Send, send: Send) -> None:
        await start({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": BODY, "body": self._first, "more_body": True})
        if self._straight is not None:
            self._straight.open(send)
        try:
            async for event in self._events:
                await send({"type": BODY, "body": event, "more_body": True})
        except Exception as error:  # the status is sent: only an event can carry the error
            if self._failed is None:
                raise
            await send({"type": BODY, "body": self._failed(error), "more_body": True})
        await send({"type": BODY, "body": b"", "more_body": False})


def run(
    generations: Generations, requests: Sequence[GenerateRequest], straight: StraightWay | None = None
) -> AsyncGenerator[Numbered, None]:
    """Run the ``requests`` of one HTTP request. Returns: as `merged`, without what goes ``straight``."""
    if len(requests) > 1:
        return _together(generations, requests)  # these wait for each other in a queue: none goes straight
    deltas = generations.stream(requests[0])
    deltas.go_straight(straight)
    return merged([deltas])


async def _together(generations: Generations, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Numbered, None]:
    async with generations.together(requests) as streams, contextlib.aclosing(merged(streams)) as deltas:
        async for each in deltas:
            yield each


async def merged(streams: Sequence[RequestDeltas | AsyncGenerator[TokenDelta, None]]) -> AsyncGenerator[Numbered, None]:
    """Merge the deltas of several requests, in order of arrival, each with its request's number. Closing it closes all.

    Raises: the first error of any stream; GenerationFailed if the engine ended a request with an error.
    """
    if len(streams) == 1:  # no task and no queue between the stream and its reader
        async with contextlib.aclosing(streams[0]) as deltas:
            async for delta in deltas:
                raise_if_failed(delta)
                yield 0, delta
        return
    queue: Queue = asyncio.Queue(maxsize=len(streams))
    tasks: list[asyncio.Task[None]] = []
    try:
        for number, deltas in enumerate(streams):
            tasks.append(asyncio.create_task(_pump(number, deltas, queue)))
            await asyncio.sleep(0)  # each begins with a routing decision; 256 of them would block the loop
        num_open = len(tasks)
        while num_open:
            number, item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(number: int, deltas: RequestDeltas | AsyncGenerator[TokenDelta, None], queue: Queue) -> None:
    try:
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                raise_if_failed(delta)
                await queue.put((number, delta))
        await queue.put((number, None))
    except Exception as error:  # noqa: BLE001 - raised again by `merged`
        await queue.put((number, error))


def raise_if_failed(delta: TokenDelta) -> None:
    """Raise GenerationFailed for an error, deadlines included; a requested abort is an answer."""
    finish = delta.finish
    if finish is not None and finish.fault not in (None, Fault.CANCELLED):
        raise GenerationFailed(finish)


async def joined(deltas: AsyncIterator[Numbered]) -> AsyncGenerator[Numbered, None]:
    """Join the deltas of each choice into one, sorted by (request's number, choice)."""
    pieces: dict[Key, list[TokenDelta]] = {}
    async for number, delta in deltas:
        pieces.setdefault((number, delta.index), []).append(delta)
    for number, index in sorted(pieces):
        first, *later = pieces[number, index]
        yield number, first.merge(*later)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
