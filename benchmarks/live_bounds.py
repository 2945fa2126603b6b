"""What a router could reach on the workload of live_routing.py: two pools and a policy, with time left out. Pure.

One request after another, none waits, none runs beside another. The pools work as the replicas' caches do: whole
pages, the least recently used leaf first, from the end of a sequence. A group's prefix is never evicted before what
its own requests left under it, since their use is its use.

Owns:  the model. Never: talks to anything.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Of one request, in pages."""

    prefix: int  # shared in its group
    prompt: float  # it may end within a page
    total: int  # prompt and answer: what it leaves


class ModelPool:
    """One replica's cache: prefixes by group, and what each finished request left beyond its prefix."""

    def __init__(self, num_pages: int, pages: Pages) -> None:
        self._num_pages = num_pages
        self._pages = pages
        self._held: OrderedDict[str, int] = OrderedDict()  # name -> its pages that are left, oldest first
        self._used = 0

    def ask(self, group: str, name: str) -> int:
        """Serve request ``name``; how many pages of its prefix were there."""
        hit = self._held.get(group, 0)
        self._put(name, self._pages.total - self._pages.prefix)
        self._put(group, self._pages.prefix)
        while self._used > self._num_pages:
            oldest, have = next(iter(self._held.items()))
            cut = min(have, self._used - self._num_pages)
            self._used -= cut
            if cut == have:
                del self._held[oldest]
            else:
                self._held[oldest] = have - cut
        return hit

    def check(self) -> None:
        """Raises AssertionError if the pages do not add up."""
        assert self._used == sum(self._held.values()) <= self._num_pages

    def _put(self, name: str, num_pages: int) -> None:
        self._used += num_pages - self._held.pop(name, 0)
        self._held[name] = num_pages


def hit_ratio(
    warm_up: Sequence[str], names: Sequence[str], *, pool_pages: int, pages: Pages, bound: bool, num_replicas: int = 2
) -> float:
    """Cached share of the prompts of the requests ``names`` ("group.number"), after ``warm_up`` has filled the caches.

    Args: bound: True: a group stays on the replica that its warm-up went to; False: requests take turns.
    """
    pools = [ModelPool(pool_pages, pages) for _ in range(num_replicas)]
    groups = [_group(name) for name in warm_up]
    home = {group: number % num_replicas for number, group in enumerate(groups)}
    _run(pools, warm_up, lambda number, group: home[group])
    hits = _run(pools, names, lambda number, group: home[group] if bound else number % num_replicas)
    return sum(hits) / (len(names) * pages.prompt)


def _run(pools: Sequence[ModelPool], names: Iterable[str], choose: Callable[[int, str], int]) -> list[int]:
    return [
        pools[choose(number, _group(name))].ask(_group(name), name) for number, name in enumerate(names)
    ]


def _group(name: str) -> str:
    return name.split(".")[0]
