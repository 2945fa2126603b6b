"""SmolLM2 with weights and activations in int8: the same answer on every path."""

from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.perplexity import text_ids
from replicas.config import CacheConfig, Hardware, SchedulerConfig, resolve
from replicas.engine import Engine
from replicas.errors import InvalidConfig
from replicas.launch import load_engine
from replicas.runner.weights import load_model_config
from tests.embedded import MODEL
from tests.harness import ask, finish_all

pytestmark = pytest.mark.model


def make(chunk: int) -> Engine:
    return load_engine(
        MODEL,
        cache=CacheConfig(max_total_tokens=2304),
        scheduler=SchedulerConfig(chunked_prefill_size=chunk),
        num_threads=1,
        quantization="int8",
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = make(512)
    yield engine
    engine.close()


def answer(engine: Engine, *prompts: np.ndarray) -> list[list[int]]:
    made: dict[str, list[int]] = {f"r{i}": [] for i in range(len(prompts))}
    for rid, prompt in zip(made, prompts, strict=True):
        engine.submit(ask(rid, prompt.tolist(), max_new_tokens=24, ignore_eos=True))
    for delta in finish_all(engine):
        made[delta.rid] += delta.token_ids
    return list(made.values())


def test_chunks_hits_and_company_do_not_change_the_answer(engine: Engine) -> None:
    ids = text_ids(engine)
    assert engine.flush_cache()
    missed = answer(engine, ids[:150])[0]
    assert answer(engine, ids[:150])[0] == missed  # a hit
    assert answer(engine, ids[300:340], ids[:150], ids[500:577])[1] == missed
    in_chunks = make(32)
    try:
        assert answer(in_chunks, ids[:150])[0] == missed
    finally:
        in_chunks.close()


def test_int8_on_a_gpu_or_in_another_dtype_is_refused() -> None:
    model = load_model_config(MODEL, dtype="bfloat16", quantization="int8")
    cpu = Hardware(device="cpu", num_cpus=2, available_memory_bytes=4 << 30)
    with pytest.raises(InvalidConfig, match=r"quantization = 'int8' on cpu with dtype bfloat16"):
        resolve(model, cpu)
