"""The ids of events and what is kept of streams, without a model: deltas cut anywhere, clients that are away."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from random import Random
from typing import Any

import pytest
from starlette.requests import Request

from deployments.dispatch import resumable_streams
from deployments.dispatch.event_ids import Cursor, Numbering, StreamGone
from deployments.dispatch.resumable_streams import Event, ResumableStream, ResumableStreams
from deployments.http import streaming
from deployments.http.streaming import kept_answer
from deployments.record.route_log import RequestWatch
from replicas.errors import InvalidRequest
from replicas.types import Finish, FinishReason, TokenDelta, Usage
from tests.waiting import until_async

TEXTS = ["", "é", "one ", "", "two ", "\u2028", "three", "", "four", "x"] * 3  # of each token; some have none


def run(random: Random, num_choices: int, *, texts: list[str] = TEXTS) -> Iterator[TokenDelta]:
    """The deltas of one answer, cut and ordered at random; the last one of a choice may have no token."""
    at = [0] * num_choices
    while left := [choice for choice in range(num_choices) if at[choice] <= len(texts)]:
        choice = random.choice(left)
        begin, end = at[choice], min(at[choice] + random.randrange(1, 5), len(texts))
        ends = end == len(texts) and (begin == end or random.random() < 0.5)
        at[choice] = end + ends
        yield TokenDelta(
            rid="a",
            index=choice,
            token_ids=tuple(range(begin, end)),
            text="".join(texts[begin:end]),
            usage=Usage(prompt_tokens=1, completion_tokens=end, cached_tokens=0),
            finish=Finish(reason=FinishReason.LENGTH) if ends else None,
        )


def told(numbering: Numbering, deltas: Iterator[TokenDelta]) -> list[tuple[str, Any]]:
    """The events of a run: one with the tokens of a piece, one with its text, one with its end; two behind all."""
    events: list[tuple[str, Any]] = []
    for delta in deltas:
        for piece, num_had in numbering.pieces(delta):
            parts = [(piece.index, "tokens", piece.token_ids), (piece.index, "text", piece.text)]
            parts += [(piece.index, "end", ())] if piece.finish is not None else []
            events += zip(numbering.ids(len(parts), num_had), parts[num_had:], strict=True)
    last = ["usage", "done"][numbering.num_last_had :]
    return [*events, *zip(numbering.last_ids(2), last, strict=True)]


def summed(events: list[tuple[str, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for _, part in events:
        key, value = (part, 1) if isinstance(part, str) else (part[:2], part[2])
        found[key] = found[key] + value if key in found else value
    return found


@pytest.mark.parametrize("num_choices", [1, 3])
def test_from_every_event_another_run_gives_the_rest_however_it_is_cut(num_choices: int) -> None:
    random = Random(num_choices)
    whole = told(Numbering(None, num_choices=num_choices), run(random, num_choices))
    assert len({each for each, _ in whole}) == len(whole)
    for place, (event_id, _) in enumerate(whole, start=1):
        cursor = Cursor.read(event_id, num_choices=num_choices)
        assert str(cursor) == event_id
        rest = told(Numbering(cursor, num_choices=num_choices), run(random, num_choices))
        assert [int(each.partition(":")[0]) for each, _ in rest] == list(range(place + 1, place + 1 + len(rest)))
        assert summed([*whole[:place], *rest]) == summed(whole)


def test_an_answer_with_another_text_is_refused_wherever_it_differs() -> None:
    whole = told(Numbering(None, num_choices=1), run(Random(1), 1))
    cursor = Cursor.read(whole[-1][0], num_choices=1)
    for at in range(len(TEXTS)):
        other = [*TEXTS[:at], TEXTS[at] + "?", *TEXTS[at + 1 :]]
        with pytest.raises(StreamGone, match="came out differently"):
            told(Numbering(cursor, num_choices=1), run(Random(2), 1, texts=other))
    with pytest.raises(StreamGone):
        told(Numbering(cursor, num_choices=1), run(Random(2), 1, texts=TEXTS[:-1]))


@pytest.mark.parametrize("text", ["", "7", "7:1.1", "7:1.1.0", "7:1.1.00000000,1.1.00000000", "7:1.1.00000000+1@5.0.0"])
def test_what_is_no_id_of_this_stream_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="Last-Event-ID"):
        Cursor.read(text, num_choices=1)


def failed(error: Exception) -> list[Event]:
    return [Event("", str(error).encode())]


class Source:
    """Batches of events that a test gives, and whether their request was ended."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[list[Event] | None] = asyncio.Queue()
        self._number = 0
        self.ended = False

    def give(self, num: int = 1, *, size: int = 4) -> None:
        for _ in range(num):
            self._number += 1
            self._queue.put_nowait([Event(f"{self._number}", b"%04d" % self._number + b" " * (size - 4))])

    def finish(self) -> None:
        self._queue.put_nowait(None)

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        try:
            while (batch := await self._queue.get()) is not None:
                yield batch
        finally:
            self.ended = True

    def stream(self) -> ResumableStream:
        return ResumableStream(self.batches(), failed, after="", body=b"", headers={})


async def test_the_newest_connection_has_the_stream_and_gets_the_rest() -> None:
    streams, source = ResumableStreams(), Source()
    first = streams.add(("me", "a"), source.stream())
    source.give(2)
    await first.begun()
    assert await first.more() == b"00010002"
    second = streams.attach(first.stream, first.stream.index_after("1") or 0)
    assert await first.more() == b""
    streams.detach(first)  # which has it no more
    assert await second.more() == b"0002"
    source.give()
    source.finish()
    assert await second.more() == b"0003"
    assert await second.more() == b""
    streams.stop()


async def test_a_stream_that_has_nothing_to_send_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "ALIVE_S", 0.01)
    streams, source, sent = ResumableStreams(), Source(), list[bytes]()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    source.give()
    stays: Any = asyncio.Event().wait
    request = Request({"type": "http", "state": {"send_body": send}}, stays)
    response = await kept_answer(request, streams, streams.add(("me", "a"), source.stream()))
    assert response.headers["x-manta-alive"] == "0.01"
    answer = asyncio.create_task(response(request.scope, stays, send))
    await until_async(lambda: sent.count(b": alive\n") > 2)
    source.give()
    source.finish()
    await answer
    assert b"".join(each for each in sent if not each.startswith(b":")) == b"00010002"
    streams.stop()


async def test_what_waits_for_an_absent_client_is_bounded_and_its_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_streams, "MOST_BYTES", 400)
    streams, source = ResumableStreams(), Source()
    connection = streams.add(("me", "a"), source.stream())
    source.give(8, size=100)
    await until_async(lambda: connection.stream.num_events == 2 + 1)  # more than half waits: a slow client stops it
    got = b""
    while len(got) < 800:
        got += await connection.more()
    assert connection.stream.index_after("3") is None  # dropped: it was sent, and 400 bytes are kept
    assert connection.stream.index_after("4") == 4
    streams.detach(connection)
    source.give(20, size=100)
    await until_async(lambda: source.ended)
    kept = streams.find(("me", "a"))
    assert kept is not None
    rest = await streams.attach(kept, kept.index_after("8") or 0).more()
    assert rest.endswith(b"waited for this stream's client")
    streams.stop()


async def test_the_key_with_most_streams_makes_room_and_those_that_are_read_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resumable_streams, "MOST_STREAMS", 3)
    watch = Counted()
    streams, sources = ResumableStreams(watch=watch), [Source() for _ in range(4)]
    read = streams.add(("many", "0"), sources[0].stream())
    for owner, source in (("many", sources[1]), ("few", sources[2])):
        connection = streams.add((owner, "1"), source.stream())
        source.give()
        await connection.begun()
        streams.detach(connection)
    assert watch.num_detached == 2
    assert streams.has_room(("new", "1"))
    await until_async(lambda: sources[1].ended)
    assert (streams.find(("many", "1")), watch.num_expired) == (None, 1)
    assert "others came" in (streams.why_gone(("many", "1")) or "")
    assert not sources[0].ended
    assert not sources[2].ended
    streams.detach(read)
    streams.stop()
    await until_async(lambda: sources[2].ended)


async def test_a_key_without_a_stream_has_a_place_though_two_keys_hold_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Class 24."""
    monkeypatch.setattr(resumable_streams, "MOST_STREAMS", 4)
    monkeypatch.setattr(resumable_streams, "MOST_FIRST", 2)
    streams = ResumableStreams()
    for owner in ("a", "b"):
        for name in "12":
            streams.add((owner, name), Source().stream())
    for owner, more in (("c", False), ("d", False), ("e", None)):
        assert streams.has_room((owner, "1")) == (more is not None)
        if more is not None:
            streams.add((owner, "1"), Source().stream())
            assert streams.has_room((owner, "2")) == more
    assert not streams.has_room(("", "1"))
    streams.stop()


async def test_a_stream_that_its_client_left_unread_is_kept_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """One event may be larger than all that is kept for a client that is away."""
    monkeypatch.setattr(resumable_streams, "MOST_BYTES", 400)
    streams, source = ResumableStreams(), Source()
    connection = streams.add(("me", "a"), source.stream())
    source.give(size=500)
    await connection.begun()
    streams.detach(connection)
    await until_async(lambda: source.ended)
    assert streams.find(("me", "a")) is None
    assert "waited for this stream's client" in (streams.why_gone(("me", "a")) or "")


async def test_a_failure_is_the_answer_of_one_client_and_no_event_has_no_name() -> None:
    streams, source = ResumableStreams(), Source()
    connection = streams.add(("me", "a"), source.stream())
    assert connection.stream.is_for(b"", "")  # nothing was sent: a retry that overtakes the end of its connection
    source.give(3)
    await connection.begun()
    assert await connection.more()
    assert not connection.stream.is_for(b"", "")
    assert connection.stream.is_for(b"", "1")
    connection.stream.failure = RuntimeError("no room")
    assert not connection.stream.is_for(b"", "1")
    streams.stop()


async def test_without_a_time_to_come_back_a_stream_ends_with_its_connection() -> None:
    streams, source = ResumableStreams(reconnect_s=0), Source()
    connection = streams.add(("me", "a"), source.stream())
    source.give()
    await connection.begun()
    streams.detach(connection)
    await until_async(lambda: source.ended)
    assert streams.find(("me", "a")) is None


class Counted(RequestWatch):
    def __init__(self) -> None:
        super().__init__()
        self.num_detached = self.num_expired = 0

    def streams_detached(self, num: int) -> None:
        self.num_detached = num

    def stream_expired(self) -> None:
        self.num_expired += 1
