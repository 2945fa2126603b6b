"""A follower rank (> 0) of a tensor-parallel replica: receives plans (and orders for K/V bytes) and runs them; it tells
rank 0 nothing but how the reading of an adapter went.

Life cycle: connect to rank 0's plan channel -> join the process group -> load its slice -> run plans until rank 0
hangs up. Rank 0 notices a dead follower by its failing collective, or by `WorkerHandles.dead`, which is asked all the
time: by `Ranks.watched` at the start, and by the engine's watchdog.
"""

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection

from replicas.config import EngineConfig, load_extensions
from replicas.errors import MantaError, Overloaded
from replicas.layers.adapters import (
    AdapterBank,
    AdapterOrder,
    DropAdapter,
    Pairs,
    PrepareAdapter,
    PutAdapter,
    RankAdapter,
)
from replicas.layers.tp_group import TpGroup
from replicas.memory.host import HostKVCache, HostMemory
from replicas.ranks.port import PortSpec
from replicas.ranks.remote_port import serve_port
from replicas.runner.kv_access import (
    CarriedStates,
    CarriedWindows,
    CarryWindows,
    CopyPages,
    CopyStates,
    GiveBack,
    KvOrder,
    ReadKv,
    WriteKv,
    copy_pages,
    give_back_parts,
    run_order,
)
from replicas.runner.model_runner import ModelRunner
from replicas.scheduler.plan import StepPlan

log = logging.getLogger(__name__)
ReadPairs = Callable[[str, str], tuple[int, Pairs]]  # of an adapter, by its folder and identity: its rank, its weights


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything that a follower needs to start; picklable."""

    config: EngineConfig
    rank: int
    init_method: str  # torch.distributed rendezvous, e.g. tcp://127.0.0.1:29500
    plan_address: tuple[str, int]
    authkey: bytes  # shared secret of the plan channel and of the ports' channel
    read_adapter: ReadPairs  # raises InvalidAdapter, AdapterNotReadable
    port_address: tuple[str, int] | None = None  # where rank 0 waits for the transfer port of this rank
    port: PortSpec | None = None
    host: HostMemory | None = None  # of the host tier


def run_worker(spec: WorkerSpec) -> None:
    """Run the main loop of rank ``spec.rank``; returns when rank 0 hangs up."""
    load_extensions()
    plans = Client(spec.plan_address, authkey=spec.authkey)
    tp = TpGroup.create(
        spec.rank, spec.config.parallel.tp, init_method=spec.init_method, device=spec.config.device
    )
    runner = ModelRunner(spec.config, tp)
    host = None if spec.host is None else attach_host(spec.host, spec.rank, runner)
    if spec.port is not None:
        arguments = (runner.pool, spec.rank, spec.port, spec.port_address, spec.authkey)
        threading.Thread(target=serve_port, args=arguments, name="manta-transfer", daemon=True).start()
    log.info("rank %d of %d is ready", spec.rank, tp.size)
    adapters = FollowedAdapters(lambda: runner.adapters, spec.read_adapter, plans, tp)
    while True:
        try:
            message: StepPlan | KvOrder | AdapterOrder = plans.recv()
        except (EOFError, ConnectionResetError):
            runner.close()
            return
        if isinstance(message, CopyPages):
            assert host is not None, "this engine has no host tier"
            copy_pages(message, runner.pool, host, tp)
        elif isinstance(message, CopyStates):
            if runner.states is not None:
                CarriedStates(runner.pool, runner.states, tp).run(message.copies)
        elif isinstance(message, CarryWindows):
            CarriedWindows(runner.pools, tp).run(message)
        elif isinstance(message, PrepareAdapter | PutAdapter | DropAdapter):
            adapters.run(message)
        elif isinstance(message, GiveBack):
            give_back_parts(message, runner.pools)
        elif isinstance(message, ReadKv | WriteKv):
            with suppress(Overloaded):  # rank 0 raises it too
                run_order(message, runner.pool, tp, spec.config.model.num_kv_heads)
        else:
            runner.forward(message)


class FollowedAdapters:
    """The adapters of a follower: it reads each on a thread of its own, while it runs steps."""

    def __init__(self, bank: Callable[[], AdapterBank], read: ReadPairs, rank_0: Connection, tp: TpGroup) -> None:
        self._bank, self._read, self._rank_0, self._tp = bank, read, rank_0, tp
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manta-adapters")
        self._prepared: tuple[PrepareAdapter, Future[RankAdapter]] | None = None  # the newest

    def run(self, order: AdapterOrder) -> None:
        """Run this rank's part of an order; what it cannot hold, rank 0 refuses."""
        if isinstance(order, DropAdapter):
            self._bank().drop(order.identity)
        elif isinstance(order, PrepareAdapter):
            future = self._thread.submit(self._prepare, order)
            self._prepared = order, future
            future.add_done_callback(lambda done: self._tell(order, done.exception()))
        else:
            with suppress(Overloaded):
                self._bank().put(order.prepared.identity, lambda: self._share_of(order.prepared), self._tp)

    def _prepare(self, order: PrepareAdapter) -> RankAdapter:
        return self._bank().prepare(*self._read(order.path, order.identity))

    def _share_of(self, order: PrepareAdapter) -> RankAdapter:
        """Give what was prepared; what was given up for another since is read again."""
        newest, self._prepared = self._prepared, None
        return newest[1].result() if newest is not None and newest[0] == order else self._prepare(order)

    def _tell(self, order: PrepareAdapter, error: BaseException | None) -> None:
        """Say how an order went, in words that a client may see."""
        if error is not None:
            log.error("rank %d cannot prepare adapter %s", self._tp.rank, order.identity, exc_info=error)
        why = str(error) if isinstance(error, MantaError) else "" if error is None else type(error).__name__
        with suppress(OSError):  # rank 0 is gone
            self._rank_0.send((order.number, why))


def attach_host(memory: HostMemory, rank: int, runner: ModelRunner) -> HostKVCache:
    """Attach a follower to the host tier. Raises: InvalidConfig when it cannot."""
    host = HostKVCache(memory, rank)
    if runner.pool.device.type == "cuda":
        host.pin()
    return host


def die_with_parent() -> None:
    """End this process when its parent ends, even in the middle of a collective.

    Not by PR_SET_PDEATHSIG: that follows the *thread* that started it, and an engine may be loaded in a passing one.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a multiprocessing child has a parent to watch"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="manta-parent-watch", daemon=True).start()


def worker_specs(
    config: EngineConfig,
    init_method: str,
    plan_address: tuple[str, int],
    authkey: bytes,
    *,
    read_adapter: ReadPairs,
    port_address: tuple[str, int] | None = None,
    port: PortSpec | None = None,
    host: HostMemory | None = None,
) -> Sequence[WorkerSpec]:
    """Make one spec for each rank above 0."""
    return [
        WorkerSpec(
            config=config,
            rank=rank,
            init_method=init_method,
            plan_address=plan_address,
            authkey=authkey,
            read_adapter=read_adapter,
            port_address=port_address,
            port=port,
            host=host,
        )
        for rank in range(1, config.parallel.tp)
    ]
