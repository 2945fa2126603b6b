"""Models that keep a recurrent state, through Transformers' modules: Transformers' ids on every path of a request.

Tiny random models. The oracle is Transformers in fp32 with eager attention, the whole text at once and without a cache:
its own cached path does not carry Mamba's state into a second chunk.
"""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from deployments.replica.feasible import examined
from kvtransfer.types import TransferSettings
from replicas.cache import parts
from replicas.config import STATE_DRAFT, CacheConfig, Hardware, ParallelConfig, SchedulerConfig
from replicas.engine.engine import Engine
from replicas.errors import InvalidConfig, Overloaded
from replicas.launch import EngineSettings, load_engine, port_spec
from replicas.layers.tp_group import TpGroup
from replicas.loading.model_files import load_model_config
from replicas.memory import sizing
from replicas.memory.state_pool import Segment, StatePool
from replicas.models.own_parts import DeltaRule
from replicas.replay.replay import extract, restore
from replicas.resolve import resolve
from replicas.runner.kv_access import CarriedStates, RankedCopier
from replicas.scheduler.plan import PendingStep, StepPlan, StepResult
from replicas.types import CacheBreakpoint, Finish, GenerateRequest, SamplingParams, StateCopy, TokenDelta
from tests.harness import load_always, to_host
from tests.numerics.paged import assert_close_in_range, open_model
from tests.numerics.test_transformers_models import make
from tests.numerics.tiny import assert_greedy, uncached
from tests.told_speculation import Told, put_drafts
from tests.unit.tokenizer_folders import byte_level_folder
from tools.models_table import tiny_config

DELTA_RULE, STATE_SPACE, CONVOLUTION, SCAN = "qwen3_next", "bamba", "lfm2", "mamba"
# as wide as our kernels need; the narrower ones of other tests run the module's own functions
OWN_KERNELS = {name: {"linear_key_head_dim": 32, "linear_value_head_dim": 32} for name in (DELTA_RULE, "olmo_hybrid")}
OWN_KERNELS["kimi_linear"] = {"linear_head_dim": 32}
Saved = tuple[Path, PreTrainedModel]


def saved_model(model_type: str, folder: Path, **changes: Any) -> PreTrainedModel:
    byte_level_folder(folder)
    config = tiny_config(model_type, **OWN_KERNELS.get(model_type, {}), **changes)
    config.eos_token_id = None
    made = type(make(config, folder))
    return made.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def saved_models(folders: pytest.TempPathFactory, **changes: dict[str, Any]) -> Callable[[str], Saved]:
    """Return what saves a model of a type at its first call. ``changes``: of its config, by type."""

    @functools.cache
    def model_of(model_type: str) -> Saved:
        folder = folders.mktemp(model_type)
        return folder, saved_model(model_type, folder, **changes.get(model_type, {}))

    return model_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    return saved_models(tmp_path_factory)


def engine_of(
    folder: Path,
    *,
    tokens: int = 2048,
    chunk: int = 7,
    running: int = 8,
    overlap: str = "auto",
    drafts: str = "auto",
    host_bytes: int = 0,
    tp: int = 1,
) -> Engine:
    return load_engine(
        EngineSettings(
            model=str(folder),
            cache=CacheConfig(
                page_size=4, max_total_tokens=tokens, host_memory_bytes=host_bytes, write_policy="write_back"
            ),
            scheduler=SchedulerConfig(
                chunked_prefill_size=chunk, max_running_requests=running, new_token_ratio=0.1,
                overlap=overlap, speculation=drafts,  # type: ignore[arg-type]
            ),
            parallel=ParallelConfig(tp=tp),
            num_threads=1,
            context_len=256,
        )
    )  # fmt: skip


def snapshot_len(folder: Path, tp: int = 1) -> int:
    """Count the tokens whose K and V, in pages of 4, take as much on a rank as a snapshot of a text's states."""
    model = load_model_config(str(folder))
    page = 4 * model.kv_cell_bytes(tp=tp, kv_dtype="float32")
    return 4 * -(-(model.state_bytes("cpu") + sizing.SNAPSHOT_END) // page) if model.states else 0


def asked(rid: str, prompt: Sequence[int], most: int, **more: Any) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=most, temperature=0.0, ignore_eos=True)
    return GenerateRequest(rid=rid, token_ids=np.array(prompt, np.int32), sampling=sampling, **more)


def finished(engine: Engine) -> list[TokenDelta]:
    deltas = list[TokenDelta]()
    for _ in range(20_000):
        if not engine.has_work:
            return deltas
        deltas += engine.step()
    raise AssertionError("the engine is still busy")


def ids_of(deltas: Sequence[TokenDelta], rid: str, index: int = 0) -> list[int]:
    return [token for each in deltas if (each.rid, each.index) == (rid, index) for token in each.token_ids]


def some_prompts(number: int, seed: int) -> dict[str, list[int]]:
    draw = random.Random(seed)
    return {f"r{i}": [draw.randrange(3, 190) for _ in range(draw.choice((1, 2, 5, 9, 23, 40)))] for i in range(number)}


def check_many_at_once(engine: Engine, model: PreTrainedModel, *, retracts: bool = True) -> None:
    """Ask ``engine`` for twenty answers, in chunks beside others: each is Transformers'. Two are aborted, one has three
    choices; the pool ``retracts`` some. Closes the engine."""
    prompts, draw, deltas = some_prompts(20, 3), random.Random(4), list[TokenDelta]()
    try:
        for rid, prompt in prompts.items():
            request = asked(rid, prompt, 30)
            if rid == "r7":
                request = replace(request, sampling=replace(request.sampling, n=3))
            deltas += engine.submit(request)
            deltas += engine.step() if draw.random() < 0.7 else []
            if rid in ("r5", "r12"):
                deltas += engine.abort(rid)
        deltas += finished(engine)
        assert engine.stats().num_retractions > 0 or not retracts
        engine.scheduler.check()
        pool = engine.stats().pool
        assert pool.free_pages + pool.evictable_pages == pool.num_pages
    finally:
        engine.close()
    for rid, prompt in prompts.items():
        for index in range(3 if rid == "r7" else 1):
            answer = ids_of(deltas, rid, index)
            assert len(answer) == 30 or rid in ("r5", "r12")
            assert_greedy(model, prompt, answer)


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("model_type", [DELTA_RULE, STATE_SPACE, CONVOLUTION, SCAN])
def test_many_requests_at_once_get_the_ids_of_transformers(
    models: Callable[[str], Saved], model_type: str, overlap: str
) -> None:
    """Rows are used again by others."""
    folder, model = models(model_type)
    has_kv = model_type != SCAN
    tokens = max(160, snapshot_len(folder) + 8) if has_kv else 2048
    engine = engine_of(folder, tokens=tokens, running=12, overlap=overlap)
    assert engine.config.cache.prefix_cache == ("chunk" if overlap == "on" else "radix")
    check_many_at_once(engine, model, retracts=has_kv)


@pytest.mark.parametrize("model_type", [DELTA_RULE, STATE_SPACE, CONVOLUTION, SCAN])
def test_a_rejected_draft_leaves_the_state_behind_the_tokens_that_came_true(
    models: Callable[[str], Saved], model_type: str
) -> None:
    """Each sixth token that is drafted is wrong: drafts are of the answers without any. Twelve at once on a pool that
    retracts some; then each goes on behind what was kept of its answer."""
    (folder, model), prompts = models(model_type), some_prompts(12, 5)
    tokens = max(140, snapshot_len(folder) + 8) if model_type != SCAN else 2048
    engine = engine_of(folder, tokens=tokens, chunk=32, running=12, drafts="on")

    def answered(drafts: Told | None) -> list[TokenDelta]:
        put_drafts(engine.scheduler, drafts)
        assert engine.flush_cache()
        for rid, prompt in prompts.items():
            engine.submit(asked(rid, prompt, 30))
        return finished(engine)

    try:
        without = answered(None)
        known = {(rid, 0): ids_of(without, rid) for rid in prompts}
        before = engine.stats().num_retractions
        deltas = answered(Told(engine, known, STATE_DRAFT))
        engine.scheduler.check()
        if model_type != SCAN:
            assert engine.stats().num_retractions > before
        usages = [each.usage for each in deltas if each.finish is not None]
        drafted = sum(each.drafted_tokens for each in usages)
        assert 0.3 * drafted < sum(each.accepted_tokens for each in usages) < 0.95 * drafted
        for rid, prompt in prompts.items():
            answer = ids_of(deltas, rid)
            assert answer == known[rid, 0]
            assert len(answer) == 30
            assert_greedy(model, prompt, answer)
            text = [*prompt, *answer, 7]
            engine.submit(asked(f"{rid} on", text, 6))
            told = finished(engine)
            assert_greedy(model, text, ids_of(told, f"{rid} on"))
    finally:
        engine.close()


@pytest.mark.parametrize("model_type", [DELTA_RULE, "olmo_hybrid", STATE_SPACE, SCAN, "kimi_linear", "minimax"])
def test_a_state_carried_over_forty_chunks_is_that_of_one_pass(models: Callable[[str], Saved], model_type: str) -> None:
    folder, model = models(model_type)
    text = [3 + (i * i + 7 * i) % 190 for i in range(200)]
    wanted = uncached(model, text)
    for chunk in (5, 67, 200):
        opened = open_model(folder)
        assert opened.model._states._by_modules == (model_type not in OWN_KERNELS)
        (ours,) = opened.prefill([text], chunk=chunk)
        assert_close_in_range(ours, wanted, 1e-4)
        assert ours.argmax(dim=-1).tolist() == wanted.argmax(dim=-1).tolist()


class _Lost:
    """A step whose result cannot be had."""

    def result(self) -> StepResult:
        raise RuntimeError("no such index")


def test_a_step_that_failed_runs_again_from_the_state_before_it(models: Callable[[str], Saved]) -> None:
    """The request at fault ends; those beside it go on with their ids, though their states had moved on."""
    folder, model = models(DELTA_RULE)
    engine, prompts = engine_of(folder), some_prompts(6, 8)
    launch = engine.steps.launch

    def failing(plan: StepPlan) -> PendingStep:
        pending = launch(plan)
        bad = any(row.params.seed == 999 and row.num_output > 3 for row in plan.sampling)
        return _Lost() if bad else pending

    engine.steps.launch = failing
    try:
        for rid, prompt in prompts.items():
            request = asked(rid, prompt, 12)
            bad = replace(request, sampling=replace(request.sampling, seed=999))
            engine.submit(bad if rid == "r2" else request)
        deltas = finished(engine)
        assert engine.stats().failed_steps >= 1
    finally:
        engine.close()
    (end,) = [each.finish for each in deltas if each.rid == "r2" and each.finish is not None]
    assert isinstance(end, Finish)
    assert end.retry_as == "step_failed"
    for rid, prompt in prompts.items():
        assert len(ids_of(deltas, rid)) == 12 or rid == "r2"
        assert_greedy(model, prompt, ids_of(deltas, rid))


def test_a_step_that_failed_and_in_which_requests_went_on_from_snapshots_runs_again(
    models: Callable[[str], Saved],
) -> None:
    """Each half brings all copies: a request of the other half that has moved on meanwhile keeps its states."""
    folder, model = models(DELTA_RULE)
    engine, draw = engine_of(folder, chunk=200, running=8), random.Random(6)
    texts = {f"r{i}": [draw.randrange(3, 190) for _ in range(17)] for i in range(6)}
    try:
        for rid, text in texts.items():
            engine.submit(asked(f"first {rid}", text, 3))
        deltas = finished(engine)
        texts = {rid: [*text, *ids_of(deltas, f"first {rid}"), 9] for rid, text in texts.items()}
        launch = engine.steps.launch

        def failing(plan: StepPlan) -> PendingStep:
            pending = launch(plan)
            return _Lost() if any(row.params.seed == 999 for row in plan.sampling) else pending

        engine.steps.launch = failing
        for rid, text in texts.items():
            request = asked(rid, text, 8)
            engine.submit(replace(request, sampling=replace(request.sampling, seed=999 if rid == "r2" else 0)))
        deltas = finished(engine)
        assert engine.stats().failed_steps == 1
    finally:
        engine.close()
    for rid, text in texts.items():
        own = [each for each in deltas if each.rid == rid]
        assert len(ids_of(own, rid)) == (0 if rid == "r2" else 8), own[-1]
        assert_greedy(model, text, ids_of(own, rid))
        assert rid == "r2" or own[-1].usage.cached_tokens >= 16


def test_a_snapshot_of_a_request_is_computed_anew_where_it_is_restored(models: Callable[[str], Saved]) -> None:
    folder, model = models(DELTA_RULE)
    prompt = list(range(5, 40))
    num_tokens, answer = moved(engine_of(folder), engine_of(folder), prompt)
    assert num_tokens == 0
    assert len(answer) == 20
    assert_greedy(model, prompt, answer)


def moved(first: Engine, second: Engine, prompt: list[int]) -> tuple[int, list[int]]:
    """Ask ``first`` for 20 tokens behind ``prompt``, and let ``second`` go on after the eighth; close both. Returns:
    the tokens whose K and V went along, and the answer."""
    try:
        first.submit(asked("moved", prompt, 20))
        deltas = list[TokenDelta]()
        while len(ids_of(deltas, "moved")) < 8:
            deltas += first.step()
        snapshot = extract(first, "moved")
        answer = ids_of(deltas, "moved") + ids_of([*restore(second, snapshot), *finished(second)], "moved")
    finally:
        first.close()
        second.close()
    return snapshot.meta.num_tokens, answer


def test_the_logprobs_of_a_prompt_are_those_of_transformers(models: Callable[[str], Saved]) -> None:
    folder, model = models(STATE_SPACE)
    engine, prompt = engine_of(folder), list(range(20, 45))
    try:
        engine.submit(asked("told", prompt, 2, prompt_logprobs_from=1))
        deltas = finished(engine)
    finally:
        engine.close()
    told = [each.logprob for delta in deltas for each in delta.prompt_logprobs]
    wanted = uncached(model, prompt).log_softmax(dim=-1)[range(24), prompt[1:]]
    assert told == pytest.approx(wanted.tolist(), abs=1e-4)


@pytest.mark.parametrize(("width", "own"), [(32, True), (16, False)])
def test_the_text_part_of_a_wrapper_that_also_sees_is_served(tmp_path: Path, width: int, own: bool) -> None:
    """As Qwen3.5 is published: the names of its weights are the wrapper's. Heads of 16 run the module's functions."""
    config = tiny_config("qwen3_5", linear_key_head_dim=32, linear_value_head_dim=width)
    assert isinstance(config, Qwen3_5Config)
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager").float().eval()
    whole.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).architectures == ["Qwen3_5ForConditionalGeneration"]
    text, opened = list(range(3, 40)), open_model(tmp_path)
    assert opened.model._states._by_modules != own
    (ours,) = opened.prefill([text], chunk=9)
    with torch.inference_mode():
        assert_close_in_range(ours, whole(torch.tensor([text]), use_cache=False).logits[0], 1e-4)


def test_modules_that_would_begin_at_zero_behind_a_state_are_told_apart(models: Callable[[str], Saved]) -> None:
    """Mamba's scan takes no state where it is given several tokens; the others' do."""
    whole = {name: {each.whole for each in load_model_config(str(models(name)[0])).states} for name in (
        DELTA_RULE, STATE_SPACE, CONVOLUTION, SCAN, "kimi_linear", "minimax")}  # fmt: skip
    assert whole == {name: {name != SCAN} for name in whole}


@pytest.mark.parametrize("model_type", list(OWN_KERNELS))
def test_a_state_that_is_handed_over_has_the_order_of_the_modules_whoever_has_computed_it(
    models: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """Our kernels keep the convolution's last inputs one after the other, the module each channel's; a peer on a GPU
    runs the module."""
    read = list[torch.Tensor]()
    for own in (True, False):
        if not own:
            monkeypatch.setattr(DeltaRule, "fits", lambda part, layer: False)
        opened = open_model(models(model_type)[0])
        opened.prefill([list(range(3, 40))], chunk=9)
        states = opened.model._states
        assert states._by_modules != own
        (row,) = {place // states.pool._of_row for place in np.flatnonzero(states.pool._seen == 37)}
        read.append(states.pool.read(row, 37))
        with torch.inference_mode():
            states.pool.write(row + 1, 37, read[-1])
        assert torch.equal(states.pool.read(row + 1, 37), read[-1])
    torch.testing.assert_close(*(each.view(torch.float32) for each in read), rtol=1e-3, atol=1e-4)


def test_a_state_is_read_only_behind_the_tokens_that_it_has_seen() -> None:
    pool, slots = StatePool([((2,), torch.float32)], 2, torch.device("cpu")), torch.arange(1, 9)
    assert pool.begin([1], [0, 3], [3], slots) == [Segment(0, 3, None, 3, 3)]
    pool.end()
    for _ in range(2):  # the same step twice: it failed the first time, or its token was dropped
        (again,) = pool.begin([1], [0, 1], [4], slots)
        assert (again.read, again.write) == (3, 4)
        pool.end()
    (on,) = pool.begin([1], [0, 2], [6], slots)
    assert (on.read, on.write) == (4, 3)
    with pytest.raises(RuntimeError, match="row 1 goes on behind 3 tokens, and its states are of"):
        pool.begin([1], [0, 1], [4], slots)  # of a state that the step before has begun to write over
    assert pool.begin([1], [0, 1], [1], slots) == [Segment(0, 1, None, 3, 1)]  # another request has the row
    pool.end()
    with pytest.raises(RuntimeError, match="behind 4 tokens"):
        pool.begin([1], [0, 1], [5], slots)


def test_the_tokens_of_a_draft_leave_a_state_each_and_those_that_were_wrong_are_forgotten() -> None:
    """Pages of 4, a row of five places for drafts of two. Behind 7 tokens two more are tried, past the page's end."""
    pages = torch.zeros(8, 8, dtype=torch.uint8)
    pool = StatePool([((1,), torch.float32)], 2, torch.device("cpu"), pages=pages, page_size=4, places=5)
    slots = torch.arange(1, 9)

    def step(bounds: list[int], seq_lens: list[int]) -> list[Segment]:
        parts = pool.begin([0] * len(seq_lens), bounds, seq_lens, slots)
        for each in parts:
            assert each.read is None or pool.tensors[0][each.read] == each.seen - (each.end - each.start)
            pool.tensors[0][each.write] = each.seen
        pool.end()
        return parts

    step([0, 7], [7])  # behind 4 tokens, and 7
    for _ in range(2):  # it failed and runs again
        tried = step([0, 1, 2, 3], [8, 9, 10])
        assert [each.seen for each in tried] == [8, 9, 10]
        assert len({each.write for each in tried}) == 3
    step([0, 1], [9])  # only the first came true
    assert 10 not in pool._seen
    lie = np.array([5, 2], np.int32)
    pool.copy([StateCopy(1, 0, 8, lie, snapshot=1), StateCopy(2, 1, 8, lie, snapshot=1)])
    assert pool.tensors[0][5] == 8
    with pytest.raises(RuntimeError, match="row 0 goes on behind 10 tokens"):
        step([0, 1], [11])


def test_the_state_behind_the_last_whole_page_stays_until_the_next_is_whole_and_is_copied_to_others() -> None:
    """Pages of 4. What each place holds is the number of tokens that its state has seen."""
    pages = torch.full((8, 8), 255, dtype=torch.uint8)  # of K and V before
    pool = StatePool([((1,), torch.float32)], 2, torch.device("cpu"), pages=pages, page_size=4)
    slots, lie, lie_too = torch.arange(1, 9), np.array([5, 2], np.int32), np.array([1, 7], np.int32)

    def step(row: int, num_new: int, seq_len: int) -> None:
        parts = pool.begin([row], [0, num_new], [seq_len], slots)
        assert [each.seen for each in parts] == sorted({each.seen for each in parts})
        for each in parts:
            assert each.read is None or pool.tensors[0][each.read] == each.seen - (each.end - each.start)
            pool.tensors[0][each.write] = each.seen
        pool.end()

    step(0, 6, 6)  # in two parts, 4 and 2
    for seq_len in range(7, 23):
        step(0, 1, seq_len)
        border = seq_len // 4 * 4
        kept = StateCopy(2 * seq_len, 0, border, lie, snapshot=2 * seq_len)
        pool.copy([kept, StateCopy(2 * seq_len + 1, 1, border, lie, snapshot=2 * seq_len)])
        assert pages[lie].flatten()[:4].view(torch.float32) == border
        step(1, 3, border + 3)
        pool.copy([kept])  # again, with a step that failed: the row has gone on, and nothing is copied
        assert pages[lie].flatten()[:4].view(torch.float32) == border
    pool.copy([StateCopy(90, 0, 16, lie_too, snapshot=90)])  # is gone: the snapshot holds nothing
    other = [StateCopy(91, 1, 16, lie_too, snapshot=90), StateCopy(92, 0, 20, lie, snapshot=44)]
    pool.copy(other)  # row 1 goes on from it, row 0 from another: it has what it wants
    assert (pages[[0, 3, 4, 6]] == 255).all()
    step(0, 1, 21)
    with pytest.raises(RuntimeError, match=r"row 1 goes on behind 16 tokens, and its states are of \[-1, -1, -1\]"):
        step(1, 1, 17)


def test_a_copy_is_made_on_all_ranks_or_on_none() -> None:
    """The other rank has made the first, and not the next two: of a snapshot, and to a row."""
    class Other(TpGroup):
        def min_int(self, value: int) -> int:
            return min(value, next(votes))

    class Pages:
        def bytes_of_pages(self) -> torch.Tensor:
            return pages

    pages, votes, sent = torch.full((8, 8), 255, dtype=torch.uint8), iter([1, 0, 0, 1]), list[object]()
    states = StatePool([((1,), torch.float32)], 2, torch.device("cpu"), pages=pages, page_size=4)
    carried = CarriedStates(Pages(), states, Other(device="cpu"), sent.append)  # type: ignore[arg-type]
    (part,) = states.begin([0], [0, 4], [4], torch.arange(1, 9))
    states.tensors[0][part.write] = 4
    states.end()
    first, second = np.array([1, 2], np.int32), np.array([3, 4], np.int32)
    copies = [StateCopy(1, 0, 4, first, snapshot=1), StateCopy(2, 0, 4, second, snapshot=2)]
    assert carried.run([*copies, StateCopy(3, 1, 4, first, snapshot=1)]) == [2, 3]
    assert (pages[second] == 0).all()
    with pytest.raises(RuntimeError, match=r"row 1 goes on behind 4 tokens, and its states are of \[-1, -1, -1\]"):
        states.begin([1], [0, 1], [5], torch.arange(1, 9))
    assert carried.run([StateCopy(4, 1, 4, first, snapshot=1)]) == []
    assert states.begin([1], [0, 1], [5], torch.arange(1, 9))[0].read is not None
    assert len(sent) == 2


def test_pages_that_one_rank_cannot_copy_are_copied_by_none_and_no_rank_waits() -> None:
    class Host:
        def backup(self, *pages: object, wait: bool = True) -> None:
            raise RuntimeError("out of memory")

        load = backup

    orders, pages = list[object](), np.array([1, 2], np.int32)
    copier = RankedCopier(None, Host(), TpGroup(device="cpu"), orders.append)  # type: ignore[arg-type]
    with pytest.raises(Overloaded, match="2 pages were not copied to the host"):
        copier.backup(pages, pages)
    assert (copier.load(pages, pages).tolist(), len(orders)) == ([False, False], 2)


def test_a_marked_beginning_is_reused_by_the_next_that_has_it_alone_in_common(models: Callable[[str], Saved]) -> None:
    """Without a mark the second one passes by for the third."""
    folder, model = models(DELTA_RULE)
    start = list(range(30, 51))
    for marks, hits in (((), [0, 0, 20]), ((CacheBreakpoint(21, 300.0),), [0, 20, 20])):
        engine, cached = engine_of(folder, chunk=64), list[int]()
        try:
            for own in ([3, 4, 5, 6], [7, 8, 9, 10, 11], [12, 13, 14]):
                prompt = [*start, *own]
                engine.submit(asked(f"{own}", prompt, 5, cache_breakpoints=marks))
                deltas = finished(engine)
                assert_greedy(model, prompt, ids_of(deltas, f"{own}"))
                cached.append(deltas[-1].usage.cached_tokens)
        finally:
            engine.close()
        assert cached == hits


def test_forks_chains_and_a_shared_beginning_go_on_from_states_with_the_ids_of_transformers(
    models: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork that is the first finds the state kept within the prompt, and the same prompt again all but its last page.
    Of those with 48 tokens in common the third finds them, the second what was kept within."""
    monkeypatch.setattr(parts, "LEAST_WITHIN", 16)
    folder, model = models(DELTA_RULE)
    engine, draw, cached = engine_of(folder, tokens=8192, chunk=128), random.Random(2), list[int]()
    chain, start = ([draw.randrange(3, 190) for _ in range(length)] for length in (96, 48))
    fork = [*chain[:32], *(draw.randrange(3, 190) for _ in range(64))]
    others = [[*start, *(draw.randrange(3, 190) for _ in range(9))] for _ in range(3)]
    try:
        for number, prompt in enumerate([chain, fork, chain, fork, *others]):
            engine.submit(asked(f"{number}", prompt, 5))
            deltas = finished(engine)
            assert_greedy(model, prompt, ids_of(deltas, f"{number}"))
            cached.append(deltas[-1].usage.cached_tokens)
        engine.scheduler.check()
    finally:
        engine.close()
    assert cached == [0, 32, 92, 92, 0, 32, 48]


@pytest.mark.parametrize(("num_snapshots", "least"), [(3, 0.25), (8, 0.75), (99, 0.8)])
@pytest.mark.parametrize("model_type", [DELTA_RULE, STATE_SPACE, CONVOLUTION, SCAN])
def test_conversations_go_on_from_snapshots_with_the_ids_of_transformers(
    models: Callable[[str], Saved], model_type: str, num_snapshots: int, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five of them, behind one start of 21 tokens, and room beside their K and V for all snapshots, for those of their
    ends alone, or for some. ``least``: of all prompts' tokens, what is cached."""
    folder, model = models(model_type)
    if model_type == SCAN:
        whole = sizing.with_snapshots
        monkeypatch.setattr(
            sizing, "with_snapshots", lambda *given: replace(whole(*given), num_snapshots=num_snapshots)
        )
    tokens = 640 + num_snapshots * snapshot_len(folder) if model_type != SCAN else 2048
    engine, draw = engine_of(folder, tokens=tokens, chunk=16, running=6), random.Random(1)
    start, cached, total = [draw.randrange(3, 190) for _ in range(21)], 0, 0
    texts = [start + [draw.randrange(3, 190) for _ in range(draw.randint(1, 25))] for _ in range(5)]
    try:
        for turn in range(5):
            deltas = list[TokenDelta]()
            for number, text in enumerate(texts):
                deltas += engine.submit(asked(f"{turn} {number}", text, 9))
                deltas += engine.step() if draw.random() < 0.5 else []
            deltas += finished(engine)
            engine.scheduler.check()
            for number, text in enumerate(texts):
                own = [each for each in deltas if each.rid == f"{turn} {number}"]
                answer = ids_of(own, f"{turn} {number}")
                assert len(answer) == 9
                assert_greedy(model, text, answer)
                cached, total = cached + own[-1].usage.cached_tokens, total + len(text)
                text += [*answer, *(draw.randrange(3, 190) for _ in range(3))]
    finally:
        engine.close()
    assert cached > least * total


@pytest.mark.parametrize(
    ("model_type", "tp"),
    [
        *((each, 1) for each in (DELTA_RULE, STATE_SPACE, CONVOLUTION)),
        *(pytest.param(each, 2, marks=pytest.mark.slow) for each in (DELTA_RULE, "qwen3_5_text")),
    ],
)
def test_snapshots_that_left_the_pool_come_back_from_the_host_with_the_ids_of_transformers(
    models: Callable[[str], Saved], model_type: str, tp: int
) -> None:
    """Four conversations on a pool for one of them: each turn finds on the host all that whole pages allow. Where bits
    flip in a snapshot, or in a page of K and V before it, that is computed."""
    (folder, model), draw = models(model_type), random.Random(7)
    each = snapshot_len(folder, tp)
    engine = engine_of(folder, tokens=100 + 2 * each, chunk=64, running=1, host_bytes=16 << 20, tp=tp)
    tiers, texts = engine.kv.store.tiers, [[draw.randrange(3, 190) for _ in range(21)] for _ in range(4)]
    assert tiers is not None
    load_always(engine.kv)
    try:
        for turn in range(4):
            for number, text in enumerate(texts):
                rid = f"{turn} {number}"
                if turn == 3:
                    to_host(engine.kv)
                    hosts, _ = tiers.where(np.array(text, np.int32), "", 0)
                    leads = tiers.host.has_snapshot(hosts)
                    wrong = tiers.host.snapshot_of(int(hosts[leads][-1])).pages if number % 2 else hosts[:1]
                    tiers.copier.host.view[wrong] ^= 1  # type: ignore[attr-defined]
                engine.submit(asked(rid, text, 9))
                deltas = finished(engine)
                engine.scheduler.check()
                assert_greedy(model, text, ids_of(deltas, rid))
                usage = deltas[-1].usage
                kept = (len(text) - 4) // 4 * 4 if 0 < turn < 3 else 0  # of the answer's last token there is no state
                assert (usage.cached_tokens, usage.host_tokens) == (kept, kept)
                text += [*ids_of(deltas, rid), *(draw.randrange(3, 190) for _ in range(3))]
        assert tiers.counters.wrong_pages >= 4
    finally:
        engine.close()


def test_a_prefix_is_kept_or_the_start_refused_however_little_memory_is_left(models: Callable[[str], Saved]) -> None:
    model = load_model_config(str(models(DELTA_RULE)[0]))
    hardware = Hardware(device="cpu", num_cpus=2, available_memory_bytes=1 << 34)
    config, each = resolve(model, hardware, cache=CacheConfig(page_size=4)), model.state_bytes("cpu")
    cell = model.kv_cell_bytes(tp=1, kv_dtype=config.kv_dtype)
    least = snapshot_len(models(DELTA_RULE)[0]) * cell
    assert each + sizing.SNAPSHOT_END <= least < each + sizing.SNAPSHOT_END + 4 * cell
    for left in (least + 4 * cell, 2 * each, 40 * each):
        size = sizing.with_snapshots(config, sizing.pool_size(left, cell, 4, None), left)
        assert size.num_pages == left // (4 * cell)
        assert size.num_snapshots * size.snapshot_pages <= size.num_pages
        assert size.snapshot_pages * 4 * cell == least
    for left in (each - 1, least + 4 * cell - 1):
        with pytest.raises(InvalidConfig, match=r"lower scheduler\.max_running_requests"):
            sizing.with_snapshots(config, sizing.pool_size(left, cell, 4, None), left)


def test_what_goes_by_pages_alone_is_off_or_refused_with_a_state(models: Callable[[str], Saved]) -> None:
    model, hardware = load_model_config(str(models(DELTA_RULE)[0])), Hardware(
        device="cpu", num_cpus=2, available_memory_bytes=1 << 34
    )  # fmt: skip
    each = model.state_bytes("cpu")
    assert each == 3 * 4 * (4 * 32 * 32 + 256 * 4)  # three layers, fp32: the sums and the convolution's last inputs
    config = resolve(model, hardware)
    token = 2 * 4 * model.num_layers * model.num_kv_heads * model.head_dim
    assert sizing.part_bytes(config, apart=False) == {"token": token, "state": each}
    assert (config.cache.prefix_cache, config.scheduler.speculation) == ("radix", "off")
    ahead = resolve(model, hardware, scheduler=SchedulerConfig(overlap="on"))
    assert ahead.cache.prefix_cache == "chunk"
    assert "keeps a recurrent state" in ahead.origin["cache.prefix_cache"]
    with pytest.raises(InvalidConfig, match=r"cache\.store with Qwen3Next"):
        resolve(model, hardware, cache=CacheConfig(host_memory_bytes=1 << 20, store="file:///here"))
    with pytest.raises(InvalidConfig, match=r"cache\.host_memory_bytes with Mamba"):
        resolve(load_model_config(str(models(SCAN)[0])), hardware, cache=CacheConfig(host_memory_bytes=1 << 20))
    two = resolve(model, hardware, parallel=ParallelConfig(tp=2))
    assert sizing.part_bytes(two, apart=False) == {"token": token, "state": each}
    with pytest.raises(InvalidConfig, match=r"parallel\.tp = 2 with KV transfers of Qwen3Next.*: recurrent") as ranked:
        port_spec(two, TransferSettings(host="", token=b""))
    given: dict[str, Any] = {"model": {"path": str(models(DELTA_RULE)[0])}, "parallel": {"tp": 2}}
    apart, fetches = given | {"mode": "disaggregated"}, given | {"transfer": {"fetch": "auto"}}
    for each_way in (apart, fetches):  # a check says what a start does
        assert examined(each_way, available_bytes=1 << 34)[1] == list(ranked.value.problems)
    assert examined(given, available_bytes=1 << 34)[1] == []
    alone = {"model": {"path": str(models(SCAN)[0])}, "transfer": {"fetch": "auto"}}
    assert ["states alone" in problem for problem in examined(alone, available_bytes=1 << 34)[1]] == [True]
    with pytest.raises(InvalidConfig, match=r"Bamba.* whose plan for it splits over \[1\] ranks"):
        resolve(load_model_config(str(models(STATE_SPACE)[0])), hardware, parallel=ParallelConfig(tp=2))


def test_states_take_half_of_what_the_weights_leave_and_are_not_served_beyond_the_memory(
    models: Callable[[str], Saved],
) -> None:
    folder, _ = models(DELTA_RULE)
    model = load_model_config(str(folder))
    weights, each = 4 * model.num_weights, model.state_bytes("cpu")
    hardware = Hardware(device="cpu", num_cpus=1, available_memory_bytes=1 << 34)
    budget = int((weights + 2 * 3 * 10 * each) / 0.9) + 10
    config = resolve(model, hardware, cache=CacheConfig(device_memory_bytes=budget))
    assert config.scheduler.max_running_requests == 9  # and a row that warms up
    with pytest.raises(InvalidConfig, match=r"the states of 64 running requests take .* lower scheduler"):
        load_engine(
            EngineSettings(
                model=str(folder), num_threads=1,
                cache=CacheConfig(device_memory_bytes=budget), scheduler=SchedulerConfig(max_running_requests=64),
            )
        )  # fmt: skip
