"""Workloads: exact sizes, seeded, and no accidental sharing; and how the ids of a trace are held
against those before."""


from benchmarks.token_ids import differences, workloads
from benchmarks.workloads import Workload, multi_turn, passages, random_lengths, shared_prefix


def prompts(workload: Workload) -> list[tuple[int, ...]]:
    return [conversation.turns[0].token_ids for conversation in workload.conversations]


def small_shared(seed: int = 0, question_len: int = 3) -> Workload:
    return shared_prefix(
        num_groups=2, per_group=3, prefix_len=10, question_len=question_len, output_len=4, vocab_size=32_000, seed=seed
    )


def test_the_same_seed_gives_the_same_workload_and_another_does_not() -> None:
    assert small_shared(seed=1) == small_shared(seed=1)
    assert not set(prompts(small_shared(seed=1))) & set(prompts(small_shared(seed=2)))


def test_shared_prefix_has_each_prefix_once_a_member_and_is_shuffled() -> None:
    workload = small_shared()
    assert workload.num_requests == 6
    assert {len(prompt) for prompt in prompts(workload)} == {13}
    prefixes = [prompt[:10] for prompt in prompts(workload)]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [3, 3]
    assert len(set(prompts(workload))) == 6
    assert prefixes != sorted(prefixes, key=prefixes.index)  # not group after group


def test_another_shape_shares_no_prefix_with_the_same_seed() -> None:
    first = {prompt[:10] for prompt in prompts(small_shared(question_len=3))}
    second = {prompt[:10] for prompt in prompts(small_shared(question_len=4))}
    assert not first & second


def test_random_prompts_have_the_asked_lengths_and_share_nothing() -> None:
    workload = random_lengths(num_requests=20, input_len=16, output_len=8, vocab_size=32_000, seed=0)
    assert {len(prompt) for prompt in prompts(workload)} == {16}
    assert len({prompt[0] for prompt in prompts(workload)}) > 15


def test_spread_lengths_stay_within_the_share() -> None:
    workload = random_lengths(num_requests=200, input_len=100, output_len=50, spread=0.2, vocab_size=32_000, seed=0)
    inputs = [len(prompt) for prompt in prompts(workload)]
    outputs = [conversation.turns[0].max_new_tokens for conversation in workload.conversations]
    assert min(inputs) >= 80
    assert max(inputs) <= 120
    assert len(set(inputs)) > 20
    assert min(outputs) >= 40
    assert max(outputs) <= 60


def test_each_user_has_turns_of_its_own() -> None:
    workload = multi_turn(num_users=2, num_turns=3, turn_len=10, output_len=5, vocab_size=32_000, seed=0)
    turns = [turn for conversation in workload.conversations for turn in conversation.turns]
    assert (len(workload.conversations), workload.num_requests) == (2, 6)
    assert len({turn.token_ids for turn in turns}) == 6
    assert {(len(turn.token_ids), turn.max_new_tokens) for turn in turns} == {(10, 5)}


def test_ids_stay_inside_the_vocabulary_and_above_the_special_ones() -> None:
    workload = random_lengths(num_requests=4, input_len=500, output_len=1, vocab_size=300, seed=0)
    ids = {token_id for prompt in prompts(workload) for token_id in prompt}
    assert ids == set(range(256, 300))


def test_passages_hold_lines_of_the_text_and_no_line_is_given_twice() -> None:
    lines = [f"line {number}" for number in range(75)]
    drawn = [
        passages(
            text="\n\n".join(lines), ask="Again.", num_requests=3, num_lines=25, output_len=4, vocab_size=300, seed=seed
        )
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    given: list[str] = []
    for conversation in drawn[0].conversations:
        passage = conversation.turns[0].text.removeprefix("<|im_start|>user\n").split("\n\nAgain.<|im_end|>")[0]
        first = passage.split("\n")[0]
        assert passage.split("\n") == lines[lines.index(first) :][:25]
        given += passage.split("\n")
    assert sorted(given) == sorted(lines)  # all of them, the last passage too


def test_the_first_difference_of_each_request_is_told() -> None:
    before, now = {"a": [1, 2, 3], "b": [4, 5], "c": [6]}, {"a": [1, 9, 9], "b": [4], "d": [7]}
    expected = {"a": (1, 2, 9), "b": (1, 5, None), "c": (0, 6, None), "d": (0, None, 7)}
    assert differences(before, now) == expected


def test_the_trace_is_the_same_each_time_and_shares_prefixes() -> None:
    trace = workloads(1000, seed=3)
    assert trace == workloads(1000, seed=3)
    first = [{each.turns[0].token_ids[:200] for each in workload.conversations} for workload in trace]
    assert [len(each) for each in first] == [10, 2, 4]  # the second one's share a prefix, five each
    assert max(len(c.turns[0].token_ids) for c in trace[0].conversations) > 128  # a chunk
