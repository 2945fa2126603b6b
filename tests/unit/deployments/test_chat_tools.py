"""Tools over HTTP with the embedded model: calls that must be made, whole and streamed, and turns that follow them."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from starlette.requests import Request

from deployments.http.bodies import WireType
from deployments.http.constraints import held_to
from deployments.http.http_app import make_app
from deployments.http.service import Service
from deployments.output.output_format import Thought
from deployments.output.tool_formats import QWEN3_CODER
from deployments.output.tools import tool_use
from replicas.errors import InvalidRequest

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASK = {
    "messages": [{"role": "user", "content": "How warm is it in Rome?"}],
    "tools": [WEATHER, NOW],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0,
    "max_tokens": 120,
    "seed": 7,
}


async def post(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post(CHAT, json=ASK | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check_call(call: dict[str, Any]) -> None:
    """Raise AssertionError for a call that is none of the tools'."""
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "now":
        assert arguments == {}
    else:
        assert call["function"]["name"] == "get_weather"
        assert arguments.keys() == {"city", "days"}
        assert len(arguments["city"]) <= 12
        assert arguments["days"] <= 9


def calls_in(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]


def ids_in(choices: list[Any]) -> set[str]:
    return {call.id for choice in choices for call in choice.message.tool_calls}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1, "seed": 1}, {"temperature": 1, "seed": 2, "n": 2}])
async def test_a_required_call_is_made_and_fits_its_schema(
    client: httpx.AsyncClient, sampling: dict[str, Any]
) -> None:
    body = await post(client, **sampling)
    assert len(body["choices"]) == sampling.get("n", 1)
    for choice in body["choices"]:
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        [call] = choice["message"]["tool_calls"]
        check_call(call)
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]]
    assert len(set(ids)) == len(ids)


async def test_a_named_tool_is_called_once_and_ends_with_stop(client: httpx.AsyncClient) -> None:
    """As at OpenAI: a client that forced the call does not wait for the reason tool_calls."""
    body = await post(client, tool_choice=NAMED, parallel_tool_calls=True, temperature=1)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "stop"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    check_call(call)


@pytest.mark.parametrize("options", [{}, {"n": 2, "temperature": 1}, {"logprobs": True, "return_token_ids": True}])
async def test_a_stream_adds_up_to_the_whole_answer(client: httpx.AsyncClient, options: dict[str, Any]) -> None:
    """Put together by OpenAI's own SDK."""
    name = {"x-request-id": "one"}
    body = ASK | options
    whole = (await client.post(CHAT, json=body, headers=name)).json()
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = (await client.post(CHAT, json=streamed, headers=name)).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(openai.types.chat.ChatCompletionChunk.model_validate(chunk))
    snapshot = state.current_completion_snapshot
    expected = openai.types.chat.ChatCompletion.model_validate(whole)
    assert len(snapshot.choices) == len(expected.choices)
    for choice, wanted in zip(snapshot.choices, expected.choices, strict=True):
        assert choice.finish_reason == wanted.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert calls_in(choice) == calls_in(wanted)
    assert ids_in(snapshot.choices).isdisjoint(ids_in(expected.choices))  # a turn of one name has calls of its own
    assert snapshot.usage is not None
    assert snapshot.usage.completion_tokens == whole["usage"]["completion_tokens"]
    for index, choice in enumerate(whole["choices"]):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        calls = [call for each in own for call in each["delta"].get("tool_calls", [])]
        assert (calls[0]["function"]["arguments"], calls[0]["type"]) == ("", "function")
        assert all(call.keys() == {"index", "function"} for call in calls[1:])
        assert own[-1]["delta"] == {}
        if "logprobs" in options:
            assert [token for each in own for token in each["token_ids"]] == choice["token_ids"]
            rows = [row for each in own for row in (each["logprobs"] or {}).get("content", [])]
            assert rows == choice["logprobs"]["content"]


async def test_the_second_turn_finds_the_first_one_in_the_cache(client: httpx.AsyncClient) -> None:
    system = {"role": "system", "content": "Answer in one sentence, and never guess what a tool can tell you. " * 25}
    messages = [system, {"role": "user", "content": "How warm is it in Rome?"}]
    body = await post(client, messages=messages)
    [choice] = body["choices"]
    result = {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": "30 degrees"}
    turns = [*messages, choice["message"], result]
    second = await post(client, messages=turns, tool_choice="auto", max_tokens=4)
    usage = second["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > body["usage"]["prompt_tokens"]  # some of its output too; not all where a name was spelt in pieces
    assert cached / usage["prompt_tokens"] >= 0.9
    tokenized = await client.post("/tokenize", json={"messages": turns, "tools": ASK["tools"]})
    assert tokenized.json()["count"] == usage["prompt_tokens"]


async def test_a_call_that_max_tokens_cuts_is_told_as_far_as_it_went(client: httpx.AsyncClient) -> None:
    body = await post(client, max_tokens=22, tool_choice=NAMED)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"].startswith("{")


@pytest.mark.parametrize("max_tokens", [1, 4, 9])
async def test_a_call_that_is_cut_before_its_arguments_is_neither_text_nor_a_call(
    client: httpx.AsyncClient, max_tokens: int
) -> None:
    body = await post(client, max_tokens=max_tokens)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == max_tokens
    assert choice["message"]["content"] == ""
    assert "tool_calls" not in choice["message"]


async def test_text_under_tools_is_content(client: httpx.AsyncClient) -> None:
    body = await post(client, tool_choice="auto", max_tokens=5, parallel_tool_calls=None)
    [choice] = body["choices"]
    assert choice["message"]["content"]
    assert "tool_calls" not in choice["message"]


async def test_a_keyword_of_a_strict_tool_that_cannot_be_enforced_is_refused_by_its_place(
    client: httpx.AsyncClient,
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict, status in ((True, 400), (False, 200)):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
        answer = await client.post(CHAT, json=ASK | {"tools": [NOW, tool], "max_tokens": 1})
        assert answer.status_code == status, answer.text
        if strict:
            error = answer.json()["error"]
            assert error["param"] == "tools[1].function.parameters"
            assert "'uniqueItems' at /properties/a/uniqueItems" in error["message"]


async def test_a_strict_tool_is_never_weakened_where_parameters_stand_in_tags(
    client: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = replace(service.prompting.output, tools=QWEN3_CODER, special_tags=frozenset())
    monkeypatch.setitem(vars(service), "prompting", replace(service.prompting, output=output))
    for key, strict, status in (("pattern", True, 400), ("pattern", False, 200), ("title", True, 200)):
        schema = {"type": "object", "properties": {"first name": {"type": "string", key: "x"}}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
        answer = await client.post(CHAT, json=ASK | {"tools": [NOW, tool], "max_tokens": 1})
        assert answer.status_code == status, answer.text
        if status == 400:
            error = answer.json()["error"]
            assert error["param"] == "tools[1].function.parameters"
            assert "'pattern' at /properties/first name/pattern" in error["message"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a>b": {}}}}}
    error = (await client.post(CHAT, json=ASK | {"tools": [NOW, tool]})).json()["error"]
    assert (error["param"], "'a>b'" in error["message"]) == ("tools[1].function.parameters", True)


async def test_tools_whose_grammar_is_too_long_are_told_of_as_the_tools(service: Service) -> None:
    values = {"enum": [f"{i:0100}" for i in range(50)]}
    functions = [{"name": f"f{i}", "parameters": {"properties": {"a": values}}} for i in range(200)]
    use = tool_use([{"type": "function", "function": function} for function in functions], "required", None)
    assert use is not None
    request = Request({"type": "http", "app": make_app(service)}, asyncio.Event().wait)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"tools: the grammar of their calls has 1,.* at most 1,048,576") as caught:
        await held_to(request, WireType(), use, Thought())
    assert caught.value.param == "tools"


async def test_with_a_response_format_an_answer_is_a_document_or_a_call(client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    body = await post(client, tool_choice="auto", response_format=wanted, temperature=1, n=2)
    for choice in body["choices"]:
        message = choice["message"]
        for call in message.get("tool_calls", []):
            check_call(call)
        if "tool_calls" not in message:
            assert isinstance(json.loads(message["content"])["warm"], bool)
    refused = await client.post(CHAT, json=ASK | {"tool_choice": "auto", "regex": "a+"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
