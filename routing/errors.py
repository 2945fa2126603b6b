"""How wrong the router's predictions were: cached tokens and time to first token, predicted against actual.

Owns:      running means over about the last WINDOW requests that had a first token.
Never:     corrects a prediction; what is wrong should be found, not hidden.
Thread:    the router's own.
"""

from dataclasses import dataclass

from routing.types import Decision, Outcome

WINDOW = 200  # requests: enough for a mean, few enough to see a change within minutes


@dataclass(slots=True)
class PredictionErrors:
    """Differences are actual minus predicted: a positive bias means that the router hopes for too little."""

    num: int = 0  # outcomes seen, ever
    cached_bias_tokens: float = 0.0
    cached_abs_tokens: float = 0.0
    ttft_bias_s: float = 0.0
    ttft_abs_s: float = 0.0
    predicted_ttft_s: float = 0.0  # means of both, to hold the errors against
    actual_ttft_s: float = 0.0

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Learn from an outcome; one without a first token tells nothing."""
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


def _predicted(decision: Decision, outcome: Outcome) -> int:
    """Tokens that were to be cached where the prompt was computed in the end."""
    if outcome.hand_off_failed and decision.pair is not None:
        return decision.pair.chosen.cached_tokens
    return decision.overlap_tokens
