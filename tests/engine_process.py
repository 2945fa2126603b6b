"""An engine with its transfer service in a process of its own: two of them are what NIXL needs to be tried.

Owns:    the process and the pipe to it; a folder with a socket for each process and rank, at which a thread answers
         with the stacks of all threads.
Never:   steps the engine: an `EngineLoop` does, as in a replica. Gives up without a reason: a caller that waits too
         long gets what every process of this kind does.
Thread:  here the caller's; there the main thread reads the pipe, engine and transfer threads work.

Every process is a fork of one server that has imported PyTorch and the kernels, which take 2 to 4 s of CPU. The server
runs nothing, so that no thread of OpenMP's, NIXL's or an engine's is lost in a fork.
"""

import asyncio
import faulthandler
import functools
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

from kvtransfer.types import PeerAddress, TransferSettings, Verify
from replicas.config import AdapterLimits, CacheConfig, ParallelConfig, SchedulerConfig
from replicas.engine.engine import Engine
from replicas.engine.loop import EngineLoop
from replicas.engine.ranks import LocalWorkers, local_worker
from replicas.launch import EngineSettings, load_engine
from replicas.ranks.worker import WorkerSpec
from replicas.types import EngineStats, GenerateRequest, PoolStats, TokenDelta

START_S = 180.0  # mostly imports: 6 s on two idle cores, 26 s with six busy processes beside
ANSWER_S = 60.0
TRANSFER_S = 30.0  # the service's deadlines: pages that are missing show as a fall-back with its reason before that
STATE_S = 5.0  # for the state of an engine that did not answer, and for the stacks of each process
IMPORTED = ["replicas.launch", "replicas.engine.loop", "replicas.engine.ranks"]
TOKEN = b"secret of the cluster"
Probe = Callable[[], object]  # called there before the engine is made


def prepared() -> ForkServerContext:
    """Return the context to start such processes from. They have the environment of this process's first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def tell_stacks(folder: str) -> None:
    """Answer at a socket in ``folder`` from now on. The thread that answers holds the GIL, so that no stack changes."""
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(Path(folder, f"{os.getpid()}.socket")))
    door.listen()

    def answer() -> None:
        while True:
            asking, _ = door.accept()
            with asking:
                faulthandler.dump_traceback(asking.fileno())

    threading.Thread(target=answer, name="stacks", daemon=True).start()


def stacks(folder: str) -> str:
    """Return what every process of ``folder`` does: a stack for each of its threads, or why there is none."""
    told = []
    for door in sorted(Path(folder).glob("*.socket")):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(STATE_S)
            try:
                asking.connect(str(door))
                said = b"".join(iter(lambda asking=asking: asking.recv(1 << 16), b""))  # type: ignore[misc]
            except OSError as error:  # it has ended, is stopped, or native code keeps the GIL
                said = f"no answer: {error!r}".encode()
        told.append(f"process {door.stem}: {said.decode(errors='replace')}")
    return "\n".join(told)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """What the engine of a process is like."""

    model: str
    page: int
    chunk: int
    transport: str  # "cma" or "tcp"
    host: str = "127.0.0.1"
    tp: int = 1
    verify: Verify = Verify.ALL
    context_len: int = 256
    pool_tokens: int = 2048
    probe: Probe | None = None  # a function that can be pickled
    heartbeat_misses: int = 3


@dataclass(frozen=True, slots=True)
class _Abort:
    rid: str


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to what was asked; all else that comes are deltas."""

    value: object


_open: "list[EngineProcess]" = []  # all of this process


class EngineProcess:
    """An engine at the other end of a pipe; its ranks compute with one thread each."""

    def __init__(self, settings: ProcessSettings) -> None:
        context = prepared()
        self._pipe, theirs = context.Pipe()
        self._dumps = tempfile.TemporaryDirectory(prefix="manta-dumps-")
        self._process = context.Process(
            target=_main, args=(theirs, settings, self._dumps.name), daemon=settings.tp == 1
        )
        self._process.start()
        theirs.close()
        self._told: dict[str, list[TokenDelta]] = {}  # by request, and not yet taken
        _open.append(self)
        self.address: PeerAddress = self._receive(START_S)

    def submit(self, request: GenerateRequest) -> None:
        self._pipe.send(request)

    def abort(self, rid: str) -> None:
        self._pipe.send(_Abort(rid))

    def finish(self, rid: str) -> list[TokenDelta]:
        """Return the deltas of a request, to its end (one choice)."""
        while True:
            mine = self._told.get(rid)
            if mine and mine[-1].finish is not None:
                return self._told.pop(rid)
            self._take(self._receive())

    def stats(self) -> EngineStats:
        """Return the counts of this moment; its scheduler and pools have been checked."""
        stats = self._ask("stats")
        assert isinstance(stats, EngineStats)
        return stats

    def pool(self) -> PoolStats:
        return self.stats().pool

    def signal(self, number: signal.Signals) -> None:
        """Send SIGSTOP, SIGCONT or SIGKILL."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number is signal.SIGKILL:
            self._process.join(30)

    def close(self) -> None:
        """End it; one that was killed is left alone."""
        _open.remove(self)
        if self._process.exitcode == -signal.SIGKILL:
            return
        self.signal(signal.SIGCONT)
        self._pipe.send(None)
        self._process.join(30)
        assert self._process.exitcode == 0, f"the engine's process ended with {self._process.exitcode}"

    def _ask(self, what: str) -> Any:
        self._pipe.send(what)
        while not isinstance(message := self._receive(), _Answer):
            self._take(message)
        return message.value

    def _take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self._told.setdefault(delta.rid, []).append(delta)

    def _receive(self, timeout_s: float | None = None) -> Any:
        """Take the next message. Raises: AssertionError with what all processes do, when none comes."""
        limit_s = ANSWER_S if timeout_s is None else timeout_s
        if not self._pipe.poll(limit_s):
            load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
            states = "\n".join(f"{' (this one)' if each is self else ''}{each._state()}" for each in _open)
            raise AssertionError(f"the engine's process does not answer within {limit_s:g} s (load {load})\n{states}")
        return self._pipe.recv()

    def _state(self) -> str:
        """Return the threads of an engine that may hang, and what it last said of itself."""
        dump = stacks(self._dumps.name)
        try:
            self._pipe.send("state")
            while self._pipe.poll(STATE_S):
                if isinstance(message := self._pipe.recv(), _Answer):
                    return f"{dump}\n{message.value}"
                if isinstance(message, list):
                    self._take(message)
        except (OSError, EOFError) as error:
            return f"{dump}\nits pipe is closed: {error!r}"
        return f"{dump}\nit does not say how it is within {STATE_S:g} s"


def _main(pipe: Connection, settings: ProcessSettings, dumps: str) -> None:
    tell_stacks(dumps)
    torch.set_num_threads(1)
    if settings.probe is not None:
        settings.probe()
    engine = load_engine(
        EngineSettings(
            model=settings.model,
            cache=CacheConfig(page_size=settings.page, max_total_tokens=settings.pool_tokens),
            scheduler=SchedulerConfig(chunked_prefill_size=settings.chunk, max_running_requests=4),
            parallel=ParallelConfig(tp=settings.tp),
            adapters=AdapterLimits(),
            num_threads=1,
            context_len=settings.context_len,
            workers=LocalWorkers(functools.partial(_follow, dumps)),
            transfer=TransferSettings(
                host=settings.host,
                token=TOKEN,
                verify=settings.verify,
                transport="tcp" if settings.transport == "tcp" else "auto",
                open_timeout_s=TRANSFER_S,
                room_timeout_s=TRANSFER_S,
                heartbeat_misses=settings.heartbeat_misses,
            ),
        )
    )
    loop = EngineLoop(engine)
    loop.start()
    lock = threading.Lock()

    def send(message: object) -> None:
        with lock:
            pipe.send(message)

    send(engine.transfer_address)
    while (message := pipe.recv()) is not None:
        if isinstance(message, GenerateRequest):
            loop.submit(message, send)
        elif isinstance(message, _Abort):
            loop.abort(message.rid)
        elif message == "state":
            send(_Answer(loop.stats()))  # whatever the engine's thread does
        else:
            send(_Answer(asyncio.run(loop.run_on_engine(_checked))))
    loop.stop()


def _follow(dumps: str, spec: WorkerSpec) -> None:
    tell_stacks(dumps)
    local_worker(spec)


def _checked(engine: Engine) -> EngineStats:
    engine.scheduler.check()
    return engine.stats()
