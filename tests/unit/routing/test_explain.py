"""A decision in words."""

from random import Random

from routing.explain import explain
from routing.router import Router
from routing.types import Decision, Ending, Outcome, ReplicaView, RouteQuery


def decide() -> Decision:
    router = Router("least_tokens", Random(0), lambda: 12.5)
    router.update(
        [
            ReplicaView(replica_id="a", time_s=12.0, num_running=3, num_waiting=1, queued_uncached_tokens=900),
            ReplicaView(replica_id="b", time_s=12.25, num_running=2, queued_uncached_tokens=40, pool_utilization=0.5),
        ]
    )
    router.choose(RouteQuery(rid="r0", token_ids=[1] * 100))
    return router.choose(RouteQuery(rid="r1", token_ids=[1] * 8))


def test_it_names_the_winner_the_reason_and_every_number() -> None:
    assert explain(decide()).splitlines() == [
        "r1 (8 prompt tokens) went to b by least_tokens: it had the fewest prompt tokens queued of those compared.",
        "  a: 4 requests (3 running and 1 waiting 0.50 s ago, 0 sent and 0 ended since), "
        "900 tokens queued (0 sent since), pool 0% in use",
        "> b: 3 requests (2 running and 0 waiting 0.25 s ago, 1 sent and 0 ended since), "
        "140 tokens queued (100 sent since), pool 50% in use",
    ]


def test_the_outcome_adds_a_last_sentence() -> None:
    served = explain(decide(), Outcome(ending=Ending.FINISHED, cached_tokens=6, ttft_s=0.25))
    assert served.splitlines()[-1] == (
        "The request finished; the first token came after 0.250 s; 6 of 8 prompt tokens were cached."
    )
    failed = explain(decide(), Outcome(ending=Ending.FAILED))
    assert failed.splitlines()[-1] == "The request failed; no token came; 0 of 8 prompt tokens were cached."
