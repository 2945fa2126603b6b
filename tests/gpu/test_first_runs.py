"""What no GPU had run before 2026-11-29, in engines of tiny models: MLA, Qwen3's experts, a module of Transformers, the
host tier, and two ranks that share one GPU. `make gpu-ten-minutes` runs this file among its first.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from replicas.config import CacheConfig, ParallelConfig
from replicas.engine.engine import Engine
from replicas.engine.ranks import LocalWorkers, local_worker
from replicas.layers import tp_group
from replicas.ranks.worker import WorkerSpec
from replicas.types import FinishReason
from tests.attention_steps import make_step
from tests.gpu import fake_cuda
from tests.gpu.device_steps import DEVICE
from tests.gpu.test_gpu_engine import ask, model, start
from tests.gpu.triton_or_skip import triton_paged
from tests.harness import load_always
from tests.numerics import tiny
from tests.unit.tokenizer_folders import byte_level_folder

assert triton_paged  # the attention of all but MLA
CHUNK = {"chunked_prefill_size": 16, "max_running_requests": 2}


def answers(engine: Engine, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
    """Output ids of prompts that are asked together."""
    found: list[list[int]] = [[] for _ in prompts]
    for i, prompt in enumerate(prompts):
        engine.submit(ask(str(i), list(prompt), **sampling))
    while engine.has_work:
        for delta in engine.step():
            assert delta.finish is None or delta.finish.reason is not FinishReason.ERROR, delta.finish
            found[int(delta.rid)] += delta.token_ids
        engine.scheduler.check()
    return found


@pytest.mark.parametrize(
    ("kind", "layers", "settings"),
    [
        pytest.param("v2", 2, {"attention": "torch_native"}, id="mla"),
        pytest.param("qwen3-moe", 1, {}, id="experts"),
        pytest.param("qwen2", 1, {"implementation": "transformers"}, id="transformers"),
    ],
)
def test_an_engine_of_each_kind_of_model_answers_as_transformers_does(
    kind: str, layers: int, settings: dict[str, Any], tmp_path: Path, gpu: fake_cuda.FakeCuda | None
) -> None:
    """In fp32; a prompt of two chunks beside a short one, and both again, found in the cache."""
    byte_level_folder(tmp_path)
    reference = tiny.save(kind, tmp_path, num_hidden_layers=layers)
    prompts = tiny.PROMPTS[::2]
    wanted = [tiny.reference(reference, prompt, 3)[1] for prompt in prompts]
    cache = CacheConfig(page_size=4, max_total_tokens=512)
    engine = start(str(tmp_path), dtype="float32", cache=cache, scheduler=CHUNK, **settings)
    assert engine.config.model.implementation == settings.get("implementation", "manta")
    assert engine.started.attention.name == settings.get("attention", "triton")
    assert answers(engine, prompts, max_new_tokens=3) == wanted
    assert answers(engine, prompts, max_new_tokens=3) == wanted
    engine.close()


def test_pages_that_left_the_device_come_back_from_the_host_with_the_same_answers(
    tmp_path: Path, gpu: fake_cuda.FakeCuda | None
) -> None:
    """In fp32: five prompts of 160 tokens, of which the device holds three."""
    cache = CacheConfig(page_size=16, max_total_tokens=512, host_memory_bytes=1 << 22, write_policy="write_back")
    engine = start(model(tmp_path), dtype="float32", cuda_graphs=False, cache=cache)
    load_always(engine.kv)
    prompts = [np.random.default_rng(seed).integers(0, tiny.VOCAB, 160).tolist() for seed in range(5)]
    first = [answers(engine, [prompt], max_new_tokens=2) for prompt in prompts]
    assert [answers(engine, [prompt], max_new_tokens=2) for prompt in prompts] == first
    tiers = engine.stats().tiers
    assert tiers is not None
    assert (tiers.host_hit_tokens > 2 * 144, tiers.host_wrong_pages) == (True, 0)
    engine.close()


def follow(spec: WorkerSpec) -> None:
    """Run a follower on the same GPU, or on one that is not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tp_group, "_meet", fake_cuda.meet_through_the_host)
        if DEVICE == "cpu":
            fake_cuda.install(patch)
        local_worker(spec)


def test_two_ranks_on_one_gpu_answer_as_one(
    tmp_path: Path, gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, through plans, a follower and collectives that go through the host; two tokens, greedy and drawn."""
    folder = model(tmp_path, num_key_value_heads=2)
    prompts = [tiny.PROMPTS[2]]
    settings: dict[str, Any] = {"dtype": "float32", "scheduler": CHUNK, "cuda_graphs": False}
    if DEVICE == "cpu":
        settings["attention"] = "torch_native"  # three engines' interpreted programs take a minute
    kinds: list[dict[str, Any]] = [{"max_new_tokens": 2, **drawn} for drawn in ({}, {"temperature": 0.9, "seed": 3})]
    one = start(folder, **settings)
    wanted = [answers(one, prompts, **kind) for kind in kinds]
    one.close()
    monkeypatch.setattr(tp_group, "_meet", fake_cuda.meet_through_the_host)
    workers = LocalWorkers(follow)
    cache = CacheConfig(page_size=16, max_total_tokens=2048, mem_fraction_static=0.4)
    two = start(folder, **settings, cache=cache, parallel=ParallelConfig(tp=2), workers=workers)
    assert [answers(two, prompts, **kind) for kind in kinds] == wanted
    assert workers.dead() is None
    two.close()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU; torch sees none on this machine")
@pytest.mark.parametrize("strided", [True, False], ids=["strided", "contiguous"])
def test_flashinfers_mla_is_that_of_the_reference(strided: bool) -> None:
    """In bf16 over scattered pages, as DeepSeek's heads are; vectors as views of a pool of three layers, or of one."""
    pytest.importorskip("flashinfer")
    from replicas.attention.flashinfer_mla import FlashInferLatentAttention
    from replicas.attention.torch_native import TorchNativeAttention
    from replicas.config import AttentionKind

    made = make_step(
        [(0, 700), (330, 40), (400, 1), (16, 1), (4000, 1)], num_heads=16, num_kv_heads=1, head_dim=576, num_decode=3,
        kv_dtype="bfloat16", kv_lora_rank=512, num_layers=3 if strided else 1,
    )  # fmt: skip
    pool: Any = made.pool
    pool.buffer = pool.buffer.cuda()
    batch = made.batch
    for name in type(batch).__dataclass_fields__:
        if isinstance(value := getattr(batch, name), Tensor):
            setattr(batch, name, value.cuda())
    q, k, v = (x.to("cuda", torch.bfloat16) for x in (made.q, made.k, made.v))
    scale = 0.07
    ours: Any = FlashInferLatentAttention(pool, dtype=torch.bfloat16, num_heads=16, scale=scale)
    plain = TorchNativeAttention(pool, (AttentionKind(scale=scale),) * made.num_layers)
    for backend in (ours, plain):
        backend.begin(replace(batch))
    for layer in range(made.num_layers):
        got, wanted = (backend.forward(layer, q, k, v).float() for backend in (ours, plain))
        torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
