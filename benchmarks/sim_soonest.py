"""`--policy soonest`: `estimated_ttft` without `behind_s`, to show what the term is worth; never served.

Never: differs from the production router in anything but the cost that is compared.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from routing.policies import PolicyChoice, Turn, estimated_ttft
from routing.router import Router
from routing.ttft import Candidates
from routing.types import RouteQuery

SOONEST = "soonest"


class SoonestRouter(Router):
    """Chooses the soonest first token, whatever that costs those who wait."""

    def __init__(self, rng: Random, clock: Callable[[], float], page_size: int) -> None:
        super().__init__("estimated_ttft", rng, clock, page_size)
        self.policy = SOONEST
        self._policy = soonest


def soonest(query: RouteQuery, candidates: Candidates, turn: Turn) -> PolicyChoice:
    """As `estimated_ttft` where nobody waits."""
    estimates = candidates.estimates
    selfish = replace(estimates, behind_s=np.zeros(len(candidates)), cost_s=estimates.ttft_s)
    return estimated_ttft(query, replace(candidates, estimates=selfish), turn)
