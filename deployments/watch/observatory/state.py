"""What the observatory shows: one snapshot, and the delta that led to it.

Owns:      the state's parts, each fed once a second, and the form of a replica's row; README.md has the whole form.
Never:     polls (watch.py does), or holds a prompt's text.
Invariant: applied to the snapshot before it, each delta gives the snapshot after it (deltas.py).
Thread:    the observatory's event loop.

    routers' answers ─> merged ─┬─> replica rows, rates, pressures
    Serve's list ───────────────┘   rows of requests ─> totals, links          used pools ─> history
"""

from collections.abc import Callable, Sequence
from typing import Any

from deployments.channel.frames import ReplicaReport
from deployments.fleet.seen import SeenReplica
from deployments.watch.observatory.deltas import History, by_role, changes
from deployments.watch.observatory.merged import Merged, settings_of, shown_node
from deployments.watch.observatory.rates import Rates, short
from deployments.watch.observatory.requests import Requests
from deployments.watch.observatory.router_view import RouterView
from deployments.watch.observatory.scaling import Scaling
from deployments.watch.observatory.serve_details import ROUTER, Listed, ServeDetails
from replicas.types import EngineStats, PoolStats

SERVE_STATES = {"RUNNING": "starting", "STOPPING": "draining"}  # shown for a replica that no router sees; else starting
_RATES = ("prefill_tokens_per_s", "cached_tokens_per_s", "decode_tokens_per_s")
_NOTHING = dict.fromkeys(
    (
        "running", "running_limit", "waiting", "preallocating", "receiving", "handing_off", "queued_tokens",
        "prefill_tokens_per_s", "decode_step_s", "report_age_s", "cache_nodes",
    )
)  # fmt: skip


def counters_of(stats: EngineStats) -> tuple[int, int, int]:
    """Return the counters that `Rates` are made of."""
    return (stats.prefill_tokens, stats.cached_tokens, stats.decode_tokens)


def row_of(seen: SeenReplica, *, node: str, age_s: float | None, rates: Sequence[float] | None) -> dict[str, Any]:
    """Return the row of a replica that a router sees. Before its first report the numbers are null, without pools."""
    row = _bare(seen.replica_id, seen.role, node, seen.state)
    if seen.info is not None:
        row["page_size"] = seen.info.page_size
        row["attention"] = seen.info.attention
        row["attention_why"] = seen.info.attention_why
    if seen.report is not None and age_s is not None:
        row.update(_reported(seen.report, age_s))
    if rates is not None:
        row["rates"] = {name: short(rate) for name, rate in zip(_RATES, rates, strict=True)}
    return row


def row_of_listed(listed: Listed, *, node: str) -> dict[str, Any]:
    """Return the row of a replica that Serve has and no router sees: it is starting or leaving."""
    return _bare(listed.replica_id, listed.role, node, SERVE_STATES.get(listed.state, "starting"))


def used_ratio(seen: SeenReplica) -> float | None:
    """Return the share of its pool that a new request cannot have."""
    return None if seen.report is None else round(seen.report.stats.pool.utilization, 4)


def _bare(replica_id: str, role: str, node: str, state: str) -> dict[str, Any]:
    return {
        "id": replica_id,
        "role": role,
        "node": node,
        "state": state,
        "error": None,
        **_NOTHING,
        "pools": [],
        "tiers": None,
        "page_size": None,
        "attention": None,
        "attention_why": None,
        "rates": dict.fromkeys(_RATES, 0.0),
    }


def _reported(report: ReplicaReport, age_s: float) -> dict[str, Any]:
    stats = report.stats
    return {
        "error": report.error,
        "running": stats.num_running,
        "running_limit": stats.max_running_requests,
        "waiting": stats.num_waiting,
        "preallocating": stats.num_preallocating,
        "receiving": stats.num_receiving,
        "handing_off": stats.num_handing_off,
        "queued_tokens": stats.waiting_uncached_tokens,
        "prefill_tokens_per_s": short(stats.prefill_tokens_per_s),
        "decode_step_s": short(stats.decode_step_s),
        "report_age_s": round(age_s, 1),
        **_tiers(stats),
        "cache_nodes": stats.cache_nodes,
        "page_size": stats.pool.page_size,
    }


def _tiers(stats: EngineStats) -> dict[str, Any]:
    """Return the pools of device and host, and what the lower tiers have done."""
    tiers, device = stats.tiers, _pool(stats.pool)
    if tiers is None:
        return {"pools": [device]}
    size, used = stats.pool.page_size, tiers.host_used_pages
    host = {"tier": "L2", **dict.fromkeys(("protected", "reserved", "quarantined"), 0)}
    host |= {"capacity": tiers.host_pages * size, "free": (tiers.host_pages - used) * size, "evictable": used * size}
    told = {
        "host_hit_tokens": tiers.host_hit_tokens,
        "store_hit_tokens": tiers.store_hit_tokens,
        "saved_s": short(tiers.saved_s),
        "wrong_pages": tiers.host_wrong_pages + tiers.store_wrong_pages,
        "store_bytes": None if tiers.store is None else tiers.store_bytes,
        "store_error": tiers.store_error,
    }
    return {"pools": [device, host], "tiers": told}


def _pool(pool: PoolStats) -> dict[str, Any]:
    """Return the pool in tokens; the states sum to the capacity."""
    size = pool.page_size
    return {
        "tier": "L1",
        "capacity": pool.total_tokens,
        "free": pool.free_pages * size,
        "evictable": pool.evictable_pages * size,
        "protected": pool.protected_pages * size,
        "reserved": pool.reserved_pages * size,
        "quarantined": pool.quarantined_pages * size,
    }


PERIOD_S = 1.0
Age = float | None


class State:
    """What the observatory shows. Ages, rates and expiry go by ``now_s``; ``time_s``, seconds since 1970, is shown."""

    def __init__(self, *, on_scaling: Callable[[str, str], None] = lambda role, direction: None) -> None:
        self.merged = Merged()
        self.scaling = Scaling(on_scaling)
        self._rates = Rates()
        self._requests = Requests()
        self._history = History()
        self._body: dict[str, Any] = {
            "time": 0.0, "version": 0, "model": "", "mode": "unified", "period_s": PERIOD_S, "routers": [],
            "replicas": [], "links": [], "totals": self._totals({}, 0.0), "requests": [],
            "autoscaling": self.scaling.state,
        }  # fmt: skip

    def advance(
        self,
        views: Sequence[RouterView],
        details: ServeDetails,
        now_s: float,
        *,
        time_s: float | None = None,
        details_are_new: bool = True,
    ) -> dict[str, Any]:
        """Take the answers of one poll and the last look at Serve; return the delta.

        Args:   now_s: of a clock that never goes back; time_s: seconds since 1970, None if ``now_s`` is that too.
        """
        time_s = round(now_s if time_s is None else time_s, 3)
        rows = self.merged.take(views, details.replicas if details_are_new else None, now_s, time_s)
        seen = self.merged.replicas()
        self._requests.take(rows, now_s, time_s)
        self._requests.lose(self.merged.router_ids)
        self._sample(seen, now_s)
        latest = self.merged.latest
        if details_are_new:
            self._look_at_scaling(seen, details, time_s)
        used = {name: ratio for name, (each, _) in seen.items() if (ratio := used_ratio(each)) is not None}
        self._history.add(time_s, used)
        body = {
            "time": time_s,
            "version": self._body["version"] + 1,
            "model": self._body["model"] if latest is None else latest.model,
            "mode": self._body["mode"] if latest is None else latest.mode,
            "period_s": PERIOD_S,
            "routers": self.merged.routers,
            "replicas": self._replica_rows(seen, details),
            "links": self._requests.links(),
            "totals": self._totals(used, now_s),
            "requests": self._requests.rows(),
            "autoscaling": self.scaling.state,
        }
        delta = changes(self._body, body, used)
        self._body = body
        return delta

    @property
    def snapshot(self) -> dict[str, Any]:
        return {**self._body, "history": self._history.series()}

    @property
    def version(self) -> int:
        return int(self._body["version"])

    @property
    def replica_ids(self) -> list[str]:
        return [row["id"] for row in self._body["replicas"]]

    def knows(self, replica_id: str) -> bool:
        return replica_id in self.replica_ids

    def row(self, rid: str) -> dict[str, Any] | None:
        """Return the row of a request that is still shown."""
        return next((row for row in self._body["requests"] if row["rid"] == rid), None)

    def check(self) -> None:
        """Raises AssertionError if a part breaks its invariant, or a pool's states do not sum to its capacity."""
        for part in (self.merged, self._rates, self._requests, self._history):
            part.check()
        for row in self._body["replicas"]:
            for pool in row["pools"]:
                parts = ("free", "evictable", "protected", "reserved", "quarantined")
                assert sum(pool[part] for part in parts) == pool["capacity"], row

    def _sample(self, seen: dict[str, tuple[SeenReplica, Age]], now_s: float) -> None:
        for name, (each, age_s) in seen.items():
            if each.report is not None and age_s is not None:
                self._rates.add(name, now_s - age_s, counters_of(each.report.stats))
        self._rates.keep(seen.keys())

    def _look_at_scaling(self, seen: dict[str, tuple[SeenReplica, Age]], details: ServeDetails, time_s: float) -> None:
        stats: dict[str, list[Any]] = {}
        for each, _ in seen.values():
            if each.report is not None:
                stats.setdefault(each.role, []).append(each.report.stats)
        self.scaling.take(details, stats, settings_of(self.merged.latest), time_s)

    def _replica_rows(self, seen: dict[str, tuple[SeenReplica, Age]], details: ServeDetails) -> list[dict[str, Any]]:
        listed = {each.replica_id: each for each in details.replicas if each.role != ROUTER}
        rows = {}
        for name, each in listed.items():
            rows[name] = row_of_listed(each, node=shown_node(each.node_id))
        for name, (each_seen, age_s) in seen.items():
            node_id = each_seen.info.node_id if each_seen.info else listed[name].node_id if name in listed else ""
            rows[name] = row_of(each_seen, node=shown_node(node_id), age_s=age_s, rates=self._rates.of(name))
        return by_role(rows)

    def _totals(self, used: dict[str, float], now_s: float) -> dict[str, Any]:
        return {**self._requests.totals(now_s), "fullest_pool_ratio": max(used.values(), default=None)}
