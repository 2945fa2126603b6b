"""docs/metrics.md, out of the catalogue.

Invariant: what the file says of a metric is what the catalogue says; a test compares the two.
"""

from dashboards.catalog import IDENTITY, METRICS, OPEN, POOL_STATES, STAGES, Kind, Metric, Process

HEADINGS = {
    Process.EVERY: "Every process",
    Process.REPLICA: "Replicas",
    Process.ROUTER: "Routers",
    Process.OBSERVATORY: "The observatory",
}
STATE_MEANS = {
    "free": "holds nothing",
    "evictable": "cached, and nobody uses it: goes as soon as room is needed",
    "protected": "cached, and some request uses it",
    "reserved": "taken by requests and not in the cache: what running requests are writing, the unused end of a last "
    "page, and what a hand-off under way will fill",
    "quarantined": "of a failed hand-off whose sender might still write there; nobody may have it",
}
STAGE_MEANS = {
    "route": "from the request's arrival until the try that answered it was sent: reading, tokenising, choosing, and "
    "earlier tries",
    "queue": "waiting at the replica, and the way to it and back; of a prompt that was handed over: waiting for row "
    "and pages at the decode replica (`phase=\"grant\"` of `manta_transfer_duration_seconds` is that part), and then "
    "in the prefill replica's queue",
    "prefill": "from the first step that computed some of its prompt to the first token",
    "transfer": "what is left of the way of its K/V when the prefill replica has computed the prompt, and the way to "
    "the replicas and back; 0 where nothing was handed over",
    "decode": "from the first token to the last",
}
INTRODUCTION = f"""\
# Metrics

Written by `python -m dashboards docs` from `dashboards/catalog.py`; change it there. What is not in the catalogue can
be neither emitted nor plotted.

Each replica and router, and the observatory, serves `/metrics` on a port of its own; Prometheus finds them all through
`/manta/sd` (`python -m dashboards export DIR` writes its settings), and `/manta/metrics` is all of them in one
answer. Every series carries {", ".join(f"`{label}`" for label in IDENTITY)} besides its own labels: `role` is unified,
prefill or decode for a replica, else router or observatory; `replica` names the process. Prometheus adds `job`,
`instance` and `node`. The series of a replica that left are removed. No label holds an id of a request, a tenant, or a
text.

Where a label's values are listed, a series exists for each of them from the first scrape, so that a rate is 0 before
the first event and not missing. *any* stands for values that are known only when the system runs. Times are in
seconds, shares between 0 and 1. A histogram adds `_bucket` (with `le`), `_sum` and `_count` to its name.

What to do when an alert fires stands in [runbook.md](runbook.md).
"""
RATIOS = """\
*Capacity* of a pool = free + evictable + protected + reserved + quarantined. *Utilisation*
(`manta_kv_pool_utilization_ratio`) counts what a new request cannot have: (protected + reserved + quarantined) /
capacity. *Occupancy* counts what holds anything: 1 - free / capacity. A full cache that nobody uses is 100 % occupied
and 0 % utilised, and that is as it should be.

Shares are made of two counters when they are asked for, never averaged: the reused share of prompts is
`sum(rate(manta_cache_hit_tokens_total[5m])) / sum(rate(manta_cache_lookup_tokens_total[5m]))`.
"""
STAGES_NOTE = "They follow one another without a gap, so they add up to the request's duration."


def markdown() -> str:
    """The whole file."""
    parts = [INTRODUCTION, "## What the words mean\n", "A token slot of a pool is in one of these states:\n"]
    parts.append(_list([(state, STATE_MEANS[state]) for state in POOL_STATES]))
    parts.append(RATIOS)
    parts.append("A finished request has spent its time in these stages:\n")
    parts.append(_list([(stage, STAGE_MEANS[stage]) for stage in STAGES]))
    parts.append(STAGES_NOTE + "\n")
    for process, heading in HEADINGS.items():
        of_process = [metric for metric in METRICS if metric.process is process]
        apart = [metric for metric in of_process if metric.disaggregated]
        parts += [f"## {heading}\n", _table([metric for metric in of_process if not metric.disaggregated])]
        if apart:
            parts += ["Only where prefill and decode are apart (`mode: disaggregated`):\n", _table(apart)]
    parts += ["## Buckets\n", _buckets()]
    return "\n".join(parts)


def _list(rows: list[tuple[str, str]]) -> str:
    return "".join(f"- `{name}`: {meaning}\n" for name, meaning in rows)


def _table(metrics: list[Metric]) -> str:
    rows = ["| metric | kind | labels and their values | what |", "|---|---|---|---|"]
    rows += [f"| `{each.full_name}` | {each.kind.value} | {_labels(each)} | {each.help} |" for each in metrics]
    return "\n".join(rows) + "\n"


def _labels(metric: Metric) -> str:
    said = [f"`{label}`: {', '.join(values) if values != OPEN else '*any*'}" for label, values in metric.labels.items()]
    return "; ".join(said) or "-"


def _buckets() -> str:
    """Upper bounds, each set once with the histograms that have it."""
    sets: dict[tuple[float, ...], list[str]] = {}
    for metric in METRICS:
        if metric.kind is Kind.HISTOGRAM:
            sets.setdefault(metric.buckets, []).append(f"`{metric.full_name}`")
    rows = ["| histograms | upper bounds |", "|---|---|"]
    rows += [f"| {', '.join(names)} | {' '.join(map(_number, bounds))} |" for bounds, names in sets.items()]
    return "\n".join(rows) + "\n"


def _number(bound: float) -> str:
    return f"{bound:.0f}" if bound >= 1000 else f"{bound:g}"
