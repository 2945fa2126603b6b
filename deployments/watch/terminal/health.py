"""Whether a running Manta is well, as the observatory says: its figures, and a sentence for each trouble.

Never:     asks, draws, or has a threshold of its own: the observatory decides by dashboards/alerts.py what is trouble.
Invariant: what is not known is None, never 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dashboards.alerts import PENDING
from dashboards.catalog import TAKEN
from deployments.watch.terminal.table import count, percent, seconds, share

MOST_ROWS, MOST_POINTS = 1000, 300  # kept of requests, and of the history
RECENT = 50  # requests that a warning looks at
_WRITTEN = {"seconds": seconds, "ratio": percent, "requests": count, "tokens/s": count}

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFigure:
    """One figure of the first lines: its name, its value in words, its last minutes, and whether it is trouble."""

    name: str
    text: str
    line: list[float | None]  # a point a second, the newest last
    is_trouble: bool


def merged(before: State | None, answer: State) -> dict[str, Any]:
    """Return ``answer``, which has only what is new of requests and history, with what ``before`` has of both; the
    newest request first."""
    kept = None if answer["whole"] else before
    rows = {row["rid"]: row for row in reversed(kept["requests"])} if kept else {}
    rows |= {row["rid"]: row for row in answer["requests"]}
    points = [*(kept["history"]["points"] if kept else []), *answer["history"]["points"]][-MOST_POINTS:]
    newest = sorted(rows.values(), key=lambda row: -row["time"])[:MOST_ROWS]
    return {**answer, "requests": newest, "history": {**answer["history"], "points": points}}


def figures(state: State) -> list[HealthFigure]:
    """Return the figures in the order in which they are shown."""
    names, points = state["history"]["names"], state["history"]["points"]
    return [
        HealthFigure(
            name=f"{each['title']}{' p50' if 'p50' in each['more'] else ''}",
            text=_text(each),
            line=[point[1 + names.index(each["series"][0])] for point in points],
            is_trouble=each["level"] in ("warning", "critical"),
        )
        for each in state["figures"]
    ]


def _text(figure: State) -> str:
    value, most = figure["value"], figure["most"]
    beyond = "> " if value is not None and most is not None and value >= most else ""
    return beyond + _WRITTEN[figure["unit"]](value)


def troubles(state: State) -> list[str]:
    """Return a sentence for each trouble, the worst first; none if all is well."""
    found = [each["summary"] for each in state["alerts"] if each["state"] != PENDING]
    if not state["replicas"]:
        found.append("no replica yet: its weights are being loaded, or Serve cannot place it (see `serve status`)")
    return found


def warnings(state: State) -> list[str]:
    """Return a sentence for each thing that is not trouble yet, such as a replica that is being replaced."""
    requests, (ready, wanted) = state["requests"][:RECENT], ready_of(state)
    again = sum(row["tries"] > 1 for row in requests)
    found = [each["summary"] for each in state["alerts"] if each["state"] == PENDING]
    found += [f"{ready} of {wanted} replicas accept requests"] if ready < wanted else []
    return found + ([f"{again} of the last {len(requests)} requests were tried again elsewhere"] if again else [])


def ready_of(state: State) -> tuple[int, int]:
    """Return how many replicas accept requests, and how many are wanted."""
    replicas, targets = state["replicas"], state["autoscaling"]["targets"]
    ready = sum(each["state"] == "accepting" for each in replicas)
    return ready, sum(each["desired"] for each in targets) if targets else len(replicas)


def used_ratio(replica: State) -> float | None:
    """Return the share of the device's pool that a new request cannot have."""
    pool = device_pool(replica)
    return None if pool is None else share(sum(pool[state] for state in TAKEN), pool["capacity"])


def device_pool(replica: State) -> State | None:
    return next((pool for pool in replica.get("pools") or [] if pool["tier"] == "L1" and pool["capacity"]), None)


def waiting(replica: State) -> float | None:
    """Return the number of requests that do not run yet, those between two replicas among them."""
    if replica.get("waiting") is None:
        return None
    return sum(replica.get(name) or 0 for name in ("waiting", "preallocating", "receiving", "handing_off"))
