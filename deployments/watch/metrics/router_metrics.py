"""All metrics of one router, as its settings want them.

Owns:   what is put together: events, figures, and what GET /metrics of the HTTP ingress shows.
Thread: made on the router's event loop.
"""

from prometheus_client import CollectorRegistry

from dashboards.metric import Process
from deployments.dispatch.following import RequestWatch, Unwatched
from deployments.fleet.fleet import Fleet
from deployments.settings.roles import config_of, roles_of
from deployments.settings.schema import AppConfig
from deployments.watch.metrics.emitter import Emitter, Identity
from deployments.watch.metrics.process import ServedMetrics, emitter_of
from deployments.watch.metrics.router_events import RouterEvents
from deployments.watch.metrics.router_figures import RouterFigures
from deployments.watch.metrics.server import MetricsServer

ROLE = "router"


class RouterMetrics:
    """With ``observability.metrics: false`` nothing is counted and no port is opened."""

    def __init__(self, config: AppConfig, *, router_id: str, fleet: Fleet) -> None:
        identity = Identity(model=config.model.name, role=ROLE, replica=router_id)
        self._settings = config.observability
        self._emitter: Emitter | None = None
        self.watch: RequestWatch = Unwatched()  # to be told of requests
        if self._settings.metrics:
            self._emitter = self._bind(config, identity, fleet)
        #  what a scrape through Serve's proxy may see: it meets any one of the routers
        self.shown: CollectorRegistry = emitter_of(Process.ROUTER, identity, disaggregated=False).registry
        if self._emitter is not None and config.router.count == 1:
            self.shown = self._emitter.registry

    def served(self, *, host: str, node_id: str, guard: bytes | None = None) -> ServedMetrics | None:
        """Over HTTP from now on, where they are on; ``guard``: as MetricsServer's.

        Raises: InvalidConfig when the port is taken.
        """
        if self._emitter is None:
            return None
        server = MetricsServer(host=host, port=self._settings.metrics_port, guard=guard)
        return ServedMetrics(self._emitter, server, node_id=node_id)

    def _bind(self, config: AppConfig, identity: Identity, fleet: Fleet) -> Emitter:
        apart = config.mode == "disaggregated"
        emitter = emitter_of(Process.ROUTER, identity, disaggregated=apart)
        self.watch = RouterEvents(
            emitter,
            ttft_objective_s=self._settings.ttft_objective_s,
            itl_objective_s=self._settings.itl_objective_s,
            disaggregated=apart,
        )
        page_size = config_of(config, roles_of(config)[0]).cache.page_size
        RouterFigures(emitter, fleet, page_size=page_size)
        return emitter
