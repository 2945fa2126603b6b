"""A process that is killed, hangs or aborts during a KV transfer over NIXL, on either side (SPEC H19), or of a
fetch.

Whoever is left answers rightly, keeps the pages in quarantine until the other has let go or is proven dead, and holds
nothing afterwards.
"""

import signal
from collections.abc import Iterator

import pytest

from replicas.types import GenerateRequest
from tests.engine_process import EngineProcess
from tests.numerics.interrupted import (
    LONG,
    SAMPLING,
    STATES,
    Case,
    answer,
    decode_leg,
    engine,
    fetch_of,
    ids,
    save_model,
    slow_copies,
    transfer,
    transferred,
    until,
    until_at_rest,
)

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def decode(model: str) -> Iterator[EngineProcess]:
    """Nobody ends it."""
    end = engine(model)
    yield end
    end.close()


@pytest.fixture(scope="module")
def sender(model: str) -> Iterator[EngineProcess]:
    """Nobody ends it."""
    end = engine(model)
    yield end
    end.close()


@pytest.fixture
def victim(model: str) -> Iterator[EngineProcess]:
    end = engine(model)
    yield end
    end.close()


def test_pages_of_a_hung_prefill_side_stay_in_quarantine_until_it_is_dead(
    decode: EngineProcess, victim: EngineProcess
) -> None:
    """Never by time alone: three heartbeats fail the room, but only its death gives the pages back."""
    leg = decode_leg(victim, "hung", 3)
    decode.submit(leg)
    until(lambda: transfer(victim).rooms_sending == 1, "opened")
    victim.signal(signal.SIGSTOP)
    told = decode.finish("hung")
    assert not transferred(told)
    assert ids(told) == answer(decode, leg)
    until(lambda: transfer(decode).oldest_drain_s >= 2, "two seconds in quarantine")
    assert decode.pool().quarantined_pages == 7
    victim.signal(signal.SIGKILL)
    until_at_rest(decode)


@pytest.mark.parametrize("state", STATES)
def test_a_prefill_side_that_is_killed(decode: EngineProcess, victim: EngineProcess, state: str) -> None:
    case = Case(victim, decode, f"kill P, {state}", state)
    victim.signal(signal.SIGKILL)
    case.check_answer()
    until_at_rest(decode)


@pytest.mark.parametrize("state", STATES)
def test_a_decode_side_that_is_killed(sender: EngineProcess, victim: EngineProcess, state: str) -> None:
    case = Case(sender, victim, f"kill D, {state}", state)
    victim.signal(signal.SIGKILL)
    case.check_prefill()
    until_at_rest(sender)
    assert len(answer(sender, case.leg)) == case.leg.sampling.max_new_tokens


@pytest.mark.parametrize("state", STATES)
def test_a_prefill_side_that_hangs_and_goes_on(decode: EngineProcess, sender: EngineProcess, state: str) -> None:
    case = Case(sender, decode, f"stop P, {state}", state)
    sender.signal(signal.SIGSTOP)
    case.check_answer()
    if not case.over:
        assert decode.pool().quarantined_pages == -(-len(case.leg.token_ids) // 16)
    sender.signal(signal.SIGCONT)
    case.check_prefill()
    until_at_rest(sender)
    until_at_rest(decode)


@pytest.mark.parametrize("state", STATES)
def test_a_decode_side_that_hangs_and_goes_on(decode: EngineProcess, sender: EngineProcess, state: str) -> None:
    """Writes to it may not end before it goes on; until then their pages are not free."""
    case = Case(sender, decode, f"stop D, {state}", state)
    decode.signal(signal.SIGSTOP)
    if case.over:
        until(lambda: transfer(sender).peers == 0, "it is missed")
    else:
        case.check_prefill()
    decode.signal(signal.SIGCONT)
    case.check_answer()
    until_at_rest(sender)
    until_at_rest(decode)


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_a_donor_that_dies_or_hangs_in_a_fetch(decode: EngineProcess, model: str, what: signal.Signals) -> None:
    """All is computed. One that goes on is fetched from again."""
    donor = engine(model, probe=slow_copies)

    def compute(rid: str, num_tokens: int) -> tuple[GenerateRequest, list[int]]:
        request = GenerateRequest(rid=rid, token_ids=LONG[:num_tokens], sampling=SAMPLING, cache_salt=rid)
        donor.submit(request)
        return request, ids(donor.finish(rid))

    try:
        computed, expected = compute(f"{what}", 1600)
        leg = fetch_of(donor, computed, 1000 + what)
        decode.submit(leg)
        until(lambda: transfer(donor).sent_pages > 0, "some pages came")
        donor.signal(what)
        told = decode.finish(leg.rid)
        assert not transferred(told)
        assert ids(told) == expected
        if what is signal.SIGSTOP:
            assert decode.pool().quarantined_pages == 100
            donor.signal(signal.SIGCONT)
            until_at_rest(donor)
        until_at_rest(decode)
        if what is signal.SIGSTOP:
            computed, expected = compute("again", 100)
            leg = fetch_of(donor, computed, 2000)
            decode.submit(leg)
            told = decode.finish(leg.rid)
            assert transferred(told)
            assert ids(told) == expected
            until_at_rest(donor)
    finally:
        donor.close()
