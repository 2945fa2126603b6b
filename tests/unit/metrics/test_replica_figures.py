"""An engine's statistics as metrics."""

import dataclasses
from typing import Any

import pytest
import torch

from dashboards.catalog import POOL_STATES, Process
from deployments.watch.metrics.emitter import Emitter, Identity
from deployments.watch.metrics.replica_metrics import tell_replica
from kvtransfer.types import TransferStats
from replicas.loading import device
from replicas.loading.device import GpuFigures, gpu_figures
from replicas.types import AdapterStats, EngineStats, EngineTallies, GroupStats, PoolStats, TierStats
from tests.harness import ask, fake_engine, finish_all
from tests.pair import Pair
from tests.scraped import Scraped
from tests.unit.deployments.sample_values import stats

FACTS = {
    "node": "n1", "accelerator": "cpu", "attention": "triton", "tensor_parallel": "3", "page_size_tokens": "16",
    "dtype": "bfloat16", "quantization": "int8", "context_len_tokens": "8192", "kv_dtype": "float32",
    "transfer_backend": "none",
}  # fmt: skip
MORE: dict[str, Any] = {"page_bytes": 1000, "start_times": {"load_weights": 1.5, "total": 4.0}}
DRAFTED = {"drafted_tokens": {"text": 9, "tree": 7}, "accepted_tokens": {"text": 5}}
POOL = PoolStats(
    page_size=16, num_pages=100, free_pages=40, evictable_pages=30, protected_pages=20, reserved_pages=7,
    quarantined_pages=3,
)  # fmt: skip


def tallies() -> EngineTallies:
    engine, _ = fake_engine()
    return engine.tallies()


def scrape(now: EngineStats, seen: EngineTallies | None = None) -> Scraped:
    who = Identity(model="m", role="unified", replica="r0")
    emitter = Emitter(Process.REPLICA, who, disaggregated=now.transfer is not None)
    tell_replica(emitter, FACTS, lambda: now, lambda: seen if seen is not None else tallies(), **MORE)
    return Scraped(emitter.registry)


def test_the_states_of_the_pool_sum_to_its_capacity() -> None:
    """SPEC D14. 100 pages of 16 tokens; 30 of them cannot be had by a new request."""
    seen = scrape(dataclasses.replace(stats(), pool=POOL))
    states = seen.values("kv_pool_tokens", "state")
    assert states == {"free": 640, "evictable": 480, "protected": 320, "reserved": 112, "quarantined": 48}
    assert tuple(states) == POOL_STATES
    assert sum(states.values()) == seen.value("kv_pool_capacity_tokens", tier="L1") == 1600
    assert seen.value("kv_pool_capacity_bytes", tier="L1") == 100_000
    assert seen.value("kv_pool_utilization_ratio", tier="L1") == pytest.approx(0.3)


def test_tiers_are_told_with_what_they_hold_and_did() -> None:
    tiers = TierStats(
        host_pages=40, host_used_pages=10, clean_pages=3, store="disk", store_bytes=9000, store_items=7,
        host_hit_tokens=160, store_hit_tokens=32, host_written_tokens=320, host_evicted_tokens=16,
        store_written_tokens=64, store_read_tokens=48, host_write_s=0.5, host_load_s=0.25, store_write_s=2.0,
        store_read_s=1.0, saved_s=4.0, host_wrong_pages=1, store_wrong_pages=2, store_errors=5, slow_loads=6,
        store_error="no space", pushed_tokens=80, received_tokens=64,
    )  # fmt: skip
    seen = scrape(dataclasses.replace(stats(), pool=POOL, cached_tokens=200, tiers=tiers))
    assert seen.values("cache_hit_tokens_total", "tier") == {"L1": 8, "L2": 160, "L3": 32}
    assert seen.values("kv_pool_capacity_tokens", "tier") == {"L1": 1600, "L2": 640}
    assert seen.values("kv_pool_capacity_bytes", "tier") == {"L1": 100_000, "L2": 40_000}
    assert seen.values("tier_used_bytes", "tier") == {"L2": 10_000, "L3": 9000}
    assert seen.values("tier_written_tokens_total", "tier") == {"L2": 320, "L3": 64}
    assert seen.values("tier_loaded_tokens_total", "tier") == {"L2": 192, "L3": 48}
    assert seen.values("tier_write_seconds_total", "tier") == {"L2": 0.5, "L3": 2.0}
    assert seen.values("tier_load_seconds_total", "tier") == {"L2": 0.25, "L3": 1.0}
    assert seen.values("tier_wrong_pages_total", "tier") == {"L2": 1, "L3": 2}
    assert seen.values("tier_moved_tokens_total", "direction") == {"out": 80, "in": 64}
    assert seen.value("cache_evicted_tokens_total", tier="L2", reason="capacity") == 16
    names = ("clean_tokens", "saved_seconds_total", "slow_loads_total", "store_errors_total", "store_up")
    assert [seen.value(f"tier_{name}") for name in names] == [48, 4, 6, 5, 0]


def test_groups_are_told_with_their_bytes_holes_and_parts_and_are_0_where_there_are_none() -> None:
    full = GroupStats(group="full", capacity_bytes=900, used_bytes=300, num_parts=3, num_evicted=5)
    window = GroupStats(group="window", capacity_bytes=80, used_bytes=40, num_parts=2, num_holes=1, num_evicted=7)
    seen = scrape(dataclasses.replace(stats(), groups=(full, window)))
    told = {
        "capacity_bytes": (900, 80), "used_bytes": (300, 40), "parts": (3, 2), "holes": (0, 1),
        "evicted_parts_total": (5, 7),
    }  # fmt: skip
    for name, (of_full, of_window) in told.items():
        assert seen.values(f"cache_group_{name}", "group") == {"full": of_full, "window": of_window, "state": 0}


def test_a_replica_without_tiers_tells_nothing_in_them_and_no_failure() -> None:
    seen = scrape(dataclasses.replace(stats(), pool=POOL, cached_tokens=200))
    assert seen.values("cache_hit_tokens_total", "tier") == {"L1": 200, "L2": 0, "L3": 0}
    assert seen.values("tier_used_bytes", "tier") == {"L2": 0, "L3": 0}
    assert seen.value("tier_store_up") == 1


def test_adapters_are_told_and_are_0_where_none_can_be_served() -> None:
    adapters = AdapterStats(held=("x", "y"), num_bytes=900, num_loads=7, num_dropped=5, load_s=0.25)
    names = (
        "adapters_held", "adapters_held_bytes", "adapter_loads_total", "adapter_drops_total", "adapter_load_seconds",
    )  # fmt: skip
    told = [scrape(dataclasses.replace(stats(), adapters=each)) for each in (adapters, None)]
    assert [[seen.value(name) for name in names] for seen in told] == [[2, 900, 7, 5, 0.25], [0] * 5]


def test_facts_are_labels_and_unknown_start_times_are_not_told() -> None:
    seen = scrape(stats())
    facts = {"node": "n1", "accelerator": "cpu", "attention": "triton", "tensor_parallel": "3",
             "page_size_tokens": "16", "dtype": "bfloat16", "quantization": "int8", "context_len_tokens": "8192",
             "kv_dtype": "float32", "transfer_backend": "none", "replica": "r0", "role": "unified",
             "model": "m"}  # fmt: skip
    assert seen.value("replica_info", **facts) == 1
    assert seen.values("replica_start_seconds", "phase") == {"load_weights": 1.5, "total": 4.0}


def test_a_gpus_memory_and_use_are_told_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of NVML leaves the last figures, and costs no other metric; a replica without a GPU tells none."""
    numbers = {"total_bytes": 100, "used_bytes": 60, "own_bytes": 40, "num_alloc_retries": 3}
    found = [GpuFigures(device="cuda:0", utilization=0.25, **numbers)]
    monkeypatch.setattr(device, "gpu_figures", lambda: found.pop())
    emitter = Emitter(Process.REPLICA, Identity(model="m", role="unified", replica="r0"), gpu=True)
    tell_replica(emitter, FACTS, stats, tallies, **MORE)
    for _ in range(2):  # the second time it raises: there is no figure left
        seen = Scraped(emitter.registry)
        told = seen.values("replica_device_memory_bytes", "kind")
        assert told == {"total": 100, "used": 60, "own": 40}
        assert seen.value("replica_device_utilization_ratio", device="cuda:0") == 0.25
        assert seen.value("replica_device_alloc_retries_total", device="cuda:0") == 3
        assert seen.total("replica_info") == 1
    assert "replica_device" not in scrape(stats()).text


def test_a_process_that_uses_no_gpu_makes_no_context_to_look_at_one() -> None:
    assert gpu_figures() is None


def test_a_gpu_whose_load_nvml_does_not_tell_has_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class NVMLError(Exception):
        pass

    def refuse(device: int) -> int:
        raise NVMLError("Not Supported")  # as of a slice of a GPU (MIG)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 2})
    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    assert gpu_figures() == GpuFigures(
        device="cuda:0", total_bytes=100, used_bytes=70, own_bytes=50, num_alloc_retries=2, utilization=None
    )


def test_what_an_engine_did_is_counted() -> None:
    """Two prompts of 12 tokens, the second all but its last 4-token page cached; 8 tokens each."""
    engine, _ = fake_engine(speculation="off")
    for rid in ("a", "b"):
        engine.submit(ask(rid, range(1, 13)))
        finish_all(engine)
    seen = scrape(engine.stats(), engine.tallies())
    assert seen.values("scheduler_tokens_total", "kind") == {"prefill_computed": 16, "prefill_cached": 8, "decode": 14}
    assert seen.value("cache_lookup_tokens_total") == 24
    assert seen.value("cache_hit_tokens_total", tier="L1") == 8
    assert seen.value("scheduler_finished_requests_total", outcome="ok") == 2
    assert seen.values("scheduler_batch_requests_count", "phase") == {"prefill": 2, "decode": 14}
    assert seen.value("scheduler_batch_tokens_sum", phase="prefill") == 16
    assert seen.value("scheduler_step_duration_seconds_count", phase="decode") == 14
    assert seen.value("scheduler_mixed_steps_total") == 0
    assert engine.flush_cache()
    assert scrape(engine.stats()).total("cache_evicted_tokens_total", reason="flush") > 0


@pytest.mark.parametrize(
    ("changed", "metric", "label", "told"),
    [
        ({"failed_checks": 3}, "kv_pool_failed_checks_total", "tier", {"L1": 3}),  # SPEC D16; PagesLost reads it
        ({"num_extend_steps": 5, "num_mixed_steps": 3}, "scheduler_mixed_steps_total", "replica", {"r0": 3}),
        ({"num_constrained": 2}, "scheduler_constrained_requests_total", "replica", {"r0": 2}),
        ({"forced_tokens": 17}, "scheduler_forced_tokens_total", "replica", {"r0": 17}),
        (DRAFTED, "scheduler_draft_tokens_total", "source", {"text": 9, "tree": 7}),
        (DRAFTED, "scheduler_draft_tokens_total", "outcome", {"accepted": 5, "rejected": 11}),
    ],
)
def test_what_an_engine_counts_by_itself_is_told_under_its_name(
    changed: dict[str, Any], metric: str, label: str, told: dict[str, float]
) -> None:
    """Engines count these in test_mixed.py, test_constrained_answers.py and test_speculation.py."""
    assert scrape(dataclasses.replace(stats(), **changed)).values(metric, label) == told


def test_kv_transfers_are_told_where_the_engine_takes_part_in_any() -> None:
    assert "manta_transfer" not in scrape(stats()).text
    service = TransferStats(
        rooms_receiving=2, rooms_draining=1, peers=3, sent_bytes=500, sends_done=4, receives_failed=5,
        oldest_drain_s=1.5,
    )  # fmt: skip
    seen = scrape(dataclasses.replace(stats(), transfer=service))
    assert seen.values("transfers_in_flight", "direction") == {"send": 0, "receive": 2, "draining": 1}
    assert seen.value("transfers_total", direction="receive", outcome="error") == 5
    assert seen.value("transfer_bytes_total", direction="send") == 500
    assert seen.value("transfer_oldest_drain_seconds") == 1.5


def test_what_a_decode_replica_waited_for_a_kv_transfer_is_counted() -> None:
    pair = Pair()
    pair.ask("a", range(1, 13))
    pair.run()
    seen = scrape(pair.decode.engine.stats(), pair.decode.engine.tallies())
    waits = seen.values("transfer_duration_seconds_count", "phase")
    assert (waits["grant"], waits["wait"]) == (1, 1)
