"""The radix caches of replicas as ``GET /api/tree`` answers them (README.md has the form).

Owns:      the answers of the last FRESH_S, and the questions in flight: however many clients look, a replica is asked
           for one tree once a second.
Never:     keeps a failure; lets a client that disconnects cancel the answer for the others.
Invariant: at most one question in flight by (replica, depth, min_tokens).
Thread:    the observatory's event loop.
"""

import asyncio
import dataclasses
import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deployments.watch.observatory.watch import Routers
from kvtransfer.pages import PageKey
from replicas.cache.tree_view import CacheTree, NodeView


class PageNames:
    """The names of pages in the live view: equal pages have one name, and a guessed prompt cannot be confirmed by it.

    Any client can compute a page's key from its tokens; the name is a hash of the key with a secret of this process.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(16)

    def __call__(self, key: PageKey) -> str:
        return hashlib.blake2b(key.to_bytes(8, "little"), digest_size=8, key=self._secret).hexdigest()

    def of_hex(self, keys: list[str]) -> list[str]:
        """Return the names of keys as `shown_keys` writes them."""
        return [self(int(key, 16)) for key in keys]


def tree_body(tree: CacheTree, names: PageNames, *, replica_id: str, time_s: float) -> dict[str, Any]:
    return {
        "replica": replica_id,
        "time": round(time_s, 3),
        "page_size": tree.page_size,
        "tokens": tree.tokens,
        "nodes": tree.nodes,
        "shown": tree.shown,
        "root": node_body(tree.root, names, part=tree.part, page_size=tree.page_size),
    }


def node_body(node: NodeView, names: PageNames, *, part: str, page_size: int) -> dict[str, Any]:
    """Return a node with its children; trees are no deeper than tree_view.MAX_DEPTH. Keys are hex strings, since JSON
    readers lose digits of 64-bit integers."""
    return {
        "tokens": node.tokens,
        "subtree_tokens": node.subtree_tokens,
        "subtree_nodes": node.subtree_nodes,
        "hits": node.hits,
        "protected": node.locked,
        "idle_s": round(node.idle_s, 1),
        "key": None if node.key is None else names(node.key),
        **({} if node.parts is None else {"parts": {part: node.parts, "hole": node.tokens // page_size - node.parts}}),
        "children": [node_body(child, names, part=part, page_size=page_size) for child in node.children],
        "left_out": None if node.left_out is None else dataclasses.asdict(node.left_out),
    }


FRESH_S = 1.0
Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAnswer:
    """One question, and the task that gives its answer."""

    asked_s: float
    answer: asyncio.Task[bytes]


class Trees:
    """The answers of ``GET /api/tree``, as JSON."""

    def __init__(self, routers: Routers, *, clock: Callable[[], float], calendar: Callable[[], float]) -> None:
        """``clock`` never goes back; ``calendar``: seconds since 1970, for the answer's ``time``."""
        self.names = PageNames()
        self._routers = routers
        self._clock = clock
        self._calendar = calendar
        self._asked: dict[Key, TreeAnswer] = {}

    async def get(self, replica_id: str, *, max_depth: int, min_tokens: int) -> bytes:
        """Raises: NoRouter, ReplicaGone."""
        now_s = self._clock()
        self._asked = {key: each for key, each in self._asked.items() if _is_good(each, now_s)}
        key = (replica_id, max_depth, min_tokens)
        if key not in self._asked:
            answer = asyncio.create_task(self._ask(*key))
            answer.add_done_callback(_heard)
            self._asked[key] = TreeAnswer(asked_s=now_s, answer=answer)
        return await asyncio.shield(self._asked[key].answer)

    async def _ask(self, replica_id: str, max_depth: int, min_tokens: int) -> bytes:
        tree = await self._routers.cache_tree(replica_id, max_depth=max_depth, min_tokens=min_tokens)
        body = tree_body(tree, self.names, replica_id=replica_id, time_s=self._calendar())
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def _is_good(asked: TreeAnswer, now_s: float) -> bool:
    answer = asked.answer
    if not answer.done():
        return True
    return now_s - asked.asked_s < FRESH_S and not answer.cancelled() and answer.exception() is None


def _heard(answer: asyncio.Task[bytes]) -> None:
    """Retrieve a failure that no client waits for, so that asyncio does not log it."""
    if not answer.cancelled():
        answer.exception()
