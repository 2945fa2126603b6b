"""Builds an engine and its tensor-parallel ranks: here as local processes, in `deployments/` as Ray actors.

Owns:      the order of start-up, and the followers' life: they are stopped when the engine closes.
Never:     decides settings (config.resolve) or sizes (memory/sizing).
"""

import functools
import logging
import multiprocessing
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Literal, Protocol

from replicas.cache.kv import KvCache
from replicas.config import CacheConfig, DType, EngineConfig, ParallelConfig, SchedulerConfig, resolve
from replicas.engine import Engine
from replicas.errors import EngineDead
from replicas.parallel import TpGroup
from replicas.runner.device import measure_hardware
from replicas.runner.kv_access import KvOrder, RankedKvBytes
from replicas.runner.model_runner import ModelRunner
from replicas.runner.weights import load_model_config
from replicas.runner.worker import PlanChannel, WorkerSpec, die_with_parent, run_worker, worker_specs
from replicas.scheduler.plan import StepPlan, StepResult
from replicas.tokenizer import Tokenizer

log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0  # a follower that has not connected by then is not coming
MEET_S = 300.0  # for the ranks' meeting, and for every collective after it


class WorkerHandles(Protocol):
    """The followers of one replica, running."""

    def dead(self) -> str | None:
        """A sentence when a rank is gone, else None."""
        ...

    def stop(self) -> None: ...


class WorkerLauncher(Protocol):
    """Starts followers somewhere; each calls `replicas.runner.worker.run_worker(spec)`."""

    host: str  # address of rank 0 that the followers can reach

    def start(self, specs: Sequence[WorkerSpec]) -> WorkerHandles: ...


class LocalWorkers:
    """Followers as processes of this machine."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def start(self, specs: Sequence[WorkerSpec]) -> "LocalWorkers":
        context = multiprocessing.get_context("spawn")
        for spec in specs:
            process = context.Process(target=_local_worker, args=(spec,), name=f"manta-rank{spec.rank}", daemon=True)
            process.start()
            self._processes.append(process)
        return self

    def dead(self) -> str | None:
        for process in self._processes:
            if process.exitcode is not None:
                return f"{process.name} exited with code {process.exitcode}"
        return None

    def stop(self) -> None:
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()


def load_engine(
    model: str,
    *,
    cache: CacheConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    parallel: ParallelConfig | None = None,
    attention: Literal["auto", "torch_native", "cpu"] = "auto",
    num_threads: int | None = None,
    dtype: DType | None = None,
    context_len: int | None = None,
    workers: WorkerLauncher | None = None,
    record_events: bool = False,
) -> Engine:
    """An engine for the model in folder (or hub id) ``model``; rank 0 lives in this process.

    Args: record_events: for a caller that drains them (loop.py does): what enters and leaves the prefix cache.

    Raises: InvalidConfig (UnsupportedModel) with what is wrong and what is allowed; EngineDead when a rank does not
            come up.
    """
    model_config = load_model_config(model, dtype=dtype, context_len=context_len)
    config = resolve(
        model_config,
        measure_hardware(),
        cache=cache,
        scheduler=scheduler,
        parallel=parallel,
        attention=attention,
        num_threads=num_threads,
    )
    for setting, source in config.origin.items():
        log.info("%s: %s", setting, source)
    tokenizer = Tokenizer(config.model.path)
    ranks = Ranks(config, workers or LocalWorkers())
    runner = ranks.runner
    kv = KvCache(
        num_pages=runner.pool_size.num_pages,
        page_size=runner.pool_size.page_size,
        max_requests=runner.max_running,
        context_len=config.model.context_len,
        prefix_cache=config.cache.prefix_cache,
        eviction=config.cache.eviction,
        record_events=record_events,
    )
    engine = Engine(
        config,
        kv=kv,
        max_running=runner.max_running,
        execute=ranks.execute,
        tokenizer=tokenizer,
        dead_rank=ranks.dead,
        close=ranks.close,
        kv_bytes=ranks.kv_bytes(config),
    )
    log.info("KV pool: %s", engine.describe())
    return engine


class Ranks:
    """All ranks of one replica as one device: rank 0 here, the others behind the plan channel."""

    def __init__(self, config: EngineConfig, launcher: WorkerLauncher) -> None:
        self._channel: PlanChannel | None = None
        self._handles: WorkerHandles | None = None
        if config.parallel.tp == 1:
            self.runner = ModelRunner(config, TpGroup(rank=0, size=1))
            return
        try:
            self.runner = ModelRunner(config, self._gather(config, launcher))
        except BaseException:
            self.close()  # followers must not outlive a start that failed
            raise

    def _gather(self, config: EngineConfig, launcher: WorkerLauncher) -> TpGroup:
        """Start the followers and meet them. Raises: EngineDead as soon as one of them has died."""
        authkey = secrets.token_bytes(32)
        self._channel = channel = PlanChannel(launcher.host, authkey)
        init_method = f"tcp://{launcher.host}:{_free_port(launcher.host)}"
        self._handles = handles = launcher.start(worker_specs(config, init_method, channel.address, authkey))
        channel.accept(config.parallel.tp - 1, timeout_s=START_TIMEOUT_S, dead=handles.dead)
        meeting: Future[TpGroup] = Future()
        meet = functools.partial(
            TpGroup.create, 0, config.parallel.tp, init_method=init_method, device=config.device, timeout_s=MEET_S
        )
        threading.Thread(target=_settle, args=(meeting, meet), name="manta-meeting", daemon=True).start()
        while not wait([meeting], timeout=0.1).done:
            gone = handles.dead()
            if gone is not None:
                raise EngineDead(f"{gone} before all ranks had met; its log says why")
        return meeting.result()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan on every rank; sampling happens here, once."""
        if self._channel is not None:
            self._channel.send(plan)
        return self.runner.run(plan)

    def kv_bytes(self, config: EngineConfig) -> RankedKvBytes:
        """The pools of all ranks as bytes."""
        send = self._channel.send if self._channel is not None else _to_nobody
        return RankedKvBytes(config, self.runner.pool, self.runner.tp, send)

    def dead(self) -> str | None:
        return self._handles.dead() if self._handles is not None else None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._handles is not None:
            self._handles.stop()


def _to_nobody(order: KvOrder) -> None:
    """There is one rank."""


def _settle(future: Future[TpGroup], work: Callable[[], TpGroup]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - belongs to whoever waits for the future
        future.set_exception(error)


def _local_worker(spec: WorkerSpec) -> None:
    die_with_parent()
    logging.basicConfig(level=logging.INFO)
    run_worker(spec)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
