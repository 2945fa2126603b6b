"""The model replica: an engine in a Ray Serve actor; rank 0 here, further ranks as child actors.

Owns:      the engine and its life in Ray: start, health, drain.
Never:     sees HTTP; sends tokens through Ray (they go over the channel, served_engine.py). Loads torch or numba
           before a replica starts: the process that builds the application imports this module.
Invariant: while a request runs, its lease call runs, so that Serve counts it and waits for it when draining.
Thread:    Serve's event loop for this replica; the engine has its own thread.

The actors of tensor-parallel ranks above 0 live in the replica's placement group, and as long as the replica: Ray owns
children. Plans go to them over rank 0's plan channel, never as actor calls. The engine's start-up thread makes them,
the watchdog asks `dead`.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.util import get_current_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments import logs
from deployments.autoscaling import replica_stats
from deployments.channel.kv_events import KV_EVENTS_VARIABLE, KvEvents
from deployments.dispatch.leases import ReplicaInfo
from deployments.fleet.node_tasks import DeathWatch
from deployments.places import local_path
from deployments.replica.cache_migration import ReplicaMigrations
from deployments.replica.served_engine import ServedEngine, may_fetch
from deployments.settings.roles import config_of, keeps_whole_pages
from deployments.settings.schema import AppConfig, parse
from deployments.watch.metrics.replica_metrics import replica_emitter
from deployments.watch.metrics.server import MetricsServer, ServedMetrics
from deployments.watch.process import offer_stacks, without_collections
from kvtransfer.migration.wire import MigrationAddress
from kvtransfer.types import TransferSettings
from replicas.engine.loop import EngineLoop
from routing.types import Role

if TYPE_CHECKING:
    from replicas.engine.engine import Engine
    from replicas.engine.ranks import WorkerLauncher
    from replicas.ranks.worker import WorkerSpec

log = logging.getLogger("ray.serve")


class ModelReplica(ServedEngine):
    """A deployment of model replicas, of one role: the served engine, and the hooks that Ray Serve calls."""

    def __init__(
        self, settings: dict[str, Any], role: str = Role.UNIFIED.value, metrics_guard: bytes | None = None
    ) -> None:
        """``metrics_guard``: the guard of MetricsServer."""
        logs.into_serve()
        offer_stacks()
        of_all = parse(settings)
        config = config_of(of_all, Role(role))
        settle(num_threads=config.replicas.num_threads, device=config.replicas.device)
        replica_id, node_id = serve.get_replica_context().replica_id.unique_id, ray.get_runtime_context().get_node_id()
        with contextlib.ExitStack() as undo:  # of what was begun, where the rest fails
            host, wanted = ray.util.get_node_ip_address(), config.observability.metrics_port
            port = MetricsServer(host=host, port=wanted, guard=metrics_guard)  # before the weights, as it may be taken
            undo.callback(port.close)
            told = os.environ.get(KV_EVENTS_VARIABLE)
            kv_events = KvEvents(told) if told else None
            if kv_events is not None:
                undo.callback(kv_events.close)
            engine = self.load(of_all, Role(role))
            loop = EngineLoop(engine)
            loop.start()
            undo.callback(loop.stop)
            self._fetch = config.transfer.fetch == "auto"
            home = engine.executor.page_home
            migrations = None if home is None else ReplicaMigrations(loop, home, host=host)
            self._metrics = _metrics(config, loop, port, role=Role(role), replica_id=replica_id, node_id=node_id)
            super().__init__(
                loop,
                replica_id=replica_id,
                node_id=node_id,
                report_period_s=config.router.report_period_s,
                role=Role(role),
                metrics_address=self._metrics.target.address,
                migrations=migrations,
                kv_events=kv_events,
            )
            self._death_watch = None if engine.transfer is None else DeathWatch(engine.transfer)
            if self._death_watch is not None:
                self._death_watch.start()
            undo.pop_all()  # nothing failed: `__del__` ends it
        log.info("%s replica %s serves %s with a KV pool of %s", role, replica_id, config.model.path, engine.describe())

    @staticmethod
    def load(config: AppConfig, role: Role) -> "Engine":
        """Load the engine by the settings of all roles; a subclass with another engine overrides it."""
        whole_pages, config = keeps_whole_pages(config), config_of(config, role)
        with without_collections():  # a quarter of what these imports take
            from replicas.launch import EngineSettings, load_engine

        return load_engine(
            EngineSettings(
                model=local_path(config.model.path),
                cache=config.cache,
                scheduler=config.scheduler,
                parallel=config.parallel,
                attention=config.attention,
                adapters=config.adapters.served,
                cuda_graphs=config.cuda_graphs,
                num_threads=config.replicas.num_threads,
                revision=config.model.revision,
                dtype=config.model.dtype,
                quantization=config.model.quantization,
                implementation=config.model.implementation,
                context_len=config.model.context_len,
                workers=_workers(config),
                record_events=True,
                transfer=_transfer(config, role),
                whole_pages=whole_pages,
                commit_pool=True,
            )
        )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this replica's load. Serve calls it where the application scales itself."""
        return replica_stats(self.loop.stats())

    def _info(self, migration: MigrationAddress | None) -> ReplicaInfo:
        actor = ray.get_runtime_context().get_actor_name() or ""
        return replace(super()._info(migration), actor=actor, fetches=self._fetch and may_fetch(self.loop.engine))

    async def __del__(self) -> None:
        metrics = getattr(self, "_metrics", None)
        if metrics is not None:
            metrics.close()
        if (watch := getattr(self, "_death_watch", None)) is not None:
            watch.stop()
        if hasattr(self, "loop"):  # the constructor may have failed
            await self.stop()


def _metrics(
    config: AppConfig, loop: EngineLoop, port: MetricsServer, *, role: Role, replica_id: str, node_id: str
) -> ServedMetrics:
    emitter = replica_emitter(
        loop.engine,
        stats=loop.stats,
        tallies=loop.tallies,
        model=config.model.name,
        role=role,
        replica_id=replica_id,
        node_id=node_id,
    )
    return ServedMetrics(emitter, port, node_id=node_id)


def _transfer(config: AppConfig, role: Role) -> TransferSettings | None:
    alone = role is Role.UNIFIED and config.transfer.fetch == "off"
    return None if alone else config.transfer.of_engine(ray.util.get_node_ip_address())


def _workers(config: AppConfig) -> "WorkerLauncher | None":
    if config.parallel.tp == 1:
        return None
    group = get_current_placement_group()
    assert group is not None, "app.py gives replicas with tp > 1 a placement group"
    host = ray.util.get_node_ip_address()
    return RayWorkers(group, host=host, cpus=config.replicas.cpus, gpus=config.replicas.gpus)


def settle(*, num_threads: int, device: str) -> None:
    """Hold this process to its threads and its device, before it imports torch, which reads the environment. In Ray's
    ``runtime_env`` the same would keep a replica from the workers that Ray has standing by."""
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    # Ray hides GPUs only from actors that reserve some, and under RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES from none
    os.environ["CUDA_VISIBLE_DEVICES"] = "" if device == "cpu" else ",".join(map(str, ray.get_gpu_ids()))


class RankActor:
    """The actor of one follower rank; its only method lasts as long as the rank does."""

    def __init__(self, num_threads: int, device: str) -> None:
        settle(num_threads=num_threads, device=device)  # and not in `run`, as torch comes with what that is given

    def run(self, spec: "WorkerSpec") -> None:
        with without_collections():
            from replicas.ranks.worker import run_worker

        run_worker(spec)


class RayWorkers:
    """One actor per rank, rank r in bundle r of ``group``: a `WorkerLauncher`, and the handles that it returns."""

    def __init__(self, group: PlacementGroup, *, host: str, cpus: float, gpus: float) -> None:
        self.host = host  # address of rank 0 that other nodes can reach
        self._group = group
        self._cpus = cpus
        self._gpus = gpus
        self._actors: list[Any] = []
        self._runs: dict[Any, int] = {}  # running call -> rank

    def start(self, specs: "Sequence[WorkerSpec]") -> "RayWorkers":
        actor_class = ray.remote(RankActor)
        for spec in specs:
            strategy = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=spec.rank, placement_group_capture_child_tasks=True
            )
            options = {"num_cpus": self._cpus, "num_gpus": self._gpus, "scheduling_strategy": strategy}
            actor = actor_class.options(**options).remote(spec.config.num_threads, spec.config.device)
            self._actors.append(actor)
            self._runs[actor.run.remote(spec)] = spec.rank
        return self

    def dead(self) -> str | None:
        """Say in a sentence which rank is gone, or None: `run` returns only when rank 0 hangs up."""
        ended, _ = ray.wait(list(self._runs), num_returns=1, timeout=0)
        if not ended:
            return None
        rank = self._runs[ended[0]]
        try:
            ray.get(ended[0])
        except ray.exceptions.RayError as error:
            from replicas.engine.ranks import error_line

            if isinstance(error, ray.exceptions.RayTaskError):
                return f"tensor-parallel rank {rank} died ({error_line(error.cause)})"
            why = str(error).strip().splitlines()[-1]  # of its constructor's traceback, or what Ray knows of its end
            return f"tensor-parallel rank {rank} died ({why})"
        return f"tensor-parallel rank {rank} has ended"

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
