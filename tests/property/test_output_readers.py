"""Any split of an output into pieces gives the parts of the whole, and nothing of it is lost."""

import json
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.output.parts import ArgumentsPart, CallPart, TextPart
from deployments.output.reasoning import THINK, ReasoningReader
from deployments.output.text_machine import TextMachine
from tests.pairwise import ALL
from tests.unit.output.outputs import FORMATS, SCHEMAS, Short, read

# what outputs are made of: tags whole and in part, JSON, and what resembles both
SHREDS = [
    "<tool_call>", "</tool_call>", "<tool_", "call>", '{"name": "f", "arguments": ', '{"name": "f", "parameters": ',
    '{"arguments": {"a": [1, "x"]}, "name": "g"}', '{"name": "f"', "{", "}", "[", "]", '"', "\\", '\\"',
    "\\u00e9", ":", ",",
    ";", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL", "f", "name", "1", "null", "<function=", "f>", "<parameter=s>",
    "<parameter=i>\n", "</parameter>", "\n</parameter>\n", "</function>", "<|python_tag|>", "```json\n", "\n```", "`",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "<think>", "</think>", "</thi", " ", "\n", "\t", "text", "\u00e9", "\ufffd", "<", ">",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(SHREDS) | st.text(max_size=3), max_size=25).map("".join)


@st.composite
def splits(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[str]:
    text = draw(texts)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=10)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def written_calls(draw: st.DrawFn, name: str) -> tuple[str, list[Short]]:
    """Calls as the format writes them, with any arguments, and what must be read."""
    made = FORMATS[name]
    names = draw(st.lists(st.text("abc_-", min_size=1), min_size=1, max_size=4))
    values = [draw(st.dictionaries(st.text("xyz", min_size=1), JSON, max_size=3)) for _ in names]
    written = [json.dumps(value, indent=draw(st.sampled_from([None, 1]))) for value in values]
    calls = [made.begin(tool) + value + made.end for tool, value in zip(names, written, strict=True)]
    return f"{made.whole_begin}{made.between.join(calls)}{made.whole_end}", list(zip(names, written, strict=True))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([*SHREDS, "${A[@]}"]) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("name", FORMATS)
@given(pieces=splits(TEXTS))
@settings(max_examples=300 if ALL else 100, deadline=None)
def test_any_split_of_any_text_gives_the_parts_of_the_whole(name: str, pieces: list[str]) -> None:
    assert read(FORMATS[name].reader(SCHEMAS), pieces) == read(FORMATS[name].reader(SCHEMAS), ["".join(pieces)])


@given(pieces=splits(TEXTS), is_open=st.booleans(), is_separate=st.booleans())
@settings(max_examples=300 if ALL else 100, deadline=None)
def test_any_split_of_any_text_gives_the_reasoning_of_the_whole(
    pieces: list[str], is_open: bool, is_separate: bool
) -> None:
    def reader() -> ReasoningReader:
        return ReasoningReader(FORMATS["hermes"].reader(SCHEMAS), THINK, is_open=is_open, is_separate=is_separate)

    assert read(reader(), pieces) == read(reader(), ["".join(pieces)])


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "qwen3_coder"])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_calls_are_read_as_they_were_written_to_the_byte(name: str, data: st.DataObject) -> None:
    text, calls = data.draw(written_calls(name))
    assert read(FORMATS[name].reader({}), data.draw(splits(st.just(text)))) == calls


@given(value=TEXTS.filter(lambda text: "</parameter>" not in text))
@settings(max_examples=100, deadline=None)
def test_text_parameters_are_json_strings_of_what_came(value: str) -> None:
    text = f"<function=f><parameter=s>\n{value}\n</parameter></function>"
    ((_, arguments),) = read(FORMATS["qwen3_coder"].reader(SCHEMAS), text)
    assert json.loads(arguments) == {"s": value}


@pytest.mark.parametrize("name", FORMATS)
def test_text_is_released_but_for_what_may_begin_a_tag(name: str) -> None:
    reader = FORMATS[name].reader(SCHEMAS)
    assert reader.push("Hello") == [TextPart("Hello")]
    assert reader.push(" 1 < 2") == [TextPart(" 1 < 2")]
    tag = FORMATS[name].tags[0]
    assert reader.push(tag[:3]) == []
    assert reader.push("?") == [TextPart(tag[:3] + "?")]


def test_an_answer_in_json_is_released_as_soon_as_it_cannot_be_a_call_without_a_tag() -> None:
    reader = FORMATS["llama3_json"].reader({})
    assert reader.push('{"na') == []
    assert reader.push('me": "Bob", "age"') == [TextPart('{"name": "Bob", "age"')]
    assert reader.push(": 3") == [TextPart(": 3")]


def test_a_name_is_released_with_its_first_argument_text_which_follows_as_it_comes() -> None:
    reader = FORMATS["hermes"].reader({})
    pieces = ['<tool_call>\n{"name": "f', '", ', '"arguments": ', '{"a"', ": 1", "}", "}\n</tool_call>"]
    first, *later = (ArgumentsPart(0, text) for text in ('{"a"', ": 1", "}"))
    assert [reader.push(piece) for piece in pieces] == [
        [], [], [], [CallPart(0, "f"), first], *([each] for each in later), [],
    ]  # fmt: skip


LONG: dict[str, Callable[[int], str]] = {
    "text": lambda n: "ab <tool" * (n // 8),
    "spaces": lambda n: " " * n,
    "begin tags": lambda n: "<tool_call>[TOOL_CALLS]<function=<|python_tag|><｜tool▁call▁begin｜>" * (n // 60),
    "open call": lambda n: '<tool_call>{"name": "f", "arguments": {"a": "' + "\\n{" * (n // 3),
    "arguments first": lambda n: '{"arguments": [' + '"x", ' * (n // 5),
    "nesting": lambda n: '{"name": "f", "parameters": ' + "[{" * (n // 2),
    "no name": lambda n: '<tool_call>{"' + "n" * n,
    "no words": lambda n: "[TOOL_CALLS]" + "n" * n,
    "parameters": lambda n: "<function=f>" + "<parameter=s>\nab\n</parameter>" * (n // 28),
    "number": lambda n: "<function=f><parameter=i>" + "1" * n,
    "thought": lambda n: "<think>" + "a \n" * (n // 3),
}


@pytest.mark.parametrize("long", LONG)
@pytest.mark.parametrize("name", FORMATS)
def test_no_more_than_a_tag_is_read_again_with_the_next_piece(name: str, long: str) -> None:
    """So the work is linear in the text: what has been read is kept in pieces, and joined once."""
    reader = ReasoningReader(FORMATS[name].reader(SCHEMAS), THINK, is_open=False, is_separate=True)
    machines = (reader, reader._answer)
    for char in LONG[long](4_000):
        reader.push(char)
        for each in machines:
            assert isinstance(each, TextMachine)
            assert len(each._buffer) - each._pos < len("<｜tool▁calls▁begin｜>")
    reader.end()


@pytest.mark.slow
@pytest.mark.parametrize("long", ["text", "spaces", "open call", "parameters"])
def test_a_megabyte_in_pieces_of_one_character_takes_seconds(long: str) -> None:
    name, text = "qwen3_coder" if long == "parameters" else "hermes", LONG[long](1 << 20)
    start = time.process_time()
    read(FORMATS[name].reader(SCHEMAS), text)
    assert time.process_time() - start < 60  # 1 to 3 s on a machine that is not busy; a quadratic one takes minutes


@pytest.mark.parametrize("name", FORMATS)
def test_ten_thousand_calls_are_read(name: str) -> None:
    made = FORMATS[name]
    arguments = "{}" if made.arguments == "json" else ""
    calls = made.between.join(made.begin("f") + arguments + made.end for _ in range(10_000))
    assert read(made.reader({}), [made.whole_begin + calls + made.whole_end]) == [("f", "{}")] * 10_000
