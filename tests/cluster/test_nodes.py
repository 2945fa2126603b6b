"""What becomes of requests, pages and settings where a replica's machine vanishes, or is too small.

In the order of the file, over one cluster: each test leaves it as it found it, or the next one waits for that.
"""

import threading
import time
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import BACK_S, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.serve, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]

LONG = "These fish were seen: " + ", ".join(f"fish number {i}" for i in range(140))
NUM_TOKENS = 24
CUT_S = 6.0  # longer than the router waits. TCP tries again after 6.2 s, and then after 12.6: Ray has stopped waiting
WORD_S = 15.0  # within which Ray says that a node is dead
FREED_S = 5.0  # after it, until no page is held
GAP_S = 5.0  # beside what computing the prompt anew takes; the router waits 4 s
AGAIN_S = 15.0


@pytest.fixture(scope="module")
def apart(cluster: Cluster) -> Cluster:
    """One prefill and two decode replicas, each on a node of its own; every prompt is handed over."""
    cluster.deploy(mode="disaggregated", prefill={"count": 1}, decode={"count": 2}, transfer={"hand_off": "always"})
    return cluster


@pytest.fixture
def whole(apart: Cluster) -> Iterator[Cluster]:
    """All three take requests, at first; links that the test has cut are mended at its end."""
    took_s = apart.until_ready(3, BACK_S)
    print(f"all replicas are there after {took_s:.1f} s")
    yield apart
    apart.network.mend_all()


def test_a_node_cut_off_for_less_than_ray_waits_loses_no_stream_and_is_used_again(whole: Cluster) -> None:
    prompts = ["Write a story about a ray.", "Write a story about a shark."]
    expected = [whole.answer(prompt, 4 * NUM_TOKENS, cache_salt="before") for prompt in prompts]
    streams = [whole.begin(prompt, 4 * NUM_TOKENS) for prompt in prompts]
    answers = [answer for answer, _ in streams]
    whole.until(lambda: all(len(answer.at_s) >= 5 for answer in answers), 60)
    [node] = {each.node for each in whole.replicas() if f"replica={each.replica_id};" in answers[0].route}
    whole.network.cut(node)
    threading.Event().wait(CUT_S)
    whole.network.mend(node)
    again_s = whole.until_ready(3, AGAIN_S)
    for _, done in streams:
        done.result(60)
    print(f"gaps of {[round(each.longest_gap_s, 1) for each in answers]} s, used again after {again_s:.1f} s")
    assert [each.end for each in answers] == ["DONE"] * 2
    assert [each.text for each in answers] == [each.text for each in expected]
    assert max(each.longest_gap_s for each in answers) <= GAP_S + 2 * max(each.first_s for each in expected)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_that_vanishes_in_a_hand_off_costs_no_answer_and_no_page(whole: Cluster, role: str) -> None:
    expected = whole.answer(LONG, NUM_TOKENS, cache_salt=f"before {role}")
    num_sent = sum(each.num_sent for each in whole.replicas())
    answer, done = whole.begin(LONG, NUM_TOKENS, cache_salt=role)
    whole.until(lambda: sum(each.num_sent for each in whole.replicas()) > num_sent, 60, look_s=0.02)
    replicas = whole.replicas()
    [gone] = [each for each in replicas if each.role == role and (role == "prefill" or each.num_receiving)]
    others = [each for each in replicas if each is not gone]
    whole.network.cut(gone.node)
    cut_s = time.monotonic()
    whole.until(lambda: sum(map(whole.num_held, others)) > 0, 10)
    whole.until(lambda: not whole.is_alive(gone.node), 2 * WORD_S)
    word_s = time.monotonic() - cut_s
    freed_s = whole.until(lambda: sum(map(whole.num_held, others)) == 0, 6 * FREED_S)
    done.result(120)
    print(f"{role}: Ray's word after {word_s:.1f} s, no page held {freed_s:.1f} s later; {answer.route}; "
          f"answered {answer.at_s[-1] - cut_s:.1f} s after the cut")  # fmt: skip
    assert word_s <= WORD_S
    assert freed_s <= FREED_S
    assert (answer.status, answer.end, answer.text) == (200, "DONE", expected.text)


def test_a_node_that_was_declared_dead_is_used_again_when_its_ray_has_joined_anew(whole: Cluster) -> None:
    assert {each.node for each in whole.replicas()} == {"a", "b", "c"}
    assert whole.answer("Write a story about a ray.", 4).end == "DONE"


def test_ranks_that_no_node_can_hold_are_refused_in_a_sentence_and_what_runs_goes_on(whole: Cluster) -> None:
    whole.deploy(parallel={"tp": 3}, replicas={"count": 1})
    whole.until(lambda: whole.status()[0] == "DEPLOY_FAILED", BACK_S)
    said = "parallel.tp = 3: the ranks of a replica share one node, which needs 3 CPUs, and the largest node of the"
    assert said in whole.status()[1]
    assert whole.answer("Write a story about a ray.", 4).end == "DONE"
