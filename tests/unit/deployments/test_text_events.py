"""Events that differ in their text alone are what encoding each whole would give, and the short way that they go."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from deployments.http.streaming import AnswerSoFar, Change, Form, StreamWriter, TextEvents, sse
from replicas.types import TokenDelta, Usage


def payload(text: str) -> dict[str, Any]:
    return {"id": 'cmpl-"a\\b"', "created": 7, "choices": [{"index": 0, "text": text, "logprobs": None}], "end": None}


@pytest.mark.parametrize("text", ["", " the", 'say "yes"\n', "\\n as two", "é 漢 🙂", "\0\x1f\x7f\u2028", "{}"])
def test_an_event_is_byte_for_byte_that_of_the_whole_payload(text: str) -> None:
    assert TextEvents(payload).event(text) == sse(payload(text))
    named = lambda text: {"type": "delta", **payload(text)}  # noqa: E731
    assert TextEvents(named, named=True).event(text) == sse(named(text), named=True)


def test_a_payload_with_the_text_in_two_places_is_refused() -> None:
    with pytest.raises(AssertionError, match="the text stands in 2 places"):
        TextEvents(lambda text: {"text": text, "again": text})


class Client:
    """A connection that takes nothing while it is full, as an HTTP server's."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.free = asyncio.Event()
        self.free.set()
        self.gone = False

    async def send(self, message: Any) -> None:
        if self.gone:
            raise BrokenPipeError
        if not self.free.is_set():
            await self.free.wait()
            await asyncio.sleep(0)  # a second wait of the same sending
        self.got.append(message["body"])


def some(text: str) -> TokenDelta:
    usage = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
    return TokenDelta(rid="a", token_ids=(1,), text=text, usage=usage)


class Texts(Form):
    """A form of text alone."""

    only_text = True

    def whole(self, choices: Sequence[Change], so_far: AnswerSoFar) -> None:
        raise NotImplementedError

    def events(self, change: Change, so_far: AnswerSoFar) -> list[dict[str, Any]]:
        return [payload(change.delta.text)]


def begun() -> StreamWriter:
    """Write the first delta of an answer."""
    writer, so_far = StreamWriter(Texts()), AnswerSoFar(None)
    assert writer.write(so_far.add(0, some("first")), so_far) == sse(payload("first"))
    return writer


async def test_text_is_sent_at_once_and_not_while_the_client_is_slow() -> None:
    client, straight = Client(), begun()
    assert not straight.takes(0)  # the answer has not begun
    straight.open(client.send)
    assert (straight.takes(0), straight.takes(1)) == (True, False)
    straight.send(some("a"))
    straight.send(some(""))  # a part of a character: no event
    assert client.got == [sse(payload("a"))]  # without a turn of the event loop
    client.free.clear()
    straight.send(some("b"))
    assert not straight.takes(0)  # what comes now waits, merged, in the stream
    client.free.set()
    async with asyncio.timeout(30):
        while not straight.takes(0):
            await asyncio.sleep(0)
    straight.send(some("c"))
    assert client.got == [sse(payload(text)) for text in "abc"]
    straight.close()
    assert not straight.takes(0)


async def test_a_client_that_has_gone_ends_the_short_way_and_nothing_waits_for_it() -> None:
    client, straight = Client(), begun()
    straight.open(client.send)
    client.free.clear()
    straight.send(some("a"))
    straight.close()
    client.free.set()
    await asyncio.sleep(0.01)
    assert client.got == []
    straight = begun()
    client.gone = True
    straight.open(client.send)
    straight.send(some("b"))
    assert not straight.takes(0)
