"""What a client asks of an output's form over HTTP: every dialect holds, and what is promised of a schema is true."""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.http.http_app import make_app
from deployments.http.service import Service
from deployments.output import validation
from replicas.text.tokenizer import Tokenizer
from tests.embedded import MODEL
from tests.unit.deployments.listening import client_of

pytestmark = pytest.mark.model

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
HI = [{"role": "user", "content": "Name a colour."}]
COLOURS = ["red", 'a "dark" blue\nor green', "é/\\d+"]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99, "minimum": 1}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PAIR = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
NUMBER = 'root ::= "4" digit\ndigit ::= [0-9]'
TAGS = {"structures": [{"begin": "<n>", "schema": {"enum": [7]}, "end": "</n>"}], "triggers": ["<n"]}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes longer to validate a document than a server may."""
    monkeypatch.setattr(validation, "DEADLINE_S", 60.0)


def schema_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}


async def text_of(client: httpx.AsyncClient, route: str, asked: dict[str, Any], **fields: Any) -> str:
    answer = await post(client, route, asked, **fields)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if route == NATIVE:
        return str(body["text"])
    choice = body["choices"][0]
    return str(choice["message"]["content"] if route == CHAT else choice["text"])


async def post(client: httpx.AsyncClient, route: str, asked: dict[str, Any], **fields: Any) -> httpx.Response:
    common = {"temperature": 0, "max_tokens": 48, **fields}
    if route == CHAT:
        return await client.post(route, json={"messages": HI, **common, **asked})
    if route == TEXT:
        return await client.post(route, json={"prompt": "A colour:", **common, **asked})
    common["max_new_tokens"] = common.pop("max_tokens")
    return await client.post(route, json={"text": "A colour:", "sampling_params": {**common, **asked}})


SEVEN = {"type": "json_schema", "json_schema": {"enum": [7]}}
DIALECTS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "ab{2,3}c"}, "ab{2,3}c"),
    ({"ebnf": NUMBER}, "4[0-9]"),
    ({"json_schema": {"enum": [12]}}, "12"),
    ({"json_schema": '{"enum": [12]}'}, "12"),
    ({"guided_json": {"enum": [12]}}, "12"),
    ({"guided_json": '{"enum": [12]}'}, "12"),
    ({"guided_regex": "x/y"}, "x/y"),
    ({"guided_choice": COLOURS}, "|".join(map(re.escape, COLOURS))),
    ({"guided_grammar": NUMBER}, "4[0-9]"),
    ({"guided_grammar": 'start: "b" "c"'}, "bc"),
    ({"grammar": NUMBER}, "4[0-9]"),
    ({"grammar": {"type": "regex", "value": "xy"}}, "xy"),
    ({"grammar": {"type": "json", "value": {"enum": [12]}}}, "12"),
    ({"structured_outputs": {"choice": ["", "zz"], "json": None}}, "|zz"),
    ({"structured_outputs": {"json": {"enum": [12]}}}, "12"),
    ({"structured_outputs": {"grammar": NUMBER}}, "4[0-9]"),
    ({"response_format": schema_format({"enum": [12]}, strict=True)}, "12"),
    ({"response_format": {"type": "regex", "pattern": "xy"}}, "xy"),
    ({"response_format": {"type": "json_schema", "schema": {"enum": [12]}}}, "12"),
    ({"response_format": {"type": "json_object"}}, r"\s*\{.*"),
    ({"structured_outputs": {"json_object": True}}, r"\s*\{.*"),
    ({"structural_tag": {"format": {"type": "tag", "begin": "<n>", "end": "</n>", "content": SEVEN}}}, "<n>7</n>"),
]


@pytest.mark.parametrize("route", [CHAT, TEXT, NATIVE])
async def test_every_dialect_is_held(client: httpx.AsyncClient, route: str) -> None:
    for asked, pattern in DIALECTS:
        assert re.fullmatch(pattern, await text_of(client, route, asked, max_tokens=24), flags=re.DOTALL), asked


async def test_a_schema_that_is_held_whole_is_enforced_with_strict_and_without(client: httpx.AsyncClient) -> None:
    for strict in (True, False, None):
        asked = {"response_format": schema_format(PERSON, strict=strict)}
        answer = await post(client, CHAT, asked)
        assert answer.headers["x-manta-schema"] == "enforced"
        person = json.loads(answer.json()["choices"][0]["message"]["content"])
        assert list(person) == ["name", "age"]
        assert len(person["name"]) <= 5
        assert 1 <= person["age"] <= 99


async def test_a_strict_schema_that_cannot_be_enforced_is_refused_with_its_place(client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"a/b": PAIR, "c": {"not": {"type": "null"}}}}
    answer = await post(client, CHAT, {"response_format": schema_format(schema, strict=True)})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "response_format"
    assert error["message"].startswith("response_format.json_schema.schema: strict is true")
    assert "'uniqueItems' at /properties/a~1b/uniqueItems" in error["message"]
    assert "'not' at /properties/c/not" in error["message"]


@pytest.mark.parametrize("route", [CHAT, TEXT, NATIVE])
async def test_what_is_not_strict_is_validated_at_its_end(client: httpx.AsyncClient, route: str) -> None:
    """The same schema, with a document that is valid, and with one that the grammar takes and the schema does not."""
    for values, word in (([1, 2], "validated"), ([1], "partial")):
        schema = PAIR | {"prefixItems": [{"const": 1}, {"const": values[-1]}]}
        answer = await post(client, route, {"json_schema": schema})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-manta-schema"] == word


@pytest.mark.parametrize("route", [CHAT, TEXT, NATIVE])
async def test_a_stream_says_at_its_end_what_holds(client: httpx.AsyncClient, route: str) -> None:
    schema = PAIR | {"prefixItems": [{"const": 1}, {"const": 2}]}
    extra = {"stream": True} if route != NATIVE else {}
    body = {"messages": HI, "json_schema": schema} if route == CHAT else {"prompt": "x", "json_schema": schema}
    if route == NATIVE:
        body = {"text": "x", "stream": True, "sampling_params": {"json_schema": schema, "max_new_tokens": 30}}
    answer = await client.post(route, json=body | extra)
    assert answer.headers["x-manta-schema"] == "partial"
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert [event["manta"] for event in events if "manta" in event] == [{"schema": "validated"}]
    plain = await client.post(route, json=json.loads(json.dumps(body | extra).replace("uniqueItems", "title")))
    assert plain.headers["x-manta-schema"] == "enforced"
    assert "manta" not in plain.text


@pytest.mark.parametrize("route", [CHAT, TEXT, NATIVE])
async def test_a_document_that_a_stop_text_cut_is_not_called_enforced(client: httpx.AsyncClient, route: str) -> None:
    """Any "," is inside it; what is whole all the same was validated. A stream cannot know before."""
    for stop, word in ((",", "partial"), ("no such text", "enforced")):
        answer = await post(client, route, {"json_schema": PERSON, "stop": [stop]})
        assert answer.headers["x-manta-schema"] == word, answer.text
    if route == NATIVE:
        return
    fields = {"json_schema": PERSON, "max_tokens": 48, "stream": True}
    asked = {"messages": HI} if route == CHAT else {"prompt": "x"}
    for stop, word in ((",", "partial"), ("no such text", "enforced")):
        answer = await client.post(route, json={**asked, **fields, "stop": stop, "temperature": 0})
        assert answer.headers["x-manta-schema"] == "partial"
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert [event["manta"] for event in events if "manta" in event] == [{"schema": word}]


# A fine-tune's template: it knows of thoughts, whose tags are no tokens of SmolLM2
THINKING = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
SAY = [{"role": "user", "content": "Say yes or no."}]


@pytest.fixture
async def thinker(service: Service, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(Path(MODEL).absolute() / name)
    (tmp_path / "chat_template.jinja").write_text(THINKING)
    async with client_of(make_app(replace(service, tokenizer=Tokenizer(str(tmp_path))))) as client:
        yield client


async def test_a_form_is_held_where_the_tags_of_a_thought_are_several_tokens(thinker: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for stream in (False, True):
        asked = {"messages": SAY, "max_tokens": 32, "temperature": 0, "stream": stream}
        answer = await thinker.post(CHAT, json={**asked, "response_format": schema_format(schema, strict=True)})
        assert answer.headers["x-manta-schema"] == "enforced"
        if not stream:
            assert json.loads(answer.json()["choices"][0]["message"]["content"])["a"] in (1, 2)
    assert await text_of(thinker, CHAT, {"guided_choice": ["yes", "no"], "messages": SAY}) in ("yes", "no")


async def test_a_tool_that_must_be_called_is_called_where_the_tags_of_a_thought_are_several_tokens(
    thinker: httpx.AsyncClient,
) -> None:
    parameters = {"type": "object", "properties": {"part": {"enum": ["bolt"]}}, "required": ["part"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        fields = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, "messages": SAY}
        answer = await post(thinker, CHAT, fields, max_tokens=64)
        [call] = answer.json()["choices"][0]["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"part": "bolt"})


async def test_a_thought_that_a_client_continues_is_reasoning_and_no_form_begins_in_it(
    thinker: httpx.AsyncClient,
) -> None:
    """Nor may it end there: the model, which has never learned to end a thought, fills the limit."""
    for begun in ("<think>\nThe user wants", "<think>\nHm.\n</think>\n\n<think>\nThe user wants"):
        chat = [*SAY, {"role": "assistant", "content": begun}]
        fields = {"messages": chat, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 24}
        for form in ({}, {"guided_choice": ["yes", "no"]}):
            [choice] = (await post(thinker, CHAT, {**fields, **form})).json()["choices"]
            assert choice["message"]["reasoning_content"]
            assert not choice["message"]["content"]
            assert not form or choice["finish_reason"] == "length"
    chat = [*SAY, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n"}]
    assert await text_of(thinker, CHAT, {**fields, "messages": chat, "guided_choice": ["yes", "no"]}) in ("yes", "no")
    opened = {"messages": SAY, "chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 4}
    [choice] = (await post(thinker, CHAT, opened)).json()["choices"]
    assert choice["message"]["reasoning_content"]


async def test_what_asks_for_no_form_has_no_header(client: httpx.AsyncClient) -> None:
    for asked in ({}, {"response_format": {"type": "text"}}, {"guided_json": None, "regex": False, "grammar": ""}):
        answer = await post(client, CHAT, asked, max_tokens=1)
        assert answer.status_code == 200, answer.text
        assert "x-manta-schema" not in answer.headers


BAD: list[tuple[dict[str, Any], str, str]] = [  # what is asked, the field that the error names, and its words
    ({"regex": "a", "guided_json": {"enum": [1]}}, "guided_json", "only one"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "only one"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": 5}, "guided_json", "must be a JSON schema, got int"),
    ({"guided_json": {"$ref": "http://example.com/x"}}, "guided_json", "does not compile"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "look-ahead"),
    ({"guided_regex": ["a"]}, "guided_regex", "must be a string"),
    ({"guided_choice": []}, "guided_choice", "is empty"),
    ({"regex": ""}, "regex", "is empty"),
    ({"response_format": {"type": "regex", "pattern": ""}}, "response_format", "is empty"),
    ({"guided_choice": [1]}, "guided_choice", "list of strings"),
    ({"ebnf": 'root ::= "a" other'}, "ebnf", ""),
    ({"grammar": "start: <nope>"}, "grammar", "special token"),
    ({"structural_tag": {"type": "dispatch"}}, "structural_tag", "not supported"),
    ({"structural_tag": {**TAGS, "triggers": ["<x"]}}, "structural_tag", "no tag begins"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "must be a JSON schema"),
    ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format", "must be an object"),
    ({"response_format": {"type": ["json_object"]}}, "response_format", "not supported"),
    ({"structural_tag": {"structures": [], "triggers": [[]]}}, "structural_tag", "no tag begins"),
    ({"structured_outputs": "x"}, "structured_outputs", "must be an object"),
    # bombs
    ({"guided_regex": "a" * 70_000}, "guided_regex", "70,000 bytes"),
    ({"guided_json": {"properties": {f"p{i:0100}": {} for i in range(10_000)}}}, "guided_json", "at most 1,048,576"),
    ({"guided_json": {"properties": {f"p{i}": {} for i in range(10_001)}}}, "guided_json", "10,001 values in prop"),
    ({"guided_json": '{"items":' * 70 + "1" + "}" * 70}, "guided_json", "nested too deeply"),
    ({"guided_grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}, "guided_grammar", ""),
    ({"guided_grammar": "start: X\nX: " + " & ".join(f"/.*a.{{{i}}}b.*/" for i in range(30))}, "guided_grammar", "2 s"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "param", "words"), BAD, ids=[json.dumps(asked)[:60] for asked, _, _ in BAD])
async def test_what_cannot_be_a_grammar_is_refused_by_its_field(
    client: httpx.AsyncClient, asked: dict[str, Any], param: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicas.grammar.examiner.MAX_WALL_S", 100.0)  # one may have a fiftieth of a core for its 2 s
    answer = await post(client, TEXT, asked)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert error["message"].startswith(param)


async def test_a_schema_of_a_large_api_is_held(client: httpx.AsyncClient) -> None:
    fields = {f"field_{i}": {"type": "string", "description": "x" * 100} for i in range(2000)}
    schema = {"$defs": {"unused": {"properties": fields}}, "enum": [7]}
    assert await text_of(client, TEXT, {"json_schema": schema}) == "7"


async def test_names_with_quotes_and_line_breaks_are_names(client: httpx.AsyncClient) -> None:
    name = 'a "b"\n/\\ é\u2028'
    schema = {"type": "object", "properties": {name: {"const": 1}}, "required": [name], "additionalProperties": False}
    compact = {"prompt": '{"a":1}\n{"b":1}\n{"c":1}\n'}
    assert json.loads(await text_of(client, TEXT, {"guided_json": schema} | compact)) == {name: 1}


async def test_a_lone_surrogate_in_a_schema_is_refused(client: httpx.AsyncClient) -> None:
    body = b'{"prompt": "x", "guided_json": "{\\"enum\\": [\\"\\ud800\\"]}"}'
    answer = await client.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400


TREE = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "right": {"$ref": "#/$defs/tree"}}}
HARD: list[dict[str, Any]] = [
    {"guided_regex": "(a|b)*a(a|b){20}"},
    {"guided_regex": "(.*a){25}"},
    {"guided_json": {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"}},
]


@pytest.mark.parametrize("asked", HARD, ids=str)
async def test_what_is_only_hard_is_answered(client: httpx.AsyncClient, asked: dict[str, Any]) -> None:
    assert (await post(client, TEXT, asked, max_tokens=4)).status_code == 200
