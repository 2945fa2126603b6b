"""Sessions: which paths of the tree belong to conversations that are expected back, and until when.

An agent's pool falls off a cliff under LRU: its sessions come back in turn, so each finds that another's next turn has
just evicted it. Which session goes first is no guess here: the younger one's pages do, so that as many as fit stay
whole. A session that has come back once, or that its client names, is expected back for `LEASE_S` after each answer.

Owns:      which node each session is known by, or was until it left the tree; the leases: `TreeNode.lease` is written
           here, and copied by splits.
Never:     evicts or locks. A lease is a rank in the order of eviction
           (cache/evict.py); one that runs out lowers it.
Invariant: a leased session has an entry in the heap, due when its lease is, and ends at the deepest node that is kept
           for it; its mark is in the tree too: no session keeps a node alive that has left.
Thread:    scheduler thread only.

    answered ──first answer──> known ──its next prompt: returns──> waits, runs ──answered──> leased
                                 ^                                                              │ runs out
                                 └────────────────── order as the policy says ──────────────────┘
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvtransfer.pages import PageKey
from replicas.cache.node import Session, TreeNode, path_to

LEASE_S = 60.0  # for which a session is expected back after an answer, and its answer after a prompt
MAX_NAMED = 4096  # names whose age is remembered
MAX_ASKED = 1024  # prompts whose sessions are remembered until they are answered
MAX_LOST = 1024  # sessions that are known though nothing of them is left


class Sessions:
    """The sessions of one tree."""

    def __init__(
        self,
        *,
        touched: Callable[[TreeNode], None],
        key_of: Callable[[TreeNode], PageKey],
        clock: Callable[[], float],
    ) -> None:
        """``touched``: called where the rank of a node may have fallen. ``key_of``: of the last page of a node."""
        self._touched = touched
        self._key_of = key_of
        self._clock = clock
        self._due: list[tuple[float, int, Session]] = []  # by when; an entry of a lease that was changed is dropped
        self._tie = 0
        self._marks: dict[TreeNode, Session] = {}  # by the node in which their last prompt ends, in whole pages
        self._num_leased = 0
        self._asked: OrderedDict[str, Session] = OrderedDict()  # by request, from its arrival to its answer
        self._lost: OrderedDict[PageKey, Session] = OrderedDict()  # by the last page of theirs that left the tree
        self._born: OrderedDict[tuple[str, str], int] = OrderedDict()  # by salt and name, the one used last at the end

    @property
    def num_leased(self) -> int:
        return self._num_leased

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

    def answered(self, path: Sequence[TreeNode], num_prompt: int, *, tick: int, name: str, rid: str) -> None:
        """Take note that the answer to a prompt ends with ``path``, whose first ``num_prompt`` nodes are the prompt.

        Args: tick: of now. name: what the client calls the session, or "". rid: of the request.
        """
        if not num_prompt:
            return
        prompt = path[:num_prompt]
        mark, session = self._latest(prompt)
        lost = self._asked.pop(rid, None)
        if session is None and lost is not None and lost.mark is None:
            session = lost
            for key in [key for key, each in self._lost.items() if each is session]:
                del self._lost[key]  # it is known by its mark again
        if mark is not None:
            del self._marks[mark]
        if session is None:
            session = Session(self._birth(path[-1].salt, name, tick))
        else:
            self._end(session)
        self._marks[prompt[-1]], session.mark = session, prompt[-1]
        if name or session.came_back:
            self._lease(session, path[-1])

    def expire(self) -> None:
        """End the leases that have run out; before each look at the order of eviction."""
        now_s = self._clock()
        while self._due and self._due[0][0] <= now_s:
            entry = heapq.heappop(self._due)
            if _holds(entry):
                self._end(entry[2])

    def removed(self, leaf: TreeNode) -> None:
        """Take note that ``leaf`` is about to leave the tree."""
        session = self._marks.pop(leaf, None)
        if session is not None:
            session.mark = None
            self._lost[self._key_of(leaf)] = session
            _bound(self._lost, MAX_LOST)
        if leaf.lease is not None:
            self._ends_above(leaf.lease, leaf)

    def clear(self) -> None:
        """Forget all sessions: the tree is empty."""
        self._due, self._num_leased = [], 0
        for each in (self._asked, self._lost, self._marks):
            each.clear()

    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Assert the invariant, given all nodes of the tree. O(nodes * depth)."""
        leased = {id(entry[2]): entry[2] for entry in self._due if _holds(entry)}
        assert len(leased) == self._num_leased, f"{len(leased)} leases are in the heap, {self._num_leased} are counted"
        found = set(nodes)
        assert found.issuperset(self._marks), "a session is known by a node that has left"
        for session in leased.values():
            assert session.end in found, "a session ends at a node that has left"
            assert session.end.lease is session, "a session ends at a node that is not kept for it"
        assert not any(each.mark is not None for each in self._lost.values()), "a session is lost and known by a node"
        for mark, session in self._marks.items():
            assert session.mark is mark, "a session is known by another node than it says"
            assert session.end is None or id(session) in leased, "a session without a lease refers to a node"
        for node in found:
            if node.lease is not None:
                assert id(node.lease) in leased, "a node is kept for a session without a lease"
                assert node in path_to(node.lease.end), "a node is kept for a session that is elsewhere"

    def _birth(self, salt: str, name: str, tick: int) -> int:
        """Return when the session called ``name`` began: it is as old as that also when nothing of it is left here."""
        if not name:
            return tick
        born = self._born[salt, name] = self._born.pop((salt, name), tick)
        _bound(self._born, MAX_NAMED)
        return born

    def _lease(self, session: Session, end: TreeNode) -> None:
        """Keep for ``session``, for `LEASE_S` from now on, what no older one keeps of the path to ``end``."""
        for node in path_to(end):
            other = node.lease if node.lease is not session else None
            if other is not None and other.born <= session.born:
                continue
            node.lease = session
            self._num_leased += session.end is None
            session.end = node
            if other is not None and other.end is node:
                self._ends_above(other, node)
        if session.end is None:
            return
        session.until_s = self._clock() + LEASE_S
        self._tie += 1
        heapq.heappush(self._due, (session.until_s, self._tie, session))
        if len(self._due) > 2 * self._num_leased + 64:
            self._due = [entry for entry in self._due if _holds(entry)]
            heapq.heapify(self._due)

    def _end(self, session: Session) -> None:
        """Keep nothing for ``session`` any more."""
        for node in path_to(session.end):
            if node.lease is session:
                node.lease = None
                self._touched(node)
        self._num_leased -= session.end is not None
        session.end = None

    def _ends_above(self, session: Session, node: TreeNode) -> None:
        """Let ``session`` end at the next node above ``node`` that is kept for it; without one its lease is over."""
        above = node.parent
        while above is not None and above.lease is not session:
            above = above.parent
        session.end = above
        self._num_leased -= above is None

    def _latest(self, path: Sequence[TreeNode]) -> tuple[TreeNode | None, Session | None]:
        """Return the session whose last prompt is the longest within ``path``, and the node in which that ends."""
        found = next((node for node in reversed(path) if node in self._marks), None)
        return found, None if found is None else self._marks[found]


def _bound(kept: "OrderedDict[Any, Any]", most: int) -> None:
    if len(kept) > most:
        kept.popitem(last=False)


def _holds(entry: tuple[float, int, Session]) -> bool:
    """Whether ``entry`` of the heap is that of a lease."""
    due_s, _, session = entry
    return session.end is not None and due_s == session.until_s
