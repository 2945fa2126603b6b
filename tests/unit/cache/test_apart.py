"""What a request can see of what another tenant has cached, in the pool, on the host and in the store: nothing.

A victim asks for a prompt or for another one of the same length; then a spy of another salt asks for that prompt. All
that the spy's request meets is compared: what was cached for it, what each step computed, and what the clock said,
which each access to the store's disk moves.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from replicas.request import CachedTokens
from replicas.scheduler.plan import ExtendPlan
from tests.harness import to_host
from tests.tiered_bench import TieredBench

SECRET, OTHER = list(range(100, 140)), list(range(500, 540))
Where = Literal["device", "host", "store"]


@dataclass
class Seen:
    """What a request met."""

    cached: CachedTokens
    steps: list[tuple[float, int]] = field(default_factory=list)  # the clock, and the prompt tokens computed
    answer: list[int] = field(default_factory=list)


def ask(bench: TieredBench, salt: str) -> Seen:
    """Ask for the secret prompt."""
    started_s = bench.clock.now_s
    req = bench.submit(SECRET, max_new_tokens=2, cache_salt=salt, tenant=salt)
    seen = Seen(req.cached)
    while req.finish is None:
        plan = bench.step()
        computed = plan.num_prompt_tokens if isinstance(plan, ExtendPlan) else 0
        seen.steps.append((bench.clock.now_s - started_s, computed))
    seen.cached, seen.answer = req.cached, req.output_ids.tolist()
    return seen


def seen_by(spy: str, folder: Path, where: Where, asked: list[int]) -> Seen:
    """What ``spy`` meets once the victim has ``asked``, and that is ``where``."""
    folder.mkdir()
    bench = TieredBench(folder, num_pages=40, num_host=40)
    bench.submit(asked, max_new_tokens=2, cache_salt="victim", tenant="victim")
    bench.run()
    if where != "device":
        to_host(bench.kv)
    if where == "store":
        bench.settle()
        bench.close()
        bench = TieredBench(folder, num_pages=40, num_host=40)  # of which nothing but the store is left
    bench.disk.fault, bench.disk.slow_s = "slow", 0.25
    seen = ask(bench, spy)
    bench.close()
    return seen


@pytest.mark.parametrize("where", ["device", "host", "store"])
def test_another_salt_meets_the_same_whatever_a_tenant_has_cached(tmp_path: Path, where: Where) -> None:
    same, other = seen_by("spy", tmp_path / "1", where, SECRET), seen_by("spy", tmp_path / "2", where, OTHER)
    assert same == other
    assert same.cached.tokens == 0
    assert sum(computed for _, computed in same.steps) == len(SECRET)
    own, none = seen_by("victim", tmp_path / "3", where, SECRET), seen_by("victim", tmp_path / "4", where, OTHER)
    assert own.cached.tokens == 36  # all whole pages but the last token's: what the spy would see
    assert own.steps != none.steps
