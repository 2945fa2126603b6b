"""A replica or a router that cannot start says so early and leaves nothing behind."""

import asyncio
import functools
import socket
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from deployments import logs
from deployments.replica import model_replica
from deployments.replica.model_replica import ModelReplica
from deployments.router import RouterIngress
from replicas import launch
from replicas.engine.engine import Engine
from replicas.errors import InvalidConfig
from tests.embedded import MODEL
from tests.harness import fake_engine
from tests.scraped import Scraped


class Started(ModelReplica):
    """Nobody awaits what ends it: Serve does."""

    def __del__(self) -> None: ...  # type: ignore[override]


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r0"), get_node_id=lambda: "n0")
    monkeypatch.setattr(model_replica.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(model_replica.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(model_replica.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(logs, "into_serve", lambda: None)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that replicas load: over a fake device."""
    engines: list[Engine] = []

    def load(*args: object, **kwargs: object) -> Engine:
        engines.append(fake_engine()[0])
        return engines[-1]

    monkeypatch.setattr(launch, "load_engine", load)
    return engines


def settings(port: int) -> dict[str, Any]:
    return {"model": {"path": MODEL}, "observability": {"metrics_port": port}}


def test_a_metrics_port_that_is_taken_is_said_before_the_weights_are_loaded(taken: int, loaded: list[Engine]) -> None:
    with pytest.raises(InvalidConfig, match=f"metrics_port = {taken}"):
        Started(settings(taken))
    assert loaded == []


def test_a_replica_whose_metrics_cannot_be_made_stops_its_engine_and_gives_its_port_back(
    loaded: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = []

    class Loop(model_replica.EngineLoop):
        def stop(self) -> None:
            stopped.append(self)
            super().stop()

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no metrics")

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(model_replica, "EngineLoop", Loop)
    monkeypatch.setattr(model_replica, "replica_emitter", broken)
    with pytest.raises(RuntimeError, match="no metrics"):
        Started(settings(port))
    assert len(loaded) == len(stopped) == 1
    socket.create_server(("127.0.0.1", port)).close()


async def test_one_that_starts_serves_its_metrics_and_gives_all_back_at_its_end(loaded: list[Engine]) -> None:
    started = Started(settings(0))
    assert started._metrics is not None
    address = started._metrics.target.address
    seen = await asyncio.to_thread(lambda: Scraped(urllib.request.urlopen(f"http://{address}/metrics").read().decode()))
    assert seen.value("replica_info", replica="r0", node="n0") == 1
    await ModelReplica.__del__(started)
    assert not started.loop._thread.is_alive()
    socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))).close()


async def test_a_router_that_did_not_come_far_ends_without_another_error() -> None:
    ours = next(kind for kind in RouterIngress.__mro__ if "observe" in vars(kind))
    ended: list[str] = []
    router = SimpleNamespace()
    with pytest.raises(InvalidConfig):
        await ours.__init__(router, {"nonsense": 1})
    await ours.__del__(router)

    async def stop(name: str) -> None:
        ended.append(name)

    for part in ("fleet", "channel"):
        setattr(router, f"_{part}", SimpleNamespace(stop=functools.partial(stop, part)))
    await ours.__del__(router)  # as when its metrics' port is taken
    assert ended == ["fleet", "channel"]
