"""The cached pages of one engine as they leave for other replicas, and as they come from there.

Owns:      nothing: the tree and the host memory are the engine's.
Never:     keeps a host page between two calls; evicts what is worth more than what comes.
Invariant: what comes is on the host alone, below what is here, and keeps the hits that it had.
Thread:    the engine's, between two steps.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtransfer.layout import KvLayout
from kvtransfer.migration.wire import Bytes, Digests, Path, hit_rate
from replicas.cache.node import TreeNode
from replicas.cache.tiers import HiRadixCache


class HostView(Protocol):
    """The bytes of the host tier's pages and the digests of their parts (memory/host.py)."""

    @property
    def view(self) -> Bytes: ...
    @property
    def digests(self) -> Digests: ...
    @property
    def page_bytes(self) -> int: ...


class TieredPageHome:
    """`kvtransfer.migration.migrator.PageHome` over a `HiRadixCache` and its host memory."""

    def __init__(
        self,
        tiers: HiRadixCache,
        memory: HostView,
        layout: KvLayout,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``layout``: of one rank's part of a page; ``clock``: that of ``tiers``."""
        self.layout = layout
        self._tiers = tiers
        self._memory = memory
        self._clock = clock

    def hottest(self, most_bytes: int) -> list[Path]:
        """List the nodes with the most hits, in the order of their rates, as `PageHome.hottest` says."""
        nodes = self._tiers.hottest(most_bytes // self._memory.page_bytes)
        now_s, ps = self._clock(), self._tiers.page_size
        rates = {node: hit_rate(node.hit_count, now_s - node.used_s) for node in nodes}
        for node in reversed(nodes):  # a node is worth no less than what needs it
            if node.parent in rates:
                rates[node.parent] = max(rates[node.parent], rates[node])
        nodes.sort(key=lambda node: -rates[node])  # stable: parents stay before children
        index = {node: at for at, node in enumerate(nodes)}
        token_ids: dict[TreeNode, bytes] = {}
        for node in nodes:
            before = b"" if node.parent is None else token_ids.get(node.parent, b"")
            token_ids[node] = before + node.key.astype("<i4").tobytes()
        return [
            Path(
                salt=node.salt,
                token_ids=token_ids[node],
                first_page=len(token_ids[node]) // (4 * ps) - node.num_pages,
                parent=-1 if node.parent is None else index.get(node.parent, -1),
                hits=node.hit_count,
                idle_s=max(now_s - node.used_s, 0.0),
            )
            for node in nodes
        ]

    def held(self, paths: Sequence[Path]) -> list[int]:
        """Count the first pages of each path that are here."""
        return [self._tiers.peek_len(path.ids, path.salt) // self._tiers.page_size for path in paths]

    def read(self, path: Path, first: int, num: int) -> tuple[Bytes, Digests] | None:
        """Copy pages out; those of the device alone pass through host pages that are taken for the call."""
        tiers = self._tiers
        host, device = tiers.where(path.ids[: (first + num) * tiers.page_size], path.salt, first)
        if len(host) < num:
            return None
        only_device = host == 0
        passing = None
        if only_device.any():
            tiers.host.pin(host[~only_device])  # not to be given to those that pass
            passing = tiers.take_host(int(only_device.sum()))
            tiers.host.unpin(host[~only_device])
            if passing is None:
                return None
            tiers.copier.backup(device[only_device], passing)
            host[only_device] = passing
        payload, digests = self._memory.view[host], self._memory.digests[host]  # copies
        if passing is not None:
            tiers.host.give_back(passing)
        tiers.counters.pushed_pages += num
        return payload, digests

    def write(self, path: Path, first: int, payload: Bytes, digests: Digests) -> int:
        """Take pages into the host tier, as `PageHome.write` says."""
        tiers, ps, now_s = self._tiers, self._tiers.page_size, self._clock()
        end = first + len(payload)
        ids = path.ids[: end * ps]
        have = tiers.peek_len(ids, path.salt) // ps
        if have < first or have >= end:
            return min(max(have - first, 0), len(payload))
        lock = None
        if have:  # what these pages continue must not make room for them
            match = tiers.match_prefix(ids[: have * ps], path.salt, count_hit=False)
            lock = tiers.inc_lock_ref(match.host_node or match.node)

        def spare(node: TreeNode) -> bool:
            return not node.on_device and hit_rate(node.hit_count, now_s - node.used_s) > path.rate

        try:
            pages = tiers.take_host(end - have, spare=spare)
            if pages is None:
                return have - first
            self._memory.view[pages] = payload[have - first :]
            self._memory.digests[pages] = digests[have - first :]
            kept = tiers.adopt(ids, path.salt, pages, have)
        finally:
            if lock is not None:
                tiers.dec_lock_ref(lock)
        leaf = tiers.match_prefix(ids, path.salt, count_hit=False).host_node
        if kept and leaf is not None:
            self._tiers.credit(leaf, path.hits, now_s - path.idle_s)
        tiers.counters.received_pages += kept
        return have - first + kept
