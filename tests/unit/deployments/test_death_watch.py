"""What a replica does about a transfer peer whose machine Ray says is dead (deployments/fleet/node_tasks.py)."""

from collections.abc import Collection
from typing import Any

import pytest
import ray

from deployments.fleet import node_tasks
from deployments.fleet.node_tasks import DeathWatch, dead_machines
from kvtransfer.types import PeerAddress
from tests.fake_transfer_service import FakeTransferService, FakeWire
from tests.fakes import FakeDevice
from tests.waiting import until

HERE, AWAY = (PeerAddress(host=host, port=1, incarnation=host) for host in ("10.0.0.1", "10.0.0.2"))


class Service(FakeTransferService):
    def __init__(self, *away: PeerAddress) -> None:
        super().__init__(FakeWire(), FakeDevice(num_slots=1, num_rows=1, row_len=1), 1, name="service")
        self.away, self.dead = away, list[str]()

    def out_of_reach(self) -> tuple[PeerAddress, ...]:
        return self.away

    def peer_is_dead(self, incarnation: str) -> None:
        self.dead.append(incarnation)


def test_a_peer_out_of_reach_is_declared_dead_with_its_machine_and_no_other_peer() -> None:
    service = Service(HERE, AWAY)
    DeathWatch(service, dead=lambda: {"10.0.0.2", "10.0.0.3"}).look()
    assert service.dead == ["10.0.0.2"]


def test_ray_is_not_asked_while_every_peer_is_in_reach() -> None:
    def asked() -> Collection[str]:
        raise AssertionError

    DeathWatch(Service(), dead=asked).look()


def test_a_machine_with_a_node_that_is_alive_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has come back as another node."""
    rows: list[dict[str, Any]] = [
        {"NodeManagerAddress": "10.0.0.1", "Alive": False},
        {"NodeManagerAddress": "10.0.0.1", "Alive": True},
        {"NodeManagerAddress": "10.0.0.2", "Alive": False},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: rows)
    assert dead_machines() == {"10.0.0.2"}


def test_ray_is_asked_again_after_it_has_failed_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    service, asked = Service(AWAY), list[int]()

    def dead() -> Collection[str]:
        asked.append(1)
        if len(asked) == 1:
            raise ConnectionError("the GCS is starting")
        return {"10.0.0.2"}

    monkeypatch.setattr(node_tasks, "ASK_S", 0.01)
    watch = DeathWatch(service, dead=dead)
    watch.start()
    until(lambda: service.dead[:1] == ["10.0.0.2"])
    watch.stop()
