"""A replica is asked for one tree once a second, however many look."""

import asyncio
import json

import pytest

from deployments.watch.observatory.trees import Trees
from deployments.watch.observatory.watch import NoRouter
from replicas.cache.tree_view import CacheTree
from tests.harness import Clock
from tests.unit.deployments.test_observatory_http import ListedRouters


class Slow(ListedRouters):
    """Answers when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def cache_tree(self, replica_id: str, *, max_depth: int, min_tokens: int) -> CacheTree:
        await self.go.wait()
        return await super().cache_tree(replica_id, max_depth=max_depth, min_tokens=min_tokens)


def made() -> tuple[Slow, Clock, Trees]:
    routers, clock = Slow(), Clock()
    return routers, clock, Trees(routers, clock=clock, calendar=lambda: 1000.0 + clock.now_s)


async def test_who_looks_within_a_second_shares_one_answer_and_other_depths_have_their_own() -> None:
    routers, clock, trees = made()
    looks = [asyncio.create_task(trees.get("a", max_depth=depth, min_tokens=0)) for depth in (6, 6, 6, 3)]
    await asyncio.sleep(0)
    routers.go.set()
    bodies = await asyncio.gather(*looks)
    assert sorted(routers.asked) == [("a", 3, 0), ("a", 6, 0)]
    clock.now_s += 0.9
    assert await trees.get("a", max_depth=6, min_tokens=0) is bodies[0]
    clock.now_s += 0.2
    assert json.loads(await trees.get("a", max_depth=6, min_tokens=0))["time"] == pytest.approx(1000 + clock.now_s)
    assert len(routers.asked) == 3


async def test_one_that_leaves_does_not_take_the_answer_from_the_others() -> None:
    routers, _, trees = made()
    leaves, stays = (asyncio.create_task(trees.get("a", max_depth=6, min_tokens=0)) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.sleep(0)
    routers.go.set()
    assert json.loads(await stays)["tokens"] == 96
    assert len(routers.asked) == 1


async def test_a_failure_is_told_to_who_waited_and_not_kept() -> None:
    routers, _, trees = made()
    routers.go.set()
    routers.error = NoRouter("no router answered")
    for _ in range(2):
        with pytest.raises(NoRouter):
            await trees.get("a", max_depth=6, min_tokens=0)
    routers.error = None
    assert json.loads(await trees.get("a", max_depth=6, min_tokens=0))["tokens"] == 96
    assert len(routers.asked) == 3
