"""All metrics of one model replica, served.

Owns:   which of the engine's settings are facts of the replica.
Thread: any; scrapes read snapshots.
"""

from collections.abc import Callable

from dashboards.metric import Process
from deployments.watch.metrics.emitter import Emitter, Identity
from deployments.watch.metrics.process import emitter_of
from deployments.watch.metrics.replica_figures import ReplicaFacts, tell_replica
from replicas.engine.engine import Engine
from replicas.types import EngineStats, EngineTallies
from routing.types import Role


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
    """An emitter of everything about ``engine``; metrics of hand-offs where it takes part in any. ``stats`` and
    ``tallies`` are its own as of now, from any thread (`EngineLoop`'s)."""
    has_transfer = stats().transfer is not None
    identity = Identity(model=model, role=role.value, replica=replica_id)
    emitter = emitter_of(Process.REPLICA, identity, disaggregated=has_transfer)
    config = engine.config
    cell_bytes = config.model.kv_cell_bytes(tp=config.parallel.tp, kv_dtype=config.kv_dtype)
    facts = ReplicaFacts(
        node_id=node_id,
        accelerator=config.device,
        attention=engine.attention.name,
        tp=config.parallel.tp,
        page_bytes=config.cache.page_size * config.parallel.tp * cell_bytes,
        page_size=config.cache.page_size,
        kv_dtype=config.kv_dtype,
        transfer_backend="nixl" if has_transfer else "none",
        start_times=engine.start_times,
    )
    tell_replica(emitter, facts, stats, tallies)
    return emitter
