"""Settings that `resolve` refuses, with what is allowed."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtransfer.stores.items import NO_SECRET, page_chain
from replicas import launch
from replicas.config import CacheConfig, EngineConfig, Hardware, ModelConfig, ParallelConfig, SchedulerConfig
from replicas.engine.ranks import host_tier
from replicas.errors import InvalidConfig
from replicas.resolve import resolve
from tests.harness import model_config

CPU = Hardware(device="cpu", num_cpus=2, available_memory_bytes=1 << 30)


def int8_model(*, intermediate_size: int) -> ModelConfig:
    """6 heads of 16 and 6 of K and V."""
    return model_config(
        hidden_size=96,
        intermediate_size=intermediate_size,
        num_heads=6,
        num_kv_heads=6,
        head_dim=16,
        quantization="int8",
    )


def on_ranks(tp: int, *, intermediate_size: int) -> EngineConfig:
    return resolve(int8_model(intermediate_size=intermediate_size), CPU, parallel=ParallelConfig(tp=tp))


def test_ranks_that_would_cut_groups_of_int8_are_refused() -> None:
    """96 inputs are 3 groups of 32: three ranks have one each, two ranks would have one and a half."""
    assert on_ranks(3, intermediate_size=96).parallel.tp == 3
    says = r"tp = 2 .* 48 inputs .* and 96 of .* \(int8, groups of 32 inputs\); sizes .*: \[1, 3\]"
    with pytest.raises(InvalidConfig, match=says):
        on_ranks(2, intermediate_size=192)


def test_where_no_group_fits_one_rank_serves() -> None:
    """72 is no multiple of 16: a row shares one scale."""
    assert on_ranks(1, intermediate_size=72).parallel.tp == 1
    with pytest.raises(InvalidConfig, match=r"tp = 3 .* 24 of the MLP's last .*: \[1\]"):
        on_ranks(3, intermediate_size=72)


def test_stores_of_two_keys_or_of_none_have_no_item_in_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each would take the other's items for damaged, and delete them."""
    opened: list[dict[str, Any]] = []
    monkeypatch.setattr(launch, "model_identity", lambda *_: "tiny")
    monkeypatch.setattr(launch, "open_store", lambda _, **given: opened.append(given))
    monkeypatch.setattr(launch, "StoreTier", lambda _, worker, **__: worker)
    copier = SimpleNamespace(host=SimpleNamespace(memory=SimpleNamespace(page_bytes=64)))
    chains = set()
    for key in (None, "k" * 32, "j" * 32):
        cache = CacheConfig(host_memory_bytes=1 << 20, store=f"file://{tmp_path}", store_key=key)
        config = resolve(int8_model(intermediate_size=96), CPU, cache=cache)
        worker: Any = launch.open_store_tier(config, None, copier)  # type: ignore[arg-type]
        chains.add(page_chain(worker._fingerprint, ""))
        assert key is None or key not in worker._fingerprint
    assert opened[0]["secret"] == NO_SECRET
    assert [len({given[name] for given in opened}) for name in ("secret", "layout_digest")] == [3, 3]
    assert len(chains) == 3


def test_an_unknown_kv_dtype_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidConfig, match=r"kv_dtype = 'bf16' is unknown; allowed: float32, bfloat16, float16, int8"):
        resolve(int8_model(intermediate_size=96), CPU, cache=CacheConfig(kv_dtype="bf16"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["eviction", "host_eviction"])
def test_eviction_by_priority_is_refused_where_priorities_are_ignored(name: str) -> None:
    """SPEC E19: every page has priority 0: it would be `lru` in silence."""
    cache = CacheConfig(**{name: "priority"})  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=rf"cache.{name}: priority with .*; set scheduler.priorities: on, or"):
        resolve(model_config(), CPU, cache=cache)
    resolve(model_config(), CPU, cache=cache, scheduler=SchedulerConfig(priorities="on"))


def test_a_prefix_is_read_once_for_a_group_on_a_cpu_alone() -> None:
    on_gpu = resolve(model_config(), Hardware(device="cuda", num_cpus=2, available_memory_bytes=1 << 30))
    assert (resolve(model_config(), CPU).scheduler.cascade, on_gpu.scheduler.cascade) == (True, False)
    assert on_gpu.origin["scheduler.cascade"] == "each request reads its own prefix on a GPU"


def test_a_cpu_runs_64_requests_at_once_and_a_gpu_what_its_pool_carries_unless_told() -> None:
    """64 on a GPU would keep most of it idle: its graphs go to 256."""
    gpu = replace(CPU, device="cuda")
    model = replace(int8_model(intermediate_size=96), quantization="none")
    assert resolve(model, CPU).scheduler.max_running_requests == 64
    assert resolve(model, gpu).scheduler.max_running_requests is None
    told = SchedulerConfig(max_running_requests=3)
    assert {resolve(model, each, scheduler=told).scheduler.max_running_requests for each in (CPU, gpu)} == {3}


def test_every_setting_that_is_wrong_is_said_at_once() -> None:
    wrong = CacheConfig(page_size=0, mem_fraction_static=2.0)
    with pytest.raises(InvalidConfig) as refused:
        resolve(int8_model(intermediate_size=96), CPU, cache=wrong, parallel=ParallelConfig(tp=5), attention="triton")
    named = [problem.split(" ")[0] for problem in refused.value.problems]
    assert named == ["cache.page_size", "cache.mem_fraction_static", "attention", "parallel.tp"]


def with_host(num_bytes: int) -> EngineConfig:
    """A page of 4 tokens has 4 x 2 x 8 numbers of 4 bytes: 256 bytes."""
    return resolve(model_config(), CPU, cache=CacheConfig(page_size=4, host_memory_bytes=num_bytes))


def test_host_memory_is_counted_in_whole_pages_and_what_cannot_be_is_refused() -> None:
    host = host_tier(with_host(1000))
    assert host is not None
    assert host.memory.num_pages == 3
    host.close()
    assert host_tier(with_host(0)) is None
    with pytest.raises(InvalidConfig, match="host_memory_bytes = 255 holds less than a page of 256 bytes: give more"):
        host_tier(with_host(255))
    with pytest.raises(InvalidConfig, match="bytes of memory are available on this machine: give less"):
        host_tier(with_host(1 << 50))


def test_drafts_are_off_where_steps_overlap_or_a_rows_sum_depends_on_its_place() -> None:
    for changes, says in (({"overlap": "on"}, "scheduler.overlap"), ({}, "")):
        config = resolve(
            model_config(), Hardware(device="cpu", num_cpus=2, available_memory_bytes=1 << 30),
            scheduler=replace(SchedulerConfig(speculation="auto"), **changes),  # type: ignore[arg-type]
        )  # fmt: skip
        assert config.scheduler.speculation == ("off" if says else "auto")
        assert config.origin.get("scheduler.speculation", "").startswith(says)


def test_drafts_that_are_on_stay_on_beside_overlap_and_on_a_gpu() -> None:
    gpu = Hardware(device="cuda", num_cpus=2, available_memory_bytes=1 << 30)
    for hardware in (CPU, gpu):
        asked = SchedulerConfig(speculation="on", overlap="on", max_running_requests=3)
        assert resolve(model_config(), hardware, scheduler=asked).scheduler.speculation == "on"
    assert resolve(model_config(), gpu).scheduler.speculation == "off"
