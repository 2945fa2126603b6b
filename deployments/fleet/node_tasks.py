"""The nodes of the Ray cluster: calls of plain functions on a given one, and the news that a machine is dead.

Never:     takes silence for death: a machine is dead when Ray says so, and no node is alive at its address.
Thread:    `in_task`: an event loop. `DeathWatch` has a thread of its own, since Ray's answer about nodes blocks.
"""

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvtransfer.rooms.transfer_service import TransferService

log = logging.getLogger(__name__)
T = TypeVar("T")
ANSWER_S = 20.0  # of a task on another node, whose worker may have to start first
ASK_S = 1.0  # between two questions about machines, while a peer is out of reach


@functools.cache
def remote(function: Callable[..., Any]) -> Any:
    """Return Ray's remote function, one for each function: Ray stores every new one in the cluster, and keeps it."""
    return ray.remote(function)


async def in_task(node_id: str, function: Callable[..., T], *args: Any, within_s: float = ANSWER_S) -> T:
    """Call ``function`` in a task of a node. Raises: TimeoutError, RayError."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    async with asyncio.timeout(within_s):
        found: T = await task.remote(*args)
        return found


def dead_machines() -> Collection[str]:
    """Return the addresses at which Ray has had nodes, and has none alive."""
    nodes = ray.nodes()
    return {node["NodeManagerAddress"] for node in nodes} - {
        node["NodeManagerAddress"] for node in nodes if node["Alive"]
    }


class DeathWatch:
    """Tells a transfer service which of its peers are dead with their machines.

    A replica asks for itself: a router may be on the dead machine too, and the next one has never known the peer.
    """

    def __init__(self, service: TransferService, *, dead: Callable[[], Collection[str]] = dead_machines) -> None:
        self._service = service
        self._dead = dead
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="manta-death-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Do not wait for an answer of Ray that is still to come."""
        self._stopping.set()

    def look(self) -> None:
        """Ask Ray about the peers that are out of reach, if there are any."""
        away = self._service.out_of_reach()
        dead = self._dead() if away else ()
        for peer in away:
            if peer.host in dead:
                log.warning("the machine of transfer peer %s:%d is dead, says Ray", peer.host, peer.port)
                self._service.peer_is_dead(peer.incarnation)

    def _watch(self) -> None:
        while not self._stopping.wait(ASK_S):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - the edge: whatever Ray raises, it is asked again
                log.warning("Ray does not say which nodes are dead: %r", error)
