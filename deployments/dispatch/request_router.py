"""Ray Serve's request router for model replicas: the exact replica that our router chose, or an error at once.

The choice travels as the call's session id, "pin:<replica>". Overriding `_choose_replica_for_request` leaves Serve its
accounting, draining and failure signals, and avoids the four ways in which `choose_replicas` can hang (notes/ray.md).

Owns:   the index from a replica's id to Serve's wrapper of it; publishes every change to ray_leases.py.
Thread: Serve's router thread. Serve pickles this module by value: share state through ray_leases.py only.
"""

import asyncio
import random
from typing import Any

from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.request_router import RequestRouter

from deployments.dispatch import ray_leases

FULL_WAIT_S = 0.01  # the replica is at max_ongoing_requests: ask it again after so long


class ExactReplicaRouter(RequestRouter):  # type: ignore[misc]  # Ray's classes are untyped
    """Serves ``handle.options(session_id="pin:<replica>")``; calls without a pin go anywhere."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._by_unique_id: dict[str, Any] = {}

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        self._by_unique_id = {replica_id.unique_id: self._replicas[replica_id] for replica_id in self._replica_id_set}
        self._publish()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._by_unique_id.pop(replica_id.unique_id, None)
        self._publish()

    async def _choose_replica_for_request(self, pending_request: Any, *, is_retry: bool = False) -> Any:
        while not self._replicas:
            self._replicas_updated_event.clear()
            await self._replicas_updated_event.wait()
        if is_retry:
            await asyncio.sleep(FULL_WAIT_S)
        return self._pick(pending_request)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        return [[self._pick(pending_request)]]

    def _pick(self, pending_request: Any) -> Any:
        session: str = pending_request.metadata.session_id
        if not session.startswith(ray_leases.PIN):
            return random.choice(self._replicas_list)
        replica = self._by_unique_id.get(session.removeprefix(ray_leases.PIN))
        if replica is None:
            raise ReplicaUnavailableError(session.removeprefix(ray_leases.PIN))
        return replica

    def _publish(self) -> None:
        deployment = ray_leases.key(self._deployment_id.app_name, self._deployment_id.name)
        ray_leases.publish(deployment, frozenset(self._by_unique_id))
