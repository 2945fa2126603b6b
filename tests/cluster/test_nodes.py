"""What becomes of requests, pages and settings where a replica's machine vanishes, or is too small.

In the order of the file, over one cluster: each test leaves it as it found it, or the next one waits for that. CI runs
the two that are not marked `cluster`.
"""

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from tests.cluster.cluster import BACK_S, Answer, Cluster

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]

LONG = "These fish were seen: " + ", ".join(f"fish number {i}" for i in range(140))
NUM_TOKENS = 24
CUT_S = 6.0  # longer than the router waits. TCP tries again after 6.2 s, and then after 12.6: Ray has stopped waiting
WORD_S = 30.0  # within which Ray says that a node is dead: 12 s by the variables of deploy/manta.env, 62 s without them
HANGS_S = 60.0  # no stream is silent for so long: the router waits 4 s, then a prompt is computed anew
FREED_S = 30.0  # after Ray's word, until no page is held; replicas ask for it once a second
AGAIN_S = 60.0


@pytest.fixture(scope="module")
def apart(cluster: Cluster) -> Cluster:
    """One prefill and two decode replicas, each on a node of its own; every prompt is handed over."""
    always = {"disaggregation": "always"}
    cluster.deploy(mode="disaggregated", prefill={"count": 1}, decode={"count": 2}, transfer=always)
    cluster.until(lambda: {each.role for each in cluster.replicas()} == {"prefill", "decode"}, BACK_S)
    return cluster


@pytest.fixture
def whole(apart: Cluster) -> Iterator[Cluster]:
    yield from whole_again(apart)


@pytest.fixture
def unified(cluster: Cluster) -> Iterator[Cluster]:
    """Three replicas, each on a node of its own."""
    cluster.deploy(replicas={"count": 3})
    yield from whole_again(cluster)


def whole_again(cluster: Cluster) -> Iterator[Cluster]:
    """All three take requests, at first; links that the test has cut are mended at its end."""
    took_s = cluster.until_ready(3, BACK_S)
    print(f"all replicas are there after {took_s:.1f} s")
    yield cluster
    cluster.network.mend_all()


def same_bytes(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    print(f"gaps of {[round(each.longest_gap_s, 1) for each in answers]} s")
    assert [each.end for each in answers] == ["DONE"] * len(expected)
    assert [each.text for each in answers] == [each.text for each in expected]
    assert max(each.longest_gap_s for each in answers) < HANGS_S


def test_streams_of_a_node_that_vanishes_end_elsewhere_with_the_same_bytes_while_it_is_away(unified: Cluster) -> None:
    prompts = [f"Write a story about the fish number {number}." for number in range(2)]
    expected = [unified.answer(prompt, 6 * NUM_TOKENS) for prompt in prompts]
    num_retries, nodes = unified.num_retries(), {each.replica_id: each.node for each in unified.replicas()}
    streams = [unified.begin(prompt, 6 * NUM_TOKENS) for prompt in prompts]
    answers = [answer for answer, _ in streams]
    unified.until(lambda: all(len(answer.at_s) >= 5 for answer in answers), HANGS_S)
    [node] = [node for replica_id, node in nodes.items() if f"replica={replica_id};" in answers[0].route]
    unified.network.cut(node)
    for _, done in streams:
        done.result(2 * HANGS_S)
    assert unified.num_retries() > num_retries, "no stream was on that node any more"
    same_bytes(answers, expected)


@pytest.mark.parametrize("role", ["prefill", pytest.param("decode", marks=pytest.mark.cluster)])
def test_a_node_that_vanishes_in_a_kv_transfer_costs_no_answer_and_no_page(whole: Cluster, role: str) -> None:
    expected = whole.answer(LONG, NUM_TOKENS, cache_salt=f"before {role}")
    num_sent = sum(each.num_sent for each in whole.replicas())
    answer, done = whole.begin(LONG, NUM_TOKENS, cache_salt=role)
    whole.until(lambda: sum(each.num_sent for each in whole.replicas()) > num_sent, 60, look_s=0.02)
    replicas = whole.replicas()
    [gone] = [each for each in replicas if each.role == role and (role == "prefill" or each.num_receiving)]
    others = [each for each in replicas if each is not gone]
    whole.network.cut(gone.node)
    cut_s = time.monotonic()
    whole.until(lambda: sum(map(whole.num_held, others)) > 0, WORD_S)
    whole.until(lambda: whole.is_dead(gone.node), WORD_S)
    word_s = time.monotonic() - cut_s
    freed_s = whole.until(lambda: sum(map(whole.num_held, others)) == 0, FREED_S)
    done.result(2 * HANGS_S)
    print(f"{role}: Ray's word after {word_s:.1f} s, no page held {freed_s:.1f} s later; {answer.route}; "
          f"answered {answer.at_s[-1] - cut_s:.1f} s after the cut")  # fmt: skip
    assert (answer.status, answer.end, answer.text) == (200, "DONE", expected.text)


@pytest.mark.cluster
def test_a_node_that_was_declared_dead_is_used_again_when_its_ray_has_joined_anew(whole: Cluster) -> None:
    assert {each.node for each in whole.replicas()} == {"a", "b", "c"}
    assert whole.answer("Write a story about a ray.", 4).end == "DONE"


@pytest.mark.cluster
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
    print(f"used again after {again_s:.1f} s")
    for _, done in streams:
        done.result(2 * HANGS_S)
    same_bytes(answers, expected)


@pytest.mark.cluster
def test_ranks_that_no_node_can_hold_are_refused_in_a_sentence_and_what_runs_goes_on(whole: Cluster) -> None:
    whole.deploy(parallel={"tp": 3}, replicas={"count": 1})
    whole.until(lambda: whole.status()[0] == "DEPLOY_FAILED", BACK_S)
    said = "parallel.tp = 3: the ranks of a replica share one node, which needs 3 CPUs, and the largest node of the"
    assert said in whole.status()[1]
    assert whole.answer("Write a story about a ray.", 4).end == "DONE"
