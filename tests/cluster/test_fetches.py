"""Fetches over NIXL between two engines on machines of their own whose link turns bad, as the router chooses them: it
stops by itself, and fetches again when the link is good. No Ray, and no model that is worth its time."""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvtransfer.pages import page_keys
from kvtransfer.types import PdTicket
from replicas.types import GenerateRequest, PdLeg, PdTransfer, PdTransferReport
from routing.router import Router
from routing.types import Decision, Ending, KeysStored, ReplicaView, RouteOutcome, RouteQuery
from tests.cluster.machines import Network, join, require_machines
from tests.engine_process import EngineProcess, ProcessSettings
from tests.numerics import tiny
from tests.numerics.interrupted import SAMPLING, ids, save_model, until_at_rest

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
PAGE, PAGE_BYTES = 16, 12_288
NUM_TOKENS = 1600
RATE = 4_000.0  # tokens a second that the router believes: 0.4 s for a prompt
STOPPED_S = 10.0  # within which fetches over a bad link stop
BACK_S = 180.0  # a slow link is believed to be twice as fast after each 15 s


def there(pid: int) -> Callable[[], object]:
    """A probe: the process is on the machine whose first process is ``pid``."""
    join(pid)
    return lambda: None


@dataclass(kw_only=True)
class Two:
    """Replica "a", which has every prompt and a long queue, and "b", which has nothing to do."""

    a: EngineProcess
    b: EngineProcess
    network: Network
    router: Router = field(default_factory=lambda: Router("estimated_ttft", Random(0), time.monotonic))
    num_prompts: int = 0

    def __post_init__(self) -> None:
        self.views = [
            ReplicaView(
                replica_id=each, time_s=0.0, prefill_tokens_per_s=RATE, pool_pages=100_000, page_bytes=PAGE_BYTES,
                fetches=True, queued_uncached_tokens=queued, num_waiting=queued // 1_000,
            )
            for each, queued in (("a", 20_000), ("b", 0))
        ]  # fmt: skip

    def choose(self) -> tuple[GenerateRequest, list[int], Decision]:
        """A new prompt, which "a" computes. Returns: it, the answer, and where the router sends it."""
        self.num_prompts += 1
        prompt = np.random.default_rng(self.num_prompts).integers(0, tiny.VOCAB, NUM_TOKENS).astype(np.int32)
        request = GenerateRequest(rid=f"r{self.num_prompts}", token_ids=prompt, sampling=SAMPLING)
        self.a.submit(request)
        answer = ids(self.a.finish(request.rid))
        self.router.update([replace(view, time_s=time.monotonic()) for view in self.views])
        assert self.router.apply("a", [KeysStored(self.num_prompts, page_keys(prompt, PAGE, ""))])
        decision = self.router.choose(RouteQuery(rid=request.rid, token_ids=prompt, max_new_tokens=6))
        assert decision.replica_id == "b"
        return request, answer, decision

    def round(self) -> PdTransferReport | None:
        """Send a new prompt where the router says. Returns: how its fetch went, if it had one."""
        request, answer, decision = self.choose()
        report, fetch = None, decision.fetch
        if fetch is not None:
            ticket = PdTicket(
                room=self.num_prompts, generation=0, prefill=self.a.address, end_len=fetch.end_tokens,
                within_s=fetch.within_s,
            )  # fmt: skip
            request = replace(request, kv_transfer=PdTransfer(leg=PdLeg.FETCH, ticket=ticket))
        self.b.submit(request)
        told = self.b.finish(request.rid)
        assert ids(told) == answer
        if fetch is not None:
            (report,) = [delta.kv_transfer for delta in told if delta.kv_transfer is not None]
            took_s = report.transfer_s if report.transferred else report.wait_s
            self.router.fetched(decision, report.num_bytes, took_s, failed=not report.transferred)
            print(f"{request.rid}: {report}")
        self.router.done(decision, RouteOutcome(ending=Ending.OK, ttft_s=0.1))
        return report

    def until_one_comes(self) -> None:
        began_s = time.monotonic()
        while (report := self.round()) is None or not report.transferred:
            assert time.monotonic() - began_s < BACK_S, "no fetch comes"
        print(f"a fetch came after {time.monotonic() - began_s:.1f} s")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    require_machines()
    model, network = save_model(tmp_path / "model"), Network(tmp_path)
    engines = []
    try:
        for name in "ab":
            machine = network.add(name)
            settings = ProcessSettings(
                model=model, page=PAGE, chunk=32, transport="tcp", host=machine.address, context_len=4096,
                pool_tokens=16384, probe=functools.partial(there, machine.pid),
            )  # fmt: skip
            engines.append(EngineProcess(settings))
        yield Two(a=engines[0], b=engines[1], network=network)
        for engine in engines:
            engine.close()
    finally:
        network.off()


def test_fetches_over_a_link_that_turns_bad_stop_by_themselves_and_come_back_with_it(two: Two) -> None:
    """A fetch of 1.2 MB takes some hundredths of a second; with 0.1 s more each way and a loss of 1 %, two seconds."""
    two.until_one_comes()
    mend = two.network.worsen("a", 0.1, 0.01)
    began_s, reports = time.monotonic(), []
    while time.monotonic() - began_s < STOPPED_S:
        reports.append(two.round())
    assert any(report is not None and not report.transferred for report in reports), "none was tried over the bad link"
    assert all(report is None or report.wait_s < STOPPED_S for report in reports)
    assert two.round() is None
    mend()
    two.until_one_comes()
    until_at_rest(two.a)
    until_at_rest(two.b)
