"""The metrics of one model replica: an engine's statistics, read at each scrape, so that a step costs nothing more.

Owns:      the metrics that no statistic is as it stands (replicas/types.py names the metrics of the others), and which
           settings are facts of the replica.
Never:     asks the engine thread: a scrape shows the snapshot of the last step.
Invariant: the states of the pool sum to its capacity; every metric of a replica is emitted, those of transfers only if
           the engine takes part in any.
Thread:    made on any; read on the scrape's.
"""

from collections.abc import Callable, Iterator, Mapping

from dashboards.catalog import BLOCKS, DRAFT_SOURCES, GROUPS, POOL_STATES, SIZED, Process
from deployments.watch.metrics.emitter import Emitter, Identity, Value, emitter_of
from kvtransfer.types import TransferStats
from replicas.engine.engine import Engine
from replicas.memory.sizing import page_bytes
from replicas.types import AdapterStats, EngineStats, EngineTallies, GroupStats, PoolStats, TierStats, each_told
from routing.types import Role

Told = tuple[str, Mapping[str, str], Value]
L1, L2 = ({"tier": tier} for tier in SIZED)
NO_TIERS = TierStats(host_pages=0, host_used_pages=0)
NO_ADAPTERS = AdapterStats(held=(), num_bytes=0, num_loads=0, num_dropped=0, load_s=0.0)


def tell_replica(
    emitter: Emitter,
    facts: Mapping[str, str],
    stats: Callable[[], EngineStats],
    tallies: Callable[[], EngineTallies],
    *,
    page_bytes: int,
    start_times: Mapping[str, float],
) -> None:
    """Bind all metrics of a replica to ``emitter``. ``facts``: the labels of replica_info, but for the number of pages;
    ``stats`` and ``tallies``: as of now, from any thread; ``page_bytes``: of K and V, all ranks; ``start_times``:
    seconds by phase, as far as known."""

    def read() -> Iterator[Told]:
        now, seen = stats(), tallies()
        tiers, adapters = now.tiers or NO_TIERS, now.adapters or NO_ADAPTERS
        for each in (now, tiers, adapters, seen):
            yield from _named(each)
        yield "replica_info", {**facts, "num_pages": str(now.pool.num_pages)}, 1
        yield from _each("replica_start_seconds", "phase", start_times)
        yield from _scheduler(now)
        yield from _pool(now.pool, tiers, page_bytes)
        yield from _hits(now, tiers)
        told = {each.group: each for each in now.groups}
        for group in GROUPS:
            yield from _named(told.get(group, GroupStats(group=group)), group=group)
        yield "adapters_held", {}, len(adapters.held)
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
    yield "replica_device_alloc_retries_total", {"device": found.device}, found.num_alloc_retries
    if found.utilization is not None:
        yield "replica_device_utilization_ratio", device, found.utilization


def _named(stats: object, **labels: str) -> Iterator[Told]:
    """Tell the statistics that are a metric as they are (replicas/types.py names it), with ``labels`` more."""
    for name, how in each_told(type(stats)):
        if how.metric:
            yield how.metric, {**how.labels, **labels}, getattr(stats, name)


def _scheduler(stats: EngineStats) -> Iterator[Told]:
    for reason in BLOCKS:
        yield "admission_blocked", {"reason": reason}, stats.blocked == reason
    for source in DRAFT_SOURCES:
        accepted = stats.accepted_tokens.get(source, 0)
        rejected = stats.drafted_tokens.get(source, 0) - accepted
        yield "scheduler_draft_tokens_total", {"source": source, "outcome": "accepted"}, accepted
        yield "scheduler_draft_tokens_total", {"source": source, "outcome": "rejected"}, rejected


def _pool(pool: PoolStats, tiers: TierStats, page_bytes: int) -> Iterator[Told]:
    for tier, num_pages in ((L1, pool.num_pages), (L2, tiers.host_pages)):
        yield "kv_pool_capacity_tokens", tier, num_pages * pool.page_size
        yield "kv_pool_capacity_bytes", tier, num_pages * page_bytes
    for state in POOL_STATES:
        yield "kv_pool_tokens", {**L1, "state": state}, getattr(pool, f"{state}_pages") * pool.page_size
    yield "kv_pool_utilization_ratio", L1, pool.utilization
    yield "tier_clean_tokens", {}, tiers.clean_pages * pool.page_size
    yield "tier_used_bytes", L2, tiers.host_used_pages * page_bytes
    yield "tier_store_up", {}, tiers.store_error is None


def _hits(stats: EngineStats, tiers: TierStats) -> Iterator[Told]:
    loaded = tiers.host_hit_tokens + tiers.store_hit_tokens
    yield "cache_hit_tokens_total", L1, max(stats.cached_tokens - loaded, 0)  # the two are not counted at one moment
    yield "tier_loaded_tokens_total", L2, loaded


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
    """Return an emitter of all metrics of ``engine``, those of KV transfers only if it takes part in any. ``stats`` and
    ``tallies`` are the engine's as of now, from any thread (`EngineLoop`'s)."""
    has_transfer = stats().transfer is not None
    identity = Identity(model=model, role=role.value, replica=replica_id)
    config = engine.config
    emitter = emitter_of(Process.REPLICA, identity, disaggregated=has_transfer, gpu=config.device == "cuda")
    model_config = config.model
    kept = None if model_config.stored is None else model_config.stored.products or model_config.stored.experts
    plain = model_config.quantization == "none" and kept is not None
    facts = {
        "node": node_id,
        "accelerator": config.device,
        "attention": engine.started.attention.name,
        "tensor_parallel": str(config.parallel.tp),
        "page_size_tokens": str(config.cache.page_size),
        "dtype": model_config.dtype,
        "quantization": str(kept) if plain else model_config.quantization,  # as loaded, or as the checkpoint stores it
        "context_len_tokens": str(model_config.context_len),
        "kv_dtype": config.kv_dtype,
        "transfer_backend": "nixl" if has_transfer else "none",
    }
    own_bytes = page_bytes(config, engine.kv.store.size)
    tell_replica(emitter, facts, stats, tallies, page_bytes=own_bytes, start_times=engine.started.times)
    return emitter
