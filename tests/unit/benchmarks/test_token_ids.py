"""How the ids of a trace are held against those before."""

from benchmarks.token_ids import Difference, differences, workloads


def test_the_same_ids_differ_nowhere() -> None:
    assert list(differences({"a": [1, 2], "b": []}, {"a": [1, 2], "b": []})) == []


def test_the_first_difference_of_each_request_is_told() -> None:
    before, now = {"a": [1, 2, 3], "b": [4, 5], "c": [6]}, {"a": [1, 9, 9], "b": [4], "d": [7]}
    assert list(differences(before, now)) == [
        Difference("a", 1, 2, 9),
        Difference("b", 1, 5, None),
        Difference("c", 0, 6, None),
        Difference("d", 0, None, 7),
    ]


def test_the_trace_is_the_same_each_time_and_shares_prefixes() -> None:
    trace = workloads(1000, seed=3)
    assert trace == workloads(1000, seed=3)
    assert [workload.reusable_tokens > 0 for workload in trace] == [False, True, True]
    assert max(len(c.turns[0].token_ids) for c in trace[0].conversations) > 128  # a chunk
