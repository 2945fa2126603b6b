"""Orders of the waiting queue (SPEC F03; names and meaning are those of SGLang's schedule policies). To add one, give
`ORDERS` an entry: it is then a value of ``scheduler.policy``.

Owns:      what a waiting request shows to an order, and the sort key that each order makes of it.
Never:     knows requests, trees or clocks: the engine's queue calls it.
Invariant: a key depends on the requests that wait and run now alone (``random`` on its generator too). Keys of one call
           are comparable; equal ones keep the order of arrival.
Thread:    any.

    fcfs          order of arrival
    lpm           longest cached prefix first, because a prefix in use is not evicted meanwhile
    dfs-weight    requests of one part of the prefix tree together, the part that most requests wait for first, and in
                  it those with the longest cached prefix: all use what is cached before it may be evicted
    hrrn          highest response ratio first: (waited + needed) / needed, where the time needed is proportional to the
                  tokens to compute: short prompts first, and none starves (Brinch Hansen 1971)
    lof           longest output first: what runs longest starts first
    random        shuffled anew at each look
    routing-key   requests of the routing keys that most running requests have first
    on_time       what can still have its first token within its objective first: as many as can all be in time together
                  (Moore 1968), the shortest first while none gets late. The others follow, and each has a bound on
                  the work that goes before its first token (`bound_len` in precedence.py): once only so much is left,
                  nothing passes it (`_on_time`). A prompt that cannot be in time gives way to one that can between
                  two chunks
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from random import Random
from typing import Any

import numpy as np


@dataclass(slots=True, kw_only=True, eq=False)
class QueueEntry:
    """What an order reads of a waiting request; some need no prefix."""

    waited_s: float
    output_len: int  # tokens that it may still make
    routing_key: str = ""
    uncached_len: int = 1  # tokens to compute before its next one, >= 1
    cached_len: int = 0  # tokens of the prefix that it would reuse
    path: Sequence[int] = ()  # numbers that name the nodes of the prefix tree that it would reuse, from the root on
    begun: bool = False  # it has had its first token, and was retracted
    left_s: float = inf  # until its first token is late; below 0 it is
    needed_s: float = 0.0  # to compute ``uncached_len``, as far as the rate is known
    left_len: float = inf  # prompt tokens, its own among them, that may be computed until its own must be


MOST_AHEAD = 16
Key = tuple[Any, ...]
SortKeys = Callable[[Sequence[QueueEntry], Counter[str], Random], list[Key]]  # of those that wait, keys that run


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One order of the waiting queue. What it reads of prefixes is looked up for every request in every step, so such
    an order is left for that of arrival in long queues."""

    keys: SortKeys | None  # None: the order of arrival alone, whatever the priority
    reads_prefix: bool = False  # `QueueEntry.uncached_len`, ``cached_len``
    reads_path: bool = False  # `QueueEntry.path`; with ``reads_prefix``
    by_objective: bool = False  # reads what follows it, and bounds each wait by itself: ageing adds nothing


def sort_keys(policy: str, waiting: Sequence[QueueEntry], running_keys: Iterable[str], random: Random) -> list[Key]:
    """Return the sort key of each of ``waiting``; the least goes first.

    Args:   running_keys: the routing key of each running request, "" for none.
    Raises: KeyError for a policy that is none of these.
    """
    keys = ORDERS[policy].keys
    assert keys is not None, f"{policy} sorts nothing"
    return keys(waiting, Counter(key for key in running_keys if key), random)


def _longest_prefix(waiting: Sequence[QueueEntry], running: Counter[str], random: Random) -> list[Key]:
    return [(-each.cached_len,) for each in waiting]


def _dfs_weight(waiting: Sequence[QueueEntry], running: Counter[str], random: Random) -> list[Key]:
    """A walk of the tree, children before the node's own requests, the child with most requests below it first."""
    weights = Counter(node for each in waiting for node in each.path)  # in order of first sight
    first_seen = {node: at for at, node in enumerate(weights)}
    return [(*((0, -weights[node], first_seen[node]) for node in each.path), (1,)) for each in waiting]


def _hrrn(waiting: Sequence[QueueEntry], running: Counter[str], random: Random) -> list[Key]:
    return [(-each.waited_s / each.uncached_len, each.uncached_len) for each in waiting]


def _longest_output(waiting: Sequence[QueueEntry], running: Counter[str], random: Random) -> list[Key]:
    return [(-each.output_len,) for each in waiting]


def _random(waiting: Sequence[QueueEntry], running: Counter[str], random: Random) -> list[Key]:
    return [(random.random(),) for _ in waiting]


def _routing_key(waiting: Sequence[QueueEntry], running: Counter[str], random: Random) -> list[Key]:
    return [(-running[each.routing_key], each.routing_key if running[each.routing_key] else "") for each in waiting]


def _on_time(waiting: Sequence[QueueEntry], running: Counter[str], random: Random) -> list[Key]:
    """Retracted requests; those that can all be in time, each as far as it leaves others their bound; the rest.

    A request that goes before its turn takes its tokens from what may be computed before others must be. So it goes
    only where each bound still holds afterwards; where none can, the tightest bound goes first, which keeps them all.
    """
    spare_len = spare(waiting)
    keys: list[Key] = [(0,) if each.begun else (2, each.left_len) for each in waiting]
    for place, at in enumerate(shortest_first(waiting, in_time(waiting))):
        each = waiting[at]
        if not each.begun and each.uncached_len <= spare_len:
            spare_len -= each.uncached_len
            keys[at] = (1, place)
    return keys


def shortest_first(waiting: Sequence[QueueEntry], by_deadline: Sequence[int]) -> list[int]:
    """Reorder the positions ``by_deadline``, whose requests can all be in time: each time the shortest of those goes
    next that make none late which they pass. The first `MOST_AHEAD` only: no step takes more."""
    if len(by_deadline) < 2:
        return list(by_deadline)
    needed_s = np.array([waiting[at].needed_s for at in by_deadline], dtype=float)
    left_s = np.array([waiting[at].left_s for at in by_deadline], dtype=float)
    cost_s, now_s, found = needed_s.copy(), 0.0, list[int]()  # cost_s: inf for those that were found
    for _ in range(min(MOST_AHEAD, len(by_deadline))):
        slack_s = np.minimum.accumulate(left_s - (now_s + needed_s.cumsum()))
        able_s = cost_s.copy()
        able_s[1:][cost_s[1:] > slack_s[:-1]] = inf
        best = int(able_s.argmin())
        now_s += needed_s[best]
        needed_s[best], left_s[best], cost_s[best] = 0.0, inf, inf
        found.append(best)
    rest = set(range(len(by_deadline))).difference(found)
    return [by_deadline[at] for at in (*found, *sorted(rest))]


def in_time(waiting: Sequence[QueueEntry]) -> list[int]:
    """Return the positions of the most requests of ``waiting`` that can all be in time, one after the other, by
    deadline.

    Source: Moore 1968, "An n job, one machine sequencing algorithm": by deadline, and whenever one would be late, the
    longest so far is left out.
    """
    able = sorted((each.left_s, at) for at, each in enumerate(waiting) if each.needed_s <= each.left_s)
    taken: list[tuple[float, int]] = []  # the longest first
    took_s = 0.0
    for left_s, at in able:
        heapq.heappush(taken, (-waiting[at].needed_s, at))
        took_s += waiting[at].needed_s
        if took_s > left_s:
            took_s += heapq.heappop(taken)[0]
    kept = {at for _, at in taken}
    return [at for _, at in able if at in kept]


def spare(waiting: Sequence[QueueEntry]) -> float:
    """Count the prompt tokens that may be computed before ``waiting`` so that each keeps its bound, if they then go by
    their bounds."""
    by_bound = sorted(waiting, key=lambda each: each.left_len)
    through = accumulate(each.uncached_len for each in by_bound)
    return min((each.left_len - at for each, at in zip(by_bound, through, strict=True)), default=inf)


def passed_tokens(waiting: Sequence[QueueEntry]) -> int:
    """Count the tokens to compute of those of ``waiting`` before which another request goes if it can be in time: all
    behind the last one whose bound leaves nothing to others."""
    first = {at for at in in_time(waiting) if not waiting[at].begun}
    in_time_len = sum(waiting[at].uncached_len for at in first)
    rest = sorted((each for at, each in enumerate(waiting) if at not in first), key=lambda each: each.left_len)
    left = total = 0
    for each in rest:
        total += each.uncached_len
        left = 0 if each.begun or each.left_len <= in_time_len + total else left + each.uncached_len
    return left


ORDERS: dict[str, Order] = {
    "lpm": Order(keys=_longest_prefix, reads_prefix=True),
    "dfs-weight": Order(keys=_dfs_weight, reads_prefix=True, reads_path=True),
    "hrrn": Order(keys=_hrrn, reads_prefix=True),
    "on_time": Order(keys=_on_time, reads_prefix=True, by_objective=True),
    "fcfs": Order(keys=None),
    "lof": Order(keys=_longest_output),
    "random": Order(keys=_random),
    "routing-key": Order(keys=_routing_key),
}
