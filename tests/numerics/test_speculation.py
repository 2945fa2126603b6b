"""Drafts change nothing: ids, texts, logprobs, usage, ends and the bytes of K/V are those of steps of one token.

{off, on} x {greedy, seeded, penalties, stop strings and ids within a run, max_tokens within one, logprobs, n = 2} x
{fp32, bf16 weights, int8 weights, int8 K/V, both, a window, latent attention, experts, PyTorch's attention} x
{page 1, 16} x {alone, together}, transfer, failover; retraction is in test_same_answer.py. What is drafted is what the
answer without drafts was, every sixth token wrong, so that runs of each length end in each way; that this is tried
whatever it costs is the tests' own.
"""

import functools
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from replicas.engine.engine import Engine
from replicas.scheduler.rounds import Feature
from replicas.scheduler.speculation import Speculation
from replicas.types import Constraint, GenerateRequest, SamplingParams, TokenDelta
from tests import harness
from tests.embedded import MODEL, short_model
from tests.local_agents import LocalFabric
from tests.numerics import handing_over, tiny
from tests.pairwise import cases
from tests.told_speculation import Told, put_drafts

pytestmark = pytest.mark.model

NUM_NEW = 40
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.8, top_p=0.95, seed=7)
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    "seeded penalties": replace(SEEDED, frequency_penalty=0.6, logit_bias=((11, 3.0),), top_k=20),
    "two": replace(SEEDED, n=2, seed=3),
    "short": replace(GREEDY, max_new_tokens=9),
    "words": replace(SEEDED, bad_words=((5, 6), (9,)), seed=11),
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("short", {}),
    "bf16": ("short", {"dtype": "bfloat16"}),  # weights, and K/V as they are
    "int8": ("short", {"quantization": "int8"}),
    "int8 K/V": ("short", {"kv_dtype": "int8"}),
    "int8 and int8 K/V": ("short", {"quantization": "int8", "kv_dtype": "int8"}),
    "bf16 K/V": ("short", {"kv_dtype": "bfloat16"}),
    "int4": ("short", {"quantization": "int4"}),
    "torch": ("short", {"attention": "torch_native"}),
    "window": ("window", {}),
    "latent": ("v3", {}),
    "experts": ("qwen3-moe", {}),
}
Answer = tuple[list[int], str, tuple[object, ...], object, object]  # ids, text, logprobs, usage, finish
Answers = dict[tuple[str, int], Answer]


def run(engine: Engine, asked: list[GenerateRequest], drafts: Feature | None, *, flush: bool = True) -> Answers:
    """Answer ``asked`` together, the cache empty at first."""
    assert not flush or engine.flush_cache()
    put_drafts(engine.scheduler, drafts)
    told: dict[tuple[str, int], list[TokenDelta]] = defaultdict(list)
    for request in asked:
        engine.submit(request)
    while engine.has_work:
        deltas = engine.step()
        assert len({(delta.rid, delta.index) for delta in deltas}) == len(deltas), "a choice has one event a step"
        for delta in deltas:
            told[(delta.rid, delta.index)].append(delta)
        engine.scheduler.check()
    pool = engine.stats().pool
    assert pool.free_pages + pool.evictable_pages == pool.num_pages
    return {key: whole(deltas) for key, deltas in told.items()}


def whole(deltas: list[TokenDelta]) -> Answer:
    ids = [token for delta in deltas for token in delta.token_ids]
    logprobs = tuple(each for delta in deltas for each in delta.logprobs)
    usage = replace(deltas[-1].usage, drafted_tokens=0, accepted_tokens=0)  # which alone tell that there were drafts
    return ids, "".join(delta.text for delta in deltas), logprobs, usage, deltas[-1].finish


def ids_of(answers: Answers) -> dict[tuple[str, int], list[int]]:
    return {key: answer[0] for key, answer in answers.items()}


def prompt_of(engine: Engine, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, engine.config.model.vocab_size, length).astype(np.int32)


def requests(engine: Engine) -> list[GenerateRequest]:
    """One of each kind of sampling; the prompts have 5 to 200 tokens."""
    return [
        GenerateRequest(
            rid=name, token_ids=prompt_of(engine, 5 + 32 * number, number), sampling=sampling,
            return_logprobs=number % 2 == 0, top_logprobs=3 if number % 2 == 0 else 0,
        )
        for number, (name, sampling) in enumerate(SAMPLINGS.items())
    ]  # fmt: skip


def cached_bytes(engine: Engine, token_ids: np.ndarray) -> np.ndarray:
    """The K and V that the cache keeps of a sequence."""
    match, kv_bytes = engine.kv.cache.match_prefix(token_ids, ""), engine.executor.kv_bytes
    assert kv_bytes is not None
    page = engine.kv.page_size
    slots = (match.pages[:, None] * page + np.arange(page, dtype=np.int32)).reshape(-1)
    return kv_bytes.read(slots)


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Engine]]:
    with harness.one_at_a_time(functools.partial(make_engine, tmp_path_factory.mktemp("models"))) as of:
        yield of


def make_engine(folder: Path, kind: str, page: int) -> Engine:
    model, changes = KINDS[kind]
    changes = dict(changes)
    if model == "short":
        path = short_model()
    else:
        path = str(folder / model)
        if not Path(path).exists():
            if model == "window":
                tiny.save("mistral", Path(path), sliding_window=24)
            else:
                tiny.save(model, Path(path))
            for file in Path(MODEL).glob("*token*.json"):
                shutil.copy(file, path)
    cache = {"kv_dtype": changes.pop("kv_dtype", None)}
    return harness.small_engine(path, page=page, chunk=512, cache=cache, **changes)


@cases(kind=list(KINDS), page=(1, 16), length=(1, 7))
def test_answers_and_their_k_and_v_are_equal_with_drafts_and_without(
    engine_of: Callable[[str, int], Engine], kind: str, page: int, length: int
) -> None:
    """Of all kinds of requests together, and of each alone."""
    engine = engine_of(kind, page)
    asked, counters = requests(engine), engine.scheduler.counters
    wanted = run(engine, asked, None)
    kept = {request.rid: cached_bytes(engine, request.token_ids) for request in asked}
    long = np.concatenate([asked[0].token_ids, np.array(wanted[("greedy", 0)][0], np.int32)])
    of_long = cached_bytes(engine, long)
    before = counters["accepted_tokens.text"]
    drafts = Told(engine, ids_of(wanted), length)
    assert run(engine, asked, drafts) == wanted
    if engine.kv.window is None:  # else pages before it go back, sooner or later
        assert len(long) - page <= of_long.shape[2] <= len(long)
        assert np.array_equal(cached_bytes(engine, long), of_long)
    assert all(np.array_equal(cached_bytes(engine, request.token_ids), kept[request.rid]) for request in asked)
    assert counters["accepted_tokens.text"] - before > 80
    assert engine.stats().tokens_per_step > 1.3
    for request in asked[1:4:2]:
        alone = run(engine, [request], drafts)
        assert alone == {key: answer for key, answer in wanted.items() if key[0] == request.rid}


@pytest.mark.parametrize("kind", ["fp32", "int8 K/V"])
def test_an_answer_ends_within_a_run_where_it_would_have_ended(
    engine_of: Callable[[str, int], Engine], kind: str
) -> None:
    """At each token of a run, by an id, by a string and by its length; also where no id may end it before."""
    engine = engine_of(kind, 16)
    prompt = prompt_of(engine, 60, 1)
    first = GenerateRequest(rid="a", token_ids=prompt, sampling=SEEDED, return_logprobs=True)
    answers = run(engine, [first], None)
    ids, text = answers[("a", 0)][:2]
    told = Told(engine, ids_of(answers))
    for at in range(6, 12):
        ends = [
            replace(SEEDED, max_new_tokens=at),
            replace(SEEDED, stop_token_ids=(ids[at],)),
            replace(SEEDED, stop_token_ids=(ids[at],), min_new_tokens=at + 2),
            replace(SEEDED, stop=(text[4 * at : 4 * at + 5],)),
            replace(SEEDED, stop=(text[4 * at : 4 * at + 5],), include_stop=True, max_new_tokens=12),
        ]
        for sampling in ends:
            asked = replace(first, sampling=sampling)
            wanted = run(engine, [asked], None)
            assert run(engine, [asked], told) == wanted


@pytest.mark.parametrize("num_delivered", [1, 8, 17])
def test_an_answer_goes_on_elsewhere_behind_what_was_delivered(
    engine_of: Callable[[str, int], Engine], num_delivered: int
) -> None:
    engine = engine_of("fp32", 16)
    asked = [each for each in requests(engine) if each.sampling.n == 1 and each.sampling.max_new_tokens == NUM_NEW]
    wanted = run(engine, asked, None)
    resumed = [replace(each, resumed_ids=tuple(wanted[(each.rid, 0)][0][:num_delivered])) for each in asked]
    made = run(engine, resumed, Told(engine, ids_of(wanted)))
    assert ids_of(made) == {key: ids[num_delivered:] for key, ids in ids_of(wanted).items()}


def test_a_request_that_was_handed_over_is_decoded_with_drafts(tmp_path: Path) -> None:
    """With the answer of one replica without drafts; what the decode side then has cached is the same, too."""
    folder, fabric = str(handing_over.save_models(tmp_path)["gqa"]), LocalFabric()
    prefill, decode = (handing_over.make_engine(folder, 16, 32, fabric) for _ in range(2))
    unified = handing_over.make_engine(folder, 16, 32, None)
    sampling = replace(SEEDED, max_new_tokens=30)
    prompt = handing_over.tiny_prompt(80, 3)
    request = GenerateRequest(rid="asked", token_ids=prompt, sampling=sampling, return_logprobs=True, top_logprobs=3)
    wanted = run(unified, [request], None)
    decode.scheduler.features["speculation"] = Told(decode, ids_of(wanted))
    assert prefill.transfer_address is not None
    for engine, leg in zip((prefill, decode), handing_over.legs(request, prefill.transfer_address), strict=True):
        engine.submit(leg)
    made = whole(handing_over.run([prefill, decode])[1])
    assert made[:2] == wanted[("asked", 0)][:2]
    assert made[4] == wanted[("asked", 0)][4]
    assert decode.scheduler.counters["accepted_tokens.text"] > 15
    for engine in (prefill, decode, unified):
        engine.scheduler.check()
        engine.close()


def test_a_prompt_that_was_answered_before_is_answered_alike(engine_of: Callable[[str, int], Engine]) -> None:
    """Out of the tree, whoever asks together, and by another namespace's none; what is tried costs as good as nothing
    here."""
    engine = engine_of("fp32", 16)
    counters = engine.scheduler.counters
    asked = [replace(each, sampling=replace(each.sampling, n=1)) for each in requests(engine)]
    run(engine, asked, None)
    wanted = run(engine, asked, None, flush=False)
    drafts = Speculation(engine.kv, counters, step_s={}, clock=time.monotonic)
    before = counters["accepted_tokens.tree"]
    assert run(engine, asked, drafts, flush=False) == wanted
    accepted = counters["accepted_tokens.tree"] - before
    assert accepted > 60
    assert all(run(engine, [each], drafts, flush=False)[(each.rid, 0)] == wanted[(each.rid, 0)] for each in asked)
    assert counters["accepted_tokens.tree"] - before > 2 * accepted
    before, others = counters["drafted_tokens.tree"], [replace(each, cache_salt="other") for each in asked]
    assert ids_of(run(engine, others, drafts, flush=False)) == ids_of(wanted)
    assert counters["drafted_tokens.tree"] == before


PERSON = {
    "type": "object", "additionalProperties": False, "required": ["name", "colours"],
    "properties": {
        "name": {"type": "string", "maxLength": 30}, "colours": {"type": "array", "items": {"enum": ["red", "blue"]}},
    },
}  # fmt: skip
SCHEMA = Constraint(kind="json_schema", text=json.dumps(PERSON))


@pytest.mark.parametrize("length", [1, 3, 7])
def test_a_constrained_answer_is_the_same_with_drafts_that_its_grammar_allows_and_others(
    engine_of: Callable[[str, int], Engine], length: int
) -> None:
    """Also where it ends within a run, where an id of its own ends it, and where the constraint begins late. What is
    forced follows a draft, and is computed as it is without."""
    engine = engine_of("fp32", 16)
    counters, after = engine.scheduler.counters, replace(SCHEMA, after="e")
    free = replace(SEEDED, constraint=None)
    samplings = {
        "greedy": GREEDY, "seeded": SEEDED, "short": replace(GREEDY, max_new_tokens=11),
        "penalties": replace(SEEDED, frequency_penalty=0.7), "words": replace(SEEDED, bad_words=((5, 6), (9,))),
        "ends": replace(SEEDED, stop_token_ids=(28,)), "late": replace(SEEDED, temperature=1.5),
    }  # fmt: skip
    asked = [
        GenerateRequest(
            rid=name, token_ids=prompt_of(engine, 5 + 20 * number, number), return_logprobs=True, top_logprobs=2,
            sampling=replace(sampling, constraint=after if name == "late" else SCHEMA),
        )
        for number, (name, sampling) in enumerate(samplings.items())
    ]  # fmt: skip
    asked.append(GenerateRequest(rid="free", token_ids=prompt_of(engine, 30, 9), sampling=free, return_logprobs=True))
    run(engine, asked, None)  # compiles the grammars: until then their requests join the others' steps one by one
    wanted = run(engine, asked, None)
    before, forced = counters["accepted_tokens.text"], counters["forced_tokens"]
    told = Told(engine, ids_of(wanted), length)
    assert run(engine, asked, told) == wanted
    assert counters["accepted_tokens.text"] - before > 60
    assert counters["forced_tokens"] > forced
    for each in asked:
        assert run(engine, [each], told) == {key: answer for key, answer in wanted.items() if key[0] == each.rid}


def test_an_engine_measures_rows_at_its_start_and_answers_as_one_without_drafts() -> None:
    """Greedy, the model repeats itself; what is tried is decided by the time that steps take here."""
    answers = []
    sides: tuple[Literal["off", "auto"], ...] = ("off", "auto")
    for drafts in sides:
        engine = harness.small_engine(short_model(), chunk=512, scheduler={"speculation": drafts})
        has_drafts = "speculation" in engine.scheduler.features
        assert has_drafts == (drafts == "auto") == bool(engine.started.decode_s)
        answers.append(run(engine, requests(engine), engine.scheduler.features.get("speculation")))
        engine.close()
    assert answers[0] == answers[1]
