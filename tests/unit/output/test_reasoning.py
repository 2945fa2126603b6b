"""Reasoning in an output: told apart in the text, and counted in the tokens."""

import itertools

import pytest

from deployments.output.call_readers import HermesReader
from deployments.output.harmony import HarmonyReader
from deployments.output.parts import ReasoningPart, TextPart, TextReader
from deployments.output.reasoning import HARMONY, THINK, ReasoningCount, ReasoningFormat, ReasoningReader
from tests.unit.output.outputs import Short, read

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "is_open", "parts"),
    [
        ("<think>\nSo 4.\n</think>\n\nIt is 4.", False, [("think", "So 4."), "It is 4."]),
        ("\n<think>a\n\n b </think>c", False, [("think", "a\n\n b"), "c"]),
        ("So 4.</think>It is 4.", True, [("think", "So 4."), "It is 4."]),
        ("<think>So 4.</think>It is 4.", True, [("think", "So 4."), "It is 4."]),  # it opens what the prompt opened
        ("\n\n</think>\n\nIt is 4.", True, ["It is 4."]),
        ("<think>\n\n</think>\n\nIt is 4.", False, ["It is 4."]),
        ("<think>So 4 < 5 </thin", False, [("think", "So 4 < 5 </thin")]),
        ("So", True, [("think", "So")]),
        ("<thin", True, [("think", "<thin")]),
        ("<thin", False, ["<thin"]),
        (" It is <think>4</think>", False, [" It is <think>4</think>"]),
        ("a</think>b", False, ["a</think>b"]),
        ("<think>a</think>b</think>", False, [("think", "a"), "b</think>"]),
        (f"<think>{CALL}</think>{CALL}", False, [("think", CALL), ("f", "{}")]),
        (f"{CALL}", True, [("think", CALL)]),
        (f"a</think>\nb\n{CALL}", True, [("think", "a"), "b\n", ("f", "{}")]),
        ("", True, []),
        ("", False, []),
    ],
)
def test_reasoning_is_told_from_the_answer(text: str, is_open: bool, parts: list[Short]) -> None:
    for pieces in ([text], text):
        reader = ReasoningReader(HermesReader({}), THINK, is_open=is_open, is_separate=True)
        assert read(reader, pieces) == parts


@pytest.mark.parametrize("text", ["<think>\nSo 4.\n</think>\n\nIt is 4.", " <think> a ", "It is 4."])
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_that_is_not_told_apart_is_text_as_it_was_generated(text: str, is_open: bool) -> None:
    for pieces in ([text], text):
        assert read(ReasoningReader(TextReader(), THINK, is_open=is_open, is_separate=False), pieces) == [text]


def test_a_call_behind_reasoning_that_is_not_told_apart_is_a_call_and_one_in_it_is_not() -> None:
    reader = ReasoningReader(HermesReader({}), THINK, is_open=True, is_separate=False)
    assert read(reader, [f"{CALL}</think>{CALL}"]) == [f"{CALL}</think>", ("f", "{}")]


def test_reasoning_comes_as_soon_as_it_cannot_be_the_end_tag_or_whitespace_before_it() -> None:
    reader = ReasoningReader(TextReader(), THINK, is_open=True, is_separate=True)
    pieces = ["So", " 4", " <", "b", "\n</thi", "nk>", "\nIt"]
    given = [reader.push(piece) for piece in pieces]
    so, four, less, answer = ReasoningPart("So"), ReasoningPart(" 4"), ReasoningPart(" <b"), TextPart("It")
    assert given == [[so], [four], [], [less], [], [], [answer]]


PIECES = [b"<think>", b"</think>", b"</", b"think", b">", b" ", b"a", b"<", "\u00e9".encode()[:1], b"a</think>b"]


@pytest.mark.parametrize(
    ("ids", "is_open", "number"),
    [
        ([0, 6, 6, 1, 6], False, 4),  # its tags are counted
        ([6, 6, 1, 6], True, 3),
        ([6, 2, 3, 4, 6], True, 4),  # the end tag in three tokens
        ([5, 7, 3, 4, 6, 1, 6], False, 6),  # the begin tag too, behind a space
        ([6, 0, 6, 1], False, 0),
        ([7, 6, 0, 1], False, 0),
        ([5, 5, 5], False, 0),
        ([0, 6, 8, 99, 6], False, 5),  # it never ends
        ([6, 9, 6, 6], True, 2),  # a token that is both is reasoning
        ([1, 6], True, 1),
        ([], True, 0),
    ],
)
def test_reasoning_tokens_are_counted_from_the_ids_however_they_come(
    ids: list[int], is_open: bool, number: int
) -> None:
    for size in range(1, len(ids) + 2):
        count = ReasoningCount(PIECES, THINK, is_open=is_open)
        for start in itertools.count(0, size):
            if start >= len(ids):
                break
            count.consume(ids[start : start + size])
        assert count.num_tokens == number


def test_tokens_are_counted_between_tags_that_are_not_ascii_and_cut_within_a_character() -> None:
    form = ReasoningFormat(begin="◁think▷", end="◁/think▷")
    pieces = [bytes([byte]) for byte in range(256)]
    count = ReasoningCount(pieces, form, is_open=False)
    count.consume("◁think▷hm◁/think▷yes".encode())
    assert count.num_tokens == len("◁think▷hm◁/think▷".encode())


MEANT = "<|channel|>analysis<|message|>So 4 < 5.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
COMMENT = "<|start|>assistant<|channel|>commentary"
ASKED = f'{COMMENT} to=functions.f <|constrain|>json<|message|>{{"a":  1}}'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        # as in OpenAI's description of the format, each behind a prompt that ends with <|start|>assistant
        (f"{MEANT}{FINAL}2 + 2 = 4.<|return|>", [("think", "So 4 < 5."), "2 + 2 = 4."]),
        (f"{MEANT}{ASKED}<|call|>", [("think", "So 4 < 5."), ("f", '{"a":  1}')]),
        (f"{MEANT}{ASKED}", [("think", "So 4 < 5."), ("f", '{"a":  1}')]),  # <|call|> ends the text, and is no part
        (
            f"{MEANT}{COMMENT}<|message|>I look it up.<|end|>{ASKED}",
            [("think", "So 4 < 5."), "I look it up.", ("f", '{"a":  1}')],
        ),
        (
            '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>',
            [("f", '{"a": 1}')],
        ),
        (" to=functions.get-x<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", [("get-x", "{}")]),
        (f"{ASKED}<|call|>{ASKED}<|call|>", [("f", '{"a":  1}'), ("f", '{"a":  1}')]),
        (f"{COMMENT} to=python<|message|>x<|call|>", [("python", "x")]),  # a tool that no one gave is a call, too
        (f"{COMMENT} to=functions.f<|message|><|call|>", [("f", "{}")]),
        ("<|channel|>final<|message|>Yes.", ["Yes."]),
        ("<|channel|>final<|message|>a<|end|>" + f"{FINAL}b", ["a\nb"]),
        (f"{MEANT}<|start|>assistant{MEANT}", [("think", "So 4 < 5.\nSo 4 < 5.")]),
        (f'{MEANT}{{"a": 1}}', [("think", "So 4 < 5."), '{"a": 1}']),  # held to a form behind its reasoning
        ("It goes on <b>here</b>.", ["It goes on <b>here</b>."]),
        (" to", [" to"]),
        (" total", [" total"]),
        ("<", ["<"]),
        ("<|channel|>fin", []),
        ("", []),
    ],
)
def test_harmony_is_read_message_by_message(text: str, parts: list[Short]) -> None:
    for pieces in ([text], text):
        assert read(HarmonyReader({}, is_open=False, is_separate=True), pieces) == parts


def test_harmony_that_goes_on_in_its_reasoning_or_is_not_told_apart_or_has_no_tools() -> None:
    text = f"o 4.<|end|>{ASKED}"
    for pieces in ([text], text):
        goes_on = HarmonyReader({}, is_open=True, is_separate=True)
        assert read(goes_on, pieces) == [("think", "o 4."), ("f", '{"a":  1}')]
    for pieces in ([f"{MEANT}{FINAL}a"], f"{MEANT}{FINAL}a"):
        assert read(HarmonyReader(None, is_open=False, is_separate=False), pieces) == [f"{MEANT}a"]
    assert read(HarmonyReader(None, is_open=False, is_separate=True), [ASKED]) == ['{"a":  1}']


def test_a_call_in_harmony_that_a_limit_cuts_before_its_arguments_is_not_told() -> None:
    reader = HarmonyReader({}, is_open=False, is_separate=True)
    assert reader.push(f"{COMMENT} to=functions.f<|message|>") == []
    assert reader.end(is_cut=True) == []


def test_harmony_comes_as_it_is_generated_and_its_reasoning_is_counted() -> None:
    reader = HarmonyReader({}, is_open=False, is_separate=True)
    pieces = ["<|channel|>", "analysis", "<|message|>", "So", " 4", "<|end|>", "<|start|>", "assistant", "<|channel|>",
              "final", "<|message|>", "It", " is"]  # fmt: skip
    given = [reader.push(piece) for piece in pieces]
    told = {3: ReasoningPart("So"), 4: ReasoningPart(" 4"), 11: TextPart("It"), 12: TextPart(" is")}
    assert given == [[told[i]] if i in told else [] for i in range(len(pieces))]
    count = ReasoningCount([piece.encode() for piece in pieces], HARMONY, is_open=False)
    count.consume(range(len(pieces)))
    assert count.num_tokens == 6
