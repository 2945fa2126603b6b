"""An engine with its transfer desk in a spawned process: what NIXL needs to be tried between two of them."""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection

import torch

from kvtransfer.types import PeerAddress, TransferSettings
from replicas.config import CacheConfig, ParallelConfig, SchedulerConfig
from replicas.launch import load_engine
from replicas.loop import EngineLoop
from replicas.types import GenerateRequest, PoolStats, TokenDelta

ANSWER_S = 60.0
TOKEN = b"secret of the cluster"


class EngineProcess:
    """One at the other end of a pipe."""

    def __init__(self, model: str, *, page: int, chunk: int, transport: str, tp: int = 1) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_main, args=(theirs, model, page, chunk, transport, tp), daemon=tp == 1
        )
        self._process.start()
        theirs.close()
        self.address: PeerAddress = self._receive()

    def submit(self, request: GenerateRequest) -> None:
        self._pipe.send(request)

    def finish(self, rid: str) -> list[TokenDelta]:
        """The deltas of the only open request, to its end (one choice)."""
        deltas: list[TokenDelta] = []
        while not deltas or deltas[-1].finish is None:
            deltas += self._receive()
        assert {delta.rid for delta in deltas} == {rid}
        return deltas

    def pool(self) -> PoolStats:
        self._pipe.send("pool")
        stats = self._receive()
        assert isinstance(stats, PoolStats)
        return stats

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
        self._pipe.send(None)
        self._process.join(30)
        assert self._process.exitcode == 0, f"the engine's process ended with {self._process.exitcode}"

    def _receive(self):  # type: ignore[no-untyped-def]
        assert self._pipe.poll(ANSWER_S), "the engine's process does not answer"
        return self._pipe.recv()


def _main(pipe: Connection, model: str, page: int, chunk: int, transport: str, tp: int) -> None:
    torch.set_num_threads(1)
    engine = load_engine(
        model,
        cache=CacheConfig(page_size=page, max_total_tokens=2048),
        scheduler=SchedulerConfig(chunked_prefill_size=chunk, max_running_requests=4),
        parallel=ParallelConfig(tp=tp),
        num_threads=1,
        context_len=256,
        transfer=TransferSettings(host="127.0.0.1", token=TOKEN, transport="tcp" if transport == "tcp" else "auto"),
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
        else:
            engine.scheduler.check()
            send(engine.stats().pool)
    loop.stop()
