"""Decisions can be looked up, explained and tried out; a saturated house says when to come back."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from unittest.mock import patch

import httpx
import pytest
from starlette.datastructures import Headers

from deployments.dispatch.attempt import TryLimits
from deployments.dispatch.dispatcher import RouteHints, Saturated
from deployments.dispatch.progress import left_after
from deployments.fleet.peers import FoundRoute, NoPeers
from deployments.http.arrivals import hints_of
from deployments.http.bodies import WireType
from deployments.http.convert import asked_of
from deployments.http.http_app import make_app
from deployments.http.http_errors import error_response
from deployments.http.routes import own_route
from deployments.http.service import Service
from deployments.record.route_log import RouteLog
from replicas.errors import InvalidRequest
from replicas.types import GenerateRequest
from routing.types import NoReplica
from tests.harness import Clock
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.listening import client_of
from tests.unit.deployments.sample_values import ask, stats
from tests.waiting import until_async


@pytest.fixture
async def scripted() -> AsyncIterator[House]:
    """Its clock stands still: what waits does not get less while a test is held up."""
    async with House(max_wait_s=10.0, clock=Clock()) as house:
        yield house


async def queued(house: House, tokens: int, **figures: float) -> ScriptedReplica:
    """Add a replica that computes 1,000 tokens a second, and before which ``tokens`` wait."""
    replica = ScriptedReplica(f"r{len(house.leases.replicas)}")
    replica.stats = stats(waiting_uncached_tokens=tokens, prefill_tokens_per_s=1000.0, **figures)
    await house.ready(replica)
    return replica


async def test_only_the_most_recent_are_kept_and_a_name_finds_the_last_request_that_had_it(scripted: House) -> None:
    await scripted.ready(ScriptedReplica("r0"))
    scripted.dispatcher.routes = routes = RouteLog(capacity=3)
    for rid in ("a.0-x", "b.0-y", "c.0-x", "d.0-z"):
        await scripted.collect(rid=rid)
        routes.check()
    assert len(routes) == 3
    assert [each.rid for each in routes.recent()] == ["b.0-y", "c.0-x", "d.0-z"]
    found = [routes.find(name) for name in ("x", "cmpl-y", "chatcmpl-z", "d.0-z", "w")]
    assert [each.rid if each else None for each in found] == ["c.0-x", "b.0-y", "d.0-z", "d.0-z", None]


async def test_lines_of_batches_push_no_request_of_others_out(scripted: House) -> None:
    await scripted.ready(ScriptedReplica("r0"))
    scripted.dispatcher.routes = routes = RouteLog(capacity=16)
    await scripted.collect(rid="a.0-asked")
    for number in range(40):
        await scripted.collect(rid=f"a.{number}-line{number}", offline=True)
        routes.check()
    assert [each.name for each in routes.recent()] == ["asked", "line38", "line39"]
    for number in range(16):
        await scripted.collect(rid=f"b.{number}-{number}")
        routes.check()
    assert [each.name for each in routes.recent()] == [str(number) for number in range(16)]
    scripted.dispatcher.routes = routes = RouteLog(capacity=1)
    for number in range(3):
        await scripted.collect(rid=f"c.{number}-{number}", offline=True)
        routes.check()
    assert [each.name for each in routes.recent()] == ["2"]


async def test_the_choices_of_one_key_are_bounded_and_those_of_others_are_not(scripted: House) -> None:
    """2,560 choices of one key kept another one's first token away for more than 20 s."""
    scripted.dispatcher._limits = TryLimits(max_choices_per_key=4)
    replica = ScriptedReplica("r0")
    await scripted.ready(replica)
    replica.hold.clear()
    mine, theirs, nobodys = ("0" * 16 + name for name in ("a" * 16, "b" * 16, ""))
    open_ones = [asyncio.create_task(scripted.collect(rid=f"{mine}.0-{i}", n=n)) for i, n in enumerate((3, 1))]
    await until_async(lambda: len(replica.requests) == 2)
    for _ in range(2):  # the refusal itself is not counted
        with pytest.raises(Saturated, match="4 choices of this API key run or wait, 1 more would exceed 4") as error:
            await scripted.collect(rid=f"{mine}.0-more")
    response = error_response(error.value, {"path": "/generate"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert (scripted.dispatcher.watch.counts["shed"], scripted.dispatcher.watch.counts["requests"]) == (2, 2)
    named = (f"{theirs}.0-x", f"{nobodys}.0-x", f"{nobodys[:-1]}1.0-y")
    others = [asyncio.create_task(scripted.collect(rid=rid, n=4)) for rid in named]
    await until_async(lambda: len(replica.requests) == 5)
    open_ones[0].cancel()  # its client leaves
    await asyncio.wait(open_ones[:1])
    replica.hold.set()
    await scripted.collect(rid=f"{mine}.0-again", n=3)
    await asyncio.gather(*others, open_ones[1])
    assert not scripted.dispatcher.choices
    scripted.dispatcher.check()


async def test_when_every_queue_is_too_long_the_answer_is_429_with_the_wait(scripted: House) -> None:
    """15 and 12 s of prompt tokens wait; 10 s are allowed: come back in 2."""
    for tokens in (15_000, 12_000):
        await queued(scripted, tokens)
    with pytest.raises(Saturated, match=r"the shortest wait is estimated at 1\d\.\d s, at most 10 s") as error:
        await scripted.collect(rid="a1.0-me")
    response = error_response(error.value, {"path": "/generate"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    assert scripted.router.num_open == 0
    record = scripted.dispatcher.routes.find("me")
    assert record is not None
    assert "Saturated" in (record.tries[0].failure or "")


async def test_a_tenant_is_not_refused_because_another_one_floods_the_queue(scripted: House) -> None:
    """12 s wait, 10 are allowed. Replicas would serve one request of each tenant before the light one's: 2 of 5."""
    replica = await queued(scripted, 12_000)
    replica.hold.clear()
    scripted.dispatcher._limits = TryLimits()
    tenants = ["heavy"] * 4 + ["other"]
    waiting = [asyncio.create_task(scripted.collect(rid=f"a{at}.0-x", tenant=of)) for at, of in enumerate(tenants)]
    await until_async(lambda: len(replica.requests) == 5)
    scripted.dispatcher._limits = TryLimits(max_wait_s=10.0)
    waiting.append(asyncio.create_task(scripted.collect(rid="b1.0-x", tenant="light")))
    await until_async(lambda: len(replica.requests) == 6)
    with pytest.raises(Saturated, match=r"at 1\d\.\d s, at most 10 s"):
        await scripted.collect(rid="a9.0-x", tenant="heavy")
    replica.hold.set()
    await asyncio.gather(*waiting)


@pytest.mark.parametrize(("own_len", "others_len", "is_let_in"), [(4, 400, True), (400, 4, False)])
async def test_of_others_queue_counts_as_many_tokens_as_a_tenant_waits_for_itself(
    scripted: House, own_len: int, others_len: int, is_let_in: bool
) -> None:
    """12 s wait, 10 are allowed: a short prompt goes before most of another's long one, a long one before nothing."""
    replica = await queued(scripted, 12_000)
    replica.hold.clear()
    scripted.dispatcher._limits = TryLimits()
    waiting = [
        asyncio.create_task(scripted.collect(rid=f"a{at}.0-x", tenant=tenant, num_tokens=length))
        for at, (tenant, length) in enumerate({"other": others_len, "one": 4, "two": 4}.items())
    ]
    await until_async(lambda: len(replica.requests) == 3)
    scripted.dispatcher._limits = TryLimits(max_wait_s=10.0)
    asked = asyncio.create_task(scripted.collect(rid="b1.0-x", tenant="three", num_tokens=own_len))
    await until_async(lambda: len(replica.requests) == 4 or asked.done())
    assert (not asked.done()) == is_let_in
    replica.hold.set()
    await asyncio.gather(*waiting, asked, return_exceptions=True)
    assert asked.exception() is None if is_let_in else isinstance(asked.exception(), Saturated)


async def test_waits_that_turn_out_longer_than_estimated_are_refused_before_the_setting_is_reached(
    scripted: House,
) -> None:
    """6 s wait, 10 are allowed. Once first tokens have come after twice the estimate, 6 s are too long; but not before
    one has come after more than 10 s: the estimate may have become right since it was wrong."""
    await queued(scripted, 6_000)
    await scripted.collect(rid="a1.0-soon")
    record = scripted.dispatcher.routes.find("soon")
    assert record is not None
    assert scripted.router.overrun.factor == 1.0  # it came at once, and was noted
    quick = dataclasses.replace(record.tries[0].decision, predicted_ttft_s=0.5)
    for _ in range(9):
        scripted.router.began(quick, 9.0)
    assert scripted.router.overrun.factor == 4.0
    await scripted.collect(rid="a1.0-well")
    scripted.router.began(record.tries[0].decision, 100.0)
    scripted.router.began(record.tries[0].decision, 100.0)
    with pytest.raises(Saturated, match=r"at 2\d\.\d s \(first tokens take 4\.0 times their estimate\), at most 10 s"):
        await scripted.collect(rid="a1.0-late")
    assert scripted.router.num_open == 0


async def test_hints_limit_the_choice(scripted: House) -> None:
    await scripted.ready(ScriptedReplica("r0"), ScriptedReplica("r1"))
    only = hints_of(Headers({"x-manta-replicas": "r1, r9", "x-manta-session": "s"}))
    assert only == RouteHints(session_id="s", allowed=frozenset({"r1", "r9"}))
    for number in range(3):
        await scripted.collect(only, rid=f"a{number}.0-me{number}")
    assert {each.tries[0].decision.replica_id for each in scripted.dispatcher.routes.recent()} == {"r1"}
    with pytest.raises(NoReplica, match="r9"):
        await scripted.collect(RouteHints(allowed=frozenset({"r9"})), rid="b.0-me")
    with pytest.raises(InvalidRequest, match="names 0 replicas"):
        hints_of(Headers({"x-manta-replicas": " , "}))


BODY = {"prompt": "The harbour had been quiet for most of the winter. " * 12, "max_tokens": 2, "temperature": 0}


@pytest.mark.model
async def test_the_header_and_the_usage_agree_and_the_second_time_is_cached(
    client: httpx.AsyncClient, house: House
) -> None:
    await client.get("/flush_cache?timeout=5")
    first = await client.post("/v1/completions", json=BODY)
    assert "replica=r0; overlap_predicted=0; overlap_actual=0; policy=round_robin" in first.headers["x-manta-route"]
    await until_async(lambda: house.router.num_pages("r0")[0] >= 8)  # the replica has told what it keeps
    again = await client.post("/v1/completions", json=BODY)
    cached = again.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 64
    assert f"overlap_predicted={cached}; overlap_actual={cached};" in again.headers["x-manta-route"]
    batch = await client.post("/v1/completions", json={**BODY, "prompt": ["a", "b"]})
    assert batch.headers["x-manta-route"].count("replica=r0") == 2
    assert "x-manta-route" not in (await client.get("/ping")).headers
    assert house.dispatcher.watch.counts["requests"] == 4  # prompts, each once


@pytest.mark.model
async def test_a_route_is_told_and_a_dry_run_leaves_no_trace(client: httpx.AsyncClient, house: House) -> None:
    answer = await client.post("/v1/completions", json=BODY, headers={"X-Request-Id": "tell-me"})
    for name in ("tell-me", answer.json()["id"]):
        told = (await client.get(f"/route/{name}")).json()
        assert (told["rid"], told["replica"], told["outcome"], told["num_retries"]) == ("tell-me", "r0", "ok", 0)
        assert told["tries"][0]["actual"]["ttft_s"] > 0
        assert sum(told["stages"].values()) == pytest.approx(told["total_s"])
        assert min(told["stages"]["prefill_s"], told["stages"]["decode_s"]) > 0  # told by the engine, over the channel
    missing = await client.get("/route/unknown")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "route_not_found")
    before = (len(house.dispatcher.routes), house.router.num_pages("r0"), house.router.num_open)
    for body in ({"prompt": BODY["prompt"]}, {"messages": [{"role": "user", "content": "Hi"}]}, {"input_ids": [1, 2]}):
        dry = (await client.post("/route/explain", json=body)).json()
        assert (dry["dry_run"], dry["replica"], len(dry["candidates"])) == (True, "r0", 1)
    assert (len(house.dispatcher.routes), house.router.num_pages("r0"), house.router.num_open) == before
    wrong = await client.post("/route/explain", json={"prompt": "a", "text": "b"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.model
async def test_a_route_that_another_router_decided_is_told_by_whichever_is_asked(service: Service) -> None:
    async with House(router_id="another router") as other:
        await other.ready(ScriptedReplica("r7"))
        await other.collect(rid="c.0-theirs")

        class One(NoPeers):
            async def find_route(self, name: str) -> FoundRoute:
                return FoundRoute(body=own_route(other.dispatcher, name))

        async with client_of(make_app(dataclasses.replace(service, peers=One()))) as client:
            found = (await client.get("/route/theirs")).json()
            assert (found["rid"], found["replica"], found["router"]) == ("theirs", "r7", "another router")
            assert (await client.get("/route/unknown")).status_code == 404
            ours = (await client.post("/v1/completions", json=BODY, headers={"X-Request-Id": "ours"})).json()
            assert (await client.get(f"/route/{ours['id']}")).json()["router"] == "router"


async def test_the_router_learns_how_long_a_request_may_wait(scripted: House) -> None:
    await scripted.ready(ScriptedReplica("r0"))
    with patch.object(scripted.router, "choose", wraps=scripted.router.choose) as choose:
        await scripted.collect(rid="a1.0-me")
    assert [call.args[0].max_wait_s for call in choose.call_args_list] == [10.0]


async def test_a_request_that_can_be_in_time_is_not_refused_because_late_ones_wait(scripted: House) -> None:
    """12 s wait, 10 are allowed; but a request that can be in time waits for 1 s of them."""
    await queued(scripted, 12_000, late_uncached_tokens=11_000, late_factor=2.0)
    await scripted.collect(objective_s=5.0, rid="a1.0-in-time")
    with pytest.raises(Saturated, match=r"the shortest wait is estimated at 1\d\.\d s, at most 10 s"):
        await scripted.collect(objective_s=0.5, rid="a1.0-late")
    assert scripted.router.num_open == 0


async def test_a_strict_objective_is_refused_at_once_where_it_cannot_be_met(scripted: House) -> None:
    """1,000 tokens of those that would be in time too are before it, which take 1 s; late ones are not."""
    await queued(scripted, 9_000, late_uncached_tokens=8_000, late_factor=2.0)
    strict, loose = (hints_of(Headers({"x-manta-objective": given})) for given in ("0.5; strict", "0.5"))
    await scripted.collect(objective_s=2.0, rid="a1.0-in-time", hints=strict)
    await scripted.collect(objective_s=0.5, rid="a2.0-loose", hints=loose)
    late = r"after 9\.\d s, which is later than its strict x-manta-objective of 0\.5 s: try again"
    with pytest.raises(Saturated, match=late) as refused:
        await scripted.collect(objective_s=0.5, rid="a3.0-strict", hints=strict)
    assert refused.value.retry_after_s == pytest.approx(8.5, abs=0.2)
    assert scripted.router.num_open == 0
    resumed = scripted.dispatcher.stream(ask(objective_s=0.5, rid="a4.0-resumed"), strict, made={0: [5]})
    assert [delta async for delta in resumed], "its first token has come: no objective refuses the rest"
    with pytest.raises(InvalidRequest, match="'very' is unknown"):
        hints_of(Headers({"x-manta-objective": "0.5; very"}))
    assert hints_of(Headers({"x-manta-objective": "0.5;"})).strict is False


async def test_the_objective_is_the_headers_or_the_settings_and_what_is_left_of_it_at_the_next_try(
    scripted: House,
) -> None:
    def said(given: str) -> GenerateRequest:
        fields = asked_of(GenerateRequest, WireType(), Headers({"x-manta-objective": given}))
        return GenerateRequest(rid="r", token_ids=[1], **fields)  # type: ignore[arg-type]

    assert said("2.5").objective_s == 2.5
    for wrong in ("0", "-1", "nan", "1e9"):
        with pytest.raises(InvalidRequest, match=r"x-manta-objective: must be above 0 and at most 604,800, got"):
            said(wrong).validate(vocab_size=9)
    with pytest.raises(InvalidRequest, match=r"x-manta-objective: 'soon' is no number"):
        said("soon")
    await scripted.ready(ScriptedReplica("r0"))
    await scripted.collect(objective_s=7.0, rid="a1.0-own")
    await scripted.collect(rid="a2.0-all")
    own, every = (record.tries[0].decision.objective_s for record in scripted.dispatcher.routes.recent())
    assert 6.0 < own <= 7.0
    assert 1.0 < every <= 2.0  # observability.ttft_objective_s
    left = left_after(GenerateRequest(rid="r", token_ids=[1], deadline_s=9.0, objective_s=3.0), 2.0)
    assert (left.deadline_s, left.objective_s) == (7.0, 1.0)
    assert left_after(left, 5.0).objective_s == 0.001
