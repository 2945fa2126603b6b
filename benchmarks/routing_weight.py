"""What the router's prefix index weighs, a page and replica: by where its pages come from and by who shares them.

As in the app, decisions say what to expect and events confirm it before the next decision (`both`); beside that, either
alone. Its dicts have just doubled each time and are two thirds empty, which is when a page weighs most.
"""

import gc
import itertools
import tracemalloc
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvtransfer.pages import PageKeys
from routing.index import PrefixIndex, pages_of

# 2 / 3 of 2^16, and one; by 8 replicas 2 / 3 of 2^19, and one.
WORST_PAGES = 43_691
TARGET_BYTES = 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Memory of one index."""

    source: str  # events, decisions, both
    num_replicas: int
    pages_per_replica: int
    prompt_pages: int
    sharers: int  # replicas that hold each page
    bytes_per_page: float  # a replica


def index_weights() -> Iterator[Weight]:
    """Those of interest, each printed as it comes."""
    print(f"{'index fed by':12} {'prompts of':>10} {'held by':>7} {'pages':>6}   target < {TARGET_BYTES:.0f}")
    for source, sharers in itertools.product(("events", "both", "decisions"), (1, 2)):
        yield _shown(index_weight(source, sharers=sharers))
    for pages_per_replica in (8_192, WORST_PAGES):  # a small pool has as many dead runs as a large one
        yield _shown(index_weight("both", pages_per_replica=pages_per_replica, run=16, rounds=2))
    for run, sharers in itertools.product((4, 1), (1, 2)):
        yield _shown(index_weight("decisions", run=run, sharers=sharers))


def index_weight(
    source: str,
    *,
    num_replicas: int = 8,
    pages_per_replica: int = WORST_PAGES,
    run: int = 512,
    sharers: int = 1,
    rounds: int = 1,
) -> Weight:
    """Fill an index, ``run`` pages at a time, each held by ``sharers`` replicas. With more ``rounds`` it is filled
    anew, each new prompt in the place of the oldest."""
    rng = np.random.default_rng(0)
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex()
    for replica in range(num_replicas):
        index.join(replica, capacity=pages_per_replica)
    number = itertools.count()
    for first in range(0, num_replicas, sharers):
        held: deque[PageKeys] = deque()
        for at, start in itertools.product(range(rounds), range(0, pages_per_replica, run)):
            held.append(rng.integers(0, 2**64, min(run, pages_per_replica - start), dtype=np.uint64))
            gone = pages_of(held.popleft()) if at else []
            for replica in range(first, first + sharers):
                index.removed(replica, gone)
                if source != "events":
                    index.expect(replica, pages_of(held[-1]), number=next(number))
                if source != "decisions":
                    index.stored(replica, pages_of(held[-1]))
    del held, gone
    gc.collect()
    weight = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    num_pages = num_replicas * pages_per_replica
    assert len(index) * sharers == num_pages
    return Weight(
        source=source,
        num_replicas=num_replicas,
        pages_per_replica=pages_per_replica,
        prompt_pages=run,
        sharers=sharers,
        bytes_per_page=weight / num_pages,
    )


def _shown(weight: Weight) -> Weight:
    print(
        f"{weight.source:12} {weight.prompt_pages:10} {weight.sharers:7} {weight.pages_per_replica:6}   "
        f"{weight.bytes_per_page:.0f} bytes a page and replica"
    )
    return weight
