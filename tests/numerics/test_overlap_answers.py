"""The same ids, texts, logprobs and usage whether or not decode steps are launched before the last one is known.

On a CPU a launch runs its step at once: what differs is that step n + 1 is made before the tokens of step n are taken
in, and that its inputs are what the ranks remember (`DecodePlan.follows`), told to followers by rank 0.
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from replicas.engine.engine import Engine
from replicas.types import GenerateRequest, SamplingParams, TokenDelta
from tests import harness
from tests.embedded import short_model
from tests.harness import embedded_engine

pytestmark = pytest.mark.model
NUM_NEW = 24
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, top_k=50, seed=7)
PROMPTS = np.random.default_rng(5).integers(1000, 20_000, (6, 40)).astype(np.int32)
Answer = tuple[list[int], str, tuple[float, ...], object, object]  # ids, text, logprobs, usage, finish


def requests() -> list[GenerateRequest]:
    """Some that nothing disturbs, and one of each kind that ends early, or needs the host for a while."""
    kinds = {
        "greedy": GREEDY,
        "seeded": SEEDED,
        "short": replace(SEEDED, max_new_tokens=9),
        "choices": replace(SEEDED, n=2, seed=3),
        "bias": replace(GREEDY, logit_bias=((1500, 4.0),), min_new_tokens=3, max_new_tokens=6),
    }
    return [
        GenerateRequest(rid=rid, token_ids=prompt, sampling=sampling, return_logprobs=rid == "short")
        for prompt, (rid, sampling) in zip(PROMPTS, kinds.items(), strict=False)
    ]


def answer(engine: Engine, asked: list[GenerateRequest], *, retract: str | None = None) -> dict[object, Answer]:
    """Two requests at the start, one more after every third step; the cache is empty at first."""
    assert engine.flush_cache()
    told: dict[tuple[str, int], list[TokenDelta]] = defaultdict(list)
    late, steps, num_ahead = asked[2:], 0, 0
    for request in asked[:2]:
        engine.submit(request)
    while engine.has_work or late:
        if late and steps % 3 == 2:
            engine.submit(late.pop(0))
        deltas = engine.step()
        num_ahead += len(engine.scheduler.queues.under_way)
        if retract is not None and steps == 10:
            deltas += engine.land()
            harness.retract(engine.scheduler, next(r for r in engine.scheduler.queues.running if r.rid == retract))
        steps += 1
        engine.scheduler.check()
        for delta in deltas:
            told[(delta.rid, delta.index)].append(delta)
    assert (num_ahead > 5) == (engine.config.scheduler.overlap == "on")
    return {key: _whole(deltas) for key, deltas in told.items()}


def _whole(deltas: list[TokenDelta]) -> Answer:
    logprobs = tuple(round(p.logprob or 0.0, 3) for delta in deltas for p in delta.logprobs)
    ids = [token for delta in deltas for token in delta.token_ids]
    usage = replace(deltas[-1].usage, drafted_tokens=0, accepted_tokens=0)  # no step that is launched ahead has drafts
    return ids, "".join(delta.text for delta in deltas), logprobs, usage, deltas[-1].finish


@pytest.fixture(scope="module")
def plain() -> Engine:
    return embedded_engine("off", model=short_model())


@pytest.fixture(scope="module")
def overlapping() -> Engine:
    return embedded_engine("on", model=short_model())


def test_answers_are_equal_with_overlap_on_and_off(plain: Engine, overlapping: Engine) -> None:
    assert answer(overlapping, requests()) == answer(plain, requests())


def test_requests_that_end_by_what_they_say_are_equal(plain: Engine, overlapping: Engine) -> None:
    """The whole answers of one run say where the others are to stop: by a token, and by a string."""
    whole = answer(plain, requests())
    ids = whole[("greedy", 0)][0]
    seeded_text = whole[("seeded", 0)][1]
    stopping = [
        replace(requests()[0], sampling=replace(GREEDY, stop_token_ids=(ids[11],))),
        replace(requests()[1], sampling=replace(SEEDED, stop=(seeded_text[20:26],))),
        *requests()[2:],
    ]
    made = answer(overlapping, stopping)
    assert made == answer(plain, stopping)
    first = ids.index(ids[11]) + 1
    assert made[("greedy", 0)][0] == ids[:first]
    assert made[("seeded", 0)][1] == seeded_text[: seeded_text.index(seeded_text[20:26])]


def test_a_penalty_made_ahead_counts_every_token(plain: Engine, overlapping: Engine) -> None:
    penal = replace(SEEDED, repetition_penalty=1.3, frequency_penalty=0.4, max_new_tokens=10)
    asked = [*requests(), GenerateRequest(rid="penalty", token_ids=PROMPTS[5], sampling=penal)]
    assert answer(overlapping, asked) == answer(plain, asked)


def test_a_retracted_request_goes_on_with_the_same_tokens(plain: Engine, overlapping: Engine) -> None:
    kept = answer(plain, requests())
    retracted = answer(overlapping, requests(), retract="seeded")
    assert retracted[("seeded", 0)][:2] == kept[("seeded", 0)][:2]
    assert retracted[("greedy", 0)][:2] == kept[("greedy", 0)][:2]


@pytest.mark.slow
def test_three_ranks_make_the_same_ids_ahead(plain: Engine) -> None:
    ranks = embedded_engine("on", tp=3, model=short_model())
    try:
        made, wanted = answer(ranks, requests()), answer(plain, requests())
        assert {key: found[:2] for key, found in made.items()} == {key: found[:2] for key, found in wanted.items()}
    finally:
        ranks.close()
