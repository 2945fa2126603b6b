"""Several routers side by side: what each hears, and how far apart they are found to be."""

import json
import pathlib
from dataclasses import replace
from random import Random

import pytest

from benchmarks import simulate
from benchmarks.sim_cluster import Cluster, Record, Setup
from benchmarks.sim_events import Events
from benchmarks.sim_pool import SimPool
from benchmarks.sim_replica import SimReplica, Speed
from benchmarks.sim_reports import Outbox
from benchmarks.sim_routers import Routers
from routing.types import KeysRemoved, KeysStored
from tests.unit.benchmarks.sim_fixtures import request

SETUP = Setup(
    num_replicas=2,
    pool_tokens=10_000,
    page_size=100,
    speed=Speed(prefill_tokens_per_s=100.0, decode_base_s=0.5, decode_per_request_s=0.0, rate_noise=0.0),
    num_routers=2,
)


def stub_replica() -> SimReplica:
    return SimReplica(
        "r0",
        speed=SETUP.speed,
        pool=SimPool(2),
        page_size=100,
        events=Events(),
        rng=Random(0),
        started=lambda job: None,
        ended=lambda replica, job: None,
    )


def test_every_router_gets_every_event_once_and_a_snapshot_takes_none_from_the_others() -> None:
    outbox = Outbox(stub_replica(), num_routers=2)
    pool = outbox.replica.pool
    for key in (1, 2):
        assert pool.take([], 1)
        pool.store([key])
        pool.release([key], 0)
    assert [event.seq for event in outbox.take(0)] == [1, 2]
    assert outbox.take(0) == []
    assert pool.take([], 1)  # 1 goes
    snapshot = outbox.snapshot(0)
    assert (snapshot.seq, snapshot.keys.tolist()) == (3, [2])
    assert outbox.take(0) == []
    first, second, third = outbox.take(1)
    assert (type(first), type(second)) == (KeysStored, KeysStored)
    assert isinstance(third, KeysRemoved)
    assert third.keys.tolist() == [1]


def test_what_another_router_sent_is_not_known_before_the_reports_tell_it() -> None:
    """At 1 s two prompts of one page come. The second router believes both replicas idle, and draws; later it knows."""
    requests = [request(n, at_s=1.0, blocks=[n]) for n in range(2)]
    cluster = Cluster("estimated_ttft", requests, SETUP)
    seen: list[list[int]] = []
    assert cluster.routers is not None
    both = cluster.routers.all

    def look() -> None:
        seen.append([sum(view.num_running + view.num_waiting for view in router.views) for router in both])

    cluster.events.at(1.01, look)
    cluster.events.at(1.3, look)
    cluster.run()
    assert seen == [[0, 0], [2, 2]]
    cluster.check()


def test_routers_take_turns_and_agree_once_the_last_reports_have_come() -> None:
    """Ten requests in 42 s, the indexes compared every 10 s."""
    requests = [request(n, at_s=4.0 * n + 3.95, blocks=[n, 50 + n]) for n in range(10)]
    cluster = Cluster("least_tokens", requests, SETUP)
    cluster.run()
    assert cluster.routers is not None
    assert [sum(router.endings.values()) for router in cluster.routers.all] == [5, 5]
    apart = cluster.routers.apart()
    assert apart is not None
    assert (apart.routers, apart.samples) == (2, 4)
    assert apart.pages_at_end == 0.0
    cluster.check()


def test_pages_that_one_of_two_routers_expects_are_apart_until_they_are_reported() -> None:
    """The first prompt is through at 3 s: 2 pages that both know. The second comes at 9.5 s and takes until 12.5 s: at
    10 s only its router expects its 3 pages, and 3 of 5 differ."""
    requests = [request(0, at_s=1.0, blocks=[1, 2]), request(1, at_s=9.5, blocks=[3, 4, 5])]
    cluster = Cluster("round_robin", requests, SETUP)
    cluster.run()
    assert cluster.routers is not None
    apart = cluster.routers.apart()
    assert apart is not None
    assert apart.samples == 1
    assert apart.pages_max == pytest.approx(3 / 5)
    assert apart.pages_at_end == 0.0


def test_a_decision_that_the_other_router_would_not_make_is_counted() -> None:
    """Round robin by two routers: each sends its first to r0000, its second to r0001. Asked for the first's first, the
    second says r0000 too; asked for the second's first, the first is one turn ahead: r0001; so two of four."""
    requests = [request(n, at_s=float(n), blocks=[n]) for n in range(4)]
    cluster = Cluster("round_robin", requests, SETUP)
    records = sorted(cluster.run(), key=lambda record: record.number)
    assert [record.replica_id for record in records] == ["r0000", "r0000", "r0001", "r0001"]
    assert cluster.routers is not None
    apart = cluster.routers.apart()
    assert apart is not None
    assert apart.decisions == 0.5


@pytest.mark.parametrize("policy", ["estimated_ttft", "random", "round_robin"])
def test_comparing_changes_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty requests through two routers, many decided by a draw: asking the other each time leaves no trace."""
    requests = [request(n, at_s=n / 2, blocks=[n % 7, 100 + n]) for n in range(60)]

    def records() -> list[Record]:
        cluster = Cluster(policy, requests, replace(SETUP, num_replicas=4))
        found = [replace(record, decision_s=0.0) for record in cluster.run()]
        cluster.check()
        return found

    compared = records()
    monkeypatch.setattr(Routers, "_differs", lambda *_: False)
    monkeypatch.setattr(Routers, "_pages_apart", lambda _: 0.0)
    assert compared == records()


def test_with_one_router_there_is_nothing_to_compare() -> None:
    cluster = Cluster("estimated_ttft", [request(0, at_s=0.0, blocks=[1])], replace(SETUP, num_routers=1))
    cluster.run()
    assert cluster.routers is not None
    assert cluster.routers.apart() is None


def test_half_of_the_replicas_may_measure_a_wrong_rate() -> None:
    setup = replace(SETUP, num_replicas=4, num_routers=1, speed=replace(SETUP.speed, rate_error=2.0), erring=0.5)
    cluster = Cluster("round_robin", [request(n, at_s=0.0, blocks=[n]) for n in range(4)], setup)
    cluster.run()
    rates = [replica.view(9.0).prefill_tokens_per_s for replica in cluster.replicas]
    assert rates == [100.0, 200.0, 100.0, 200.0]


def test_no_router_is_refused() -> None:
    with pytest.raises(ValueError, match="0 routers were wanted; take at least one"):
        Cluster("round_robin", [], replace(SETUP, num_routers=0))


def test_the_json_and_the_table_tell_how_far_apart_they_were(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    argv = ["--workload", "multi-turn", "--requests", "80", "--replicas", "2", "--routers", "2", "--json", str(out)]
    assert simulate.main(argv) == 0
    (result,) = json.loads(out.read_text())
    assert result["apart"].keys() == {"routers", "samples", "pages_mean", "pages_max", "pages_at_end", "decisions"}
    assert "estimated_ttft, 2 routers: pages that not all believe in: mean " in capsys.readouterr().out
