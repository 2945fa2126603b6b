"""POST /v1/responses as the official SDK and Codex ask it, on the real model."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from deployments.http.http_app import make_app
from deployments.http.service import Service
from replicas.errors import Fault
from replicas.types import Finish, FinishReason
from tests.embedded import MODEL
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.listening import client_of

pytestmark = pytest.mark.model
ROUTE = "/v1/responses"
FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."
ASK: dict[str, Any] = {"model": MODEL.rsplit("/", 1)[-1], "input": FRANCE, "temperature": 0}


@pytest.fixture
def sdk(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://manta/v1", api_key="any", http_client=client, max_retries=0)


def events_of(body: str) -> list[dict[str, Any]]:
    """The payloads of a stream, each of which has its type as its name."""
    payloads = []
    for each in body.strip().split("\n\n"):
        name, data = each.split("\n")
        payloads.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {payloads[-1]['type']}"
    return payloads


async def stream(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    answer = await client.post(ROUTE, json={**ASK, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


async def test_a_response_has_what_the_sdk_reads(sdk: openai.AsyncOpenAI) -> None:
    response = await sdk.responses.create(**ASK, instructions="Be short.", metadata={"a": "b"}, max_output_tokens=40)
    assert response.output_text == PARIS
    [message] = response.output
    assert (message.type, message.status, message.id) == ("message", "completed", f"msg_{response.id[5:]}_0")
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be short.", {"a": "b"}, 40)
    assert (response.tools, response.tool_choice, response.parallel_tool_calls) == ([], "auto", True)
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.output_tokens == 8
    assert type(response).model_validate(response.model_dump())  # the SDK itself does not validate


async def test_the_events_of_a_text_come_in_order_and_add_up(client: httpx.AsyncClient) -> None:
    events = await stream(client, include=["message.output_text.logprobs"], top_logprobs=2)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done, response = events[-4], events[-1]["response"]
    assert "".join(delta["delta"] for delta in deltas) == done["text"] == PARIS
    assert response["output"] == [events[-2]["item"]]
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = (await client.post(ROUTE, json={**ASK, **options})).json()
    assert whole["output"][0]["content"] == response["output"][0]["content"]
    tokens = done["logprobs"]
    assert [token for delta in deltas for token in delta["logprobs"]] == tokens[:-1]  # the last is the end of the turn
    assert [len(token["top_logprobs"]) for token in tokens] == [2] * 8
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


async def test_what_max_output_tokens_cuts_is_incomplete(
    client: httpx.AsyncClient, sdk: openai.AsyncOpenAI
) -> None:
    response = await sdk.responses.create(**ASK, max_output_tokens=3)
    assert (response.status, response.output_text) == ("incomplete", "The capital of")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    events = await stream(client, max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


async def test_the_second_turn_begins_with_the_first_and_its_answer(
    client: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codex sends the whole conversation each time: reasoning and ids come back, and what was cached is used."""
    prompts: list[list[int]] = []
    run = service.dispatcher.stream

    def watched(request: Any, *rest: Any) -> AsyncGenerator[Any, None]:
        prompts.append([*request.token_ids])
        return run(request, *rest)

    monkeypatch.setattr(service.dispatcher, "stream", watched)
    codex: dict[str, Any] = {
        "instructions": "Be short. " * 20, "tools": [], "tool_choice": "auto",
        "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": {"session": "s"},
    }  # fmt: skip
    context = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "No network."}]}
    items: list[dict[str, Any]] = [context, user(FRANCE)]
    first = (await stream(client, **codex, input=items))[-1]["response"]
    items += [*first["output"], user("And of Italy?")]
    second = (await stream(client, **codex, input=items, max_output_tokens=1))[-1]["response"]
    used = first["usage"]
    seen = used["input_tokens"] + used["output_tokens"]
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert service.tokenizer.decode(prompts[1][len(prompts[0]) : seen]) == first["output"][0]["content"][0]["text"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == seen // 16 * 16


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


WEATHER: dict[str, Any] = {
    "type": "function", "name": "get_weather", "description": "The weather.", "strict": True,
    "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}  # fmt: skip
CALL: dict[str, Any] = {
    **ASK, "input": "How warm is it in Rome?", "max_output_tokens": 100, "parallel_tool_calls": False,
    "tools": [WEATHER, {"type": "namespace", "name": "mail", "tools": [{"type": "function", "name": "send"}]}],
}  # fmt: skip


async def test_a_call_comes_whole_and_in_events_alike(client: httpx.AsyncClient, sdk: openai.AsyncOpenAI) -> None:
    choice = {"type": "function", "name": "get_weather"}
    body, name = {**CALL, "tool_choice": choice}, {"x-request-id": "one"}
    whole = (await client.post(ROUTE, json=body, headers=name)).json()
    [call] = whole["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
    assert json.loads(call["arguments"]).keys() == {"city", "days"}
    async with sdk.responses.stream(**body, extra_headers=name) as events:
        deltas = [each.delta async for each in events if each.type == "response.function_call_arguments.delta"]
        last = await events.get_final_response()
    assert len(deltas) > 1
    assert "".join(deltas) == call["arguments"]
    [streamed] = last.output
    assert streamed.type == "function_call"
    assert streamed.call_id != call["call_id"]  # of another turn, though the client gave both one name
    assert streamed.parsed_arguments == json.loads(call["arguments"])
    assert last.tool_choice.model_dump() == choice  # type: ignore[union-attr]


class Place(pydantic.BaseModel):
    """What the model is asked for."""

    city: str = pydantic.Field(max_length=12)
    is_capital: bool


async def test_the_sdk_parses_an_answer_held_to_a_model(client: httpx.AsyncClient, sdk: openai.AsyncOpenAI) -> None:
    response = await sdk.responses.parse(**ASK, text_format=Place, max_output_tokens=60)
    assert isinstance(response.output_parsed, Place)
    form = {"type": "json_schema", "name": "p", "strict": True, "schema": {"type": "object", "uniqueItems": 3}}
    with pytest.raises(openai.BadRequestError, match=r"text.format") as refused:
        await sdk.responses.create(**ASK, text={"format": form})  # type: ignore[call-overload]
    assert refused.value.param == "text.format"
    answer = await client.post(ROUTE, json={**ASK, "text": {"format": {"type": "json_object"}}, "max_output_tokens": 1})
    assert answer.headers["x-manta-schema"] == "partial"  # one token is no document


async def test_the_turn_after_a_call_finds_the_call_in_the_cache(client: httpx.AsyncClient) -> None:
    body = {**CALL, "instructions": "Never guess what a tool can tell you. " * 20}
    first = (await client.post(ROUTE, json={**body, "tool_choice": "required"})).json()
    [call] = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "30 degrees"}
    items = [user(CALL["input"]), call, result]
    second = (await client.post(ROUTE, json={**body, "input": items, "max_output_tokens": 4})).json()
    # not all of it: a call that is held to a grammar may be spelt in other tokens than a tokenizer takes
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= 0.9 * first["usage"]["total_tokens"]


async def test_tools_that_are_dropped_stand_in_a_header(client: httpx.AsyncClient) -> None:
    tools = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "custom", "name": "b"}]
    answer = await client.post(ROUTE, json={**ASK, "tools": tools, "max_output_tokens": 1})
    assert answer.headers["x-manta-dropped"] == "web_search, custom"
    assert answer.json()["tools"] == []
    assert "x-manta-dropped" not in (await client.post(ROUTE, json={**ASK, "max_output_tokens": 1})).headers


async def test_nothing_is_kept_and_what_asks_for_it_is_told(sdk: openai.AsyncOpenAI) -> None:
    response = await sdk.responses.create(**ASK, max_output_tokens=1)
    assert response.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="keeps none but those in the background"):
        await sdk.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match="store: this server keeps no responses") as refused:
        await sdk.responses.create(**ASK, store=True)
    assert refused.value.param == "store"


async def test_errors_before_the_first_event_are_the_sdks_own(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="your input resulted in") as refused:
        await sdk.responses.create(**{**ASK, "input": "word " * 9000}, stream=True)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError, match="max_output_tokens"):
        await sdk.responses.create(**ASK, max_output_tokens=9000)
    with pytest.raises(openai.NotFoundError, match="not served here"):
        await sdk.responses.create(**{**ASK, "model": "gpt-9"})


async def test_an_error_in_the_middle_is_a_failed_response_with_what_came(house: House, service: Service) -> None:
    house.remove("r0")
    replica = ScriptedReplica("r1")
    replica.finish = Finish(reason=FinishReason.ERROR, message="too late", fault=Fault.TIMED_OUT)
    await house.ready(replica)
    async with client_of(make_app(service)) as client:
        events = await stream(client, max_output_tokens=3)
    error, failed = events[-2:]
    assert (error["type"], error["message"]) == ("error", "too late")
    assert (failed["type"], failed["response"]["error"]["code"]) == ("response.failed", "server_error")
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert failed["response"]["output"][0]["content"][0]["text"] == "".join(deltas) != ""
