"""Ends: where requests go on with a text, and what it is worth to keep what they need there.

Owns:      how often requests have gone on behind each kind of end, by how long it had waited; the order in which
           snapshots and the K and V before them leave a tree.
Never:     frees a page (cache/parts.py, cache/radix.py).
Thread:    scheduler thread only.
Source:    Beckmann et al. 2018, "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (NSDI). What differs: the
           classes are kinds of ends; and an age's chance of a hit is estimated from all ends that reached that age
           (Kaplan and Meier 1958), so that one which was evicted before says nothing of later ages.
"""

import enum
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from replicas.cache.node import TreeNode
from replicas.memory.allocator import Pages

Ages = npt.NDArray[np.int64]
PER_OCTAVE, NUM_AGES = 4, 96  # ages are counted by quarters of an octave, up to 2**24 requests
SOME = 64  # ends, or one in so many of those that count: after as many more, what they are worth is computed anew
PRIOR = 4  # ends of each kind and age that are counted before the first one is seen


class End(enum.IntEnum):
    """What a part is good for: which of a text's ends needs it."""

    NONE = 0  # it is inside a text
    WITHIN = 1  # likewise, and kept while there is room: another text may branch off there
    GONE_ON = 2  # a request has gone on behind it, and the next will behind that one's end
    PROMPT = 3  # of a prompt: the next goes on there if it leaves the answer out, or answers again
    ANSWER = 4
    BRANCH = 5  # several have gone on there, or would have; or a client set a breakpoint


CHANCES = (0.0, 0.05, 0.05, 0.1, 0.2, 0.3)  # by kind, that a request goes on before the end is half as old again


class Worth:
    """What ends are worth, by kind and age: how many requests go on there for each one that comes, over the time for
    which that is most."""

    def __init__(self, forget: int) -> None:
        """``forget``: after as many ends of a kind, those before count half."""
        self._forget = forget
        shape = (len(End), NUM_AGES)
        self._gone_on = np.zeros(shape)  # by kind and age
        self._ended = np.zeros(shape)  # likewise, those that were evicted too
        self._table = self._densities()  # by kind and age
        self._num_new = 0  # ends since that was made

    def gone_on(self, kind: End, age: int, *, num_parts: int) -> None:
        """Count a request that goes on behind an end of ``num_parts`` that has waited for ``age`` requests."""
        at = _of(np.full(num_parts, age))
        self._gone_on[kind, at[0]] += num_parts
        self._left(np.full(num_parts, kind), at)

    def evicted(self, kinds: npt.NDArray[np.int8], ages: Ages) -> None:
        """Count ends that are kept no longer."""
        self._left(kinds, _of(ages))

    def of(self, kinds: npt.NDArray[np.int8], ages: Ages) -> npt.NDArray[np.float64]:
        """Return what ends [n] are worth."""
        if self._num_new >= max(SOME, self._forget // SOME):
            self._table, self._num_new = self._densities(), 0
        found: npt.NDArray[np.float64] = self._table[kinds, _of(ages)]
        return found

    def _left(self, kinds: npt.NDArray[np.int8], at: Ages) -> None:
        np.add.at(self._ended, (kinds, at), 1)
        for kind in np.flatnonzero(self._ended.sum(axis=1) > self._forget):
            self._gone_on[kind] /= 2
            self._ended[kind] /= 2
        self._num_new += len(at)

    def _densities(self) -> npt.NDArray[np.float64]:
        """Count, for each kind and age, the hits to come in a time by what that is, and take the best time."""
        reached = self._ended[:, ::-1].cumsum(axis=1)[:, ::-1]
        chance = (self._gone_on + PRIOR * np.array(CHANCES)[:, None] / PER_OCTAVE) / (reached + PRIOR)
        chance, lasts = np.minimum(chance, 1.0), np.diff(2.0 ** (np.arange(NUM_AGES + 1) / PER_OCTAVE))
        best = np.zeros((len(End), NUM_AGES))
        for age in range(NUM_AGES):
            stays = np.cumprod(1 - chance[:, age:], axis=1)  # of those that reach it, to each end from there
            waits = np.concatenate([np.ones((len(End), 1)), stays[:, :-1]], axis=1) * lasts[age:]
            best[:, age] = ((1 - stays) / waits.cumsum(axis=1)).max(axis=1)
        return best


def _of(ages: Ages) -> Ages:
    """Return the number of each age's bounds."""
    return np.minimum((np.log2(ages + 1) * PER_OCTAVE).astype(np.int64), NUM_AGES - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A snapshot of the recurrent states behind a page, on the device or the host."""

    pages: Pages  # in which it lies there
    number: int  # of the copy that made it, which stands behind the states (memory/state_pool.py)
    kind: int  # an End
    since: int  # requests until it was last gone on with


class Snapshots(Protocol):
    """What a tree asks of the snapshots of pages (cache/parts.py)."""

    snapshot_pages: int

    def has(self, pages: Pages) -> npt.NDArray[np.bool_]: ...
    def worth(self) -> npt.NDArray[np.float64]: ...
    def give_up(self, page: int) -> int: ...
    def falls_to(self, above: int, page: int) -> float: ...
    def snapshot_of(self, page: int) -> Snapshot: ...


class Victims:
    """What goes next of a tree whose pages have snapshots, in one order for these and for K and V.

    K and V behind which there is no snapshot lead nowhere and go first. Then goes the snapshot that saves least for its
    bytes: the pages that are computed again without it, times what its end is worth, by the pages that it frees. These
    are its own, and those of K and V that lead nowhere without it. So the seconds of prefill that a page saves decide.
    A request that would have gone on there goes on behind the snapshot before it: that one is worth as much from then.
    """

    def __init__(
        self,
        nodes: Sequence[TreeNode],
        snapshots: Snapshots,
        kept_for: Callable[[TreeNode], tuple[int, ...]],
        give_up: Callable[[TreeNode, int], int],
    ) -> None:
        """``nodes``: of the tree on the device, parents first. ``kept_for``: by which they go, before that.
        ``give_up``: gives up the snapshot of a page of a node, and returns the pages that are free by that."""
        self.num_freed = 0  # pages, of snapshots
        self._snapshots, self._kept_for, self._tie = snapshots, kept_for, itertools.count()
        self._give_up = give_up
        self._ends: dict[TreeNode, list[int]] = {node: [] for node in nodes}  # its pages with a snapshot, in order
        self._below = dict.fromkeys(nodes, 0)  # children with a snapshot in them or below
        self._homes: dict[int, TreeNode] = {}  # by page with a snapshot
        self._dead: list[tuple[tuple[int, ...], int, int, TreeNode]] = []  # a heap of leaves that have a useless end
        # a heap, the page last; of one that is worth more by now a later entry counts
        self._least: list[tuple[tuple[int, ...], float, int, int]] = []
        self._worth = snapshots.worth()  # by page
        self._saves: dict[int, float] = {}  # by page with a snapshot: pages computed again for each that is freed
        first = np.cumsum([0, *(len(node.pages) for node in nodes)])
        at = np.flatnonzero(snapshots.has(np.concatenate([node.pages for node in nodes]))) if nodes else first[:0]
        for index, page in zip((np.searchsorted(first, at, side="right") - 1).tolist(), at.tolist(), strict=True):
            self._ends[nodes[index]].append(page - int(first[index]))
        for node in reversed(nodes):
            if self._leads(node) and node.parent in self._below:
                self._below[node.parent] += 1
        self._rank(nodes)
        for node in nodes:
            self._file(node)

    def next(self, num_pages: int) -> tuple[TreeNode, int] | None:
        """Give up snapshots until ``num_pages`` have been freed by that in all, or a leaf leads nowhere.

        Returns: the leaf, and how many of its pages stay; None: enough is free, or nothing more may go."""
        while self.num_freed < num_pages:
            while self._dead:
                leaf = heapq.heappop(self._dead)[-1]
                if leaf in self._ends and self._is_dead(leaf):  # else it was filed twice
                    return leaf, self._used(leaf)
            if not self._least:
                break
            _, saved, _, page = heapq.heappop(self._least)
            if page in self._homes and saved == self._saved(page):
                self._drop(page)
        return None

    def was_cut(self, head: TreeNode, tail: TreeNode) -> None:
        """Take note that ``head`` is what stays of ``tail``."""
        self._ends[head], self._below[head] = self._ends.pop(tail), 0
        self._homes.update((int(head.pages[at]), head) for at in self._ends[head])

    def has_left(self, parent: TreeNode) -> None:
        """Take note that a child of ``parent`` that led nowhere has left the tree."""
        if parent in self._ends:
            self._file(parent)

    def _rank(self, nodes: Sequence[TreeNode]) -> None:
        """File the snapshots of ``nodes``."""
        reached = dict[TreeNode | None, tuple[int, int]]()
        for node in nodes:
            # pages since the last snapshot above: all that are computed again, and those that nobody else needs
            again, own = reached.get(node.parent, (0, 0))
            own = own if node.parent in self._below and self._below[node.parent] == 1 else 0
            ends, length, last = self._ends[node], len(node.pages), -1
            kept_for = self._kept_for(node) if ends else ()
            for at in ends:
                again += at - last
                freed = self._snapshots.snapshot_pages
                if at == ends[-1] and not self._below[node] and not node.lock_ref:
                    freed += own + length - 1 - last
                page = int(node.pages[at])
                self._homes[page], self._saves[page] = node, again / max(freed, 1)
                heapq.heappush(self._least, (kept_for, self._saved(page), next(self._tie), page))
                again, own, last = 0, 0, at
            reached[node] = again + length - 1 - last, 0 if node.lock_ref else own + length - 1 - last

    def _saved(self, page: int) -> float:
        return float(self._worth[page]) * self._saves[page]

    def _leads(self, node: TreeNode) -> bool:
        return bool(self._ends[node] or self._below[node])

    def _used(self, leaf: TreeNode) -> int:
        """Count the pages of ``leaf`` up to its last snapshot."""
        return self._ends[leaf][-1] + 1 if self._ends[leaf] else 0

    def _is_dead(self, node: TreeNode) -> bool:
        return node.evictable and self._used(node) < len(node.pages)

    def _file(self, node: TreeNode) -> None:
        """File ``node`` if its last pages lead nowhere, and may go."""
        if self._is_dead(node):
            heapq.heappush(self._dead, (self._kept_for(node), node.last_access, next(self._tie), node))

    def _drop(self, page: int) -> None:
        node = self._homes.pop(page)
        (index,) = (index for index, at in enumerate(self._ends[node]) if node.pages[at] == page)
        self._fall_back(page, node, self._ends[node][:index])
        self.num_freed += self._give_up(node, page)
        del self._ends[node][index]
        self._file(node)
        while not self._leads(node) and node.parent in self._below:
            node = node.parent
            self._below[node] -= 1

    def _fall_back(self, page: int, node: TreeNode, before: list[int]) -> None:
        """Let the last snapshot before that of ``page`` be worth as much. ``before``: those in ``node`` before it."""
        while not before and node.parent in self._ends:
            node = node.parent
            before = self._ends[node]
        if before and self._worth[above := int(node.pages[before[-1]])] < self._worth[page]:
            self._worth[above] = self._snapshots.falls_to(above, page)
            heapq.heappush(self._least, (self._kept_for(node), self._saved(above), next(self._tie), above))
