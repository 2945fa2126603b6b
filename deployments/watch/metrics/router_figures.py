"""What a router knows of its replicas, as its metrics, made at each scrape.

Owns:      which of the fleet's numbers is which metric.
Never:     reads the fleet from the scrape's thread: the event loop is asked, and while it is busy for longer than
           ANSWER_S the answer before is told.
Invariant: what is told is of the replicas that are members now: a series of one that left is gone with the next scrape.
Thread:    `read` the scrape's; `FleetFigures` are made on the router's event loop.
"""

import asyncio
import concurrent.futures
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dashboards.catalog import ROLES
from deployments.fleet.fleet import Fleet
from deployments.watch.metrics.emitter import Emitter, Value

ANSWER_S = 2.0
STATES = ("starting", "accepting", "draining", "unhealthy")
NAMES = (
    "router_index_tokens",
    "router_report_age_seconds",
    "router_cache_event_gaps_total",
    "router_cache_snapshots_total",
    "router_replicas",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """One moment."""

    index_tokens: Mapping[str, tuple[int, int]]  # replica -> confirmed, only expected
    report_age_s: Mapping[str, float]
    replicas: Mapping[tuple[str, str], int]  # (role, state) -> how many
    num_gaps: int
    num_snapshots: int


class RouterFigures:
    """Tells the metrics ``NAMES`` of one router. To be made on its event loop."""

    def __init__(self, emitter: Emitter, fleet: Fleet, *, page_size: int) -> None:
        self._fleet = fleet
        self._page_size = page_size
        self._loop = asyncio.get_running_loop()
        self._last = figures_of(fleet, page_size=page_size)
        emitter.tell(NAMES, self.read)

    def read(self) -> Iterator[tuple[str, Mapping[str, str], Value]]:
        now = self._ask()
        for target, (confirmed, expected) in now.index_tokens.items():
            yield "router_index_tokens", {"target": target, "source": "confirmed"}, confirmed
            yield "router_index_tokens", {"target": target, "source": "expected"}, expected
        for target, age_s in now.report_age_s.items():
            yield "router_report_age_seconds", {"target": target}, age_s
        for role in ROLES:
            for state in STATES:
                yield "router_replicas", {"target_role": role, "state": state}, now.replicas.get((role, state), 0)
        yield "router_cache_event_gaps_total", {}, now.num_gaps
        yield "router_cache_snapshots_total", {}, now.num_snapshots

    def _ask(self) -> FleetFigures:
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

    async def _now(self) -> FleetFigures:
        return figures_of(self._fleet, page_size=self._page_size)


def figures_of(fleet: Fleet, *, page_size: int) -> FleetFigures:
    """As of now."""
    seen = fleet.seen()
    return FleetFigures(
        index_tokens={
            target: (confirmed * page_size, expected * page_size)
            for target, (confirmed, expected) in fleet.cache_pages().items()
        },
        report_age_s=fleet.report_ages_s(),
        replicas=Counter((each.role, each.state) for each in seen),
        num_gaps=fleet.sync.num_gaps,
        num_snapshots=fleet.sync.num_snapshots,
    )
