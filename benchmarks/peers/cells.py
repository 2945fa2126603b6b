"""The workloads that every system runs, and how long each may take. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.workloads import Workload, multi_turn, random_lengths, shared_prefix

Make = Callable[[int, int], Workload]  # (vocab_size, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One workload at one concurrency."""

    name: str  # on the command line
    title: str  # in the table
    make: Make
    concurrency: int  # conversations at once
    max_s: float  # a system that takes longer is reported as not having finished


def _random(num: int, input_len: int, output_len: int) -> Make:
    return lambda vocab_size, seed: random_lengths(
        num_requests=num, input_len=input_len, output_len=output_len, vocab_size=vocab_size, seed=seed
    )


def _shared(groups: int, per_group: int, prefix_len: int, question_len: int, output_len: int) -> Make:
    return lambda vocab_size, seed: shared_prefix(
        num_groups=groups,
        per_group=per_group,
        prefix_len=prefix_len,
        question_len=question_len,
        output_len=output_len,
        vocab_size=vocab_size,
        seed=seed,
    )


def _turns(users: int, turns: int, turn_len: int, output_len: int) -> Make:
    return lambda vocab_size, seed: multi_turn(
        num_users=users, num_turns=turns, turn_len=turn_len, output_len=output_len, vocab_size=vocab_size, seed=seed
    )


FULL = (
    Cell(name="batch-1", title="one at a time, 32 in, 128 out", make=_random(2, 32, 128), concurrency=1, max_s=60),
    Cell(name="random-8", title="8 at once, 256 in, 64 out", make=_random(8, 256, 64), concurrency=8, max_s=60),
    Cell(name="random-32", title="32 at once, 256 in, 64 out", make=_random(32, 256, 64), concurrency=32, max_s=90),
    Cell(
        name="shared-prefix",
        title="8 prefixes of 1,024 x 8 questions of 64, 32 out, 16 at once",
        make=_shared(8, 8, 1024, 64, 32),
        concurrency=16,
        max_s=120,
    ),
    Cell(
        name="multi-turn",
        title="8 users x 5 turns, 64 in, 64 out, the history resent",
        make=_turns(8, 5, 64, 64),
        concurrency=8,
        max_s=120,
    ),
)

QUICK = (
    Cell(name="batch-1", title="one at a time, 16 in, 8 out", make=_random(1, 16, 8), concurrency=1, max_s=30),
    Cell(name="random-8", title="8 at once, 32 in, 8 out", make=_random(8, 32, 8), concurrency=8, max_s=30),
    Cell(name="random-32", title="32 at once, 32 in, 4 out", make=_random(32, 32, 4), concurrency=32, max_s=30),
    Cell(
        name="shared-prefix",
        title="2 prefixes of 256 x 3 questions of 16, 8 out, 4 at once",
        make=_shared(2, 3, 256, 16, 8),
        concurrency=4,
        max_s=30,
    ),
    Cell(
        name="multi-turn",
        title="2 users x 3 turns, 64 in, 8 out, the history resent",
        make=_turns(2, 3, 64, 8),
        concurrency=2,
        max_s=30,
    ),
)

WARM_UP = (_random(4, 64, 8), _random(1, 600, 4))  # what a server compiles or touches first is no workload's
