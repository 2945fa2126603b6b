"""How long steps take: sums for counters, and smoothed rates for whoever estimates waits."""

SMOOTHING = 0.2  # weight of the newest step: about the last ten steps count
FULL_STEP_TOKENS = 64  # smaller extend steps say little about the prefill rate


class StepClock:
    """Durations of engine steps. Engine thread only."""

    def __init__(self) -> None:
        self.num_extend = 0
        self.num_decode = 0
        self.extend_s = 0.0
        self.decode_s = 0.0
        self.prefill_tokens_per_s = 0.0  # 0 until measured
        self.decode_step_s = 0.0  # 0 until measured

    def record(self, step_s: float, num_tokens: int, *, is_extend: bool) -> None:
        """One step of ``num_tokens`` new tokens took ``step_s`` seconds."""
        if not is_extend:
            self.num_decode += 1
            self.decode_s += step_s
            self.decode_step_s = _smooth(self.decode_step_s, step_s)
            return
        self.num_extend += 1
        self.extend_s += step_s
        if num_tokens >= FULL_STEP_TOKENS and step_s > 0:
            self.prefill_tokens_per_s = _smooth(self.prefill_tokens_per_s, num_tokens / step_s)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + SMOOTHING * (new - old)
