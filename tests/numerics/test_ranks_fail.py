"""Ranks that die: noticed in seconds, every open request answered, no process left. Real processes, tiny weights."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from replicas.config import CacheConfig, ParallelConfig
from replicas.engine.loop import EngineLoop
from replicas.engine.ranks import LocalWorkers
from replicas.errors import EngineDead
from replicas.launch import EngineSettings, load_engine
from replicas.runner.worker import WorkerSpec
from replicas.types import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from tests.embedded import MODEL
from tests.numerics.tiny import save

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    save("llama", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL, name), folder)
    return str(folder)


class WatchedWorkers(LocalWorkers):
    """Local ranks, and something done to them as soon as they are started."""

    def __init__(self, then: Callable[["WatchedWorkers"], None] = lambda workers: None) -> None:
        super().__init__()
        self._then = then

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def start(self, specs: Sequence[WorkerSpec]) -> "WatchedWorkers":
        super().start(specs)
        self._then(self)
        return self


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def test_a_rank_killed_under_load_ends_every_request_with_an_answer(folder: str) -> None:
    workers = WatchedWorkers()
    engine = load_engine(
        EngineSettings(
            model=folder,
            cache=CacheConfig(max_total_tokens=2048),
            parallel=ParallelConfig(tp=2),
            attention="torch_native",
            num_threads=1,
            workers=workers,
        )
    )
    loop = EngineLoop(engine)
    loop.start()
    got: list[TokenDelta] = []
    for i in range(3):
        sampling = SamplingParams(max_new_tokens=200, temperature=0.0)
        loop.submit(
            GenerateRequest(rid=str(i), token_ids=np.arange(5, dtype=np.int32), sampling=sampling), got.extend
        )
    deadline_s = time.monotonic() + 30
    while len(got) < 6:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    (pid,) = workers.pids
    os.kill(pid, signal.SIGKILL)
    while sum(delta.finish is not None for delta in got) < 3:
        assert time.monotonic() < deadline_s, "somebody got no answer"
        time.sleep(0.01)
    ends = [delta.finish for delta in got if delta.finish is not None]
    assert {end.reason for end in ends} == {FinishReason.ERROR}
    assert {end.retry_as for end in ends} == {"engine_dead"}
    assert loop.error is not None
    loop.stop()
    assert gone(pid)


def test_a_rank_that_dies_while_starting_fails_the_start_at_once(folder: str) -> None:
    workers = WatchedWorkers(lambda ranks: os.kill(ranks.pids[0], signal.SIGKILL))
    started_s = time.monotonic()
    with pytest.raises(EngineDead, match="rank1 exited with code -9"):
        load_engine(
            EngineSettings(
                model=folder, parallel=ParallelConfig(tp=2), attention="torch_native", num_threads=1, workers=workers
            )
        )
    assert time.monotonic() - started_s < 30
    assert all(gone(pid) for pid in workers.pids)
