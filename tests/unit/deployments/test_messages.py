"""/v1/messages against what Claude Code and Anthropic's SDK send and read, on the real model."""

import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from pydantic_core import from_json

from deployments.http.apis.message_form import ContentBlocks, MessageForm
from deployments.http.apis.messages import MessagesRequest, chat_of
from deployments.http.http_app import make_app
from deployments.http.http_errors import Busy, GenerationFailed
from deployments.http.service import BoundedExecutor, Service
from deployments.http.streaming import AnswerSoFar
from deployments.output.parts import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from deployments.output.reading import ChoiceReading
from deployments.tenancy.keys import ApiKey, KeyDigests
from replicas.engine.loop import EngineLoop
from replicas.errors import Fault, InvalidRequest
from replicas.text.tokenizer import Tokenizer
from replicas.types import Finish, FinishReason, GenerateRequest, TokenDelta, Usage
from tests.embedded import MODEL
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.listening import client_of
from tests.unit.tokenizer_folders import QWEN_TEMPLATE

pytestmark = pytest.mark.model
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "What is the capital of France?"}
ASK: dict[str, Any] = {"model": "", "max_tokens": 16, "messages": [USER], "temperature": 0}
READ = {"name": "Read", "description": "Read a file.", "input_schema": {"type": "object", "properties": {}}}
# as Claude Code sends a second turn
TURNS: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
            {"type": "text", "text": "What is in a.txt?", "cache_control": {"type": "ephemeral"}},
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I must read it.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "ä.txt", "limit": 2}},
            {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "hello"}]},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such file", "is_error": True},
            {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
        ],
    },
]


def attribution(digest: str) -> dict[str, Any]:
    return {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.100; cc_entrypoint=cli; cch={digest};"}


def events_of(body: str) -> list[dict[str, Any]]:
    """Payloads of a stream, each of which is named by its type."""
    found = []
    for event in filter(None, body.split("\n\n")):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What the SDK makes of a stream."""
    started, *rest, last = events
    message: dict[str, Any] = started["message"]
    arguments: dict[int, str] = {}
    assert last == {"type": "message_stop"}
    for event in rest:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, (_, name) = message["content"][event["index"]], event["delta"]
            if name == "partial_json":
                arguments[event["index"]] = arguments.get(event["index"], "") + event["delta"][name]
            else:
                block[name] += event["delta"][name]
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    assert sum(event["type"] == "content_block_stop" for event in rest) == len(message["content"])
    return message


async def post(client: httpx.AsyncClient, route: str = MESSAGES, **body: Any) -> dict[str, Any]:
    answer = await client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def refusal(client: httpx.AsyncClient, status: int, **body: Any) -> str:
    """Type and message of an error in Anthropic's form."""
    answer = await client.post(MESSAGES, json=body)
    assert answer.status_code == status, answer.text
    found = answer.json()
    assert found["type"] == "error"
    assert found["request_id"] == answer.headers["request-id"]
    return f"{found['error']['type']}: {found['error']['message']}"


def prompt_tokens(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"])


async def test_a_message_is_answered(client: httpx.AsyncClient) -> None:
    answer = await client.post(MESSAGES, json=ASK, headers={"anthropic-version": "2023-06-01"})
    body = answer.json()
    assert body["content"] == [{"type": "text", "text": "The capital of France is Paris."}]
    assert (body["type"], body["role"], body["stop_reason"]) == ("message", "assistant", "end_turn")
    assert body["stop_sequence"] is None
    assert (prompt_tokens(body), body["usage"]["output_tokens"]) == (37, 8)
    assert body["id"] == f"msg_{answer.headers['request-id']}"


async def test_a_streamed_message_adds_up_to_the_whole_one(client: httpx.AsyncClient) -> None:
    whole = await post(client, **ASK)
    answer = await client.post(MESSAGES, json={**ASK, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    streamed = added_up(events_of(answer.text))
    for each in (whole, streamed):
        each.pop("id")
        each["usage"] = prompt_tokens(each)
    assert streamed == whole


async def test_why_an_answer_ended_is_said(client: httpx.AsyncClient) -> None:
    cut = await post(client, **{**ASK, "max_tokens": 3})
    assert cut["stop_reason"] == "max_tokens"
    assert cut["content"][0]["text"] == "The capital of"
    stopped = await post(client, **ASK, stop_sequences=["moon", " Paris"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " Paris")
    assert stopped["content"][0]["text"] == "The capital of France is"


async def test_more_tokens_than_the_context_has_may_be_asked_for(client: httpx.AsyncClient) -> None:
    assert (await post(client, **{**ASK, "max_tokens": 32_000}))["stop_reason"] == "end_turn"
    assert "max_tokens" in await refusal(client, 400, **{**ASK, "max_tokens": -1})
    assert "max_tokens" in await refusal(client, 400, messages=[USER])


async def test_a_turn_of_the_assistant_at_the_end_is_continued(client: httpx.AsyncClient) -> None:
    body = await post(client, **{**ASK, "messages": [USER, {"role": "assistant", "content": "The capital of"}]})
    assert body["content"] == [{"type": "text", "text": " France is Paris."}]


async def test_errors_have_anthropics_form(client: httpx.AsyncClient, service: Service) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    search = {"type": "web_search_20250305", "name": "web_search"}
    wrong = {
        "messages.0.content.0: a block of type 'image' is not": {"messages": [{"role": "user", "content": [image]}]},
        "tools.0: the tool 'web_search_20250305' is": {"tools": [search]},
        "messages.0.role: must be": {"messages": [{"role": "wizard", "content": "x"}]},
        "mcp_servers: is not supported": {"mcp_servers": [{"url": "http://x"}]},
        "tool_choice.type: must be": {"tool_choice": {"type": ["any"]}},
        "prompt is too long: This model's maximum context length is 8192": {
            "messages": [{"role": "user", "content": "word " * 9000}]
        },
    }
    for message, fields in wrong.items():
        assert (await refusal(client, 400, **{**ASK, **fields})).startswith(f"invalid_request_error: {message}")
    assert (await refusal(client, 404, **{**ASK, "model": "gpt"})).startswith("not_found_error: the model 'gpt'")
    keys = KeyDigests(api=(ApiKey(digest=hashlib.sha256(b"secret").digest(), name="somebody"),))
    async with client_of(make_app(service, keys=keys)) as closed:
        assert (await refusal(closed, 401, **ASK)).startswith("authentication_error: an API key is asked for")
        assert (await closed.post(MESSAGES, json=ASK, headers={"x-api-key": "secret"})).status_code == 200
        assert "object" in (await closed.post("/v1/chat/completions", json={})).json()  # other routes: OpenAI's


async def test_a_prompt_that_is_too_long_is_counted_and_no_grammar_is_compiled_for_it(
    client: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients ask in order to know when to shorten it."""

    async def never(*_: Any) -> None:
        raise AssertionError("a grammar is compiled")

    monkeypatch.setattr(service.examined, "of", never)
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    long = {"role": "user", "content": "word " * 9000}
    counted = await post(client, COUNT, messages=[long], tools=[{**READ, "strict": True}], output_config=form)
    assert counted["input_tokens"] > 9000


async def test_what_claude_code_says_about_itself_changes_no_prompt() -> None:
    """Its digest is another one in each request, and stands at the head of all."""
    replica = ScriptedReplica("r0")
    you = {"type": "text", "text": "You are Claude Code."}
    line = attribution("1")["text"]
    async with House() as house:
        await house.ready(replica)
        service = house.service(Tokenizer(MODEL))
        async with client_of(make_app(service)) as client:
            for system, dropped in (
                ([attribution("a1b2"), you], "attribution"),
                ([attribution("c3d4"), you], "attribution"),
                (f"{line}\n{you['text']}", "attribution"),
                ([you], None),
            ):
                body = {**ASK, "max_tokens": 1, "system": system}
                for route in (MESSAGES, COUNT):
                    answer = await client.post(route, json=body)
                    assert answer.headers.get("x-manta-dropped") == dropped
    first, *others = [request.token_ids.tolist() for request in replica.requests]
    assert others == [first] * 3


HOUR, MINUTES = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}


async def test_what_a_request_marked_is_counted_as_read_and_as_put_into_the_cache(
    client: httpx.AsyncClient, service: Service, idle_engine: EngineLoop
) -> None:
    """The system message for an hour, the question for five minutes; what is behind that was only computed."""
    system = [{"type": "text", "text": "You are a guide who knows the marked towns. " * 20, "cache_control": HOUR}]
    blocks = [
        {"type": "text", "text": "Name the towns of France that have a market. " * 4, "cache_control": MINUTES},
        {"type": "text", "text": "Be brief."},
    ]
    body = {**ASK, "max_tokens": 4, "system": system, "messages": [{"role": "user", "content": blocks}]}
    system_len = (await post(client, COUNT, system=system, messages=[{"role": "user", "content": "x"}]))["input_tokens"]

    def computed() -> int:
        return idle_engine.engine.stats().prefill_tokens

    before = computed()
    stream = events_of((await client.post(MESSAGES, json={**body, "stream": True})).text)
    first, told = stream[-2]["usage"], stream[0]["message"]["usage"]
    assert told == {**first, "output_tokens": told["output_tokens"]}  # known from the beginning
    made = first["cache_creation"]
    prompt_len = first["input_tokens"] + first["cache_creation_input_tokens"] + first["cache_read_input_tokens"]
    assert first["input_tokens"] + first["cache_creation_input_tokens"] == computed() - before
    assert first["cache_creation_input_tokens"] == sum(made.values())
    assert first["cache_read_input_tokens"] < 32  # the beginning, if another test had it
    hour = made["ephemeral_1h_input_tokens"] + first["cache_read_input_tokens"]
    turn = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert hour == system_len - len(service.tokenizer.encode(turn))
    assert 32 <= made["ephemeral_5m_input_tokens"] <= prompt_len - hour - 3  # "Be brief." at least is behind it
    before = computed()
    usage = (await post(client, **body))["usage"]
    assert usage["cache_creation_input_tokens"] == sum(usage["cache_creation"].values()) == 0
    assert usage["cache_read_input_tokens"] == prompt_len - usage["input_tokens"] >= prompt_len - 16
    assert usage["input_tokens"] == computed() - before
    plain = {**body, "system": system[0]["text"] + "x", "messages": [USER]}
    assert (await post(client, **plain))["usage"]["cache_creation_input_tokens"] == 0  # nothing is marked
    whole = (await post(client, **plain | {"system": "Y" + plain["system"]}, cache_control=HOUR))["usage"]
    assert whole["input_tokens"] <= 16  # the last page, which is not whole


async def test_marks_of_another_form_are_refused_by_their_place(client: httpx.AsyncClient) -> None:
    wanted = 'must be {"type": "ephemeral"}'
    for wrong in ({"type": "forever"}, *({"type": "ephemeral", "ttl": ttl} for ttl in ("2h", 5, "", 0, False))):
        said = await refusal(client, 400, **ASK, tools=[READ, {**READ, "name": "Two", "cache_control": wrong}])
        assert said.startswith(f"invalid_request_error: tools.1.cache_control: {wanted}")
    turns = copy.deepcopy(TURNS)
    turns[2]["content"][0]["content"][0]["cache_control"] = {"type": "forever"}
    for route in (MESSAGES, COUNT):
        answer = await client.post(route, json={**ASK, "messages": turns})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"messages.2.content.0.content.0.cache_control: {wanted}")


@pytest.mark.parametrize("place", ["tool", "system", "call", "part", "result", "text"])
async def test_a_mark_is_where_its_block_ends(service: Service, house: House, place: str) -> None:
    """Each kind of block, in a conversation of Claude Code's: what a replica is asked to keep, as text."""
    replica = ScriptedReplica("scripted")
    await house.ready(replica)
    ends = {
        "tool": ("Read a file.", "Write one."), "system": ("Be kind.", "<system-reminder>"),
        "call": ("limit", "hello"), "part": ("hello", "world"), "result": ("world", "no such file"),
        "text": ("a.txt?", "I look"),
    }  # fmt: skip
    turns, tools = copy.deepcopy(TURNS), [dict(READ), {**READ, "name": "Write", "description": "Write one."}]
    system = [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}]
    for turn in turns:
        for block in turn["content"]:
            block.pop("cache_control", None)
    block = {
        "tool": tools[0], "system": system[0], "call": turns[1]["content"][3], "result": turns[2]["content"][0],
        "text": turns[0]["content"][1], "part": turns[2]["content"][0]["content"][0],
    }[place]  # fmt: skip
    turns[2]["content"][0]["content"].append({"type": "text", "text": "world"})
    block["cache_control"] = MINUTES
    async with client_of(make_app(house.service(service.tokenizer))) as client:
        house.remove("r0")
        await post(client, **{**ASK, "max_tokens": 2, "system": system, "messages": turns, "tools": tools})
    [asked] = replica.requests
    [mark] = asked.cache_breakpoints
    kept, rest = (
        service.tokenizer.decode(part, skip_special_tokens=False)
        for part in (asked.token_ids[: mark.length], asked.token_ids[mark.length :])
    )
    inside, behind = ends[place]
    assert (inside in kept, behind in kept) == (True, False)
    assert (inside in rest, behind in rest) == (False, True)
    assert mark.ttl_s == 300.0


TOOLS_FIRST = """{% if tools %}<|im_start|>system
# Tools
{% for each in tools %}{{ each | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for each in messages %}<|im_start|>{{ each.role }}
{{ each.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


IN_THE_FIRST_TURN = """{% if messages[0].role == 'system' %}{% set head, turns = messages[0].content, messages[1:] %}
{%- else %}{% set head, turns = '', messages %}{% endif %}{% for each in turns -%}
{%- if (each.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif -%}
<|im_start|>{{ each.role }}
{% if loop.first and head %}[{{ head }}]{% endif %}{{ each.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


ALTERNATING = (
    """{% for each in messages | rejectattr('role', 'equalto', 'system') -%}
{% if (each.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif -%}
{% endfor %}"""
    + TOOLS_FIRST
)
TURN, HEAD = "<|im_start|>user\nWhat is", "<|im_start|>system\nYou are kind."


@pytest.mark.parametrize("place", ["system", "tool"])
@pytest.mark.parametrize(
    ("template", "behind"),
    [
        (None, {"system": TURN, "tool": TURN}),
        (TOOLS_FIRST, {"system": TURN, "tool": HEAD}),
        (ALTERNATING, {"system": TURN, "tool": HEAD}),
        (IN_THE_FIRST_TURN, {"system": "What is", "tool": "What is"}),
        (QWEN_TEMPLATE, {"system": TURN, "tool": TURN}),
    ],
    ids=["embedded", "tools first", "turns alternate", "in the first turn", "qwen"],
)
async def test_a_mark_before_the_first_turn_leaves_out_all_of_that(
    house: House, tmp_path: Path, template: str | None, behind: dict[str, str], place: str
) -> None:
    """Also its header; a template that writes the system message into it has that before what is left out."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(MODEL) / name, tmp_path)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(str(tmp_path))
    replica = ScriptedReplica("scripted")
    await house.ready(replica)
    marked = {
        "system": {"system": [{"type": "text", "text": "You are kind.", "cache_control": MINUTES}]},
        "tool": {"system": "You are kind.", "tools": [{**READ, "name": "Write"}, {**READ, "cache_control": MINUTES}]},
    }[place]
    async with client_of(make_app(house.service(tokenizer))) as client:
        await post(client, **{**ASK, "max_tokens": 2}, **marked)
    [asked] = replica.requests
    [mark] = asked.cache_breakpoints
    kept, rest = (
        tokenizer.decode(part, skip_special_tokens=False)
        for part in (asked.token_ids[: mark.length], asked.token_ids[mark.length :])
    )
    assert rest.startswith(behind[place])
    assert ("kind" if place == "system" else "Read") in kept


async def marked_request(service: Service, house: House) -> GenerateRequest:
    """What a replica is asked where a long system message and the last turn are marked."""
    replica = ScriptedReplica("scripted")
    await house.ready(replica)
    system = [{"type": "text", "text": "A town has a market. " * 1000, "cache_control": HOUR}]
    turn = {"role": "user", "content": [{"type": "text", "text": "Which?", "cache_control": MINUTES}]}
    async with client_of(make_app(house.service(service.tokenizer))) as client:
        house.remove("r0")
        await post(client, **{**ASK, "max_tokens": 2, "system": system, "messages": [turn]})
    [asked] = replica.requests
    return asked


async def test_a_prompt_that_was_read_is_answered_where_its_marks_find_the_readers_full(
    service: Service, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = BoundedExecutor.run
    read = []

    async def once(self: BoundedExecutor, work: Callable[[], Any], *, size: int) -> Any:
        read.append(size)
        if len(read) > 1:
            raise Busy("full")
        return await run(self, work, size=size)

    monkeypatch.setattr(BoundedExecutor, "run", once)
    assert (await marked_request(service, house)).cache_breakpoints == ()
    assert len(read) > 1


async def test_for_marks_only_the_shorter_side_of_each_is_tokenised(
    service: Service, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def spy(self: Tokenizer, text: str, **options: Any) -> Any:
        encoded.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", spy)
    asked = await marked_request(service, house)
    hour, minutes = (service.tokenizer.decode(asked.token_ids[: mark.length]) for mark in asked.cache_breakpoints)
    assert (hour.endswith("market. \n"), minutes.strip().endswith("Which?")) == (True, True)
    whole, *rest = sorted(encoded, reverse=True)
    assert sum(rest) < 0.02 * whole


async def test_a_call_is_the_same_in_a_stream_and_its_result_is_found_behind_the_cached_turn(
    client: httpx.AsyncClient,
) -> None:
    schema = {"type": "object", "properties": {"path": {"enum": ["a.txt"]}}, "required": ["path"]}
    tool = {**READ, "input_schema": schema}
    choice = {"type": "tool", "name": "Read", "disable_parallel_tool_use": True}
    body = {**ASK, "max_tokens": 60, "tools": [tool], "tool_choice": choice, "system": "You read files. " * 20}
    first = await post(client, **body)
    assert first["stop_reason"] == "tool_use"
    [call] = first["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "Read", {"path": "a.txt"})
    events = events_of((await client.post(MESSAGES, json={**body, "stream": True})).text)
    assert "input_json_delta" in {event["delta"]["type"] for event in events if event["type"] == "content_block_delta"}
    [streamed] = added_up(events)["content"]
    assert streamed == {**call, "id": streamed["id"]} != call
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "hello"}
    turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    second = await post(client, **{**body, "messages": turns, "max_tokens": 1})
    assert second["usage"]["cache_read_input_tokens"] >= prompt_tokens(first) - 16  # all whole pages
    counted = await post(client, COUNT, **{name: body[name] for name in ("system", "tools")}, messages=turns)
    assert counted["input_tokens"] == prompt_tokens(second)


def test_a_turn_of_claude_code_becomes_a_chat() -> None:
    body = MessagesRequest(
        max_tokens=5, messages=TURNS, tools=[READ], thinking={"type": "enabled", "budget_tokens": 1024},
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )  # fmt: skip
    chat = chat_of(body, "You are Claude Code.", {})
    assert chat.messages == [
        {"role": "system", "content": "You are Claude Code."},
        {"role": "user", "content": "<system-reminder>Be brief.</system-reminder>\nWhat is in a.txt?"},
        {
            "role": "assistant", "content": "I look.", "reasoning_content": "I must read it.",
            "tool_calls": [
                {
                    "id": "toolu_1", "type": "function",
                    "function": {"name": "Read", "arguments": '{"path": "ä.txt", "limit": 2}'},
                },
                {"id": "toolu_2", "type": "function", "function": {"name": "Read", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "hello"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no such file"},
        {"role": "user", "content": "Go on."},
    ]  # fmt: skip
    assert chat.tools == [
        {
            "type": "function",
            "function": {"name": "Read", "parameters": READ["input_schema"], "description": "Read a file."},
        }
    ]
    assert chat.tool_choice == "required"
    assert (chat.model_dump()["parallel_tool_calls"], chat.chat_template_kwargs) == (False, {"enable_thinking": True})
    with pytest.raises(InvalidRequest, match="give its tool_result"):
        chat_of(MessagesRequest(max_tokens=5, messages=TURNS[:2]), "", {})


def test_a_message_without_a_block_is_refused_unless_the_assistant_is_to_go_on_with_it() -> None:
    """Trap: it would vanish, and the turn of the assistant before it be continued."""
    empty: dict[str, Any] = {"role": "user", "content": []}
    said = {"role": "assistant", "content": []}
    for turns in ([USER, {**said, "content": "Hi"}, empty], [empty], [USER, said, USER]):
        with pytest.raises(InvalidRequest, match=r"content: is empty") as refused:
            chat_of(MessagesRequest(max_tokens=5, messages=turns), "", {})
        assert refused.value.param == "messages"
    last = chat_of(MessagesRequest(max_tokens=5, messages=[USER, said]), "", {})
    assert (last.messages[-1]["content"], last.continue_final_message) == ("", True)


def test_system_messages_at_the_head_are_one() -> None:
    """Many templates take one system message, and only first."""
    also = {"role": "system", "content": "No network."}
    chat = chat_of(MessagesRequest(max_tokens=5, messages=[also, USER, also]), "Be short.", {})
    assert chat.messages == [{"role": "system", "content": "Be short.\n\nNo network."}, USER, also]


class Scripted:
    """A reader that finds the given parts, one for each character that is pushed."""

    def __init__(self, *parts: Part) -> None:
        self._parts = list(parts)

    def push(self, text: str) -> list[Part]:
        found, self._parts = self._parts[: len(text)], self._parts[len(text) :]
        return found

    def end(self, *, is_cut: bool = False) -> list[Part]:
        return self._parts


def delta_of(text: str, finish: FinishReason | None = None) -> TokenDelta:
    usage = Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=4)
    return TokenDelta(rid="r", text=text, usage=usage, finish=None if finish is None else Finish(reason=finish))


def form_of(*parts: Part) -> tuple[MessageForm, AnswerSoFar]:
    """The form of a message, and the answer whose text has ``parts``."""
    blocks = ContentBlocks(lambda index: f"toolu_{index}")
    form = MessageForm(answer_id="msg_1", model="m", max_tokens=5, stop=(), is_text=not parts, blocks=blocks)
    return form, AnswerSoFar((lambda: ChoiceReading(Scripted(*parts))) if parts else None)


def whole(*parts: Part, finish: FinishReason = FinishReason.STOP) -> dict[str, Any]:
    form, so_far = form_of(*parts)
    return form.whole([so_far.add(0, delta_of("x" * len(parts), finish))], so_far)


def streamed(*parts: Part, finish: FinishReason = FinishReason.STOP) -> dict[str, Any]:
    form, so_far = form_of(*parts)
    deltas = [*[delta_of("x")] * len(parts), delta_of("", finish)]
    return added_up([event for delta in deltas for event in form.events(so_far.add(0, delta), so_far)])


def test_thoughts_text_and_calls_are_blocks_of_their_own() -> None:
    parts = (
        ReasoningPart("I must"), ReasoningPart(" look."), TextPart("I"), TextPart(" look."),
        CallPart(0, "Read"), ArgumentsPart(0, '{"path": '), ArgumentsPart(0, '"a.txt"}'),
        CallPart(1, "Now"),
    )  # fmt: skip
    answer = whole(*parts)
    assert answer["content"] == [
        {"type": "thinking", "thinking": "I must look.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_0", "name": "Read", "input": {"path": "a.txt"}},
        {"type": "tool_use", "id": "toolu_1", "name": "Now", "input": {}},
    ]
    assert answer["stop_reason"] == "tool_use"
    assert answer["usage"] == {
        "input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 5,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    }  # fmt: skip
    assert streamed(*parts) == answer


def test_arguments_that_are_no_object_have_the_name_that_anthropic_gives_them() -> None:
    def input_of(text: str, finish: FinishReason = FinishReason.STOP) -> Any:
        return whole(CallPart(0, "f"), ArgumentsPart(0, text), finish=finish)["content"][0]["input"]

    assert input_of('{"a": [1, 2], "b": "thr', FinishReason.LENGTH) == {"a": [1, 2]}
    assert input_of("[1]") == {"INVALID_JSON": "[1]"}
    for text in ("{a: 1}", '{"a": NaN}', '{"a": [1e999]}'):
        assert input_of(text) == {"INVALID_JSON": text}


def test_a_call_that_is_cut_before_its_input_says_anything_is_left_out() -> None:
    for text in ("", "{", '{"path', '{"path": "a.t'):
        parts = (TextPart("I look."), CallPart(0, "Read"), *([ArgumentsPart(0, text)] if text else []))
        answer = whole(*parts, finish=FinishReason.LENGTH)
        assert answer["content"] == [{"type": "text", "text": "I look."}]
        assert answer["stop_reason"] == "max_tokens"
        assert streamed(*parts, finish=FinishReason.LENGTH) == answer
    whole_call = (CallPart(0, "Now"), ArgumentsPart(0, "{}"))  # only its end tag was cut
    assert whole(*whole_call, finish=FinishReason.LENGTH)["content"][0]["input"] == {}


def test_a_long_input_is_parsed_seldom_while_its_block_is_held() -> None:
    pieces = [ArgumentsPart(0, '{"text": "'), *[ArgumentsPart(0, "x")] * 20_000]
    blocks = ContentBlocks(str)
    with patch("deployments.http.apis.message_form.from_json", wraps=from_json) as parse:
        assert blocks.events([CallPart(0, "write"), *pieces]) == []
    assert sum(len(call.args[0]) for call in parse.call_args_list) < 20 * 20_000
    [begin, delta] = blocks.events([ArgumentsPart(0, '"}' + " " * 9_000)])
    assert begin["content_block"]["name"] == "write"
    assert len(delta["delta"]["partial_json"]) == 20_010 + 9_002


def test_what_of_an_input_has_come_does_not_depend_on_where_its_text_was_cut() -> None:
    """A client that comes back gets the rest of another run (event_ids.py)."""

    def come(*pieces: str) -> str:
        blocks = ContentBlocks(str)
        found = blocks.events([CallPart(0, "write"), *(ArgumentsPart(0, each) for each in pieces)])
        return "".join(each["delta"]["partial_json"] for each in found if each["type"] == "content_block_delta")

    text = '{"path": "a.txt", "lines": [1, 2]}'
    for end in range(1, len(text) + 1):
        assert come(text[:end]) == come(*text[:end]) == come(text[: end // 2], text[end // 2 : end])
    assert come(text) == text


def test_an_answer_without_content_has_an_empty_text() -> None:
    assert whole()["content"] == streamed()["content"] == [{"type": "text", "text": ""}]
    assert whole(ReasoningPart("Hm"), finish=FinishReason.LENGTH)["stop_reason"] == "max_tokens"


def test_an_error_in_a_stream_is_an_event() -> None:
    error = GenerationFailed(Finish(reason=FinishReason.ERROR, message="no memory", fault=Fault.UNAVAILABLE))
    [event] = form_of()[0].error_events(error)
    assert event["type"] == "error"
    assert event["error"] == {"type": "overloaded_error", "message": "no memory"}
