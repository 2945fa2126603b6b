"""The form of a chat that is read in parts: events of any cut of the text add up to the whole answer."""

from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from deployments.http.bodies import ChatRequest
from deployments.http.chat import ChatForm, Prepared
from deployments.http.streaming import AnswerSoFar
from deployments.output.output_format import OutputFormat
from deployments.output.reading import ChoiceReading
from deployments.output.reasoning import THINK, ReasoningCount
from deployments.output.tool_formats import HERMES
from deployments.output.tools import tool_use
from replicas.types import Finish, FinishReason, GenerateRequest, TokenDelta, Usage

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a":  "é\\u00e9</tool"}}\n</tool_call>'
TEXT = f"<think>\nHm, <tool_call>?\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
OUTPUT = OutputFormat(tools=HERMES, reasoning=THINK, template_has_tools=True, special_tags=frozenset(), dropped=())


def form_of(tool_choice: Any = "auto", **options: Any) -> ChatForm:
    """``options``: of each choice's reading."""
    use = tool_use(TOOLS, tool_choice, None)
    assert use is not None

    def new_reading() -> ChoiceReading:
        count = ReasoningCount([bytes([i]) for i in range(256)], THINK, is_open=False)
        return ChoiceReading(OUTPUT.reader(schemas=use.schemas), count, **options)

    request = GenerateRequest(rid="a", token_ids=[1])  # type: ignore[arg-type]
    job: Any = SimpleNamespace(model="m")
    prepared = Prepared(job=job, request=request, use=use, new_reading=new_reading, calls_of="r")
    body = ChatRequest(messages=[])
    return ChatForm(job=job, body=body, answer_id="chatcmpl-a", created=1, has_logprobs=False, prepared=prepared)


def deltas(text: str, *cuts: int, reason: FinishReason = FinishReason.STOP) -> list[TokenDelta]:
    """A choice in pieces; each byte is a token."""
    ends = [*cuts, len(text)]
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], ends, strict=True)]
    finishes = [None] * len(cuts) + [Finish(reason=reason)]
    usage = Usage(prompt_tokens=1, completion_tokens=len(text), cached_tokens=0)
    return [
        TokenDelta(rid="a", token_ids=tuple(piece.encode()), text=piece, usage=usage, finish=finish)
        for piece, finish in zip(pieces, finishes, strict=True)
    ]


def whole(text: str, form: ChatForm, **options: Any) -> dict[str, Any]:
    [delta] = deltas(text, **options)
    so_far = AnswerSoFar(form.prepared.new_reading)
    return form.whole([so_far.add(0, delta)], so_far)


def streamed(pieces: list[TokenDelta], form: ChatForm) -> tuple[dict[str, Any], str, int]:
    """The message that the events add up to, the reason of its end, and the tokens of reasoning."""
    state, so_far = ChatCompletionStreamState(), AnswerSoFar(form.prepared.new_reading)
    for delta in pieces:
        for event in form.events(so_far.add(0, delta), so_far):
            state.handle_chunk(openai.types.chat.ChatCompletionChunk.model_validate(event))
    [choice] = state.current_completion_snapshot.choices
    message = choice.message.model_dump(exclude_none=True, exclude={"parsed"})
    for call in message.get("tool_calls", []):
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    assert choice.finish_reason is not None
    return message, choice.finish_reason, so_far.tokens.reasoning


def test_an_answer_has_reasoning_content_and_calls() -> None:
    body = whole(TEXT, form_of())
    [choice] = body["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "Hm, <tool_call>?"
    assert message["content"].strip() == "Let me see."
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"a":  "é\\u00e9</tool"}'}
    ] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == TEXT.index("</think>") + len("</think>")


@pytest.mark.parametrize("text", [TEXT, TEXT[:-30], CALL, "no call", "", "<think>on and on", TEXT[: len(TEXT) - 5]])
def test_any_two_cuts_give_the_same_as_the_whole(text: str) -> None:
    body = whole(text, form_of())
    [choice] = body["choices"]
    expected = {name: value for name, value in choice["message"].items() if value not in (None, "")}
    num_reasoning = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    for first in range(len(text) + 1):
        for second in {first, (first + len(text)) // 2, len(text)}:
            message, reason, counted = streamed(deltas(text, first, second), form_of())
            assert {name: value for name, value in message.items() if value not in (None, "")} == expected
            assert (reason, counted) == (choice["finish_reason"], num_reasoning)


def test_the_reason_is_stop_for_a_named_tool_and_length_where_it_was_cut() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    assert whole(CALL, form_of(named))["choices"][0]["finish_reason"] == "stop"
    assert whole(CALL, form_of("required"))["choices"][0]["finish_reason"] == "tool_calls"
    assert whole(CALL, form_of(), reason=FinishReason.LENGTH)["choices"][0]["finish_reason"] == "length"
    assert whole("text", form_of())["choices"][0]["finish_reason"] == "stop"


def test_only_calls_leave_no_content_and_only_text_no_calls() -> None:
    assert whole(CALL, form_of())["choices"][0]["message"]["content"] is None
    assert whole("", form_of())["choices"][0]["message"] == {"role": "assistant", "content": ""}


def test_the_first_event_of_a_call_has_its_name_and_the_later_ones_its_arguments() -> None:
    form, events = form_of(), []
    so_far = AnswerSoFar(form.prepared.new_reading)
    for delta in deltas(CALL, 30, 45):
        events += form.events(so_far.add(0, delta), so_far)
    shown = [event["choices"][0]["delta"] for event in events]
    assert shown[0]["role"] == "assistant"
    calls = [call for each in shown for call in each.get("tool_calls", [])]
    assert (calls[0]["index"], calls[0]["type"]) == (0, "function")
    assert calls[0]["function"] == {"name": "f", "arguments": ""}
    assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a":  "é\\u00e9</tool"}'
    assert (shown[-1], events[-1]["choices"][0]["finish_reason"]) == ({}, "tool_calls")


def test_reasoning_that_is_not_asked_for_is_left_out_and_counted() -> None:
    body = whole(TEXT, form_of(shows_reasoning=False))
    assert "reasoning_content" not in body["choices"][0]["message"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
