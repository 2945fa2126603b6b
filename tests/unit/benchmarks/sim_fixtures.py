"""Requests with numbers that a hand can compute."""

from collections.abc import Sequence

import numpy as np

from benchmarks.sim_requests import SimRequest


def request(number: int, *, at_s: float, blocks: Sequence[int], output_len: int = 1) -> SimRequest:
    """A prompt of 100 tokens a block."""
    return SimRequest(
        number=number,
        arrival_s=at_s,
        after=None,
        input_len=100 * len(blocks),
        output_len=output_len,
        prompt=np.array(blocks, dtype=np.int32),
        repeat=100,
        answer=np.array([-1 - number], dtype=np.int32),
    )
