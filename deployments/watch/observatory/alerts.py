"""Which alerts hold, by the conditions of dashboards/alerts.py, without another server.

Owns:      what a condition reads of reports, and since when each holds.
Invariant: an alert fires once its condition has held for as long as its rule wants, as in Prometheus, and ends with its
           condition. Until it fires it is pending or, where it is shown without waiting (`Alert.at_once`), seen.
Thread:    the observatory's event loop.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dashboards.alerts import ALERTS, FIGURES, FIRING, PENDING, REPLICA, SEEN, Alert, Grew, Over, Share, Stands
from dashboards.catalog import ROLES
from deployments.fleet.seen import SeenReplica
from deployments.watch.observatory.events import Names, short_name
from deployments.watch.observatory.figures import Growth
from replicas.types import EngineStats

OBJECTIVE_OF = {figure.name: figure.objective for figure in FIGURES if figure.objective}
SEVERITIES = ("critical", "warning")  # the worst first


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What is true of the fleet (""), a role or one replica now; ``labels`` are for an alert's words."""

    value: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)


Readings = Mapping[str, Mapping[str, Reading]]  # an `Over`'s source, or a `Stands`' reading -> subject -> reading


def kv_transfers_of(stats: EngineStats) -> dict[str, int]:
    """Return the counters that alerts about the fleet's KV transfers are judged by (dashboards.alerts.SOURCES)."""
    transfer = stats.transfer
    if transfer is None:
        return {}
    ended = transfer.receives_done + transfer.receives_failed
    return {"received": ended, "receive_failed": transfer.receives_failed}


def growing_of(stats: EngineStats) -> dict[str, int]:
    """Return the counters that alerts about one replica are judged by (dashboards.alerts.SOURCES)."""
    tiers, transfer = stats.tiers, stats.transfer
    return {
        "adapter_loads": 0 if stats.adapters is None else stats.adapters.num_loads,
        "finished": stats.num_finished + stats.num_aborted + stats.num_errors,
        "tokens": stats.prefill_tokens + stats.cached_tokens + stats.decode_tokens,
        "retracted": stats.retracted_tokens,
        "damaged": 0 if transfer is None else transfer.digest_mismatches,
        "failed_checks": stats.failed_checks,
        "failed_steps": stats.failed_steps,
        "wrong_pages": 0 if tiers is None else tiers.host_wrong_pages + tiers.store_wrong_pages,
    }


def fleet_readings(
    ready: Collection[str],
    *,
    routers: Sequence[Mapping[str, Any]],
    targets: Iterable[Mapping[str, Any]],
    batches: Iterable[Mapping[str, Any]] = (),
) -> dict[str, dict[str, Reading]]:
    """Return what is true of the fleet. ``ready``: roles that accept requests; ``routers``: as the state shows them;
    ``targets``: the autoscaler's; ``batches``: that routers run."""
    found: dict[str, dict[str, Reading]] = {}
    if silent := [router["id"] for router in routers if not router["answering"]]:
        more = f" (and {len(silent) - 1} more)" if silent[1:] else ""
        found["silent_router"] = {"": Reading(labels={"instance": f"router {silent[0]}{more}"})}
    if len(silent) == len(routers):
        found["no_router"] = {"": Reading()}
    elif not {"unified", "decode"} & set(ready):
        found["no_ready_replica"] = {"": Reading()}
    elif "decode" in ready and "prefill" not in ready:
        found["no_prefill_replica"] = {"": Reading()}
    for batch in batches:
        if problem := batch.get("problem"):
            labels = {"replica": batch["router"], "detail": f" ({problem})"}
            found["batches_stalled"] = {"": Reading(labels=labels)}
    for target in targets:
        pressure = max((each for each in target["pressure"].values() if each is not None), default=0.0)
        if pressure > 1 and target["running"] >= target["maximum"]:
            is_fixed = target["minimum"] >= target["maximum"]
            labels = {"target_role": target["role"], "detail": f" at {target['maximum']} (replicas.count)"}
            found.setdefault("too_few" if is_fixed else "at_maximum", {})[target["role"]] = Reading(labels=labels)
    return found


def replica_readings(seen: SeenReplica, age_s: float | None, name: str) -> dict[str, Reading]:
    """Return what is true of the replica ``name``, whose last report is ``age_s`` old."""
    found = {}
    if seen.state in ("silent", "unhealthy"):
        detail = f" ({name}, {short_name(seen.replica_id)}): {seen.why}"
        found[seen.state] = Reading(labels={"target_role": seen.role, "detail": detail})
    if seen.report is not None and age_s is not None:
        stats = seen.report.stats
        if seen.state != "silent":  # else they are what it was
            found["pool_used"] = Reading(value=stats.pool.utilization)
            found["pool_blocks"] = Reading(value=float(stats.blocked == "pool"))
        found["report_age_s"] = Reading(value=age_s)
        if stats.tiers is not None and stats.tiers.store_error is not None:
            found["store_off"] = Reading(labels={"detail": f": {stats.tiers.store_error}"})
        if stats.transfer is not None:
            found["drain_s"] = Reading(value=stats.transfer.oldest_drain_s)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A condition that holds, and since when by both clocks."""

    since_s: float
    since_time: float
    reading: Reading


class Alerts:
    """The alerts that are pending or fire. Durations go by ``now_s``, which never goes back."""

    def __init__(self, fleet: Growth, replicas: Growth, names: Names | None = None) -> None:
        """``fleet``: counters of the routers, ``replicas``: those of each replica."""
        self._names = names or Names()
        self._fleet = fleet
        self._replicas = replicas
        self._standing: dict[tuple[Alert, str], Standing] = {}
        self._averaged: dict[tuple[str, str], deque[tuple[float, float]]] = {}  # source, subject -> when, value

    def judge(self, readings: Readings, now_s: float, time_s: float) -> None:
        """Look at every condition once. ``time_s``: seconds since 1970, for what is shown."""
        before, self._standing = self._standing, {}
        for alert in ALERTS:
            for subject, reading in self._true(alert, readings, now_s):
                held = before.get((alert, subject)) or Standing(since_s=now_s, since_time=time_s, reading=reading)
                self._standing[alert, subject] = replace(held, reading=reading)

    def body(self, labels: Mapping[str, str], now_s: float) -> list[dict[str, Any]]:
        """Return the alerts as the state shows them, the worst first. ``labels``: of the whole application."""
        rows = [
            {
                "name": alert.name,
                "severity": alert.severity,
                "state": FIRING if now_s - held.since_s >= alert.for_s else SEEN if alert.at_once else PENDING,
                "since": held.since_time,
                "summary": summary(alert, held.reading, labels, self._names.called(subject)),
                "runbook": f"runbook#{alert.name.lower()}",
                "figure": alert.figure,
                "replica": None if subject in ("", *ROLES) else subject,
            }
            for (alert, subject), held in self._standing.items()
        ]
        return sorted(rows, key=lambda row: (row["state"] == PENDING, SEVERITIES.index(row["severity"]), row["since"]))

    def _true(self, alert: Alert, readings: Readings, now_s: float) -> Iterator[tuple[str, Reading]]:
        """Yield whom the condition holds of."""
        when = alert.when
        if isinstance(when, Share):
            yield from self._shares(when, now_s)
        elif isinstance(when, Grew):
            for subject in self._replicas.subjects(when.source):
                grown = self._replicas.over(when.source, when.minutes * 60, now_s, subject=subject)
                if grown > 0:
                    yield subject, Reading(value=grown)
        elif isinstance(when, Over):
            for subject, reading in self._means(when, readings.get(when.source, {}), now_s):
                if reading.value > when.bound:
                    yield subject, reading
        elif isinstance(when, Stands) and when.reading is not None:
            yield from readings.get(when.reading, {}).items()

    def _means(self, when: Over, readings: Mapping[str, Reading], now_s: float) -> Iterable[tuple[str, Reading]]:
        """Return the readings, each with its average over the window where ``when`` has one."""
        if not when.minutes:
            return readings.items()
        for key in [key for key in self._averaged if key[0] == when.source and key[1] not in readings]:
            del self._averaged[key]
        means = {}
        for subject, reading in readings.items():
            values = self._averaged.setdefault((when.source, subject), deque())
            values.append((now_s, reading.value))
            while now_s - values[0][0] > when.minutes * 60:
                values.popleft()
            means[subject] = replace(reading, value=sum(value for _, value in values) / len(values))
        return means.items()

    def _shares(self, when: Share, now_s: float) -> Iterator[tuple[str, Reading]]:
        growth = self._replicas if when.by == REPLICA else self._fleet
        for subject in growth.subjects(when.of):
            shares = []
            for minutes in when.minutes:
                part, of = (growth.over(name, minutes * 60, now_s, subject=subject) for name in (when.part, when.of))
                if of > when.least_per_s * minutes * 60:
                    shares.append(part / of)
            bad = [share < when.bound if when.below else share > when.bound for share in shares]
            if len(bad) == len(when.minutes) and all(bad):
                yield subject, Reading(value=shares[0])


def summary(alert: Alert, reading: Reading, labels: Mapping[str, str], called: str) -> str:
    """Write an alert's sentence, with its numbers. ``called``: the replica that it is about, if it is about one."""
    words = {
        "share": f"{reading.value:.0%}".replace("%", " %"),
        "duration": f"{reading.value:.0f} s",
        "replica": called,
        "target": called,
        "detail": labels.get(OBJECTIVE_OF.get(alert.figure or "", ""), ""),
        "tier": "a lower tier",
        **labels,
        **reading.labels,
    }
    return alert.summary.format(**words)
