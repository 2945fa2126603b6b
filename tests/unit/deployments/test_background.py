"""Responses in the background, asked for by the official SDK over HTTP: their clients leave, come back, cancel, and ask
another router; what they get is what a client in the foreground gets.

What a replica does is scripted, where it matters when; the answers that are compared are the real model's.
"""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from deployments.dispatch import background, resumable_streams
from deployments.dispatch.background import BackgroundStreams
from deployments.fleet.peers import FoundRoute, NoPeers, ResponseAsk
from deployments.http.apis import responses
from deployments.http.apis.responses import asked_of
from deployments.http.http_app import make_app
from deployments.http.service import Service
from replicas.errors import Fault
from replicas.text.tokenizer import Tokenizer
from replicas.types import Finish, FinishReason
from tests.embedded import MODEL
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.listening import client_of
from tests.unit.deployments.test_batches import served
from tests.waiting import until_async

pytestmark = pytest.mark.model
ASK: dict[str, Any] = {"model": MODEL.rsplit("/", 1)[-1], "input": "Tell me of Rome.", "temperature": 0}
TEXT = "response.output_text.delta"
EIGHT = "".join(f"<{position}>" for position in range(8))  # what a scripted replica says in 8 tokens


@contextlib.asynccontextmanager
async def scripted(
    tokenizer: Tokenizer, *keys: str, **options: Any
) -> AsyncIterator[tuple[House, ScriptedReplica, list[openai.AsyncOpenAI]]]:
    """A router with one scripted replica, and the SDK with each of ``keys``."""
    async with House() as house, served(house.service(tokenizer, **options), *keys) as sdks:
        replica = ScriptedReplica("r0")
        await house.ready(replica)
        yield house, replica, sdks


async def ended(sdk: openai.AsyncOpenAI, response_id: str) -> Response:
    """Poll as OpenAI's guide does."""
    async with asyncio.timeout(60):
        while (response := await sdk.responses.retrieve(response_id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return response


async def having(sdk: openai.AsyncOpenAI, response_id: str, text: str) -> Response:
    """Poll until as much as ``text`` has come."""
    async with asyncio.timeout(60):
        while (response := await sdk.responses.retrieve(response_id)).output_text != text:
            await asyncio.sleep(0.01)
    return response


async def events_after(sdk: openai.AsyncOpenAI, response_id: str, **after: Any) -> list[Any]:
    return [event async for event in await sdk.responses.retrieve(response_id, stream=True, **after)]


def said(response: Response) -> Any:
    """The output and its usage, without ids and what was cached."""
    assert response.usage is not None
    items = [item.model_dump(exclude={"id"}) for item in response.output]
    return items, response.usage.output_tokens, response.status, response.incomplete_details


async def test_a_client_that_leaves_and_polls_later_finds_what_a_foreground_one_gets(service: Service) -> None:
    body = {**ASK, "max_output_tokens": 24, "include": ["message.output_text.logprobs"]}
    async with served(service) as [sdk]:
        whole = await sdk.responses.create(**body)
        begun = await sdk.responses.create(**body, background=True, store=True)
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        response = await ended(sdk, begun.id)
        assert said(response) == said(whole)
        assert Response.model_validate(response.model_dump(), strict=True)
        assert response.model_extra is not None
        assert response.model_extra["store"] is True
        events = await events_after(sdk, begun.id)
        assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
        assert "".join(each.delta for each in events if each.type == TEXT) == whole.output_text
        assert events[-1].response == response


async def test_from_every_event_on_the_rest_comes_live_and_after_the_end(tokenizer: Tokenizer) -> None:
    async with scripted(tokenizer) as (_, replica, [sdk]):
        replica.pause_at = 4
        begun: list[Any] = []
        async for event in await sdk.responses.create(**ASK, max_output_tokens=8, background=True, stream=True):
            begun.append(event)
            if event.type == TEXT:
                break
        response_id = begun[0].response.id
        live = [asyncio.create_task(events_after(sdk, response_id, starting_after=len(begun) - 1)) for _ in range(2)]
        assert (await having(sdk, response_id, "<0><1><2><3>")).status == "in_progress"
        replica.hold.set()
        first, second = [await each for each in live]
        assert first == second  # two readers, of one stream
        events = [*begun, *first]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output_text == EIGHT
        for number in range(len(events)):
            assert await events_after(sdk, response_id, starting_after=number) == events[number + 1 :]
        for wrong in (len(events), -1):
            with pytest.raises(openai.BadRequestError, match="starting_after"):
                await events_after(sdk, response_id, starting_after=wrong)


async def test_a_response_is_cancelled_while_it_waits_and_while_it_runs(tokenizer: Tokenizer) -> None:
    async with scripted(tokenizer) as (house, replica, [sdk]):
        for pause_at, text in ((0, ""), (3, "<0><1><2>")):
            replica.pause_at = pause_at
            begun = await sdk.responses.create(**ASK, max_output_tokens=8, background=True)
            await until_async(lambda: not replica.hold.is_set())
            reading = asyncio.create_task(events_after(sdk, begun.id))
            assert (await having(sdk, begun.id, text)).status == ("in_progress" if text else "queued")
            assert house.dispatcher.num_open == 1
            cancelled = await sdk.responses.cancel(begun.id)
            assert (cancelled.status, cancelled.output_text) == ("cancelled", text)
            await until_async(lambda: not house.dispatcher.num_open)
            house.dispatcher.check()
            replica.hold.set()
            assert "".join(each.delta for each in await reading if each.type == TEXT) == text
            assert await sdk.responses.cancel(begun.id) == await sdk.responses.retrieve(begun.id) == cancelled
        await until_async(lambda: replica.num_aborted == 2)
        whole = await ended(sdk, (await sdk.responses.create(**ASK, max_output_tokens=8, background=True)).id)
        assert (await sdk.responses.cancel(whole.id)).status == "incomplete"  # it had ended


async def test_a_response_is_there_for_its_own_key_alone_until_it_is_deleted(tokenizer: Tokenizer) -> None:
    async with scripted(tokenizer, "the-first-key", "the-other-key") as (_, _, [mine, other]):
        begun = await mine.responses.create(**ASK, max_output_tokens=8, background=True)
        for call in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
            with pytest.raises(openai.NotFoundError, match="keeps none but those in the background, of this key"):
                await call(begun.id)
        with pytest.raises(openai.NotFoundError):
            await events_after(other, begun.id)
        assert (await ended(mine, begun.id)).output_text == EIGHT
        await mine.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError, match="it was deleted"):
            await mine.responses.retrieve(begun.id)


async def test_the_oldest_that_has_ended_makes_room_and_what_runs_does_not(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable_streams, "MOST_STREAMS", 3)
    body = {**ASK, "max_output_tokens": 8, "background": True}
    async with scripted(tokenizer) as (_, replica, [sdk]):
        old = [(await ended(sdk, (await sdk.responses.create(**body)).id)).id for _ in range(2)]
        replica.hold.clear()
        running = [(await sdk.responses.create(**body)).id for _ in range(2)]
        with pytest.raises(openai.NotFoundError, match="a router keeps 3 at a time, and others came"):
            await sdk.responses.retrieve(old[0])
        assert (await sdk.responses.retrieve(old[1])).status == "incomplete"
        running.append((await sdk.responses.create(**body)).id)
        with pytest.raises(openai.RateLimitError, match="too many responses run in the background") as refused:
            await sdk.responses.create(**body)
        assert refused.value.response.headers["retry-after"]
        replica.hold.set()
        assert [(await ended(sdk, each)).output_text for each in running] == [EIGHT] * 3


async def test_a_key_may_run_half_of_all_and_leaves_the_others_room(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable_streams, "MOST_STREAMS", 4)
    body = {**ASK, "max_output_tokens": 8, "background": True}
    async with scripted(tokenizer, "the-first-key", "the-other-key") as (_, replica, [mine, other]):
        replica.hold.clear()
        for _ in range(2):
            await mine.responses.create(**body)
        with pytest.raises(openai.RateLimitError):
            await mine.responses.create(**body)
        assert (await other.responses.create(**body)).status == "queued"
        replica.hold.set()


async def test_a_failure_in_the_middle_is_a_failed_response_with_what_came(tokenizer: Tokenizer) -> None:
    async with scripted(tokenizer) as (_, replica, [sdk]):
        replica.finish = Finish(reason=FinishReason.ERROR, message="too late", fault=Fault.TIMED_OUT)
        begun = await sdk.responses.create(**ASK, max_output_tokens=3, background=True)
        response = await ended(sdk, begun.id)
        assert (response.status, response.output_text) == ("failed", "<0><1>")
        assert response.error is not None
        assert (response.error.code, response.error.message) == ("server_error", "too late")
        events = await events_after(sdk, begun.id, starting_after=3)
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        assert events[-1].response == response
        assert await events_after(sdk, begun.id, starting_after=events[-2].sequence_number) == events[-1:]


async def test_what_is_refused_at_once_is_refused_to_its_client_and_not_kept(tokenizer: Tokenizer) -> None:
    async with House() as house:
        service = house.service(tokenizer)
        async with served(service) as [sdk]:
            with pytest.raises(openai.InternalServerError, match="no replica") as refused:
                await sdk.responses.create(**ASK, background=True)
            assert refused.value.status_code == 503
            with pytest.raises(openai.BadRequestError, match="store: false does not go with background"):
                await sdk.responses.create(**ASK, background=True, store=False)
            assert not service.background._streams


async def test_a_response_has_a_deadline_and_is_kept_for_a_while_after_its_end(tokenizer: Tokenizer) -> None:
    kept = BackgroundStreams(kept_s=0.05, timeout_s=40.0)
    async with scripted(tokenizer, background=kept) as (_, replica, [sdk]):
        replica.pause_at = 1
        begun = await sdk.responses.create(**ASK, max_output_tokens=2, background=True)
        await sdk.responses.create(**ASK, max_output_tokens=2, background=True, extra_body={"timeout": 7.0})
        await until_async(lambda: len(replica.requests) == 2)
        asked = [each.deadline_s or 0.0 for each in replica.requests]
        assert [39 < asked[0] <= 40, 6 < asked[1] <= 7] == [True, True]
        await having(sdk, begun.id, "<0>")
        await asyncio.sleep(0.1)
        assert (await sdk.responses.retrieve(begun.id)).status == "in_progress"  # as long as it runs
        replica.hold.set()
        await until_async(lambda: not kept._streams)
        with pytest.raises(openai.NotFoundError, match=r"ended more than 0.05 s ago\."):
            await sdk.responses.retrieve(begun.id)


async def test_what_misses_its_deadline_has_failed(service: Service) -> None:
    async with served(service) as [sdk]:
        body = {"ignore_eos": True, "timeout": 0.3}
        begun = await sdk.responses.create(**ASK, background=True, extra_body=body)
        response = await ended(sdk, begun.id)
        assert (response.status, response.usage) == ("failed", None)
        assert response.error is not None
        assert "deadline" in response.error.message


async def test_of_very_many_events_the_first_are_dropped_and_the_response_is_whole(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MOST_EVENT_BYTES", 2500)
    async with scripted(tokenizer) as (_, _, [sdk]):
        begun = await sdk.responses.create(**ASK, max_output_tokens=40, background=True)
        assert (await ended(sdk, begun.id)).output_text.endswith("<38><39>")
        with pytest.raises(openai.APIStatusError, match="are not kept any more") as gone:
            await events_after(sdk, begun.id, starting_after=3)
        assert gone.value.status_code == 410
        first = int(gone.value.message.partition("before number ")[2].split()[0])
        rest = await events_after(sdk, begun.id, starting_after=first - 1)
        assert rest[0].sequence_number == first
        assert rest[-1].type == "response.incomplete"


async def test_what_has_ended_is_bounded_and_the_key_with_most_gives_way(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = BackgroundStreams()
    async with scripted(tokenizer, "the-first-key", "the-other-key", background=streams) as (_, _, [mine, other]):
        small, *large = [
            await ended(sdk, (await sdk.responses.create(**ASK, max_output_tokens=num, background=True)).id)
            for sdk, num in ((other, 1), (mine, 40), (mine, 40))
        ]
        held = sum(each.num_bytes for each in streams._streams.values())
        monkeypatch.setattr(background, "MOST_ENDED_BYTES", held)
        last = await mine.responses.create(**ASK, max_output_tokens=40, background=True)
        large.append(await ended(mine, last.id))
        with pytest.raises(openai.NotFoundError, match="MiB of those that have ended, and others came"):
            await mine.responses.retrieve(large[0].id)
        assert await other.responses.retrieve(small.id) == small
        assert await mine.responses.retrieve(large[2].id) == large[2]


async def test_a_background_answer_says_what_its_schema_is_and_is_held_to_it(service: Service) -> None:
    schema = {"type": "object", "properties": {"kind": {"enum": ["bolt"]}}, "required": ["kind"]}
    schema["additionalProperties"] = False
    format_ = {"type": "json_schema", "name": "part", "strict": True, "schema": schema}
    body = {**ASK, "max_output_tokens": 400, "temperature": 0, "text": {"format": format_}}
    async with served(service) as [sdk]:
        raw = await sdk.responses.with_raw_response.create(**body, background=True)
        assert raw.headers["x-manta-schema"] == "enforced"
        response = await ended(sdk, raw.parse().id)
        assert (response.status, json.loads(response.output_text)) == ("completed", {"kind": "bolt"})


class Neighbours(NoPeers):
    """The routers with these services."""

    def __init__(self, *services: Service) -> None:
        self.services = services
        self.unanswered = ""
        self.num_asked = 0

    async def ask_response(self, ask: ResponseAsk) -> FoundRoute:
        self.num_asked += 1
        told = [await asked_of(each.background, ask) for each in self.services]
        return FoundRoute(body=next(filter(None, told), None), unanswered=self.unanswered)


@contextlib.asynccontextmanager
async def two_routers(
    tokenizer: Tokenizer,
) -> AsyncIterator[tuple[House, Neighbours, openai.AsyncOpenAI, openai.AsyncOpenAI]]:
    """A router that has the responses, and one that has it as its neighbour: (house of the first, neighbours of the
    second, a client of each)."""
    async with House() as house, House(router_id="another") as other:
        has_it = house.service(tokenizer)
        peers = Neighbours(has_it)
        asked = dataclasses.replace(other.service(tokenizer), peers=peers)
        async with served(has_it) as [sdk], served(asked) as [elsewhere]:
            yield house, peers, sdk, elsewhere


async def test_whichever_router_is_asked_it_is_the_same(tokenizer: Tokenizer) -> None:
    async with two_routers(tokenizer) as (house, peers, sdk, elsewhere):
        replica = ScriptedReplica("r0")
        replica.pause_at = 3
        await house.ready(replica)
        begun = await sdk.responses.create(**ASK, max_output_tokens=8, background=True)
        reading = asyncio.create_task(events_after(elsewhere, begun.id, starting_after=1))
        await having(elsewhere, begun.id, "<0><1><2>")
        replica.hold.set()
        assert await reading == await events_after(sdk, begun.id, starting_after=1)
        assert await elsewhere.responses.cancel(begun.id) == await sdk.responses.retrieve(begun.id)
        await elsewhere.responses.delete(begun.id)
        for each in (sdk, elsewhere):
            with pytest.raises(openai.NotFoundError, match="it was deleted"):
                await each.responses.retrieve(begun.id)
        peers.services, peers.unanswered = (), "1 of 2 routers did not answer"
        with pytest.raises(openai.InternalServerError, match="1 of 2 routers did not answer") as silent:
            await elsewhere.responses.retrieve(begun.id)
        assert silent.value.status_code == 503


async def test_a_stream_goes_on_behind_a_silence_of_the_router_that_has_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short one is a stall; a long one ends the stream, and so does that router's death."""
    async with two_routers(tokenizer) as (house, peers, sdk, elsewhere):
        replica, there = ScriptedReplica("r0"), peers.services
        await house.ready(replica)

        async def silent_amid(unanswered: str) -> asyncio.Task[list[Any]]:
            replica.pause_at = 3
            begun = await sdk.responses.create(**ASK, max_output_tokens=8, background=True)
            stream = await elsewhere.responses.retrieve(begun.id, stream=True)
            # answered: so it was found there, before the silence begins

            async def rest() -> list[Any]:
                return [event async for event in stream]

            reading = asyncio.create_task(rest())
            await having(elsewhere, begun.id, "<0><1><2>")
            peers.services, peers.unanswered, silent_since = (), unanswered, peers.num_asked
            await until_async(lambda: reading.done() or peers.num_asked >= silent_since + 3)
            return reading

        reading = await silent_amid("1 of 2 routers did not answer")
        assert not reading.done()
        peers.services = there
        replica.hold.set()
        events = await reading
        assert "".join(each.delta for each in events if each.type == TEXT) == EIGHT
        assert events[-1].type == "response.incomplete"
        monkeypatch.setattr(responses, "SILENT_S", 0.2)
        for unanswered, code in (("1 of 2 routers did not answer", "routers_silent"), ("", "response_not_found")):
            peers.services, peers.unanswered = there, ""
            last = (await (await silent_amid(unanswered)))[-1]
            assert (last.type, last.code) == ("error", code)
            replica.hold.set()


async def test_a_router_that_stops_ends_its_responses(tokenizer: Tokenizer) -> None:
    async with House() as house:
        replica = ScriptedReplica("r0")
        replica.pause_at = 2
        await house.ready(replica)
        app = make_app(house.service(tokenizer))
        async with app.router.lifespan_context(app), client_of(app) as client:
            begun = (await client.post("/v1/responses", json={**ASK, "background": True})).json()
            await until_async(lambda: not replica.hold.is_set())
            assert house.dispatcher.num_open == 1
            assert begun["status"] == "queued"
        await until_async(lambda: not house.dispatcher.num_open, 20.0)
