"""The metrics of one model replica: an engine's statistics, read at each scrape, so that a step costs nothing more.

Owns:      which number of EngineStats and EngineTallies is which metric, and which settings are facts of the replica.
Never:     asks the engine thread: a scrape shows the snapshot of the last step.
Invariant: the states of the pool sum to its capacity; every metric of a replica is emitted, those of hand-offs only if
           the engine takes part in any.
Thread:    made on any; read on the scrape's.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dashboards.catalog import BLOCKS, DRAFT_SOURCES, POOL_STATES, TIERS, Process
from deployments.watch.metrics.emitter import Emitter, Identity, Value, emitter_of
from kvtransfer.types import TransferStats
from replicas.config import ModelConfig
from replicas.engine.engine import Engine
from replicas.types import AdapterStats, EngineStats, EngineTallies, PoolStats, TierStats
from routing.types import Role

Told = tuple[str, Mapping[str, str], Value]
L1, L2, L3 = ({"tier": tier} for tier in TIERS)
NO_TIERS = TierStats(host_pages=0, host_used_pages=0)
NO_ADAPTERS = AdapterStats(held=(), num_bytes=0, num_loads=0, num_dropped=0, load_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """The facts of a replica that do not change while it runs."""

    node_id: str
    accelerator: str  # cpu, or cuda
    attention: str  # the backend that runs
    dtype: str  # of the weights
    quantization: str  # none, or how the weights are rounded when they are loaded, or how the checkpoint stores them
    context_len: int
    tp: int
    page_bytes: int  # of K and V, all ranks
    page_size: int
    kv_dtype: str
    transfer_backend: str  # none, or nixl
    start_times: Mapping[str, float]  # seconds by phase, as far as known


def tell_replica(
    emitter: Emitter,
    facts: ReplicaFacts,
    stats: Callable[[], EngineStats],
    tallies: Callable[[], EngineTallies],
) -> None:
    """Bind all metrics of a replica to ``emitter``. ``stats`` and ``tallies``: as of now, from any thread."""

    def read() -> Iterator[Told]:
        now, seen = stats(), tallies()
        yield from _facts(facts, now.pool)
        yield from _scheduler(now, seen)
        yield from _pool(now.pool, now, facts)
        tiers = now.tiers or NO_TIERS
        yield from _cache(now, tiers, seen)
        yield from _tiers(tiers, page_size=now.pool.page_size, page_bytes=facts.page_bytes)
        yield from _adapters(now.adapters or NO_ADAPTERS)
        if now.transfer is not None:
            yield from _transfers(now.transfer, seen)

    told = [metric for metric in emitter.metrics if metric.process is Process.REPLICA]
    emitter.tell([metric.name for metric in told if not metric.gpu], read)
    if on_gpu := [metric.name for metric in told if metric.gpu]:
        emitter.tell(on_gpu, _device)  # by itself: a fault of NVML costs no other metric


def _device() -> Iterator[Told]:
    from replicas.loading.device import gpu_figures

    found = gpu_figures()
    if found is None:
        return
    device = {"device": found.device}
    for kind, num_bytes in (("total", found.total_bytes), ("used", found.used_bytes), ("own", found.own_bytes)):
        yield "replica_device_memory_bytes", {**device, "kind": kind}, num_bytes
    if found.utilization is not None:
        yield "replica_device_utilization_ratio", device, found.utilization


def _facts(facts: ReplicaFacts, pool: PoolStats) -> Iterator[Told]:
    labels = {
        "node": facts.node_id,
        "accelerator": facts.accelerator,
        "attention": facts.attention,
        "tensor_parallel": str(facts.tp),
        "page_size_tokens": str(facts.page_size),
        "num_pages": str(pool.num_pages),
        "dtype": facts.dtype,
        "quantization": facts.quantization,
        "context_len_tokens": str(facts.context_len),
        "kv_dtype": facts.kv_dtype,
        "transfer_backend": facts.transfer_backend,
    }
    yield "replica_info", labels, 1
    for phase, seconds in facts.start_times.items():
        yield "replica_start_seconds", {"phase": phase}, seconds


def _scheduler(stats: EngineStats, tallies: EngineTallies) -> Iterator[Told]:
    states = {
        "waiting": stats.num_waiting,
        "running": stats.num_running,
        "preallocating": stats.num_preallocating,
        "receiving": stats.num_receiving,
        "handing_off": stats.num_handing_off,
    }
    yield from _each("scheduler_requests", "state", states)
    yield "scheduler_running_limit_requests", {}, stats.max_running_requests
    yield "scheduler_queued_tokens", {}, stats.waiting_uncached_tokens
    for reason in BLOCKS:
        yield "admission_blocked", {"reason": reason}, stats.blocked == reason
    yield from _each(
        "scheduler_batch_requests",
        "phase",
        {"prefill": tallies.prefill_batch_requests, "decode": tallies.decode_batch_requests},
    )
    yield from _each(
        "scheduler_batch_tokens",
        "phase",
        {"prefill": tallies.prefill_batch_tokens, "decode": tallies.decode_batch_tokens},
    )
    yield from _each(
        "scheduler_step_duration_seconds", "phase", {"prefill": tallies.prefill_step_s, "decode": tallies.decode_step_s}
    )
    yield "scheduler_mixed_steps_total", {}, stats.num_mixed_steps
    yield "scheduler_constrained_requests_total", {}, stats.num_constrained
    yield "scheduler_forced_tokens_total", {}, stats.forced_tokens
    for source in DRAFT_SOURCES:
        accepted = stats.accepted_tokens.get(source, 0)
        rejected = stats.drafted_tokens.get(source, 0) - accepted
        yield "scheduler_draft_tokens_total", {"source": source, "outcome": "accepted"}, accepted
        yield "scheduler_draft_tokens_total", {"source": source, "outcome": "rejected"}, rejected
    yield from _each("scheduler_busy_seconds_total", "phase", {"prefill": stats.extend_s, "decode": stats.decode_s})
    kinds = {
        "prefill_computed": stats.prefill_tokens,
        "prefill_cached": stats.cached_tokens,
        "decode": stats.decode_tokens,
    }
    yield from _each("scheduler_tokens_total", "kind", kinds)
    yield "scheduler_retractions_total", {}, stats.num_retractions
    yield "scheduler_retracted_tokens_total", {}, stats.retracted_tokens
    yield "scheduler_failed_steps_total", {}, stats.failed_steps
    ended = {"ok": stats.num_finished, "cancelled": stats.num_aborted, "error": stats.num_errors}
    yield from _each("scheduler_finished_requests_total", "outcome", ended)


def _pool(pool: PoolStats, stats: EngineStats, facts: ReplicaFacts) -> Iterator[Told]:
    yield "kv_pool_capacity_tokens", L1, pool.total_tokens
    yield "kv_pool_capacity_bytes", L1, pool.num_pages * facts.page_bytes
    for state in POOL_STATES:
        yield "kv_pool_tokens", {**L1, "state": state}, getattr(pool, f"{state}_pages") * pool.page_size
    yield "kv_pool_utilization_ratio", L1, pool.utilization
    yield "kv_pool_alloc_failures_total", L1, stats.alloc_failures
    yield "kv_pool_failed_checks_total", L1, stats.failed_checks


def _cache(stats: EngineStats, tiers: TierStats, tallies: EngineTallies) -> Iterator[Told]:
    loaded = tiers.host_hit_tokens + tiers.store_hit_tokens
    yield "cache_lookup_tokens_total", {}, stats.lookup_tokens
    yield "cache_hit_tokens_total", L1, max(stats.cached_tokens - loaded, 0)  # the two are not counted at one moment
    yield "cache_hit_tokens_total", L2, tiers.host_hit_tokens
    yield "cache_hit_tokens_total", L3, tiers.store_hit_tokens
    yield "cache_evicted_tokens_total", {**L1, "reason": "capacity"}, stats.evicted_tokens
    yield "cache_evicted_tokens_total", {**L1, "reason": "flush"}, stats.flushed_tokens
    yield "cache_evicted_tokens_total", {**L2, "reason": "capacity"}, tiers.host_evicted_tokens
    yield "cache_evicted_idle_seconds", L1, tallies.evicted_idle_s
    yield "cache_nodes", L1, stats.cache_nodes


def _tiers(tiers: TierStats, *, page_size: int, page_bytes: int) -> Iterator[Told]:
    yield "kv_pool_capacity_tokens", L2, tiers.host_pages * page_size
    yield "kv_pool_capacity_bytes", L2, tiers.host_pages * page_bytes
    yield "tier_clean_tokens", {}, tiers.clean_pages * page_size
    by_tier: dict[str, tuple[float, float]] = {  # host, store
        "tier_used_bytes": (tiers.host_used_pages * page_bytes, tiers.store_bytes),
        "tier_written_tokens_total": (tiers.host_written_tokens, tiers.store_written_tokens),
        "tier_write_seconds_total": (tiers.host_write_s, tiers.store_write_s),
        "tier_loaded_tokens_total": (tiers.host_hit_tokens + tiers.store_hit_tokens, tiers.store_read_tokens),
        "tier_load_seconds_total": (tiers.host_load_s, tiers.store_read_s),
        "tier_wrong_pages_total": (tiers.host_wrong_pages, tiers.store_wrong_pages),
    }
    for name, (host, store) in by_tier.items():
        yield name, L2, host
        yield name, L3, store
    moved = {"out": tiers.pushed_tokens, "in": tiers.received_tokens}
    yield from _each("tier_moved_tokens_total", "direction", moved)
    yield "tier_saved_seconds_total", {}, tiers.saved_s
    yield "tier_slow_loads_total", {}, tiers.slow_loads
    yield "tier_store_errors_total", {}, tiers.store_errors
    yield "tier_store_up", {}, tiers.store_error is None


def _adapters(stats: AdapterStats) -> Iterator[Told]:
    yield "adapters_held", {}, len(stats.held)
    yield "adapters_held_bytes", {}, stats.num_bytes
    yield "adapter_loads_total", {}, stats.num_loads
    yield "adapter_drops_total", {}, stats.num_dropped
    yield "adapter_load_seconds", {}, stats.load_s


def _transfers(stats: TransferStats, tallies: EngineTallies) -> Iterator[Told]:
    ended = {
        ("send", "ok"): stats.sends_done,
        ("send", "error"): stats.sends_failed,
        ("receive", "ok"): stats.receives_done,
        ("receive", "error"): stats.receives_failed,
    }
    for (direction, outcome), count in ended.items():
        yield "transfers_total", {"direction": direction, "outcome": outcome}, count
    yield from _each("transfer_bytes_total", "direction", {"send": stats.sent_bytes, "receive": stats.received_bytes})
    under_way = {"send": stats.rooms_sending, "receive": stats.rooms_receiving, "draining": stats.rooms_draining}
    yield from _each("transfers_in_flight", "direction", under_way)
    phases = {"grant": tallies.grant_s, "wait": tallies.wait_s, "post": tallies.post_s, "wire": tallies.wire_s}
    yield from _each("transfer_duration_seconds", "phase", phases)
    yield "transfer_oldest_drain_seconds", {}, stats.oldest_drain_s
    yield "transfer_peers", {}, stats.peers
    yield "transfer_digest_mismatches_total", {}, stats.digest_mismatches
    yield "transfer_late_messages_total", {}, stats.late_messages


def _each(name: str, label: str, values: Mapping[str, Value]) -> Iterator[Told]:
    for key, value in values.items():
        yield name, {label: key}, value


def replica_emitter(
    engine: Engine,
    *,
    stats: Callable[[], EngineStats],
    tallies: Callable[[], EngineTallies],
    model: str,
    role: Role,
    replica_id: str,
    node_id: str,
) -> Emitter:
    """Return an emitter of all metrics of ``engine``, those of hand-offs only if it takes part in any. ``stats`` and
    ``tallies`` are the engine's as of now, from any thread (`EngineLoop`'s)."""
    has_transfer = stats().transfer is not None
    identity = Identity(model=model, role=role.value, replica=replica_id)
    config = engine.config
    emitter = emitter_of(Process.REPLICA, identity, disaggregated=has_transfer, gpu=config.device == "cuda")
    cell_bytes = config.model.kv_cell_bytes(tp=config.parallel.tp, kv_dtype=config.kv_dtype)
    facts = ReplicaFacts(
        node_id=node_id,
        accelerator=config.device,
        attention=engine.started.attention.name,
        dtype=config.model.dtype,
        quantization=_quantization(config.model),
        context_len=config.model.context_len,
        tp=config.parallel.tp,
        page_bytes=config.cache.page_size * config.num_kv_parts * cell_bytes,
        page_size=config.cache.page_size,
        kv_dtype=config.kv_dtype,
        transfer_backend="nixl" if has_transfer else "none",
        start_times=engine.started.times,
    )
    tell_replica(emitter, facts, stats, tallies)
    return emitter


def _quantization(model: ModelConfig) -> str:
    """Return how the weights are served: "none" of plain floats."""
    if model.quantization != "none" or model.stored is None or model.stored.products is None:
        return model.quantization
    return str(model.stored.products)
