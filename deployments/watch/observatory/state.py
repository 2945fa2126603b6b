"""What the observatory shows: the state, and what of it changed since a version (README.md has the form).

Owns:      the state's parts, each fed once a second; the form of a replica's row; the answers, made and compressed once
           for all viewers who ask alike.
Never:     polls (watch.py does), or holds a prompt's text.
Invariant: an answer's rows and points are those that changed after ``since``. Versions grow from life to life, so that
           one of another life asks for all.
Thread:    the observatory's event loop.

    routers' answers ─> merged ─┬─> replica rows, rates, pressures, readings ─┐
    Serve's list ───────────────┘   rows of requests ─> figures, links        ├─> alerts ─> levels of the figures
                                    counters ─> growth ───────────────────────┘
"""

import dataclasses
import gzip
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dashboards.alerts import FIRING
from dashboards.catalog import POOL_STATES, TAKEN
from deployments.channel.frames import ReplicaReport
from deployments.fleet.seen import SeenReplica
from deployments.places import VERSION
from deployments.watch.observatory.alerts import (
    Alerts,
    Reading,
    Readings,
    fleet_readings,
    growing_of,
    kv_transfers_of,
    replica_readings,
)
from deployments.watch.observatory.events import DEATHS, EventFeed, Names
from deployments.watch.observatory.figures import WINDOW_S, Growth, History, Rates, Recent, figures_body, short
from deployments.watch.observatory.merged import Merged, shown_node
from deployments.watch.observatory.requests import Requests
from deployments.watch.observatory.router_view import RouterView
from deployments.watch.observatory.scaling import Scaling
from deployments.watch.observatory.serve_details import ROUTER, Listed, ServeDetails
from replicas.types import AdapterStats, EngineStats, PoolStats, each_told

SERVE_STATES = {"RUNNING": "starting", "STOPPING": "draining"}  # shown for a replica that no router sees; else starting
_RATES = ("prefill_tokens_per_s", "cached_tokens_per_s", "decode_tokens_per_s")
_ROWS = {how.row: name for name, how in each_told(EngineStats) if how.row}
_NOTHING = dict.fromkeys((*_ROWS, "report_age_s"))


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
    row["error"] = seen.why or row["error"]
    if rates is not None:
        row["rates"] = {name: short(rate) for name, rate in zip(_RATES, rates, strict=True)}
    return row


def row_of_listed(listed: Listed, *, node: str) -> dict[str, Any]:
    """Return the row of a replica that Serve has and no router sees: it is starting or leaving."""
    return _bare(listed.replica_id, listed.role, node, SERVE_STATES.get(listed.state, "starting"))


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
        "adapters": None,
        "page_size": None,
        "attention": None,
        "attention_why": None,
        "rates": dict.fromkeys(_RATES, 0.0),
    }


def _reported(report: ReplicaReport, age_s: float) -> dict[str, Any]:
    stats = report.stats
    return {
        "error": report.error,
        **{row: _shown(getattr(stats, name)) for row, name in _ROWS.items()},
        "report_age_s": round(age_s, 1),
        **_tiers(stats),
        "adapters": _adapters(stats.adapters),
        **({"groups": [dataclasses.asdict(each) for each in stats.groups]} if len(stats.groups) > 1 else {}),
        "page_size": stats.pool.page_size,
    }


def _shown(value: float | str) -> float | str | None:
    """Return a number, shortened, or a text; None for none."""
    if isinstance(value, str):
        return value or None
    return short(value) if isinstance(value, float) else value


def _tiers(stats: EngineStats) -> dict[str, Any]:
    """Return the pools of device and host, and what the lower tiers have done."""
    tiers, device = stats.tiers, _pool(stats.pool)
    if tiers is None:
        return {"pools": [device]}
    size, used = stats.pool.page_size, tiers.host_used_pages
    host = {"tier": "L2", **dict.fromkeys(TAKEN, 0)}
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


def _adapters(adapters: AdapterStats | None) -> dict[str, Any] | None:
    """Return how many adapters a replica holds, and what they have cost; None where it has loaded none."""
    if adapters is None or not adapters.num_loads:
        return None
    return {
        "held": len(adapters.held),
        "bytes": adapters.num_bytes,
        "loads": adapters.num_loads,
        "load_s": short(adapters.load_s),
    }


def _pool(pool: PoolStats) -> dict[str, Any]:
    """Return the pool in tokens; the states sum to the capacity."""
    size = pool.page_size
    states = {state: getattr(pool, f"{state}_pages") * size for state in POOL_STATES}
    return {"tier": "L1", "capacity": pool.total_tokens, **states}


PERIOD_S = 1.0
LEVEL = 3  # of gzip: 0.3 ms for a second's changes
VIEWERS_S = 5.0  # over which polls are counted
MOST_ANSWERS = 64  # kept of one version
MOST_EVENTS = 8  # in an answer; all of the last hour are asked for apart
PAST_STEP_S, PAST_POINTS = 5.0, 60  # of each replica
MOST_PAST = 64  # replicas that have a past: an answer is small
Age = float | None
Seen = dict[str, tuple[SeenReplica, Age]]


class State:
    """What the observatory shows. Ages, rates and expiry go by ``now_s``; ``time_s``, seconds since 1970, is shown."""

    def __init__(
        self,
        *,
        on_scaling: Callable[[str, str], None] = lambda role, direction: None,
        on_death: Callable[[str], None] = lambda role: None,
        has_key: bool = False,
        grafana_url: str | None = None,
        first_version: int | None = None,
    ) -> None:
        """``has_key``: an admin key is set. ``first_version``: by default from the calendar, above any of an earlier
        life, since there is at most one a second."""
        self.merged = Merged()
        self.scaling = Scaling(on_scaling)
        self._rates = Rates()
        self._recent = Recent()
        self._requests = Requests(self._recent)
        self._history = History()
        self._fleet_growth = Growth(step_s=PERIOD_S, kept_s=3600.0)
        self._replica_growth = Growth(step_s=15.0, kept_s=600.0)
        self._names = Names()
        self._past = Past()
        self._alerts = Alerts(self._fleet_growth, self._replica_growth, self._names)
        self._answers = Answers()
        self._first = int(time.time()) if first_version is None else first_version
        self.feed = EventFeed(on_death, names=self._names, first=self._first)
        self._body: dict[str, Any] = {
            "time": 0.0, "version": self._first, "period_s": PERIOD_S, "model": "", "mode": "unified", "started": 0.0,
            "api": "/", "facts": {"version": VERSION, "grafana": grafana_url},
            "keys": {"admin": has_key},
            "figures": [], "alerts": [], "routers": [], "batches": [], "replicas": [], "links": [],
            "autoscaling": self.scaling.state, "events": [], "ended": [],
        }  # fmt: skip

    def advance(
        self,
        views: Sequence[RouterView],
        details: ServeDetails,
        now_s: float,
        *,
        time_s: float | None = None,
        details_are_new: bool = True,
    ) -> None:
        """Take the answers of one poll and the last look at Serve.

        Args:   now_s: of a clock that never goes back; time_s: seconds since 1970, None if ``now_s`` is that too.
        """
        time_s = round(now_s if time_s is None else time_s, 3)
        version = self._body["version"] + 1
        rows = self.merged.take(views, details.replicas if details_are_new else None, now_s, time_s)
        seen, latest = self.merged.replicas(), self.merged.latest
        objectives = {} if latest is None else latest.objectives
        self._requests.take(rows, now_s, time_s, version=version, objectives=objectives)
        for view in views:
            self._requests.progress(view.router_id, view.progress, version=version)
        self._requests.lose(self.merged.router_ids, version=version)
        self._count(views, seen, now_s)
        if details_are_new:
            self.feed.look(details, now_s, time_s)
            self._look_at_scaling(seen, details, time_s)
        replicas = self._replica_rows(seen, details)
        self._feed(replicas, seen, details, now_s, time_s)
        replicas = [row for row in replicas if not self.feed.died(row["id"])]  # Serve's list may be some seconds old
        self._past.add(replicas, time_s)
        values, more = self._measure(replicas, now_s)
        self._history.add(version, time_s, values)
        self._alerts.judge(self._readings(seen, replicas, now_s), now_s, time_s)
        known = self._body if latest is None else {"model": latest.model, "mode": latest.mode}
        alerts = self._alerts.body({"model": known["model"] or "the model", **_objective_words(objectives)}, now_s)
        levels = {alert["figure"]: alert["severity"] for alert in reversed(alerts) if alert["state"] == FIRING}
        self._body = self._body | {
            "time": time_s,
            "version": version,
            "model": known["model"],
            "mode": known["mode"],
            "started": details.started_s,
            "api": details.route_prefix,
            "facts": self._body["facts"] | _facts(seen),
            "figures": figures_body(values, more, objectives, levels, self._recent.met(objectives, now_s)),
            "alerts": alerts,
            "routers": self.merged.routers,
            "batches": self.merged.batches,
            "replicas": replicas,
            "links": self._requests.links(),
            "events": self.feed.body(most=MOST_EVENTS),
            "ended": self.feed.ended,
            "autoscaling": self.scaling.state,
        }
        self._answers.clear()

    def since(self, version: int = 0) -> dict[str, Any]:
        """Return the state, with the requests and points that changed after ``version``; all of them if it is 0, or not
        of this life."""
        whole = not self._first < version <= self.version
        after = 0 if whole else version
        changed = {"requests": self._requests.rows(after), "history": self._history.since(after)}
        if whole:
            changed["past"] = self._past.told()
        return {**self._body, "whole": whole, **changed}

    def answer(self, version: int, *, zipped: bool, now_s: float) -> bytes:
        """Return `since` as JSON, ``zipped`` by gzip."""
        return self._answers.get(version, lambda: self.since(version), zipped=zipped, now_s=now_s)

    def num_viewers(self, now_s: float) -> int:
        return self._answers.num_viewers(now_s)

    def history(self, span_s: float) -> dict[str, Any]:
        return self._history.last(span_s)

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
        return self._requests.row(rid)

    def check(self) -> None:
        """Raises AssertionError if a part breaks its invariant, or a pool's states do not sum to its capacity."""
        for part in (self.merged, self._requests, self._history, self._fleet_growth, self._replica_growth):
            part.check()
        for row in self._body["replicas"]:
            for pool in row["pools"]:
                assert sum(pool[state] for state in POOL_STATES) == pool["capacity"], row

    def _count(self, views: Sequence[RouterView], seen: Seen, now_s: float) -> None:
        """Take the counters of routers and replicas."""
        for view in views:
            self._fleet_growth.take(view.router_id, view.counts)
            if view.gaps is not None:
                self._recent.gaps(view.router_id, view.gaps, now_s)
        for name, (each, age_s) in seen.items():
            if each.report is not None and age_s is not None:
                stats = each.report.stats
                if self._rates.add(name, now_s - age_s, counters_of(stats)):  # an older report is no restart
                    self._fleet_growth.take(name, kv_transfers_of(stats))
                    self._replica_growth.take(name, growing_of(stats), subject=name)
        self._rates.keep(seen.keys())
        self._recent.keep(self.merged.router_ids)
        self._fleet_growth.keep(self.merged.router_ids | seen.keys())
        self._replica_growth.keep(seen.keys())
        self._fleet_growth.sample(now_s)
        self._replica_growth.sample(now_s)

    def _measure(self, replicas: list[dict[str, Any]], now_s: float) -> tuple[dict[str, Age], dict[str, Any]]:
        """Return the newest value of each series of the history, and what else the figures tell."""
        growth = self._fleet_growth
        ended, failed, shed = (growth.over(name, WINDOW_S, now_s) for name in ("requests", "failed", "shed"))
        lost = sum(growth.over(name, 300.0, now_s) for name in ("failed", "shed"))
        known = [row for row in replicas if row["running"] is not None and row["state"] != "silent"]
        used = {row["id"]: _used(row["pools"][0]) for row in known}
        running, waiting = (sum(row[name] for row in known) for name in ("running", "waiting"))
        values: dict[str, Age] = {
            **self._recent.values(now_s),
            **{
                name: sum(row["rates"][f"{of}_tokens_per_s"] for row in known) if known else None
                for name, of in {"output": "decode", "prefill": "prefill", "cached": "cached"}.items()
            },
            "errors": (failed + shed) / ended if ended else None,
            "shed": shed / ended if ended else None,
            "queue": waiting + sum(row["preallocating"] for row in known) if known else None,
            "running": running if known else None,
            "kv_max": max(used.values(), default=None),
            "kv_mean": sum(used.values()) / len(used) if used else None,
        }
        prompt_tokens, cached_tokens = self._recent.tokens
        more = {
            "hit": {"cached_tokens": cached_tokens, "prompt_tokens": prompt_tokens},
            "errors": {"count": round(lost), "requests_per_s": short(ended / WINDOW_S)},
            "queue": {"running": running, "tokens": sum(row["queued_tokens"] for row in known)},
            "kv": {
                "mean": short(values["kv_mean"] or 0.0),
                "replica": max(used, key=used.__getitem__, default=None),
                "without_room": sum(row["waiting"] + row["preallocating"] for row in known if row["blocked"] == "pool"),
            },
        }
        return values, more

    def _feed(
        self, replicas: list[dict[str, Any]], seen: Seen, details: ServeDetails, now_s: float, time_s: float
    ) -> None:
        """Tell the feed what there is."""
        unmet = {each.replica_id for each in details.replicas if each.state == "RUNNING"} - seen.keys()
        self.feed.take(
            [row for row in replicas if row["id"] not in unmet],
            self.merged.gone(),
            unmet=unmet,
            stalled=next((each["problem"] for each in self.merged.batches if each.get("problem")), ""),
            shed=lambda window_s: self._fleet_growth.over("shed", window_s, now_s),
            went_on=self._requests.went_on,
            now_s=now_s,
            time_s=time_s,
        )

    def _readings(self, seen: Seen, replicas: list[dict[str, Any]], now_s: float) -> Readings:
        ready = {row["role"] for row in replicas if row["state"] == "accepting"}
        found = fleet_readings(
            ready, routers=self.merged.routers, targets=self.scaling.targets, batches=self.merged.batches
        )
        for name, (each, age_s) in seen.items():
            for source, reading in replica_readings(each, age_s, self._names.name(name)).items():
                found.setdefault(source, {})[name] = reading
        for role, count in self.feed.deaths(now_s).items():
            if count >= DEATHS:
                found.setdefault("deaths", {})[role] = Reading(value=count, labels={"target_role": role})
        return found

    def _look_at_scaling(self, seen: Seen, details: ServeDetails, time_s: float) -> None:
        stats: dict[str, list[Any]] = {}
        for each, _ in seen.values():
            if each.report is not None:
                stats.setdefault(each.role, []).append(each.report.stats)
        settings = {} if self.merged.latest is None else self.merged.latest.autoscaling
        self.scaling.take(details, stats, settings, time_s)

    def _replica_rows(self, seen: Seen, details: ServeDetails) -> list[dict[str, Any]]:
        listed = {each.replica_id: each for each in details.replicas if each.role != ROUTER}
        rows = {}
        for name, each in listed.items():
            rows[name] = row_of_listed(each, node=shown_node(each.node_id))
        for name, (each_seen, age_s) in seen.items():
            node_id = each_seen.info.node_id if each_seen.info else listed[name].node_id if name in listed else ""
            rows[name] = row_of(each_seen, node=shown_node(node_id), age_s=age_s, rates=self._rates.of(name))
        begun = {name: each.started or math.inf for name, each in listed.items()}
        by_age = sorted(rows.values(), key=lambda row: (begun.get(row["id"], math.inf), row["id"]))
        self._names.take(by_age, self.feed.told)
        for name, row in rows.items():
            row["name"] = self._names.name(name)
            row["host"] = listed[name].address if name in listed else ""
        return sorted(rows.values(), key=lambda row: (row["role"], self._names.number(row["id"])))


class Past:
    """What each replica did in the last minutes, a point each PAST_STEP_S: for a page that is opened now."""

    def __init__(self) -> None:
        self._points: dict[str, deque[list[Age]]] = {}
        self._last_s = 0.0

    def add(self, replicas: Sequence[Mapping[str, Any]], time_s: float) -> None:
        if 0 <= time_s - self._last_s < PAST_STEP_S:
            return
        self._last_s = time_s
        rows = {row["id"]: row for row in replicas[:MOST_PAST]}
        self._points = {name: self._points.get(name) or deque(maxlen=PAST_POINTS) for name in rows}
        for name, row in rows.items():
            used = _used(row["pools"][0]) if row["pools"] else None
            own = [row["running"], row["waiting"], row["queued_tokens"], used]
            self._points[name].append([time_s, *own, *(row["rates"][rate] for rate in _RATES)])

    def told(self) -> dict[str, list[list[Age]]]:
        return {name: list(points) for name, points in self._points.items()}


class Answers:
    """The answers of one version of the state, as bytes, and how often they are asked for."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, bool], bytes] = {}
        self._asked: deque[float] = deque()

    def clear(self) -> None:
        self._made.clear()

    def get(self, since: int, make: Callable[[], dict[str, Any]], *, zipped: bool, now_s: float) -> bytes:
        self._asked.append(now_s)
        while now_s - self._asked[0] > VIEWERS_S:
            self._asked.popleft()
        if (since, zipped) not in self._made:
            if len(self._made) >= MOST_ANSWERS:
                self._made.clear()
            plain = json.dumps(make(), separators=(",", ":"), allow_nan=False).encode()
            self._made[since, zipped] = gzip.compress(plain, compresslevel=LEVEL) if zipped else plain
        return self._made[since, zipped]

    def num_viewers(self, now_s: float) -> int:
        """Return how many live views poll: the polls a second of the last VIEWERS_S. On any thread."""
        polls = sum(now_s - asked_s <= VIEWERS_S for asked_s in tuple(self._asked))
        return math.ceil(polls * PERIOD_S / VIEWERS_S)


def _used(pool: Mapping[str, Any]) -> float:
    """Return the share of a pool that a new request cannot take."""
    held: float = sum(pool[state] for state in TAKEN)
    return round(held / pool["capacity"], 4) if pool["capacity"] else 0.0


def _objective_words(objectives: Mapping[str, float]) -> dict[str, str]:
    return {name: f" of {1e3 * value:g} ms" if value < 1 else f" of {value:g} s" for name, value in objectives.items()}


def _facts(seen: Seen) -> dict[str, Any]:
    """Return what all replicas have in common, as the newest one tells it; nothing while none has told."""
    infos = [each.info for each, _ in seen.values() if each.info is not None]
    if not infos:
        return {}
    info = infos[-1]
    return {
        "dtype": info.dtype,
        "quantization": info.weights or None,
        "context_len": info.context_len,
        "page_size": info.page_size,
        "tp": info.tp,
        "device": "cpu" if info.kernels else "gpu",
        "attention": info.attention,
    }
