"""A response and its events: the order that clients need, and that the events add up to the response."""

from typing import Any

import pytest

from deployments.http.apis.response_form import ResponseWriter
from deployments.http.apis.response_input import ToolSet
from deployments.output.parts import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from replicas.types import FinishReason

EMPTY: dict[str, Any] = {"id": "resp_a", "status": "in_progress", "error": None, "incomplete_details": None}
USAGE = {"input_tokens": 3}
SPACED = ToolSet(spaced={"mail__send": ("mail", "send")})
REASONED: list[Part] = [ReasoningPart("So."), TextPart("Hel"), TextPart("lo")]
CALLS: list[Part] = [CallPart(0, "f"), ArgumentsPart(0, '{"a":'), ArgumentsPart(0, "1}"), CallPart(1, "mail__send")]


def written(
    parts: list[Part], reason: FinishReason = FinishReason.STOP, *, seals: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of ``parts``, each written by itself, and the response."""
    writer = ResponseWriter(EMPTY, "a", calls_of="r", tools=SPACED, seals=seals)
    events = writer.begin()
    for part in parts:
        events += writer.write([part], [])
    return events + writer.end(reason, USAGE), writer.response


def short(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


ORDER = {
    "nothing": ([], "created in_progress completed"),
    "text": (
        [TextPart("Hel"), TextPart("lo")],
        "created in_progress output_item.added content_part.added output_text.delta output_text.delta "
        "output_text.done content_part.done output_item.done completed",
    ),
    "reasoning, then text": (
        REASONED,
        "created in_progress "
        "output_item.added content_part.added reasoning_text.delta "
        "reasoning_text.done content_part.done output_item.done "
        "output_item.added content_part.added output_text.delta output_text.delta "
        "output_text.done content_part.done output_item.done completed",
    ),
    "two calls, the second without arguments": (
        CALLS,
        "created in_progress "
        "output_item.added function_call_arguments.delta function_call_arguments.delta "
        "function_call_arguments.done output_item.done "
        "output_item.added function_call_arguments.done output_item.done completed",
    ),
}


@pytest.mark.parametrize("name", ORDER)
def test_the_events_come_in_the_order_that_clients_need(name: str) -> None:
    parts, order = ORDER[name]
    events, _ = written(parts)
    assert short(events) == order.split()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("parts", [REASONED, CALLS, [TextPart("a"), *CALLS, TextPart("b")]])
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_the_events_add_up_to_the_response_that_the_last_one_holds(parts: list[Part], reason: FinishReason) -> None:
    events, response = written(parts, reason)
    texts: dict[str, str] = {}
    items: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items[event["output_index"]] = event["item"]
        elif event["type"].endswith(".delta"):
            assert event["item_id"] == items[event["output_index"]]["id"]
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == items[event["output_index"]]["id"]
            items[event["output_index"]] = event["item"]
    assert events[-1]["response"] == response
    assert response["output"] == [*items.values()]
    for item in response["output"]:
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert whole == texts.get(item["id"], "")


def test_where_the_parts_are_cut_shows_in_the_deltas_alone() -> None:
    cut = [ReasoningPart("S"), ReasoningPart("o."), TextPart("H"), TextPart("ello")]
    assert written(REASONED)[1]["output"] == written(cut)[1]["output"]


def test_an_event_is_not_changed_by_those_after_it() -> None:
    writer = ResponseWriter(EMPTY, "a", calls_of="r", tools=ToolSet(), seals=False)
    begun = writer.begin() + writer.write([TextPart("Hello")], [])
    before = repr(begun)
    writer.write([TextPart(" there")], [])
    writer.end(FinishReason.STOP, USAGE)
    assert repr(begun) == before


def test_an_answer_that_was_cut_is_incomplete_and_so_is_its_last_item() -> None:
    events, response = written(REASONED, FinishReason.LENGTH)
    assert events[-1]["type"] == "response.incomplete"
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert written(REASONED, FinishReason.ABORT)[1]["incomplete_details"] is None


def test_an_error_in_the_middle_ends_the_response_as_failed_with_what_there_is() -> None:
    writer = ResponseWriter(EMPTY, "a", calls_of="r", tools=ToolSet(), seals=False)
    writer.begin()
    writer.write([TextPart("Hel")], [])
    error, failed = writer.fail(RuntimeError("of ours"))
    assert (error["type"], error["code"]) == ("error", "server_error")
    assert "of ours" not in error["message"]
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", 6)
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    assert failed["response"]["output"][0]["content"][0]["text"] == "Hel"


def test_a_call_of_a_namespace_is_shown_under_its_own_name() -> None:
    _, response = written(CALLS)
    plain, spaced = response["output"]
    assert (plain["name"], plain.get("namespace")) == ("f", None)
    assert (spaced["name"], spaced["namespace"]) == ("send", "mail")
    assert plain["call_id"] != spaced["call_id"]


def test_reasoning_is_also_given_in_the_form_that_clients_send_back_if_they_ask_for_it() -> None:
    assert written(REASONED)[1]["output"][0]["encrypted_content"] is None
    events, response = written(REASONED, seals=True)
    assert response["output"][0]["encrypted_content"] == "manta:U28u"
    assert events[2]["item"]["encrypted_content"] is None


def test_logprobs_wait_for_the_text_of_their_tokens() -> None:
    writer = ResponseWriter(EMPTY, "a", calls_of="r", tools=ToolSet(), seals=False)
    assert writer.write([], [{"token": "He"}]) == []
    *_, delta = writer.write([TextPart("Hello")], [{"token": "llo"}])
    assert delta["logprobs"] == [{"token": "He"}, {"token": "llo"}]
    writer.end(FinishReason.STOP, USAGE)
    assert writer.response["output"][0]["content"][0]["logprobs"] == [{"token": "He"}, {"token": "llo"}]
