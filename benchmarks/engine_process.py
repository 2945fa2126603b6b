"""An engine with its transfer desk in a spawned process: what NIXL needs to be tried, and timed, between two of them.

Owns:    the process and the pipe to it. Its times are comparable with ours: CLOCK_MONOTONIC is one for a host.
Never:   steps the engine: an `EngineLoop` does, as in a replica.
Thread:  here the caller's; there the main thread reads the pipe, engine and transfer threads work.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvtransfer.types import PeerAddress, TransferSettings, Verify
from replicas.config import CacheConfig, ParallelConfig, SchedulerConfig
from replicas.engine import Engine
from replicas.launch import load_engine
from replicas.loop import EngineLoop
from replicas.types import EngineStats, GenerateRequest, PoolStats, TokenDelta

ANSWER_S = 60.0
TOKEN = b"secret of the cluster"
Probe = Callable[[], Callable[[], object]]  # called there before the engine is made; what it returns answers `probed`


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settings:
    model: str
    page: int
    chunk: int
    transport: str
    tp: int
    verify: Verify
    context_len: int
    pool_tokens: int
    probe: Probe | None


@dataclass(frozen=True, slots=True)
class _Abort:
    rid: str


@dataclass(frozen=True, slots=True)
class _Answer:
    """To what was asked; all else that comes are deltas."""

    value: object


class EngineProcess:
    """One at the other end of a pipe; its ranks compute with one thread each."""

    def __init__(
        self,
        model: str,
        *,
        page: int,
        chunk: int,
        transport: str,
        tp: int = 1,
        verify: Verify = Verify.ALL,
        context_len: int = 256,
        pool_tokens: int = 2048,
        probe: Probe | None = None,
    ) -> None:
        """``transport``: "cma" or "tcp"; ``probe``: a function that can be pickled."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        settings = _Settings(
            model=model,
            page=page,
            chunk=chunk,
            transport=transport,
            tp=tp,
            verify=verify,
            context_len=context_len,
            pool_tokens=pool_tokens,
            probe=probe,
        )
        self._process = context.Process(target=_main, args=(theirs, settings), daemon=tp == 1)
        self._process.start()
        theirs.close()
        self.address: PeerAddress = self._receive()
        self._told: list[tuple[float, TokenDelta]] = []  # and not yet taken

    def submit(self, request: GenerateRequest) -> None:
        self._pipe.send(request)

    def abort(self, rid: str) -> None:
        self._pipe.send(_Abort(rid))

    def finish(self, rid: str) -> list[TokenDelta]:
        """The deltas of a request, to its end (one choice)."""
        return [delta for _, delta in self.finish_timed(rid)]

    def finish_timed(self, rid: str) -> list[tuple[float, TokenDelta]]:
        """The same, each with the time at which the engine gave it away."""
        while True:
            mine = [item for item in self._told if item[1].rid == rid]
            if mine and mine[-1][1].finish is not None:
                self._told = [item for item in self._told if item[1].rid != rid]
                return mine
            self._take(self._receive())

    def stats(self) -> EngineStats:
        """Of this moment; its scheduler and pools have been checked."""
        stats = self._ask("stats")
        assert isinstance(stats, EngineStats)
        return stats

    def pool(self) -> PoolStats:
        return self.stats().pool

    def probed(self) -> Any:
        """What the probe has to say now."""
        return self._ask("probe")

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP, SIGCONT or SIGKILL."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number is signal.SIGKILL:
            self._process.join(30)

    def close(self) -> None:
        """Ends it; nothing to do for one that was killed."""
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

    def _take(self, message: tuple[float, list[TokenDelta]]) -> None:
        time_s, deltas = message
        self._told += [(time_s, delta) for delta in deltas]

    def _receive(self) -> Any:
        assert self._pipe.poll(ANSWER_S), "the engine's process does not answer"
        return self._pipe.recv()


def _main(pipe: Connection, settings: _Settings) -> None:
    torch.set_num_threads(1)
    probed = settings.probe() if settings.probe is not None else lambda: None
    engine = load_engine(
        settings.model,
        cache=CacheConfig(page_size=settings.page, max_total_tokens=settings.pool_tokens),
        scheduler=SchedulerConfig(chunked_prefill_size=settings.chunk, max_running_requests=4),
        parallel=ParallelConfig(tp=settings.tp),
        num_threads=1,
        context_len=settings.context_len,
        transfer=TransferSettings(
            host="127.0.0.1",
            token=TOKEN,
            verify=settings.verify,
            transport="tcp" if settings.transport == "tcp" else "auto",
        ),
    )
    loop = EngineLoop(engine)
    loop.start()
    lock = threading.Lock()

    def send(message: object) -> None:
        with lock:
            pipe.send(message)

    def sink(deltas: list[TokenDelta]) -> None:
        send((time.monotonic(), deltas))

    send(engine.transfer_address)
    while (message := pipe.recv()) is not None:
        if isinstance(message, GenerateRequest):
            loop.submit(message, sink)
        elif isinstance(message, _Abort):
            loop.abort(message.rid)
        elif message == "probe":
            send(_Answer(probed()))
        else:
            send(_Answer(asyncio.run(loop.run_on_engine(_checked))))
    loop.stop()


def _checked(engine: Engine) -> EngineStats:
    engine.scheduler.check()
    return engine.stats()
