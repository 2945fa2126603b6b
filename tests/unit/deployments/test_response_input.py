"""The bodies of /v1/responses as chats: items, tools and options, and what is refused."""

from typing import Any

import pytest

from deployments.http.apis.response_input import ResponsesRequest, chat_of, renamed, sealed, tools_of
from deployments.http.bodies import ChatRequest
from replicas.errors import InvalidRequest, PromptTooLong

USER = {"role": "user", "content": "Hi"}
WEATHER = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": {"type": "object"}}


def chat(**body: Any) -> ChatRequest:
    request = ResponsesRequest.model_validate({"input": "Hi", **body})
    return chat_of(request, tools_of(request))


def messages(*items: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    return chat(input=[*items], **body).messages


def call(call_id: str, name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}", **fields}


def chat_call(call_id: str, name: str = "weather") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def test_a_text_is_a_message_of_the_user_behind_the_instructions() -> None:
    assert chat(instructions="Be short.").messages == [{"role": "system", "content": "Be short."}, USER]
    assert chat().messages == [USER]


def test_an_item_without_a_type_is_a_message_and_its_parts_are_lines() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb"}]


def test_what_the_model_gave_in_one_answer_is_one_message_again() -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    output = {"type": "function_call_output", "call_id": "1", "output": "sun"}
    parts = [{"type": "input_text", "text": "rain"}]
    assert messages(USER, reasoning, said("I look."), call("1"), call("2"), output, {**output, "output": parts}) == [
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [chat_call("1"), chat_call("2")],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]


def test_a_second_answer_in_a_row_is_a_message_of_its_own() -> None:
    assert [each["content"] for each in messages(USER, said("a"), said("b"))] == ["Hi", "a", "b"]
    assert [each.get("content") for each in messages(USER, call("1"), said("b"))] == ["Hi", None, "b"]


def test_reasoning_comes_back_from_each_form_that_clients_send() -> None:
    summary = [{"type": "summary_text", "text": "Short."}]
    for item, text in (
        ({"summary": summary}, "Short."),
        ({"summary": [], "encrypted_content": sealed("Hm, é.")}, "Hm, é."),
        ({"summary": summary, "content": [{"type": "reasoning_text", "text": "Long."}]}, "Long."),
        ({"summary": [], "encrypted_content": "gAAAAA of another server"}, None),
    ):
        found = messages(USER, {"type": "reasoning", **item}, said("a"))
        assert found[1].get("reasoning_content") == text
        assert len(found) == 2


def test_the_instructions_at_the_head_are_one_message() -> None:
    """Trap: Codex sends instructions and developer messages; many templates take one system message, and only first."""
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "No network."}]}
    assert messages(developer, USER, developer, instructions="Be short.") == [
        {"role": "system", "content": "Be short.\n\nNo network."},
        USER,
        {"role": "developer", "content": "No network."},
    ]


def test_tools_of_codex_that_only_openai_runs_are_dropped_and_counted() -> None:
    spaced = {"type": "namespace", "name": "mail", "tools": [{"type": "function", "name": "send"}]}
    given = [WEATHER, {"type": "web_search"}, spaced, {"type": "custom", "name": "p"}]
    tools = tools_of(ResponsesRequest(input="Hi", tools=given))
    assert tools.functions == [
        {
            "type": "function",
            "function": {"name": "weather", "description": "Of a city.", "parameters": {"type": "object"}},
        },
        {"type": "function", "function": {"name": "mail__send"}},
    ]
    assert tools.dropped == ["web_search", "custom"]
    assert tools.kept == [WEATHER, spaced]
    choice = {"type": "function", "name": "send", "namespace": "mail"}
    assert chat(tools=given, tool_choice=choice).tool_choice == {"type": "function", "function": {"name": "mail__send"}}
    assert chat(input=[USER, call("1", "send", namespace="mail")]).messages[1]["tool_calls"] == [
        chat_call("1", "mail__send")
    ]


def test_a_dropped_tool_has_our_name_and_another_that_begins_alike_is_refused() -> None:
    """Trap: the names go into a header, which has no room for what a client made up."""
    dated = [{"type": "web_search_preview_2025_03_11"}, {"type": "web_search_2025_08_26"}]
    assert tools_of(ResponsesRequest(input="Hi", tools=dated)).dropped == ["web_search"] * 2
    for kind in ("customer_lookup", "web_search_é", "web_search_preview\r\nx: y", "custom_", "custom\n"):
        with pytest.raises(InvalidRequest, match=r"tools\[0\]: type"):
            tools_of(ResponsesRequest(input="Hi", tools=[{"type": kind}]))


def test_options_are_those_of_a_chat() -> None:
    made = chat(
        tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}, parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True}, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"}, max_output_tokens=5, temperature=0.5, top_logprobs=2, seed=4,
    )  # fmt: skip
    assert made.tool_choice == {"type": "function", "function": {"name": "weather"}}
    assert made.response_format == {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": True}}
    assert (made.reasoning_effort, made.max_completion_tokens, made.temperature, made.seed) == ("low", 5, 0.5, 4)
    assert (made.logprobs, made.top_logprobs) == (True, 2)
    assert chat(include=["message.output_text.logprobs"]).logprobs
    assert not chat().logprobs
    assert chat(text={"format": {"type": "text"}}).response_format == {"type": "text"}


def test_allowed_tools_are_the_only_ones() -> None:
    other = {**WEATHER, "name": "other"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    made = chat(tools=[WEATHER, other], tool_choice=allowed)
    assert made.tools is not None
    assert [each["function"]["name"] for each in made.tools] == ["other"]
    assert made.tool_choice == "required"


def test_what_is_harmless_is_taken() -> None:
    chat(
        store=False, background=False, previous_response_id=None, truncation="auto", metadata={"a": "b"}, user="u",
        service_tier="auto", prompt_cache_key="k", safety_identifier="s", include=["reasoning.encrypted_content"],
        client_metadata={"x": "y"}, stream_options={"include_obfuscation": False}, max_tool_calls=3, n=1,
    )  # fmt: skip
    chat(background=True, store=True)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"store": True}, "store", "keeps no responses"),
    ({"background": True, "store": False}, "store", "does not go with background: true"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
    ({"conversation": {"id": "c"}}, "conversation", "keeps no responses"),
    ({"n": 2}, "n", "not supported"),
    ({"include": ["everything"]}, "include", "'everything' is not known"),
    ({"tools": [{"type": "file_search"}]}, "tools", r"tools\[0\]: type 'file_search' is not supported"),
    ({"tools": [{"type": "function"}]}, "tools", r"tools\[0\].name: must be a text"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search' is not supported"),
    ({"tool_choice": {"type": "allowed_tools", "tools": ["f"]}}, "tool_choice", "each must be an object"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", r"input\[0\]: items of type 'item_reference'"),
    ({"input": [USER, {"type": 3}]}, "input", r"input\[1\]: items of type '3'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "part of type 'input_image'"),
    ({"input": [{"role": "user", "content": [3]}]}, "input", "part of type 'int'"),
    ({"input": [{"content": "a"}]}, "input", r"input\[0\].role: must be a text"),
    ({"input": [{**call("1"), "arguments": {}}]}, "input", r"input\[0\].arguments: must be a text"),
    ({"input": [{"type": "reasoning", "encrypted_content": "manta:é"}]}, "input", "not as this server gave it"),
]


@pytest.mark.parametrize(("body", "param", "match"), REFUSED, ids=str)
def test_what_cannot_be_done_is_refused_by_name(body: dict[str, Any], param: str, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match) as refused:
        chat(**body)
    assert refused.value.param == param


def test_errors_of_the_chat_name_the_fields_of_this_api() -> None:
    error = renamed(PromptTooLong.of_prompt(9, longest=8, param="messages"))
    assert isinstance(error, PromptTooLong)
    assert error.param == "input"
    assert "your input resulted in 9 tokens" in str(error)
    schema = InvalidRequest("response_format.json_schema.schema: must be", param="response_format")
    assert str(renamed(schema)) == "text.format.schema: must be"
    assert renamed(InvalidRequest("top_p: no", param="top_p")).param == "top_p"
