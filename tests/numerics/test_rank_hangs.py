"""A rank after the first whose process hangs and lives, over NIXL: its own replica notices, its peer helps itself (SPEC
H19).

The second rank of two is stopped. After `rank_timeout_s` rank 0 says of itself what it says when its transfer thread
has crashed: Serve would replace the replica then.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.engine_process import TRANSFER_S, EngineProcess
from tests.numerics.interrupted import (
    answer,
    decode_leg,
    engine,
    ids,
    save_model,
    transfer,
    transferred,
    until,
    until_at_rest,
)

pytestmark = [pytest.mark.model, pytest.mark.slow]
SOON_S = TRANSFER_S - 5.0  # before any other limit
MISSES = 25  # seconds: peers that only wait for a processor do not take each other for dead before a rank is missed


def follower_pids() -> Callable[[], list[int | None]]:
    """A probe."""
    return lambda: [process.pid for process in multiprocessing.active_children()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(model: str) -> Iterator[EngineProcess]:
    """Nobody stops it."""
    end = engine(model, heartbeat_misses=MISSES)
    yield end
    end.close()


@pytest.fixture
def victim(model: str) -> Iterator[EngineProcess]:
    end = engine(model, tp=2, probe=follower_pids, heartbeat_misses=MISSES)
    yield end
    end.close()


def signal_follower(of: EngineProcess, number: signal.Signals) -> None:
    (pid,) = of.probed()
    os.kill(pid, number)


def says_that_a_rank_hangs(end: EngineProcess) -> bool:
    return "rank 1 of this replica has given no sign of life for 10 s" in end.fault()


def test_a_rank_of_the_prefill_side_that_hangs(other: EngineProcess, victim: EngineProcess) -> None:
    """The decode side computes the prompt itself, and gets its pages back when the rank has closed its agent: it may
    write until then."""
    leg = decode_leg(victim, "P", 1)
    other.submit(leg)
    until(lambda: transfer(victim).rooms_sending == 1, "opened")
    signal_follower(victim, signal.SIGSTOP)
    start_s = time.monotonic()
    told = other.finish("P")
    assert time.monotonic() - start_s < SOON_S
    assert not transferred(told)
    assert ids(told) == answer(other, leg)
    until(lambda: says_that_a_rank_hangs(victim), "the rank is missed")
    assert other.pool().quarantined_pages == 7
    signal_follower(victim, signal.SIGCONT)
    until_at_rest(other)
