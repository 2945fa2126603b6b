"""Holds the leases of requests: one call per request and replica, that lasts as long as the request does there.

Owns:      the tasks of calls that are about to return.
Never:     retries (dispatch.py); looks at tokens (attempt.py).
Invariant: whatever ends a lease early ends its stream, with the reason.
Thread:    the router's event loop.
"""

import asyncio
import logging

from deployments.channel.channel_server import Stream
from deployments.dispatch.leases import Leases, ReplicaGone
from deployments.dispatch.progress import Part
from replicas.errors import MantaError

log = logging.getLogger(__name__)

FRAMES_LATE_S = 5.0  # a lease has returned, its last deltas have not come: the channel is broken


class LeaseHolder:
    """The leases of one router."""

    def __init__(self, leases: Leases, router_id: str) -> None:
        self._leases = leases
        self._router_id = router_id
        self._ending: set[asyncio.Task[None]] = set()  # leases whose request has ended, about to return

    def hold(self, replica_id: str, part: Part, stream: Stream) -> "asyncio.Task[None]":
        """The lease of ``part``; cancelling it aborts the request there."""
        return asyncio.create_task(self._lease(replica_id, part, stream))

    def let_end(self, lease: "asyncio.Task[None]") -> None:
        """The request has ended and its lease is about to return: hold the task until it does."""
        self._ending.add(lease)
        lease.add_done_callback(self._ending.discard)

    async def _lease(self, replica_id: str, part: Part, stream: Stream) -> None:
        try:
            error = await self._leases.generate(replica_id, self._router_id, part.request)
        except MantaError as raised:
            error = raised
        except Exception as raised:  # the edge: the request must be answered
            log.exception("the call to replica %s failed", replica_id)
            error = MantaError(f"the call to replica {replica_id} failed: {type(raised).__name__}: {raised}")
        if error is not None:
            stream.fail(error)
            return
        late = ReplicaGone(f"replica {replica_id} ended the request, but its last tokens have not arrived")
        asyncio.get_running_loop().call_later(FRAMES_LATE_S, stream.fail, late)
