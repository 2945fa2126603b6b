"""A follower that dies while the ranks start: seen at once, with its own error, in whatever rank 0 waits."""

import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from deployments.replica.model_replica import RayWorkers
from replicas.config import EngineConfig
from replicas.engine import ranks as engine_ranks
from replicas.engine.ranks import Ranks
from replicas.errors import EngineDead, InvalidConfig
from replicas.launch import _timed_decode
from replicas.layers.tp_group import TpGroup

BLOCKED_S = 6.0


class OneFollower:
    """A launcher whose follower meets rank 0 and is gone after ``gone_s``: this process' thread, so nothing breaks the
    collectives of rank 0, as with NCCL."""

    host = "127.0.0.1"

    def __init__(self, gone_s: float) -> None:
        self._gone_s = gone_s
        self._met_s: float | None = None

    def start(self, specs: Any) -> "OneFollower":
        threading.Thread(target=self._meet, args=(specs[0],), daemon=True).start()
        return self

    def _meet(self, spec: Any) -> None:
        self._plans = Client(spec.plan_address, authkey=spec.authkey)
        self._group = TpGroup.create(1, 2, init_method=spec.init_method, device="cpu")
        self._met_s = time.monotonic()

    def dead(self) -> str | None:
        gone = self._met_s is not None and time.monotonic() > self._met_s + self._gone_s
        return "rank 1 exited (ValueError: no such file)" if gone else None

    def stop(self) -> None:
        """Nothing to stop."""


def start(monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any], gone_s: float = 0.3) -> Ranks:
    monkeypatch.setattr(engine_ranks, "ModelRunner", load)
    config = SimpleNamespace(
        parallel=SimpleNamespace(tp=2), device="cpu", num_kv_parts=2, adapters=None,
        cache=SimpleNamespace(host_memory_bytes=0),
    )
    return Ranks(cast(EngineConfig, config), OneFollower(gone_s))


def test_a_follower_that_dies_while_rank_0_is_blocked_in_its_load_is_seen_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started_s = time.monotonic()
    with pytest.raises(EngineDead, match=r"rank 1 exited \(ValueError: no such file\) while the ranks loaded"):
        start(monkeypatch, lambda *given: time.sleep(BLOCKED_S))
    assert time.monotonic() - started_s < BLOCKED_S - 2


def test_and_while_decode_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = SimpleNamespace(close=lambda: None, max_running=4, launch=lambda plan: time.sleep(BLOCKED_S))
    ranks = start(monkeypatch, lambda *given: blocked)
    started_s = time.monotonic()
    with pytest.raises(EngineDead, match=r"ValueError: no such file\) while decode steps were timed"):
        _timed_decode(ranks, time.monotonic)
    assert time.monotonic() - started_s < BLOCKED_S - 2


def test_what_both_ranks_find_wrong_is_told_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: object) -> None:
        time.sleep(0.4)
        raise InvalidConfig("the KV pool does not fit")

    with pytest.raises(InvalidConfig, match="the KV pool does not fit"):
        start(monkeypatch, load, gone_s=0.2)


NO_FILE = RayTaskError("__init__", "Traceback (most recent call last):\nOSError: no file", OSError("no file"))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RayTaskError("run", "Traceback", InvalidConfig("too large")), "rank 1 died (InvalidConfig: too large)"),
        (ActorDiedError(NO_FILE), "rank 1 died (OSError: no file)"),
    ],
    ids=["in its call", "in its constructor"],
)
def test_an_actors_own_error_is_told(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    """As Ray hands them over."""
    workers = RayWorkers(cast(Any, None), host="", cpus=1, gpus=0)
    workers._runs["call"] = 1

    def get(call: str) -> None:
        raise error

    monkeypatch.setattr(ray, "wait", lambda calls, **options: (calls, []))
    monkeypatch.setattr(ray, "get", get)
    assert says in str(workers.dead())
