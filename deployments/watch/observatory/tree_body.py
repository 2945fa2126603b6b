"""The prefix cache of a replica as ``GET /api/tree`` answers it.

README.md has the form. Keys are hex: JSON's readers lose digits of 64-bit integers.
"""

import dataclasses
import hashlib
import secrets
from typing import Any

from kvtransfer.pages import PageKey, PageKeys
from replicas.cache.tree_view import CacheTree, NodeView


class PageNames:
    """What pages are called where people look: equal pages alike, and nobody who guesses a prompt can confirm it.

    A page's key is a hash of tokens that anybody can compute; its name is made of that with a secret of this process.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(16)

    def __call__(self, key: PageKey) -> str:
        return hashlib.blake2b(key.to_bytes(8, "little"), digest_size=8, key=self._secret).hexdigest()

    def of_hex(self, keys: list[str]) -> list[str]:
        """Of keys as `shown_keys` writes them."""
        return [self(int(key, 16)) for key in keys]


def tree_body(tree: CacheTree, names: PageNames, *, replica_id: str, time_s: float) -> dict[str, Any]:
    return {
        "replica": replica_id,
        "time": round(time_s, 3),
        "page_size": tree.page_size,
        "tokens": tree.tokens,
        "nodes": tree.nodes,
        "shown": tree.shown,
        "root": node_body(tree.root, names),
    }


def node_body(node: NodeView, names: PageNames) -> dict[str, Any]:
    """Trees are no deeper than tree_view.MAX_DEPTH."""
    return {
        "tokens": node.tokens,
        "subtree_tokens": node.subtree_tokens,
        "subtree_nodes": node.subtree_nodes,
        "hits": node.hits,
        "locked": node.locked,
        "idle_s": round(node.idle_s, 1),
        "key": None if node.key is None else names(node.key),
        "children": [node_body(child, names) for child in node.children],
        "left_out": None if node.left_out is None else dataclasses.asdict(node.left_out),
    }


def shown_keys(keys: PageKeys) -> list[str]:
    """Of a prompt's whole pages, in order, as routers tell the observatory."""
    return [f"{key:016x}" for key in keys.tolist()]
