"""Sleep mode of a real engine: memory goes back to the system, the cache stays on the host, answers are the same."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from replicas.config import CacheConfig
from replicas.engine.engine import Engine
from replicas.errors import InvalidRequest, Overloaded
from replicas.launch import EngineSettings, load_engine
from replicas.types import GenerateRequest, SamplingParams
from tests.embedded import short_model

pytestmark = pytest.mark.model
PROMPT = np.arange(1000, 1400, dtype=np.int32)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    cache = CacheConfig(max_total_tokens=4096, host_memory_bytes=64 << 20)
    made = load_engine(EngineSettings(model=short_model(), cache=cache, num_threads=1))
    yield made
    made.close()


def ask(rid: str) -> GenerateRequest:
    return GenerateRequest(rid=rid, token_ids=PROMPT, sampling=SamplingParams(max_new_tokens=8, temperature=0.0))


def answer(engine: Engine, rid: str) -> tuple[list[int], int]:
    """The token ids, and how many prompt tokens were cached."""
    engine.submit(ask(rid))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    engine.kv.check([])
    engine.occupation.check()
    return [token for delta in deltas for token in delta.token_ids], deltas[-1].usage.cached_tokens


def resident_bytes(part: str) -> int:
    """Rss of the mappings of this process whose path contains ``part``; "": of all."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            counts = part in rest
        elif counts and name == "Rss:":
            found += int(rest.split()[0]) << 10
    return found


def test_an_answer_after_sleep_has_the_same_ids_and_its_prefix_comes_from_the_host(engine: Engine) -> None:
    ids, cold = answer(engine, "a")
    again, warm = answer(engine, "b")
    assert (cold, again, warm) == (0, ids, 384)
    weights, everything = resident_bytes("/panels-"), resident_bytes("")
    assert engine.release_memory()
    engine.occupation.check()
    freed = everything - resident_bytes("")
    assert resident_bytes("/panels-") == 0 < weights
    assert freed > weights
    with pytest.raises(Overloaded, match="has given back kv_cache, weights: resume it first"):
        engine.submit(ask("c"))
    engine.resume_memory(["weights"])
    with pytest.raises(Overloaded, match="has given back kv_cache: "):
        engine.submit(ask("c"))
    engine.resume_memory()
    assert answer(engine, "d") == (ids, 384)
    tiers = engine.stats().tiers
    assert tiers is not None
    assert tiers.host_wrong_pages == 0


def test_nothing_is_given_back_while_a_request_is_open(engine: Engine) -> None:
    engine.submit(ask("open"))
    assert not engine.release_memory()
    assert not engine.occupation.released
    engine.abort("open")
    assert engine.release_memory(["kv_cache"])
    assert engine.release_memory(["kv_cache"])  # twice is once
    engine.resume_memory()


def test_a_part_that_does_not_exist_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="tags: cuda_graph unknown; there are kv_cache and weights"):
        engine.release_memory(["cuda_graph"])
