"""What cache/kv.py asks of a prefix cache, the values that pass between them, and the cache that keeps nothing.

Pages in a cache belong to it until `evict` or `reset` hands their ids back. Lengths are in tokens, always whole pages.
"""

from dataclasses import dataclass
from typing import Protocol

from replicas.cache.node import NO_PAGES, TreeNode
from replicas.memory.allocator import Pages
from replicas.types import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class MatchResult:
    """The longest cached prefix of a sequence (SPEC E05); nothing is locked yet."""

    prefix_len: int  # tokens on the device
    pages: Pages  # [prefix_len / page_size]
    node: TreeNode  # deepest node of the path on the device; what to lock
    host_len: int = 0  # tokens after those that are on the host (SGLang's host_hit_length)
    host_node: TreeNode | None = None  # deepest node of the whole path; None: no host tier


@dataclass(slots=True, eq=False)
class Lock:
    """Receipt for one locked path; give it back exactly once."""

    node: TreeNode  # deepest node; splits above it leave it valid
    held: bool = True


class PrefixCache(Protocol):
    """The prefix cache of one pool. Contract suite: tests/unit/cache/test_prefix_cache_protocol.py."""

    evictable_pages: int
    protected_pages: int
    num_nodes: int

    def match_prefix(self, token_ids: TokenIds, salt: str, *, count_hit: bool = True) -> MatchResult:
        """Find the longest cached prefix in whole pages; refresh its access times and, by default, its hit counts."""
        ...

    def peek_len(self, token_ids: TokenIds, salt: str) -> int:
        """Return the length of that prefix in tokens; change nothing."""
        ...

    def peek_path(self, token_ids: TokenIds, salt: str) -> list[int]:
        """Return numbers that name its nodes, from the root on, until the cache changes; change nothing."""
        ...

    def insert(self, token_ids: TokenIds, pages: Pages, salt: str, *, priority: int = 0) -> int:
        """Give the cache the pages of ``token_ids`` [n * page_size], which a request of ``priority`` computed.

        Returns: the length that was already there, in tokens (SPEC E07). The caller keeps ``pages`` up to there; the
                 cache owns the rest if a match now finds them (a cache that keeps nothing takes nothing).
        """
        ...

    def inc_lock_ref(self, node: TreeNode) -> Lock:
        """Pin the path from ``node`` to its root: it is not evicted until the receipt comes back (SPEC E11, E15)."""
        ...

    def dec_lock_ref(self, lock: Lock) -> None: ...

    def evict(self, num_pages: int) -> Pages:
        """Free at least ``num_pages`` unlocked pages, or all if there are fewer. Returns the freed page ids."""
        ...

    def reset(self) -> Pages:
        """Empty the cache; nothing may be locked. Returns the freed page ids."""
        ...

    def all_pages(self) -> Pages:
        """List every page that the cache owns, for checks. O(cache)."""
        ...

    def check(self) -> None:
        """Assert the cache's invariants. O(cache)."""
        ...


class ChunkCache:
    """A PrefixCache without reuse, for when that is off (SPEC E16): every match is empty, and no page is kept.

    A request's pages stay its own from chunk to chunk through its row of the table, and are all freed at its end.
    """

    def __init__(self) -> None:
        self.evictable_pages = self.protected_pages = self.num_nodes = 0
        self._root = TreeNode.root("")

    def match_prefix(self, token_ids: TokenIds, salt: str, *, count_hit: bool = True) -> MatchResult:
        return MatchResult(0, NO_PAGES, self._root)

    def peek_len(self, token_ids: TokenIds, salt: str) -> int:
        return 0

    def peek_path(self, token_ids: TokenIds, salt: str) -> list[int]:
        return []

    def insert(self, token_ids: TokenIds, pages: Pages, salt: str, *, priority: int = 0) -> int:
        return 0

    def inc_lock_ref(self, node: TreeNode) -> Lock:
        return Lock(node)

    def dec_lock_ref(self, lock: Lock) -> None:
        assert lock.held, "a lock was given back twice"
        lock.held = False

    def evict(self, num_pages: int) -> Pages:
        return NO_PAGES

    def reset(self) -> Pages:
        return NO_PAGES

    def all_pages(self) -> Pages:
        return NO_PAGES

    def check(self) -> None:
        assert self._root.lock_ref == 1
