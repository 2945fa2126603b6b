"""The prefix cache of a replica as ``GET /api/tree`` answers it.

Pure; README.md has the form. Keys are hex: JSON's readers lose digits of 64-bit integers.
"""

import dataclasses
from typing import Any

from kvtransfer.pages import PageKey, PageKeys
from replicas.cache.tree_view import CacheTree, NodeView


def tree_body(tree: CacheTree, *, replica_id: str, time_s: float) -> dict[str, Any]:
    return {
        "replica": replica_id,
        "time": round(time_s, 3),
        "page_size": tree.page_size,
        "tokens": tree.tokens,
        "nodes": tree.nodes,
        "shown": tree.shown,
        "root": node_body(tree.root),
    }


def node_body(node: NodeView) -> dict[str, Any]:
    """Trees are no deeper than tree_view.MAX_DEPTH."""
    return {
        "tokens": node.tokens,
        "subtree_tokens": node.subtree_tokens,
        "subtree_nodes": node.subtree_nodes,
        "hits": node.hits,
        "locked": node.locked,
        "idle_s": round(node.idle_s, 1),
        "key": None if node.key is None else shown_key(node.key),
        "children": [node_body(child) for child in node.children],
        "left_out": None if node.left_out is None else dataclasses.asdict(node.left_out),
    }


def shown_key(key: PageKey) -> str:
    return f"{key:016x}"


def shown_keys(keys: PageKeys) -> list[str]:
    """Of a prompt's whole pages, in order."""
    return [shown_key(key) for key in keys.tolist()]
