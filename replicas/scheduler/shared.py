"""Which running requests begin with the same pages, so that attention reads those once for all of them.

Owns:      the groups of the last batch: they hold until somebody joins, leaves, or commits more of its tokens.
Never:     changes the tree. A split of a node changes no group, since everybody keeps the path that it locked.
Invariant: a group's members have the first ``length`` slots in common, all below what each of them has locked; nobody
           is in two groups.
Thread:    scheduler thread only.
Source:    cascade attention, Ye et al. 2024 (flashinfer.ai/2024/02/02/cascade-inference.html); Hydragen, Juravsky et
           al. 2024 (arXiv:2402.05099). One level: of groups within groups those are taken that save most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from replicas.cache.base import Lock
from replicas.cache.node import TreeNode
from replicas.request import Req
from replicas.scheduler.plan import PrefixGroup

MIN_LEN = 256  # tokens; where sharing begins to pay on a CPU (docs/performance.md, Attention)


class SharedPrefixes:
    """Finds the groups of a batch; nothing to do while it stays the same."""

    def __init__(self, min_len: int = MIN_LEN, *, min_saved: int = 0) -> None:
        """``min_saved``: tokens that a group must save reading; what that costs hangs on the device."""
        self._min_len, self._min_saved = min_len, min_saved
        self._locks: list[object] = []  # of the last batch
        self._groups: tuple[PrefixGroup, ...] = ()

    def groups(self, reqs: Sequence[Req], *, first: int = 0) -> tuple[PrefixGroup, ...]:
        """The groups among ``reqs``, the first of which is the step's row ``first``.

        Costs O(B) pointer comparisons, or, when somebody joined or left, O(B * nodes on a path).
        """
        locks = [req.holding.lock if req.holding is not None else None for req in reqs]
        if locks != self._locks:
            found = find_groups([_locked(lock) for lock in locks], self._min_len)
            worth = (group for group in found if (len(group.members) - 1) * group.length >= self._min_saved)
            self._locks, self._groups = locks, tuple(worth)
        if not first:
            return self._groups
        return tuple(replace(group, members=group.members + np.int32(first)) for group in self._groups)


def find_groups(nodes: Sequence[TreeNode], min_len: int) -> tuple[PrefixGroup, ...]:
    """Groups of at least ``min_len`` tokens among requests that have locked ``nodes`` [B]."""
    branches = _branches(nodes)
    found: list[_Group] = []
    for branch in sorted(branches.values(), key=lambda branch: branch.length, reverse=True):  # children first
        if branch.length >= min_len:
            branch.settle()
        parent = branch.node.parent
        assert parent is not None
        if parent in branches:
            branches[parent].loose += branch.loose
            branches[parent].groups += branch.groups
        else:
            found += branch.groups
    return tuple(
        PrefixGroup(members=np.array(sorted(group.members), dtype=np.int32), length=group.length) for group in found
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    members: list[int]
    length: int  # tokens

    @property
    def saved(self) -> int:
        """Tokens that need not be read."""
        return (len(self.members) - 1) * self.length


@dataclass(slots=True, eq=False)
class _Branch:
    """A node of the paths: who in its subtree is in no group yet, and the groups there."""

    node: TreeNode
    length: int  # tokens from the root to the node's end
    loose: list[int] = field(default_factory=list)
    groups: list[_Group] = field(default_factory=list)

    def settle(self) -> None:
        """Make a group of those in none, and of those whose longer prefix saves less than reading this one once."""
        absorbed = [group for group in self.groups if len(group.members) * self.length > group.saved]
        joined = _Group([*self.loose, *(member for group in absorbed for member in group.members)], self.length)
        if joined.saved > sum(group.saved for group in absorbed):
            self.groups = [group for group in self.groups if group not in absorbed] + [joined]
            self.loose = []
        elif len(self.loose) > 1:
            self.groups.append(_Group(self.loose, self.length))
            self.loose = []


def _branches(nodes: Sequence[TreeNode]) -> dict[TreeNode, _Branch]:
    """Every node on the way from a root, which is left out, to one of ``nodes``."""
    branches: dict[TreeNode, _Branch] = {}
    for index, node in enumerate(nodes):
        path, step = [], node
        while step.parent is not None and step not in branches:
            path.append(step)
            step = step.parent
        length = branches[step].length if step in branches else 0
        for step in reversed(path):
            length += len(step.key)
            branches[step] = _Branch(step, length)
        if node in branches:
            branches[node].loose.append(index)
    return branches


def _locked(lock: object) -> TreeNode:
    assert isinstance(lock, Lock), "a running request holds a locked path"
    return lock.node
