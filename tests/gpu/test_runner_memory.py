"""Pools and CUDA graphs of a runner: the bytes they take, and that a captured step answers as one that is not."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from replicas.attention.workspace import num_sms
from replicas.errors import InvalidConfig
from replicas.layers.tp_group import TpGroup
from replicas.loading import device as measured
from replicas.loading.device import device_bytes
from replicas.memory.pool import MHATokenToKVPool
from replicas.runner import set_aside
from replicas.runner.model_runner import ModelRunner
from replicas.scheduler.plan import DecodePlan, TableWrite
from tests.gpu import fake_cuda
from tests.gpu.rigs import DEVICES, engine_config, make_rig
from tests.numerics import tiny

MAKE_POOL = ModelRunner._make_pools


@pytest.mark.parametrize("device", DEVICES)
def test_the_pool_is_sized_by_the_memory_that_the_weights_leave(tmp_path: Path, device: str) -> None:
    """SPEC A05: bytes = fraction * memory - weights; here capped by max_total_tokens."""
    tiny.save("llama", tmp_path)
    runner = make_rig(engine_config(tmp_path, device)).runner
    assert runner.pool_size.num_tokens == 512
    assert runner.pool.buffer.device.type == device
    assert runner.pool.buffer.shape[:4] == (129, 3, 2, 2)  # pages with the dummy, layers, K and V, heads


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_cap_the_pool_takes_the_memory_that_is_left(tmp_path: Path, device: str) -> None:
    """SPEC A05 in bytes: half of the GPU, or of the CPU's budget, less the weights and what is set aside; the other
    half of a GPU is still free in the end, but for what was taken before and 256 MiB of libraries."""
    tiny.save("llama", tmp_path)
    config = engine_config(tmp_path, device)
    config = replace(config, cache=replace(config.cache, max_total_tokens=None))
    memory = device_bytes(torch.device(device))[1] if device == "cuda" else config.cache.device_memory_bytes
    before = device_bytes(torch.device(device))[0] if device == "cuda" else 0
    assert memory is not None
    runner = ModelRunner(config, TpGroup(device=device))
    wanted = memory // 2 - runner.weight_bytes - set_aside.bytes_for_graphs(config)
    wanted -= set_aside.bytes_for_attention(config, 1, num_sms=num_sms(runner.device))
    wanted -= set_aside.bytes_for_logits(config, 1)
    wanted -= set_aside.bytes_for_table(config, wanted, runner.pool_size.cell_bytes)
    slack = 128 << 20 if device == "cuda" else 2 * runner.pool.page_bytes
    assert wanted - slack <= runner.pool_size.bytes <= wanted + (slack if device == "cuda" else 0)
    assert runner.pool.buffer.nbytes == runner.pool_size.bytes + runner.pool.page_bytes
    if device == "cuda":
        assert device_bytes(runner.device)[0] > before - memory // 2 - (256 << 20)


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


@pytest.mark.parametrize("device", [DEVICES[1]])
def test_a_graph_captured_at_one_token_reads_8000_of_an_8b_models_heads(tmp_path: Path, device: str) -> None:
    """32 query heads and 8 of K and V, of 128 dimensions: keys are split among programs only at replay."""
    heads = {"hidden_size": 64, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    tiny.save("llama", tmp_path, num_hidden_layers=1, max_position_embeddings=16_384, **heads)
    config = engine_config(tmp_path, device, page_size=16, dtype="bfloat16")
    config = replace(config, cache=replace(config.cache, max_total_tokens=16_384))
    rigs = [make_rig(replace(config, cuda_graphs=on)) for on in (True, False)]
    rigs[0].runner.pool.buffer.normal_()
    rigs[1].runner.pool.buffer.copy_(rigs[0].runner.pool.buffer)
    for size in (1, 2, 4, 8):
        plan = read_the_same(size, 8000, own=8400)
        with_graphs, without = (rig.runner.forward(plan)[0].float() for rig in rigs)
        assert float((with_graphs - without).abs().max()) < 0.03 * float(without.abs().max())


def read_the_same(size: int, length: int, *, own: int = 400) -> DecodePlan:
    """``size`` requests whose first ``length`` - 1 tokens are slots 16 and on, and whose new ones are their own."""
    shared, own_slots = np.arange(16, 15 + length, dtype=np.int32), np.arange(own, own + size, dtype=np.int32)
    rows = np.arange(1, size + 1, dtype=np.int32)
    writes = (TableWrite(int(row), 0, np.append(shared, slot)) for row, slot in zip(rows, own_slots, strict=True))
    return DecodePlan(
        table_writes=tuple(writes), rows=rows, token_ids=rows + 5, seq_lens=np.full(size, length, np.int32),
        slots=own_slots, sampling=(),
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
    assert before - torch.cuda.mem_get_info()[0] <= set_aside.bytes_for_graphs(config)


def test_two_engines_that_start_together_on_one_gpu_have_equal_pools(
    tmp_path: Path, gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 0.4 of it. The second sees less free each time that it looks: the first is taking its own 0.4."""
    if gpu is None:
        pytest.skip("a real GPU has no second engine whose allocations a test can place")
    tiny.save("llama", tmp_path)
    config = engine_config(tmp_path, "cuda")
    config = replace(config, cuda_graphs=False)
    config = replace(config, cache=replace(config.cache, max_total_tokens=None, mem_fraction_static=0.4))
    pools = []
    for taken in ((0.0, 0.0), (0.0, 0.4)):
        shares = iter(taken)

        def seen(device: object = None, shares: Iterator[float] = shares) -> tuple[int, int]:
            return int(fake_cuda.TOTAL_BYTES * (1.0 - next(shares, 0.4))), fake_cuda.TOTAL_BYTES

        monkeypatch.setattr(torch.cuda, "mem_get_info", seen)
        monkeypatch.setattr(ModelRunner, "_make_pools", _small_pool)
        pools.append(ModelRunner(config, TpGroup(device="cuda")).pool_size.bytes)
    assert pools[0] == pools[1]
    assert pools[0] == pytest.approx(0.4 * fake_cuda.TOTAL_BYTES, abs=256 << 20)  # what is set aside for attention


def test_a_budget_bounds_the_pool_on_a_gpu(
    tmp_path: Path, gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cache.device_memory_bytes, half of it for weights and pool, less 8 MiB for the logits of prompts."""
    monkeypatch.setattr(set_aside, "bytes_for_logits", lambda *_: 8 << 20)
    tiny.save("llama", tmp_path)
    config = replace(engine_config(tmp_path, "cuda"), cuda_graphs=False, attention="triton")
    limited = replace(config.cache, max_total_tokens=None, device_memory_bytes=64 << 20)
    runner = ModelRunner(replace(config, cache=limited), TpGroup(device="cuda"))
    assert 20 << 20 < runner.pool_size.bytes + runner.weight_bytes <= 24 << 20
    wrong = replace(limited, device_memory_bytes=1 << 50)
    with pytest.raises(InvalidConfig, match=r"device_memory_bytes gives each rank .* are free: lower it"):
        ModelRunner(replace(config, cache=wrong), TpGroup(device="cuda"))


def test_a_pool_for_which_the_gpu_has_no_memory_says_what_to_lower(
    tmp_path: Path, gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: ModelRunner, channels: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    tiny.save("llama", tmp_path)
    monkeypatch.setattr(ModelRunner, "_make_pools", full)
    says = r"KV pool of 512 tokens.* does not fit on cuda:0, .*mem_fraction_static \(0.5\)"
    with pytest.raises(InvalidConfig, match=says):
        ModelRunner(engine_config(tmp_path, "cuda"), TpGroup(device="cuda"))


@pytest.mark.parametrize(
    ("free", "waited_s"),
    [
        pytest.param(lambda now_s: 60 + now_s // 4 * 10, 16, id="a little at a time"),
        pytest.param(lambda now_s: min(80, 60 + now_s // 4 * 10), 8 + measured.STILL_S, id="a part of it"),
        pytest.param(lambda now_s: 60 + now_s, measured.FREED_S, id="too slowly"),
        pytest.param(lambda now_s: 60 - min(now_s, 9), measured.STILL_S, id="others take it"),
    ],
)
def test_the_memory_of_a_dead_process_is_waited_for_while_it_comes_back(
    free: Callable[[float], float], waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 bytes are wanted, and 60 free at first."""
    now = [0.0]
    monkeypatch.setattr(measured, "device_bytes", lambda device: (int(free(now[0])), 200))
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(measured, "time", clock)
    assert measured.bytes_once_free(torch.device("cuda", 0), 100) == (int(free(now[0])), 200)
    assert now[0] == pytest.approx(waited_s, abs=2.1 * measured.LOOK_S)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_replica_waits_for_the_memory_of_a_dead_one_and_no_longer_than_that_comes_back(
    tmp_path: Path, gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """It takes 0.4 of the GPU, of which 0.3 is free at first; without it, a share of what is free."""
    if gpu is None:
        pytest.skip("no test here can take most of a real GPU's memory")
    tiny.save("llama", tmp_path)
    config = replace(engine_config(tmp_path, "cuda"), cuda_graphs=False)
    config = replace(config, cache=replace(config.cache, max_total_tokens=None, mem_fraction_static=0.4))
    now, looks = [0.0], list[float]()

    def seen(place: object = None) -> tuple[int, int]:
        return int(fake_cuda.TOTAL_BYTES * (1.0 if comes_back and now[0] >= 3.0 else 0.3)), fake_cuda.TOTAL_BYTES

    def sleep(seconds: float) -> None:
        now[0] += seconds
        looks.append(seconds)

    monkeypatch.setattr(torch.cuda, "mem_get_info", seen)
    monkeypatch.setattr(measured, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(ModelRunner, "_make_pools", _small_pool)
    bytes_ = ModelRunner(config, TpGroup(device="cuda")).pool_size.bytes
    share = 0.4 if comes_back else 0.3 * 0.4
    assert bytes_ == pytest.approx(share * fake_cuda.TOTAL_BYTES, abs=256 << 20)
    assert now[0] == pytest.approx(3.0 if comes_back else measured.STILL_S, abs=2 * measured.LOOK_S)
    assert len(looks) == pytest.approx(now[0] / measured.LOOK_S)


def _small_pool(runner: ModelRunner, channels: object) -> list[MHATokenToKVPool]:
    """The pool of a runner with 8 of its pages: gigabytes would have to be touched here."""
    whole, runner.pool_size = runner.pool_size, replace(runner.pool_size, num_pages=8)
    try:
        return MAKE_POOL(runner, None)
    finally:
        runner.pool_size = whole
