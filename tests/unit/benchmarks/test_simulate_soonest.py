"""Two options to compare with: `--policy soonest` (no `behind_s`), and `--jitter` (a trace's grain smoothed)."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from benchmarks import simulate
from benchmarks.sim_requests import jittered
from benchmarks.sim_soonest import SoonestRouter
from kvtransfer.pages import page_keys
from routing.router import Router
from routing.types import IndexSnapshot, Reason, ReplicaView, RouteQuery
from tests.unit.benchmarks.sim_fixtures import request


def choice(router: Router) -> tuple[str, Reason]:
    """900 tokens, of which r0 holds 800: 10 s of queue and 1 s there; 1 s of queue and 9 s at r1, where one waits who
    would wait 8 s longer. Both compute 100 tokens/s."""
    token_ids = np.arange(900, dtype=np.int32)
    r0 = ReplicaView(
        replica_id="r0", time_s=0.0, num_running=1, num_waiting=1, queued_uncached_tokens=1000, pool_pages=100,
        page_size=100, prefill_tokens_per_s=100.0,
    )  # fmt: skip
    router.update([r0, replace(r0, replica_id="r1", queued_uncached_tokens=100)])
    assert router.apply_snapshot("r0", IndexSnapshot(seq=1, keys=page_keys(token_ids[:800], 100, "")))
    decision = router.choose(RouteQuery(rid="x", token_ids=token_ids))
    return decision.replica_id, decision.reason


def test_soonest_leaves_out_what_a_choice_costs_those_who_wait() -> None:
    selfish = SoonestRouter(Random(0), lambda: 0.0, 100)
    assert choice(Router("estimated_ttft", Random(0), lambda: 0.0, 100)) == ("r0", Reason.LEAST_DELAY)
    assert choice(selfish) == ("r1", Reason.SOONEST)
    assert selfish.policy == "soonest"


def test_each_request_comes_at_most_the_jitter_later_and_the_same_for_every_policy() -> None:
    requests = [request(n, at_s=3.0, blocks=[n]) for n in range(50)]
    requests.append(replace(requests[0], number=50, after=0, arrival_s=1.0))
    late = jittered(requests, 3.0, seed=1)
    came = [each.arrival_s for each in late[:50]]
    assert 3.0 <= min(came) < 3.5 < 5.5 < max(came) <= 6.0
    assert late[50].arrival_s == 1.0  # since the answer before it: not the trace's to say
    assert [each.arrival_s for each in jittered(requests, 3.0, seed=1)] == [each.arrival_s for each in late]
    assert [each.arrival_s for each in jittered(requests, 0.0, seed=1)] == [each.arrival_s for each in requests]


def test_the_command_line_takes_both(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--workload", "shared-prefix", "--requests", "40", "--replicas", "2"]
    argv = [*load, "--jitter", "2", "--policy", "soonest"]
    assert simulate.main(argv) == 0
    assert "soonest" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        simulate.main([*argv, "--jitter", "-1"])
    assert "-1 must not be below 0" in capsys.readouterr().err
