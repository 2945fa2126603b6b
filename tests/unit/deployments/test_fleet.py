"""Which replicas a router sees, when it stops trusting one, and what becomes of the requests of one that hangs."""

import asyncio
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError

from deployments.channel.channel_server import ChannelAddress
from deployments.channel.frames import ReplicaReport
from deployments.dispatch import ray_leases
from deployments.dispatch.attempt import Tries
from deployments.dispatch.leases import ReplicaGone, ReplicaHangs, ReplicaInfo
from deployments.fleet import silence
from deployments.fleet.fleet import LOOK_AGAIN_S, SETTLED_STEPS, STALE_S, Fleet, Hangs
from deployments.fleet.silence import AGAIN_S, ANSWERS, DEAD_S, FIRST_WORD_S, GONE, HEALTH_S, KILLED, HangKiller
from replicas.errors import EngineDead
from replicas.types import TokenDelta
from routing.router import Router
from routing.types import Ending, ReplicaView, Role, RouteOutcome, RouteQuery
from tests.harness import Clock
from tests.unit.deployments.in_process import House, LocalLeases, ScriptedReplica
from tests.unit.deployments.sample_values import ask, ids, info, stats, token
from tests.waiting import until_async

BOTH = ("r0", "r1")


def report(step_age_s: float = 0.0, *, steps: int = 1000, longest_step_s: float = 0.0, **more: Any) -> ReplicaReport:
    said = stats(num_decode_steps=steps, longest_step_s=longest_step_s)
    return ReplicaReport(**{"stats": said, "error": None, "num_open": 1, "step_age_s": step_age_s, **more})


async def test_statistics_that_come_again_do_not_bring_back_a_request_whose_client_has_left() -> None:
    """A step of 3 s runs: each report has the statistics from before it. The second came a millisecond quicker."""
    clock = Clock()
    router = Router("estimated_ttft", Random(0), clock)
    fleet = Fleet(router=router, leases=LocalLeases(), clock=clock)
    fleet.set_members(["r0"])
    fleet._infos["r0"] = info("r0")
    fleet._words.attached(info("r0"))
    fleet.on_report("r0", report(age_s=0.002))
    decision = router.choose(RouteQuery(rid="r", token_ids=[1] * 5_000))
    said = stats(waiting_uncached_tokens=5_000, prefill_tokens_per_s=100.0)
    for now_s, age_s in ((1.0, 0.103), (1.1, 0.202)):
        clock.now_s = now_s
        fleet.on_report("r0", report(stats=said, age_s=age_s))
        router.done(decision, RouteOutcome(ending=Ending.CANCELLED))
        [told] = router.explain_only(RouteQuery(rid="r", token_ids=[1] * 10)).candidates
        assert told.queued_tokens == 0
    assert fleet.report_ages_s() == {"r0": pytest.approx(0.203)}


async def test_a_replica_that_leaves_gets_nothing_more_and_is_seen_to_drain_until_its_connection_ends() -> None:
    clock = Clock()
    fleet = fleet_of(*BOTH, clock=clock)
    for name in BOTH:
        fleet.on_report(name, report())
    fleet.set_members(["r1"])
    assert [each.replica_id for each in fleet.infos] == ["r1"]
    clock.now_s = 3.0
    for name in BOTH:
        fleet.on_report(name, report())
    clock.now_s = 4.0
    [_, draining] = fleet.seen()
    assert (draining.replica_id, draining.state, draining.report_age_s) == ("r0", "draining", 1.0)
    assert (fleet.num_ready, fleet.num_draining) == (1, 1)
    clock.now_s = 3.0 + DEAD_S
    assert fleet.num_draining == 0, "its machine is gone: the connection never ends"
    fleet.on_lost("r0")
    fleet.on_report("r1", report())
    assert fleet.describe() == "r1: accepting"
    fleet.check()


async def test_a_member_that_never_reports_is_waited_for_once_and_not_by_every_request_to_come() -> None:
    clock = Clock()
    fleet = Fleet(router=House().router, leases=LocalLeases(), clock=clock)
    fleet.set_members(BOTH)
    fleet.on_report("r0", report())
    clock.now_s = 0.9 * FIRST_WORD_S
    assert fleet.expects_one
    clock.now_s = 1.1 * FIRST_WORD_S
    fleet.set_members(BOTH)
    assert not fleet.expects_one
    fleet.set_members((*BOTH, "r2"))
    assert fleet.expects_one
    fleet._attached(info("r2"))
    fleet.on_report("r2", report())
    assert not fleet.expects_one


async def test_a_replica_that_cannot_be_reached_yet_is_tried_again(house: House) -> None:
    class Shy(ScriptedReplica):
        num_asked = 0

        async def attach(self, address: ChannelAddress) -> ReplicaInfo:
            self.num_asked += 1
            if self.num_asked == 1:
                raise ReplicaGone("not yet")
            return await super().attach(address)

    shy = Shy("r0")
    house.add(shy)
    assert await house.fleet.wait_ready(30)
    assert shy.num_asked == 2


def fleet_of(*names: str, clock: Clock, **options: Any) -> Fleet:
    """A fleet whose members ``names`` are attached and report to it by calls."""
    fleet = Fleet(router=House().router, leases=LocalLeases(), clock=clock, **options)
    fleet.set_members(names)
    for name in names:
        fleet._attached(info(name))
    return fleet


async def test_requests_that_wait_for_pages_are_counted_apart_from_those_that_wait_for_prefill() -> None:
    fleet = fleet_of("r0", clock=Clock())
    said = stats(num_running=1, num_waiting=2, num_preallocating=3, num_receiving=4)
    fleet.on_report("r0", ReplicaReport(stats=said, error=None, num_open=0))
    [view] = fleet._router.views
    assert (view.num_running, view.num_waiting, view.num_receiving) == (1, 2, 7)


@pytest.mark.parametrize(("report_period_s", "silent_s", "a_second_later"), [(0.1, 1.0, 2), (2.0, 10.0, 1)])
async def test_a_silent_replica_is_passed_over_while_another_reports(
    report_period_s: float, silent_s: float, a_second_later: int
) -> None:
    """A process that is stopped keeps its connection: only its silence tells. If all are silent, the machine is."""
    clock = Clock()
    fleet = fleet_of(*BOTH, clock=clock, report_period_s=report_period_s)
    for name in BOTH:
        fleet.on_report(name, report())
    clock.now_s += 0.9 * silent_s
    fleet.on_report("r1", report())
    assert fleet.num_ready == 2
    clock.now_s += 0.2 * silent_s
    assert fleet.describe() == "r0: silent, r1: accepting"
    clock.now_s += 1.0
    assert fleet.num_ready == a_second_later


async def test_a_report_shows_the_router_one_replica_and_others_once_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a thousand replicas ten thousand reports come in a second: none may cost as much as all replicas do."""
    clock, names = Clock(), tuple(f"r{at}" for at in range(20))
    fleet = fleet_of(*names, clock=clock)
    for name in names:
        fleet.on_report(name, report())
    shown: list[tuple[str, str]] = []
    tell = fleet._router.report

    def note(view: ReplicaView) -> None:
        shown.append((view.replica_id, view.state))
        tell(view)

    monkeypatch.setattr(fleet._router, "report", note)
    for second in (0.5, 1.2, 1.2, 1.2 + LOOK_AGAIN_S):
        clock.now_s = second
        for name in names[1:]:
            fleet.on_report(name, report())
    assert shown.count(("r0", "silent")) == 1
    assert [name for name, _ in shown if name != "r0"] == [*names[1:]] * 4
    fleet.on_report("r0", report())
    assert shown[-1] == ("r0", "accepting")
    assert fleet.num_ready == 20
    fleet.check()


async def test_the_age_of_a_report_grows_for_as_long_as_a_member_is_mute() -> None:
    """Joined at 0, a report at 10 s of a step that began 4 s before it; then silence, through attaching again."""
    clock = Clock()
    fleet = Fleet(router=House().router, leases=LocalLeases(), clock=clock)
    fleet.set_members({"r0"})
    clock.now_s = 10.0
    assert fleet.report_ages_s() == {"r0": 10.0}
    fleet._attached(info("r0"))
    fleet.on_report("r0", report(age_s=4.0))
    assert fleet.report_ages_s() == {"r0": 4.0}
    [seen] = fleet.seen()
    assert seen.report_age_s == 4.0
    ages = []
    for _ in range(6):
        clock.now_s += STALE_S
        fleet.attach_silent_again()
        fleet._attached(info("r0"))  # it can be attached, and says nothing
        ages.append(fleet.report_ages_s()["r0"])
    assert ages == [4 + STALE_S * (turn + 1) for turn in range(6)]
    fleet.check()
    fleet.set_members(set())
    assert fleet.report_ages_s() == {}


async def test_a_silent_replica_is_attached_again_and_the_second_time_over_a_new_connection() -> None:
    """A report in between means that the connection works."""
    clock, asked = Clock(), list[bool]()

    class Mute(ScriptedReplica):
        async def attach(self, address: ChannelAddress) -> ReplicaInfo:
            asked.append(address.renew)
            return info("r0")

    leases = LocalLeases()
    leases.replicas["r0"] = Mute("r0")
    fleet = Fleet(router=House().router, leases=leases, clock=clock)
    address = ChannelAddress(router_id="router", node_id="here", unix_path="", host="", port=1, token="")
    fleet.start(address, leave=lambda *_: None)
    fleet.set_members({"r0"})
    for reports in (False, False, True, False):
        await asyncio.sleep(0)
        if reports:
            fleet.on_report("r0", report())
        clock.now_s += STALE_S + 1
        fleet.attach_silent_again()
        fleet.check()
    await asyncio.sleep(0)
    assert asked == [False, False, True, False, True]
    await fleet.stop()


def states_of(fleet: Fleet) -> dict[str, tuple[str, str]]:
    return {each.replica_id: (each.state, each.why) for each in fleet.seen()}


async def test_a_replica_is_silent_from_its_first_missed_reports_until_it_speaks_or_is_gone() -> None:
    """Also once it is attached again, or its connection has ended: what has attached once starts no more."""
    clock = Clock()
    fleet = fleet_of(*BOTH, clock=clock)
    assert states_of(fleet) == dict.fromkeys(BOTH, ("starting", "")), "attached; its first report is on its way"
    for name in BOTH:
        fleet.on_report(name, report())
    told = []
    for second in (1.2, 4.2, 20.0, 50.0):
        clock.now_s = second
        fleet.on_report("r1", report())
        fleet.attach_silent_again()
        [seen, other] = fleet.seen()
        told.append((seen.state, seen.why))
        assert (seen.report_age_s, other.state) == (second, "accepting")
        assert seen.info == info("r0"), "its card, and its target"
        fleet.check()
    assert told == [("silent", f"it has said nothing for {second} s") for second in (1.2, 4.2, 20.0, 50.0)]
    assert fleet.describe() == "r0: silent, r1: accepting"
    fleet._attached(info("r0"))
    assert states_of(fleet)["r0"][0] == "silent", "it has not spoken yet"
    fleet.on_report("r0", report())
    assert states_of(fleet)["r0"] == ("accepting", "")
    fleet.on_lost("r0")
    assert states_of(fleet)["r0"][0] == "silent"
    fleet.set_members({"r1"})
    assert states_of(fleet).keys() == {"r1"}
    fleet.check()


def test_the_reason_shown_is_what_the_router_has_found() -> None:
    fleet = fleet_of(*BOTH, clock=Clock())
    fleet.on_report("r1", report())
    fleet.on_report("r0", report(5.0))
    assert states_of(fleet)["r0"] == ("unhealthy", "its step has been running for 5.0 s")
    fleet.on_report("r0", report(error="rank 1 died"))
    assert states_of(fleet)["r0"] == ("unhealthy", "rank 1 died")


async def test_a_replica_that_stays_silent_is_ended_once_and_one_that_has_left_meanwhile_too() -> None:
    """Serve may have given it up before, and then waits for its drain while it keeps its CPUs."""
    clock, ended = Clock(), list[str]()

    async def end(info: ReplicaInfo) -> str:
        ended.append(info.replica_id)
        return KILLED

    killer = HangKiller(after_s=60.0, end=end)
    fleet = fleet_of("r0", "r1", "r2", clock=clock, killer=killer)

    async def look(now_s: float) -> list[str]:
        clock.now_s = now_s
        fleet.on_report("r2", report())
        fleet.attach_silent_again()
        killer.look(fleet._words.of, clock())
        await asyncio.sleep(0)
        return sorted(ended)

    for name in BOTH:
        fleet.on_report(name, report())
    assert await look(59.0) == []
    fleet.set_members({"r0", "r2"})  # r1: its connection stands
    assert await look(61.0) == ["r0", "r1"]
    fleet.on_lost("r1")
    fleet.on_lost("r0")
    assert await look(80.0) == ["r0", "r1"], "that is not asked for again at once"
    fleet.set_members({"r2"})
    assert await look(200.0) == ["r0", "r1"], "nobody is left"
    never = HangKiller(after_s=0.0, end=end)
    clock.now_s += 1000.0
    never.look(fleet._words.of, clock())
    await asyncio.sleep(0)
    assert len(ended) == 2


async def test_what_drained_has_not_died_and_a_connection_that_never_ends_is_forgotten_after_a_while() -> None:
    """A node that lost its power closes no connection."""
    clock = Clock()
    fleet = fleet_of(*BOTH, clock=clock)
    fleet.on_report("r0", report(draining=True))
    fleet.on_report("r1", report())
    clock.now_s = 7.0  # this router stood still, or the two are silent
    fleet.set_members(())
    assert {each.replica_id: each.died for each in fleet.gone} == {"r0": False, "r1": True}
    assert fleet._words.of.keys() == set(BOTH)
    clock.now_s = 700.0
    fleet.set_members(())
    assert not fleet._words.of


@pytest.mark.parametrize(
    ("answer", "found", "killed"),
    [
        (None, ANSWERS, False),
        (RayTaskError("check_health", "", EngineDead("ill")), ANSWERS, False),  # Serve replaces it
        (GetTimeoutError(), KILLED, True),
        (ActorDiedError(), GONE, False),
        (ValueError("no actor of this name"), GONE, False),
    ],
)
def test_only_a_replica_that_does_not_answer_its_own_node_is_killed(
    answer: Exception | None, found: str, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that is cut off misses a healthy replica as long."""
    ended: list[Any] = []

    def get(ref: Any, timeout: float) -> None:
        assert timeout == HEALTH_S
        if answer is not None:
            raise answer

    monkeypatch.setattr("ray.get_actor", lambda name, namespace: Mock())
    monkeypatch.setattr("ray.get", get)
    monkeypatch.setattr("ray.kill", lambda actor, no_restart: ended.append(actor))
    assert silence.kill_if_hung("SERVE_REPLICA::manta#ModelReplica#r0") == found
    assert bool(ended) == killed


async def test_where_a_replicas_node_cannot_be_asked_nothing_is_done_and_it_is_asked_again_later() -> None:
    """The router may be the one that is cut off."""
    asked: list[str] = []

    async def end(info: ReplicaInfo) -> str:
        asked.append(info.replica_id)
        raise TimeoutError

    killer = HangKiller(after_s=60.0, end=end)
    fleet = fleet_of("r0", clock=Clock(), killer=killer)
    for now_s, count in ((61.0, 1), (61.0 + AGAIN_S - 1, 1), (61.0 + AGAIN_S, 2)):
        killer.look(fleet._words.of, now_s)
        await asyncio.sleep(0)
        assert len(asked) == count


async def test_a_replica_that_does_not_answer_is_left_out_of_the_answers(house: House) -> None:
    await house.ready(ScriptedReplica("r0"), ScriptedReplica("r1"))

    async def ask(replica_id: str) -> int:
        if replica_id == "r0":
            raise ReplicaGone("gone")
        return 7

    assert await house.fleet.ask_all(ask) == {"r1": 7}

    async def ask_stuck(replica_id: str) -> int:
        return await asyncio.Event().wait() if replica_id == "r0" else 7

    async with asyncio.timeout(4):  # ANSWER_S is 5
        assert await house.fleet.ask_all(ask_stuck, timeout_s=0.01) == {"r1": 7}


def test_a_listener_hears_the_members_and_each_change() -> None:
    heard: list[frozenset[str]] = []
    leases = ray_leases.RayLeases()
    leases.set_members(ray_leases.key("app", "PrefillReplica"), Mock(), frozenset("p"))
    assert [leases.role_of(name) for name in "px"] == [Role.PREFILL, Role.UNIFIED]
    deployment = ray_leases.key("app", "a deployment of this test")
    ray_leases.publish(deployment, frozenset({"r0"}))
    ray_leases.listen(deployment, heard.append)
    ray_leases.publish(deployment, frozenset({"r0", "r1"}))
    ray_leases.publish(ray_leases.key("app", "another"), frozenset({"x"}))
    assert heard == [frozenset({"r0"}), frozenset({"r0", "r1"})]


async def test_a_router_that_stops_attaches_no_replica_again(house: House) -> None:
    """Its channel ends the connections, which is not to be mistaken for replicas that died."""
    asked: list[str] = []

    class Asked(ScriptedReplica):
        async def attach(self, address: ChannelAddress) -> ReplicaInfo:
            asked.append(self.replica_id)
            return await super().attach(address)

    house.add(Asked("r0"))
    assert await house.fleet.wait_ready(30)
    await house.fleet.stop()
    house.fleet.on_lost("r0")
    await asyncio.sleep(0)
    assert asked == ["r0"]


def hangs_of(clock: Clock, *names: str) -> Hangs:
    """Hangs that has heard ``names``."""
    hangs = Hangs(hang_s=4.0, silent_s=1.0, clock=clock)
    for name in names:
        hangs.heard(name, report())
    return hangs


def test_a_silent_replica_hangs_after_the_timeout_while_another_one_speaks() -> None:
    clock = Clock()
    hangs = hangs_of(clock, *BOTH)
    clock.now_s = 3.9
    hangs.heard("r1", report())
    assert hangs.find(BOTH) == {}
    clock.now_s = 4.1
    assert hangs.find(BOTH) == {"r0": "it has said nothing for 4.1 s"}
    assert hangs.find(["r0"]) == {}, "there is nowhere to go"
    clock.now_s = 9.0
    assert hangs.find(BOTH) == {}, "all are silent: it is the machine that is busy"
    hangs.heard("r1", report())
    hangs.lost("r0")
    assert hangs.find(BOTH) == {}, "a connection that ended has no streams"


def test_a_silent_prefill_replica_hangs_after_twice_as_long_and_in_a_step_as_soon_as_others() -> None:
    """Heartbeats of the decode side find its silence within 4 s; of its engine thread they tell nothing."""
    clock = Clock()
    hangs = hangs_of(clock, *BOTH)
    for now_s, found in ((7.9, {}), (8.1, {"r0": "it has said nothing for 8.1 s"})):
        clock.now_s = now_s
        hangs.heard("r1", report())
        assert hangs.find(["r1"], prefill=["r0"]) == found
    hangs.heard("r0", report(4.2))
    assert hangs.find(["r1"], prefill=["r0"]) == {"r0": "its step has been running for 4.2 s"}


def test_a_step_hangs_after_the_timeout_and_four_times_the_longest_recent_step_of_any_replica() -> None:
    hangs = hangs_of(Clock())
    hangs.heard("r1", report(longest_step_s=0.5))
    hangs.heard("r0", report(3.9))
    assert hangs.find(BOTH) == {}
    hangs.heard("r0", report(4.2))
    assert hangs.find(BOTH) == {"r0": "its step has been running for 4.2 s"}
    hangs.heard("r1", report(longest_step_s=3.0))  # a chunk of such a prompt takes so long
    assert hangs.find(BOTH) == {}
    hangs.heard("r0", report(12.5))
    assert hangs.find(BOTH).keys() == {"r0"}
    hangs.heard("r1", report(12.5, longest_step_s=3.0))
    assert hangs.find(BOTH) == {}, "neither can go on for the other"


def test_an_engines_first_steps_may_take_long() -> None:
    """They compile, and no step has told yet how long one takes."""
    hangs = hangs_of(Clock())
    hangs.heard("r1", report())
    hangs.heard("r0", report(60.0, steps=SETTLED_STEPS - 1))
    assert hangs.find(BOTH) == {}
    hangs.heard("r0", report(60.0, steps=SETTLED_STEPS))
    assert hangs.find(BOTH).keys() == {"r0"}


def test_time_in_which_the_router_itself_stood_still_is_not_silence() -> None:
    clock = Clock()
    hangs = hangs_of(clock, *BOTH)
    clock.now_s = 10.0
    hangs.heard("r1", report())  # read first; what r0 sent meanwhile is not read yet
    hangs.stood_still(9.5)
    assert hangs.find(BOTH) == {}
    clock.now_s = 13.6
    hangs.heard("r1", report())
    assert hangs.find(BOTH).keys() == {"r0"}


def test_a_prefill_replica_alone_cannot_go_on_for_one_that_hangs() -> None:
    clock = Clock()
    fleet, left = fleet_of(*BOTH, clock=clock), list[str]()
    fleet._leave = lambda replica_id, error: left.append(replica_id)
    fleet._infos["r1"] = info("r1", role=Role.PREFILL)
    for name in BOTH:
        fleet.on_report(name, report())
    clock.now_s = 5.0
    fleet.on_report("r1", report())
    fleet.leave_hanging()
    assert left == []
    fleet._infos["r1"] = info("r1")
    fleet.leave_hanging()
    assert left == ["r0"]


@pytest.mark.parametrize("constrained", [False, True])
def test_tries_are_counted_since_the_last_that_brought_two_tokens_of_one_choice(constrained: bool) -> None:
    tries, gone, asked = Tries(2), ReplicaGone("gone"), ask(n=2)
    for number in range(5):  # replicas that die one after the other under one answer
        assert tries.number == number
        assert not tries.is_last or number
        tries.brought(token(asked, 0, 0, None), constrained=constrained)
        tries.brought(token(asked, 0, 1, None), constrained=constrained)
        assert not tries.is_last
        assert tries.failed(f"r{number}", gone, "me")[1]
        assert tries.excluded == {f"r{number}"}
    tries.brought(token(asked, 0, 2, None), constrained=constrained)
    tries.brought(token(asked, 1, 0, None), constrained=constrained)  # one token of each choice: both come from prefill
    assert tries.is_last
    assert not tries.failed("r9", gone, "me")[1]


def test_tokens_that_a_grammar_may_have_forced_count_as_one() -> None:
    """Those of one delta: they came from the prefill of what was delivered, without a decode step."""
    tries, run = Tries(2), replace(token(ask(), 0, 0, None), token_ids=(1, 2, 3, 4))
    assert tries.failed("r0", ReplicaGone("gone"), "me")[1]
    tries.brought(run, constrained=True)
    tries.brought(replace(run, token_ids=()), constrained=True)
    assert tries.is_last
    tries.brought(run, constrained=True)
    assert not tries.is_last


def test_a_replica_that_hung_may_be_tried_again() -> None:
    tries = Tries(3)
    assert tries.failed("r0", ReplicaHangs("silent"), "me")[1]
    assert tries.failed("r1", ReplicaGone("gone"), "me")[1]
    assert tries.excluded == {"r1"}


async def speak(house: House, replica: ScriptedReplica) -> None:
    """``replica`` reports, and the router has heard it."""
    said = house.fleet._hangs._said
    before = said[replica.replica_id]
    await replica.send_reports(1)
    await until_async(lambda: said[replica.replica_id] is not before)


@pytest.mark.parametrize("how", ["silent", "in a step"])
async def test_open_streams_go_on_elsewhere_and_late_tokens_of_the_first_are_dropped(how: str) -> None:
    """n = 2: each choice is resumed with what it has. The first replica hears nothing, and goes on when it can."""
    clock, first, second = Clock(), ScriptedReplica("r0"), ScriptedReplica("r1")
    first.pause_at, first.deaf = 3, True
    first.stats = second.stats = report().stats
    deltas = list[TokenDelta]()
    async with House(report_period_s=0.1, clock=clock, max_tries=2) as house:

        async def read() -> None:
            async for delta in house.dispatcher.stream(ask(n=2, max_new_tokens=8)):
                deltas.append(delta)  # one by one, as they come

        await house.ready(first, second)
        reading = asyncio.create_task(read())
        await until_async(lambda: sum(len(delta.token_ids) for delta in deltas) >= 6)
        if how == "silent":
            clock.now_s += 4.1
        else:
            first.step_age_s = 4.1
            await speak(house, first)
        await speak(house, second)
        house.fleet.leave_hanging()
        await asyncio.wait_for(reading, 60)
        assert [ids(deltas, index) for index in range(2)] == [list(range(1000, 1008))] * 2
        assert [request.resumed_ids for request in second.requests] == [(1000, 1001, 1002)] * 2
        assert first.num_aborted == 1, "its lease was cancelled"
        [retry] = house.dispatcher.retries
        assert retry.reason.startswith("ReplicaHangs: replica r0 hangs: it")
        first.hold.set()
        await speak(house, first)  # sent after its late tokens
        assert len(ids(deltas)) == 8
