"""A decision in words, and the one table of its terms."""

from dataclasses import fields
from random import Random

from routing.explain import explain, sentence
from routing.router import Router
from routing.terms import CANDIDATE, DECODE_REPLICA
from routing.types import Decision, Ending, PairTerms, ReplicaView, RouteOutcome, RouteQuery, Terms


def decide() -> Decision:
    """a holds 32 tokens of the prompt and has 3,200 queued; b holds none and is idle."""
    busy = ReplicaView(
        replica_id="a", time_s=12.0, num_running=3, queued_uncached_tokens=3200, pool_pages=100,
        prefill_tokens_per_s=1000.0, decode_step_s=0.02,
    )  # fmt: skip
    idle = ReplicaView(replica_id="b", time_s=11.75, pool_pages=100, prefill_tokens_per_s=1000.0, decode_step_s=0.02)
    router = Router("estimated_ttft", Random(0), lambda: 12.0)
    router.update([busy, idle])
    router.choose(RouteQuery(rid="r0", token_ids=[1] * 32, excluded=frozenset({"b"})))
    return router.choose(RouteQuery(rid="r1", token_ids=[1] * 40, max_new_tokens=10))


def test_the_sentence_says_why_what_is_expected_and_what_was_given_up() -> None:
    assert sentence(decide()) == (
        "r1 (40 prompt tokens) went to b by estimated_ttft: its first token is expected soonest. 0 tokens are "
        "predicted to be cached there, and the first token after 0.040 s; a holds 32, 32 more, "
        "but its first token would come after 3.352 s."
    )


def test_each_candidate_is_a_row_with_every_term_and_the_winner_is_marked() -> None:
    _, _, a, b = explain(decide()).splitlines()
    assert a.split("|")[0].split() == [
        "a", "3.352", "=", "3.232", "+", "0.008", "+", "0.000", "+", "0.000", "+", "0.010", "+", "0.102",
        "+", "0.000", "s",
    ]  # fmt: skip
    assert a.split("|")[1].split() == ["32", "=", "32", "+", "0", "+", "0"]  # cached: device, host, store
    assert a.split("|")[2].split() == ["8", "3232", "tokens"]
    assert a.split("|")[3].split() == ["0.000", "s"]  # for others
    assert b.startswith("> b ")
    assert "0 (0 running and 0 waiting 0.25 s ago, 0 sent and 0 ended since), pool 0% in use" in b


def test_the_outcome_adds_a_last_sentence() -> None:
    served = explain(decide(), RouteOutcome(ending=Ending.OK, cached_tokens=6, ttft_s=0.25))
    assert served.splitlines()[-1] == (
        "Outcome: ok; the first token came after 0.250 s; 6 of 40 prompt tokens were cached."
    )
    failed = explain(decide(), RouteOutcome(ending=Ending.ERROR))
    assert failed.splitlines()[-1] == "Outcome: error; no token came; 0 of 40 prompt tokens were cached."


def test_every_term_stands_once_in_the_table() -> None:
    assert [term.field for term in DECODE_REPLICA] == [field.name for field in fields(PairTerms)]
    names = [term.field for term in CANDIDATE]
    assert {field.name for field in fields(Terms)} <= set(names)
    assert len(names) == len(set(names))
