"""ChunkCache: the prefix cache that keeps nothing, for when reuse between requests is off (SPEC E16).

A request's pages stay its own from chunk to chunk through its row of the table, and are all freed at its end.
"""

from replicas.cache.base import Lock, MatchResult
from replicas.cache.node import NO_PAGES, TreeNode
from replicas.memory.allocator import Pages
from replicas.types import TokenIds


class ChunkCache:
    """A PrefixCache without reuse: every match is empty, and no page is kept."""

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
