"""The metrics of one router, as its settings want them: events, and what it knows of its replicas at each scrape.

Owns:      which of the fleet's numbers is which metric, and what GET /metrics of the HTTP ingress shows.
Never:     reads the fleet on the scrape's thread: the event loop is asked. If it stays busy for longer than ANSWER_S,
           the scrape shows the answer before.
Invariant: the series are of the current replicas: one that left is gone with the next scrape.
Thread:    made on the router's event loop, where `figures_of` runs; `read` runs on the scrape's.
"""

import asyncio
import concurrent.futures
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry

from dashboards.catalog import ROLES, Process
from deployments.fleet.fleet import Fleet
from deployments.record.route_log import OBJECTIVES
from deployments.settings.roles import config_of, roles_of
from deployments.settings.schema import AppConfig
from deployments.tenancy.quotas import Quotas
from deployments.tenancy.tenants import TenantKeys
from deployments.watch.metrics.emitter import Emitter, Identity, Value, emitter_of, tell_build
from deployments.watch.metrics.router_events import RouterEvents
from deployments.watch.metrics.server import MetricsServer, ServedMetrics

Told = tuple[str, Mapping[str, str], Value]
ANSWER_S = 2.0
STATES = ("starting", "accepting", "draining", "released", "silent", "unhealthy")
NAMES = (
    "router_index_tokens",
    "router_report_age_seconds",
    "router_cache_event_gaps_total",
    "router_cache_snapshots_total",
    "router_replicas",
)

TENANTS = ("router_keys_file_failed", "tenant_requests_total", "tenant_tokens_total")


class RouterFigures:
    """The metrics ``NAMES`` of one router, bound on its event loop."""

    def __init__(self, emitter: Emitter, fleet: Fleet, *, page_size: int) -> None:
        self._fleet = fleet
        self._page_size = page_size
        self._loop = asyncio.get_running_loop()
        self._last: Sequence[Told] = list(figures_of(fleet, page_size=page_size))
        emitter.tell(NAMES, self.read)

    def read(self) -> Sequence[Told]:
        if not self._loop.is_running():
            return self._last
        asking = self._now()
        try:
            asked = asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError:  # closed meanwhile
            asking.close()
            return self._last
        try:
            self._last = asked.result(ANSWER_S)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):  # busy, or ending
            asked.cancel()
        return self._last

    async def _now(self) -> Sequence[Told]:
        return list(figures_of(self._fleet, page_size=self._page_size))


def figures_of(fleet: Fleet, *, page_size: int) -> Iterator[Told]:
    """Read the fleet as it is now."""
    for target, (confirmed, expected) in fleet.cache_pages().items():
        yield "router_index_tokens", {"target": target, "source": "confirmed"}, confirmed * page_size
        yield "router_index_tokens", {"target": target, "source": "expected"}, expected * page_size
    for target, age_s in fleet.report_ages_s().items():
        yield "router_report_age_seconds", {"target": target}, age_s
    replicas = Counter((each.role, each.state) for each in fleet.seen())
    for role in ROLES:
        for state in STATES:
            yield "router_replicas", {"target_role": role, "state": state}, replicas[role, state]
    yield "router_cache_event_gaps_total", {}, fleet.sync.num_gaps
    yield "router_cache_snapshots_total", {}, fleet.sync.num_snapshots


ROLE = "router"


class RouterMetrics:
    """All metrics of one router, and the port that serves them."""

    def __init__(self, config: AppConfig, *, router_id: str, fleet: Fleet, quotas: Quotas | None = None) -> None:
        identity = Identity(model=config.model.name, role=ROLE, replica=router_id)
        self._settings = config.observability
        self._objectives = {name: getattr(self._settings, name) for name in OBJECTIVES}
        self._emitter, self.watch = self._bind(config, identity, fleet)
        self._emitter.tell(TENANTS, (quotas if quotas is not None else Quotas(TenantKeys())).figures)
        # what a scrape through Serve's proxy may see: it reaches any one of the routers
        any_router = Emitter(Process.ROUTER, identity)
        tell_build(any_router)
        self.shown: CollectorRegistry = any_router.registry
        if (config.router.count or 1) == 1:
            self.shown = self._emitter.registry

    def served(self, *, host: str, node_id: str, guard: bytes | None = None) -> ServedMetrics:
        """Serve the metrics over HTTP; ``guard``: as MetricsServer's. Raises: InvalidConfig when the port is taken."""
        server = MetricsServer(host=host, port=self._settings.metrics_port, guard=guard)
        return ServedMetrics(self._emitter, server, node_id=node_id)

    def _bind(self, config: AppConfig, identity: Identity, fleet: Fleet) -> tuple[Emitter, RouterEvents]:
        """Make what emits the metrics, and what follows requests."""
        apart = config.mode == "disaggregated"
        bounds = {
            "time_to_first_token_seconds": self._objectives["ttft_objective_s"],
            "inter_token_latency_seconds": self._objectives["itl_objective_s"],
            "time_per_output_token_seconds": self._objectives["itl_objective_s"],
        }
        emitter = emitter_of(Process.ROUTER, identity, disaggregated=apart, objectives=bounds)
        watch = RouterEvents(emitter, objectives=self._objectives, disaggregated=apart)
        page_size = config_of(config, roles_of(config)[0]).cache.page_size
        RouterFigures(emitter, fleet, page_size=page_size)
        return emitter, watch
