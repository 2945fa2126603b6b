"""What the dispatcher asks of the replicas, as a protocol: Ray answers it in production, a list of engines in tests.

A lease is one call per request that lasts as long as the request does; its tokens travel beside it, on the channel.
"""

from dataclasses import dataclass
from typing import Protocol

from deployments.channel.channel_server import ChannelAddress
from deployments.channel.frames import ReplicaReport
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
