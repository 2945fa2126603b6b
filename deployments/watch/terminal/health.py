"""Whether a running Manta is well: its figures, and a sentence for each trouble.

Owns:      the thresholds, which are those of the alerts (dashboards/prometheus/rules.yml). Alerts look back for
           minutes; here the latest requests of the state (at most 50) are judged.
Never:     asks or draws.
Invariant: what is not known is None, never 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.watch.terminal.table import count, percent, seconds, share
from deployments.watch.terminal.words import FAILED, RUNNING, TAKEN, outcome, short_id

MOST_MISSED = 0.3  # TtftObjectiveBurn, ItlObjectiveBurn
MOST_FAILED = 0.05  # RequestErrors, RequestsShed
MOST_USED = 0.95  # KvPoolNearlyFull
OLD_REPORT_S = 30.0  # RouterReportsOld
LEAST_ENDED = 5  # requests: of fewer, a share says nothing

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """What the settings ask for (observability); None where it is not known."""

    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFigure:
    """One figure of the first lines: its name, its value now and in words, and whether that is trouble."""

    name: str
    value: float | None
    text: str
    is_trouble: bool


def figures(state: State, objectives: Objectives) -> list[HealthFigure]:
    """Return the figures in the order in which they are shown."""
    totals, replicas = state["totals"], state["replicas"]
    ended = _ended(state)
    failed, missed_first, missed_gap = _failed(ended), *_missed(ended, objectives)
    gaps = sorted(gap for row in ended if (gap := tpot_s(row)) is not None)
    gap = gaps[len(gaps) // 2] if gaps else None
    used = totals["fullest_pool_ratio"]

    def of(name: str, value: float | None, write: Callable[[float | None], str], *, bad: bool = False) -> HealthFigure:
        return HealthFigure(name=name, value=value, text=write(value), is_trouble=bad)

    return [
        of("TTFT p50", totals["ttft_p50_s"], seconds, bad=missed_first > MOST_MISSED),
        of("TPOT p50", gap, seconds, bad=missed_gap > MOST_MISSED),
        of("output/s", total(each["rates"].get("decode_tokens_per_s") for each in _known(replicas)), count),
        of("cached", totals["reuse_ratio"], percent),
        of("failed", share(failed, len(ended)), percent, bad=_too_many(failed, ended)),
        of("waiting", total(map(waiting, replicas)), count),
        of("KV pool", used, percent, bad=used is not None and used > MOST_USED),
    ]


def troubles(state: State, objectives: Objectives) -> list[str]:
    """Return a sentence for each trouble, the worst first; none if all is well."""
    replicas, routers = state["replicas"], state["routers"]
    found: list[str] = []
    if not replicas:
        found.append("no replica yet: its weights are being loaded, or Serve cannot place it (see `serve status`)")
    elif not any(each["state"] == "accepting" for each in replicas):
        found.append("no replica accepts requests")
    wrong = [(each, trouble) for each in replicas if (trouble := trouble_of(each))]
    found += [f"{short_id(each['id'])} is {each['state']}: {trouble}" for each, trouble in wrong]
    found += [f"router {each['id']} does not answer" for each in routers if not each["answering"]]
    if not routers and replicas:
        found.append("no router runs")
    ended = _ended(state)
    failed, missed_first, missed_gap = _failed(ended), *_missed(ended, objectives)
    if _too_many(failed, ended):
        found.append(f"{failed} of the last {len(ended)} requests failed")
    if missed_first > MOST_MISSED:
        found.append(f"{percent(missed_first)} of the last requests miss TTFT {seconds(objectives.ttft_s)}")
    if missed_gap > MOST_MISSED:
        found.append(f"{percent(missed_gap)} of the last requests miss ITL {seconds(objectives.itl_s)}")
    return found


def warnings(state: State) -> list[str]:
    """Return a sentence for each thing that is not trouble yet, such as a replica that is being replaced."""
    replicas, requests = state["replicas"], state["requests"]
    ready, again = sum(each["state"] == "accepting" for each in replicas), sum(row["tries"] > 1 for row in requests)
    found = [f"{ready} of {len(replicas)} replicas accept requests"] if ready < len(replicas) else []
    return found + ([f"{again} of the last {len(requests)} requests were tried again elsewhere"] if again else [])


def trouble_of(replica: State) -> str:
    """Return what is wrong with a replica, in words; "" if nothing is."""
    age_s, used, tiers = replica.get("report_age_s"), used_ratio(replica), replica.get("tiers") or {}
    if replica.get("error"):
        return str(replica["error"])
    if replica["state"] == "unhealthy":
        return "Serve's health check failed"
    if tiers.get("wrong_pages"):
        return f"{tiers['wrong_pages']} pages from its lower tiers were wrong"
    if age_s is not None and age_s > OLD_REPORT_S:
        return f"its last report is {seconds(age_s)} old"
    return f"its KV pool is {percent(used)} in use" if used is not None and used > MOST_USED else ""


def used_ratio(replica: State) -> float | None:
    """Return the share of the device's pool that a new request cannot have."""
    pool = device_pool(replica)
    return None if pool is None else sum(pool[state] for state in TAKEN) / pool["capacity"]


def device_pool(replica: State) -> State | None:
    return next((pool for pool in replica.get("pools") or [] if pool["tier"] == "L1" and pool["capacity"]), None)


def waiting(replica: State) -> float | None:
    """Return the number of requests that do not run yet, those between two replicas among them."""
    if replica.get("waiting") is None:
        return None
    return sum(replica.get(name) or 0 for name in ("waiting", "preallocating", "receiving", "handing_off"))


def tpot_s(row: State) -> float | None:
    """Return the mean time of an output token after the first."""
    if row["ttft_s"] is None or row["total_s"] is None or row["output_tokens"] < 2:
        return None
    return float((row["total_s"] - row["ttft_s"]) / (row["output_tokens"] - 1))


def total(values: Any) -> float | None:
    """Sum the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _known(replicas: Sequence[State]) -> list[State]:
    return [each for each in replicas if each.get("rates")]


def _ended(state: State) -> list[State]:
    return [row for row in state["requests"] if outcome(row) != RUNNING]


def _failed(ended: Sequence[State]) -> int:
    return sum(outcome(row) in FAILED for row in ended)


def _too_many(failed: int, ended: Sequence[State]) -> bool:
    return len(ended) >= LEAST_ENDED and failed > MOST_FAILED * len(ended)


def _missed(ended: Sequence[State], objectives: Objectives) -> tuple[float, float]:
    """Return the shares of the requests that missed the objectives of TTFT and ITL; 0 where that is not known."""
    firsts = [row["ttft_s"] for row in ended if row["ttft_s"] is not None]
    gaps = [gap for row in ended if (gap := tpot_s(row)) is not None]
    return _above(firsts, objectives.ttft_s), _above(gaps, objectives.itl_s)


def _above(values: Sequence[float], objective: float | None) -> float:
    if objective is None or len(values) < LEAST_ENDED:
        return 0.0
    return sum(value > objective for value in values) / len(values)
