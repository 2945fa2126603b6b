"""A router's inside with replicas in the same process: everything real but Ray.

`ScriptedReplica` stands in for an engine where a test needs to say when it dies.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from deployments.channel.channel_client import ChannelClient
from deployments.channel.channel_server import ChannelAddress, ChannelServer
from deployments.channel.frames import (
    Asked,
    CacheChanges,
    CacheKeys,
    PushCache,
    ReplicaReport,
    RunRequest,
    encode,
)
from deployments.dispatch.attempt import TryLimits
from deployments.dispatch.dispatcher import NO_HINTS, Dispatcher, RouteHints
from deployments.dispatch.leases import LeaseHolder, ReplicaCalls, ReplicaGone, ReplicaInfo
from deployments.fleet.cache_migration import CacheMigration
from deployments.fleet.fleet import Fleet
from deployments.http.service import Service, read_face
from deployments.record.route_forms import request_row
from deployments.replica.served_engine import ServedEngine
from deployments.settings.schema import ModelSettings
from kvtransfer.migration.migrator import MigrationStats
from kvtransfer.migration.wire import MigrationAddress
from kvtransfer.pages import PageKeys, page_keys
from replicas.cache.events import CacheSnapshot, EventLog, PagesStored
from replicas.cache.tree_view import CacheTree, empty_tree
from replicas.errors import MantaError
from replicas.text.tokenizer import Tokenizer
from replicas.types import Finish, FinishReason, GenerateRequest, TokenDelta
from routing.router import Router
from tests.embedded import MODEL
from tests.unit.deployments.sample_values import ask, info, stats, token
from tests.waiting import until_async

PAGE_SIZE = 16
P = ParamSpec("P")
T = TypeVar("T")


class LocalLeases:
    """`Leases` by method calls."""

    def __init__(self) -> None:
        self.replicas: dict[str, ReplicaCalls] = {}

    async def call(
        self,
        replica_id: str,
        method: Callable[Concatenate[ReplicaCalls, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        replica = self.replicas.get(replica_id)
        if replica is None:
            raise ReplicaGone(f"replica {replica_id} is not there")
        return cast(T, await getattr(replica, method.__name__)(*args, **kwargs))


class House:
    """One router and its replicas."""

    def __init__(
        self,
        *,
        policy: str = "round_robin",
        max_tries: int = 3,
        retry_wait_s: float = 5.0,
        max_wait_s: float = 60.0,
        router_id: str = "router",
        leases: LocalLeases | None = None,
        always_kv_transfer: bool = False,
        report_period_s: float = 10.0,
        fill_s: float = 0.0,
        drain_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock``: by which queues get shorter, and by which is found who hangs. ``fill_s``, ``drain_s``: of
        `CacheMigration`."""
        self.router = Router(policy, Random(0), clock, page_size=PAGE_SIZE, always_kv_transfer=always_kv_transfer)
        self.router_id = router_id
        self.leases = leases if leases is not None else LocalLeases()
        # scripted replicas report when they attach and when told: with a period of 10 s that is no silence for 50 s
        self.fleet = Fleet(
            router=self.router,
            leases=self.leases,
            report_period_s=report_period_s,
            clock=clock,
            migration=CacheMigration(self.leases, fill_s=fill_s, push_s=5.0, drain_s=drain_s),
        )
        self.channel = ChannelServer(
            self.fleet, lost_error=lambda replica_id: ReplicaGone(f"replica {replica_id} was lost")
        )
        self.dispatcher = Dispatcher(
            self.router,
            LeaseHolder(self.leases, self.channel, router_id=router_id),
            limits=TryLimits(max_tries=max_tries, retry_wait_s=retry_wait_s, max_wait_s=max_wait_s),
            transfer_address=self.fleet.transfer_address,
            expects_one=lambda: self.fleet.expects_one,
            clock=clock,
        )
        self.address: ChannelAddress | None = None

    async def __aenter__(self) -> "House":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self.address = await self.channel.start(router_id=self.router_id, node_id="here", host="127.0.0.1")
        self.fleet.start(self.address, leave=self.channel.leave, send=self.channel.send)

    def add(self, replica: "ServedEngine | ScriptedReplica") -> None:
        self.leases.replicas[replica.replica_id] = replica
        self.fleet.set_members(self.leases.replicas)

    async def ready(self, *replicas: "ServedEngine | ScriptedReplica") -> None:
        """Add ``replicas`` and wait until each has attached and reported."""
        for replica in replicas:
            self.add(replica)
        added = {replica.replica_id for replica in replicas}
        await until_async(lambda: added <= {view.replica_id for view in self.router.views})

    async def collect(self, hints: RouteHints = NO_HINTS, **options: Any) -> list[TokenDelta]:
        """All deltas of one request; ``options``: of `ask`."""
        async with asyncio.timeout(10):
            return [delta async for delta in self.dispatcher.stream(ask(**options), hints)]

    def service(self, tokenizer: Tokenizer, **options: Any) -> Service:
        """What the HTTP routes of this router use."""
        return Service(
            model=read_face(ModelSettings(path=MODEL)),
            tokenizer=tokenizer,
            dispatcher=self.dispatcher,
            fleet=self.fleet,
            leases=self.leases,
            settings={},
            **options,
        )

    def remove(self, replica_id: str) -> None:
        """Ray has noticed that it is gone."""
        del self.leases.replicas[replica_id]
        self.fleet.set_members(self.leases.replicas)

    async def stop(self) -> None:
        await self.fleet.stop()
        await self.channel.stop()
        self.dispatcher.check()
        self.fleet.check()


class ScriptedReplica:
    """Generates 1000, 1001, 1002, ...: token 1000 + i at output position i, with text "<i>".

    It dies (its connection ends, its leases fail) before it would send token number ``die_at`` of a request, once.
    """

    def __init__(
        self, replica_id: str, *, die_at: int | None = None, refuse: MantaError | None = None, token_s: float = 0.0
    ) -> None:
        self.replica_id = replica_id
        self.token_s = token_s  # from one token of a request to the next
        self.die_at = die_at
        self.refuse = refuse
        self.finish = Finish(reason=FinishReason.LENGTH)  # how a request ends after its last token
        self.requests: list[GenerateRequest] = []
        self.num_aborted = 0
        self.orders: list[PushCache] = []  # to push its cache, by call or over the channel
        self.migration: MigrationAddress | None = None
        self.aborts: list[str] = []  # rids of which the router said over the channel that they are to end
        self.hold = asyncio.Event()  # generation waits for it
        self.hold.set()
        self.pause_at: int | None = None  # it clears ``hold`` before this token, once
        self.cache = EventLog()
        self.held: PageKeys = np.empty(0, dtype=np.uint64)
        self.num_snapshots = 0
        self.stats = stats()
        self.step_age_s = 0.0
        self.deaf = False  # it does not hear that a request was aborted
        self._client: ChannelClient | None = None
        self._started: dict[str, asyncio.Future[GenerateRequest]] = {}  # by rid

    async def attach(self, address: ChannelAddress) -> ReplicaInfo:
        self._client = await ChannelClient.connect(
            address,
            replica_id=self.replica_id,
            node_id="here",
            on_asked=lambda client, asked: self._asked(asked),
            on_lost=lambda client: None,
        )
        self._client.report(encode(await self.report()))
        return dataclasses.replace(info(self.replica_id), migration=self.migration, host_bytes=1 << 30)

    def store(self, token_ids: list[int], *, tell: bool = True) -> None:
        """Its cache gets the whole pages of ``token_ids``; ``tell``: False loses the event on its way."""
        keys = page_keys(np.array(token_ids, dtype=np.int32), PAGE_SIZE, "")
        self.cache.stored(keys, None, PAGE_SIZE, np.array(token_ids, dtype=np.int32))
        self.held = np.union1d(self.held, keys)
        self._tell(tell)

    def clear(self, *, tell: bool = True) -> None:
        self.cache.cleared()
        self.held = self.held[:0]
        self._tell(tell)

    def _tell(self, tell: bool) -> None:
        events = self.cache.drain()
        if tell and self._client is not None:
            self._client.report(encode(CacheChanges.of(events)))

    async def send_snapshot(self, router_id: str) -> None:
        assert self._client is not None
        self.num_snapshots += 1
        stored = PagesStored(
            seq=self.cache.seq, keys=self.held, parent_key=None, page_size=PAGE_SIZE, token_ids=np.empty(0, np.int32)
        )
        self._client.send(encode(CacheKeys.of(CacheSnapshot(seq=self.cache.seq, stored=(stored,)))))

    def _asked(self, asked: Asked) -> None:
        if isinstance(asked, RunRequest):
            self._start_of(asked.request.rid).set_result(asked.request)
        elif isinstance(asked, PushCache):
            self.orders.append(asked)
        else:
            self.aborts.append(asked.rid)

    def _start_of(self, rid: str) -> "asyncio.Future[GenerateRequest]":
        return self._started.setdefault(rid, asyncio.get_running_loop().create_future())

    async def lease(self, router_id: str, rid: str) -> MantaError | None:
        """Generate, unlike an engine, only once the lease has come."""
        request = await self._start_of(rid)
        del self._started[rid]
        self.requests.append(request)
        if self.refuse is not None:
            return self.refuse
        assert self._client is not None
        generation = asyncio.ensure_future(self._generate(self._client, request))
        try:
            await (asyncio.shield(generation) if self.deaf else generation)
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        return None

    async def _generate(self, client: ChannelClient, request: GenerateRequest) -> None:
        wanted = request.sampling.max_new_tokens
        for position in range(len(request.resumed_ids), wanted):
            if position == self.pause_at:
                self.pause_at = None
                self.hold.clear()
            await self.hold.wait()
            if position == self.die_at:
                client.close()
                raise ReplicaGone(f"replica {self.replica_id} died")
            finish = self.finish if position == wanted - 1 else None
            client.sink([token(request, index, position, finish) for index in range(request.sampling.n)])
            await asyncio.sleep(self.token_s)

    async def report(self) -> ReplicaReport:
        stats = dataclasses.replace(self.stats, cache_event_seq=self.cache.seq)
        return ReplicaReport(stats=stats, error=None, num_open=0, step_age_s=self.step_age_s)

    def send(self, delta: TokenDelta) -> None:
        """Send ``delta`` of a request, in the midst of what it generates."""
        assert self._client is not None
        self._client.sink([delta])

    async def send_reports(self, num: int) -> None:
        assert self._client is not None
        for _ in range(num):
            self._client.report(encode(await self.report()))

    async def cache_tree(self, max_depth: int, min_tokens: int) -> CacheTree:
        return empty_tree(PAGE_SIZE)

    async def flush_cache(self, timeout_s: float) -> bool:
        return True

    async def release_memory(self, tags: tuple[str, ...], timeout_s: float) -> str | None:
        return None

    async def resume_memory(self, tags: tuple[str, ...]) -> str | None:
        return None

    async def drain(self) -> None:
        return None

    async def push_cache(self, order: PushCache) -> MigrationStats:
        self.orders.append(order)
        return MigrationStats()

    async def abort(self, name: str | None, owner: str | None) -> int:
        return 0


def changed_rows(dispatcher: Dispatcher, since: int) -> tuple[tuple[dict[str, Any], ...], int]:
    """The rows that changed after change number ``since``, the oldest first, and the number for the next call."""
    records, seq = dispatcher.routes.changed_since(since)
    return tuple(request_row(record, router_id=dispatcher.router_id) for record in records), seq
