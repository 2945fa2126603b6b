"""The observatory in a Ray Serve replica: the HTTP ingress of its application, polling from its first second.

Owns:      the parts and their life; the port of its own metrics, opened when a router has said what the model is called
           and that it serves its own.
Never:     is on a request's way.
Thread:    Serve's event loop for this replica.
"""

import asyncio
import functools
import logging
import time
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from dashboards.metric import Process
from deployments import logs
from deployments.http.browsers import browser_rules
from deployments.settings.keys import KEY_VARIABLE, digest
from deployments.watch.metrics.emitter import Identity
from deployments.watch.metrics.process import ServedMetrics, emitter_of
from deployments.watch.metrics.server import MetricsServer
from deployments.watch.observatory import ask_serve
from deployments.watch.observatory.admin_key import AdminKey
from deployments.watch.observatory.emission import Emission
from deployments.watch.observatory.fan_in import fetch_text
from deployments.watch.observatory.http_app import make_app
from deployments.watch.observatory.page_files import read_files
from deployments.watch.observatory.parts import Parts
from deployments.watch.observatory.routers import RayRouters
from deployments.watch.observatory.settings import parse
from deployments.watch.observatory.state import State
from deployments.watch.observatory.trees import Trees
from deployments.watch.observatory.view import RouterView
from deployments.watch.observatory.viewers import Viewers
from deployments.watch.observatory.watch import Watch

log = logging.getLogger(__name__)

ROLE = "observatory"
OPEN = f"open to everybody: there is no admin_key in args, and no {KEY_VARIABLE} where it was built"


@serve.ingress()  # the app is made by __serve_build_asgi_app__
class Observatory:
    """Made by app.py."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        logs.into_serve()
        settings = parse(args)
        self._id = serve.get_replica_context().replica_id.unique_id
        self._state = State(on_scaling=self._scaled)
        self._viewers = Viewers(lambda: self._state.snapshot)
        self._routers = RayRouters(settings.application)
        self._settings = settings
        self._key = AdminKey(settings.key)
        self._listens_on = await asyncio.to_thread(ask_serve.listens_on)
        log.info("%s", "asks for the admin key" if self._key.is_set else OPEN)
        self._emission: Emission | None = None
        self._metrics: ServedMetrics | None = None
        watch = Watch(
            routers=self._routers,
            look=functools.partial(ask_serve.ask, settings.application),
            state=self._state,
            viewers=self._viewers,
            on_poll=self._polled,
            on_view=self._serve_metrics,
        )
        self._watching = asyncio.create_task(watch.run())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(
            Parts(
                state=self._state,
                routers=self._routers,
                trees=Trees(self._routers, clock=time.monotonic, calendar=time.time),
                viewers=self._viewers,
                key=self._key,
                files=read_files(),
                own_target=lambda: None if self._metrics is None else self._metrics.target,
                clock=time.time,
                fetch=functools.partial(fetch_text, key=self._settings.key),
            ),
            browsers=browser_rules(
                listens_on=self._listens_on,
                has_keys=self._key.is_set,
                allowed_hosts=self._settings.allowed_hosts,
            ),
        )

    async def __del__(self) -> None:
        self._watching.cancel()
        if self._metrics is not None:
            self._metrics.close()

    def _serve_metrics(self, view: RouterView) -> None:
        if self._metrics is not None or view.target is None:
            return
        identity = Identity(model=view.model, role=ROLE, replica=self._id)
        emitter = emitter_of(Process.OBSERVATORY, identity, disaggregated=view.mode == "disaggregated")
        self._emission = Emission(
            emitter, targets=lambda: self._state.scaling.targets, num_viewers=lambda: self._viewers.num_open
        )
        guard = digest(self._settings.key) if self._settings.key else b"" if view.asks_for_key else None
        host, node_id = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        self._metrics = ServedMetrics(emitter, MetricsServer(host=host, guard=guard), node_id=node_id)

    def _polled(self, took_s: float) -> None:
        if self._emission is not None:
            self._emission.polled(took_s)

    def _scaled(self, role: str, direction: str) -> None:
        if self._emission is not None:
            self._emission.scaled(role, direction)
