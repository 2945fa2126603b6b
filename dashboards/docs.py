"""Writes docs/metrics.md from the catalogue, and the live view's page of the runbook from docs/runbook.md.

Invariant: the files say what they are made from; a test compares them.
"""

import html
import re
from pathlib import Path

from dashboards.catalog import IDENTITY, METRICS, OPEN, POOL_STATES, STAGES, Kind, Metric, Process

LOGIN = Path(__file__).parent / "ui" / "login.html"
HEADINGS = {
    Process.EVERY: "Every process",
    Process.REPLICA: "Replicas",
    Process.ROUTER: "Routers",
    Process.OBSERVATORY: "The observatory",
}
STATE_MEANS = {
    "free": "holds nothing",
    "evictable": "cached and unused: evicted when room is needed",
    "protected": "cached and in use by a request",
    "reserved": "taken by requests and not in the cache: tokens that running requests are writing, the unused end of a "
    "last page, and pages that a KV transfer will fill",
    "quarantined": "kept from use after a failed KV transfer, as its sender might still write there",
}
STAGE_MEANS = {
    "route": "from the request's arrival until the try that answered it was sent: reading, tokenising, choosing, "
    "and earlier tries",
    "queue": "waiting at the replica, and the way to it and back; for a prompt that is handed over: waiting for a row "
    "and pages at the decode replica (`phase=\"grant\"` of `manta_transfer_duration_seconds`), then in the prefill "
    "replica's queue",
    "prefill": "from the first step that computed part of its prompt to the first token",
    "transfer": "the rest of the K/V transfer after the prefill replica has computed the prompt, and the way to the "
    "replicas and back; 0 if nothing was handed over",
    "decode": "from the first token to the last",
}
INTRODUCTION = f"""\
# Metrics

Written by `python -m dashboards docs` from `dashboards/catalog.py`; change it there. A metric that is not in the
catalogue can be neither emitted nor plotted.

Every replica, every router and the observatory serve `/metrics` on a port of their own. Prometheus finds them all
through `/manta/sd` (`python -m dashboards export DIR` writes its settings); `/manta/metrics` returns all of them in one
answer. Every series carries {", ".join(f"`{label}`" for label in IDENTITY)} besides its own labels: `role` is unified,
prefill or decode for a replica, else router or observatory; `replica` names the process. Prometheus adds `job`,
`instance` and `node`. The series of a replica that left are removed. No label holds an id of a request, a tenant, or a
text.

If a label's values are listed, a series exists for each of them from the first scrape, so a rate is 0 before the first
event and not missing. *any* stands for values that are known only at run time. Times are in
seconds, shares between 0 and 1. A histogram adds `_bucket` (with `le`), `_sum` and `_count` to its name.

[runbook.md](runbook.md) says what to do when an alert fires.
"""
RATIOS = """\
*Capacity* of a pool = free + evictable + protected + reserved + quarantined. *Utilisation*
(`manta_kv_pool_utilization_ratio`, "in use" in the live view, the terminal and the boards) counts what a new request
cannot take: (protected + reserved + quarantined) / capacity. *Occupancy* counts every slot that is not free: 1 - free /
capacity. A full cache that no request uses is 100 % occupied and 0 % utilised, which is normal.

A share is computed from two counters when it is queried, never averaged: the reused share of prompts is
`sum(rate(manta_cache_hit_tokens_total[5m])) / sum(rate(manta_cache_lookup_tokens_total[5m]))`.
"""
STAGES_NOTE = "The stages follow one another without a gap, so they add up to the request's duration."


BUCKETS_NOTE = """\
A router adds its objectives (`observability.ttft_objective_s`, `observability.itl_objective_s`) to the bounds of the
three histograms that they are held against, so the share of requests that meets one is counted exactly.

With traces on, the buckets of `manta_time_to_first_token_seconds` and `manta_request_duration_seconds` carry exemplars:
the `trace_id` of a request whose trace is kept, one click from a slow dot to its trace. They are part of OpenMetrics,
which Prometheus asks each process for; it keeps them if it runs with `--enable-feature=exemplar-storage`.
`/manta/metrics`, which joins the answers of all processes, has none.
"""


def markdown() -> str:
    """Write the whole file."""
    parts = [INTRODUCTION, "## What the words mean\n", "A token slot of a pool is in one of these states:\n"]
    parts.append(_list([(state, STATE_MEANS[state]) for state in POOL_STATES]))
    parts.append(RATIOS)
    parts.append("The time of a finished request is divided into these stages:\n")
    parts.append(_list([(stage, STAGE_MEANS[stage]) for stage in STAGES]))
    parts.append(STAGES_NOTE + "\n")
    for process, heading in HEADINGS.items():
        of_process = [metric for metric in METRICS if metric.process is process]
        apart = [metric for metric in of_process if metric.disaggregated]
        on_gpu = [metric for metric in of_process if metric.gpu]
        always = [metric for metric in of_process if metric not in (*apart, *on_gpu)]
        parts += [f"## {heading}\n", _table(always)]
        if on_gpu:
            parts += ["Only on a GPU:\n", _table(on_gpu)]
        if apart:
            parts += ["Only with prefill and decode apart (`mode: disaggregated`):\n", _table(apart)]
    parts += ["## Buckets\n", BUCKETS_NOTE, _buckets()]
    return "\n".join(parts)


def _list(rows: list[tuple[str, str]]) -> str:
    return "".join(f"- `{name}`: {meaning}\n" for name, meaning in rows)


def _table(metrics: list[Metric]) -> str:
    rows = ["| metric | kind | labels and their values | meaning |", "|---|---|---|---|"]
    rows += [f"| `{each.full_name}` | {each.kind.value} | {_labels(each)} | {each.help} |" for each in metrics]
    return "\n".join(rows) + "\n"


def _labels(metric: Metric) -> str:
    said = [f"`{label}`: {', '.join(values) if values != OPEN else '*any*'}" for label, values in metric.labels.items()]
    return "; ".join(said) or "-"


def _buckets() -> str:
    """List each set of upper bounds once, with the histograms that have it."""
    sets: dict[tuple[float, ...], list[str]] = {}
    for metric in METRICS:
        if metric.kind is Kind.HISTOGRAM:
            sets.setdefault(metric.buckets, []).append(f"`{metric.full_name}`")
    rows = ["| histograms | upper bounds |", "|---|---|"]
    rows += [f"| {', '.join(names)} | {' '.join(map(_number, bounds))} |" for bounds, names in sets.items()]
    return "\n".join(rows) + "\n"


def _number(bound: float) -> str:
    return f"{bound:.0f}" if bound >= 1000 else f"{bound:g}"


def runbook_page(markdown: str) -> str:
    """Write the runbook as a page: headings with their anchors, paragraphs, code and emphasis. Its head is the login
    page's, but for the title."""
    names = set(re.findall(r"^## (\w+)$", markdown, re.MULTILINE))
    parts = []
    for block in re.split(r"\n{2,}|\n(?=#)|(?<=[a-z])\n(?=\*)", markdown.strip()):
        if heading := re.fullmatch(r"(#+) (.*)", block):
            level, title = len(heading[1]), heading[2]
            name = f'<a id="{title}"></a>' if title in names else ""  # a board knows an alert by its name alone
            parts.append(f'<h{level} id="{title.lower()}">{name}{html.escape(title)}</h{level}>')
        else:
            parts.append(f"<p>{_inline(block, names)}</p>")
    head = LOGIN.read_text().partition("<main")[0].replace("Manta: log in", "Manta: runbook")
    parts.insert(0, f'{head}<main class="runbook">\n<p><a href="./">Live view</a></p>')
    return "\n".join(parts) + "\n</main>\n</body>\n</html>\n"


def _inline(text: str, names: set[str]) -> str:
    text = html.escape(text, quote=False)
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
    text = re.sub(r"\*([^*\n]+)\*", r"<em>\1</em>", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    links = {name: f'<a href="#{name.lower()}">{name}</a>' for name in names}
    return re.sub(r"\b([A-Z]\w+)\b", lambda found: links.get(found[1], found[1]), text)
