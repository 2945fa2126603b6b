"""Scheduler, pools and model runner on a device: the answer is Transformers', whatever the path. Needs no Ray.

The same tests run on the CPU everywhere, so that on a GPU only the device is new.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from replicas.attention.base import BatchMeta
from replicas.attention.workspace import num_sms
from replicas.cache.kv import KvCache
from replicas.config import CacheConfig, EngineConfig, Hardware, SchedulerConfig, resolve
from replicas.models.llama import Llama
from replicas.parallel import TpGroup
from replicas.request import Req
from replicas.runner import set_aside
from replicas.runner.device import free_device_bytes
from replicas.runner.model_runner import ModelRunner
from replicas.runner.weights import load_model_config
from replicas.scheduler.plan import DecodePlan, ExtendPlan, ExtendRow, SampleRow, TableWrite
from replicas.scheduler.scheduler import Scheduler
from replicas.types import GenerateRequest, SamplingParams
from tests.numerics import tiny

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; torch sees none on this machine"),
        ],
    ),
]
NUM_NEW = 48


@dataclass
class Rig:
    runner: ModelRunner
    scheduler: Scheduler

    def answer(self, prompts: list[list[int]], **sampling: object) -> list[list[int]]:
        params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
        reqs = []
        for i, prompt in enumerate(prompts):
            request = GenerateRequest(rid=str(i), token_ids=np.array(prompt, dtype=np.int32), sampling=params)
            reqs.append(Req.make(request, index=0, now_s=0.0, eos_ids=frozenset()))
            self.scheduler.submit(reqs[-1])
        while self.scheduler.has_work:
            plan = self.scheduler.schedule()
            assert plan is not None
            self.scheduler.apply(plan, self.runner.run(plan))
            self.scheduler.check()
        return [req.output_ids.tolist() for req in reqs]


def engine_config(
    folder: Path, device: str, *, page_size: int = 4, chunk: int = 8, dtype: str = "float32"
) -> EngineConfig:
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else 1 << 30
    return resolve(
        load_model_config(str(folder), device=device, dtype=dtype),  # type: ignore[arg-type]
        Hardware(device=device, num_cpus=1, available_memory_bytes=free),  # type: ignore[arg-type]
        cache=CacheConfig(page_size=page_size, max_total_tokens=512, mem_fraction_static=0.5),
        scheduler=SchedulerConfig(chunked_prefill_size=chunk, max_running_requests=8),
    )


def make_rig(config: EngineConfig) -> Rig:
    runner = ModelRunner(config, TpGroup(device=config.device))
    size = runner.pool_size
    kv = KvCache(
        num_pages=size.num_pages, page_size=size.page_size, max_requests=8, context_len=config.model.context_len
    )
    return Rig(runner, Scheduler(kv, config.scheduler, max_running=8, clock=lambda: 0.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama", "llama3-rope", "qwen2", "qwen3-tied"])
def test_greedy_answers_are_transformers_in_batches_chunks_and_hits(tmp_path: Path, kind: str, device: str) -> None:
    model = tiny.save(kind, tmp_path)
    wanted = [tiny.reference(model, prompt, NUM_NEW)[1] for prompt in tiny.PROMPTS]
    for page_size, chunk in ((4, 8), (1, 64)):
        rig = make_rig(engine_config(tmp_path, device, page_size=page_size, chunk=chunk))
        assert rig.answer(tiny.PROMPTS) == wanted  # misses, together
        assert rig.answer(tiny.PROMPTS) == wanted  # hits
        assert rig.scheduler.counters.cached_tokens > 0
        assert rig.answer(tiny.PROMPTS[:1]) == wanted[:1]  # alone


@pytest.mark.parametrize("device", DEVICES)
def test_seeded_samples_do_not_depend_on_the_batch(tmp_path: Path, device: str) -> None:
    tiny.save("llama", tmp_path)
    rig = make_rig(engine_config(tmp_path, device))
    cuts = {"temperature": 0.8, "top_p": 0.9, "seed": 11}
    together = rig.answer(tiny.PROMPTS, **cuts)
    assert [rig.answer([prompt], **cuts)[0] for prompt in tiny.PROMPTS] == together


@pytest.mark.parametrize("device", DEVICES)
def test_the_pool_is_sized_by_what_the_weights_leave(tmp_path: Path, device: str) -> None:
    """SPEC A05: bytes = free after the weights - (1 - fraction) * free before; here capped by max_total_tokens."""
    tiny.save("llama", tmp_path)
    runner = make_rig(engine_config(tmp_path, device)).runner
    assert runner.pool_size.num_tokens == 512
    assert runner.pool.buffer.device.type == device
    assert runner.pool.buffer.shape[:4] == (129, 3, 2, 2)  # pages with the dummy, layers, K and V, heads


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_cap_the_pool_takes_what_the_weights_and_all_else_leave(tmp_path: Path, device: str) -> None:
    """SPEC A05 in bytes: half of what was free, less the weights and what is set aside; on a GPU the other half is
    still free in the end, but for 256 MiB of libraries."""
    tiny.save("llama", tmp_path)
    config = engine_config(tmp_path, device)
    config = replace(config, cache=replace(config.cache, max_total_tokens=None))
    before = free_device_bytes(torch.device(device)) if device == "cuda" else config.cache.device_memory_bytes
    assert before is not None
    runner = ModelRunner(config, TpGroup(device=device))
    wanted = before // 2 - runner.weight_bytes - set_aside.bytes_for_graphs(config, 1)
    wanted -= set_aside.bytes_for_attention(config, 1, num_sms=num_sms(runner.device))
    wanted -= set_aside.bytes_for_table(config, wanted, runner.pool_size.cell_bytes)
    slack = 128 << 20 if device == "cuda" else 2 * runner.pool.page_bytes
    assert wanted - slack <= runner.pool_size.bytes <= wanted + (slack if device == "cuda" else 0)
    assert runner.pool.buffer.nbytes == runner.pool_size.bytes + runner.pool.page_bytes
    if device == "cuda":
        assert free_device_bytes(runner.device) > before // 2 - (256 << 20)


@pytest.mark.parametrize("device", [DEVICES[1]])
def test_bfloat16_runs_and_stays_near_float32(tmp_path: Path, device: str) -> None:
    """The first token of each prompt has the float32 answer among its two most likely."""
    model = tiny.save("llama", tmp_path)
    rig = make_rig(engine_config(tmp_path, device, dtype="bfloat16"))
    first = [ids[0] for ids in rig.answer(tiny.PROMPTS)]
    for prompt, token in zip(tiny.PROMPTS, first, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        assert token in logits.topk(2).indices.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_that_stay_on_the_device_are_those_of_the_host(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded, both ways; on a CPU the device's operations run there."""
    tiny.save("llama", tmp_path)
    rig = make_rig(engine_config(tmp_path, device))
    for sampling in ({}, {"temperature": 0.9, "seed": 5}, {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "seed": 5}):
        made = []
        for on_device in (False, True):
            monkeypatch.setattr(rig.runner, "_samples_on_device", on_device)
            made.append(rig.answer(tiny.PROMPTS, **sampling))
        assert made[0] == made[1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_follows_takes_what_the_one_before_it_sampled(tmp_path: Path, device: str) -> None:
    """The second step is launched before the first one's result is asked for; tokens 2 and 3 of each answer follow."""
    model = tiny.save("llama", tmp_path)
    rig = make_rig(engine_config(tmp_path, device, chunk=64))
    rig.runner._samples_on_device = True
    wanted = [tiny.reference(model, prompt, 3)[1] for prompt in tiny.PROMPTS]
    slots = [np.arange(16 * (i + 1) * 4, 16 * (i + 1) * 4 + 40, dtype=np.int32) for i in range(3)]  # pages of 4
    greedy = SamplingParams(temperature=0.0)
    rows, sampling = [], []
    for i, prompt in enumerate(tiny.PROMPTS):
        ids = np.array(prompt, np.int32)
        rows.append(ExtendRow(row=i + 1, token_ids=ids, prefix_len=0, slots=slots[i][: len(ids)], sample=True))
        sampling.append(
            SampleRow(
                params=greedy, position=len(ids), num_output=0, stop_ids=frozenset(), prompt_ids=ids, output_ids=ids[:0]
            )
        )
    writes = tuple(TableWrite(i + 1, 0, slots[i]) for i in range(3))
    steps = [rig.runner.launch(ExtendPlan(table_writes=writes, rows=tuple(rows), sampling=tuple(sampling)))]
    order = np.array([2, 0, 1], np.int32)  # rows of the next step, and where their tokens were sampled
    for step in range(2):
        lens = np.array([len(tiny.PROMPTS[i]) + step + 1 for i in order], np.int32)
        plan = DecodePlan(
            table_writes=(), rows=order + 1, token_ids=np.zeros(3, np.int32), seq_lens=lens,
            slots=np.array([slots[i][n - 1] for i, n in zip(order, lens, strict=True)], np.int32),
            sampling=tuple(sampling[i] for i in order),
            follows=order if step == 0 else np.arange(3, dtype=np.int32),
        )  # fmt: skip
        steps.append(rig.runner.launch(plan))
    made = [step.result().token_ids.tolist() for step in steps]
    assert made[0] == [ids[0] for ids in wanted]
    for step in (1, 2):
        assert made[step] == [wanted[i][step] for i in order]


@pytest.mark.parametrize("device", [DEVICES[1]])
def test_answers_are_the_same_with_graphs_and_without(tmp_path: Path, device: str) -> None:
    """Batches of 3, filled up to a graph of 4; seeded too. fp32, so the Triton backend."""
    tiny.save("llama", tmp_path)
    config = engine_config(tmp_path, device)
    rigs = [make_rig(replace(config, cuda_graphs=on)) for on in (True, False)]
    assert [rig.runner._graphs is not None for rig in rigs] == [True, False]
    for sampling in ({}, {"temperature": 0.8, "seed": 3}):
        assert rigs[0].answer(tiny.PROMPTS, **sampling) == rigs[1].answer(tiny.PROMPTS, **sampling)


@pytest.mark.parametrize("device", [DEVICES[1]])
def test_logits_of_every_captured_size_are_those_without_graphs(tmp_path: Path, device: str) -> None:
    """Heads of 64 in bf16, so FlashInfer where it is installed; 1, 2, 4 and 8 requests with 9 and 200 tokens."""
    tiny.save("llama", tmp_path, head_dim=64)
    config = engine_config(tmp_path, device, page_size=16, dtype="bfloat16")
    rigs = [make_rig(replace(config, cuda_graphs=on)) for on in (True, False)]
    rigs[0].runner.pool.buffer.normal_()
    rigs[1].runner.pool.buffer.copy_(rigs[0].runner.pool.buffer)
    assert [rig.runner._graphs is not None for rig in rigs] == [True, False]
    assert rigs[0].runner._graphs is not None
    for size in rigs[0].runner._graphs.sizes:
        for length in (9, 200):
            plan = read_the_same(size, length)
            with_graphs, without = (rig.runner.forward(plan)[0].float() for rig in rigs)
            assert with_graphs.shape == (size, tiny.VOCAB)
            assert float((with_graphs - without).abs().max()) < 0.03 * float(without.abs().max())


def read_the_same(size: int, length: int) -> DecodePlan:
    """``size`` requests whose first ``length`` - 1 tokens are slots 16 and on, and whose new ones are their own."""
    shared, own = np.arange(16, 15 + length, dtype=np.int32), np.arange(400, 400 + size, dtype=np.int32)
    rows = np.arange(1, size + 1, dtype=np.int32)
    writes = (TableWrite(int(row), 0, np.append(shared, slot)) for row, slot in zip(rows, own, strict=True))
    return DecodePlan(
        table_writes=tuple(writes), rows=rows, token_ids=rows + 5, seq_lens=np.full(size, length, np.int32), slots=own,
        sampling=(),
    )  # fmt: skip


@pytest.mark.parametrize("device", [DEVICES[1]])
def test_graphs_take_no_more_memory_than_was_set_aside(tmp_path: Path, device: str) -> None:
    tiny.save("llama", tmp_path)
    config = engine_config(tmp_path, device)
    without = make_rig(replace(config, cuda_graphs=False))
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    without.runner._config = config
    without.runner._capture_graphs()
    torch.cuda.synchronize()
    assert before - torch.cuda.mem_get_info()[0] <= set_aside.bytes_for_graphs(config, 1)


class _Slow:
    """A model whose last kernel takes a second."""

    def __init__(self, model: Llama) -> None:
        self._model = model

    def forward(self, input_ids: Tensor, meta: BatchMeta, logits_rows: Tensor | None = None) -> Tensor:
        logits = self._model.forward(input_ids, meta, logits_rows)
        torch.cuda._sleep(2_000_000_000)
        return logits


@pytest.mark.parametrize("device", [DEVICES[1]])
def test_nothing_of_a_chunk_is_under_way_when_its_step_returns(tmp_path: Path, device: str) -> None:
    """SPEC H09: whole pages of a chunk that samples nothing are sent next, by a library that knows no stream."""
    tiny.save("llama", tmp_path)
    rig = make_rig(engine_config(tmp_path, device, chunk=8))
    rig.runner._model = _Slow(rig.runner._model)  # type: ignore[assignment]
    request = GenerateRequest(rid="a", token_ids=np.arange(20, dtype=np.int32), sampling=SamplingParams())
    rig.scheduler.submit(Req.make(request, index=0, now_s=0.0, eos_ids=frozenset()))
    plan = rig.scheduler.schedule()
    assert plan is not None
    assert not plan.sampling
    rig.runner.run(plan)
    assert torch.cuda.current_stream().query()
