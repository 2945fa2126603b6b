"""The router: the HTTP ingress, and the process where replicas are chosen.

Owns:      one channel server, one fleet, one dispatcher, one routing router; the ASGI app over them (http_app.py).
Never:     asks another process where a request should go; asks other routers only where one went (peers.py).
Thread:    Serve's event loop for this replica; Serve's own router runs on another and speaks through ray_leases.py.

    Serve: members ──> ray_leases.py ──> fleet ──attach──> replicas ──reports──> views ──> routing.router
    HTTP ──> http_app ──> dispatcher ──choose──> lease (Serve) + stream (channel)
"""

import asyncio
import dataclasses
import functools
import gc
import logging
import pathlib
import secrets
import time
from collections.abc import Callable
from random import Random
from typing import Any

import ray
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments import logs
from deployments.batches.runner import BatchRunner
from deployments.batches.store import batch_store
from deployments.channel.channel_server import ChannelServer
from deployments.dispatch import ray_leases
from deployments.dispatch.attempt import TryLimits
from deployments.dispatch.background import BackgroundStreams
from deployments.dispatch.dispatcher import Dispatcher
from deployments.dispatch.leases import LeaseHolder, ReplicaCalls, ReplicaGone
from deployments.dispatch.ray_leases import RayLeases
from deployments.dispatch.resumable_streams import ResumableStreams
from deployments.fleet.cache_migration import CacheMigration
from deployments.fleet.fleet import Fleet
from deployments.fleet.peers import NoPeers, RayPeers, ResponseAsk, RouterPeers
from deployments.fleet.silence import HangKiller
from deployments.http import tracing
from deployments.http.access import browser_rules
from deployments.http.apis.responses import asked_of
from deployments.http.http_app import make_app
from deployments.http.lines import line_answers
from deployments.http.routes import own_route
from deployments.http.service import Service, adaptable_weights, read_face, tokenizer_folder
from deployments.places import VERSION, ask_nodes_directly
from deployments.record.recording import Recorder
from deployments.record.route_log import RouteLog
from deployments.settings.adapters import Adapters
from deployments.settings.groups import without_secrets
from deployments.settings.roles import config_of, roles_of
from deployments.settings.schema import AppConfig, parse
from deployments.tenancy import quotas
from deployments.tenancy.keys import NO_KEYS, KeyDigests
from deployments.watch.metrics.router_metrics import RouterMetrics
from deployments.watch.metrics.server import ServedMetrics
from deployments.watch.observatory import serve_details
from deployments.watch.observatory.router_view import RouterView, request_body, router_view
from replicas.text.tokenizer import Tokenizer
from routing.router import Router

log = logging.getLogger("ray.serve")

FIRST_REPLICA_S = 600.0  # how long the start waits for a replica, so that "ready" means ready


@serve.ingress()  # the app is made by __serve_build_asgi_app__
class RouterIngress:
    """The router deployment: HTTP ingress, dispatcher and fleet in one process."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: dict[str, Any], *replicas: DeploymentHandle, keys: KeyDigests = NO_KEYS
    ) -> None:
        self._metrics: ServedMetrics | None = None
        self._tracing: tracing.Tracing | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._recorder: Recorder | None = None
        logs.into_serve()
        ask_nodes_directly()
        self._config = config = parse(settings)
        self._keys = keys = keys.read_anew()
        context = ray.get_runtime_context()
        self._node_id = context.get_node_id()
        router = Router(
            policy=config.router.policy,
            rng=Random(secrets.randbits(64)),
            clock=time.monotonic,
            page_size=_page_size(config),
            always_kv_transfer=config.transfer.disaggregation == "always",
        )
        leases = RayLeases()
        self._fleet = Fleet(
            router=router,
            leases=leases,
            report_period_s=config.router.report_period_s,
            hang_timeout_s=config.router.hang_timeout_s,
            role_of=leases.role_of,
            migration=CacheMigration(
                leases,
                fill_s=config.replicas.fill_s,
                push_s=config.replicas.push_share * config.replicas.drain_timeout_s,
                drain_s=config.replicas.drain_timeout_s,
            ),
            killer=HangKiller(after_s=config.scheduler.hang_kill_s),
        )
        self._channel = ChannelServer(self._fleet, lost_error=_lost_error)
        router_id = serve.get_replica_context().replica_id.unique_id
        address = await self._channel.start(
            router_id=router_id, node_id=self._node_id, host=ray.util.get_node_ip_address()
        )
        used = None if keys.tenants is None else quotas.Quotas(keys.tenants)
        metrics = RouterMetrics(config, router_id=router_id, fleet=self._fleet, quotas=used)
        self._metrics = metrics.served(host=address.host, node_id=address.node_id, guard=keys.guard)
        self._recorder = _recorder(config, router_id, self._fleet)
        if self._recorder is not None:
            metrics.watch.on_end = self._recorder.add
        self._fleet.start(address, leave=self._channel.leave, send=self._channel.send)
        for handle in replicas:
            self._listen(handle, leases)
        dispatcher = Dispatcher(
            router,
            LeaseHolder(leases, self._channel, router_id=router_id),
            limits=TryLimits(
                max_tries=config.router.max_tries,
                retry_wait_s=config.router.retry_wait_s,
                max_wait_s=config.router.max_wait_s,
                objective_s=config.observability.ttft_objective_s,
                max_choices_per_key=config.router.max_choices_per_key,
            ),
            routes=RouteLog(config.router.decisions_kept),
            transfer_address=self._fleet.transfer_address,
            expects_one=lambda: self._fleet.expects_one,
            watch=metrics.watch,
        )
        dispatcher.quotas = used
        self._tasks.append(asyncio.create_task(dispatcher.move_forever()))
        peers = _peers(config)
        self._service = _service(config, settings, dispatcher, self._fleet, leases, peers, metrics.shown)
        if used is not None:
            self._tasks.append(asyncio.create_task(quotas.keep(used, functools.partial(_elsewhere, peers, router_id))))
        self._tracing = tracing.of_router(
            config.observability, model=config.model.name, router_id=router_id, version=self._service.version
        )
        self._runner = _runner(config, self._service, keys, router_id)
        if self._runner is not None:
            self._tasks.append(asyncio.create_task(self._runner.run_forever()))
        self._listens_on = await asyncio.to_thread(serve_details.listens_on)
        log.info("%s", logs.WAITS_FOR_REPLICA)
        if not await self._fleet.wait_ready(FIRST_REPLICA_S):
            log.warning("no model replica is ready after %.0f s: %s", FIRST_REPLICA_S, self._fleet.describe())
        gc.collect()
        gc.freeze()  # these objects stay; scanning them again, as after a body of many values, takes 100 ms

    def __serve_build_asgi_app__(self) -> FastAPI:
        settings = self._config.router
        return make_app(
            self._service,
            echo_request_id=False,  # Serve's proxy echoes it
            tracing=self._tracing,
            keys=self._keys,
            browsers=browser_rules(
                listens_on=self._listens_on,
                has_keys=self._keys.asked,
                allowed_hosts=settings.allowed_hosts,
                origins=settings.cors_origins,
            ),
            cors_origins=settings.cors_origins,
            live_view=serve_details.LiveView(serve.get_replica_context().app_name).path,
        )

    async def find_route(self, name: str) -> dict[str, Any] | None:
        """Find a route; the other routers call it (peers.py)."""
        return own_route(self._service.dispatcher, name)

    async def ask_response(self, ask: ResponseAsk) -> dict[str, Any] | None:
        """Do what a client of another router asks of a response; the other routers call it."""
        return await asked_of(self._service.background, ask)

    async def told_quotas(self) -> tuple[str, quotas.Told]:
        """Return this router's id, and what keys have used here; the other routers call it."""
        dispatcher = self._service.dispatcher
        assert dispatcher.quotas is not None, "all routers have a file of keys, or none has"
        return dispatcher.router_id, dispatcher.quotas.told(dispatcher.choices)

    async def told_misses(self, last_s: float) -> tuple[str, list[dict[str, Any]]]:
        """Return this router's id, and why prompts were not cached here; the other routers call it."""
        dispatcher = self._service.dispatcher
        return dispatcher.router_id, dispatcher.prompts.misses.table(last_s)

    async def find_request(self, name: str) -> dict[str, Any] | None:
        """Find a request; the observatory calls it, and the next two methods."""
        return request_body(self._service.dispatcher, name)

    async def observe(self, since: dict[str, int]) -> RouterView:
        assert self._metrics is not None, "the constructor has served them"
        return router_view(
            dispatcher=self._service.dispatcher,
            fleet=self._fleet,
            config=self._config,
            node_id=self._node_id,
            target=self._metrics.target,
            asks_for_key=self._keys.exist,
            since=since,
            batches=() if self._runner is None else self._runner.progress(),
        )

    async def ask_replica(self, replica_id: str, method: str, *args: Any) -> Any:
        """Call ``method``, one of `ReplicaCalls`, of exactly that replica."""
        return await self._service.leases.call(replica_id, getattr(ReplicaCalls, method), *args)

    async def __del__(self) -> None:
        """Stop; Serve calls it, also after a constructor that failed half-way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # that of batches leaves them to other routers
        if self._metrics is not None:
            self._metrics.close()
        for name in ("_fleet", "_channel"):
            if hasattr(self, name):
                await getattr(self, name).stop()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        if self._tracing is not None:
            await self._tracing.stop()

    def _listen(self, handle: DeploymentHandle, leases: RayLeases) -> None:
        """Follow the running replicas. This makes Serve's router of the handle, before the first request."""
        loop = asyncio.get_running_loop()
        deployment = ray_leases.key(handle.app_name, handle.deployment_name)

        def set_members(members: frozenset[str]) -> None:
            self._fleet.set_members(leases.set_members(deployment, handle, members))

        ray_leases.listen(deployment, functools.partial(_call_on, loop, set_members))
        handle.options(method_name="report")


def _call_on(
    loop: asyncio.AbstractEventLoop, set_members: Callable[[frozenset[str]], None], members: frozenset[str]
) -> None:
    loop.call_soon_threadsafe(set_members, members)


def _page_size(config: AppConfig) -> int:
    return config_of(config, roles_of(config)[0]).cache.page_size


def _recorder(config: AppConfig, router_id: str, fleet: Fleet) -> Recorder | None:
    """Return what records the requests of this router, if that is asked for."""
    if config.router.record is None:
        return None
    facts = {
        "model": config.model.name,
        "policy": config.router.policy,
        "objective_s": config.observability.ttft_objective_s,
        "scheduler": dataclasses.asdict(config.scheduler),
    }
    return Recorder(
        pathlib.Path(config.router.record),
        name=router_id,
        page_size=_page_size(config),
        max_bytes=config.router.record_bytes,
        facts=facts,
        filled_in_of=lambda name: {} if (info := fleet.info_of(name)) is None else info.filled_in,
    )


async def _elsewhere(peers: RouterPeers, router_id: str) -> dict[str, quotas.Told]:
    """Ask what keys have used at the other routers."""
    return {router: told for router, told in (await peers.used()).items() if router != router_id}


def _runner(config: AppConfig, service: Service, keys: KeyDigests, router_id: str) -> BatchRunner | None:
    """Return what runs batches in this router, if there is a folder for them."""
    if service.batches is None:
        return None
    return BatchRunner(
        service.batches,
        line_answers(service, keys),
        router_id=router_id,
        places=service.fleet.line_places,
        max_line_bytes=config.router.max_body_bytes,
        watch=service.dispatcher.watch,
    )


def _lost_error(replica_id: str) -> ReplicaGone:
    return ReplicaGone(f"replica {replica_id} died, or its connection was lost")


def _peers(config: AppConfig) -> RouterPeers:
    context = serve.get_replica_context()
    if (config.router.count or 1) == 1:
        return NoPeers()
    return RayPeers(app_name=context.app_name, deployment_name=context.deployment)


def _service(
    config: AppConfig,
    settings: dict[str, Any],
    dispatcher: Dispatcher,
    fleet: Fleet,
    leases: RayLeases,
    peers: RouterPeers,
    registry: CollectorRegistry,
) -> Service:
    return Service(
        model=read_face(config.model),
        tokenizer=Tokenizer(tokenizer_folder(config.model)),
        dispatcher=dispatcher,
        fleet=fleet,
        leases=leases,
        settings=shown_settings(config, settings),
        adapters=Adapters(
            config.adapters,
            model=config.model.name,
            fits=adaptable_weights(config.model) if config.adapters.served else None,
        ),
        peers=peers,
        streams=ResumableStreams(reconnect_s=config.router.reconnect_s, watch=dispatcher.watch),
        background=BackgroundStreams(
            kept_s=config.router.background_kept_s, timeout_s=config.router.background_timeout_s
        ),
        registry=registry,
        batches=batch_store(config.router.batch_folder, max_bytes=config.router.batch_bytes),
        max_file_bytes=config.router.batch_file_bytes,
        max_body_bytes=config.router.max_body_bytes,
        max_schema_bytes=config.router.max_schema_bytes,
        isolation=config.router.cache_isolation,
        body_timeout_s=config.router.body_timeout_s,
        tool_format=config.model.tool_format,
        reasoning_format=config.model.reasoning_format,
        version=VERSION,
    )


def shown_settings(config: AppConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what `/get_server_info` shows of the settings, as they were given and as they are."""
    return without_secrets(
        {
            **settings,
            "cache": dataclasses.asdict(config.cache),
            "scheduler": dataclasses.asdict(config.scheduler),
            "parallel": dataclasses.asdict(config.parallel),
            "router": config.router.shown(),
            "replicas": config.replicas.model_dump(),
            "mode": config.mode,
            "observability": config.observability.model_dump(),
            **_role_settings(config),
        }
    )


def _role_settings(config: AppConfig) -> dict[str, Any]:
    if config.mode == "unified":
        return {}
    return {
        "prefill": config.prefill.model_dump(),
        "decode": config.decode.model_dump(),
        "transfer": config.transfer.shown(),
    }
