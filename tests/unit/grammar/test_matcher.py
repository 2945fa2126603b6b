"""Matchers over the embedded model's tokenizer: what may come next, what must, where an output may end."""

import functools
import json
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from replicas.errors import InvalidRequest
from replicas.grammar import compiler as compilers
from replicas.grammar import matcher as matchers
from replicas.grammar.compiler import GrammarCompiler
from replicas.grammar.matcher import Matcher, Words
from replicas.text.tokenizer import Tokenizer
from replicas.types import Constraint
from tests.embedded import MODEL

VOCAB = 49_152
PADDED = 49_200  # logits may have more columns than the tokenizer has ids
SCHEMA = json.dumps({
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
})  # fmt: skip


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL)


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), PADDED)


def regex(text: str, *, after: str = "") -> Matcher:
    return compiler().compile(Constraint(kind="regex", text=text, after=after))


def allowed(matcher: Matcher) -> list[int]:
    row = np.empty(-(-PADDED // 32), np.int32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).tolist()


def eos() -> set[int]:
    return set(tokenizer().eos_ids)


def feed(matcher: Matcher, text: str) -> bool:
    return all(matcher.consume(token) for token in ids(text))


def test_every_token_of_a_valid_document_is_allowed_and_only_its_end_allows_eos() -> None:
    matcher = compiler().compile(Constraint(kind="json_schema", text=SCHEMA))
    for token in ids('{"name": "Ann", "age": 7}'):
        assert token in allowed(matcher)
        assert not eos() & set(allowed(matcher))
        assert not matcher.is_accepting
        assert matcher.consume(token)
    assert matcher.is_accepting
    assert set(allowed(matcher)) == eos()


def test_a_token_that_the_mask_does_not_allow_is_refused_and_nothing_is_allowed_after_it() -> None:
    matcher = regex("[0-9]+")
    (letter,) = ids("x")
    assert letter not in allowed(matcher)
    assert not matcher.consume(letter)
    assert matcher.error is not None
    assert allowed(matcher) == []
    assert not matcher.is_accepting
    assert not matcher.consume(ids("1")[0])


def test_ids_beyond_the_tokenizer_are_never_allowed() -> None:
    assert max(allowed(regex("(?s:.*)"))) < tokenizer().vocab_size <= VOCAB
    assert not regex("(?s:.*)").consume(VOCAB + 3)


def test_what_is_forced_is_the_only_token_of_the_mask() -> None:
    matcher, forced = regex("Hello my dear friends, (yes|no)"), []
    while not matcher.is_accepting:
        only = matcher.forced()
        if only is not None:
            assert allowed(matcher) == [only]
            forced.append(only)
        assert matcher.consume(allowed(matcher)[-1] if only is None else only)
    assert tokenizer().decode(forced).startswith("Hello my dear")


def test_a_copy_goes_its_own_way() -> None:
    first = regex("ab|ac")
    assert feed(first, "a")
    second = first.copy()
    assert feed(first, "b")
    assert feed(second, "c")
    assert first.is_accepting
    assert second.is_accepting


def test_a_stop_id_is_allowed_exactly_where_the_grammar_accepts() -> None:
    (stop,) = ids("Z")
    matcher = regex("Z?[0-9]+").copy(frozenset({stop}))
    assert stop not in allowed(matcher)  # the grammar's own Z would end the output
    assert feed(matcher, "4")
    assert stop in allowed(matcher)
    assert matcher.consume(stop)
    assert matcher.error is None


def test_a_grammar_that_begins_later_allows_everything_before_but_an_end() -> None:
    """An output that ends in its thought has no document; it may where the grammar takes an empty text."""
    (stop,) = ids("Z")
    matcher = regex("[0-9]+", after="</think>").copy(frozenset({stop}))
    for text in ("7 of them <think/> </thin", "k>"):
        assert not matcher.is_accepting
        assert set(range(VOCAB)) - set(allowed(matcher)) == {*eos(), stop}
        assert feed(matcher, text)
    free = regex("[0-9]*", after="</think>")
    assert free.is_accepting
    assert free.words() is None
    assert not matcher.is_accepting
    assert ids("x")[0] not in allowed(matcher)
    assert feed(matcher, "12")
    assert matcher.is_accepting


def test_an_output_that_may_begin_with_a_thought_is_held_to_the_grammar_where_it_does_not() -> None:
    (opens,) = ids("!")
    whole = Constraint(kind="regex", text="[0-9]+", after="</think>", opens="!")
    thinks, answers = compiler().compile(whole), compiler().compile(whole)
    assert thinks.forced() is None
    begins = {i for i in range(tokenizer().vocab_size) if tokenizer().token_bytes(i).startswith(b"!")}  # "!!" too
    assert set(allowed(thinks)) == {*allowed(regex("[0-9]+")), *begins}
    assert thinks.consume(opens)
    assert feed(thinks, "any words</think>")
    assert allowed(thinks) == allowed(regex("[0-9]+"))
    assert feed(answers, "12")
    assert not answers.consume(opens)
    assert compiler().compile(whole).copy().consume(opens)


@pytest.mark.parametrize("masked", ["alone", "together"])
def test_a_thought_may_begin_with_a_tag_of_several_tokens(masked: str) -> None:
    """While only a part of the tag has come, both ways are open; what the grammar does not take closes its own."""
    tag = ids("<think>")
    assert len(tag) > 2
    whole = Constraint(kind="regex", text="<b>[0-9]+|[0-9]+", after="</think>", opens="<think>")
    thinks, answers, tagged = (compiler().compile(whole) for _ in range(3))
    for number, token in enumerate(tag):
        if masked == "together":
            thinks.begin_masks([answers])
        assert thinks.words() is not None
        assert token in allowed(thinks)
        assert (ids("1")[0] in allowed(thinks)) == (number == 0)
        assert not eos() & set(allowed(thinks))
        assert not thinks.copy().consume(ids("x")[0])
        assert (thinks.error, thinks.forced()) == (None, None)
        assert thinks.consume(token)
    assert feed(thinks, "<b>x 4</think>")
    assert allowed(thinks) == allowed(regex("<b>[0-9]+|[0-9]+"))  # its beginning: what came of the tag is not its
    assert feed(thinks, "<b>12")
    assert thinks.is_accepting
    assert feed(answers, "12")
    assert answers.is_accepting
    assert feed(tagged, "<")
    assert {*ids("b"), *ids("think")} <= set(allowed(tagged))
    assert feed(tagged, "b>7")
    assert tagged.is_accepting


@pytest.mark.parametrize(("pattern", "rest"), [("[a-z]+", "2"), ("k?[0-9]", "2"), ("[0-9]{2}", "12")])
def test_more_text_in_the_token_where_it_begins_is_taken_if_it_can_be(pattern: str, rest: str) -> None:
    """The token " think" ends ``after`` and has "ink" left: no grammar here but the first takes that."""
    matcher = regex(pattern, after="th")
    (token,) = ids(" think")
    assert matcher.consume(token)
    if pattern == "[a-z]+":
        assert matcher.is_accepting
    else:
        assert feed(matcher, rest)
        assert matcher.is_accepting


def test_masks_that_another_thread_computed_are_those_of_fill() -> None:
    made = [regex("[0-9]+"), regex("[a-z]+"), regex("x?", after="!"), regex("(yes|no)")]
    wanted = [allowed(each) for each in made]
    made[0].begin_masks(made[1:])
    for each, expected in zip(made, wanted, strict=True):
        words = each.words()
        assert (words is None) == (len(expected) >= VOCAB)
        if words is not None:
            assert np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist() == expected
    assert made[0].consume(ids("1")[0])
    assert made[0].words() is not None  # of the new place: computed now


def test_a_token_is_not_taken_in_while_another_thread_computes_the_mask() -> None:
    waited = []

    class Filling(Future[Words]):
        def exception(self, timeout: float | None = None) -> None:
            waited.append(timeout)

    matcher = regex("[0-9]+")
    matcher._filling = Filling(), 0
    assert matcher.consume(ids("1")[0])
    assert waited == [None]


def test_a_panic_while_a_mask_is_computed_ends_that_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As pyo3 raises a panic of Rust."""

    class Core:
        def is_error(self) -> bool:
            return False

        def unsafe_compute_mask_ptr(self, *_: int) -> None:
            raise Panic("index out of bounds")

    matcher = regex("[0-9]+")
    monkeypatch.setattr(matcher, "_core", Core())
    assert allowed(matcher) == []
    assert matcher.error == "no mask can be computed: Panic('index out of bounds')"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(a", "unclosed group"),
        ("lark", "start: x", "unknown name"),
        ("json_schema", '{"type": "wrong"}', "type"),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_refused_with_its_reason(kind: str, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        compiler().compile(Constraint(kind=kind, text=text))  # type: ignore[arg-type]


@pytest.mark.parametrize("bomb", ["(a|b)*a(a|b){20}", "(.*a){25}", "([a-z]{1,1000}){1,100}", "([a-z]{1,5000}){1,5000}"])
def test_a_regex_that_others_stall_on_is_followed_or_refused(bomb: str) -> None:
    """Whichever limit ends it, it ends: an error instead of a stall, and a thread that waits for it gets an answer."""
    try:
        matcher = regex(bomb)
    except InvalidRequest:
        return
    text = "ab" * 40
    walk = threading.Thread(target=lambda: [allowed(matcher) and matcher.consume(t) for t in ids(text)], daemon=True)
    walk.start()
    walk.join(timeout=60)
    assert not walk.is_alive()


def test_the_cache_gives_what_was_compiled_and_stays_within_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = GrammarCompiler(tokenizer(), VOCAB)
    wanted = Constraint(kind="regex", text="a+")
    assert made.cached(wanted) is None
    assert feed(made.compile(wanted), "a")
    again = made.cached(wanted)
    assert again is not None
    assert not again.is_accepting  # a copy from the beginning
    monkeypatch.setattr(compilers, "CACHE_BYTES", 3 * (70 << 10))
    for number in range(5):
        made.compile(Constraint(kind="regex", text=f"b{{{number}}}c"))
    assert made.cached(wanted) is None
    assert made.cached(Constraint(kind="regex", text="b{4}c")) is not None
    assert made._num_bytes <= 3 * (70 << 10)
    monkeypatch.setattr(compilers, "CACHE_BYTES", 1)
    made.compile(wanted)
    assert made.cached(wanted) is not None  # one that is larger than all others may be is kept alone


def test_a_mask_costs_nothing_before_its_grammar_begins_and_one_that_is_dropped_is_not_computed() -> None:
    """Thinking is charged to nobody and keeps no step from the next."""
    thinks = regex("[0-9]+", after="</think>")
    assert feed(thinks, "some words")
    assert (thinks.mask_s, thinks.due_s) == (0.0, 0.0)
    assert feed(thinks, "</think>")
    assert thinks.mask_s == thinks.due_s > 0
    busy = threading.Event()
    matchers._APART.submit(busy.wait)  # the thread does something else
    thinks.begin_masks((), apart=True)
    assert thinks.is_pending
    assert thinks._filling is not None
    mask = thinks._filling[0]
    thinks.drop()
    busy.set()
    assert not thinks.is_pending
    assert mask.cancelled()
    assert thinks.words() is None  # a step that was launched before its end samples it all the same
