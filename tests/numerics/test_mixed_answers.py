"""Whatever is asked for beside tokens is the same in steps that mix: logprobs, prompt logprobs, penalties, n > 1."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from replicas.engine.engine import Engine
from replicas.text.tokenizer import Tokenizer
from replicas.types import GenerateRequest, SamplingParams, TokenDelta, TokenLogprob
from tests.embedded import MODEL, short_model
from tests.harness import small_engine

pytestmark = pytest.mark.model

TEXT = (
    "In the valley the river turns twice before it meets the mill, and in spring the path beside it is under water for "
    "a week or two, so that the children who live on the far side have to take the long way over the old stone bridge"
)
NUM_NEW = 12
PLAIN = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
SEEDED = replace(PLAIN, temperature=0.9, top_p=0.95, seed=11)
WRITERS = {
    "logprobs": {"sampling": PLAIN, "return_logprobs": True, "top_logprobs": 2},
    "penalties": {"sampling": replace(SEEDED, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)},
    "choices": {"sampling": replace(SEEDED, n=3)},
    "masks": {"sampling": replace(SEEDED, allowed_token_ids=tuple(range(17, 9000)), bad_words=((28,), (260, 282)))},
    "min-tokens": {"sampling": replace(PLAIN, ignore_eos=False, min_new_tokens=NUM_NEW, stop_token_ids=(28, 30))},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = small_engine(short_model(), tokens=4096, chunk=32, context=512)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompt() -> np.ndarray:
    return Tokenizer(MODEL).encode(TEXT)


Answers = dict[tuple[str, int], TokenDelta]


def answer(engine: Engine, first: list[GenerateRequest], then: list[GenerateRequest]) -> Answers:
    """All deltas of each choice in one; ``then`` come after two steps. The cache is empty at the start."""
    assert engine.flush_cache()
    made: Answers = {}
    steps = 0
    for request in first:
        engine.submit(request)
    while engine.has_work:
        if steps == 2:
            for request in then:
                engine.submit(request)
        for delta in engine.step():
            key = (delta.rid, delta.index)
            made[key] = made[key].merge(delta) if key in made else delta
        steps += 1
    engine.scheduler.check()
    return made


def close(ours: tuple[TokenLogprob, ...], alone: tuple[TokenLogprob, ...]) -> None:
    assert [each.token_id for each in ours] == [each.token_id for each in alone]
    for each, other in zip(ours, alone, strict=True):
        assert each.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert [[top[0] for top in each.top] for each in ours] == [[top[0] for top in each.top] for each in alone]


@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_a_writer_and_a_prompt_get_in_mixed_steps_what_each_gets_alone(
    engine: Engine, prompt: np.ndarray, writer: str
) -> None:
    """The prompt takes more than one step, asks for its logprobs, and shares no page with the writer: another salt."""
    writes = GenerateRequest(rid="w", token_ids=prompt[:20], **WRITERS[writer])  # type: ignore[arg-type]
    long = GenerateRequest(
        rid="p", token_ids=prompt, sampling=PLAIN, return_logprobs=True, prompt_logprobs_from=5, top_logprobs=1,
        cache_salt="other",
    )  # fmt: skip
    alone = {**answer(engine, [writes], []), **answer(engine, [long], [])}
    before = engine.stats().num_mixed_steps
    mixed = answer(engine, [writes], [long])
    assert engine.stats().num_mixed_steps - before >= 2
    assert set(mixed) == set(alone)
    for key, delta in mixed.items():
        assert delta.token_ids == alone[key].token_ids
        close(delta.logprobs, alone[key].logprobs)
        close(delta.prompt_logprobs, alone[key].prompt_logprobs)
    assert len(mixed["p", 0].prompt_logprobs) == len(prompt) - 5
