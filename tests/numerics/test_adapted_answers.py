"""Adapters (LoRA): each request's answer is that of its own adapter, bit for bit whatever runs beside it and however it
got there, and that of PEFT's merged model. The model is SmolLM2's first blocks; adapters are of random numbers."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtransfer.replay.snapshot import ReplaySnapshot
from replicas.checkpoints.adapters import identify
from replicas.config import (
    AdapterLimits,
    CacheConfig,
    DType,
    Implementation,
    Quantization,
)
from replicas.engine.engine import Engine
from replicas.errors import Fault
from replicas.launch import EngineSettings, load_engine
from replicas.replay.replay import extract, restore
from replicas.types import AdapterRef, Finish, GenerateRequest, SamplingParams
from tests import harness
from tests.adapters import TARGETS, make_adapter
from tests.embedded import short_model
from tests.numerics import tiny
from tests.pairwise import cases

pytestmark = pytest.mark.model

NUM_NEW = 12
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=7)
HOST_BYTES = 5 << 20
PROMPT = np.random.default_rng(34).integers(3, 40_000, 90).astype(np.int32)
NUMBERS: dict[str, tuple[DType, Quantization]] = {
    "fp32": ("float32", "none"), "bf16": ("bfloat16", "none"), "int8": ("float32", "int8"),
    "int4": ("bfloat16", "int4"),
}  # fmt: skip


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef | None]:
    """The model alone, then four adapters of different ranks and targets, and one that is kept in bfloat16."""
    folder, model = tmp_path_factory.mktemp("adapters"), Path(short_model())
    kinds = [(4, TARGETS), (8, ("q_proj", "v_proj")), (16, TARGETS), (5, ("up_proj", "down_proj", "o_proj"))]
    return [
        None,
        *(
            make_adapter(folder / f"{seed}", model, rank=rank, seed=seed, targets=targets)
            for seed, (rank, targets) in enumerate(kinds)
        ),
        make_adapter(folder / "narrow", model, rank=6, seed=len(kinds), dtype=torch.bfloat16),
    ]


def make_engine(
    *, page: int = 16, chunk: int = 512, tp: int = 1, numbers: str = "fp32", limits: AdapterLimits | None = None,
    drafts: bool = False,
) -> Engine:  # fmt: skip
    dtype, quantization = NUMBERS[numbers]
    return harness.small_engine(
        short_model(), page=page, tokens=4096, chunk=chunk, tp=tp, context=1024, dtype=dtype, quantization=quantization,
        cache={"host_memory_bytes": HOST_BYTES, "write_policy": "write_back"},
        scheduler={"speculation": "auto" if drafts else "off"}, adapters=limits or AdapterLimits(),
    )  # fmt: skip


ENGINES = {"page16-whole": (16, 512), "page1-chunked": (1, 32), "page16-chunked": (16, 32)}


@pytest.fixture(scope="module")
def engine_of() -> Iterator[Callable[..., Engine]]:
    with harness.one_at_a_time(make_engine) as of:
        yield of


@dataclass(slots=True)
class Answer:
    """What came of one request."""

    ids: list[int]
    logprobs: list[float | None]
    finish: Finish | None = None
    num_before: int = 0  # answers that had ended when its first token came


def asked(rid: str, adapter: AdapterRef | None, ids: np.ndarray = PROMPT, **more: object) -> GenerateRequest:
    fields: dict[str, object] = {"sampling": GREEDY, "return_logprobs": True} | more
    return GenerateRequest(rid=rid, token_ids=ids, adapter=adapter, **fields)  # type: ignore[arg-type]


def run(
    engine: Engine, requests: Sequence[GenerateRequest], *, late: Sequence[GenerateRequest] = (),
    retract: str | None = None, to_host: bool = False,
) -> dict[str, Answer]:  # fmt: skip
    """Answers by rid. ``late`` come when the first request has made some tokens; ``retract`` names a request that loses
    its pages in the middle of its answer, and ``to_host`` has them leave the device then."""
    made = {each.rid: Answer([], []) for each in (*requests, *late)}
    waiting = list(late)
    for each in requests:
        assert engine.submit(each) == []
    while engine.open_rids or waiting:
        if not engine.has_work:
            time.sleep(0.001)  # an adapter is being read
        for delta in engine.step():
            answer = made[delta.rid]
            if delta.token_ids and not answer.ids:
                answer.num_before = sum(each.finish is not None for each in made.values())
            answer.ids += delta.token_ids
            answer.logprobs += [each.logprob for each in delta.logprobs]
            answer.finish = delta.finish
        while waiting and len(made[requests[0].rid].ids) >= 3:
            engine.submit(waiting.pop())
        if retract is not None and len(made[retract].ids) >= NUM_NEW // 2:
            harness.retract(engine.scheduler, next(r for r in engine.scheduler.queues.running if r.rid == retract))
            if to_host:
                harness.to_host(engine.kv)
            retract = None
    engine.scheduler.check()
    return made


def flush(engine: Engine) -> None:
    assert engine.flush_cache()


@pytest.mark.parametrize("numbers", NUMBERS)
def test_the_model_and_five_adapters_in_one_batch_answer_as_each_alone(
    engine_of: Callable[..., Engine], adapters: list[AdapterRef | None], numbers: str
) -> None:
    """Ids and logprobs, bit for bit; and no two of them answer alike."""
    engine = engine_of(numbers=numbers)
    flush(engine)
    mixed = run(engine, [asked(f"{i}", each, sampling=SEEDED) for i, each in enumerate(adapters)])
    for i, each in enumerate(adapters):
        flush(engine)
        alone = run(engine, [asked("alone", each, sampling=SEEDED)])["alone"]
        assert (alone.ids, alone.logprobs) == (mixed[f"{i}"].ids, mixed[f"{i}"].logprobs)
        assert alone.finish is not None
        assert len(alone.ids) == NUM_NEW
    assert len({tuple(answer.logprobs) for answer in mixed.values()}) == len(adapters)


@cases(
    engine=ENGINES,
    adapter={"rank4": 1, "rank16": 3, "of the MLP": 4, "in bf16": 5},
    sampling={"greedy": GREEDY, "seeded": SEEDED},
    cached=("miss", "partial", "hit", "host"),
    busy={"alone": False, "busy": True},
    retracted={"kept": False, "retracted": True},
)
def test_the_same_answer_on_every_path(
    engine_of: Callable[..., Engine], adapters: list[AdapterRef | None], engine: tuple[int, int], adapter: int,
    sampling: SamplingParams, cached: str, busy: bool, retracted: bool,
) -> None:  # fmt: skip
    """Pages of the same prompt under another adapter, and of the model alone, are always cached too."""
    made, ref = engine_of(page=engine[0], chunk=engine[1]), adapters[adapter]
    flush(made)
    expected = run(made, [asked("plain", ref, sampling=sampling)])["plain"]
    flush(made)
    one = replace(GREEDY, max_new_tokens=1)
    run(made, [asked("model", None, sampling=one), asked("other", adapters[2], sampling=one)])
    page, whole = engine[0], (len(PROMPT) - 1) // engine[0] * engine[0]
    if cached != "miss":
        part = np.append(PROMPT[:40], [5, 6, 7]).astype(np.int32)
        run(made, [asked("prime", ref, part if cached == "partial" else PROMPT, sampling=one)])
    if cached == "host":
        harness.to_host(made.kv)
    before = made.stats().cached_tokens
    late = [asked(f"late{i}", each, PROMPT[i + 1 : i + 30]) for i, each in enumerate(adapters)] if busy else []
    answers = run(
        made, [asked("asked", ref, sampling=sampling)], late=late,
        retract="asked" if retracted else None, to_host=cached == "host",
    )  # fmt: skip
    reused = {"miss": 0, "partial": 40 // page * page, "hit": whole, "host": whole}[cached]
    assert made.stats().cached_tokens - before == reused
    assert answers["asked"].ids == expected.ids


def test_drafts_change_no_answer(adapters: list[AdapterRef | None]) -> None:
    """Of a prompt that repeats itself, so that drafts are tried; rows of drafts have their request's adapter."""
    ids, most = np.tile(PROMPT[:12], 9), replace(GREEDY, max_new_tokens=32)
    requests = [asked(f"{i}", each, ids, sampling=most) for i, each in enumerate(adapters[:3])]
    answers = []
    for drafts in (False, True):
        with closing(make_engine(drafts=drafts)) as engine:
            answers.append({rid: answer.ids for rid, answer in run(engine, requests).items()})
            assert (sum(engine.stats().drafted_tokens.values()) > 0) == drafts
    assert answers[0] == answers[1]


def test_each_adapter_answers_as_pefts_merged_model(
    engine_of: Callable[..., Engine], adapters: list[AdapterRef | None]
) -> None:
    """24 equal greedy ids, and their logprobs within 1e-4 of the logits' range, all in one batch."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine, num = engine_of(page=16, chunk=512), 24
    flush(engine)
    most = replace(GREEDY, max_new_tokens=num)
    made = run(engine, [asked(f"{i}", each, sampling=most) for i, each in enumerate(adapters)])
    for i, ref in enumerate(adapters[1:], start=1):
        assert ref is not None
        base = AutoModelForCausalLM.from_pretrained(short_model(), dtype=torch.float32)
        merged = PeftModel.from_pretrained(base, ref.path).merge_and_unload()
        answer = made[f"{i}"]
        with torch.inference_mode():
            prompt = torch.from_numpy(PROMPT).long()[None]
            ids = merged.generate(prompt, max_new_tokens=num, min_new_tokens=num, do_sample=False)
            assert ids[0, len(PROMPT) :].tolist() == answer.ids
            logits = merged(ids).logits[0, len(PROMPT) - 1 : -1].float()
        theirs = logits.log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        apart = (theirs - torch.tensor(answer.logprobs)).abs().max()
        assert apart < 1e-4 * (logits.max() - logits.min())


def test_adapters_used_least_recently_make_room_and_those_in_use_stay(
    tmp_path: Path, engine_of: Callable[..., Engine]
) -> None:
    refs = [make_adapter(tmp_path / f"{i}", Path(short_model()), rank=16, seed=i) for i in range(4)]
    requests = [asked(f"{i}", ref) for i, ref in enumerate(refs)]
    plain = engine_of(page=16, chunk=512)
    flush(plain)
    expected = {rid: answer.ids for rid, answer in run(plain, requests).items()}
    with closing(make_engine(limits=AdapterLimits(host_bytes=2 * _num_bytes(refs[0])))) as engine:
        together = run(engine, requests)  # two run, the others wait for room
        assert {rid: answer.ids for rid, answer in together.items()} == expected
        stats = engine.stats().adapters
        assert stats is not None
        assert (stats.num_loads, stats.num_dropped, len(stats.held)) == (4, 2, 2)
        assert stats.num_bytes == 2 * _num_bytes(refs[0])  # kernels pad nothing of rank 16
        assert stats.load_s > 0
        kept, left = stats.held[0], next(ref for ref in refs if ref.identity not in stats.held)
        run(engine, [asked("again", next(ref for ref in refs if ref.identity == kept))])
        run(engine, [asked("new", left)])  # the one that was just used stays
        after = engine.stats().adapters
        assert after is not None
        assert after.held == (kept, left.identity)


def test_a_chat_waits_for_no_line_of_a_batch_whose_adapter_is_in_its_place(
    tmp_path: Path, engine_of: Callable[..., Engine]
) -> None:
    refs = [make_adapter(tmp_path / f"{i}", Path(short_model()), rank=16, seed=i) for i in range(4)]
    plain = engine_of(page=16, chunk=512)
    flush(plain)
    expected = run(plain, [asked(f"{i}", ref) for i, ref in enumerate(refs)])
    with closing(make_engine(limits=AdapterLimits(host_bytes=2 * _num_bytes(refs[0])))) as engine:
        lines = [asked(f"{i}", ref, offline=True) for i, ref in enumerate(refs[:3])]  # two run, one waits for room
        answers = run(engine, lines, late=[asked("3", refs[3])])
    assert answers["3"].num_before == 0
    assert {rid: answer.ids for rid, answer in answers.items()} == {rid: each.ids for rid, each in expected.items()}


@pytest.mark.parametrize(
    ("dtype", "num_bytes", "tp"),
    [(torch.float32, 4, 1), (torch.bfloat16, 2, 1), pytest.param(torch.bfloat16, 2, 3, marks=pytest.mark.slow)],
)
def test_what_an_adapter_takes_is_counted_as_the_kernels_have_it_on_all_ranks(
    tmp_path: Path, dtype: torch.dtype, num_bytes: int, tp: int
) -> None:
    """A rank of 4 lies in panels of 16. Each rank has its columns of A, and all of B."""
    ref = make_adapter(tmp_path / "a", Path(short_model()), rank=4, targets=("o_proj",), dtype=dtype)
    with closing(make_engine(tp=tp)) as engine:
        run(engine, [asked("a", ref)])
        stats = engine.stats().adapters
    assert stats is not None
    assert stats.num_bytes == 4 * num_bytes * (16 * 576 + tp * 576 * 4)  # of four blocks


def _num_bytes(ref: AdapterRef) -> int:
    return identify(Path(ref.path)).num_bytes


def test_what_cannot_be_adapted_or_has_changed_ends_its_request_alone(
    tmp_path: Path, engine_of: Callable[..., Engine], adapters: list[AdapterRef | None]
) -> None:
    engine, model = engine_of(page=16, chunk=512), Path(short_model())
    changed = make_adapter(tmp_path / "changed", model, seed=1)
    make_adapter(tmp_path / "changed", model, seed=2)
    gone = make_adapter(tmp_path / "gone", model)
    shutil.rmtree(gone.path)
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    text = (model / "config.json").read_text()
    (narrow / "config.json").write_text(text.replace('"hidden_size": 576', '"hidden_size": 288'))
    deep = tmp_path / "deep"
    deep.mkdir()
    (deep / "config.json").write_text(text.replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))
    wider = make_adapter(tmp_path / "b", deep)
    cases_ = {
        "changed": (changed, "has changed", Fault.UNAVAILABLE),
        "gone": (gone, "has no adapter_config.json", Fault.UNAVAILABLE),
        "narrow": (make_adapter(tmp_path / "a", narrow), "is another model's", Fault.INVALID),
        "deep": (wider, "model.layers.4.mlp.down_proj (7 in all) cannot be changed", Fault.INVALID),
    }
    answers = run(engine, [asked("fine", adapters[1]), *(asked(rid, ref) for rid, (ref, *_) in cases_.items())])
    assert len(answers["fine"].ids) == NUM_NEW
    for rid, (_, said, fault) in cases_.items():
        finish = answers[rid].finish
        assert finish is not None
        assert finish.fault is fault
        assert finish.retry_as == (None if fault is Fault.INVALID else "overloaded")
        assert finish.message is not None
        assert said in finish.message, finish.message


@pytest.mark.parametrize(
    ("kind", "implementation", "targets", "said"),
    [
        ("qwen3-moe", "auto", ("q_proj", "o_proj"), ""),
        ("qwen3-moe", "auto", ("down_proj",), "mlp.down_proj (2 in all) cannot be changed by an adapter here"),
        ("v3", "auto", ("o_proj",), "self_attn.o_proj (3 in all) cannot be changed by an adapter here"),
        ("qwen2", "transformers", ("q_proj",), "no layer of this model can"),
    ],
)
def test_experts_latent_attention_and_models_of_transformers_are_refused_by_name(
    tmp_path: Path, kind: str, implementation: Implementation, targets: tuple[str, ...], said: str
) -> None:
    """But the attention beside experts has adapters, and so has a dense layer: in Qwen3's MoE layer 1 is one."""
    tiny.save(kind, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(short_model(), name), tmp_path / "model")
    ref = make_adapter(tmp_path / "a", tmp_path / "model", rank=4, targets=targets, size=1.0)
    settings = EngineSettings(
        model=str(tmp_path / "model"), num_threads=1, implementation=implementation,
        cache=CacheConfig(max_total_tokens=512), adapters=AdapterLimits(),
    )  # fmt: skip
    ids = np.arange(3, 26, dtype=np.int32)
    with closing(load_engine(settings)) as engine:
        answers = run(engine, [asked("model", None, ids), asked("adapted", ref, ids)])
    finish = answers["adapted"].finish
    assert finish is not None
    if said:
        assert finish.fault is Fault.INVALID
        assert said in (finish.message or "")
    else:
        assert answers["adapted"].logprobs != answers["model"].logprobs


def test_a_snapshot_goes_on_with_its_adapter(
    engine_of: Callable[..., Engine], adapters: list[AdapterRef | None], tmp_path: Path
) -> None:
    """In another engine, which loads it then."""
    engine = engine_of(page=16, chunk=512)
    flush(engine)
    whole = run(engine, [asked("whole", adapters[3], sampling=SEEDED)])["whole"].ids
    engine.submit(asked("taken", adapters[3], sampling=SEEDED, cache_salt="s"))
    for _ in range(6):
        engine.step()
    extract(engine, "taken").save(tmp_path / "s")
    engine.abort("taken")
    snapshot = ReplaySnapshot.load(tmp_path / "s")
    with closing(make_engine()) as other:
        assert restore(other, snapshot) == []
        req = other.find("taken")
        assert req is not None
        assert adapters[3] is not None
        assert req.salt == adapters[3].space + "s"
        rest = [token for _ in range(NUM_NEW) for delta in other.step() for token in delta.token_ids]
    assert 0 < len(rest) < NUM_NEW
    assert snapshot.output_ids.tolist() + rest == whole


@pytest.mark.slow
def test_three_ranks_answer_as_one(engine_of: Callable[..., Engine], adapters: list[AdapterRef | None]) -> None:
    requests = [asked(f"{i}", each) for i, each in enumerate(adapters)]
    one = engine_of(page=16, chunk=512)
    flush(one)
    expected = {rid: answer.ids for rid, answer in run(one, requests).items()}
    three = engine_of(page=16, chunk=512, tp=3)
    assert {rid: answer.ids for rid, answer in run(three, requests).items()} == expected
    for i, each in enumerate(adapters):
        flush(three)
        assert run(three, [asked("alone", each)])["alone"].ids == expected[f"{i}"]
