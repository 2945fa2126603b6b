"""What the router predicts against what comes, over the benchmarks' workloads: real scheduler, reports and estimate."""

import itertools
import math
from statistics import median

from benchmarks.serving import SHAPES
from benchmarks.workloads import Workload, random_lengths
from tests.timed_fleet import TimedFleet

BAR = 0.5  # |log2(measured / predicted)|, at the median


def workloads(num: int) -> list[Workload]:
    """The three of `python -m benchmarks serving`, and prompts whose step costs more than their tokens."""
    three = [shape.make(num // 5 if shape.file == "multi_turn" else num, 1) for shape in SHAPES]
    return [*three, random_lengths(num_requests=num, input_len=8, output_len=16, vocab_size=1_000, seed=1)]


def errors(num: int, *, at_once: int, think_s: float) -> list[list[float]]:
    """Of each workload with ``num`` requests, the errors of the predictions, once rates are measured."""
    fleet, found = TimedFleet(), []
    measure = random_lengths(num_requests=20, input_len=300, output_len=20, vocab_size=1_000, seed=2)
    fleet.run(measure, at_once=2, think_s=0.0)
    for workload in workloads(num):
        asked = fleet.run(workload, at_once=at_once, think_s=think_s)
        found.append([abs(math.log2(each.ttft_s / each.decision.predicted_ttft_s)) for each in asked])
    fleet.router.check()
    return found


def test_in_a_quiet_fleet_first_tokens_come_when_they_are_predicted() -> None:
    found = [median(each) for each in errors(15, at_once=2, think_s=0.5)]
    assert max(found) <= 0.1, found


def test_at_saturation_the_median_prediction_is_within_the_bar() -> None:
    found = errors(40, at_once=24, think_s=0.0)
    assert median(itertools.chain(*found)) <= BAR, [median(each) for each in found]
