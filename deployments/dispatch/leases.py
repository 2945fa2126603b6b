"""The calls that a router makes to replicas, and the leases among them. Ray carries the calls; in tests, a list does.

A lease is one call per request and replica that lasts as long as the request does there. The request and its tokens
travel beside it, on the channel: the replica begins at once, the call comes a millisecond or two later and only holds.

Owns:      the tasks of leases that are about to return.
Never:     retries (dispatcher.py); looks at tokens (attempt.py).
Invariant: whatever ends a lease early ends its stream, with the reason, and the request at its replica.
Thread:    the router's event loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from deployments.channel.channel_server import ChannelAddress, ChannelServer, Stream
from deployments.channel.frames import EndRequest, PushCache, ReplicaReport, RunRequest
from deployments.dispatch.progress import Part
from kvtransfer.migration.migrator import MigrationStats
from kvtransfer.migration.wire import MigrationAddress
from kvtransfer.types import PeerAddress
from replicas.cache.tree_view import CacheTree
from replicas.errors import Fault, MantaError
from routing.types import Role

log = logging.getLogger(__name__)

FRAMES_LATE_S = 5.0  # a lease has returned, its last deltas have not come: the channel is broken
P = ParamSpec("P")
T = TypeVar("T")


class ReplicaGone(MantaError):
    """The replica of the request is dead, unreachable or no longer running; another one can go on."""

    fault = Fault.UNAVAILABLE
    retryable = True


class ReplicaHangs(ReplicaGone):
    """The replica is silent, or its step does not end, while another one could go on; it may come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """The facts about a replica that never change: its answer when a router attaches."""

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
    kernels: str  # the instruction set that kernels on a CPU are compiled for (MANTA_CPU); "" on a GPU
    products: str  # how they are computed, in words
    num_threads: int
    pool: str  # "N tokens, M pages, X MiB"
    attention_why: str = ""  # this backend, and not a faster one
    role: Role = Role.UNIFIED
    page_bytes: int = 0  # of K and V, all ranks
    part_bytes: Mapping[str, int] = field(default_factory=dict)  # of a token, a window, a state (memory/sizing.py)
    part: str = ""  # what a page has beside K and V that all layers see: window, state; "": nothing
    border_pages: int = 0  # pages before a border whose parts a request needs to go on there
    transfer: PeerAddress | None = None  # where its transfer service listens; None: it has none
    fetches: bool = False  # it sends cached pages to other replicas, and takes theirs
    metrics: str | None = None  # host:port that serves its metrics; None where they are off
    migration: MigrationAddress | None = None  # where others push cached pages to; None without a host tier
    weights: str = ""  # of a quantised checkpoint: how it is stored, and how its weights are served
    host_bytes: int = 0  # of the host tier
    filled_in: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # settings that were left open: value, why
    tiers: Mapping[str, str] = field(default_factory=dict)  # with a host tier: its policies, and the store's address
    actor: str = ""  # its name in Ray


class ReplicaCalls(Protocol):
    """The calls that a model replica answers."""

    async def attach(self, address: ChannelAddress) -> ReplicaInfo:
        """Connect to the router's channel at ``address`` and report there from now on. Raises: ReplicaGone."""
        ...

    async def lease(self, router_id: str, rid: str) -> MantaError | None:
        """Return when request ``rid``, which that router has started over its channel, has ended; or the error that it
        was refused with. Cancelling the call aborts the request."""
        ...

    async def send_snapshot(self, router_id: str) -> None:
        """Send the keys of the prefix cache over the channel to that router. Raises: ReplicaGone, EngineDead."""
        ...

    async def report(self) -> ReplicaReport:
        """Return the statistics as of now; those of the last step if the engine is dead or in a long step."""
        ...

    async def cache_tree(self, max_depth: int, min_tokens: int) -> CacheTree:
        """Return the largest subtrees of the prefix cache, without token ids. Raises: EngineDead."""
        ...

    async def flush_cache(self, timeout_s: float) -> bool:
        """Forget every cached prefix. Waits ``timeout_s`` for requests to end, and returns False if they do not."""
        ...

    async def release_memory(self, tags: tuple[str, ...], timeout_s: float) -> str | None:
        """Give back the memory of these parts (replicas/engine/occupation.py), once no request runs. Returns: why it
        was not done; None if it was."""
        ...

    async def resume_memory(self, tags: tuple[str, ...]) -> str | None:
        """Use the memory of these parts again. Returns: as `release_memory`."""
        ...

    async def drain(self) -> None:
        """Take no more requests, end those that run, and be replaced by Serve. Cannot be taken back."""
        ...

    async def push_cache(self, order: PushCache) -> MigrationStats:
        """Push cached pages to other replicas as ``order`` says. Returns: what has been pushed since the start."""
        ...

    async def snapshot(self, name: str, choice: int) -> bytes | str | None:
        """Return the file of a snapshot of choice ``choice`` of the open request that clients call ``name``, or why
        none can be taken; None where no such request is open here. Raises: EngineDead."""
        ...

    async def recall(self, key: str) -> dict[int, list[int]]:
        """Return what choices of the request with this `GenerateRequest.recall` have made, by number."""
        ...

    async def abort(self, name: str | None, owner: str | None) -> int:
        """Abort the open requests that clients call ``name`` (None: all). Returns: how many there were.

        Args: owner: abort only this owner's requests (rids.py); None: every owner's.
        """
        ...


class Leases(Protocol):
    """Calls to replicas by their ids."""

    async def call(
        self,
        replica_id: str,
        method: Callable[Concatenate[ReplicaCalls, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call ``method``, one of `ReplicaCalls`, of exactly that replica.

        Raises: ReplicaGone if the replica is not running, or dies meanwhile; the replica's own errors as they are.
        """
        ...


class LeaseHolder:
    """The leases of one router, each with the stream of its tokens."""

    def __init__(self, leases: Leases, channel: ChannelServer, *, router_id: str) -> None:
        self.router_id = router_id
        self.channel = channel
        self._leases = leases
        self._ending: set[asyncio.Task[None]] = set()  # leases whose request has ended, about to return

    def begin(
        self, replica_id: str, parts: Iterable[Part], *, stays: Callable[[], bool]
    ) -> "tuple[Stream, list[asyncio.Task[None]]]":
        """Send ``parts``. Returns: their stream, and a lease for each; cancelling it aborts the request there.

        Args: stays: whether the stream waits for a replica that hangs (`ChannelServer.leave`).
        """
        parts = list(parts)
        stream = self.channel.open([part.request.rid for part in parts], replica_id=replica_id, stays=stays)
        return stream, [asyncio.create_task(self._lease(replica_id, part, stream)) for part in parts]

    def let_end(self, lease: "asyncio.Task[None]") -> None:
        """Hold the task of a lease whose request has ended until it returns."""
        self._ending.add(lease)
        lease.add_done_callback(self._ending.discard)

    async def _lease(self, replica_id: str, part: Part, stream: Stream) -> None:
        rid, held = part.request.rid, False
        try:
            self.channel.send(replica_id, RunRequest(part.request))
            await asyncio.sleep(0)  # the loop writes when its turn ends, and Ray's call takes most of a millisecond
            error = await self._leases.call(replica_id, ReplicaCalls.lease, self.router_id, rid)
            held = True
        except MantaError as raised:
            error = raised
        except Exception as raised:  # the edge: the request must be answered
            log.exception("the call to replica %s failed", replica_id)
            error = MantaError(f"the call to replica {replica_id} failed: {type(raised).__name__}: {raised}")
        finally:
            if not held:  # it failed, or was cancelled
                with contextlib.suppress(ReplicaGone):
                    self.channel.send(replica_id, EndRequest(rid))
        if error is not None:
            stream.fail(error)
            return
        late = ReplicaGone(f"replica {replica_id} ended the request, but its last tokens have not arrived")
        asyncio.get_running_loop().call_later(FRAMES_LATE_S, stream.fail, late)
