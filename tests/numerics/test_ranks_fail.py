"""Ranks that die: noticed in seconds, every open request answered, no process left. And ranks that cannot hold what
the others can. Real processes, tiny weights."""

import functools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from replicas.config import AdapterLimits, CacheConfig, ParallelConfig
from replicas.engine.engine import Engine
from replicas.engine.ranks import LocalWorkers, local_worker
from replicas.errors import EngineDead, Fault
from replicas.launch import EngineSettings, load_engine
from replicas.layers.adapters import AdapterBank, Pairs, RankAdapter
from replicas.ranks.plan_channel import PlanChannel
from replicas.ranks.worker import WorkerSpec
from replicas.types import AdapterRef, Finish, FinishReason, GenerateRequest, SamplingParams
from tests.adapters import make_adapter
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


def two_ranks(folder: str, workers: LocalWorkers, adapters: AdapterLimits | None = None) -> Engine:
    """An engine of two ranks of its own."""
    return load_engine(
        EngineSettings(
            model=folder,
            cache=CacheConfig(max_total_tokens=2048),
            parallel=ParallelConfig(tp=2),
            attention="torch_native",
            num_threads=1,
            workers=workers,
            adapters=adapters,
        )
    )


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


def worker_without_its_files(spec: WorkerSpec) -> None:
    """Run a follower whose weights are gone."""
    local_worker(replace(spec, config=replace(spec.config, model=replace(spec.config.model, path="/gone"))))


def test_what_a_rank_could_not_load_is_told_by_the_start(folder: str) -> None:
    with pytest.raises(EngineDead, match=r"manta-rank1 (failed|exited with code 1) \(.*no folder /gone.*; its log"):
        two_ranks(folder, LocalWorkers(worker_without_its_files))


def worker_short_of_memory(wanted: str, spec: WorkerSpec) -> None:
    """Run a follower that has no memory for its share of one adapter."""

    def read_or_fail(path: str, identity: str) -> tuple[int, Pairs]:
        if identity == wanted:
            raise MemoryError("none is left")
        return spec.read_adapter(path, identity)

    local_worker(replace(spec, read_adapter=read_or_fail))


def worker_that_reads_late(door: Path, spec: WorkerSpec) -> None:
    """Run a follower whose files answer when ``door`` is there."""

    def read(path: str, identity: str) -> tuple[int, Pairs]:
        while not door.exists():
            time.sleep(0.01)
        return spec.read_adapter(path, identity)

    local_worker(replace(spec, read_adapter=read))


def ends(engine: Engine, asked: dict[str, AdapterRef | None]) -> dict[str, tuple[list[int], Finish]]:
    """Have one prompt answered with each of the adapters at once. Returns: the ids and the end of each."""
    for rid, ref in asked.items():
        engine.submit(asking(rid, ref))
    return ended(engine, asked)


def asking(rid: str, ref: AdapterRef | None) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    return GenerateRequest(rid=rid, token_ids=np.arange(5, dtype=np.int32), sampling=sampling, adapter=ref)


def ended(engine: Engine, asked: Collection[str]) -> dict[str, tuple[list[int], Finish]]:
    """Run the requests ``asked`` to their ends. Returns: the ids and the end of each."""
    made: dict[str, list[int]] = {rid: [] for rid in asked}
    found: dict[str, tuple[list[int], Finish]] = {}
    deadline_s = time.monotonic() + 60
    while len(found) < len(asked):
        assert time.monotonic() < deadline_s, f"no end of {set(asked) - found.keys()}"
        for delta in engine.step():
            made[delta.rid] += delta.token_ids
            if delta.finish is not None:
                found[delta.rid] = made[delta.rid], delta.finish
    return found


@pytest.mark.parametrize("short_rank", [0, 1])
def test_an_adapter_for_which_one_rank_has_no_memory_is_held_by_none_and_refused_alone(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_rank: int
) -> None:
    refs = {name: make_adapter(tmp_path / name, Path(folder), seed=i, size=2.0) for i, name in enumerate("abc")}

    start = functools.partial(two_ranks, folder, adapters=AdapterLimits())
    with closing(start(LocalWorkers())) as engine:
        expected = {rid: ids for rid, (ids, _) in ends(engine, {"model": None, **refs}).items()}
    assert len(set(map(tuple, expected.values()))) == 4
    main = functools.partial(worker_short_of_memory, refs["b"].identity) if short_rank == 1 else None
    if short_rank == 0:
        hold = AdapterBank._hold

        def hold_or_fail(bank: AdapterBank, identity: str, share: RankAdapter) -> None:
            if identity == refs["b"].identity:
                raise MemoryError("none is left")
            hold(bank, identity, share)

        monkeypatch.setattr(AdapterBank, "_hold", hold_or_fail)
    with closing(start(LocalWorkers(main))) as engine:
        for asked in ({"model": None, "a": refs["a"], "b": refs["b"]}, {"b": refs["b"]}, {"c": refs["c"]}):
            for rid, (ids, finish) in ends(engine, asked).items():
                if rid == "b":
                    assert (ids, finish.reason, finish.fault) == ([], FinishReason.ERROR, Fault.UNAVAILABLE)
                    assert "a rank of this replica could not hold it" in str(finish.message)
                else:
                    assert (ids, finish.reason) == (expected[rid], FinishReason.LENGTH)
        stats = engine.stats().adapters
        assert stats is not None
        assert set(stats.held) == {refs["a"].identity, refs["c"].identity}


def test_steps_go_on_while_a_rank_reads_an_adapter_and_no_weight_goes_through_their_channel(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has read it long before; the engine's thread waits for the slow rank at no time."""
    ref = make_adapter(tmp_path / "a", Path(folder), seed=0, size=2.0)
    is_read, sent = threading.Event(), list[int]()
    hear, send_bytes = PlanChannel.hear, Connection.send_bytes
    monkeypatch.setattr(PlanChannel, "hear", lambda *args, **options: (is_read.set(), hear(*args, **options))[1])
    monkeypatch.setattr(Connection, "send_bytes", lambda to, data: (sent.append(len(data)), send_bytes(to, data))[1])
    door = tmp_path / "door"
    main = functools.partial(worker_that_reads_late, door)
    with closing(two_ranks(folder, LocalWorkers(main), adapters=AdapterLimits())) as engine:
        engine.submit(asking("a", ref))
        engine.step()
        assert is_read.wait(60)
        [(plain, _)] = ends(engine, {"model": None}).values()
        door.touch()
        [(adapted, finish)] = ended(engine, ["a"]).values()
        assert finish.reason == FinishReason.LENGTH
        again = ends(engine, {"model": None, "a": ref})
    assert (again["model"][0], again["a"][0]) == (plain, adapted)
    assert plain != adapted
    assert max(sent) < Path(ref.path, "adapter_model.safetensors").stat().st_size


def test_a_follower_that_stands_still_costs_waiting_alone(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, sent, send = WatchedWorkers(), threading.Event(), PlanChannel.send
    found = dict[str, tuple[list[int], Finish]]()
    with closing(two_ranks(folder, workers)) as engine:
        wanted = ends(engine, {"before": None})["before"][0]
        monkeypatch.setattr(PlanChannel, "send", lambda *given: (send(*given), sent.set())[0])
        os.kill(workers.pids[0], signal.SIGSTOP)
        waits = threading.Thread(target=lambda: found.update(ends(engine, {"meanwhile": None})))
        waits.start()
        try:
            assert sent.wait(60)
            waits.join(1.5)  # longer than a step, by far, and than any check of the ranks
            assert (waits.is_alive(), workers.dead(), found) == (True, None, {})
        finally:
            os.kill(workers.pids[0], signal.SIGCONT)
            waits.join(60)
    assert (found["meanwhile"][0], found["meanwhile"][1].reason) == (wanted, FinishReason.LENGTH)
