"""The messages that are logged while weights load."""

import pytest

from replicas.loading.weights import LoadLog
from tests.harness import Clock


@pytest.mark.parametrize(
    ("num_bytes", "added", "wanted"),
    [
        # the seconds since the one before, and bytes; each tenth is logged once
        (200_000_000, [(0.025, 2_000_000)] * 100, [f"{tenth} % ({2 * tenth} of 200 MB, 80 MB/s)" for tenth in
                                                  range(10, 101, 10)]),
        # a large layer is one line for all its tenths
        (100_000_000, [(0.5, 55_000_000), (0.0, 4_000_000), (0.0, 41_000_000)],
         ["55 % (55 of 100 MB, 110 MB/s)", "100 % (100 of 100 MB, 200 MB/s)"]),
        # no speed before time has passed
        (100_000_000, [(0.0, 10_000_000), (0.25, 10_000_000)], ["10 % (10 of 100 MB)", "20 % (20 of 100 MB, 80 MB/s)"]),
        (0, [(0.0, 0)], []),
    ],
    ids=["tenths", "large layer", "no time", "no bytes"],
)  # fmt: skip
def test_each_tenth_is_logged_once_with_bytes_and_speed(
    num_bytes: int, added: list[tuple[float, int]], wanted: list[str]
) -> None:
    said, clock = list[str](), Clock()
    log = LoadLog(num_bytes, write=lambda line, *values: said.append(line % values), clock=clock)
    for seconds, more in added:
        clock.now_s += seconds
        log.add(more)
    assert said == [f"loading weights: {each}" for each in wanted]
