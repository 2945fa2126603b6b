"""TreeNode: one edge of the radix tree and what is known about it; Session: a conversation along a path of it.

Invariant: key holds whole pages; ``pages`` has one device page for each, or none; ``host`` one host page for each, or
           none; not both are empty. A child on the device has its parent there. A child is filed under the bytes of its
           key's first page; a root has neither key nor parent, and is never evicted; below is the sum over all
           descendants.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvtransfer.pages import PageKey, PageKeys, page_keys
from replicas.memory.allocator import Pages
from replicas.types import TokenIds

_Scalar = TypeVar("_Scalar", bound=np.generic)
NO_PAGES: Pages = np.empty(0, dtype=np.int32)


class Below(NamedTuple):
    """How much is below a node."""

    pages: int = 0
    nodes: int = 0


NOTHING = Below()


@dataclass(slots=True, eq=False)
class TreeNode:
    """SGLang radix cache, TreeNode (SPEC E01); values are page ids, times are ticks of the cache's own clock."""

    key: TokenIds  # [n * page_size]
    pages: Pages  # [n] on the device; [0] when it is not there
    parent: "TreeNode | None"
    salt: str
    created: int  # tick
    last_access: int  # tick
    used_s: float = 0.0  # when that was
    children: dict[bytes, "TreeNode"] = field(default_factory=dict)
    lock_ref: int = 0  # requests that pin it; every root has 1 of its own (SPEC E03)
    hit_count: int = 0  # one more if it was computed again after every tier had lost it
    below: Below = NOTHING  # in all of its descendants
    priority: int = 0  # highest of the requests that inserted or used it; OFFLINE where a session has ended since
    ahead: int = 0  # tokens from its first to the end of the longest sequence that was inserted through it
    page_keys: PageKeys | None = None  # [n] while events are recorded, or with a host tier
    host: Pages = field(default_factory=lambda: NO_PAGES)  # [n] host pages with a copy (SGLang's host_value); [0]: none
    stored: bool = False  # a store has them too
    device_children: int = 0  # its children on the device
    lease: "Session | None" = None  # the oldest for which it is kept
    tenant: str = ""  # whose requests used it; EVERYBODY: several tenants'; "": no request here, or none with a key

    @staticmethod
    def root(salt: str) -> "TreeNode":
        empty = np.empty(0, dtype=np.int32)
        return TreeNode(key=empty, pages=empty, parent=None, salt=salt, created=0, last_access=0, lock_ref=1)

    @property
    def evictable(self) -> bool:
        """Whether its device pages may go: they are an unlocked leaf of what is on the device."""
        return self.on_device and not self.device_children and self.lock_ref == 0 and self.parent is not None

    @property
    def host_evictable(self) -> bool:
        """Whether its host pages may go: the device has them too, or it is an unlocked leaf of the tree."""
        free = self.lock_ref == 0 and self.parent is not None
        return self.on_host and free and (self.on_device or not self.children)

    @property
    def on_device(self) -> bool:
        return len(self.pages) > 0

    @property
    def on_host(self) -> bool:
        return len(self.host) > 0

    @property
    def num_pages(self) -> int:
        return len(self.pages) or len(self.host)

    def split(self, at: int, page_size: int) -> "TreeNode":
        """Cut after page ``at``: a new parent takes the head, with the same locks, times and hits.

        This node stays the deeper one, so that receipts for it go on pinning the whole path.
        """
        parent, num_pages = self.parent, self.num_pages
        assert parent is not None
        assert 0 < at < num_pages
        head = dataclasses.replace(self, children={})
        head.keep(0, at, page_size)
        self.keep(at, num_pages, page_size)
        parent.children[first_page(head.key, page_size)] = head
        head.children[first_page(self.key, page_size)] = self
        self.parent = head
        head.device_children = int(self.on_device)
        head.below = Below(self.below.pages + self.num_pages, self.below.nodes + 1)
        return head

    def grew(self, num_pages: int, num_nodes: int) -> None:
        """Add to the sums of pages and nodes below it, and to those of every node above. O(depth)."""
        step: TreeNode | None = self
        while step is not None:
            step.below = Below(step.below.pages + num_pages, step.below.nodes + num_nodes)
            step = step.parent

    def keep(self, start: int, end: int, page_size: int) -> None:
        """Shrink the edge to its pages [start, end)."""
        self.ahead -= start * page_size
        self.key = _part(self.key, start * page_size, end * page_size)
        self.pages = _part(self.pages, start, end)
        self.host = _part(self.host, start, end)
        if self.page_keys is not None:
            self.page_keys = _part(self.page_keys, start, end)


@dataclass(slots=True, eq=False)
class Session:
    """A conversation, known by its prefix: a prompt that goes on behind its last one belongs to it."""

    born: int  # tick of its first answer
    end: TreeNode | None = None  # the deepest node that is kept for it; None: none is
    mark: TreeNode | None = None  # in which its last prompt ends, in whole pages; None: it has left the tree
    came_back: bool = False  # whether a prompt has gone on with it


def first_page(token_ids: TokenIds, page_size: int, at: int = 0) -> bytes:
    """Return the key under which the child that continues with ``token_ids[at:]`` is filed."""
    return token_ids[at : at + page_size].tobytes()


def last_key(node: TreeNode) -> PageKey:
    """Return the key of the last page of ``node``."""
    if node.page_keys is not None:
        return int(node.page_keys[-1])
    return int(page_keys(node.key, len(node.key) // node.num_pages, node.salt, key_before(node))[-1])


def key_before(node: TreeNode) -> PageKey | None:
    """Return the key of the page before those of ``node``; None where a sequence begins."""
    assert node.parent is not None
    return last_key(node.parent) if node.parent.parent is not None else None


def path_to(node: TreeNode | None, *, below: TreeNode | None = None) -> list[TreeNode]:
    """List the nodes from the root's child, or the one below ``below``, down to ``node``."""
    path: list[TreeNode] = []
    while node is not None and node is not below and node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def walk(roots: Iterable[TreeNode]) -> Iterator[TreeNode]:
    """Iterate over all nodes below ``roots``, parents before children."""
    stack = [child for root in roots for child in root.children.values()]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _part(array: npt.NDArray[_Scalar], start: int, end: int) -> npt.NDArray[_Scalar]:
    """Return array[start:end], which keeps at most twice its own bytes alive: a view of a small cut, else a copy."""
    part = array[start:end]
    base = array if array.base is None else array.base
    return part if 2 * part.nbytes >= base.nbytes else part.copy()
