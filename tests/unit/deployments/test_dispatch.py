"""One request over several replicas: the client sees one undisturbed generation."""

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from deployments.channel.channel_client import ChannelClient
from deployments.channel.channel_server import ChannelAddress
from deployments.dispatch.leases import ReplicaGone, ReplicaInfo
from replicas.errors import Fault, InvalidRequest, MantaError, Overloaded, StepFailed
from replicas.types import Finish, FinishReason, GenerateRequest, PdTransferReport, RetryAs
from routing.types import PageFetch
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.sample_values import ask, ids, token
from tests.waiting import until_async


class Draining(ScriptedReplica):
    """Its lease fails once the router has the tokens that it sent, up to its pause."""

    def __init__(self, replica_id: str, *, have_come: Callable[[], bool]) -> None:
        super().__init__(replica_id)
        self.have_come = have_come

    async def lease(self, router_id: str, rid: str) -> MantaError | None:
        generation = asyncio.ensure_future(super().lease(router_id, rid))
        await until_async(lambda: not self.hold.is_set() and self.have_come())
        generation.cancel()
        raise ReplicaGone(f"replica {self.replica_id} drains")


class Mortal(ScriptedReplica):
    """It dies for good when it has sent ``life`` tokens of a request. Its connection alone tells of it, so that the
    router has them all."""

    def __init__(self, replica_id: str, *, life: int) -> None:
        super().__init__(replica_id)
        self.life = life

    async def attach(self, address: ChannelAddress) -> ReplicaInfo:
        if self.requests:
            raise ReplicaGone(f"replica {self.replica_id} is dead")
        return await super().attach(address)

    async def lease(self, router_id: str, rid: str) -> MantaError | None:
        try:
            return await super().lease(router_id, rid)
        except ReplicaGone:
            await asyncio.Event().wait()
            raise

    async def _generate(self, client: ChannelClient, request: GenerateRequest) -> None:
        self.die_at = len(request.resumed_ids) + self.life
        await super()._generate(client, request)


class Receiver(ScriptedReplica):
    """Its requests' fetches end with ``report``, before their first token."""

    def __init__(self, replica_id: str, *, report: PdTransferReport) -> None:
        super().__init__(replica_id)
        self.report_of_fetch = report

    async def _generate(self, client: ChannelClient, request: GenerateRequest) -> None:
        client.sink([replace(token(request, 0, 0, None), token_ids=(), text="", kv_transfer=self.report_of_fetch)])
        await super()._generate(client, request)


@pytest.mark.parametrize(("waited_s", "holds"), [(0.0, False), (0.5, True)])
async def test_a_fetch_that_failed_counts_against_the_link_only_if_it_was_asked_for(
    house: House, monkeypatch: pytest.MonkeyPatch, waited_s: float, holds: bool
) -> None:
    """What found no pages in time was not. It is a fetch's report, and no KV transfer's."""
    fetch = PageFetch(
        donor_id="r1", end_tokens=32, num_tokens=32, num_bytes=64, took_s=0.1, compute_s=1.0, within_s=0.5,
        donor_ttft_s=2.0,
    )  # fmt: skip
    monkeypatch.setattr("routing.router._fetch", lambda *_, **__: fetch)
    report = PdTransferReport(transferred=False, reason="too late", wait_s=waited_s)
    await house.ready(Receiver("r0", report=report))
    await house.collect(max_new_tokens=2)
    [record] = house.dispatcher.routes.recent()
    assert (record.tries[0].fetch_report, record.tries[0].kv_transfer) == (report, None)
    assert (house.router.link.rates(["r1"], ["r0"])[0, 0] == 0.0) == holds


async def test_a_replica_that_dies_midway_is_replaced_without_a_seam(house: House) -> None:
    first, second = ScriptedReplica("r0", die_at=3), ScriptedReplica("r1")
    await house.ready(first, second)
    deltas = await house.collect(max_new_tokens=8)
    assert ids(deltas) == list(range(1000, 1008))
    assert "".join(delta.text for delta in deltas) == "<0><1><2><3><4><5><6><7>"
    [resumed], [retry] = second.requests, house.dispatcher.retries
    assert (retry.replica_id, resumed.rid) == ("r0", "a1.1c0-me")
    assert 1 <= retry.num_delivered <= 3  # what had arrived when the death was noticed
    assert resumed.resumed_ids == (1000, 1001, 1002)[: retry.num_delivered]
    assert "r0" in retry.reason


async def test_a_lease_that_fails_after_the_first_tokens_moves_the_request_and_ends_it_where_it_was(
    house: House,
) -> None:
    """As where Serve drains the replica between the choice and the call: the request has begun there all the same."""
    running = house.dispatcher._running
    first = Draining("r0", have_come=lambda: any(attempt._progress.num_delivered == 3 for attempt in running))
    second = ScriptedReplica("r1")
    first.pause_at = 3
    await house.ready(first, second)
    assert ids(await house.collect(max_new_tokens=8)) == list(range(1000, 1008))
    assert first.aborts == ["a1.0-me"]
    assert second.requests[0].resumed_ids == (1000, 1001, 1002)
    assert house.dispatcher.retries[0].reason == "ReplicaGone: replica r0 drains"


async def test_each_unfinished_choice_is_resumed_by_itself_with_its_own_seed(house: House) -> None:
    first, second = ScriptedReplica("r0", die_at=2), ScriptedReplica("r1")
    await house.ready(first, second)
    deltas = await house.collect(n=3, max_new_tokens=4)
    assert [ids(deltas, index) for index in range(3)] == [[1000, 1001, 1002, 1003]] * 3
    assert [request.rid for request in second.requests] == ["a1.1c0-me", "a1.1c1-me", "a1.1c2-me"]
    seeds = [ask(n=3).sampling.for_choice(index).seed for index in range(3)]
    assert [request.sampling.seed for request in second.requests] == seeds
    assert [delta.finish is not None for delta in deltas].count(True) == 3


async def test_an_answer_outlives_any_number_of_replicas_that_each_bring_two_tokens(house: House) -> None:
    await house.ready(*(Mortal(f"r{i}", life=2) for i in range(11)))
    assert ids(await house.collect(max_new_tokens=22)) == list(range(1000, 1022))
    assert house.dispatcher.num_retries == 10


async def test_a_request_that_ends_each_replica_after_one_token_is_tried_max_tries_times(house: House) -> None:
    """The token of the prefill of what was delivered; the decode step behind it kills."""
    await house.ready(*(Mortal(f"r{i}", life=1) for i in range(8)))
    with pytest.raises(ReplicaGone):
        await house.collect(max_new_tokens=22)
    assert house.dispatcher.num_retries == 3


class Failing(ScriptedReplica):
    """A step of it fails with each request called "bad", at the end of its tokens: ``retry_as`` tells how. The engine
    dies of it ("died_in_step"), or goes on."""

    def __init__(self, replica_id: str, retry_as: RetryAs) -> None:
        super().__init__(replica_id)
        self.retry_as = retry_as

    async def _generate(self, client: ChannelClient, request: GenerateRequest) -> None:
        bad = request.rid.endswith("-bad")
        retry_as: RetryAs = "engine_dead" if self.retry_as == "died_in_step" and not bad else self.retry_as
        why = "IndexError: a secret"
        fails = Finish(reason=FinishReason.ERROR, message=why, fault=Fault.INTERNAL, retry_as=retry_as)
        done = Finish(reason=FinishReason.LENGTH)
        self.finish = fails if bad or retry_as == "engine_dead" else done
        await super()._generate(client, request)


KINDS: tuple[RetryAs, RetryAs] = ("step_failed", "died_in_step")


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)))
async def test_a_request_that_was_in_the_failed_step_of_two_replicas_is_refused_and_never_given_to_a_third(
    house: House, kinds: tuple[RetryAs, RetryAs]
) -> None:
    """Though it brought tokens each time. Those that only shared the engines have their third try."""
    replicas = [*(Failing(f"r{number}", kind) for number, kind in enumerate(kinds)), ScriptedReplica("r2")]
    await house.ready(*replicas)
    with pytest.raises(StepFailed) as refused:
        await house.collect(rid="a1.0-bad", max_new_tokens=4)
    assert (refused.value.fault, refused.value.code) == (Fault.INTERNAL, "step_failed")
    told = str(refused.value)
    assert re.search("request bad was in a step .* on replica r0 and on r1: .* Report it with this id", told)
    assert "secret" not in told
    assert [retry.replica_id for retry in house.dispatcher.retries] == ["r0", "r1"]
    assert "IndexError: a secret" in house.dispatcher.retries[0].reason
    assert replicas[2].requests == []
    assert ids(await house.collect(rid="a2.0-good", max_new_tokens=4)) == [1000, 1001, 1002, 1003]


async def test_where_no_other_replica_is_there_a_request_that_fails_alone_is_refused_at_once(house: House) -> None:
    await house.ready(Failing("r0", "step_failed"))
    with pytest.raises(StepFailed, match=r"request bad was in a step .* on replica r0: "):
        await house.collect(rid="a1.0-bad")


async def test_a_full_replica_is_passed_over_and_a_full_house_says_so(house: House) -> None:
    full, free = ScriptedReplica("r0", refuse=Overloaded("full")), ScriptedReplica("r1")
    await house.ready(full, free)
    assert len(ids(await house.collect())) == 8
    free.refuse = Overloaded("full too")
    with pytest.raises(Overloaded, match="full"):
        await house.collect(rid="a2.0-me")


async def test_a_request_that_is_wrong_is_not_tried_again(house: House) -> None:
    first, second = (ScriptedReplica(f"r{i}", refuse=InvalidRequest("no", param="n")) for i in range(2))
    await house.ready(first, second)
    with pytest.raises(InvalidRequest, match="no"):
        await house.collect()
    assert len(first.requests) + len(second.requests) == 1


async def test_a_new_request_waits_for_a_replica_that_serve_has_started_though_no_other_is_left(house: House) -> None:
    """In an update Serve stops the last old replica as soon as a new one runs, which the router has yet to meet."""
    house.add(ScriptedReplica("r0"))
    assert house.fleet.expects_one
    deltas = await house.collect(max_new_tokens=2)
    assert [token for delta in deltas for token in delta.token_ids] == [1000, 1001]
    assert not house.fleet.expects_one


async def test_a_client_that_leaves_cancels_its_lease(house: House) -> None:
    replica = ScriptedReplica("r0")
    await house.ready(replica)
    async with contextlib.aclosing(house.dispatcher.stream(ask(max_new_tokens=100))) as deltas:
        await anext(deltas)
        replica.hold.clear()
    await until_async(lambda: replica.num_aborted > 0)
    await until_async(lambda: replica.aborts == ["a1.0-me"])  # over the channel too
    house.dispatcher.check()


async def test_a_resumed_request_has_what_is_left_of_its_deadline_and_tells_how_long_it_has_waited(
    house: House,
) -> None:
    first, second = ScriptedReplica("r0", die_at=1), ScriptedReplica("r1")
    await house.ready(first, second)
    await house.collect(deadline_s=30.0)
    left_s, waited_s = second.requests[0].deadline_s, second.requests[0].waited_s
    assert left_s is not None
    assert 0 < left_s < 30.0
    assert waited_s > first.requests[0].waited_s
    assert left_s + waited_s == pytest.approx(30.0)
