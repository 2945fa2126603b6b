"""Drafts of every quality, in small pools: every answer is the oracle's, and nothing that was guessed wrong is kept.

What a request may make next is told by an adversary in the place of the text at hand: always right, always wrong, right
but for the last, or right up to a random place. All invariants are checked after every step.
"""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.cache.node import path_to, walk
from replicas.request import Req
from replicas.scheduler.plan import DecodePlan
from replicas.scheduler.speculation import GuessKind, Proposal, Speculation
from replicas.types import Finish, FinishReason, SamplingParams
from tests.fakes import continuation
from tests.harness import Bench, retract

PREFIXES = [list(range(24)), [*range(8), 99], [7] * 30, []]
QUALITIES = ["right", "wrong", "but the last", "random"]


class Adversary(Speculation):
    """Drafts of a given quality: it knows what the fake device will say."""

    def __init__(self, bench: Bench, quality: str, length: int, seed: int) -> None:
        super().__init__(bench.kv, bench.scheduler.counters, step_s={}, clock=bench.clock)
        self._quality, self._length, self._random = quality, length, np.random.default_rng(seed)
        self._window = bench.kv.window

    def _propose(self, req: Req) -> Proposal | None:
        most = min(self._length, req.max_remaining - 1)
        if most < 1:
            return None
        ids = np.array(continuation(req.ids[: req.num_tokens].tolist(), most, window=self._window), dtype=np.int32)
        match self._quality:
            case "wrong":
                ids = (ids + 1) % 1000
            case "but the last":
                ids[-1] = (ids[-1] + 1) % 1000
            case "random":
                at = int(self._random.integers(0, most + 1))
                ids[at:] = (ids[at:] + 1) % 1000
        return Proposal(GuessKind("text", 8), ids)

    def _chosen(self, reqs: Any, num_rows: int) -> list[np.ndarray]:
        """Try all of them: whether it pays is not the question."""
        none, left = np.empty(0, np.int32), num_rows
        chosen = []
        for req in reqs:
            proposal = self._proposed.get(req)
            ids = none if proposal is None else proposal.token_ids[:left]
            left -= len(ids)
            chosen.append(ids)
        return chosen


def check_tree(bench: Bench) -> None:
    """The tree keeps no K/V of a token that was guessed wrong: each path is what the device makes after its prompt."""
    prompts = {tuple(req.ids[: req.prompt_len].tolist()) for req in bench.reqs}
    roots = bench.kv.store.radix._roots.values() if bench.kv.store.radix is not None else ()  # type: ignore[union-attr]
    for node in walk(roots):
        ids = tuple(np.concatenate([each.key for each in path_to(node)]).tolist())
        known = any(
            ids == prompt[: len(ids)]
            or (ids[: len(prompt)] == prompt
                and list(ids[len(prompt) :]) == continuation(prompt, len(ids) - len(prompt), window=bench.kv.window))
            for prompt in prompts
        )  # fmt: skip
        assert known, f"the tree keeps {ids}"


arrivals = st.tuples(
    st.just("arrive"),
    st.integers(0, len(PREFIXES) - 1),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(0, 20),  # max_new_tokens
    st.sampled_from([None, None, None, 1, 3, 6]),  # its token that ends it
)
actions = st.lists(
    st.one_of(
        arrivals,
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("retract"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    actions=actions, page_size=st.sampled_from([1, 2, 4, 16]), spare=st.integers(0, 60),
    quality=st.sampled_from(QUALITIES), length=st.integers(1, 19), seed=st.integers(0, 9),
    window=st.sampled_from([None, None, 3, 9]), mixed=st.booleans(),
)
def test_no_draft_changes_an_answer_or_leaves_anything_behind(
    actions: list[tuple[object, ...]], page_size: int, spare: int, quality: str, length: int, seed: int,
    window: int | None, mixed: bool,
) -> None:  # fmt: skip
    longest = max(len(prefix) for prefix in PREFIXES) + 12 + 20
    bench = Bench(
        num_pages=-(-(longest + spare) // page_size), page_size=page_size, max_running=4, window=window,
        new_token_ratio=0.3, mixed_steps=mixed,
    )  # fmt: skip
    drafts = bench.scheduler.features["speculation"] = Adversary(bench, quality, length, seed)
    for action in actions:
        match action:
            case ("arrive", int(prefix), list(tail), int(most), stop):
                prompt = [*PREFIXES[prefix], *tail]
                made = continuation(prompt, 8, window=window)
                stops = () if stop is None else (made[stop],)
                asked = SamplingParams(temperature=0.0, max_new_tokens=most, stop_token_ids=stops)
                bench.submit(prompt, max_new_tokens=most, sampling=asked)
            case ("abort", int(index)) if index < len(bench.reqs):
                bench.scheduler.finish(bench.reqs[index], Finish(reason=FinishReason.ABORT))
                bench.scheduler.check()
            case ("retract", int(index)) if index < len(bench.scheduler.queues.running):
                retract(bench.scheduler, bench.scheduler.queues.running[index])
                bench.scheduler.check()
            case ("step", int(count)):
                for _ in range(count):
                    bench.step()
                    assert all(req.extend_len == 1 for req in bench.scheduler.queues.running)
    bench.run()
    for req in bench.reqs:  # not one token later than its stop
        stops = [at for at, token in enumerate(req.output_ids.tolist()) if token in req.sampling.stop_token_ids]
        assert stops in ([], [req.num_output - 1])
    check_tree(bench)
    assert not drafts._of_reqs


def made_in_steps(quality: str, *, length: int) -> tuple[int, int, int]:
    """Return the decode steps of an answer of 33 tokens, and the tokens that were drafted and accepted."""
    bench = Bench(page_size=4)
    bench.scheduler.features["speculation"] = Adversary(bench, quality, length, 0)
    bench.submit([1, 2, 3], max_new_tokens=33)
    bench.run()
    counters = bench.scheduler.counters
    assert counters["decode_tokens"] == 32
    assert counters["drafted_tokens.tree"] == counters["accepted_tokens.tree"] == 0
    num_steps = sum(isinstance(plan, DecodePlan) for plan in bench.plans)
    return num_steps, counters["drafted_tokens.text"], counters["accepted_tokens.text"]


def test_a_right_draft_of_seven_makes_eight_tokens_a_step() -> None:
    """The first makes one: without drafts it tells what such a step costs. Then 8, 8, 8 and the last 7."""
    assert made_in_steps("right", length=7) == (5, 27, 27)


def test_a_draft_that_is_wrong_makes_one_token_a_step() -> None:
    num_steps, drafted, accepted = made_in_steps("wrong", length=7)
    assert (num_steps, accepted) == (32, 0)
    assert drafted > 100


def test_a_draft_that_is_right_but_for_its_last_makes_as_many_tokens_as_it_has() -> None:
    """1, then 7, 7, 7, 7; of the last three tokens two, and one."""
    num_steps, _, accepted = made_in_steps("but the last", length=7)
    assert (num_steps, accepted) == (7, 25)
