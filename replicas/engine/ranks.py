"""Ranks: the ranks of one replica as one device; rank 0 is here, the others are behind channels.

Owns:      the life of the followers (ranks 1 and up), and the channels of their plans and transfer ports.
Never:     decides settings, or chooses what runs.
Invariant: every rank gets every plan, in the same order.
Thread:    the engine's, once started; the transfer ports are the transfer service's.
"""

import functools
import logging
import multiprocessing
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from kvtransfer.ports.rank_port import RankPort
from replicas.checkpoints.adapters import load
from replicas.config import AdapterLimits, EngineConfig
from replicas.engine.adapters import ReadAdapter
from replicas.errors import EngineDead, InvalidConfig
from replicas.kernels.team import PassingThread
from replicas.layers.adapters import AdapterBank, AdapterOrder, DropAdapter, PutAdapter
from replicas.layers.tp_group import TpGroup
from replicas.memory.host import HostKVCache
from replicas.ranks.plan_channel import PlanChannel
from replicas.ranks.port import MakeAgent, PortSpec, make_port
from replicas.ranks.remote_port import RemotePort
from replicas.ranks.worker import WorkerSpec, die_with_parent, run_worker, worker_specs
from replicas.runner.kv_access import CarriedStates, GiveBack, KvOrder, RankedCopier, RankedKvBytes, give_back_parts
from replicas.runner.model_runner import ModelRunner
from replicas.scheduler.plan import PendingStep, StepPlan
from replicas.types import AdapterRef

START_TIMEOUT_S = 300.0  # a follower that has not connected by then is not coming
MEET_S = 300.0  # for the ranks' meeting, and for every collective after it


class WorkerHandles(Protocol):
    """The running followers of one replica."""

    def dead(self) -> str | None:
        """Return a sentence when a rank is gone, else None."""
        ...

    def stop(self) -> None: ...


class WorkerLauncher(Protocol):
    """A way to start followers somewhere; each calls `replicas.ranks.worker.run_worker(spec)`."""

    host: str  # address of rank 0 that the followers can reach

    def start(self, specs: Sequence[WorkerSpec]) -> WorkerHandles: ...


class LocalWorkers:
    """Followers as processes of this machine."""

    host = "127.0.0.1"

    def __init__(self, main: Callable[[WorkerSpec], None] | None = None) -> None:
        """``main``: what each runs, `local_worker` if not said; it can be pickled."""
        self._main = main or local_worker
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def start(self, specs: Sequence[WorkerSpec]) -> "LocalWorkers":
        context = multiprocessing.get_context("spawn")
        for spec in specs:
            process = context.Process(target=self._main, args=(spec,), name=f"manta-rank{spec.rank}", daemon=True)
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


class RankedAdapters:
    """The adapters of all ranks: read from disk once; ``send`` gives an order to the others. Only `read` may be called
    on any thread."""

    def __init__(
        self, bank: Callable[[], AdapterBank], limits: AdapterLimits, send: Callable[[AdapterOrder], None], tp: TpGroup
    ) -> None:
        self.limits = limits
        self._bank, self._send, self._tp = bank, send, tp

    def read(self, ref: AdapterRef) -> ReadAdapter:
        """Read an adapter, and prepare rank 0's share. Raises: InvalidAdapter, AdapterNotReadable."""
        weights = load(Path(ref.path), ref.identity, self.limits)
        order = PutAdapter(ref.identity, weights.info.rank, weights.pairs)
        share = self._bank().prepare(order)

        def give() -> None:
            self._send(order)
            self._bank().put(ref.identity, lambda: share, self._tp)

        return ReadAdapter(ref.identity, share.packed.num_bytes * self._tp.size, give)

    def drop(self, identity: str) -> None:
        """Let every rank forget an adapter that no step has any more."""
        self._send(DropAdapter(identity))
        self._bank().drop(identity)


class Ranks:
    """All ranks of one replica as one device: rank 0 here, the others behind the plan channel."""

    def __init__(self, config: EngineConfig, launcher: WorkerLauncher, port: PortSpec | None = None) -> None:
        """``port``: the ranks take part in hand-offs."""
        self._port = port
        self._channel: PlanChannel | None = None
        self._port_channel: PlanChannel | None = None
        self._handles: WorkerHandles | None = None
        self.host = host_tier(config)
        if config.parallel.tp == 1:
            self.runner = _load(config, TpGroup(device=config.device))
            return
        try:
            self.runner = _load(config, self._gather(config, launcher))
        except BaseException:
            self._hang_up()  # followers must not outlive a start that failed
            raise

    def _gather(self, config: EngineConfig, launcher: WorkerLauncher) -> TpGroup:
        """Start the followers and meet them. Raises: EngineDead as soon as one of them has died."""
        authkey = secrets.token_bytes(32)
        self._channel = channel = PlanChannel(launcher.host, authkey)
        if self._port is not None:
            self._port_channel = PlanChannel(launcher.host, authkey)
        init_method = f"tcp://{launcher.host}:{_free_port(launcher.host)}"
        specs = worker_specs(
            config,
            init_method,
            channel.address,
            authkey,
            port_address=self._port_channel.address if self._port_channel is not None else None,
            port=self._port,
            host=self.host.memory if self.host is not None else None,
        )
        self._handles = handles = launcher.start(specs)
        channel.accept(config.parallel.tp - 1, timeout_s=START_TIMEOUT_S, dead=handles.dead)
        meet = functools.partial(
            TpGroup.create, 0, config.parallel.tp, init_method=init_method, device=config.device, timeout_s=MEET_S
        )
        meeting = PassingThread(meet, name="manta-meeting")
        while meeting.is_alive():
            meeting.join(timeout=0.1)
            gone = handles.dead()
            if gone is not None:
                raise EngineDead(f"{gone} before all ranks had met; its log says why")
        return meeting.result()

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a plan on every rank; sampling happens here, once."""
        if self._channel is not None:
            self._channel.send(plan)
        return self.runner.launch(plan)

    def kv_bytes(self, config: EngineConfig) -> RankedKvBytes:
        """Give access to the pools of all ranks as bytes."""
        send = self._channel.send if self._channel is not None else _send_nothing
        return RankedKvBytes(config, self.runner.pool, self.runner.tp, send)

    def give_back(self, parts: frozenset[str]) -> None:
        """Give the memory of ``parts`` back on every rank (occupation.py)."""
        order = GiveBack(parts)
        if self._channel is not None:
            self._channel.send(order)
        give_back_parts(order, self.runner.pools)

    def adapters(self, limits: AdapterLimits) -> RankedAdapters:
        """Give access to the adapters of all ranks."""
        send = self._channel.send if self._channel is not None else _send_nothing
        return RankedAdapters(lambda: self.runner.adapters, limits, send, self.runner.tp)

    def copier(self) -> RankedCopier | None:
        """Give access to the pages of all ranks' pools and of the host tier; None without one."""
        if self.host is None:
            return None
        if self.runner.pool.device.type == "cuda":
            self.host.pin()
        send = self._channel.send if self._channel is not None else _send_nothing
        return RankedCopier(self.runner.pool, self.host, self.runner.tp, send)

    def carried_states(self) -> CarriedStates | None:
        """Give access to the recurrent states of requests as bytes of pages; None of a model that keeps none."""
        states = self.runner.states
        return None if states is None else CarriedStates(self.runner.pool, states)

    def ports(self, make_agent: MakeAgent | None = None) -> Sequence[RankPort]:
        """Make one transfer port for each rank, in order. Call and use them on the transfer service's thread.

        Raises: TransferError when the transfer library cannot start; EngineDead when a rank's port does not come.
        """
        assert self._port is not None, "these ranks take part in no hand-offs"
        settings = self._port.settings
        own = make_port(self.runner.pool, 0, self._port, host=settings.host, make_agent=make_agent)
        if self._port_channel is None:
            return [own]
        self._port_channel.accept(self.runner.tp.size - 1, timeout_s=START_TIMEOUT_S, dead=self.dead)
        others = [
            RemotePort(connection, timeout_s=settings.rank_timeout_s) for connection in self._port_channel.connections
        ]
        return [own, *sorted(others, key=lambda port: port.info.rank)]

    def dead(self) -> str | None:
        return self._handles.dead() if self._handles is not None else None

    def close(self) -> None:
        self.runner.close()
        self._hang_up()

    def _hang_up(self) -> None:
        if self.host is not None:
            self.host.close()
        for channel in (self._channel, self._port_channel):
            if channel is not None:
                channel.close()
        if self._handles is not None:
            self._handles.stop()


def _load(config: EngineConfig, tp: TpGroup) -> ModelRunner:
    """Load the model on a thread of its own: another thread than this one may run it."""
    return PassingThread(functools.partial(ModelRunner, config, tp), name="manta-load").result()


def host_tier(config: EngineConfig) -> HostKVCache | None:
    """Make the host tier's memory, for all ranks.

    Raises: InvalidConfig when it holds less than a page, or more than the machine has.
    """
    cache, parts = config.cache, config.num_kv_parts
    if not cache.host_memory_bytes:
        return None
    cell_bytes = config.model.kv_cell_bytes(tp=config.parallel.tp, kv_dtype=config.kv_dtype)
    rank_page_bytes = cache.page_size * cell_bytes
    num_pages = cache.host_memory_bytes // (parts * rank_page_bytes)
    if num_pages < 1:
        raise InvalidConfig(
            f"cache.host_memory_bytes = {cache.host_memory_bytes:,} holds less than a page of "
            f"{parts * rank_page_bytes:,} bytes: give more, or 0"
        )
    available = psutil.virtual_memory().available
    if cache.host_memory_bytes > available:
        raise InvalidConfig(
            f"cache.host_memory_bytes = {cache.host_memory_bytes:,}, but {available:,} bytes of memory are available "
            "on this machine: give less; it is the memory of each replica"
        )
    return HostKVCache.create(num_pages, rank_page_bytes=rank_page_bytes, tp=parts)


def _send_nothing(order: KvOrder | AdapterOrder) -> None:
    """Drop ``order``: there is only one rank."""


def local_worker(spec: WorkerSpec) -> None:
    """Run a follower on this machine to its end."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO)
    run_worker(spec)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
