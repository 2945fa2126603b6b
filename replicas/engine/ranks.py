"""Ranks: the ranks of one replica as one device; rank 0 is here, the others are behind channels.

Owns:      the life of the followers (ranks 1 and up), and the channels of their plans and transfer ports.
Never:     decides settings, or chooses what runs.
Invariant: every rank gets every plan, in the same order.
Thread:    the engine's, once started; the transfer ports are the transfer service's.
"""

import functools
import itertools
import logging
import multiprocessing
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, TypeVar

import psutil

from kvtransfer.ports.rank_port import RankPort
from replicas.checkpoints.adapters import load
from replicas.config import AdapterLimits, EngineConfig
from replicas.engine.adapters import ReadAdapter
from replicas.errors import AdapterNotReadable, EngineDead, InvalidConfig
from replicas.kernels.team import PassingThread
from replicas.layers.adapters import AdapterBank, AdapterOrder, DropAdapter, Pairs, PrepareAdapter, PutAdapter
from replicas.layers.tp_group import TpGroup
from replicas.memory.host import HostKVCache
from replicas.ranks.plan_channel import PlanChannel
from replicas.ranks.port import MakeAgent, PortSpec, make_port
from replicas.ranks.remote_port import RemotePort
from replicas.ranks.worker import WorkerSpec, die_with_parent, run_worker, worker_specs
from replicas.runner.kv_access import (
    CarriedStates,
    CarriedWindows,
    GiveBack,
    KvOrder,
    RankedCopier,
    RankedKvBytes,
    give_back_parts,
)
from replicas.runner.model_runner import ModelRunner
from replicas.scheduler.plan import PendingStep, StepPlan
from replicas.types import AdapterRef

T = TypeVar("T")
START_TIMEOUT_S = 300.0  # a follower that has not connected by then is not coming
MEET_S = 300.0  # for the ranks' meeting, and for every collective after it
LOOK_S = 0.1  # between two looks whether a follower is gone, while the ranks start
READ_S = 60.0  # for an adapter's files, to a rank after rank 0 has read them
LONGEST_ERROR = 500  # characters
OWN_ERROR_S = 0.5  # for the other side of a failure that two ranks notice


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
    """Followers as processes of this machine, each with a pipe by which it tells what ended it."""

    host = "127.0.0.1"

    def __init__(self, main: Callable[[WorkerSpec], None] | None = None) -> None:
        """``main``: what each runs, `local_worker` if not said; it can be pickled."""
        self._main = main or local_worker
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._heard: list[Connection] = []
        self._errors: dict[str, str] = {}  # by the name of the process

    def start(self, specs: Sequence[WorkerSpec]) -> "LocalWorkers":
        context = multiprocessing.get_context("spawn")
        for spec in specs:
            heard, tell = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_and_tell, args=(self._main, spec, tell), name=f"manta-rank{spec.rank}", daemon=True
            )
            process.start()
            tell.close()
            self._processes.append(process)
            self._heard.append(heard)
        return self

    def dead(self) -> str | None:
        for process, heard in zip(self._processes, self._heard, strict=True):
            with suppress(EOFError, OSError):  # it ended without a word, or another thread has just taken it
                if process.name not in self._errors and heard.poll():
                    self._errors[process.name] = heard.recv()
            why = self._errors.get(process.name)
            if process.exitcode is not None:
                return f"{process.name} exited with code {process.exitcode}" + (f" ({why})" if why else "")
            if why:  # its end may wait for a collective
                return f"{process.name} failed ({why})"
        return None

    def stop(self) -> None:
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()


class RankedAdapters:
    """The adapters of all ranks, each of which reads the files itself, beside its steps. Only `read` may be called on
    any thread, by one at a time."""

    def __init__(
        self, bank: Callable[[], AdapterBank], limits: AdapterLimits, channel: PlanChannel | None, tp: TpGroup
    ) -> None:
        self.limits = limits
        self._bank, self._channel, self._tp = bank, channel, tp
        self._numbers = itertools.count(1)

    def read(self, ref: AdapterRef) -> ReadAdapter:
        """Read an adapter, and prepare the shares of all ranks. Raises: InvalidAdapter, AdapterNotReadable."""
        order = PrepareAdapter(next(self._numbers), ref.identity, ref.path)
        self._send(order)
        share = self._bank().prepare(*read_adapter(self.limits, ref.path, ref.identity))
        self._hear(order.number)

        def give() -> None:
            self._send(PutAdapter(order))
            self._bank().put(ref.identity, lambda: share, self._tp)

        return ReadAdapter(ref.identity, share.packed.num_bytes * self._tp.size, give)

    def _hear(self, number: int) -> None:
        """Wait until the other ranks have read an adapter too. Raises: AdapterNotReadable."""
        try:
            wrong = [] if self._channel is None else self._channel.hear(number, timeout_s=READ_S)
        except TimeoutError as error:
            wrong = [str(error)]
        if wrong:
            raise AdapterNotReadable(
                f"adapter: a rank of this replica could not hold it, its log says why ({wrong[0]}): its folder must be "
                "at the same path on every node, and each rank have memory for it"
            )

    def _send(self, order: AdapterOrder) -> None:
        if self._channel is not None:
            self._channel.send(order)

    def drop(self, identity: str) -> None:
        """Let every rank forget an adapter that no step has any more."""
        self._send(DropAdapter(identity))
        self._bank().drop(identity)


class Ranks:
    """All ranks of one replica as one device: rank 0 here, the others behind the plan channel."""

    def __init__(self, config: EngineConfig, launcher: WorkerLauncher, port: PortSpec | None = None) -> None:
        """``port``: the ranks take part in KV transfers."""
        self._port = port
        self._channel: PlanChannel | None = None
        self._port_channel: PlanChannel | None = None
        self._handles: WorkerHandles | None = None
        self.host = host_tier(config)
        if config.parallel.tp == 1:
            self.runner = _load(config, TpGroup(device=config.device))
            return
        try:
            tp = self._gather(config, launcher)
            self.runner = self.watched(lambda: _load(config, tp), "while the ranks loaded")
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
            read_adapter=functools.partial(read_adapter, config.adapters or AdapterLimits()),
            port_address=self._port_channel.address if self._port_channel is not None else None,
            port=self._port,
            host=self.host.memory if self.host is not None else None,
        )
        self._handles = handles = launcher.start(specs)
        channel.accept(config.parallel.tp - 1, timeout_s=START_TIMEOUT_S, dead=handles.dead)
        meet = functools.partial(
            TpGroup.create, 0, config.parallel.tp, init_method=init_method, device=config.device, timeout_s=MEET_S
        )
        return self.watched(meet, "before all ranks had met")

    def watched(self, work: Callable[[], T], when: str) -> T:
        """Run a part of the start, which may wait for other ranks in a collective. On a GPU that ends no sooner than
        its time-out when one of them is gone. Args: when: it ran, in words.

        Raises: EngineDead with a follower's own error within a second of it; else what ``work`` does.
        """
        if self._handles is None:
            return work()
        thread, gone = PassingThread(work, name="manta-start"), None
        while thread.is_alive() and gone is None:
            thread.join(timeout=LOOK_S)
            gone = self._handles.dead()
        thread.join(timeout=OWN_ERROR_S)  # with the same error of this rank, which says more
        if not thread.is_alive():
            try:
                made = thread.result()
            except EngineDead as error:
                deadline_s = time.monotonic() + OWN_ERROR_S  # the follower's process has not ended yet, perhaps
                while (gone := gone or self._handles.dead()) is None and time.monotonic() < deadline_s:
                    time.sleep(LOOK_S)
                if gone is None:
                    raise
                raise EngineDead(f"{gone} {when}; its log says more") from error
            if gone is None:
                return made
        raise EngineDead(f"{gone} {when}; its log says more")

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
        return RankedAdapters(lambda: self.runner.adapters, limits, self._channel, self.runner.tp)

    def copier(self) -> RankedCopier | None:
        """Give access to the pages of all ranks' pools and of the host tier; None without one."""
        if self.host is None:
            return None
        if self.runner.pool.device.type == "cuda":
            self.host.pin()
            self.host.in_background = self.runner.tp.size == 1 and self._port is None
        send = self._channel.send if self._channel is not None else _send_nothing
        return RankedCopier(self.runner.pool, self.host, self.runner.tp, send)

    def carried_states(self) -> CarriedStates | None:
        """Give access to the recurrent states of requests as bytes of pages; None of a model that keeps none."""
        states = self.runner.states
        send = self._channel.send if self._channel is not None else _send_nothing
        return None if states is None else CarriedStates(self.runner.pool, states, self.runner.tp, send)

    def carrier(self) -> CarriedStates | CarriedWindows | None:
        """Give access to what a request needs beside K and V in the pages of the pool; None where that is nothing."""
        send = self._channel.send if self._channel is not None else _send_nothing
        if len(self.runner.pools) > 1:
            return CarriedWindows(self.runner.pools, self.runner.tp, send)
        return self.carried_states()

    def ports(self, make_agent: MakeAgent | None = None) -> Sequence[RankPort]:
        """Make one transfer port for each rank, in order. Call and use them on the transfer service's thread.

        Raises: TransferError when the transfer library cannot start; EngineDead when a rank's port does not come.
        """
        assert self._port is not None, "these ranks take part in no KV transfers"
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


def read_adapter(limits: AdapterLimits, path: str, identity: str) -> tuple[int, Pairs]:
    """Read an adapter's rank and weights. Raises: InvalidAdapter, AdapterNotReadable."""
    weights = load(Path(path), identity, limits)
    return weights.info.rank, weights.pairs


def _send_nothing(order: KvOrder) -> None:
    """Drop ``order``: there is only one rank."""


def _run_and_tell(main: Callable[[WorkerSpec], None], spec: WorkerSpec, tell: Connection) -> None:
    """Run a follower, and tell what ended it: before its process ends, which may wait for a collective."""
    try:
        main(spec)
    except Exception as error:
        tell.send(error_line(error))
        raise


def error_line(error: BaseException) -> str:
    """Write an error in one line: its type, and what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST_ERROR]}"


def local_worker(spec: WorkerSpec) -> None:
    """Run a follower on this machine to its end."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO)
    run_worker(spec)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
