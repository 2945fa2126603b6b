"""Same answer on every path: ids, texts, logprobs and ends do not depend on how the engine got there. The model is
SmolLM2's first blocks, with adapters of random numbers.

{fp32, bf16, bf16 widened, int4, int8} x {page 1, 16} x {chunked, not} x {steps made ahead, not} x {TP 1, 3} x {what is
asked for} x {adapters} x {miss, hit, partial hit, hit on the host} x {alone, busy batch} x {retracted and resumed, not}
x {a token a step, drafts of two} x {from the start, behind tokens that another delivered}: every two of these values
meet (tests/pairwise.py). In a busy batch some of the answer's tokens are made in steps that mix: prompts of others come
while it is written. What is to be found on the host has left the device pool before the request comes, and again when
it is retracted. The oracle is the plainest path in the same numbers, which says in fp32 what Transformers says: in
others what a CPU's dot products or tiles make has its own last bits.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replicas.config import AdapterLimits, DType, Quantization
from replicas.engine.engine import Engine
from replicas.kernels import bf16_tiles
from replicas.scheduler.plan import ExtendPlan, StepPlan
from replicas.text.tokenizer import Tokenizer
from replicas.types import AdapterRef, Constraint, GenerateRequest, SamplingParams, TokenDelta
from tests import harness
from tests.adapters import TARGETS, make_adapter
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
NUM_EARLY, NUM_KEPT = 3, 6  # tokens of "asked" before the others' prompts come, and before it is retracted
NUM_DELIVERED = 7
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.9, top_p=0.95, top_k=50, seed=7, ignore_eos=True)
ONE = replace(GREEDY, max_new_tokens=1)
FORM = Constraint(kind="regex", text="The answers are: [a-z ]{80}")  # it begins with a run that is forced
ASKED = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": replace(SEEDED, repetition_penalty=1.3, frequency_penalty=0.4, logit_bias=((11, 3.0),)),
    "two": replace(SEEDED, n=2, seed=3),
    "masks": replace(
        SEEDED, allowed_token_ids=tuple(range(17, 9000)), bad_words=((28,), (260, 282)), ignore_eos=False,
        min_new_tokens=NUM_NEW, stop_token_ids=(29, 30),
    ),
    "held": replace(SEEDED, constraint=FORM),
}  # fmt: skip
NUMBERS: dict[str, tuple[DType, Quantization]] = {
    "fp32": ("float32", "none"), "bf16": ("bfloat16", "none"), "bf16-widened": ("bfloat16", "none"),
    "int4": ("bfloat16", "int4"), "int8": ("float32", "int8"),
}  # fmt: skip
ENGINES = {  # page, chunk, and whether steps are made ahead
    "page16-whole": (16, 512, False),
    "page1-chunked": (1, 32, False),
    "page1-whole-ahead": (1, 512, True),
    "page16-chunked-ahead": (16, 32, True),
}
CACHED = ("miss", "partial", "hit", "host")
HOST_BYTES = 5 << 20  # about 850 tokens


def make_engine(page: int, chunk: int, ahead: bool, *, tp: int = 1, numbers: str = "fp32", **more: Any) -> Engine:
    """``bf16-widened``: as on a CPU that does not multiply bf16."""
    dtype, quantization = NUMBERS[numbers]
    with pytest.MonkeyPatch.context() as patch:
        if numbers == "bf16-widened":
            patch.setattr(bf16_tiles, "way", lambda: None)
        return harness.small_engine(
            short_model(), page=page, tokens=4096, chunk=chunk, tp=tp, context=1024, dtype=dtype,
            quantization=quantization, scheduler={"overlap": "on" if ahead else "off"}, adapters=AdapterLimits(),
            **{"cache": {"host_memory_bytes": HOST_BYTES, "write_policy": "write_back"}, **more},
        )  # fmt: skip


@pytest.fixture(scope="module")
def engine_of() -> Iterator[Callable[..., Engine]]:
    with harness.one_at_a_time(make_engine) as of:
        yield of


@pytest.fixture(scope="module")
def prompt() -> np.ndarray:
    return Tokenizer(MODEL).encode(TEXT)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AdapterRef | None]:
    """Of different ranks and targets, and one that is kept in bfloat16."""
    folder, model = tmp_path_factory.mktemp("adapters"), Path(short_model())
    kinds: dict[str, dict[str, Any]] = {
        "rank4": {"rank": 4}, "rank16": {"rank": 16}, "of the MLP": {"rank": 5, "targets": TARGETS[4:]},
        "in bf16": {"rank": 6, "dtype": torch.bfloat16},
    }  # fmt: skip
    made = {name: make_adapter(folder / name, model, seed=at, **kind) for at, (name, kind) in enumerate(kinds.items())}
    return {"none": None, **made}


ADAPTERS = ("none", "rank4", "rank16", "of the MLP", "in bf16")


def transformers_answer(prompt: np.ndarray) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(short_model(), dtype=torch.float32)
    with torch.inference_mode():
        ids = model.generate(
            torch.from_numpy(prompt).long()[None], max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False
        )
    return ids[0, len(prompt) :].tolist()


def asking(rid: str, ids: np.ndarray, sampling: SamplingParams, adapter: AdapterRef | None = None) -> GenerateRequest:
    return GenerateRequest(
        rid=rid, token_ids=ids, sampling=sampling, adapter=adapter, return_logprobs=True, top_logprobs=2
    )


Answers = dict[tuple[str, int], TokenDelta]  # by request and choice: all its deltas in one


def run(
    engine: Engine, requests: Sequence[GenerateRequest], *, late: Sequence[GenerateRequest] = (),
    retract: bool = False, to_host: bool = False,
) -> Answers:  # fmt: skip
    """``late`` come when "asked" has made NUM_EARLY tokens; with ``retract`` it loses its pages in the middle of its
    answer, and ``to_host`` has them leave the device then."""
    made, waiting = Answers(), list(late)

    def take(deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            key = (delta.rid, delta.index)
            made[key] = made[key].merge(delta) if key in made else delta

    for request in requests:
        take(engine.submit(request))
    while engine.open_rids or waiting or engine.has_work:
        if not engine.has_work:
            time.sleep(0.001)  # an adapter is being read
        take(engine.step())
        num_made = len(made["asked", 0].token_ids) if ("asked", 0) in made else 0
        while waiting and num_made >= NUM_EARLY:
            take(engine.submit(waiting.pop()))
        if retract and num_made >= NUM_KEPT:
            take(engine.land())
            harness.retract(engine.scheduler, next(r for r in engine.scheduler.queues.running if r.rid == "asked"))
            if to_host:
                harness.to_host(engine.kv)
            retract = False
    assert not retract, "the request was never in a state to be retracted"
    engine.scheduler.check()
    return made


def others(prompt: np.ndarray, refs: Sequence[AdapterRef | None]) -> list[GenerateRequest]:
    """What runs beside; the last asks for the logprobs of its prompt, which takes several steps in chunks."""
    starts = [(3, 47), (10, 30), (20, 30), (30, 30)]
    made = [
        asking(f"other{at}", prompt[start : start + length], GREEDY if at % 2 else SEEDED, refs[at % len(refs)])
        for at, (start, length) in enumerate(starts)
    ]
    return [*made, replace(asking("long", prompt, GREEDY), prompt_logprobs_from=5, cache_salt="other")]


class Oracle:
    """Answers of the plainest path, when they are first asked for: nothing cached, chunked, beside others, made ahead,
    drafted or retracted."""

    def __init__(
        self, engine: Callable[[], Engine], prompt: np.ndarray, adapters: Mapping[str, AdapterRef | None]
    ) -> None:
        self._engine, self._prompt, self._adapters = engine, prompt, adapters
        self.asked, self.others = functools.cache(self._asked), functools.cache(self._others)

    def _asked(self, what: str, adapter: str) -> Answers:
        return self._alone(asking("asked", self._prompt, ASKED[what], self._adapters[adapter]))

    def _others(self, adapted: bool) -> Answers:
        made = Answers()
        for request in others(self._prompt, list(self._adapters.values()) if adapted else [None]):
            made |= self._alone(request)
        return made

    def _alone(self, request: GenerateRequest) -> Answers:
        engine = self._engine()
        assert engine.flush_cache()
        return run(engine, [request])


@pytest.fixture(scope="module")
def oracle_of(prompt: np.ndarray, adapters: dict[str, AdapterRef | None]) -> Iterator[Callable[[str], Oracle]]:
    with harness.one_at_a_time(make_engine) as of:

        def plainest(numbers: str) -> Engine:
            engine = of(*ENGINES["page16-whole"], numbers=numbers)
            put_drafts(engine.scheduler, None)
            return engine

        yield functools.cache(lambda numbers: Oracle(lambda: plainest(numbers), prompt, adapters))


def test_the_plainest_path_says_what_transformers_says_and_samples_as_the_reference_backend(
    oracle_of: Callable[[str], Oracle], prompt: np.ndarray
) -> None:
    oracle = oracle_of("fp32")
    assert len({oracle.asked("greedy", name)["asked", 0].logprobs for name in ADAPTERS}) == len(ADAPTERS)
    assert list(oracle.asked("greedy", "none")["asked", 0].token_ids) == transformers_answer(prompt)
    engine = make_engine(16, 512, False, attention="torch_native", cache={"prefix_cache": "chunk"})
    made = run(engine, [asking("asked", prompt, SEEDED)])
    engine.close()
    assert made["asked", 0].token_ids == oracle.asked("seeded", "none")["asked", 0].token_ids


@cases(
    numbers=NUMBERS,
    engine=ENGINES.keys(),
    what=ASKED.keys(),
    adapter=ADAPTERS,
    cached=CACHED,
    busy={"alone": False, "busy": True},
    retracted={"kept": False, "retracted": True},
    drafted={"one": False, "drafted": True},
    delivered={"begun": 0, "resumed": NUM_DELIVERED},
)
def test_the_same_answer_on_every_path(
    engine_of: Callable[..., Engine], oracle_of: Callable[[str], Oracle], adapters: dict[str, AdapterRef | None],
    prompt: np.ndarray, numbers: str, engine: str, what: str, adapter: str, cached: str, busy: bool, retracted: bool,
    drafted: bool, delivered: int,
) -> None:  # fmt: skip
    oracle = oracle_of(numbers)
    made = engine_of(*ENGINES[engine], numbers=numbers)
    assert made.config.kv_dtype == NUMBERS[numbers][0]
    check_answer(
        made, oracle, prompt, adapters, what, adapter=adapter, cached=cached, busy=busy, retracted=retracted,
        drafted=drafted, delivered=delivered,
    )  # fmt: skip


@pytest.mark.slow
@cases(
    engine=("page1-whole-ahead", "page16-chunked-ahead", "page16-chunked"), what=ASKED.keys(), adapter=ADAPTERS,
    cached=CACHED, disturbed={"alone": False, "disturbed": True},
)  # fmt: skip
def test_the_same_answer_from_three_ranks(
    engine_of: Callable[..., Engine], oracle_of: Callable[[str], Oracle], adapters: dict[str, AdapterRef | None],
    prompt: np.ndarray, engine: str, what: str, adapter: str, cached: str, disturbed: bool,
) -> None:  # fmt: skip
    """Three processes on two cores are slow: either nothing disturbs the answer, or a busy batch and a retraction."""
    oracle, kind = oracle_of("fp32"), {**ENGINES, "page16-chunked": (16, 32, False)}[engine]
    check_answer(
        engine_of(*kind, tp=3), oracle, prompt, adapters, what, adapter=adapter, cached=cached, busy=disturbed,
        retracted=disturbed, ids_alone=True,
    )  # fmt: skip


def check_answer(
    engine: Engine, oracle: Oracle, prompt: np.ndarray, adapters: dict[str, AdapterRef | None], what: str, *,
    adapter: str, cached: str, busy: bool, retracted: bool, drafted: bool = False, delivered: int = 0,
    ids_alone: bool = False,
) -> None:  # fmt: skip
    """Pages of the same prompt under another adapter are always cached too."""
    wanted, sampling, ref = dict(oracle.asked(what, adapter)), ASKED[what], adapters[adapter]
    delivered = delivered if sampling.n == 1 else 0
    known = {key: list(answer.token_ids) for key, answer in wanted.items()}
    put_drafts(engine.scheduler, None)
    assert engine.flush_cache()
    primed = [asking("elsewhere", prompt, ONE, adapters["rank4" if adapter != "rank4" else "rank16"])]
    if cached != "miss":
        part = np.append(prompt[:40], [5, 6, 7]).astype(np.int32)
        primed.append(asking("prime", part if cached == "partial" else prompt, ONE, ref))
    run(engine, primed)
    on_host, tiers, counters = cached == "host", engine.kv.store.tiers, engine.scheduler.counters
    assert tiers is not None
    if on_host:
        harness.to_host(engine.kv)
        assert engine.stats().pool.evictable_pages == 0
    put_drafts(engine.scheduler, Told(engine, known, length=2) if drafted else None)
    before, accepted, forced = engine.stats(), counters["accepted_tokens.text"], counters["forced_tokens"]
    loaded_before = tiers.counters.loaded_pages
    first, *late = others(prompt, list(adapters.values()) if ref is not None else [None]) if busy else [None]
    asked = replace(asking("asked", prompt, sampling, ref), resumed_ids=tuple(known["asked", 0][:delivered]))
    requests = [asked] if first is None else [first, asked]
    made = run(engine, requests, late=late, retract=retracted, to_host=on_host)
    after, page = engine.stats(), engine.config.cache.page_size
    whole = (len(prompt) - (delivered == 0)) // page * page
    expected = {"miss": 0, "partial": 40 // page * page, "hit": whole, "host": whole}[cached]
    if sampling.n == 1:  # the second choice finds the pages of the first
        assert after.cached_tokens - before.cached_tokens == expected
        loaded = (tiers.counters.loaded_pages - loaded_before) * page
        # once more when it went on
        assert loaded >= 2 * expected if retracted and on_host else loaded == (expected if on_host else 0)
        assert before.tiers is not None
        assert after.tiers is not None
        assert after.tiers.host_hit_tokens - before.tiers.host_hit_tokens == (expected if on_host else 0)
        assert after.tiers.host_wrong_pages == 0
    assert not busy or after.num_mixed_steps > before.num_mixed_steps
    assert (counters["accepted_tokens.text"] > accepted) == drafted
    assert (counters["forced_tokens"] > forced) == (what == "held" and not delivered)
    wanted |= oracle.others(ref is not None) if busy else {}
    assert made.keys() == wanted.keys()
    for key, answer in made.items():
        skipped = delivered if key == ("asked", 0) else 0
        assert answer.token_ids == wanted[key].token_ids[skipped:], key
        assert wanted[key].text.endswith(answer.text)
        assert answer.finish == wanted[key].finish
        if not ids_alone:
            assert answer.logprobs == wanted[key].logprobs[skipped:], key
            assert answer.prompt_logprobs == wanted[key].prompt_logprobs
    pool = engine.stats().pool
    assert pool.free_pages + pool.evictable_pages == pool.num_pages


def test_prompts_that_extend_over_one_prefix_answer_as_each_alone(
    engine_of: Callable[..., Engine], prompt: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four, of 1 to 13 tokens behind 320 in common; the first is what Transformers says."""
    engine = engine_of(*ENGINES["page16-whole"])
    put_drafts(engine.scheduler, None)
    prefix = np.tile(prompt, 320 // len(prompt) + 1)[:320]
    requests = [
        asking(f"{n}", np.concatenate([prefix, prompt[20 : 20 + n]]), SEEDED if n == 9 else GREEDY)
        for n in (1, 5, 9, 13)
    ]
    plans: list[StepPlan | None] = []
    schedule = engine.scheduler.schedule
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: (plans.append(schedule()), plans[-1])[1])
    answers = []
    for batches in ([requests], [[each] for each in requests]):
        assert engine.flush_cache()
        run(engine, [asking("prime", np.append(prefix, 1).astype(np.int32), ONE)])
        plans.clear()
        made = {key: answer for batch in batches for key, answer in run(engine, batch).items()}
        groups = [group for plan in plans if isinstance(plan, ExtendPlan) for group in plan.prompt_groups]
        assert [len(group.members) for group in groups] == ([4] if len(batches) == 1 else [])
        answers.append({key: (answer.token_ids, answer.logprobs) for key, answer in made.items()})
    assert answers[0] == answers[1]
    assert list(answers[0]["1", 0][0]) == transformers_answer(requests[0].token_ids)
