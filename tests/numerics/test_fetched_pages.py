"""A fetch between two real engines: the ids are those of one engine alone, whatever becomes of the fetch, and nothing
is left behind. The wire is the memory of this process. Which pages are fetched, and what becomes of a fetch that does
not fit or is given up: tests/unit/disagg/test_fetch_roles.py, on fake devices."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.types import PdTicket
from replicas.disagg.kv_transfers import PdTransfers
from replicas.engine.engine import Engine
from replicas.types import GenerateRequest, PdLeg, PdTransfer, PdTransferReport, SamplingParams, TokenDelta
from tests.embedded import short_model
from tests.local_agents import LocalFabric
from tests.numerics.handing_over import GREEDY, SEEDED, WAIT_TURNS, alone, make_engine, run

pytestmark = pytest.mark.model
PAGE = 16
PROMPT = np.arange(1000, 1150, dtype=np.int32)  # 9 whole pages and 6 tokens
rooms = itertools.count(1)


@pytest.fixture(scope="module")
def fabric() -> LocalFabric:
    return LocalFabric()


@pytest.fixture(scope="module")
def engines(fabric: LocalFabric) -> Iterator[tuple[Engine, Engine]]:
    """A receiver and a donor."""
    both = make_engine(short_model(), PAGE, 64, fabric), make_engine(short_model(), PAGE, 64, fabric)
    yield both
    for engine in both:
        engine.close()


@pytest.fixture
def receiver(engines: tuple[Engine, Engine], fabric: LocalFabric) -> Engine:
    settle(engines)
    for engine in engines:
        engine.flush_cache()
    return engines[0]


@pytest.fixture
def donor(engines: tuple[Engine, Engine], receiver: Engine) -> Engine:
    return engines[1]


def ask(rid: str, prompt: np.ndarray = PROMPT, sampling: SamplingParams = GREEDY, salt: str = "") -> GenerateRequest:
    return GenerateRequest(rid=rid, token_ids=prompt, sampling=sampling, cache_salt=salt)


def fetching(request: GenerateRequest, donor: Engine, *, end_len: int = 144, within_s: float = 20.0) -> GenerateRequest:
    assert donor.transfer_address is not None
    ticket = PdTicket(
        room=next(rooms), generation=0, prefill=donor.transfer_address, end_len=end_len, within_s=within_s
    )
    return replace(request, kv_transfer=PdTransfer(leg=PdLeg.FETCH, ticket=ticket))


def ids_of(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def report_of(deltas: list[TokenDelta]) -> PdTransferReport:
    return next(delta.kv_transfer for delta in deltas if delta.kv_transfer is not None)


def settle(engines: tuple[Engine, Engine]) -> None:
    """Nothing is in quarantine or lent, and all pages are free or evictable."""
    run(engines)
    for _ in range(WAIT_TURNS):  # the services say last that no write is under way
        if not any(engine.kv.in_use for engine in engines):
            break
        for engine in engines:
            engine.poll()
    for engine in engines:
        engine.scheduler.check()
        pool = engine.stats().pool
        assert not engine.kv.in_use
        assert pool.free_pages + pool.evictable_pages == pool.num_pages


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_what_is_fetched_is_what_is_computed(receiver: Engine, donor: Engine, sampling: SamplingParams) -> None:
    expected = ids_of(alone(donor, ask("computed", sampling=sampling)))
    receiver.submit(fetching(ask("fetched", sampling=sampling), donor))
    deltas, _ = run([receiver, donor])
    report = report_of(deltas)
    assert (report.transferred, report.num_pages) == (True, 9)
    assert ids_of(deltas) == expected
    assert deltas[-1].usage.cached_tokens == 144
    settle((receiver, donor))
    assert alone(receiver, ask("again", sampling=sampling))[-1].usage.cached_tokens == 144


def test_a_donor_serves_a_fetch_between_the_layers_of_its_step(
    receiver: Engine, fabric: LocalFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the fetch is in the donor's first step, which computes and ends as without it."""
    told: list[TokenDelta] = []
    lend = PdTransfers.lend

    def meanwhile(donor: PdTransfers) -> None:
        for _ in range(WAIT_TURNS if asked else 0):
            told.extend(receiver.step())
            lend(donor)
            if any(delta.kv_transfer is not None for delta in told):
                asked.clear()
                return

    monkeypatch.setattr(PdTransfers, "lend", meanwhile)
    asked, other = list[str](), ask("own", np.arange(2000, 2060, dtype=np.int32))
    donor = make_engine(short_model(), PAGE, 64, fabric, host_bytes=0)
    expected, own = ids_of(alone(donor, ask("computed"))), ids_of(alone(receiver, other))
    donor.submit(other)
    receiver.submit(fetching(ask("fetched"), donor))
    asked.append("fetched")
    deltas = donor.step()
    assert report_of(told).num_pages == 9
    more, rest = run([donor, receiver])
    assert (ids_of([*told, *rest]), ids_of([*deltas, *more])) == (expected, own)
    settle((donor, receiver))
    donor.close()


def test_pages_on_the_hosts_memory_are_sent(receiver: Engine, donor: Engine) -> None:
    expected = ids_of(alone(donor, ask("computed")))
    donor.kv.store.make_room(donor.kv.store.num_pages, "this test")
    assert donor.kv.cache.peek_len(PROMPT, "") == 144
    receiver.submit(fetching(ask("fetched"), donor))
    deltas, _ = run([receiver, donor])
    assert report_of(deltas).num_pages == 9
    assert ids_of(deltas) == expected
    settle((receiver, donor))


def test_a_page_that_arrives_changed_is_computed(receiver: Engine, donor: Engine, fabric: LocalFabric) -> None:
    expected = ids_of(alone(donor, ask("computed")))
    fabric.faults.flip_bytes = 1
    receiver.submit(fetching(ask("fetched"), donor))
    deltas, _ = run([receiver, donor])
    assert "digest" in (report_of(deltas).reason or "")
    assert ids_of(deltas) == expected
    settle((receiver, donor))


def test_a_fetch_that_is_late_is_computed(receiver: Engine, donor: Engine) -> None:
    """The donor does not step until the receiver's answer is whole: it is late."""
    expected = ids_of(alone(donor, ask("computed")))
    receiver.submit(fetching(ask("fetched"), donor, within_s=0.05))
    deltas = run([receiver])[0]
    assert "within 0.05 s" in (report_of(deltas).reason or "")
    assert ids_of(deltas) == expected
    settle((receiver, donor))


def test_memory_is_given_back_once_no_fetch_uses_it_and_nothing_is_lent_until_the_resume(
    receiver: Engine, donor: Engine
) -> None:
    """The donor's pages are on its host then, and it could load them."""
    expected = ids_of(alone(donor, ask("computed")))
    receiver.submit(fetching(ask("fetched"), donor))
    for _ in range(WAIT_TURNS):
        receiver.step()
        donor.poll()
        if donor.kv.in_use:
            break
    assert not donor.release_memory()  # its pages are being read
    assert not receiver.release_memory()
    assert ids_of(run([receiver, donor])[0]) == expected
    settle((receiver, donor))
    assert donor.release_memory()
    receiver.flush_cache()
    receiver.submit(fetching(ask("refused"), donor))
    deltas, _ = run([receiver, donor])
    assert report_of(deltas).reason == "the pages' memory is given back"
    assert ids_of(deltas) == expected
    donor.occupation.check()
    donor.resume_memory()
    receiver.flush_cache()
    receiver.submit(fetching(ask("again"), donor))
    deltas, _ = run([receiver, donor])
    assert report_of(deltas).num_pages == 9
    assert ids_of(deltas) == expected
    settle((receiver, donor))
