"""One engine and its routers: a model replica without Ray.

Owns:      the engine loop and the channel to each router. Every period, one report for all routers:
           the cache's events since the last and the statistics; nothing of it happens on a request's way.
Never:     imports Ray (model_replica.py makes it an actor; tests run it in their own process).
Invariant: a lease ends exactly when its request has; a router has one connection, and when that ends, the requests
           that came over it are aborted. Of requests whose clients said that they come back, the output is remembered
           for the router that they come back to.
Thread:    the replica's event loop; the sinks run on the engine thread, note such output and hand over.

    attach ── connect ──> channel ── start: submit ─> sink per step ─> channel ... last finish ─┐
                                     lease: a little later, or before it ───────────────────────┴─> the lease returns
                                     abort, lease cancelled, or the router gone ─> abort ─> pages released
"""

import asyncio
import contextlib
import functools
import logging
import os
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from deployments.channel.channel_client import ChannelClient
from deployments.channel.channel_server import ChannelAddress
from deployments.channel.frames import (
    Asked,
    CacheChanges,
    CacheKeys,
    KeptRequest,
    PushCache,
    ReplicaReport,
    RunRequest,
    TakeBack,
    encode,
)
from deployments.channel.kv_events import KvEvents, SteadyPublisher
from deployments.dispatch.leases import ReplicaGone, ReplicaInfo
from deployments.record.rids import about, choice_of, client_rid, owner_of
from deployments.replica.cache_migration import ReplicaMigrations
from kvtransfer.migration.migrator import MigrationStats
from kvtransfer.migration.wire import MigrationAddress
from replicas.cache.tree_view import CacheTree
from replicas.config import CacheConfig
from replicas.engine.engine import Engine
from replicas.engine.loop import EngineLoop
from replicas.errors import EngineDead, InvalidRequest, MantaError, Overloaded
from replicas.memory.sizing import page_bytes, part_bytes
from replicas.replay.replay import extract
from replicas.types import EngineStats, GenerateRequest, PdLeg, TokenDelta, each_told
from routing.types import Role

log = logging.getLogger(__name__)

REPORT_PERIOD_S = 0.1
FLUSH_POLL_S = 0.05
STATS_S = 1.0  # how long a report waits for the step that runs
START_S = 5.0  # how long a lease waits for its request: the two travel apart
MOST_OUTPUTS, MOST_OUTPUT_IDS = 256, 1 << 20  # that are remembered of requests, all together
REMEMBERED_S = 60.0  # and for how long
ACTIVITY_S = 10.0  # from one line about what a replica does to the next; none while it does nothing
CONNECT_S = 5.0  # a router that cannot be reached does not keep others from attaching for longer


@dataclass(slots=True, eq=False)
class _Run:
    """A request of a router, from its start or its lease, whichever comes first, until the lease returns."""

    client: ChannelClient | None = None  # over which it came; None: only its lease has come
    recall: str = ""  # of the request; "" for a prefill leg, which makes no output
    # output ids of each choice, to which the engine thread adds
    made: "dict[int, array[int]]" = field(default_factory=dict)
    error: Exception | None = None  # that it was refused with
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Outputs:
    """The output ids of requests whose clients may come back to another router, for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # by `GenerateRequest.recall`, the oldest first: until when, and the longest output of each choice
        self._kept: OrderedDict[str, tuple[float, dict[int, array[int]]]] = OrderedDict()

    def add(self, key: str, made: dict[int, "array[int]"]) -> None:
        """Remember ``made``, by choice; of two tries of one request, what is longer."""
        _, outputs = self._kept.pop(key, (0.0, {}))
        for choice, ids in list(made.items()):  # the engine thread may add a choice meanwhile
            if len(ids) > len(outputs.get(choice, ())):
                outputs[choice] = ids
        self._kept[key] = self._clock() + REMEMBERED_S, outputs
        self.drop_old()

    def find(self, key: str) -> dict[int, list[int]]:
        """Return what is remembered, but for each last id: of an answer that is whole, its end is to be told too."""
        self.drop_old()
        _, outputs = self._kept.get(key, (0.0, {}))
        return {choice: ids[:-1].tolist() for choice, ids in outputs.items()}

    def drop_old(self) -> None:
        """Forget what is older, or more, than is remembered."""
        num_ids = sum(len(ids) for _, outputs in self._kept.values() for ids in outputs.values())
        while self._kept:
            until_s, outputs = next(iter(self._kept.values()))
            if self._clock() < until_s and len(self._kept) <= MOST_OUTPUTS and num_ids <= MOST_OUTPUT_IDS:
                return
            num_ids -= sum(map(len, outputs.values()))
            self._kept.popitem(last=False)


class ServedEngine:
    """A started `EngineLoop` that any number of routers use: the `ReplicaCalls` of a replica."""

    def __init__(
        self,
        loop: EngineLoop,
        *,
        replica_id: str,
        node_id: str,
        report_period_s: float = REPORT_PERIOD_S,
        role: Role = Role.UNIFIED,
        metrics_address: str | None = None,
        migrations: ReplicaMigrations | None = None,
        kv_events: KvEvents | None = None,
    ) -> None:
        """``migrations``: of the cached pages, to and from other replicas; it is stopped with the engine, as is
        ``kv_events``: what else hears of its cache."""
        self.loop = loop
        self._kv_events: SteadyPublisher | None = None
        if kv_events is not None:
            take = functools.partial(loop.run_on_engine, lambda engine: engine.cache_snapshot())
            self._kv_events = SteadyPublisher(kv_events, take)
        self.replica_id = replica_id
        self._role = role
        self._metrics_address = metrics_address  # host:port
        self._migrations = migrations
        self._report_period_s = report_period_s
        self._node_id = node_id
        self._clients: dict[str, ChannelClient] = {}  # by router id
        self._runs: dict[str, _Run] = {}  # by rid
        self._outputs = Outputs()
        self._attaching = asyncio.Lock()  # two calls at once would leave one router with two connections
        self._reporter: asyncio.Task[None] | None = None
        self._flush: asyncio.Task[bool] | None = None  # the running attempt, or the last
        self._flush_again_s = 0.0  # before which the engine is not asked again
        self._draining = False

    async def attach(self, address: ChannelAddress) -> ReplicaInfo:
        """Connect to a router. A live connection is kept, with its requests, unless the router wants a new one.

        Raises: ReplicaGone when its channel cannot be reached from here.
        """
        async with self._attaching:
            client = self._clients.get(address.router_id)
            if client is None or client.lost or address.renew:
                client = await self._connect(address)
            client.report(encode(self._report(self.loop.stats())))  # a sign of life, over the one in use
        if self._reporter is None:
            self._reporter = asyncio.create_task(self._report_forever())
        return self._info(None if self._migrations is None else await self._migrations.address())

    async def _connect(self, address: ChannelAddress) -> ChannelClient:
        """Replace the connection by a new one; the old one's requests end. Raises: ReplicaGone."""
        try:
            async with asyncio.timeout(CONNECT_S):
                client = await ChannelClient.connect(
                    address,
                    replica_id=self.replica_id,
                    node_id=self._node_id,
                    on_asked=self._asked,
                    on_lost=self._router_lost,
                )
        except OSError as error:
            raise ReplicaGone(
                f"replica {self.replica_id} cannot reach router {address.router_id} at {address.host}:"
                f"{address.port} ({error}); the nodes must reach each other on any port"
            ) from error
        client.sink = functools.partial(self._note, client.sink)
        before = self._clients.get(address.router_id)
        if before is not None:
            self._router_lost(before)
            before.close()
        self._clients[address.router_id] = client
        return client

    async def lease(self, router_id: str, rid: str) -> MantaError | None:
        """Hold the lease: return when the request has ended, or at once with the error that it was refused for."""
        client = self._clients.get(router_id)
        if client is None or client.lost:
            return ReplicaGone(f"router {router_id} is not attached to replica {self.replica_id}")
        run = self._runs.setdefault(rid, _Run())
        try:
            if not run.began.is_set():
                async with asyncio.timeout(START_S):
                    await run.began.wait()
            await run.ended.wait()
        except TimeoutError:
            return ReplicaGone(f"replica {self.replica_id} has the lease of {rid}, the request has not come")
        except asyncio.CancelledError:
            self.loop.abort(rid)
            raise
        finally:
            self._forget(rid)
        if run.error is None or isinstance(run.error, MantaError):
            return run.error
        raise run.error

    async def send_snapshot(self, router_id: str) -> None:
        """Send the cache's keys to that router; the events after it follow. Raises: ReplicaGone, EngineDead."""
        snapshot = await self.loop.run_on_engine(lambda engine: engine.cache_snapshot())
        client = self._clients.get(router_id)
        if client is None or client.lost:
            raise ReplicaGone(f"router {router_id} is not attached to replica {self.replica_id}")
        client.send(encode(CacheKeys.of(snapshot)))

    async def report(self) -> ReplicaReport:
        """Return the statistics as of now; those of the last step when the engine is dead or in a long step."""
        try:
            async with asyncio.timeout(STATS_S):
                return self._report(await self.loop.run_on_engine(lambda engine: engine.stats()))
        except (TimeoutError, EngineDead):
            return self._report(self.loop.stats())

    async def cache_tree(self, max_depth: int, min_tokens: int) -> CacheTree:
        """Return the largest subtrees of the prefix cache, between two steps. Raises: EngineDead."""
        return await self.loop.run_on_engine(
            lambda engine: engine.cache_tree(max_depth=max_depth, min_tokens=min_tokens)
        )

    async def flush_cache(self, timeout_s: float) -> bool:
        """Forget every cached prefix. Waits ``timeout_s`` for requests to end, and returns False if they do not.

        However many callers wait, the engine is asked once each FLUSH_POLL_S.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            if self._flush is None or self._flush.done():
                self._flush = asyncio.create_task(self._try_flush())
            if await asyncio.shield(self._flush):  # shared by all callers: one that leaves does not end it
                return True
            if time.monotonic() >= deadline_s:
                return False

    async def release_memory(self, tags: tuple[str, ...], timeout_s: float) -> str | None:
        """Give memory back, once no request runs; waits ``timeout_s`` for that. Returns: why it was not done, or None.

        No router sends a request afterwards: each is told before this returns.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            while not await self.loop.run_on_engine(lambda engine: engine.release_memory(tags)):
                if time.monotonic() >= deadline_s:
                    return "it is busy with requests: try again, or give ?timeout=seconds"
                await asyncio.sleep(FLUSH_POLL_S)
        except InvalidRequest as error:
            return str(error)
        self._tell_routers()
        return None

    async def resume_memory(self, tags: tuple[str, ...]) -> str | None:
        try:
            await self.loop.run_on_engine(lambda engine: engine.resume_memory(tags))
        except InvalidRequest as error:
            return str(error)
        self._tell_routers()
        return None

    async def drain(self) -> None:
        """Have the routers send nothing more, then fail Serve's health checks: Serve lets what runs end, for at most
        ``replicas.drain_timeout_s``, and starts a new replica. A request that arrives meanwhile is still served."""
        log.warning("replica %s drains: an operator asked for it", self.replica_id)
        self._draining = True
        self._tell_routers()

    def _tell_routers(self) -> None:
        """Report to every router now, not with the next period."""
        for client in list(self._clients.values()):
            client.report(encode(self._report(self.loop.stats())))

    async def _try_flush(self) -> bool:
        await asyncio.sleep(max(self._flush_again_s - time.monotonic(), 0))
        self._flush_again_s = time.monotonic() + FLUSH_POLL_S
        return await self.loop.run_on_engine(lambda engine: engine.flush_cache())

    async def push_cache(self, order: PushCache) -> MigrationStats:
        """Push cached pages to other replicas. Returns: what has been pushed since the start."""
        return MigrationStats() if self._migrations is None else await asyncio.shield(self._migrations.order(order))

    async def abort(self, name: str | None, owner: str | None) -> int:
        """Abort the open requests that clients call ``name`` (None: all). Returns: how many there were.

        Args: owner: abort only this owner's requests (rids.py); None: every owner's.
        """
        named = [rid for rid in self.loop.open_rids() if name is None or client_rid(rid) == name]
        rids = [rid for rid in named if owner is None or owner_of(rid) == owner]
        for rid in rids:
            self.loop.abort(rid)
        return len(rids)

    async def snapshot(self, name: str, choice: int) -> bytes | str | None:
        """Return the file of a snapshot of choice ``choice`` of the open request that clients call ``name``, which goes
        on, or why none can be taken; None where no such request is open here. Raises: EngineDead."""
        for rid in self.loop.open_rids():
            alone = choice_of(rid)  # a choice that went on here by itself is choice 0 of its own rid
            if client_rid(rid) == name and alone in (None, choice):
                index = choice if alone is None else 0
                try:
                    taken = await self.loop.run_settled(lambda engine: extract(engine, rid, index))  # noqa: B023
                except (InvalidRequest, Overloaded) as error:
                    return str(error)
                return await asyncio.to_thread(taken.to_bytes)
        return None

    async def recall(self, key: str) -> dict[int, list[int]]:
        """Return what choices of the request with this `GenerateRequest.recall` have made, by number.

        One that still runs goes on: its router may be there, or its machine may have vanished with no word.
        """
        for run in list(self._runs.values()):
            if run.recall == key:
                self._outputs.add(key, run.made)
        return self._outputs.find(key)

    async def check_health(self) -> None:
        """Raise EngineDead when a step crashed or hangs, a rank is gone, or the transfer thread has failed; and
        ReplicaGone when it drains, since Serve replaces a replica by name for no other reason."""
        if (error := self.loop.fault) is not None:
            raise error
        if self._draining:
            raise ReplicaGone(f"replica {self.replica_id} drains: an operator asked for it")

    async def stop(self) -> None:
        """Stop, but not before a push of cached pages that runs is over."""
        if self._migrations is not None:
            await self._migrations.finish()
            await self._migrations.stop()
        if self._reporter is not None:
            self._reporter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reporter
        if self._kv_events is not None:
            await self._kv_events.close()
        for client in list(self._clients.values()):
            client.close()
        await asyncio.to_thread(self.loop.stop)

    def check(self) -> None:
        """Raises AssertionError if a request is open for a connection that is not in use."""
        of_routers = [rid for client in self._clients.values() for rid in self.loop.open_rids(client.sink)]
        assert sorted(of_routers) == sorted(self.loop.open_rids())
        assert all(run.client is None or not run.client.lost for run in self._runs.values())

    def _asked(self, client: ChannelClient, asked: Asked) -> None:
        """Do what a router asks; its lease, or the channel, tells it how that went."""
        if isinstance(asked, RunRequest):
            self._start(client, asked.request)
        elif isinstance(asked, TakeBack):
            self._take_back(client, asked.rid)
        elif isinstance(asked, PushCache):
            if self._migrations is not None:
                self._migrations.order(asked)
        else:
            self.loop.abort(asked.rid)
            self._forget(asked.rid)  # its lease has failed: none comes

    def _start(self, client: ChannelClient, request: GenerateRequest) -> None:
        event_loop, run = asyncio.get_running_loop(), self._runs.setdefault(request.rid, _Run())
        run.client = client
        if request.recall and (request.kv_transfer is None or request.kv_transfer.leg is PdLeg.DECODE):
            run.recall = request.recall
            if request.resumed_ids:
                run.made[choice_of(request.rid) or 0] = array("i", request.resumed_ids)
        run.began.set()

        def on_end() -> None:  # engine thread
            with contextlib.suppress(RuntimeError):  # the event loop is closed, and the lease with it
                event_loop.call_soon_threadsafe(run.ended.set)

        with about(rid=request.rid):
            try:
                self.loop.submit(request, client.sink, on_end)
            except Exception as error:  # noqa: BLE001 - the lease returns or raises it; the connection goes on
                run.error = error
                run.ended.set()

    def _take_back(self, client: ChannelClient, rid: str) -> None:
        event_loop, answer = asyncio.get_running_loop(), encode(KeptRequest(rid))

        def kept() -> None:  # engine thread
            with contextlib.suppress(RuntimeError):  # as in `_start`
                event_loop.call_soon_threadsafe(client.send, answer)

        self.loop.take_back(rid, kept)

    def _router_lost(self, client: ChannelClient) -> None:
        """Abort the requests of a connection that has ended; a newer connection of the router stays."""
        router_id = client.address.router_id
        if self._clients.get(router_id) is client:
            del self._clients[router_id]
        for rid in self.loop.open_rids(client.sink):
            self.loop.abort(rid)
        for rid in [rid for rid, run in self._runs.items() if run.client is client]:
            self._forget(rid)

    def _note(self, sink: Callable[[list[TokenDelta]], None], deltas: list[TokenDelta]) -> None:
        """Pass ``deltas`` on, and note the output of requests that may be recalled. On the engine thread."""
        for delta in deltas:
            run = self._runs.get(delta.rid)
            if run is not None and run.recall and delta.token_ids:
                choice = choice_of(delta.rid)
                run.made.setdefault(delta.index if choice is None else choice, array("i")).extend(delta.token_ids)
        sink(deltas)

    def _forget(self, rid: str) -> None:
        """Take a run out that has ended, or is being aborted; what it has made may be recalled."""
        run = self._runs.pop(rid, None)
        if run is not None and run.made:
            self._outputs.add(run.recall, run.made)

    async def _report_forever(self) -> None:
        activity = ActivityLog(self.loop.stats(), time.monotonic)
        while True:
            events, stats = self.loop.take_cache_events(), self.loop.stats()
            activity.look(stats)
            frames = encode(CacheChanges.of(events)) + encode(self._report(stats))  # without events: nothing changed
            for client in list(self._clients.values()):
                client.report(frames)
            if self._kv_events is not None:
                self._kv_events.publish(events)
            self._outputs.drop_old()
            await asyncio.sleep(self._report_period_s)

    def _report(self, stats: EngineStats) -> ReplicaReport:
        error = self.loop.fault
        return ReplicaReport(
            stats=stats,
            error=None if error is None else str(error),
            num_open=self.loop.num_open,
            age_s=max(time.monotonic() - stats.time_s, 0.0),
            step_age_s=self.loop.step_age_s,
            released=bool(self.loop.engine.occupation.released),
            draining=self._draining,
        )

    def _info(self, migration: MigrationAddress | None) -> ReplicaInfo:
        engine, config = self.loop.engine, self.loop.engine.config
        parts = engine.kv.store.parts
        capacity = self.loop.stats().pool.total_tokens
        return ReplicaInfo(
            replica_id=self.replica_id,
            node_id=self._node_id,
            pid=os.getpid(),
            model_path=config.model.path,
            architecture=config.model.architecture,
            dtype=config.model.dtype,
            context_len=config.model.context_len,
            vocab_size=config.model.vocab_size,
            max_prompt_tokens=min(config.model.context_len, capacity) - 1,
            tp=config.parallel.tp,
            page_size=config.cache.page_size,
            attention=engine.started.attention.name,
            attention_why=engine.started.attention.why,
            kernels=_kernels(config.device),
            products=config.products,
            weights=config.model.describe_weights(),
            num_threads=config.num_threads,
            pool=engine.describe(),
            role=self._role,
            page_bytes=page_bytes(config, engine.kv.store.size),
            part_bytes=part_bytes(config, apart=engine.kv.store.size.windows is not None),
            part="" if parts is None else parts.kind,
            border_pages=0 if parts is None else parts.border_pages,
            transfer=engine.transfer_address,
            fetches=may_fetch(engine) and self._role is Role.UNIFIED,
            metrics=self._metrics_address,
            migration=migration,
            host_bytes=config.cache.host_memory_bytes,
            filled_in=filled_in(engine),
            tiers=_tiers(config.cache),
        )


def may_fetch(engine: Engine) -> bool:
    """Tell whether cached pages go to and come from other replicas: not where snapshots of states are on the host."""
    return engine.transfer is not None and not (engine.config.model.states and engine.kv.store.tiers is not None)


def filled_in(engine: Engine) -> dict[str, dict[str, Any]]:
    """Return each setting that was left open: the value in force, and where it came from.

    A rank decides some of them after the settings were resolved: how much memory and how many rows there are.
    """
    config, pool = engine.config, engine.kv.store
    decided = {
        "cache.kv_dtype": (config.cache.kv_dtype, config.kv_dtype, f"for weights in {config.model.dtype}"),
        "cache.device_memory_bytes": (
            config.cache.device_memory_bytes,
            pool.num_pages * page_bytes(config, engine.kv.store.size),
            "the pool, in what the device had left",
        ),
        "scheduler.max_running_requests": (
            config.scheduler.max_running_requests,
            engine.scheduler.max_running,
            "as many as this pool can keep busy",
        ),
    }
    by_rank = {name: {"value": value, "why": why} for name, (given, value, why) in decided.items() if given is None}
    return by_rank | config.filled_in


def _kernels(device: str) -> str:
    """Name what the CPU's kernels are compiled for; "" where a GPU computes."""
    if device != "cpu":
        return ""
    from replicas.kernels.simd import instruction_set

    return instruction_set()


def _tiers(cache: CacheConfig) -> dict[str, str]:
    """Return the policies of the tiers under the device pool and where the store is, without any key in its URL."""
    if not cache.host_memory_bytes:
        return {}
    facts: dict[str, str] = {
        "host_eviction": cache.host_eviction, "write_policy": cache.write_policy, "prefetch": cache.prefetch,
    }  # fmt: skip
    if cache.store is None:
        return facts
    url = urlsplit(cache.store)
    place = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    return facts | {"store": place, "store_bytes": str(cache.store_bytes)}


class ActivityLog:
    """The line in a replica's log about what it does, every ACTIVITY_S: what one searches after an incident, where no
    metrics are kept. Looks at no token."""

    def __init__(self, stats: EngineStats, clock: Callable[[], float]) -> None:
        self._before = stats
        self._since_s = clock()
        self._clock = clock

    def look(self, stats: EngineStats) -> None:
        """Write the line if it is time, and if there is something to tell."""
        took_s = self._clock() - self._since_s
        if took_s < ACTIVITY_S:
            return
        before, self._before = self._before, stats
        self._since_s += took_s
        told = _activity(before, stats, took_s)
        if any(value for name, value in told.items() if not name.endswith("_percent")):
            text = ", ".join(f"{name} {value}" for name, value in told.items())
            log.info("%s", text, extra=told)


def _activity(before: EngineStats, now: EngineStats, took_s: float) -> dict[str, Any]:
    """Return the figures of the line about the ``took_s`` between two statistics."""
    looked_up = now.lookup_tokens - before.lookup_tokens
    hit = round(100 * (now.cached_tokens - before.cached_tokens) / looked_up) if looked_up else None
    named = [(how.log, getattr(now, name), getattr(before, name), how.is_counter)
             for name, how in each_told(type(now)) if how.log]  # fmt: skip
    return {
        **{name: value for name, value, _, is_counter in named if not is_counter},
        "handing_over": now.num_handed_over,
        **{name: value - old for name, value, old, is_counter in named if is_counter},
        "kv_percent": round(100 * now.pool.utilization),
        **({} if hit is None else {"hit_percent": hit}),
        "prefill_tok_s": round((now.prefill_tokens - before.prefill_tokens) / took_s, 1),
        "decode_tok_s": round((now.decode_tokens - before.decode_tokens) / took_s, 1),
    }
