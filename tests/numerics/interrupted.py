"""A KV transfer between two processes over NIXL, brought to a state in which something happens to one of them, and what
must hold afterwards.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.rooms import sending
from kvtransfer.rooms.kv_transfer import KvTransfer
from kvtransfer.types import PdTicket, TransferStats
from replicas.types import (
    EngineStats,
    Finish,
    FinishReason,
    GenerateRequest,
    PdLeg,
    PdTransfer,
    SamplingParams,
    TokenDelta,
)
from tests.embedded import MODEL
from tests.engine_process import EngineProcess, Probe, ProcessSettings
from tests.numerics import tiny

SAMPLING = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = np.random.default_rng(3).integers(0, tiny.VOCAB, 100).astype(np.int32)  # 7 pages of 16
LONG = np.random.default_rng(4).integers(0, tiny.VOCAB, 3200).astype(np.int32)  # 200 pages, 100 chunks of 32
STATES = ["opened", "first pages written", "handed over"]
OTHERS_NEW = 3000  # tokens: seconds
WAIT_S = 40.0  # for anything


def save_model(folder: Path) -> str:
    """Its name; it knows 4,096 positions."""
    tiny.save("qwen3", folder, max_position_embeddings=4096)
    for file in Path(MODEL).glob("*token*.json"):
        shutil.copy(file, folder)
    return str(folder)


def engine(model: str, *, probe: Probe | None = None) -> EngineProcess:
    settings = ProcessSettings(
        model=model, page=16, chunk=32, transport="cma", context_len=4096, pool_tokens=16384, probe=probe
    )
    return EngineProcess(settings)


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
    return replace(request, kv_transfer=PdTransfer(leg=PdLeg.DECODE, ticket=ticket))


def slow_copies() -> None:
    """A probe: a donor whose fetches take long, since it copies in a thousandth of its time, as if requests decoded."""
    sending.FETCH_SHARE = 0.001
    KvTransfer.holds_back = property(lambda _: True, lambda *_: None)  # type: ignore[assignment]


def fetch_of(donor: EngineProcess, computed: GenerateRequest, room: int) -> GenerateRequest:
    """``computed``, with the whole pages of its prompt from ``donor``."""
    end_len = len(computed.token_ids) // 16 * 16
    ticket = PdTicket(room=room, generation=0, prefill=donor.address, end_len=end_len, within_s=WAIT_S)
    return replace(computed, rid=f"{computed.rid} fetched", kv_transfer=PdTransfer(leg=PdLeg.FETCH, ticket=ticket))


def prefill_leg(of: GenerateRequest) -> GenerateRequest:
    assert of.kv_transfer is not None
    return replace(of, kv_transfer=replace(of.kv_transfer, leg=PdLeg.PREFILL))


def answer(end: EngineProcess, of: GenerateRequest) -> list[int]:
    """What one replica says."""
    end.submit(replace(of, rid="alone", cache_salt="alone", kv_transfer=None))
    return ids(end.finish("alone"))


def ids(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def ended(deltas: list[TokenDelta]) -> Finish:
    finish = deltas[-1].finish
    assert finish is not None
    return finish


def transferred(deltas: list[TokenDelta]) -> bool:
    (report,) = [delta.kv_transfer for delta in deltas if delta.kv_transfer is not None]
    return report.transferred


def meet(prefill: EngineProcess, decode: EngineProcess, rid: str) -> bool:
    """Hand a request over, to its end: the two know each other then. To connect may take longer, beside other
    processes, than the others run; and a side that missed the other before is between two dials at times.

    Returns: whether the pages came and both say so; if not, the other side dials again within seconds.
    """
    sampling = replace(SAMPLING, max_new_tokens=1)
    leg = decode_leg(prefill, rid, abs(hash(rid)) % 2**40, prompt=PROMPT[::-1], sampling=sampling)
    prefill.submit(prefill_leg(leg))
    decode.submit(leg)
    told = decode.finish(rid)
    assert ended(told).reason is FinishReason.LENGTH, ended(told)
    if not transferred(told):
        prefill.abort(rid)
    handed_over = ended(prefill.finish(rid)).reason is FinishReason.HANDED_OFF
    assert transferred(told) or not handed_over
    return handed_over


class Case:
    """One KV transfer, brought to a state."""

    def __init__(self, prefill: EngineProcess, decode: EngineProcess, rid: str, state: str) -> None:
        self.prefill = prefill
        self.decode = decode
        self.state = state
        tries = count()
        until(lambda: self._reach(f"{rid} {next(tries)}"), f"a KV transfer while both live: {state}")

    def _reach(self, rid: str) -> bool:
        """Begin a KV transfer, and wait until it is in the state.

        Returns: whether it came there. It does not if one side was held up for so long that the other missed it;
        nothing of it is left then.
        """
        if not meet(self.prefill, self.decode, f"{rid} first"):
            return False
        sampling = replace(SAMPLING, max_new_tokens=400) if self.over else SAMPLING
        prompt = LONG if self.state == "first pages written" else PROMPT
        self.leg = decode_leg(self.prefill, rid, abs(hash(rid)) % 2**40, prompt=prompt, sampling=sampling)
        self.others = [self._other(f"{rid} other {i}") for i in range(4)] if self.state == "opened" else []
        for other in self.others:
            self.prefill.submit(other)
        if self.others:
            until(lambda: self.prefill.stats().num_running == 4, "P is full")
        sent, received = transfer(self.prefill).sent_pages, self._received()
        self.prefill.submit(prefill_leg(self.leg))
        self.decode.submit(self.leg)
        until(lambda: self._is_there(sent) or self._received() != received, f"{rid}: {self.state}")
        if self.over:
            reached = self._received()[1] == received[1]  # none has failed: all came
            reached = reached and ended(self.prefill.finish(rid)).reason is FinishReason.HANDED_OFF
        else:
            reached = self._received() == received
        if not reached:
            self._give_up()
        return reached

    def _give_up(self) -> None:
        for each in (self.leg, *self.others):
            self.prefill.abort(each.rid)
        self.decode.abort(self.leg.rid)
        until_at_rest(self.prefill)
        until_at_rest(self.decode)

    def _is_there(self, sent_pages: int) -> bool:
        match self.state:
            case "opened":  # granted, and in P's queue
                return self.decode.stats().num_receiving == 1 and self.prefill.stats().num_waiting == 1
            case "first pages written":
                return transfer(self.prefill).sent_pages > sent_pages
            case _:
                return False  # D's room ends

    def _received(self) -> tuple[int, int]:
        """D's rooms that have ended: well, and not."""
        stats = transfer(self.decode)
        return stats.receives_done, stats.receives_failed

    def _other(self, rid: str) -> GenerateRequest:
        """One of the four that P may run at a time; until they end it has no row for the leg."""
        sampling = replace(SAMPLING, max_new_tokens=OTHERS_NEW)
        return GenerateRequest(rid=rid, token_ids=PROMPT[:9], sampling=sampling, cache_salt=rid)

    @property
    def over(self) -> bool:
        """Whether the pages had all come before anything happened."""
        return self.state == "handed over"

    def check_prefill(self) -> None:
        """P has told of its leg, and the others were not disturbed: they run until an abort, or to their end."""
        if not self.over:
            assert ended(self.prefill.finish(self.leg.rid)).reason is FinishReason.ERROR
        for other in self.others:
            self.prefill.abort(other.rid)
        for other in self.others:
            assert ended(self.prefill.finish(other.rid)).reason in (FinishReason.ABORT, FinishReason.LENGTH)

    def check_answer(self) -> None:
        told = self.decode.finish(self.leg.rid)
        assert ended(told).reason is FinishReason.LENGTH
        assert transferred(told) is self.over
        assert ids(told) == answer(self.decode, self.leg)
