"""Same answer on every path: greedy ids and seeded samples do not depend on how the engine got there. The model is
SmolLM2's first blocks.

{miss, hit, partial hit, hit on the host} x {chunked, not} x {page 1, 16} x {TP 1, 3} x {alone, busy batch} x {retracted
and resumed, not} x {a token a step, drafts of two}: every two of these values meet
(tests/pairwise.py). In a busy batch some of the answer's tokens are made in steps that mix: prompts of others come
while it is written. What is to be found on the host has left the device pool before the request comes, and again when
it is retracted. The greedy oracle is Transformers in fp32; the sampled one is the plainest path of ours. In bf16, K and
V too, that is the oracle of both: what a CPU's dot products or tiles make has its own last bits.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from replicas.config import CacheConfig, DType, Quantization
from replicas.engine.engine import Engine
from replicas.kernels import bf16_tiles
from replicas.launch import EngineSettings, load_engine
from replicas.scheduler.plan import ExtendPlan, StepPlan
from replicas.types import GenerateRequest, SamplingParams
from tests import harness
from tests.embedded import MODEL, short_model
from tests.pairwise import cases
from tests.told_speculation import Told, put_drafts

pytestmark = pytest.mark.model

TEXT = (
    "The harbour had been quiet for most of the winter, and the men who mended nets along the quay had taken to "
    "telling the same stories twice. When the first ship came in through the ice, nobody believed the boy who saw it. "
    "He ran from door to door, shouting, until the old pilot took him by the shoulder and asked, very slowly, what flag"
)
NUM_NEW = 20
NUM_EARLY = 3  # tokens of "asked" before the others' prompts come
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.9, top_p=0.95, top_k=50, seed=7, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """In which numbers an engine computes; ``widened``: as on a CPU that does not multiply bf16."""

    dtype: DType = "float32"
    quantization: Quantization = "none"
    widened: bool = False


FP32 = Numbers()
ROUNDED = {
    "bf16": Numbers(dtype="bfloat16"),
    "bf16-widened": Numbers(dtype="bfloat16", widened=True),
    "int4": Numbers(dtype="bfloat16", quantization="int4"),
    "int8": Numbers(quantization="int8"),
}


def make_engine(page: int, chunk: int, *, tp: int = 1, numbers: Numbers = FP32) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        if numbers.widened:
            patch.setattr(bf16_tiles, "way", lambda: None)
        return harness.small_engine(
            short_model(), page=page, tokens=4096, chunk=chunk, tp=tp, context=1024, dtype=numbers.dtype,
            quantization=numbers.quantization,
            cache={"host_memory_bytes": HOST_BYTES, "write_policy": "write_back"},
        )  # fmt: skip


ENGINES: dict[str, tuple[int, int]] = {
    "page1-chunked": (1, 32),
    "page1-whole": (1, 512),
    "page16-chunked": (16, 32),
    "page16-whole": (16, 512),
}
SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED}
CACHED = ("miss", "partial", "hit", "host")
HOST_BYTES = 5 << 20  # about 850 tokens


@pytest.fixture(scope="module")
def engine_of() -> Iterator[Callable[..., Engine]]:
    with harness.one_at_a_time(make_engine) as of:
        yield of


@pytest.fixture(scope="module")
def prompt() -> np.ndarray:
    from replicas.text.tokenizer import Tokenizer

    return Tokenizer(MODEL).encode(TEXT)


@pytest.fixture(scope="module")
def greedy_oracle(prompt: np.ndarray) -> list[int]:
    return transformers_answer(prompt)


def transformers_answer(prompt: np.ndarray) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(short_model(), dtype=torch.float32)
    with torch.inference_mode():
        ids = model.generate(
            torch.from_numpy(prompt).long()[None], max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False
        )
    return ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def seeded_oracle(prompt: np.ndarray) -> list[int]:
    engine = load_engine(
        EngineSettings(
            model=short_model(),
            cache=CacheConfig(page_size=16, prefix_cache="chunk", max_total_tokens=1024),
            attention="torch_native",
            num_threads=1,
            context_len=1024,
        )
    )
    return run(engine, {"plain": (prompt, SEEDED)})["plain"]


Prompts = dict[str, tuple[np.ndarray, SamplingParams]]


def run(
    engine: Engine,
    prompts: Prompts,
    *,
    retract: str | None = None,
    late: Prompts | None = None,
    to_host: bool = False,
) -> dict[str, list[int]]:
    """Output ids by rid; ``retract`` names a request that loses its pages in the middle of its answer, and ``to_host``
    has them leave the device then; ``late`` come when "asked" has made NUM_EARLY tokens."""
    late = dict(late or {})
    made: dict[str, list[int]] = {rid: [] for rid in (*prompts, *late)}
    for rid, (ids, sampling) in prompts.items():
        engine.submit(GenerateRequest(rid=rid, token_ids=ids, sampling=sampling))
    while engine.has_work:
        for delta in engine.step():
            made[delta.rid] += delta.token_ids
        while late and len(made["asked"]) >= NUM_EARLY:
            rid, (ids, sampling) = late.popitem()
            engine.submit(GenerateRequest(rid=rid, token_ids=ids, sampling=sampling))
        if retract is not None and len(made[retract]) >= NUM_NEW // 2:
            harness.retract(engine.scheduler, next(r for r in engine.scheduler.queues.running if r.rid == retract))
            if to_host:
                harness.to_host(engine.kv)
            retract = None
    assert retract is None, "the request was never in a state to be retracted"
    engine.scheduler.check()
    return made


@dataclass(frozen=True)
class Oracles:
    prompt: np.ndarray
    greedy: list[int]
    seeded: list[int]


@pytest.fixture(scope="module")
def oracles(prompt: np.ndarray, greedy_oracle: list[int], seeded_oracle: list[int]) -> Oracles:
    return Oracles(prompt, greedy_oracle, seeded_oracle)


@cases(
    engine=ENGINES,
    sampling=SAMPLINGS,
    cached=CACHED,
    busy={"alone": False, "busy": True},
    retracted={"kept": False, "retracted": True},
    drafted={"one": False, "drafted": True},
)
def test_the_same_answer_on_every_path(
    engine_of: Callable[..., Engine],
    engine: tuple[int, int],
    oracles: Oracles,
    sampling: SamplingParams,
    cached: str,
    busy: bool,
    retracted: bool,
    drafted: bool,
) -> None:
    check_answer(engine_of(*engine), oracles, sampling, cached=cached, busy=busy, retracted=retracted, drafted=drafted)


@pytest.fixture(scope="module")
def plain_answers(prompt: np.ndarray, engine_of: Callable[..., Engine]) -> Callable[[Numbers], Oracles]:
    """Gives the answers of the plainest path in some numbers: nothing cached, chunked, beside others or retracted."""

    @functools.cache
    def of(numbers: Numbers) -> Oracles:
        made = []
        for sampling in (GREEDY, SEEDED):
            engine = engine_of(16, 512, numbers=numbers)
            assert engine.flush_cache()
            made.append(run(engine, {"plain": (prompt, sampling)})["plain"])
        return Oracles(prompt, *made)

    return of


@cases(
    numbers=ROUNDED,
    engine={name: ENGINES[name] for name in ("page16-whole", "page1-whole", "page16-chunked")},
    sampling=SAMPLINGS,
    cached=CACHED,
    busy={"alone": False, "busy": True},
    retracted={"kept": False, "retracted": True},
    drafted={"one": False, "drafted": True},
)
def test_the_same_answer_on_every_path_in_rounded_numbers(
    engine_of: Callable[..., Engine],
    plain_answers: Callable[[Numbers], Oracles],
    numbers: Numbers,
    engine: tuple[int, int],
    sampling: SamplingParams,
    cached: str,
    busy: bool,
    retracted: bool,
    drafted: bool,
) -> None:
    oracles = plain_answers(numbers)
    made = engine_of(*engine, numbers=numbers)
    assert made.config.kv_dtype == numbers.dtype
    check_answer(made, oracles, sampling, cached=cached, busy=busy, retracted=retracted, drafted=drafted)


@pytest.mark.slow
@cases(
    engine={"page1-whole": (1, 512), "page16-chunked": (16, 32)},
    sampling=SAMPLINGS,
    cached=CACHED,
    disturbed={"alone": False, "disturbed": True},
)
def test_the_same_answer_from_three_ranks(
    engine_of: Callable[..., Engine],
    engine: tuple[int, int],
    oracles: Oracles,
    sampling: SamplingParams,
    cached: str,
    disturbed: bool,
) -> None:
    """Three processes on two cores are slow: either nothing disturbs the answer, or a busy batch and a retraction."""
    check_answer(engine_of(*engine, tp=3), oracles, sampling, cached=cached, busy=disturbed, retracted=disturbed)


def test_prompts_that_extend_over_one_prefix_answer_as_each_alone(
    engine_of: Callable[..., Engine], prompt: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four, of 1 to 13 tokens behind 320 in common; the first is what Transformers says."""
    engine = engine_of(16, 512)
    prefix = np.tile(prompt, 320 // len(prompt) + 1)[:320]
    prompts = {
        f"{n}": (np.concatenate([prefix, prompt[20 : 20 + n]]), SEEDED if n == 9 else GREEDY) for n in (1, 5, 9, 13)
    }
    plans: list[StepPlan | None] = []
    schedule = engine.scheduler.schedule

    def recorded() -> StepPlan | None:
        plans.append(schedule())
        return plans[-1]

    monkeypatch.setattr(engine.scheduler, "schedule", recorded)
    answers = []
    for batches in ([prompts], [{rid: asked} for rid, asked in prompts.items()]):
        assert engine.flush_cache()
        run(engine, {"prime": (np.append(prefix, 1).astype(np.int32), replace(GREEDY, max_new_tokens=1))})
        plans.clear()
        made: dict[str, list[int]] = {}
        for batch in batches:
            made |= run(engine, batch)
        groups = [group for plan in plans if isinstance(plan, ExtendPlan) for group in plan.prompt_groups]
        assert [len(group.members) for group in groups] == ([4] if len(batches) == 1 else [])
        answers.append(made)
    assert answers[0] == answers[1]
    assert answers[0]["1"] == transformers_answer(prompts["1"][0])


def check_answer(
    engine: Engine, oracles: Oracles, sampling: SamplingParams, *, cached: str, busy: bool, retracted: bool,
    drafted: bool = False,
) -> None:  # fmt: skip
    prompt, answer = oracles.prompt, oracles.greedy if sampling is GREEDY else oracles.seeded
    put_drafts(engine.scheduler, Told(engine, {("asked", 0): answer}, length=2) if drafted else None)
    accepted = engine.scheduler.counters["accepted_tokens.text"]
    assert engine.flush_cache()
    one = SamplingParams(max_new_tokens=1, temperature=0.0)
    if cached != "miss":
        part = np.append(prompt[:40], [5, 6, 7]).astype(np.int32)
        run(engine, {"prime": (part if cached == "partial" else prompt, one)})
    on_host = cached == "host"
    if on_host:
        harness.to_host(engine.kv)
        assert engine.stats().pool.evictable_pages == 0
    tiers = engine.kv.store.tiers
    assert tiers is not None
    before, requests, late = engine.stats(), {"asked": (prompt, sampling)}, {}
    loaded_before = tiers.counters.loaded_pages
    if busy:
        requests = {"other0": (prompt[3:50], SEEDED), **requests}
        late = {f"other{i}": (prompt[10 * i : 10 * i + 30], GREEDY if i % 2 else SEEDED) for i in range(1, 4)}
    made = run(engine, requests, retract="asked" if retracted else None, late=late, to_host=on_host)
    page = engine.config.cache.page_size
    whole = (len(prompt) - 1) // page * page
    expected = {"miss": 0, "partial": 40 // page * page, "hit": whole, "host": whole}[cached]
    assert engine.stats().cached_tokens - before.cached_tokens == expected
    loaded = (tiers.counters.loaded_pages - loaded_before) * page
    if retracted and on_host:
        assert loaded >= 2 * expected  # once more when it went on
    else:
        assert loaded == (expected if on_host else 0)
    after = engine.stats()
    assert before.tiers is not None
    assert after.tiers is not None
    assert after.tiers.host_hit_tokens - before.tiers.host_hit_tokens == (expected if on_host else 0)
    assert after.tiers.host_wrong_pages == 0
    assert not busy or engine.stats().num_mixed_steps > before.num_mixed_steps
    assert made["asked"] == answer
    assert (engine.scheduler.counters["accepted_tokens.text"] > accepted) == drafted
    pool = engine.stats().pool
    assert pool.free_pages + pool.evictable_pages == pool.num_pages
