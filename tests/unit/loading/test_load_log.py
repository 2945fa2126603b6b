"""The messages that are logged while weights load."""

from replicas.loading.weights import LoadLog
from tests.harness import Clock


def test_each_tenth_is_logged_once_with_bytes_and_speed() -> None:
    said: list[str] = []
    clock = Clock()
    log = LoadLog(200_000_000, write=lambda line, *values: said.append(line % values), clock=clock)
    for _ in range(100):
        clock.now_s += 0.01
        log.add(2_000_000)
    assert len(said) == 10
    assert said[3] == "loading weights: 40 % (80 of 200 MB, 200 MB/s)"
    assert said[-1] == "loading weights: 100 % (200 of 200 MB, 200 MB/s)"


def test_a_large_layer_is_one_line_for_all_its_tenths() -> None:
    said: list[str] = []
    clock = Clock()
    log = LoadLog(100_000_000, write=lambda line, *values: said.append(line % values), clock=clock)
    clock.now_s = 0.5
    log.add(55_000_000)
    log.add(4_000_000)
    log.add(41_000_000)
    assert said == [
        "loading weights: 55 % (55 of 100 MB, 110 MB/s)",
        "loading weights: 100 % (100 of 100 MB, 200 MB/s)",
    ]


def test_no_speed_is_logged_before_time_has_passed() -> None:
    said: list[str] = []
    clock = Clock()
    log = LoadLog(100_000_000, write=lambda line, *values: said.append(line % values), clock=clock)
    log.add(10_000_000)
    clock.now_s = 0.25
    log.add(10_000_000)
    assert said == ["loading weights: 10 % (10 of 100 MB)", "loading weights: 20 % (20 of 100 MB, 80 MB/s)"]


def test_a_checkpoint_without_bytes_says_nothing() -> None:
    said: list[str] = []
    LoadLog(0, write=lambda line, *values: said.append(line % values), clock=Clock()).add(0)
    assert said == []
