"""The figures of the live view (dashboards/alerts.py) and their history, and the counters that alerts are judged by.

Owns:      what came in the last WINDOW_S, the counters' growth over the last hour, and the points of the history.
Invariant: no growth is negative: a counter that went back belongs to a restarted source, and begins anew. Points are in
           order of time; if the calendar is set back, the history begins anew.
Thread:    the observatory's event loop.

A point is over the WINDOW_S before it. A point a second is kept for five minutes, and one in 15 s for an hour.
"""

import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dashboards.alerts import FIGURES, SERIES
from replicas.types import TallyCounts

DIGITS = 3
WINDOW_S = 30.0  # that a figure is over
RATE_S = 5.0  # that rates of tokens are over
FINE, COARSE, STEP_S = 300, 240, 15  # points kept; every STEP_S-th goes into the coarse history
MOST_TTFTS = 4096
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
Point = list[float | None]


def short(value: float) -> float:
    """Round to three significant digits; what JSON cannot express is 0."""
    if value == 0 or not math.isfinite(value):
        return 0.0
    return round(value, DIGITS - 1 - math.floor(math.log10(abs(value))))


def quantile(ranked: Sequence[float], share: float) -> float | None:
    """Return the value that ``share`` of ``ranked``, in order, does not exceed (nearest rank); None without values."""
    return ranked[max(math.ceil(share * len(ranked)) - 1, 0)] if ranked else None


def bucket_quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """Return a quantile from counts by bucket, as PromQL's histogram_quantile does: linear within a bucket."""
    rank, below = share * sum(counts), 0.0
    if not rank:
        return None
    for at, count in enumerate(counts):
        if count and below + count >= rank:
            if at == len(bounds):
                return bounds[-1]
            low = bounds[at - 1] if at else 0.0
            return low + (bounds[at] - low) * (rank - below) / count
        below += count
    return None


def bucket_share(bounds: Sequence[float], counts: Sequence[float], most: float) -> float | None:
    """Return the share of values that are ``most`` or less, in the way of `bucket_quantile`; None without values."""
    within = 0.0
    for low, high, count in zip((0.0, *bounds), bounds, counts, strict=False):
        within += count * min(max((most - low) / (high - low), 0.0), 1.0)
    return within / sum(counts) if any(counts) else None


class Growth:
    """What counters of several sources have grown by in all, and over the last seconds.

    A counter's key is (name, subject): the replica that it is of, or "" for the fleet, to which all routers add.
    """

    def __init__(self, *, step_s: float, kept_s: float) -> None:
        """``step_s``: between two samples, ``kept_s``: of which the oldest is."""
        self._step_s = step_s
        self._kept_s = kept_s
        self._read: dict[str, Mapping[str, float]] = {}  # source -> counters, as last read
        self._grown: dict[tuple[str, str], float] = {}
        self._samples: deque[tuple[float, dict[tuple[str, str], float]]] = deque()

    def take(self, source: str, counters: Mapping[str, float], *, subject: str = "") -> None:
        """Take the counters of a source; its first ones only tell where it begins."""
        before = self._read.get(source)
        self._read[source] = counters
        for name, value in counters.items():
            last = value if before is None else before.get(name, 0)
            if value != last:
                key = (name, subject)
                self._grown[key] = self._grown.get(key, 0) + (value - last if value >= last else value)

    def sample(self, now_s: float) -> None:
        """Keep the growth as of now, if the last sample is ``step_s`` old."""
        if not self._samples or now_s - self._samples[-1][0] >= self._step_s * 0.9:
            self._samples.append((now_s, dict(self._grown)))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= self._kept_s:
            self._samples.popleft()

    def over(self, name: str, window_s: float, now_s: float, *, subject: str = "") -> float:
        """Return a counter's growth over the last ``window_s``, or as much of it as has been seen."""
        grown = self._grown.get((name, subject), 0.0)
        if not grown or not self._samples:
            return grown
        at = bisect_right(self._samples, now_s - window_s, key=lambda sample: sample[0])
        return grown - self._samples[max(at - 1, 0)][1].get((name, subject), 0.0)

    def subjects(self, name: str) -> list[str]:
        """Return the subjects of which this counter has grown."""
        return [subject for each, subject in self._grown if each == name]

    def keep(self, sources: Collection[str]) -> None:
        """Forget all other sources, and what has grown of subjects that are none of these."""
        for gone in self._read.keys() - set(sources):
            del self._read[gone]
        lost = {key for key in self._grown if key[1] and key[1] not in sources}
        if lost:  # from the samples too: it begins at 0 should its subject come back
            for held in (self._grown, *(grown for _, grown in self._samples)):
                for key in lost & held.keys():
                    del held[key]

    def check(self) -> None:
        """Raises AssertionError if samples are out of order, or something has shrunk from one to the next."""
        for (then_s, old), (now_s, new) in itertools.pairwise(self._samples):
            assert then_s < now_s
            assert all(new[key] >= value for key, value in old.items() if key in new)


class Rates:
    """The rates per second of counters that are read with each report of a replica, over the last RATE_S."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[tuple[float, tuple[int, ...]]]] = {}

    def add(self, source: str, now_s: float, counters: tuple[int, ...]) -> bool:
        """Add a sample read at ``now_s``; one older than the last is ignored. Returns: whether it was added."""
        samples = self._samples.setdefault(source, deque())
        if samples and now_s <= samples[-1][0]:
            return False
        if samples and any(new < old for new, old in zip(counters, samples[-1][1], strict=True)):
            samples.clear()
        samples.append((now_s, counters))
        while len(samples) > 2 and now_s - samples[1][0] >= RATE_S:
            samples.popleft()
        return True

    def of(self, source: str) -> tuple[float, ...] | None:
        """Return the rates per second; None before the second sample."""
        samples = self._samples.get(source, deque())
        if len(samples) < 2:
            return None
        (first_s, first), (last_s, last) = samples[0], samples[-1]
        return tuple((new - old) / (last_s - first_s) for new, old in zip(last, first, strict=True))

    def keep(self, sources: Collection[str]) -> None:
        """Forget all sources but these."""
        for gone in self._samples.keys() - set(sources):
            del self._samples[gone]


class Recent:
    """First tokens of the last WINDOW_S, and the gaps between tokens; each event is added once."""

    def __init__(self) -> None:
        self._firsts: deque[tuple[float, float]] = deque(maxlen=MOST_TTFTS)  # when it came, after how long
        self._reused: deque[tuple[float, int, int]] = deque(maxlen=MOST_TTFTS)  # when, cached tokens, prompt tokens
        self._gaps: dict[str, TallyCounts] = {}  # router -> as last read
        self._grown: deque[tuple[float, tuple[float, ...], list[int]]] = deque()  # when, bounds, gaps by bucket

    def first_token(self, at_s: float, ttft_s: float) -> None:
        self._firsts.append((at_s, ttft_s))

    def reused(self, at_s: float, cached_tokens: int, prompt_tokens: int) -> None:
        self._reused.append((at_s, cached_tokens, prompt_tokens))

    def gaps(self, router: str, now: TallyCounts, now_s: float) -> None:
        """Take the gaps that a router has counted since its start."""
        before = self._gaps.get(router)
        self._gaps[router] = now
        if before is not None and before.bounds == now.bounds:
            grown = [new - old for new, old in zip(now.counts, before.counts, strict=True)]
            self._grown.append((now_s, now.bounds, grown))

    def keep(self, routers: Collection[str]) -> None:
        """Forget what all other routers have counted."""
        for gone in self._gaps.keys() - set(routers):
            del self._gaps[gone]

    def values(self, now_s: float) -> dict[str, float | None]:
        """Return the series that are made of this; forgets what is older."""
        since_s = now_s - WINDOW_S
        for events in (self._firsts, self._reused, self._grown):
            while events and events[0][0] <= since_s:
                events.popleft()
        ttfts = sorted(ttft_s for at_s, ttft_s in self._firsts if at_s > since_s)
        bounds, gaps = self._counted_gaps
        prompt_tokens, cached_tokens = self.tokens
        return {
            **{f"ttft_{name}": quantile(ttfts, share) for name, share in QUANTILES.items()},
            **{f"itl_{name}": bucket_quantile(bounds, gaps, share) for name, share in QUANTILES.items()},
            "hit": cached_tokens / prompt_tokens if prompt_tokens else None,
        }

    def met(self, objectives: Mapping[str, float], now_s: float) -> dict[str, float | None]:
        """Return by figure the share that met the objective, of the events whose quantiles `values` has."""
        ttfts, found = [ttft_s for at_s, ttft_s in self._firsts if at_s > now_s - WINDOW_S], dict[str, float | None]()
        if ttfts and (ttft_s := objectives.get("ttft_objective_s")) is not None:
            found["ttft"] = sum(each <= ttft_s for each in ttfts) / len(ttfts)
        if (itl_s := objectives.get("itl_objective_s")) is not None:
            found["itl"] = bucket_share(*self._counted_gaps, itl_s)
        return found

    @property
    def _counted_gaps(self) -> tuple[tuple[float, ...], list[int]]:
        """The bounds of the gaps' buckets, and how many are in each."""
        bounds = self._grown[-1][1] if self._grown else ()
        return bounds, [
            sum(each) for each in zip(*(grown for _, of, grown in self._grown if of == bounds), strict=True)
        ]

    @property
    def tokens(self) -> tuple[int, int]:
        """Prompt tokens whose reuse is known, and how many of them were cached."""
        return sum(each[2] for each in self._reused), sum(each[1] for each in self._reused)


class History:
    """The points of all series: FINE of the last seconds, and COARSE, one in STEP_S seconds."""

    def __init__(self) -> None:
        self._fine: deque[tuple[int, Point]] = deque(maxlen=FINE)  # version of the state, time and values
        self._coarse: deque[Point] = deque(maxlen=COARSE)

    def add(self, version: int, time_s: float, values: Mapping[str, float | None]) -> None:
        point: Point = [time_s, *(_shortened(values[name]) for name in SERIES)]
        if self._fine and time_s < (self._fine[-1][1][0] or 0.0):
            self._fine.clear()
            self._coarse.clear()
        self._fine.append((version, point))
        if not self._coarse or time_s - (self._coarse[-1][0] or 0.0) >= STEP_S - 0.5:
            self._coarse.append(point)

    def since(self, version: int) -> dict[str, Any]:
        """Return the points after a version of the state."""
        points = [point for number, point in self._fine if number > version]
        return {"names": list(SERIES), "step_s": 1, "points": points}

    def last(self, span_s: float) -> dict[str, Any]:
        """Return the points of the last ``span_s``, the coarse ones if the fine do not reach back so far."""
        fine = [point for _, point in self._fine]
        points, step_s = (fine, 1) if span_s <= FINE else (list(self._coarse), STEP_S)
        since_s = fine[-1][0] - span_s if fine and fine[-1][0] is not None else 0.0
        recent = [each for each in points if (each[0] or 0.0) > since_s]
        return {"names": list(SERIES), "step_s": step_s, "points": recent}

    def check(self) -> None:
        """Raises AssertionError if points are out of order."""
        for points in ([point for _, point in self._fine], list(self._coarse)):
            times = [point[0] or 0.0 for point in points]
            assert times == sorted(times)


def figures_body(
    values: Mapping[str, float | None],
    more: Mapping[str, Mapping[str, Any]],
    objectives: Mapping[str, float],
    levels: Mapping[str, str],
    met: Mapping[str, float | None],
) -> list[dict[str, Any]]:
    """Return the figures as the state shows them. ``more``, ``levels``, ``met`` (the share of what the value is of that
    met the objective): by figure, where there is some. A figure with an objective has the level of the value that it
    shows."""
    found = []
    for each in FIGURES:
        value, objective = _shortened(values[each.series[0]]), objectives.get(each.objective or "")
        own = {name.rpartition("_")[2]: _shortened(values[name]) for name in each.series}
        level = levels.get(each.name, "ok")
        if objective is not None:
            level = "ok" if value is None or value <= objective else "warning"
        found.append(
            {
                "name": each.name,
                "title": each.title,
                "unit": each.unit,
                "value": value,
                "more": more.get(each.name) or own,
                "most": each.most,
                "objective": objective,
                "met": _shortened(met.get(each.name)),
                "level": "idle" if value is None and level == "ok" else level,
                "series": list(each.series),
            }
        )
    return found


def _shortened(value: float | None) -> float | None:
    return None if value is None else short(value)
