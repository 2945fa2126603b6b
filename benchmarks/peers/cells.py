"""The workloads that every system runs, and how long each may take. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.workloads import Workload, multi_turn, random_lengths, shared_prefix

Make = Callable[[int, int], Workload]  # (vocab_size, seed)
ANY_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One workload at one concurrency."""

    name: str  # on the command line
    make: Make
    concurrency: int  # conversations at once
    max_s: float  # a system that takes longer is reported as not having finished

    @property
    def title(self) -> str:
        """What it consists of."""
        return f"{self.make(ANY_VOCABULARY, 0).name}; {self.concurrency} at once"


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
    Cell(name="batch-1", make=_random(2, 32, 128), concurrency=1, max_s=60),
    Cell(name="random-8", make=_random(8, 256, 64), concurrency=8, max_s=60),
    Cell(name="random-32", make=_random(32, 256, 64), concurrency=32, max_s=90),
    Cell(name="shared-prefix", make=_shared(8, 8, 1024, 64, 32), concurrency=16, max_s=120),
    Cell(name="multi-turn", make=_turns(8, 5, 64, 64), concurrency=8, max_s=120),
)

QUICK = (
    Cell(name="batch-1", make=_random(1, 16, 8), concurrency=1, max_s=30),
    Cell(name="random-8", make=_random(8, 32, 8), concurrency=8, max_s=30),
    Cell(name="random-32", make=_random(32, 32, 4), concurrency=32, max_s=30),
    Cell(name="shared-prefix", make=_shared(2, 3, 256, 16, 8), concurrency=4, max_s=30),
    Cell(name="multi-turn", make=_turns(2, 3, 64, 8), concurrency=2, max_s=30),
)

WARM_UP = (_random(4, 64, 8), _random(1, 600, 4))  # what a server compiles or touches first is no workload's
