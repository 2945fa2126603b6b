"""The calls that a router makes to replicas, and the leases among them. Ray carries the calls; in tests, a list does.

A lease is one call per request and replica that lasts as long as the request does there. The tokens travel beside it,
on the channel.

Owns:      the tasks of leases that are about to return.
Never:     retries (dispatcher.py); looks at tokens (attempt.py).
Invariant: whatever ends a lease early ends its stream, with the reason.
Thread:    the router's event loop.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from deployments.channel.channel_server import ChannelAddress, Stream
from deployments.channel.frames import ReplicaReport
from deployments.dispatch.progress import Part
from kvtransfer.types import PeerAddress
from replicas.cache.tree_view import CacheTree
from replicas.errors import MantaError
from replicas.types import GenerateRequest
from routing.types import Role


class ReplicaGone(MantaError):
    """The replica that had the request is dead, unreachable or not there any more; another one can go on."""

    http_status = 503
    retryable = True


class ReplicaHangs(ReplicaGone):
    """The replica is silent, or its step does not end, while another one could go on; it may come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """What does not change about a replica; answered when a router attaches."""

    replica_id: str
    node_id: str
    pid: int
    model_path: str
    architecture: str
    dtype: str
    context_len: int
    vocab_size: int
    max_prompt_tokens: int  # context length or pool, whichever is shorter
    tp: int
    page_size: int
    attention: str  # the backend that runs
    products: str  # ours, or BLAS for which weights and rows
    num_threads: int
    pool: str  # "N tokens, M pages, X MiB"
    attention_why: str = ""  # this backend, and not a faster one
    role: Role = Role.UNIFIED
    page_bytes: int = 0  # of K and V, all ranks
    transfer: PeerAddress | None = None  # where its transfer service listens; None where it takes part in no hand-off
    metrics: str | None = None  # host:port that serves its metrics; None where they are off


class Leases(Protocol):
    """Calls to exactly one replica. Every method raises ReplicaGone when it is not there."""

    async def attach(self, replica_id: str, address: ChannelAddress) -> ReplicaInfo:
        """Have the replica connect to the router's channel and report there."""
        ...

    async def generate(self, replica_id: str, router_id: str, request: GenerateRequest) -> MantaError | None:
        """Returns when the request has ended; an error if the replica refused it. Cancelling aborts the request."""
        ...

    async def send_snapshot(self, replica_id: str, router_id: str) -> None:
        """Have the replica send what its prefix cache holds over the channel to that router."""
        ...

    async def report(self, replica_id: str) -> ReplicaReport:
        """Its statistics as of now."""
        ...

    async def cache_tree(self, replica_id: str, *, max_depth: int, min_tokens: int) -> CacheTree:
        """The largest subtrees of its prefix cache, for people; no token ids."""
        ...

    async def flush_cache(self, replica_id: str, timeout_s: float) -> bool:
        """Forget every cached prefix; False while requests run, after waiting ``timeout_s`` for them."""
        ...

    async def abort(self, replica_id: str, client_rid: str | None, owner: str | None) -> int:
        """Abort the requests of that name, or all, if they are ``owner``'s (None: whosever); how many there were."""
        ...


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
