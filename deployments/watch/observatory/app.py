"""``deployments.watch.observatory.app:build``: the observatory, a Serve application beside the one it watches.

Owns:      the parts and their life; the port of its own metrics, opened once a router has reported the model's name and
           that it serves metrics itself.
Never:     is on a request's way: when its one replica dies or hangs, requests go on, and Serve starts it again.
Thread:    Serve's event loop for this replica. Gauges are read on a scrape's thread, from lists that are replaced and
           never changed.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from dashboards.catalog import ROLES, Process
from deployments import logs
from deployments.http.access import browser_rules
from deployments.places import ask_nodes_directly
from deployments.tenancy.keys import KEY_VARIABLE, digest
from deployments.watch.metrics.emitter import Emitter, Identity, Value, emitter_of
from deployments.watch.metrics.server import MetricsServer, ServedMetrics
from deployments.watch.observatory import serve_details
from deployments.watch.observatory.actions import Actions
from deployments.watch.observatory.fan_in import fetch_text
from deployments.watch.observatory.http_app import make_app
from deployments.watch.observatory.page_files import read_files
from deployments.watch.observatory.parts import AdminKey, Parts
from deployments.watch.observatory.router_view import RouterView
from deployments.watch.observatory.settings import parse, with_key
from deployments.watch.observatory.state import State
from deployments.watch.observatory.trees import Trees
from deployments.watch.observatory.watch import RayRouters, Watch

log = logging.getLogger(__name__)
ROLE = "observatory"
MOST_CALLS = 128  # at once
STOP_S = 2.0
OPEN = f"asks for no key: there is no admin_key in args, and no {KEY_VARIABLE} where it was built"


@serve.ingress()  # the app is made by __serve_build_asgi_app__
class Observatory:
    """The HTTP ingress of the observatory's application, which polls from its first second."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        logs.into_serve()
        ask_nodes_directly()
        settings = parse(args)
        self._id = serve.get_replica_context().replica_id.unique_id
        self._state = State(
            on_scaling=self._scaled,
            on_death=self._died,
            has_key=settings.key is not None,
            grafana_url=settings.grafana_url,
        )
        self._routers = RayRouters(settings.application)
        self._looks = serve_details.Looks(settings.application)
        self._settings = settings
        self._key = AdminKey(settings.key)
        self._listens_on = await asyncio.to_thread(serve_details.listens_on)
        log.info("%s", "asks for the admin key" if self._key.is_set else OPEN)
        self._emission: Emission | None = None
        self._metrics: ServedMetrics | None = None
        watch = Watch(
            routers=self._routers,
            look=self._looks.look,
            state=self._state,
            on_poll=self._polled,
            on_view=self._serve_metrics,
            keep=functools.partial(serve_details.write_kept, settings.application),
        )
        watch.restore(await asyncio.to_thread(serve_details.read_kept, settings.application))
        self._watching = asyncio.create_task(watch.run())

    def __serve_build_asgi_app__(self) -> FastAPI:
        fetch = functools.partial(fetch_text, key=self._settings.key)
        return make_app(
            Parts(
                state=self._state,
                routers=self._routers,
                trees=Trees(self._routers, clock=time.monotonic, calendar=time.time),
                key=self._key,
                files=read_files(),
                own_target=lambda: None if self._metrics is None else self._metrics.target,
                clock=time.time,
                fetch=fetch,
            ),
            actions=Actions(
                find=self._looks.find,
                seen=self._state.merged.seen,
                ask=self._routers.ask_replica,
                fetch=fetch,
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
        if self._metrics is not None:
            return
        identity = Identity(model=view.model, role=ROLE, replica=self._id)
        emitter = emitter_of(Process.OBSERVATORY, identity, disaggregated=view.mode == "disaggregated")
        self._emission = Emission(
            emitter,
            targets=lambda: self._state.scaling.targets,
            num_viewers=lambda: self._state.num_viewers(time.monotonic()),
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

    def _died(self, role: str) -> None:
        if self._emission is not None:
            self._emission.died(role)


class Emission:
    """The observatory's own metrics: viewers, polls, deaths, and what the autoscaler wants and why."""

    def __init__(
        self, emitter: Emitter, *, targets: Callable[[], list[dict[str, Any]]], num_viewers: Callable[[], int]
    ) -> None:
        """``targets``: the autoscaler's, as the state shows them."""
        self._targets = targets
        self._num_viewers = num_viewers
        self._poll = emitter.histogram("observatory_poll_duration_seconds")
        self._deaths = {role: emitter.counter("replica_deaths_total", target_role=role) for role in ROLES}
        self._emitter = emitter
        emitter.counter("autoscaler_decisions_total", target_role="unified", direction="up")
        emitter.tell(["autoscaler_replicas", "autoscaler_pressure_ratio", "observatory_viewers"], self._read)

    def polled(self, took_s: float) -> None:
        self._poll.observe(took_s)

    def died(self, role: str) -> None:
        self._deaths[role].inc()

    def scaled(self, role: str, direction: str) -> None:
        self._emitter.counter("autoscaler_decisions_total", target_role=role, direction=direction).inc()

    def _read(self) -> Iterator[tuple[str, Mapping[str, str], Value]]:
        yield "observatory_viewers", {}, self._num_viewers()
        for target in self._targets():
            role = target["role"]
            for kind in ("running", "desired", "minimum", "maximum"):
                yield "autoscaler_replicas", {"target_role": role, "kind": kind}, target[kind]
            for signal, pressure in target["pressure"].items():
                if pressure is not None:
                    yield "autoscaler_pressure_ratio", {"target_role": role, "signal": signal}, pressure


def build(args: dict[str, Any]) -> Application:
    """Build the application. Raises: InvalidConfig."""
    settings = with_key(args)
    log_format = parse(settings).log_format
    deployment = serve.deployment(Observatory).options(
        name="Observatory",
        num_replicas=1,
        max_ongoing_requests=MOST_CALLS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=STOP_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        health_check_timeout_s=15,
        **logs.options(log_format),
    )
    application: Application = deployment.bind(settings)
    return application
