"""Random requests of all legal fields, together in steps of a real engine: no step fails, and each choice ends once.

A step that fails would not end the engine (engine/failed_steps.py), so it is its count that tells."""

import contextlib
import shutil
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from replicas.config import AdapterLimits, CacheConfig, SchedulerConfig
from replicas.errors import Fault, InvalidRequest
from replicas.launch import EngineSettings, load_engine
from replicas.types import AdapterRef, Constraint, GenerateRequest, PoolingParams, SamplingParams, TokenDelta
from tests.adapters import make_adapter
from tests.embedded import MODEL
from tests.numerics import tiny

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]
VOCAB = 49_152  # the embedded model's
FORMS = (
    Constraint(kind="regex", text="[a-c]{1,12}"),
    Constraint(kind="lark", text='start: "yes" | "no"'),
    Constraint(kind="json_schema", text='{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'),
    Constraint(kind="regex", text="[0-9]+", after="x"),
)


def some(random: Random, most: int) -> tuple[int, ...]:
    """Tokens, of the whole vocabulary or of few, so that masks and forms meet."""
    high = random.choice((40, 400, VOCAB))
    return tuple(random.randrange(high) for _ in range(random.randint(1, most)))


def request_of(random: Random, rid: str, adapters: list[AdapterRef]) -> GenerateRequest:
    """Few fields or many are other than their defaults. The engine refuses what is not legal."""
    share, new = random.choice((0.1, 0.3, 0.6)), random.choice((0, 1, 2, 5, 30))
    fields: dict[str, Any] = {
        "max_new_tokens": new, "min_new_tokens": random.randint(0, new), "temperature": random.choice((0.0, 0.3, 1.5)),
        "top_k": random.choice((1, 7, 500)), "top_p": random.choice((1e-6, 0.5)), "min_p": random.choice((0.2, 1.0)),
        "repetition_penalty": random.choice((0.01, 1.3, 10.0)), "frequency_penalty": random.choice((-2.0, 0.5)),
        "presence_penalty": random.choice((-1.0, 2.0)), "seed": random.randrange(2**64), "n": random.randint(2, 3),
        "logit_bias": tuple((token, random.choice((-100.0, 3.0, 100.0))) for token in some(random, 5)),
        "allowed_token_ids": some(random, 60), "bad_words": tuple(some(random, 3) for _ in range(random.randint(1, 5))),
        "stop": ("e", "\n\n"), "stop_token_ids": some(random, 200), "ignore_eos": True, "include_stop": True,
        "skip_special_tokens": False, "constraint": random.choice(FORMS),
    }  # fmt: skip
    asked = {name: value for name, value in fields.items() if random.random() < share}
    prompt = np.array([random.randrange(random.choice((5, VOCAB))) for _ in range(random.choice((1, 3, 40, 150)))])
    others: dict[str, Any] = {
        "return_logprobs": True, "top_logprobs": random.choice((1, 20)), "priority": random.randint(-9, 9),
        "prompt_logprobs_from": random.randrange(len(prompt)), "adapter": random.choice(adapters), "offline": True,
        "cache_salt": "s", "tenant": random.choice("ab"), "objective_s": 0.1, "resumed_ids": some(random, 4),
    }  # fmt: skip
    around = {name: value for name, value in others.items() if random.random() < share}
    if random.random() < 0.1:
        pooling = PoolingParams(labels=some(random, 4), method=random.choice((None, "last", "mean")))
        asked, around = {"max_new_tokens": 1, "pooling": pooling}, {"return_logprobs": True}
    return GenerateRequest(rid=rid, token_ids=prompt, sampling=SamplingParams(**asked), **around)


@pytest.mark.parametrize("num_steps", [250, pytest.param(1_500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_no_legal_fields_make_a_step_fail(tmp_path: Path, overlap: Any, num_steps: int) -> None:
    model = tmp_path / "model"
    tiny.save("llama", model, vocab_size=VOCAB)
    for file in Path(MODEL).glob("*token*.json"):
        shutil.copy(file, model)
    adapters = [make_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate("ab")]
    scheduler = SchedulerConfig(chunked_prefill_size=64, max_running_requests=8, overlap=overlap)
    cache = CacheConfig(page_size=16, max_total_tokens=1024)  # memory is short now and then
    engine = load_engine(
        EngineSettings(model=str(model), cache=cache, scheduler=scheduler, adapters=AdapterLimits(), num_threads=1)
    )
    random, left, faults, number, most = Random(num_steps), dict[str, set[int]](), Counter[Fault | None](), 0, 9
    for _ in range(num_steps):
        deltas = list[TokenDelta]()
        most = random.choice((1, 2, 9)) if random.random() < 0.05 else most  # alone, too: no other row makes up for it
        if len(left) < most and random.random() < 0.5:
            number += 1
            with contextlib.suppress(InvalidRequest):
                request = request_of(random, f"r{number}", adapters)
                deltas += engine.submit(request)
                left[request.rid] = set(range(request.num_choices))
        if left and random.random() < 0.01:
            deltas += engine.abort(random.choice(sorted(left)))
        for delta in (*deltas, *engine.step()):
            if delta.finish is not None:
                left[delta.rid].remove(delta.index)
                faults[delta.finish.fault] += 1
                assert delta.finish.retry_as is None, delta.finish
        left = {rid: choices for rid, choices in left.items() if choices}
    engine.scheduler.check()
    assert engine.stats().failed_steps == 0
    assert faults[None] > 2, faults
    engine.close()
