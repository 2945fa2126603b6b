"""Sampler: each cut and penalty against its plain definition, the distribution, and that a row never sees its batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.errors import InvalidRequest
from replicas.runner.device_draw import HEAD
from replicas.runner.sampler import Sampler, edit_logits, uniform
from replicas.scheduler.plan import BROKEN, SampleRow
from replicas.types import SamplingParams


def row(
    *,
    position: int = 0,
    num_output: int = 0,
    stop_ids: Sequence[int] = (),
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    return_logprobs: bool = False,
    top_logprobs: int = 0,
    **params: Any,
) -> SampleRow:
    return SampleRow(
        params=SamplingParams(**params),
        position=position,
        num_output=num_output,
        stop_ids=frozenset(stop_ids),
        prompt_ids=np.array(prompt, dtype=np.int32),
        output_ids=np.array(output, dtype=np.int32),
        return_logprobs=return_logprobs,
        top_logprobs=top_logprobs,
    )


def draws(logits: torch.Tensor, num: int, **params: Any) -> np.ndarray:
    """[num] tokens of one logits row under seeds 0, 1, ..., in batches of 512."""
    sampler, found = Sampler(len(logits), "cpu"), []
    for first in range(0, num, 512):
        rows = [row(seed=seed, position=3, **params) for seed in range(first, min(first + 512, num))]
        found.append(sampler.sample(logits.expand(len(rows), -1), rows)[0])
    return np.concatenate(found)


def reference_probs(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """What the docstring of sampler.py says, for one row, one token at a time."""
    x = logits.double().numpy() / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    kept, before = np.zeros(len(p)), 0.0
    for rank, token in enumerate(sorted(range(len(p)), key=lambda t: (-p[t], t))):
        if rank < (top_k or len(p)) and (top_p == 1.0 or before < top_p) and p[token] >= min_p * p.max():
            kept[token] = p[token]
        before += p[token]
    return kept / kept.sum()


def assert_distribution(tokens: np.ndarray, probs: np.ndarray) -> None:
    """Chi-square at five standard deviations; tokens expected less than 10 times count together."""
    expected, seen = probs * len(tokens), np.bincount(tokens, minlength=len(probs)).astype(float)
    assert not seen[probs == 0].any(), f"tokens {np.flatnonzero(seen * (probs == 0))} were cut off"
    rare = expected < 10
    expected = np.append(expected[~rare], expected[rare].sum())
    seen = np.append(seen[~rare], seen[rare].sum())
    present = expected > 0
    chi2 = float(((seen - expected)[present] ** 2 / expected[present]).sum())
    freedom = max(int(present.sum()) - 1, 1)
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5, f"chi-square {chi2:.1f} with {freedom} degrees of freedom"


def test_greedy_takes_the_largest_logit_and_of_equals_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 2.0], [0.0, 5.0, 5.0]])
    tokens, logprobs = Sampler(3, "cpu").sample(logits, [row(temperature=0.0), row(temperature=0.0), row(top_k=1)])
    assert tokens.tolist() == [1, 0, 1]
    assert tokens.dtype == np.int32
    assert logprobs == ()


def test_a_nearly_zero_temperature_is_the_largest_logit() -> None:
    logits = torch.tensor([-1000.0, 7.0, 6.99, 0.0])
    assert set(draws(logits, 64, temperature=1e-30)) == {1}


@pytest.mark.parametrize(
    "cuts",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.1},
    ],
    ids=str,
)
def test_samples_follow_the_distribution_of_the_definition(cuts: dict[str, Any]) -> None:
    logits = torch.tensor([0.1, 2.0, -1.0, 1.5, 0.7, 1.0, -3.0, 0.3])
    assert_distribution(draws(logits, 8_000, **cuts), reference_probs(logits, **cuts))


@pytest.mark.parametrize(
    "cuts", [{}, {"top_k": 50}, {"top_k": 200}, {"top_p": 0.5}, {"top_p": 0.97}, {"min_p": 0.02}], ids=str
)
def test_the_distribution_holds_when_it_reaches_below_the_head(cuts: dict[str, Any]) -> None:
    """A flat vocabulary of 1,000: most of the mass lies below the HEAD most likely tokens."""
    logits = torch.randn(1_000, generator=torch.Generator().manual_seed(1))
    probs = reference_probs(logits)
    assert np.sort(probs)[-HEAD:].sum() < 0.4
    assert_distribution(draws(logits, 4_000, **cuts), reference_probs(logits, **cuts))


def test_top_p_counts_probability_before_top_k() -> None:
    """Of 0.4, 0.3, 0.3: top-p 0.5 keeps two tokens; within what top-k 2 leaves, it would keep one."""
    logits = torch.log(torch.tensor([0.4, 0.3, 0.3]))
    assert set(draws(logits, 200, top_k=2, top_p=0.5)) == {0, 1}


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_never_none() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.25]))
    assert set(draws(logits, 100, top_p=0.5)) == {0}
    assert set(draws(logits, 100, top_p=1e-9)) == {0}
    assert set(draws(logits, 300, top_p=0.76)) == {0, 1, 2}


def test_equals_at_the_edge_of_a_cut_are_kept_from_the_lowest_id() -> None:
    logits = torch.zeros(500)
    assert set(draws(logits, 400, top_k=3)) == {0, 1, 2}
    assert set(draws(logits, 400, top_p=0.0079)) == {0, 1, 2, 3}
    logits[400] = 1.0
    assert set(draws(logits, 400, top_k=3)) == {400, 0, 1}
    logits[100:140] = 1.0
    assert set(draws(logits, 400, top_k=3)) == {100, 101, 102}


def test_masked_logits_are_never_drawn() -> None:
    logits = torch.full((500,), -torch.inf)
    logits[[7, 300]] = torch.tensor([1.0, 1.0])
    for cuts in ({}, {"top_p": 0.99}, {"top_k": 400}, {"min_p": 0.1}):
        assert set(draws(logits, 100, **cuts)) == {7, 300}


def test_the_same_seed_and_position_give_the_same_token_and_others_do_not() -> None:
    logits = torch.zeros(4, 1_000)
    rows = [row(seed=1, position=5), row(seed=1, position=5), row(seed=2, position=5), row(seed=1, position=6)]
    first = Sampler(1_000, "cpu").sample(logits, rows)[0].tolist()
    assert first[0] == first[1]
    assert len(set(first)) == 3
    assert Sampler(1_000, "cpu").sample(logits, rows)[0].tolist() == first


def test_consecutive_positions_and_seeds_are_independent() -> None:
    """A run of tokens under one seed is as good a sample as one position under many seeds; pairs are, too."""
    logits = torch.tensor([0.0, 0.0, 0.0, 0.0])
    rows = [row(seed=11, position=position) for position in range(8_000)]
    tokens = Sampler(4, "cpu").sample(logits.expand(8_000, -1), rows)[0]
    assert_distribution(tokens, np.full(4, 1 / 4))
    assert_distribution(tokens[:-1] * 4 + tokens[1:], np.full(16, 1 / 16))


def test_the_random_numbers_stay_what_they_are() -> None:
    """A resumed request must draw on another replica, or after an upgrade, what it would have drawn here."""
    coordinates = [[0, 1, 2**63 - 1], [0, 2, 10**6], [0, 3, 49_151]]
    numbers = uniform(*(np.array(each, dtype=np.uint64) for each in coordinates))
    assert numbers.round(12).tolist() == [0.338052454196, 0.555151860385, 0.961314648325]


cut_params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([None, 1, 5, 64, 65, 150]),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "seed": st.integers(0, 2**63 - 1),
        "position": st.integers(0, 10_000),
        "frequency_penalty": st.sampled_from([0.0, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
    }
)


@settings(max_examples=60, deadline=None)
@given(params=st.lists(cut_params, min_size=1, max_size=8), data=st.data())
def test_a_rows_token_does_not_depend_on_its_batch(params: list[dict[str, Any]], data: st.DataObject) -> None:
    """Same answer: alone, in any batch, in any order; and the sampler keeps no state."""
    logits = torch.randn(len(params), 203, generator=torch.Generator().manual_seed(len(params)))
    sampler = Sampler(203, "cpu")
    rows = [row(**each, prompt=[1, 2], output=[3, 3]) for each in params]
    together, _ = sampler.sample(logits, rows)
    alone = [int(sampler.sample(logits[i : i + 1], rows[i : i + 1])[0][0]) for i in range(len(rows))]
    assert together.tolist() == alone
    order = data.draw(st.permutations(range(len(rows))))
    assert sampler.sample(logits[order], [rows[i] for i in order])[0].tolist() == [alone[i] for i in order]


@settings(max_examples=100, deadline=None)
@given(params=cut_params, vocab_size=st.integers(2, 200), scale=st.sampled_from([0.1, 1.0, 5.0]))
def test_a_token_is_never_outside_the_cuts(params: dict[str, Any], vocab_size: int, scale: float) -> None:
    params = params | {"frequency_penalty": 0.0, "repetition_penalty": 1.0}
    generator = torch.Generator().manual_seed(params["seed"] % 2**31)
    logits = torch.randn(vocab_size, generator=generator) * scale
    token = int(Sampler(vocab_size, "cpu").sample(logits[None], [row(**params)])[0][0])
    cuts = {name: params[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    if cuts["temperature"] == 0.0 or cuts["top_k"] == 1:
        assert token == int(logits.argmax())
    else:
        assert reference_probs(logits, **cuts)[token] > 0


def test_rounding_of_the_logits_hardly_ever_changes_a_draw() -> None:
    """A cache hit gives logits that differ by rounding. By inverse CDF, about one of 100 such draws would change."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(256, 5_000, generator=generator) * 2
    rows = [row(seed=i, position=i) for i in range(256)]
    sampler = Sampler(5_000, "cpu")
    tokens, _ = sampler.sample(logits, rows)
    for _ in range(8):
        rounded = logits + torch.randn(logits.shape, generator=generator) * 1e-5
        assert (sampler.sample(rounded, rows)[0] == tokens).sum() >= 255


NEVER = -np.inf
WORDS = ((2,), (0, 1, 3))  # (2,) is always masked; 3 behind 0, 1
ADDED = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25, "logit_bias": ((0, 10.0),)}
LATE_STOP = {"stop_ids": [1], "min_new_tokens": 3, "logit_bias": ((1, 100.0),)}
ALLOWED = {"allowed_token_ids": (1, 2), "logit_bias": ((0, 100.0), (2, 5.0)), "stop_ids": [1], "min_new_tokens": 1}
LEFT = {"allowed_token_ids": (1, 2), "stop_ids": [1], "min_new_tokens": 3, "bad_words": ((0, 2),)}
EDITS: dict[str, tuple[list[float], dict[str, Any], list[float]]] = {
    "a repetition penalty divides positive and multiplies negative logits of all seen tokens": (
        [2, -2, 2, 0], {"prompt": [0, 0], "output": [1, 3], "repetition_penalty": 2.0}, [1, -4, 2, 0]),
    "a frequency penalty counts each output token": (
        [1, 1, 1], {"prompt": [2], "output": [0, 0, 0, 1], "frequency_penalty": 0.5}, [-0.5, 0.5, 1]),
    "a presence penalty counts a token once": (
        [1, 1, 1], {"prompt": [2], "output": [0, 0, 0, 1], "presence_penalty": 0.5}, [0.5, 0.5, 1]),
    "penalties and bias add up after the repetition penalty: 4 / 2 - (2 * 0.5 + 0.25) + 10": (
        [4, 4], {"output": [0, 0], **ADDED}, [10.75, 4]),
    "a stop id is masked before min_new_tokens, even against a bias": (
        [0, 0], {"num_output": 2, **LATE_STOP}, [0, NEVER]),
    "and not from min_new_tokens on": ([0, 0], {"num_output": 3, **LATE_STOP}, [0, 100]),
    "min_new_tokens gives way when every token is a stop id": (
        [1, 0], {"stop_ids": [0, 1], "min_new_tokens": 3}, [1, 0]),
    "only allowed tokens keep their logits": ([3, 2, 1, 0], {"allowed_token_ids": (3, 1)}, [NEVER, 2, NEVER, 0]),
    "whatever else is asked for": ([3, 2, 1, 0], ALLOWED, [NEVER, NEVER, 6, NEVER]),
    "a stop id is masked while another token is left": (
        [0, 1, 2], {"output": [1], "num_output": 1, **LEFT}, [NEVER, NEVER, 2]),
    "and not when none is left": ([0, 1, 2], {"output": [0], "num_output": 1, **LEFT}, [NEVER, 1, NEVER]),
    "a bad word of one token is always masked": ([0] * 4, {"bad_words": WORDS}, [0, 0, NEVER, 0]),
    "a prompt does not begin a bad word": ([0] * 4, {"bad_words": WORDS, "prompt": [0, 1]}, [0, 0, NEVER, 0]),
    "nor does a part of it": ([0] * 4, {"bad_words": WORDS, "output": [1]}, [0, 0, NEVER, 0]),
    "an output that ends with all but its last token does": (
        [0] * 4, {"bad_words": WORDS, "output": [3, 0, 1]}, [0, 0, NEVER, NEVER]),
    "one that has gone on does not": ([0] * 4, {"bad_words": WORDS, "output": [0, 1, 0]}, [0, 0, NEVER, 0]),
}  # fmt: skip


@pytest.mark.parametrize("case", EDITS)
def test_logits_are_edited_by(case: str) -> None:
    """In a batch beside a row that asks for nothing; the logits themselves stay, since logprobs are read from them."""
    logits, what, wanted = EDITS[case]
    base = torch.tensor([logits, logits], dtype=torch.float32)
    result = edit_logits(base, [row(), row(**what)])
    assert base.tolist() == [logits, logits]
    assert result[0].tolist() == logits
    assert [round(value, 4) for value in result[1].tolist()] == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
def test_host_and_device_draw_one_of_the_tokens_that_masks_leave(temperature: float, cuts: dict[str, Any]) -> None:
    """Two of 500 tokens, fewer than the head of the draw: both are drawn, alike on both, and no other."""
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(5)).expand(16, -1)
    masks = {"allowed_token_ids": (7, 400, 450), "bad_words": ((3, 450), (7, 8))}
    rows = [row(seed=2**63 + seed, output=[3], temperature=temperature, **masks, **cuts) for seed in range(16)]
    sampler = Sampler(500, "cpu")
    tokens = sampler.sample(logits, rows)[0].tolist()
    assert sampler.sample_on_device(logits, rows)[0].tolist() == tokens
    assert set(tokens) <= {7, 400}
    assert len(set(tokens)) == (2 if temperature and not cuts else len(set(tokens)))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"allowed_token_ids": ()}, "allowed_token_ids: is empty"),
        ({"allowed_token_ids": (5, 10)}, "allowed_token_ids: token 10 is not in the vocabulary of 10"),
        ({"bad_words": ((-1, 3),)}, "bad_words: token -1 is not in the vocabulary of 10"),
        ({"bad_words": ((3,),) * 513}, "bad_words: at most 512"),
        ({"allowed_token_ids": (1, 2), "bad_words": ((1,), (5, 2))}, "bad_words: each token that is allowed ends one"),
    ],
)
def test_masks_that_cannot_be_or_may_leave_nothing_are_refused(what: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**what).validate(vocab_size=10)


def test_logprobs_are_of_the_models_own_distribution_whatever_is_done_to_it() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])) + 3.0
    rows = [
        row(temperature=0.0, logit_bias=((2, 50.0),), return_logprobs=True, top_logprobs=2),
        row(),
        row(top_k=2, temperature=0.01, return_logprobs=True),
    ]
    tokens, (first, second, third) = Sampler(3, "cpu").sample(logits, rows)
    assert first is not None
    assert third is not None
    assert (first.token_id, first.logprob) == (2, pytest.approx(np.log(0.25)))
    assert [token for token, _ in first.top] == [0, 1]  # of the equals 1 and 2, the lower
    assert [value for _, value in first.top] == pytest.approx([np.log(0.5), np.log(0.25)])
    assert second is None
    assert (third.token_id, third.logprob, third.top) == (2, pytest.approx(np.log(0.8)), ())
    assert tokens.tolist()[::2] == [2, 2]


def test_the_first_alternative_is_the_greedy_token_even_among_equals() -> None:
    asked = row(temperature=0.0, return_logprobs=True, top_logprobs=3)
    tokens, (logprob,) = Sampler(400, "cpu").sample(torch.zeros(1, 400), [asked])
    assert logprob is not None
    assert tokens.tolist() == [0]
    assert [token for token, _ in logprob.top] == [0, 1, 2]


def test_more_alternatives_than_tokens_gives_them_all() -> None:
    (logprob,) = Sampler(2, "cpu").prompt_logprobs(torch.zeros(1, 2), np.array([1], dtype=np.int32), 20)
    assert logprob.top == ((0, pytest.approx(-np.log(2))), (1, pytest.approx(-np.log(2))))


def test_prompt_logprobs_are_those_of_the_targets() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    first, second = Sampler(3, "cpu").prompt_logprobs(logits, np.array([1, 0], dtype=np.int32), 1)
    assert (first.token_id, first.logprob) == (1, pytest.approx(np.log(0.25)))
    assert first.top == ((0, pytest.approx(np.log(0.5))),)
    assert (first.rank, second.rank) == (2, 2)
    assert (second.token_id, second.logprob) == (0, pytest.approx(np.log(0.1)))
    assert second.top == ((2, pytest.approx(np.log(0.8))),)


def test_an_empty_batch_is_no_tokens() -> None:
    tokens, logprobs = Sampler(8, "cpu").sample(torch.empty(0, 8), [])
    assert (len(tokens), logprobs) == (0, ())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_with_broken_logits_gets_no_token_and_the_others_theirs(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 10)
    logits[:, 2] = 50.0
    logits[1, 4] = bad
    rows = [row(temperature=temperature, return_logprobs=True)] * 3
    tokens, logprobs = Sampler(10, "cpu").sample(logits, rows)
    assert tokens.tolist() == [2, BROKEN, 2]
    assert [logprob is None for logprob in logprobs] == [False, True, False]


def test_a_row_without_any_possible_token_gets_none() -> None:
    logits = torch.zeros(2, 10)
    logits[1] = -torch.inf
    tokens, _ = Sampler(10, "cpu").sample(logits, [row(), row(temperature=0.0)])
    assert tokens[1] == BROKEN
    assert tokens[0] != BROKEN


def test_where_all_rows_that_ask_for_logprobs_are_broken_there_are_none() -> None:
    """The index of no row once ended the engine."""
    logits = torch.zeros(3, 10)
    logits[0, 4] = float("nan")
    rows = [row(return_logprobs=True), held([0], return_logprobs=True, top_logprobs=3), row(temperature=0.0)]
    tokens, logprobs = Sampler(10, "cpu").sample(logits, rows)
    assert (tokens.tolist(), logprobs) == ([BROKEN, BROKEN, 0], ())


def test_logits_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(AssertionError, match=r"logits are \(1, 9\), wanted \(1, 10\)"):
        Sampler(10, "cpu").sample(torch.zeros(1, 9), [row()])


def held(words: list[int], **changes: Any) -> SampleRow:
    """Make a row whose constraint allows the tokens with a bit in ``words``."""
    return row(**changes)._replace(mask=lambda: np.array(words, np.int64).astype(np.uint32).view(np.int32))


def test_a_constraint_allows_its_tokens_whatever_the_logits_and_penalties_say() -> None:
    logits = torch.tensor([[9.0, 1.0, 5.0, 4.0]] * 4)
    rows = [
        held([0b1100], temperature=0.0),
        held([0b1010], seed=3),
        held([0b1100], temperature=0.0, logit_bias=((3, 2.0), (0, 50.0))),
        row(temperature=0.0),
    ]
    tokens, _ = Sampler(4, "cpu").sample(logits, rows)
    assert tokens[[0, 2, 3]].tolist() == [2, 3, 0]
    assert tokens[1] in (1, 3)


def test_a_row_of_a_constraint_that_allows_nothing_is_broken_and_others_are_not() -> None:
    tokens, logprobs = Sampler(4, "cpu").sample(
        torch.ones(3, 4), [held([0], return_logprobs=True), held([8], return_logprobs=True), held([0], temperature=0.0)]
    )
    assert tokens.tolist() == [BROKEN, 3, BROKEN]
    assert [each is None for each in logprobs] == [True, False, True]


def test_a_stop_id_waits_for_min_tokens_and_with_ignore_eos_for_the_end_of_the_grammar() -> None:
    logits = torch.tensor([[9.0, 1.0, 5.0]] * 4)
    stops = {"stop_ids": [0], "temperature": 0.0}
    rows = [
        held([0b101], min_new_tokens=2, max_new_tokens=9, **stops),
        held([0b001], min_new_tokens=2, max_new_tokens=9, **stops),  # nothing else is left: the grammar wins
        held([0b101], ignore_eos=True, **stops),
        held([0b001], ignore_eos=True, **stops),
    ]
    assert Sampler(3, "cpu").sample(logits.clone(), rows)[0].tolist() == [2, 0, 2, 0]
    assert Sampler(3, "cpu").sample(logits[:1].clone(), [rows[0]._replace(num_output=2)])[0].tolist() == [0]
    both = held([0b111], min_new_tokens=2, max_new_tokens=9, allowed_token_ids=(0, 1), **stops)
    assert Sampler(3, "cpu").sample(logits[:1].clone(), [both])[0].tolist() == [1]
    only = held([0b101], min_new_tokens=2, max_new_tokens=9, allowed_token_ids=(0, 1), **stops)
    assert Sampler(3, "cpu").sample(logits[:1].clone(), [only])[0].tolist() == [0]


def test_ignore_eos_holds_before_the_grammar_begins_but_not_for_ids_of_the_requests_own() -> None:
    logits = torch.tensor([[9.0, 1.0, 5.0]] * 2)
    before = row(stop_ids=[0, 2], ignore_eos=True, stop_token_ids=(2,), temperature=0.0)._replace(mask=lambda: None)
    assert Sampler(3, "cpu").sample(logits.clone(), [before, held([0b101], temperature=0.0)])[0].tolist() == [2, 0]
    assert Sampler(3, "cpu").sample(logits[:1].clone(), [before])[0].tolist() == [2]


def test_logprobs_of_a_constrained_row_are_over_what_is_allowed() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]] * 2))
    rows = [held([0b110], temperature=0.0, return_logprobs=True, top_logprobs=3), row(temperature=0.0)]
    _, (first, second) = Sampler(3, "cpu").sample(logits, rows)
    assert first is not None
    assert first.top == ((1, pytest.approx(np.log(0.5))), (2, pytest.approx(np.log(0.5))))
    assert second is None
