"""How fast the fleet of a recording was: the durations of steps that explain what its requests took.

Owns:      the fit of StepTime and of the way to a replica.
Never:     looks at a clock; needs anything but the recording.

A request's decode took the steps that made its tokens, and each of those also made a token for every request that ran
beside it, and computed what was being prefilled there. So for a request with ``o`` tokens that decoded for ``D``
seconds while its replica made ``R`` tokens and computed ``P`` tokens of prompts,

    D = base_s (o - 1) + row_s R + prompt_token_s P,      and for its prefill, of m steps:  base_s m + row_s R' + ...

``R`` and ``P`` follow from the times of all requests of the replica, each taken as even over its own interval. Least
squares over all requests, weighted by 1 / sqrt(D), no coefficient below zero.

Machines are not always as fast: what else runs on them comes and goes. Each ``PACE_S`` of the recording has its own
pace, by which steps took longer or shorter than the fit over all says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import percentile
from benchmarks.recorded import Recording, Seen
from benchmarks.sim_engine import Build, StepTime
from replicas.config import SchedulerConfig

Floats = npt.NDArray[np.float64]
LEAST_S = 1e-4  # the recording's grain
PACE_S, PACE_ROUNDS = 10.0, 5
CPU_CHUNK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """The speed of the replicas of a recording."""

    step: StepTime
    pace: tuple[float, ...]  # by which steps are longer, in each PACE_S of the recording
    way_s: float  # from arrival to the engine, where nothing waits
    num_requests: int  # that were fitted
    error: float  # median of |fitted / measured - 1| over them


@dataclass(frozen=True, slots=True)
class _Spans:
    """Amounts, each spread evenly over an interval of time."""

    begin_s: Floats
    end_s: Floats
    amount: Floats

    def within(self, begin_s: Floats, end_s: Floats) -> Floats:
        """Return how much of all falls into each of other intervals."""
        at_s = np.concatenate([self.begin_s, self.end_s])
        slopes = np.concatenate([self.amount, -self.amount]) / np.tile(self.end_s - self.begin_s, 2)
        order = np.argsort(at_s, kind="stable")
        at_s, rate = at_s[order], np.cumsum(slopes[order])
        total = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(at_s))])
        inside: Floats = np.interp(end_s, at_s, total) - np.interp(begin_s, at_s, total)
        return inside


def calibrate(recording: Recording) -> Calibrated:
    """Fit the steps. Raises: ValueError with too few requests."""
    fitted = [seen for seen in recording.requests if seen.ttft_s is not None and seen.told["n"] == 1]
    if len(fitted) < 10:
        raise ValueError(f"{len(fitted)} requests of the recording were answered whole; 10 are needed to calibrate")
    by_replica: dict[str, list[Seen]] = {}
    for seen in fitted:
        by_replica.setdefault(seen.told["model_replica"], []).append(seen)
    chunk = int(settings_of(recording)["chunked_prefill_size"])
    parts = [_equations(each, chunk=chunk) for each in by_replica.values()]
    begin_s, terms, took_s = (np.concatenate(each) for each in zip(*parts, strict=True))
    if not len(took_s):
        raise ValueError("no request of the recording took long enough to calibrate")
    pace = np.ones(int((begin_s + took_s).max() // PACE_S) + 1)
    for _ in range(PACE_ROUNDS):
        paced = terms * _mean_pace(pace, begin_s, took_s)[:, None]
        rates = _nonnegative(paced / np.sqrt(took_s)[:, None], np.sqrt(took_s))
        ratio = took_s / (paced @ rates)
        pace *= _pace(begin_s, took_s, ratio, num=len(pace))
    one_step = ratio[terms[:, 0] == 1]
    spread = float(np.std(np.log(one_step))) if len(one_step) else 0.0
    base_s, row_s, prompt_token_s = rates.tolist()
    routes, queues = ([float(seen.told[name]) for seen in fitted] for name in ("route_s", "queue_s"))
    return Calibrated(
        step=StepTime(base_s=base_s, row_s=row_s, prompt_token_s=prompt_token_s, spread=spread),
        pace=tuple(pace.tolist()),
        way_s=percentile(routes, 50) + percentile(queues, 5),
        num_requests=len(fitted),
        error=float(np.median(np.abs(1 / ratio - 1))),
    )


def build_of(recording: Recording, found: Calibrated, *, queue: str | None, rate: float = 1.0) -> Build:
    """Return what its replicas were, with another order of the queue where ``queue`` names one.

    Args: rate: how many times as fast the recording is replayed.
    """
    sizes = list(recording.replicas.values())
    scheduler = SchedulerConfig(**settings_of(recording))
    longest = max(seen.input_len + seen.output_len for seen in recording.requests)
    return Build(
        step=found.step,
        pace=found.pace,
        pace_s=PACE_S / rate,
        way_s=found.way_s,
        page_size=recording.page_size,
        pool_pages=min(int(each["pool_pages"]) for each in sizes),
        max_running=min(int(each["max_running"]) for each in sizes),
        context_len=longest,
        scheduler=replace(scheduler, policy=queue) if queue else scheduler,
    )


def settings_of(recording: Recording) -> dict[str, Any]:
    """Return the scheduler's settings, with what the replicas filled in of those left open."""
    filled_in = [each.get("scheduler", {}) for each in recording.replicas.values()]
    return {"chunked_prefill_size": CPU_CHUNK, **_given(recording.facts["scheduler"]), **_given(filled_in[0])}


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _equations(requests: Sequence[Seen], *, chunk: int) -> tuple[Floats, Floats, Floats]:
    """Return of decodes, then of prefills, [2 n] when they began; [2 n, 3] steps, tokens of running requests, tokens of
    prompts; [2 n] seconds."""

    def of(*numbers: float) -> Floats:
        return np.array(numbers, dtype=np.float64)

    first_s = of(*(seen.arrival_s + (seen.ttft_s or 0.0) for seen in requests))
    decode_s = of(*(seen.told.get("itl_s", 0.0) * (seen.output_len - 1) for seen in requests))
    prefill_s = np.maximum(of(*(seen.told["prefill_s"] for seen in requests)), LEAST_S)
    uncached = of(*(seen.input_len - seen.told.get("cached_l1", 0) for seen in requests))
    steps = of(*(seen.output_len - 1 for seen in requests))
    decodes = _Spans(first_s, first_s + np.maximum(decode_s, LEAST_S), np.maximum(decode_s, LEAST_S))
    prefills = _Spans(first_s - prefill_s, first_s, uncached)
    begin_s, terms, took_s = [], [], []
    for spans, measured_s in ((decodes, decode_s), (prefills, prefill_s)):
        running = decodes.within(spans.begin_s, spans.end_s) / (spans.end_s - spans.begin_s)  # on average
        prompts = prefills.within(spans.begin_s, spans.end_s)
        count = steps
        if spans is prefills:
            count = np.ceil(np.maximum(prompts, 1) / np.where(running > 0, chunk / 2, chunk))
        known = measured_s >= 10 * LEAST_S
        terms.append(np.stack([count, count * running, prompts], axis=1)[known])
        took_s.append(measured_s[known])
        begin_s.append(spans.begin_s[known])
    return np.concatenate(begin_s), np.concatenate(terms), np.concatenate(took_s)


def _mean_pace(pace: Floats, begin_s: Floats, took_s: Floats) -> Floats:
    """Return the mean pace of each interval."""
    at_s, total = np.arange(len(pace) + 1) * PACE_S, np.concatenate([[0.0], np.cumsum(pace) * PACE_S])
    mean: Floats = (np.interp(begin_s + took_s, at_s, total) - np.interp(begin_s, at_s, total)) / took_s
    return mean


def _pace(begin_s: Floats, took_s: Floats, ratio: Floats, *, num: int) -> Floats:
    """Return by how much what was measured is longer than fitted in each of ``num`` stretches of time, where little
    was measured less."""
    at_s = np.arange(num, dtype=np.float64) * PACE_S
    measured, fitted = (
        _Spans(begin_s, begin_s + took_s, amount).within(at_s, at_s + PACE_S) for amount in (took_s, took_s / ratio)
    )
    return (measured + PACE_S / 4) / (fitted + PACE_S / 4)


def _nonnegative(terms: Floats, wanted: Floats) -> Floats:
    """Return the least squares' solution without what would be negative."""
    kept = list(range(terms.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(terms[:, kept], wanted, rcond=None)
        if found.min() >= 0:
            solution = np.zeros(terms.shape[1])
            solution[kept] = found
            return solution
        del kept[int(np.argmin(found))]
