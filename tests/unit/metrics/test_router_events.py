"""What happens to requests, as a router's metrics tell it, and what that may cost."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

import pytest
from prometheus_client.openmetrics import exposition as openmetrics

from dashboards.catalog import ANSWERING, STAGES, Process
from deployments.dispatch.dispatcher import Saturated
from deployments.http.http_errors import GenerationFailed
from deployments.http.streaming import merged
from deployments.record.route_log import MOST_ADAPTERS, judged
from deployments.record.timeline import Arrival, Timeline
from deployments.watch.metrics.emitter import Emitter, Identity
from deployments.watch.metrics.router_events import RETRIES, RouterEvents
from deployments.watch.metrics.router_metrics import RouterFigures
from replicas.errors import Fault, InvalidRequest, MantaError
from replicas.types import AdapterRef, Finish, FinishReason, GenerateRequest, PdTransferReport, TokenDelta
from routing.types import NoReplica, PageFetch, Role
from tests.scraped import Scraped
from tests.unit.deployments.in_process import PAGE_SIZE, House, ScriptedReplica
from tests.unit.deployments.pair_in_process import Desks, PdTransferReplica
from tests.unit.deployments.sample_values import ask, stats

JUDGED = [(slo, met) for slo in ("ttft", "itl") for met in ("true", "false")]


class Raises:
    """Called, it raises."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __call__(self) -> None:
        raise self._error


class Watched:
    """A house whose requests are counted."""

    def __init__(self, *, apart: bool = False) -> None:
        self.house = House(max_wait_s=10.0, always_kv_transfer=apart)
        who = Identity(model="m", role="router", replica="router")
        self.emitter = Emitter(Process.ROUTER, who, disaggregated=apart)
        self.house.dispatcher.watch = RouterEvents(
            self.emitter, objectives={"ttft_objective_s": 5.0, "itl_objective_s": 1e-9}, disaggregated=apart
        )

    async def scrape(self) -> Scraped:
        """From another thread, as the server does."""
        return await asyncio.to_thread(Scraped, self.emitter.registry)

    async def run(self, request: GenerateRequest, endpoint: str = "chat") -> list[TokenDelta]:
        arrival = Arrival(endpoint=endpoint, arrived_s=self.house.dispatcher._clock())
        return [delta async for delta in self.house.dispatcher.stream(request, arrival=arrival)]


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    watched = Watched()
    await watched.house.start()
    RouterFigures(watched.emitter, watched.house.fleet, page_size=PAGE_SIZE)
    yield watched
    await watched.house.stop()


async def test_a_request_that_ends_well_is_counted_in_everything_once(watched: Watched) -> None:
    """4 tokens of prompt, 8 of output: a gap before each but those that came first together. Both objectives are
    judged; no gap is within a nanosecond."""
    await watched.house.ready(ScriptedReplica("r0"))
    first, *_ = await watched.run(ask())
    seen = await watched.scrape()
    assert seen.value("requests_total", endpoint="chat", outcome="ok") == 1
    assert seen.total("requests_total") == 1
    assert seen.total("requests_in_flight") == 0
    for name in ("time_to_first_token_seconds", "request_duration_seconds"):
        assert seen.value(f"{name}_count", endpoint="chat") == 1
    assert seen.value("inter_token_latency_seconds_count") == 8 - len(first.token_ids)
    assert (seen.value("request_prompt_tokens_sum"), seen.value("request_output_tokens_sum")) == (4, 8)
    assert seen.values("request_stage_duration_seconds_count", "stage") == dict.fromkeys(STAGES, 1)
    total_s = seen.value("request_duration_seconds_sum", endpoint="chat")
    assert seen.total("request_stage_duration_seconds_sum") == pytest.approx(total_s)
    assert seen.value("time_per_output_token_seconds_count") == 1
    assert seen.values("request_finishes_total", "reason") == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert seen.value("slo_requests_total", slo="ttft", met="true") == 1
    assert seen.value("slo_requests_total", slo="itl", met="false") == 1
    assert seen.values("slo_objective_seconds", "slo") == {"ttft": 5.0, "itl": 1e-9}
    assert seen.value("router_decisions_total", policy="round_robin", reason="only_candidate") == 1
    assert seen.value("router_decision_duration_seconds_count") == 1


async def test_a_traced_request_is_an_exemplar_of_its_first_token_and_its_duration(watched: Watched) -> None:
    """In OpenMetrics, which has a place for it; the text format has none."""
    await watched.house.ready(ScriptedReplica("r0"))
    await watched.run(ask(rid="a.0-untraced"))
    assert " # {" not in openmetrics.generate_latest(watched.emitter.registry).decode()
    arrival = Arrival(endpoint="chat", arrived_s=watched.house.dispatcher._clock(), exemplar={"trace_id": "4bf92f"})
    async for _ in watched.house.dispatcher.stream(ask(rid="b.0-traced"), arrival=arrival):
        pass
    lines = openmetrics.generate_latest(watched.emitter.registry).decode().splitlines()
    told = {line.partition("{")[0] for line in lines if ' # {trace_id="4bf92f"} ' in line}
    assert told == {"manta_time_to_first_token_seconds_bucket", "manta_request_duration_seconds_bucket"}


async def test_a_retry_is_counted_by_its_error_and_the_request_once(watched: Watched) -> None:
    await watched.house.ready(ScriptedReplica("r0", die_at=3), ScriptedReplica("r1"))
    first, *_ = await watched.run(ask())
    seen = await watched.scrape()
    assert seen.value("router_retries_total", reason="replica_gone") == 1
    assert seen.total("router_retries_total") == 1
    assert seen.total("router_decisions_total") == 2
    assert seen.total("requests_total") == 1
    assert seen.value("router_prompt_tokens_total") == 4  # its first token came once
    assert seen.value("inter_token_latency_seconds_count") == 8 - len(first.token_ids)


def test_every_error_that_is_tried_again_has_its_label() -> None:
    def below(kind: type[MantaError]) -> set[type[MantaError]]:
        return {kind}.union(*(below(each) for each in kind.__subclasses__()))

    retryable = {kind for kind in below(MantaError) if kind.retryable}
    ours = {kind for kind in retryable if kind.__module__.startswith(("deployments.", "replicas."))}
    # the observatory is on no request's way
    elsewhere = {kind for kind in ours if kind.__module__.startswith("deployments.watch.observatory.")}
    assert ours - elsewhere == set(RETRIES)


async def test_requests_and_tokens_are_told_by_adapter_of_the_first_hundred_names(watched: Watched) -> None:
    """4 tokens of prompt, 8 of output each."""
    await watched.house.ready(ScriptedReplica("r0"))
    for number in (*range(MOST_ADAPTERS + 2), 0):
        ref = AdapterRef(identity=str(number), path="/a", name=f"a{number}")
        await watched.run(dataclasses.replace(ask(), adapter=ref))
    await watched.run(ask())
    seen = await watched.scrape()
    told = seen.values("adapter_requests_total", "adapter")
    assert len(told) == MOST_ADAPTERS + 1
    assert (told["a0"], told["a99"], told["others"]) == (2, 1, 2)
    assert [watched.house.dispatcher.watch.requests_of(name) for name in ("a0", "a99", "a100")] == [2, 1, None]
    assert seen.value("adapter_tokens_total", adapter="a0", kind="input") == 8
    assert seen.value("adapter_tokens_total", adapter="others", kind="output") == 16


async def test_how_a_request_ended_is_told_by_its_outcome(watched: Watched) -> None:
    """A client that leaves, a deadline, a crash of the numbers, a full house, none at all, and a refusal."""
    house = watched.house
    with pytest.raises(NoReplica):
        await watched.run(ask(rid="a.0-none"))
    await house.ready(replica := ScriptedReplica("r0"))
    stream = house.dispatcher.stream(ask(rid="b.0-left"))
    async with contextlib.aclosing(stream):
        await anext(stream)
    replica.finish = Finish(reason=FinishReason.ABORT, fault=Fault.TIMED_OUT)
    await watched.run(ask(rid="c.0-late"))
    replica.finish = Finish(reason=FinishReason.ERROR, fault=Fault.INTERNAL)
    await watched.run(ask(rid="d.0-broken"))
    replica.finish = Finish(reason=FinishReason.ABORT, fault=Fault.CANCELLED)
    await watched.run(ask(rid="e.0-aborted"))
    replica.refuse = InvalidRequest("n: too many")
    with pytest.raises(InvalidRequest):
        await watched.run(ask(rid="f.0-wrong"))
    replica.stats = stats(waiting_uncached_tokens=10**6, prefill_tokens_per_s=1.0)
    await replica.send_reports(1)
    async with asyncio.timeout(30):
        while house.router.views[0].queued_uncached_tokens == 0:
            await asyncio.sleep(0.005)
    with pytest.raises(Saturated):
        await watched.run(ask(rid="g.0-full"))
    seen = await watched.scrape()
    assert seen.values("requests_total", "outcome") == {
        "ok": 0, "error": 2, "invalid": 1, "cancelled": 2, "shed": 1, "timeout": 1
    }  # fmt: skip
    assert seen.values("requests_in_flight", "endpoint") == dict.fromkeys(ANSWERING, 0)
    assert seen.value("request_output_tokens_count") == 0  # of those that end ok alone
    counts = house.dispatcher.watch.counts  # what alerts go by
    assert [counts[name] for name in ("requests", "failed", "shed")] == [7, 3, 1]
    told = {key: seen.value("slo_requests_total", slo=key[0], met=key[1]) for key in JUDGED}
    assert [counts[f"{slo}_missed"] for slo in ("ttft", "itl")] == [told[slo, "false"] for slo in ("ttft", "itl")]
    assert counts["ttft_judged"] + counts["itl_judged"] == sum(told.values())
    assert told == {
        ("ttft", "true"): 2,  # late and broken had a first token in time
        ("ttft", "false"): 2,  # none and full
        ("itl", "true"): 0,
        ("itl", "false"): 2,  # late and broken broke off; who left, aborted or asked wrongly is not judged
    }
    assert [record.outcome for record in house.dispatcher.routes.recent()] == [
        "cancelled", "timeout", "error", "cancelled", "invalid", "shed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("finish", "outcome"),
    [
        (Finish(reason=FinishReason.ABORT, fault=Fault.TIMED_OUT), "timeout"),
        (Finish(reason=FinishReason.ERROR, fault=Fault.INTERNAL), "error"),
        (Finish(reason=FinishReason.ABORT, fault=Fault.CANCELLED), "cancelled"),
    ],
)
async def test_how_a_request_of_several_choices_ended_is_told_as_of_one(
    watched: Watched, finish: Finish, outcome: str
) -> None:
    """The answer is closed after the first choice that went wrong; nobody has cancelled it."""
    await watched.house.ready(replica := ScriptedReplica("r0"))
    replica.finish = finish
    request = ask()
    request = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, n=2))
    with contextlib.suppress(GenerationFailed):
        [each async for each in merged([watched.house.dispatcher.stream(request)])]
    seen = await watched.scrape()
    counted = {key: value for key, value in seen.values("requests_total", "outcome").items() if value}
    assert counted == {outcome: 1}
    assert [record.outcome for record in watched.house.dispatcher.routes.recent()] == [outcome]


async def test_the_first_token_is_counted_when_it_comes(watched: Watched) -> None:
    await watched.house.ready(ScriptedReplica("r0"))
    async with contextlib.aclosing(watched.house.dispatcher.stream(ask())) as stream:
        await anext(stream)
        seen = await watched.scrape()
        assert seen.value("time_to_first_token_seconds_count", endpoint="generate") == 1
        assert seen.value("requests_in_flight", endpoint="generate") == 1
        assert seen.total("requests_total") == 0


def test_an_answer_without_a_prompt_misses_the_objective_where_the_server_failed() -> None:
    """A request for tokens alone promises no first token; a client's mistake is no miss."""
    watched = Watched()
    events = watched.house.dispatcher.watch
    assert judged(2.0, 0.1, "ok") == {"ttft": True, "itl": True}  # the objectives themselves
    assert (judged(2.1, None, "ok"), judged(1.0, 0.2, "running")) == ({"ttft": False}, {"ttft": True})
    for endpoint, outcome in (("chat", "error"), ("chat", "invalid"), ("tokens", "error"), ("chat", "cancelled")):
        events.answered(endpoint, outcome=outcome, total_s=1.0)
    seen = Scraped(watched.emitter.registry)
    assert (seen.value("slo_requests_total", slo="ttft", met="false"), seen.total("slo_requests_total")) == (1, 1)


async def test_a_request_goes_on_when_counting_it_fails(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    """Each call of the watch raises; the log says so and all 8 tokens come."""

    class Broken:
        def on_gap(self, gap_s: float, num_tokens: int) -> None:
            raise RuntimeError("on_gap")

        def __getattr__(self, name: str) -> Callable[..., None]:
            def fail(*args: object, **kwargs: object) -> None:
                raise RuntimeError(name)

            return fail

    watched.house.dispatcher.watch = Broken()
    await watched.house.ready(ScriptedReplica("r0"))
    deltas = await watched.run(ask())
    assert sum(len(delta.token_ids) for delta in deltas) == 8
    raised = {str(record.exc_info[1]) for record in caplog.records if record.exc_info is not None}
    assert raised >= {"opened", "decided", "began", "tried", "ended"}
    assert (watched.house.router.num_open, watched.house.dispatcher.num_open) == (0, 0)


async def test_best_predicted_and_actual_prefix_are_counted_together(watched: Watched) -> None:
    """40 tokens, of which r0 told of 2 pages, 32 tokens; it says that it reused none of them."""
    await watched.house.ready(replica := ScriptedReplica("r0"))
    request = ask(num_tokens=40)
    replica.store(request.token_ids.tolist())
    async with asyncio.timeout(30):
        while watched.house.router.num_pages("r0")[0] < 2:
            await asyncio.sleep(0.005)
    await watched.run(request)
    seen = await watched.scrape()
    names = ["prompt", "best_overlap", "predicted_overlap", "actual_overlap"]
    assert [seen.value(f"router_{name}_tokens_total") for name in names] == [40, 32, 32, 0]
    watch = watched.house.dispatcher.watch
    assert (watch.counts["predicted"], watch.counts["actual"]) == (32, 0)
    noted = watched.house.dispatcher.routes.recent()[0].tries[0]
    timeline = Timeline(Arrival(endpoint="chat", arrived_s=0.0), num_choices=1)
    watch.began(dataclasses.replace(noted, cached_tokens=16), timeline)
    assert (watch.counts["predicted"], watch.counts["actual"]) == (64, 16)
    assert seen.value("router_overlap_error_ratio_sum", sign="over") == pytest.approx(0.8)
    assert seen.total("router_overlap_error_ratio_count") == 1
    assert seen.total("router_ttft_error_seconds_count") == 1
    assert seen.value("router_index_tokens", target="r0", source="confirmed") == 32
    assert seen.value("router_cache_snapshots_total") == 1


async def test_series_of_a_replica_that_left_are_gone(watched: Watched) -> None:
    house = watched.house
    await house.ready(ScriptedReplica("r0"), ScriptedReplica("r1"))
    seen = await watched.scrape()
    assert set(seen.values("router_index_tokens", "target")) == {"r0", "r1"}
    assert seen.value("router_replicas", target_role="unified", state="accepting") == 2
    house.remove("r0")
    seen = await watched.scrape()
    assert set(seen.values("router_index_tokens", "target")) == {"r1"}
    assert set(seen.values("router_report_age_seconds", "target")) == {"r1"}
    assert seen.value("router_replicas", target_role="unified", state="accepting") == 1
    assert seen.value("router_replicas", target_role="unified", state="draining") == 1  # it is still connected


async def test_while_the_router_ends_or_its_fleet_fails_a_scrape_tells_the_last_figures(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = watched.house
    await house.ready(ScriptedReplica("r0"))
    assert (await watched.scrape()).value("router_replicas", target_role="unified", state="accepting") == 1
    house.remove("r0")
    for error in (asyncio.CancelledError(), ZeroDivisionError()):
        monkeypatch.setattr(house.fleet, "cache_pages", Raises(error))
        seen = await watched.scrape()
        assert seen.value("router_replicas", target_role="unified", state="accepting") == 1
        assert seen.total("requests_total") == 0  # the others are told
    monkeypatch.undo()
    assert (await watched.scrape()).value("router_replicas", target_role="unified", state="accepting") == 0


async def test_a_member_that_has_not_attached_is_starting(watched: Watched) -> None:
    watched.house.fleet.set_members(["r9"])
    seen = await watched.scrape()
    assert seen.value("router_replicas", target_role="unified", state="starting") == 1
    assert seen.total("router_replicas") == 1


@pytest.mark.parametrize("came", [True, False])
async def test_kv_transfers_and_why_they_were_decided_are_counted(came: bool) -> None:
    watched, desks = Watched(apart=True), Desks()
    await watched.house.start()
    ends = None if came else Finish(reason=FinishReason.ERROR, fault=Fault.INTERNAL)
    watched.house.add(PdTransferReplica("p0", Role.PREFILL, desks, leg_ends=ends))
    watched.house.add(PdTransferReplica("d0", Role.DECODE, desks))
    async with asyncio.timeout(30):
        while len(watched.house.router.views) < 2:
            await asyncio.sleep(0.005)
    await watched.run(dataclasses.replace(ask(), rid="a.0-me"))
    seen = await watched.scrape()
    assert seen.value("router_pair_decisions_total", reason="kv_transfer_always") == 1
    expected = {"ok": 1, "error": 0} if came else {"ok": 0, "error": 1}
    assert seen.values("router_kv_transfers_total", "outcome") == expected
    assert seen.value("requests_total", endpoint="chat", outcome="ok") == 1
    [record] = watched.house.dispatcher.routes.recent()
    fetch = PageFetch(
        donor_id="p0", end_tokens=32, num_tokens=32, num_bytes=1000, took_s=0.1, compute_s=1.0, within_s=1.0,
        donor_ttft_s=2.0,
    )  # fmt: skip
    report = PdTransferReport(transferred=came, num_bytes=500, grant_s=0.25, wait_s=0.5)  # half of what was expected
    decision = dataclasses.replace(record.tries[0].decision, fetch=fetch)
    watched.house.dispatcher.watch.tried(dataclasses.replace(record.tries[0], decision=decision, fetch_report=report))
    seen = await watched.scrape()
    assert seen.values("router_fetches_total", "outcome") == expected
    assert seen.value("router_fetch_seconds_total") == 0.75
    assert seen.value("router_fetched_tokens_total") == (16 if came else 0)
    await watched.house.stop()
