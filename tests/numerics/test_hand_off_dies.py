"""A process that is killed, hangs or aborts in the middle of a hand-off over NIXL, on either side (SPEC H19).

Whoever is left answers rightly, keeps the pages in quarantine until the other has let go or is proven dead, and holds
nothing afterwards.
"""

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine_process import EngineProcess
from kvtransfer.types import PdTicket, TransferStats
from replicas.types import (
    EngineStats,
    Finish,
    FinishReason,
    GenerateRequest,
    HandOff,
    PdLeg,
    SamplingParams,
    TokenDelta,
)
from tests.embedded import MODEL
from tests.numerics import tiny

pytestmark = [pytest.mark.model, pytest.mark.slow]
SAMPLING = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = np.random.default_rng(3).integers(0, tiny.VOCAB, 100).astype(np.int32)  # 7 pages of 16
LONG = np.random.default_rng(4).integers(0, tiny.VOCAB, 3200).astype(np.int32)  # 200 pages, 100 chunks of 32
STATES = ["opened", "first pages written", "handed over"]
OTHERS_NEW = 3000  # tokens: seconds
WAIT_S = 40.0  # for anything


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny.save("qwen3", folder, max_position_embeddings=4096)
    for file in Path(MODEL).glob("*token*.json"):
        shutil.copy(file, folder)
    return str(folder)


def engine(model: str) -> EngineProcess:
    return EngineProcess(model, page=16, chunk=32, transport="cma", context_len=4096, pool_tokens=16384)


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


def until(condition: Callable[[], bool], what: str | Callable[[], str]) -> None:
    """Ask until it holds: each time the process is asked, it has answered."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            pytest.fail(f"never: {what if isinstance(what, str) else what()}")


def transfer(end: EngineProcess) -> TransferStats:
    stats = end.stats().transfer
    assert stats is not None
    return stats


def until_at_rest(end: EngineProcess) -> None:
    """No room, nothing that runs or waits, every page free or evictable; and the engine's own books are right."""

    seen: list[EngineStats] = []

    def at_rest() -> bool:
        stats = end.stats()
        pool, rooms = stats.pool, stats.transfer
        assert rooms is not None
        busy = (stats.num_waiting, stats.num_running, stats.num_preallocating, stats.num_receiving)
        seen[:] = [stats]
        return (
            pool.free_pages + pool.evictable_pages == pool.num_pages
            and (rooms.rooms_receiving, rooms.rooms_sending, rooms.rooms_draining) == (0, 0, 0)
            and not any(busy)
            and stats.num_handing_off == 0
        )

    until(at_rest, lambda: f"at rest; there is {seen}")


def decode_leg(
    prefill: EngineProcess,
    rid: str,
    room: int,
    *,
    prompt: np.ndarray = PROMPT,
    sampling: SamplingParams = SAMPLING,
) -> GenerateRequest:
    ticket = PdTicket(room=room, generation=0, prefill=prefill.address)
    request = GenerateRequest(rid=rid, token_ids=prompt, sampling=sampling, cache_salt=rid)
    return replace(request, hand_off=HandOff(leg=PdLeg.DECODE, ticket=ticket))


def prefill_leg(of: GenerateRequest) -> GenerateRequest:
    assert of.hand_off is not None
    return replace(of, hand_off=replace(of.hand_off, leg=PdLeg.PREFILL))


def answer(end: EngineProcess, of: GenerateRequest) -> list[int]:
    """What one replica says."""
    end.submit(replace(of, rid="alone", cache_salt="alone", hand_off=None))
    return ids(end.finish("alone"))


def ids(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def ended(deltas: list[TokenDelta]) -> Finish:
    finish = deltas[-1].finish
    assert finish is not None
    return finish


def transferred(deltas: list[TokenDelta]) -> bool:
    (report,) = [delta.hand_off for delta in deltas if delta.hand_off is not None]
    return report.transferred


class Case:
    """One hand-off, brought to a state."""

    def __init__(self, prefill: EngineProcess, decode: EngineProcess, rid: str, state: str) -> None:
        self.prefill = prefill
        self.decode = decode
        self.state = state
        sampling = replace(SAMPLING, max_new_tokens=400) if state == "handed over" else SAMPLING
        prompt = LONG if state == "first pages written" else PROMPT
        self.leg = decode_leg(prefill, rid, abs(hash(rid)) % 2**40, prompt=prompt, sampling=sampling)
        self.others = [self._other(f"{rid} other {i}") for i in range(4)] if state == "opened" else []
        self._advance()

    def _other(self, rid: str) -> GenerateRequest:
        """One of the four that P may run at a time; until they end it has no row for the leg."""
        sampling = replace(SAMPLING, max_new_tokens=OTHERS_NEW)
        return GenerateRequest(rid=rid, token_ids=PROMPT[:9], sampling=sampling, cache_salt=rid)

    def _advance(self) -> None:
        for other in self.others:
            self.prefill.submit(other)
        if self.others:
            until(lambda: self.prefill.stats().num_running == 4, "P is full")
        before = transfer(self.prefill)
        self.prefill.submit(prefill_leg(self.leg))
        self.decode.submit(self.leg)
        match self.state:
            case "opened":
                until(lambda: self.decode.stats().num_receiving == 1, "granted")
                until(lambda: self.prefill.stats().num_waiting == 1, "opened, and in P's queue")
            case "first pages written":
                until(lambda: transfer(self.prefill).sent_pages > before.sent_pages, "first pages written")
            case _:
                assert ended(self.prefill.finish(self.leg.rid)).reason is FinishReason.HANDED_OFF

    @property
    def over(self) -> bool:
        """Whether the pages had all come before anything happened."""
        return self.state == "handed over"

    def check_prefill(self) -> None:
        """P has told of its leg, and has answered the others."""
        if not self.over:
            assert ended(self.prefill.finish(self.leg.rid)).reason is FinishReason.ERROR
        for other in self.others:
            assert len(ids(self.prefill.finish(other.rid))) == OTHERS_NEW

    def check_answer(self) -> None:
        told = self.decode.finish(self.leg.rid)
        assert ended(told).reason is FinishReason.LENGTH
        assert transferred(told) is self.over
        assert ids(told) == answer(self.decode, self.leg)


@pytest.mark.parametrize("met", [False, True], ids=["strangers", "met"])
def test_the_decode_side_computes_what_a_killed_prefill_side_owes(
    decode: EngineProcess, victim: EngineProcess, met: bool
) -> None:
    """The other half of the request never comes there."""
    if met:
        first = decode_leg(victim, "first", 1)
        victim.submit(prefill_leg(first))
        decode.submit(first)
        assert ended(decode.finish("first")).reason is FinishReason.LENGTH
        assert ended(victim.finish("first")).reason is FinishReason.HANDED_OFF
    leg = decode_leg(victim, f"owed-{met}", 2)
    decode.submit(leg)
    until(lambda: transfer(victim).rooms_sending == 1, "opened")
    victim.signal(signal.SIGKILL)
    told = decode.finish(leg.rid)
    assert ended(told).reason is FinishReason.LENGTH
    assert not transferred(told)
    assert ids(told) == answer(decode, leg)
    until_at_rest(decode)


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


@pytest.mark.parametrize("state", STATES)
def test_a_request_that_is_aborted_on_the_decode_side(decode: EngineProcess, sender: EngineProcess, state: str) -> None:
    case = Case(sender, decode, f"abort, {state}", state)
    decode.abort(case.leg.rid)
    assert ended(decode.finish(case.leg.rid)).reason is FinishReason.ABORT
    case.check_prefill()
    until_at_rest(sender)
    until_at_rest(decode)
