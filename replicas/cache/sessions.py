"""Sessions: which paths of the tree belong to conversations that are expected back, and until when.

An agent's pool falls off a cliff under LRU: its sessions come back in turn, so each finds that another's next turn has
just evicted it. Which session goes first is no guess here: the younger one's pages do, so that as many as fit stay
whole. A session that has come back once, or that its client names, is expected back for `LEASE_S` after each answer.

Owns:      which node each session is known by, or was until it left the tree; the leases: `TreeNode.lease` is written
           here, and copied by splits.
Never:     evicts or locks. A lease is a part of a node's rank (cache/retention.py); one that runs out lowers it.
Invariant: a leased session ends at the deepest node that is kept for it; its mark is in the tree too: no session keeps
           a node alive that has left.
Thread:    scheduler thread only.

    answered ──first answer──> known ──its next prompt: returns──> waits, runs ──answered──> leased
                                 ^                                                              │ runs out
                                 └────────────────── order as the policy says ──────────────────┘
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

from kvtransfer.pages import PageKey
from replicas.cache.node import Session, TreeNode, last_key, path_to

LEASE_S = 60.0  # for which a session is expected back after an answer, and its answer after a prompt
MAX_NAMED = 4096  # names whose age is remembered
MAX_ASKED = 1024  # prompts whose sessions are remembered until they are answered
MAX_LOST = 1024  # sessions that are known though nothing of them is left

_Kept = TypeVar("_Kept", bound=Hashable)


class Expiry(Generic[_Kept]):
    """Until when each of some things is kept."""

    def __init__(self) -> None:
        self.until_s: dict[_Kept, float] = {}
        self._due: list[tuple[float, int, _Kept]] = []  # a heap; entries that no longer hold are dropped when due
        self._tie = 0

    def keep(self, thing: _Kept, until_s: float) -> None:
        self.until_s[thing] = until_s
        self._tie += 1
        heapq.heappush(self._due, (until_s, self._tie, thing))
        self._sweep()

    def drop(self, thing: _Kept) -> None:
        """Keep ``thing`` no longer, if it is kept."""
        if self.until_s.pop(thing, None) is not None:
            self._sweep()

    def pop_due(self, now_s: float) -> Iterator[_Kept]:
        """Iterate over what is due, and keep it no longer."""
        while self._due and self._due[0][0] <= now_s:
            due_s, _, thing = heapq.heappop(self._due)
            if self.until_s.get(thing) == due_s:
                del self.until_s[thing]
                yield thing

    def clear(self) -> None:
        self.until_s.clear()
        self._due = []

    def check(self) -> None:
        """Assert that what is kept is found when it is due, and that few entries no longer hold."""
        assert self.until_s.items() <= {(thing, due_s) for due_s, _, thing in self._due}, "what is kept has no entry"
        assert len(self._due) <= 2 * len(self.until_s) + 64, "entries that no longer hold pile up"

    def _sweep(self) -> None:
        """Drop the entries that no longer hold when they are more than half."""
        if len(self._due) > 2 * len(self.until_s) + 64:
            self._due = [entry for entry in self._due if self.until_s.get(entry[2]) == entry[0]]
            heapq.heapify(self._due)


class Sessions:
    """The sessions of one tree."""

    def __init__(self, *, fell: Callable[[TreeNode], None], clock: Callable[[], float]) -> None:
        """``fell``: called where the rank of a node may have fallen."""
        self.leases = Expiry[Session]()
        self._fell = fell
        self._clock = clock
        self._known: dict[TreeNode, Session] = {}  # by the node in which their last prompt ends, in whole pages
        self._asked: OrderedDict[str, Session] = OrderedDict()  # by request, from its arrival to its answer
        self._lost: OrderedDict[PageKey, Session] = OrderedDict()  # by the last page of theirs that left the tree
        self._born: OrderedDict[tuple[str, str], int] = OrderedDict()  # by salt and name, the one used last at the end
        self._num_born = 0

    def returns(
        self, path: Sequence[TreeNode], *, rid: str = "", keys: Callable[[], Iterable[PageKey]] = tuple
    ) -> None:
        """Take note that the prompt of ``rid`` arrived, which goes on behind ``path``: its session is kept until that
        is answered. ``keys``: of all its pages."""
        _, session = self._latest(path)
        if session is None and self._lost:
            found = [key for key in map(int, keys()) if key in self._lost]
            session = self._lost.pop(found[-1]) if found else None
        if session is None:
            return
        self._asked[rid] = session
        _bound(self._asked, MAX_ASKED)
        session.came_back = True
        if session.end or path:
            self._lease(session, session.end or path[-1])

    def answered(self, path: Sequence[TreeNode], prompt_len: int, *, name: str = "", rid: str = "") -> None:
        """Take note that ``path`` holds a prompt of ``prompt_len`` tokens, of request ``rid``, and its answer, in the
        session that the client calls ``name``."""
        ends = accumulate(len(node.key) for node in path)
        prompt = [node for node, end in zip(path, ends, strict=True) if end <= prompt_len]
        if not prompt:
            return
        mark, session = self._latest(prompt)
        lost = self._asked.pop(rid, None)
        if session is None and lost is not None and lost.mark is None:
            session = lost
            for key in [key for key, each in self._lost.items() if each is session]:
                del self._lost[key]  # it is known by its mark again
        if mark is not None:
            del self._known[mark]
        if session is None:
            session = Session(self._birth(path[-1].salt, name))
        else:
            self._end(session)
        self._known[prompt[-1]], session.mark = session, prompt[-1]
        if name or session.came_back:
            self._lease(session, path[-1])

    def expire(self) -> None:
        """End the leases that have run out; before each look at the order of eviction."""
        for session in self.leases.pop_due(self._clock()):
            self._end(session)

    def removed(self, leaf: TreeNode) -> None:
        """Take note that ``leaf`` is about to leave the tree."""
        session = self._known.pop(leaf, None)
        if session is not None:
            session.mark = None
            self._lost[last_key(leaf)] = session
            _bound(self._lost, MAX_LOST)
        if leaf.lease is not None:
            self._ends_above(leaf.lease, leaf)

    def clear(self) -> None:
        """Forget all sessions: the tree is empty."""
        for each in (self.leases, self._asked, self._lost, self._known):
            each.clear()

    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Assert the invariant, given all nodes of the tree. O(nodes * depth)."""
        self.leases.check()
        leased, found = self.leases.until_s, set(nodes)
        assert found.issuperset(self._known), "a session is known by a node that has left"
        for session in leased:
            assert session.end in found, "a session ends at a node that has left"
            assert session.end.lease is session, "a session ends at a node that is not kept for it"
        assert not any(each.mark is not None for each in self._lost.values()), "a session is lost and known by a node"
        for mark, session in self._known.items():
            assert session.mark is mark, "a session is known by another node than it says"
            assert session.end is None or session in leased, "a session without a lease refers to a node"
        for node in found:
            if node.lease is not None:
                assert node.lease in leased, "a node is kept for a session without a lease"
                assert node in path_to(node.lease.end), "a node is kept for a session that is elsewhere"

    def _birth(self, salt: str, name: str) -> int:
        """Return when the session called ``name`` began: it is as old as that also when nothing of it is left here."""
        self._num_born += 1
        if not name:
            return self._num_born
        born = self._born[salt, name] = self._born.pop((salt, name), self._num_born)
        _bound(self._born, MAX_NAMED)
        return born

    def _lease(self, session: Session, end: TreeNode) -> None:
        """Keep for ``session``, for `LEASE_S` from now on, what no older one keeps of the path to ``end``."""
        for node in path_to(end):
            other = node.lease if node.lease is not session else None
            if other is not None and other.born <= session.born:
                continue
            node.lease, session.end = session, node
            if other is not None and other.end is node:
                self._ends_above(other, node)
        if session.end is not None:
            self.leases.keep(session, self._clock() + LEASE_S)

    def _end(self, session: Session) -> None:
        """Keep nothing for ``session`` any more."""
        for node in path_to(session.end):
            if node.lease is session:
                node.lease = None
                self._fell(node)
        session.end = None
        self.leases.drop(session)

    def _ends_above(self, session: Session, node: TreeNode) -> None:
        """Let ``session`` end at the next node above ``node`` that is kept for it; without one its lease is over."""
        above = node.parent
        while above is not None and above.lease is not session:
            above = above.parent
        session.end = above
        if above is None:
            self.leases.drop(session)

    def _latest(self, path: Sequence[TreeNode]) -> tuple[TreeNode | None, Session | None]:
        """Return the session whose last prompt is the longest within ``path``, and the node in which that ends."""
        found = next((node for node in reversed(path) if node in self._known), None)
        return found, None if found is None else self._known[found]


def _bound(kept: "OrderedDict[Any, Any]", most: int) -> None:
    if len(kept) > most:
        kept.popitem(last=False)
