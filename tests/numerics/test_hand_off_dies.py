"""A prefill process that is killed or hangs while it owes K/V over NIXL (SPEC H19).

The decode side answers by itself, rightly, and keeps the pages in quarantine until the other is proven dead.
"""

import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine_process import EngineProcess
from kvtransfer.types import PdTicket
from replicas.types import FinishReason, GenerateRequest, HandOff, PdLeg, SamplingParams, TokenDelta
from tests.embedded import MODEL
from tests.numerics import tiny

pytestmark = [pytest.mark.model, pytest.mark.slow]
SAMPLING = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = np.random.default_rng(3).integers(0, tiny.VOCAB, 100).astype(np.int32)  # 7 pages of 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny.save("qwen3", folder)
    for file in Path(MODEL).glob("*token*.json"):
        shutil.copy(file, folder)
    return str(folder)


@pytest.fixture(scope="module")
def decode(model: str) -> Iterator[EngineProcess]:
    end = EngineProcess(model, page=16, chunk=32, transport="cma")
    yield end
    end.close()


@pytest.fixture
def prefill(model: str) -> Iterator[EngineProcess]:
    end = EngineProcess(model, page=16, chunk=32, transport="cma")
    yield end
    end.close()


def decode_leg(prefill: EngineProcess, rid: str, room: int) -> GenerateRequest:
    ticket = PdTicket(room=room, generation=0, prefill=prefill.address)
    request = GenerateRequest(rid=rid, token_ids=PROMPT, sampling=SAMPLING, cache_salt=rid)
    return replace(request, hand_off=HandOff(leg=PdLeg.DECODE, ticket=ticket))


def answer(decode: EngineProcess) -> list[int]:
    decode.submit(GenerateRequest(rid="alone", token_ids=PROMPT, sampling=SAMPLING, cache_salt="alone"))
    return ids(decode.finish("alone"))


def ids(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def until_free(decode: EngineProcess) -> float:
    """Seconds until no page is in quarantine."""
    began_s = time.monotonic()
    while decode.pool().quarantined_pages:
        assert time.monotonic() - began_s < 15, "the pages are lost"
        time.sleep(0.02)
    return time.monotonic() - began_s


@pytest.mark.parametrize("met", [False, True], ids=["strangers", "met"])
def test_the_decode_side_computes_what_a_killed_prefill_side_owes(
    decode: EngineProcess, prefill: EngineProcess, met: bool
) -> None:
    if met:
        first = decode_leg(prefill, "first", 1)
        prefill.submit(replace(first, hand_off=replace(first.hand_off, leg=PdLeg.PREFILL)))  # type: ignore[type-var]
        decode.submit(first)
        assert decode.finish("first")[-1].finish is not None
        assert prefill.finish("first")[-1].finish is not None
    decode.submit(decode_leg(prefill, f"owed-{met}", 2))
    time.sleep(0.3)  # it has opened the room; the other half of the request never comes there
    prefill.signal(signal.SIGKILL)
    told = decode.finish(f"owed-{met}")
    assert told[-1].finish is not None
    assert told[-1].finish.reason is FinishReason.LENGTH
    assert told[0].hand_off is not None
    assert not told[0].hand_off.transferred
    assert ids(told) == answer(decode)
    until_free(decode)


def test_pages_of_a_hung_prefill_side_stay_in_quarantine_until_it_is_dead(
    decode: EngineProcess, prefill: EngineProcess
) -> None:
    """Never by time alone: three heartbeats fail the room, but only its death gives the pages back."""
    decode.submit(decode_leg(prefill, "hung", 3))
    time.sleep(0.3)
    prefill.signal(signal.SIGSTOP)
    told = decode.finish("hung")
    assert told[0].hand_off is not None
    assert not told[0].hand_off.transferred
    assert ids(told) == answer(decode)
    time.sleep(2)
    assert decode.pool().quarantined_pages == 7
    prefill.signal(signal.SIGKILL)
    until_free(decode)
