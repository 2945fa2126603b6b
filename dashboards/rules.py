"""Recording and alert rules of Prometheus, built from the catalogue.

Owns:      names, thresholds and waiting times of alerts.
Invariant: an alert is of something that somebody can act on, and docs/runbook.md has a section of its name; each has a
           unit test that it fires when it should and not before.
"""

import re
from dataclasses import dataclass

from dashboards.query import (
    Kit,
    Query,
    QueryError,
    Where,
    absent,
    both,
    compare,
    complement,
    one_of,
    ratio,
    up,
    without,
)

JOB = "manta"
RUNBOOK = "docs/runbook.md"
OBJECTIVE = 0.95  # share of requests that shall meet their objective
BURN = 6.0  # times the budget: a month's is spent in five days
M5, M10, M20, H1 = (Kit(window=window, scoped=False) for window in ("5m", "10m", "20m", "1h"))
M15_AGO = Kit(window="5m", scoped=False, ago="15m")
L1 = {"tier": "L1"}
REPLICA = ("model", "role", "replica")
SUMMARY_LABEL = re.compile(r"\$labels\.(\w+)")


@dataclass(frozen=True, slots=True)
class Recording:
    """level:metric:operations, as Prometheus' documentation has it."""

    name: str
    query: Query


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    query: Query
    for_: str
    severity: str  # critical: requests fail or soon will; warning: look today
    summary: str  # may name {{ $labels.x }} of its query, and {{ $value }}

    def __post_init__(self) -> None:
        if unknown := set(SUMMARY_LABEL.findall(self.summary)) - self.query.labels:
            raise QueryError(f"{self.name}: its summary names {sorted(unknown)}, which {self.query} has not")

    @property
    def section(self) -> str:
        """Its heading in the runbook, as an anchor."""
        return f"{RUNBOOK}#{self.name.lower()}"


def _missed(kit: Kit, slo: str) -> Query:
    """Share of the judged requests that missed their objective."""
    return ratio(
        kit.rate("slo_requests_total", by=["model"], where={"slo": slo, "met": "false"}),
        kit.rate("slo_requests_total", by=["model"], where={"slo": slo}),
    )


def _burns(slo: str) -> Query:
    """Both the last hour and the last five minutes are far beyond the budget: it began, and it goes on."""
    bound = BURN * (1 - OBJECTIVE)
    return both(compare(_missed(M5, slo), ">", bound), compare(_missed(H1, slo), ">", bound), on=["model"])


def _ended(*outcomes: str) -> Query:
    """Share of the requests that ended so."""
    return ratio(
        M5.rate("requests_total", by=["model"], where={"outcome": one_of(*outcomes)}),
        M5.rate("requests_total", by=["model"]),
    )


def _accepting(*roles: str) -> Query:
    where: Where = {"state": "accepting", "target_role": one_of(*roles)}
    return M5.gauge("router_replicas", by=["model", "replica"], where=where)


def _vanished() -> Query:
    """Pools that were there 15 minutes ago, unless as many are there again, or the autoscaler took them away.

    Per replica, since absent() says nothing while one of several is left.
    """
    pools, roles = "kv_pool_capacity_tokens", ("model", "role")
    now = M5.gauge(pools, over="max", by=REPLICA, where=L1)
    gone = without(M15_AGO.gauge(pools, over="max", by=REPLICA, where=L1), now, on=REPLICA)
    as_many = compare(
        M5.gauge(pools, over="count", by=roles, where=L1), ">=", M15_AGO.gauge(pools, over="count", by=roles, where=L1)
    )
    fewer_wanted = compare(
        M20.increase("autoscaler_decisions_total", by=["model"], where={"direction": "down"}), ">", 0
    )
    return without(without(gone, as_many, on=roles), fewer_wanted, on=["model"])


def _index_stale() -> Query:
    """Much less is reused than was predicted, and what was predicted is more than a few tokens."""
    predicted = M10.rate("router_predicted_overlap_tokens_total", by=["model"])
    kept = ratio(M10.rate("router_actual_overlap_tokens_total", by=["model"]), predicted)
    return both(compare(kept, "<", 0.7), compare(predicted, ">", 10), on=["model"])


def _at_maximum() -> Query:
    roles = ("model", "target_role")
    running = M5.gauge("autoscaler_replicas", over="max", by=roles, where={"kind": "running"})
    maximum = M5.gauge("autoscaler_replicas", over="max", by=roles, where={"kind": "maximum"})
    pressed = compare(M5.gauge("autoscaler_pressure_ratio", over="max", by=roles), ">", 1)
    return both(pressed, compare(running, ">=", maximum), on=roles)


RECORDINGS = (
    Recording(
        "replica:manta_kv_pool_occupancy:ratio",
        complement(
            ratio(
                M5.gauge("kv_pool_tokens", by=REPLICA, where={**L1, "state": "free"}),
                M5.gauge("kv_pool_tokens", by=REPLICA, where=L1),
            )
        ),
    ),
    Recording(
        "model:manta_cache_hit_tokens:ratio_rate5m",
        ratio(M5.rate("cache_hit_tokens_total", by=["model"]), M5.rate("cache_lookup_tokens_total", by=["model"])),
    ),
    *(
        Recording(f"model:manta_{slo}_objective_missed:ratio_rate{kit.window}", _missed(kit, slo))
        for slo in ("ttft", "itl")
        for kit in (M5, H1)
    ),
)
ALERTS = (
    Alert(
        "NoRouter", absent(M5.gauge("build_info", where={"role": "router"})), "1m", "critical",
        "No router is scraped: nobody answers requests, or Prometheus does not find them.",
    ),
    Alert(
        "NoReadyReplica", compare(_accepting("unified", "decode"), "==", 0), "1m", "critical",
        "Router {{ $labels.replica }} knows no replica of {{ $labels.model }} that accepts requests.",
    ),
    Alert(
        "NoPrefillReplica",
        both(compare(_accepting("prefill"), "==", 0), compare(_accepting("decode"), ">", 0), on=["model", "replica"]),
        "1m", "warning",
        "{{ $labels.model }} has decode replicas and no prefill replica: they compute the prompts, and answers stall.",
    ),
    Alert(
        "TargetDown", compare(up(JOB), "==", 0), "1m", "warning",
        "{{ $labels.instance }} does not answer Prometheus.",
    ),
    Alert(
        "PoolVanished", _vanished(), "5m", "warning",
        "The pool of replica {{ $labels.replica }} ({{ $labels.role }}) is gone, and no other came for it.",
    ),
    Alert(
        "RequestErrors", compare(_ended("error", "timeout"), ">", 0.05), "5m", "critical",
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} end with an error or a timeout.",
    ),
    Alert(
        "RequestsShed", compare(_ended("shed"), ">", 0.05), "2m", "warning",
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} are refused: queues are too long.",
    ),
    *(
        Alert(
            f"{slo.capitalize()}ObjectiveBurn", _burns(slo), "2m", "warning",
            "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} miss the " + what + " objective.",
        )
        for slo, what in (("ttft", "first-token"), ("itl", "inter-token"))
    ),
    Alert(
        "AutoscalerAtMaximum", _at_maximum(), "10m", "warning",
        "{{ $labels.target_role }} replicas of {{ $labels.model }} are at their maximum, and the load asks for more.",
    ),
    Alert(
        "KvPoolNearlyFull",
        compare(M5.gauge("kv_pool_utilization_ratio", over="max", by=REPLICA, where=L1), ">", 0.95), "2m", "warning",
        "{{ $value | humanizePercentage }} of the KV pool of {{ $labels.replica }} cannot be had by new requests.",
    ),
    Alert(
        "RetractionsHigh",
        compare(
            ratio(
                M5.rate("scheduler_retracted_tokens_total", by=REPLICA),
                M5.rate("scheduler_tokens_total", by=REPLICA),
            ),
            ">", 0.1,
        ),
        "5m", "warning",
        "{{ $labels.replica }} gives up {{ $value | humanizePercentage }} as many tokens as it computes: its pool is "
        "too small for what runs.",
    ),
    Alert(
        "KvTransferFailures",
        compare(
            ratio(
                M5.rate("transfers_total", by=["model"], where={"direction": "receive", "outcome": "failed"}),
                M5.rate("transfers_total", by=["model"], where={"direction": "receive"}),
            ),
            ">", 0.05,
        ),
        "5m", "warning",
        "{{ $value | humanizePercentage }} of the hand-offs of {{ $labels.model }} fail; prompts are computed twice.",
    ),
    Alert(
        "KvTransferDamaged", compare(M10.increase("transfer_digest_mismatches_total", by=REPLICA), ">", 0), "0s",
        "critical",
        "{{ $labels.replica }} received K/V that is not what was sent. It was not used.",
    ),
    Alert(
        "QuarantineDoesNotEnd",
        compare(M5.gauge("transfer_oldest_drain_seconds", over="max", by=REPLICA), ">", 300), "1m", "warning",
        "A failed hand-off has kept pages of {{ $labels.replica }} for {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "RouterIndexStale", _index_stale(), "10m", "warning",
        "Only {{ $value | humanizePercentage }} of the reuse that routers of {{ $labels.model }} predict comes true.",
    ),
    Alert(
        "RouterReportsOld",
        compare(M5.gauge("router_report_age_seconds", over="max", by=["model", "target"]), ">", 30), "1m", "warning",
        "The routers' newest report of replica {{ $labels.target }} is {{ $value | humanizeDuration }} old.",
    ),
)  # fmt: skip


def document(docs: str = "") -> dict[str, object]:
    """The content of the rules file; ``docs`` is put before the runbook's path in the alerts' runbook_url."""
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.query.text,
            "for": alert.for_,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "runbook_url": docs + alert.section},
        }
        for alert in ALERTS
    ]
    recordings = [{"record": each.name, "expr": each.query.text} for each in RECORDINGS]
    return {"groups": [{"name": "manta-recordings", "rules": recordings}, {"name": "manta-alerts", "rules": alerts}]}
