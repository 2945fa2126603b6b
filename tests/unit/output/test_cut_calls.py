"""Outputs that a limit cuts, at every character of recorded ones in each format: no markup becomes text, and no call is
without its arguments."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jiter import from_json  # as Anthropic's SDK reads the input of a call that is streamed

from deployments.http.apis.message_form import ContentBlocks
from deployments.output.parts import Part
from tests.unit.output.outputs import FORMATS, Short, short

RECORDED = [
    json.loads(line) for line in (Path(__file__).parents[2] / "data" / "tool_calls.jsonl").read_text().splitlines()
]
SCHEMAS: dict[str, Any] = {
    "get_weather": {}, "list_tools": {}, "search": {},
    "edit_file": {"properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
    "run-shell": {"properties": {"command": {"type": "string"}}},
}  # fmt: skip


def written(name: str, calls: list[tuple[str, str]]) -> str:
    """The calls as models of this format write them."""
    form = FORMATS[name]
    texts = []
    for tool, arguments in calls:
        inner = arguments
        if form.arguments == "parameters":
            inner = "".join(
                form.parameter_begin(key)
                + (value if isinstance(value, str) else json.dumps(value))
                + form.parameter_end
                for key, value in json.loads(arguments).items()
            )
        texts.append(form.begin(tool) + inner + form.end)
    return form.whole_begin + form.between.join(texts) + form.whole_end


def outputs(name: str) -> Iterator[str]:
    for each in RECORDED:
        lead = "" if name == "llama3_json" else each["lead"]  # it has no tag in front of calls: they come first
        yield (f"{lead}\n\n" if lead else "") + written(name, each["calls"])


def parts_of(name: str, text: str, *, is_cut: bool, must_call: bool = False) -> list[Part]:
    reader = FORMATS[name].reader(SCHEMAS, must_call=must_call)
    return [*reader.push(text), *reader.end(is_cut=is_cut)]


def told(parts: list[Part]) -> tuple[str, list[tuple[str, ...]]]:
    """The text, and the calls."""
    found: list[Short] = short(parts)
    return "".join(each for each in found if isinstance(each, str)), [each for each in found if isinstance(each, tuple)]


def inputs_of(parts: list[Part], *, is_cut: bool) -> list[str]:
    """What was streamed of each block's input in Anthropic's form."""
    blocks, found = ContentBlocks(str), list[str]()
    for event in [event for part in parts for event in blocks.events([part])] + blocks.end(is_cut=is_cut):
        if event.get("content_block", {}).get("type") == "tool_use":
            found.append("")
        elif event.get("delta", {}).get("type") == "input_json_delta":
            found[-1] += event["delta"]["partial_json"]
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_wherever_an_output_is_cut_its_text_and_calls_are_the_beginning_of_the_whole_ones(name: str) -> None:
    assert len(RECORDED) == 40
    num_cut_in_calls = 0
    for text in outputs(name):
        whole_text, whole_calls = told(parts_of(name, text, is_cut=False))
        assert "<" not in whole_text.replace("< b", "")
        for at in range(len(text)):
            parts = parts_of(name, text[:at], is_cut=True)
            cut_text, calls = told(parts)
            extra = cut_text.removeprefix(whole_text)
            assert whole_text.startswith(cut_text) or (not calls and extra == text[at - 1] in "<["), text[:at]
            assert [call[0] for call in calls] == [call[0] for call in whole_calls[: len(calls)]]
            for i, (call, whole) in enumerate(zip(calls, whole_calls, strict=False)):
                is_last = i == len(calls) - 1
                assert call[1] != "", text[:at]
                assert whole[1].startswith(call[1]) if is_last else call == whole, text[:at]
            num_cut_in_calls += bool(calls) and calls[-1] != whole_calls[len(calls) - 1]
            for given, call, whole in zip(inputs_of(parts, is_cut=True), calls, whole_calls, strict=False):
                assert given == call[1]
                assert from_json(given.encode(), partial_mode=True) != {} or given == whole[1], text[:at]
    assert num_cut_in_calls > 1_000


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_is_held_to_calls_has_no_text_wherever_it_is_cut(name: str) -> None:
    for each in RECORDED[::2]:
        text = written(name, each["calls"])
        for at in range(len(text)):
            assert told(parts_of(name, text[:at], is_cut=True, must_call=True))[0] == ""
