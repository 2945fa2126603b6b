"""What ended requests have shown: how wrong predictions were, and how fast K/V pages move between replicas.

Owns:      running means of the errors over about the last WINDOW requests that had a first token; the rates of the
           last hand-offs that were large enough to measure the link.
Never:     corrects a prediction: an error must stay visible. Measures a hand-off: the receivers do, dispatch reports.
Thread:    the router's own.
"""

from collections import deque
from dataclasses import dataclass

from routing.types import Decision, RouteOutcome

WINDOW = 200  # requests: enough for a mean, few enough to see a change within minutes


@dataclass(slots=True)
class PredictionErrors:
    """Means of actual minus predicted: a positive bias means that the router predicts too little."""

    num: int = 0  # outcomes seen, ever
    cached_bias_tokens: float = 0.0
    cached_abs_tokens: float = 0.0
    ttft_bias_s: float = 0.0
    ttft_abs_s: float = 0.0
    predicted_ttft_s: float = 0.0  # means of both, to hold the errors against
    actual_ttft_s: float = 0.0

    def record(self, decision: Decision, outcome: RouteOutcome) -> None:
        """Add an outcome to the means; one without a first token is ignored."""
        if outcome.ttft_s is None:
            return
        self.num += 1
        weight = 1.0 / min(self.num, WINDOW)  # a plain mean until the window is full
        tokens = outcome.cached_tokens - _predicted(decision, outcome)
        seconds = outcome.ttft_s - decision.predicted_ttft_s
        self.cached_bias_tokens += weight * (tokens - self.cached_bias_tokens)
        self.cached_abs_tokens += weight * (abs(tokens) - self.cached_abs_tokens)
        self.ttft_bias_s += weight * (seconds - self.ttft_bias_s)
        self.ttft_abs_s += weight * (abs(seconds) - self.ttft_abs_s)
        self.predicted_ttft_s += weight * (decision.predicted_ttft_s - self.predicted_ttft_s)
        self.actual_ttft_s += weight * (outcome.ttft_s - self.actual_ttft_s)


def _predicted(decision: Decision, outcome: RouteOutcome) -> int:
    """Return how many tokens were predicted to be cached where the prompt was computed in the end."""
    if outcome.hand_off_failed and decision.pair is not None:
        return decision.pair.chosen.cached_tokens
    return decision.overlap_tokens


# Until the first hand-off: a 10 Gbit/s network. One host by shared memory makes 2 to 4e9 (notes on NIXL).
ASSUMED_BYTES_PER_S = 1e9
TELLING_BYTES = 1 << 20  # the time of a smaller one is that of its messages, not of its bytes
KEPT = 32
# Pages also wait for the sender to compute them, so a slow hand-off says little about the link. Nor does the fastest:
# its time runs from when the first pages were seen, so what had arrived by then counts as bytes and not as time.
BELIEVED = 0.75


class Link:
    """The transfer rate between replicas, one for all pairs of the application."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=KEPT)

    @property
    def measured(self) -> bool:
        return bool(self._rates)

    @property
    def bytes_per_s(self) -> float:
        """The rate that a share BELIEVED of the last KEPT hand-offs do not exceed."""
        if not self._rates:
            return ASSUMED_BYTES_PER_S
        return sorted(self._rates)[int(BELIEVED * (len(self._rates) - 1))]

    def record(self, num_bytes: int, transfer_s: float) -> None:
        """Add the rate of a completed hand-off: ``num_bytes`` from its first page to its last in ``transfer_s``."""
        if num_bytes >= TELLING_BYTES and transfer_s > 0:
            self._rates.append(num_bytes / transfer_s)
