"""The workloads of live_routing: sizes, order of the requests, pools, and what a model expects of them. Pure."""

from dataclasses import dataclass, replace

from benchmarks.client import ClosedLoop, OpenLoop
from benchmarks.live_bounds import Pages, hit_ratio
from benchmarks.workloads import Workload, shared_prefix

PAGE_SIZE = 16
LOADS = ("saturated", "relaxed", "turns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The workload, and the pools that half of it fits into."""

    groups: int
    per_group: int
    prefix_len: int
    question_len: int
    output_len: int
    concurrency: int  # of the closed loops
    rate: float  # requests a second of the relaxed load

    @property
    def pool_tokens(self) -> int:
        """Half of the groups, and what the requests that run at once on one of two replicas add to them."""
        own = self.question_len + self.output_len + PAGE_SIZE
        return self.groups // 2 * self.prefix_len + self.concurrency // 2 * own

    def workload(self, load: str, seed: int) -> Workload:
        """Of another seed, and so of other tokens, for each load: what one run leaves in the caches is no other's."""
        workload = shared_prefix(
            num_groups=self.groups,
            per_group=self.per_group,
            prefix_len=self.prefix_len,
            question_len=self.question_len,
            output_len=self.output_len,
            vocab_size=32_000,
            seed=len(LOADS) * seed + LOADS.index(load),
        )
        return _in_turns(workload) if load == "turns" else workload

    def load(self, name: str, seed: int) -> ClosedLoop | OpenLoop:
        return OpenLoop(rate=self.rate, seed=seed) if name == "relaxed" else ClosedLoop(concurrency=self.concurrency)

    def expected(self, load: str, seed: int, *, bound: bool) -> float:
        """The hit ratio that the model of live_bounds.py gives for this very workload."""
        workload, prompt_len = self.workload(load, seed), self.prefix_len + self.question_len
        pages = Pages(
            prefix=self.prefix_len // PAGE_SIZE,
            prompt=prompt_len / PAGE_SIZE,
            total=(prompt_len + self.output_len - 1) // PAGE_SIZE,
        )
        return hit_ratio(
            [each.name for each in one_a_group(workload).conversations],
            [each.name for each in workload.conversations],
            pool_pages=self.pool_tokens // PAGE_SIZE,
            pages=pages,
            bound=bound,
        )


def one_a_group(workload: Workload) -> Workload:
    """The first request of each group: what fills the caches before the clock starts."""
    first = {each.name.split(".")[0]: each for each in reversed(workload.conversations)}
    return replace(workload, name=f"{workload.name}, warm-up", conversations=tuple(first.values()))


def _in_turns(workload: Workload) -> Workload:
    """Every group's first request, then every group's second, and so on; within a turn as they were shuffled."""
    conversations = sorted(workload.conversations, key=lambda each: int(each.name.split(".")[1]))
    return replace(workload, name=f"{workload.name}, in turns", conversations=tuple(conversations))
