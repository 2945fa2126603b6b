"""Detokenizer: deltas that add up, characters that stay whole, stop strings that never leak (SPEC I03)."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_folders import byte_fallback_folder, byte_level_folder

from replicas.text.detokenizer import Detokenizer, token_texts
from replicas.text.tokenizer import Tokenizer
from replicas.types import SamplingParams


class Spelling:
    """A vocabulary whose token i is the i-th given piece."""

    strips_leading_space = False

    def __init__(self, *pieces: str | bytes) -> None:
        self._pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def pieces(self, skip_special_tokens: bool) -> Sequence[bytes]:
        return self._pieces


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return [Tokenizer(byte_level_folder(folder / "level")), Tokenizer(byte_fallback_folder(folder / "fallback"))]


def texts_of_pushes(detok: Detokenizer, num_ids: int) -> list[str]:
    """Push ids 0, 1, ... one by one up to a match; what each gave, and the flush."""
    texts = []
    for i in range(num_ids):
        delta = detok.push([i])
        detok.check()
        texts.append(delta.text)
        if delta.matched_stop is not None:
            break
    return [*texts, detok.flush()]


def cut_at_stop(text: str, stops: Sequence[str], *, include_stop: bool) -> tuple[str, str | None]:
    """The plain definition: the shortest beginning of ``text`` that ends with a stop, without the longest such stop."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


def test_the_texts_of_tokens_join_to_the_text_and_no_character_is_cut() -> None:
    pieces = Spelling(b"a\xf0", b"\x9f", b"\x99\x82b", "<|end|>", b"\xe2")
    assert token_texts(pieces, [0, 1, 2, 3, 4]) == ["a", "", "\U0001f642b", "<|end|>", "\ufffd"]
    assert token_texts(pieces, []) == []


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_ends_no_text_before_its_least_ids(include_stop: bool) -> None:
    """vLLM's min_tokens: what the first ids complete is text, what a later id completes ends it, wherever it began."""
    spelling = Spelling("a", "bc", "x", "ab", "c", "z")
    for min_ids, shown, used in ((0, "", 2), (1, "", 2), (2, "abcx", 5), (4, "abcx", 5), (5, "abcxabcz", 6)):
        for cut in range(1, 7):
            sampling = SamplingParams(
                stop=("abc",), include_stop=include_stop, min_new_tokens=min_ids, min_holds_stops=True
            )
            detok, text, num_used, matched = Detokenizer.of(sampling, spelling), "", 0, None
            for ids in (range(6)[:cut], range(6)[cut:]):
                if ids and matched is None:
                    delta = detok.push(list(ids))
                    detok.check()
                    text, num_used, matched = text + delta.text, num_used + delta.num_ids_used, delta.matched_stop
            assert (text + detok.flush(), num_used) == (shown + "abc" * (include_stop and matched is not None), used)


def test_sglangs_least_leaves_stop_strings_alone() -> None:
    sampling = SamplingParams(stop=("b",), min_new_tokens=4)
    assert Detokenizer.of(sampling, Spelling("a", "b")).push([0, 1, 0]).matched_stop == "b"


def test_an_unfinished_character_is_held_back_and_given_whole() -> None:
    pieces = Spelling(b"a\xf0", b"\x9f", b"\x99", b"\x82b")
    assert texts_of_pushes(Detokenizer(pieces), 4) == ["a", "", "", "🙂b", ""]


def test_a_possible_beginning_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    pieces = Spelling("Hello\n", "\nUs", "ual\n", "\n")
    detok = Detokenizer(pieces, stop=("\n\nUser:",))
    assert texts_of_pushes(detok, 4) == ["Hello", "", "\n\nUsual", "", "\n\n"]


def test_a_stop_inside_a_push_tells_how_many_ids_it_took() -> None:
    detok = Detokenizer(Spelling("a", "b", "c", "d"), stop=("bc",))
    delta = detok.push([0, 1, 2, 3])
    assert (delta.text, delta.matched_stop, delta.num_ids_used) == ("a", "bc", 3)
    with pytest.raises(AssertionError, match="after the stop string 'bc'"):
        detok.push([3])


def test_the_stop_that_is_completed_first_wins_and_of_those_the_longest() -> None:
    assert Detokenizer(Spelling("xabcd"), stop=("abcd", "bc")).push([0]).matched_stop == "bc"
    assert Detokenizer(Spelling("xabcd"), stop=("bc", "abc", "c")).push([0]).matched_stop == "abc"


def test_special_tokens_show_only_when_asked_and_so_do_stops_in_them(tokenizers: list[Tokenizer]) -> None:
    ids = tokenizers[0].encode("the<|end|>the")
    assert Detokenizer(tokenizers[0], stop=("<|end|>",)).push(ids).text == "thethe"
    assert Detokenizer(tokenizers[0], skip_special_tokens=False).push(ids).text == "the<|end|>the"
    assert Detokenizer(tokenizers[0], stop=("<|end|>",), skip_special_tokens=False).push(ids).text == "the"


def test_ids_of_a_padded_vocabulary_add_nothing() -> None:
    assert Detokenizer(Spelling("a")).push([0, 7, -1, 0]).text == "aa"


def test_a_fresh_detokenizer_repeats_what_was_delivered_and_goes_on(tokenizers: list[Tokenizer]) -> None:
    """Resume on another replica: it replays the delivered ids, drops their text, and continues."""
    ids = tokenizers[0].encode("the 🙂 theme\n\nthen").tolist()
    for cut in range(len(ids)):
        first, second = (Detokenizer(tokenizers[0], stop=("\n\n\n",)) for _ in range(2))
        delivered = "".join(first.push([i]).text for i in ids[:cut])
        assert second.push(ids[:cut]).text == delivered
        assert delivered + second.push(ids[cut:]).text + second.flush() == "the 🙂 theme\n\nthen"


def test_work_for_a_token_does_not_grow_with_the_text() -> None:
    """O(new tokens): no more is held than the longest stop string, however long the text."""
    detok = Detokenizer(Spelling("ab", "ba"), stop=("abababc",))
    for i in range(2000):
        detok.push([i % 2])
        detok.check()
        assert len(detok._held) < len("abababc")


def test_the_largest_allowed_stop_strings_are_one_automaton_shared_by_all_choices() -> None:
    stops = tuple("x" * 500 + f"{i:02d}" + "y" * 522 for i in range(64))
    first, second = Detokenizer(Spelling("x"), stop=stops), Detokenizer(Spelling("x"), stop=stops)
    assert first._stops is second._stops
    assert first.push([0] * 800).text == "x" * 300


text_parts = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="ab the\n", max_size=12),
    st.sampled_from(["你好世界", "🙂👩‍👩‍👧🇩🇪", "é" * 3, "\u202e\u0000", "<|end|>", "über tool", "▁", "�"]),
)
ids_parts = st.lists(st.integers(0, 330), max_size=8)  # any ids: broken characters too


@settings(max_examples=300, deadline=None)
@given(
    family=st.integers(0, 1),
    parts=st.lists(st.one_of(text_parts, ids_parts), min_size=1, max_size=5),
    stops=st.lists(st.text(alphabet="ab the\n好🙂�", min_size=1, max_size=4), max_size=4),
    include_stop=st.booleans(),
    skip=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_deltas_add_up_to_the_decoded_text_cut_at_the_stop(
    tokenizers: list[Tokenizer],
    family: int,
    parts: list[str | list[int]],
    stops: list[str],
    include_stop: bool,
    skip: bool,
    seed: int,
) -> None:
    """SPEC I03, for any ids, stops and cutting into pushes; what was emitted is always a beginning of the text."""
    tokenizer, rng = tokenizers[family], random.Random(seed)
    ids = [i for part in parts for i in (tokenizer.encode(part).tolist() if isinstance(part, str) else part)]
    wanted, wanted_stop = cut_at_stop(tokenizer.decode(ids, skip), stops, include_stop=include_stop)

    detok = Detokenizer(tokenizer, stop=tuple(stops), include_stop=include_stop, skip_special_tokens=skip)
    emitted, matched, at = "", None, 0
    while at < len(ids) and matched is None:
        chunk = ids[at : at + rng.randint(1, 4)]
        delta = detok.push(chunk)
        detok.check()
        emitted, matched = emitted + delta.text, delta.matched_stop
        assert wanted.startswith(emitted)
        assert 0 < delta.num_ids_used <= len(chunk)
        at += delta.num_ids_used
    emitted += detok.flush()
    assert emitted == wanted
    if matched is not None:
        assert matched == wanted_stop
        used = tokenizer.decode(ids[:at], skip)
        assert any(stop in used for stop in stops)
        assert not any(stop in tokenizer.decode(ids[: at - 1], skip).rstrip("�") for stop in stops if "�" not in stop)
