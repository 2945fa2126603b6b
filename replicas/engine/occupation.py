"""Gives back an engine's memory while it is not needed, and takes it again: sleep mode (SPEC A10).

Owns:      which parts are given back.
Never:     gives back what a request or a peer uses: the engine asks for it only while nothing is open, no page is lent
           or in quarantine, so that no peer reads or writes; and it lends none until the resume. Memory that a device
           has pinned (RDMA) stays.
Invariant: while a part is given back, `require` refuses every request. The prefix cache is not lost by it, as far as
           the host tier has room: its pages are copied there first and loaded when prompts need them again.
Thread:    the engine's.
Source:    SGLang's /release_memory_occupation and /resume_memory_occupation, with their names of the parts.

kv_cache  the device pool: its memory goes back to the system, and comes again, zero, as it is touched
weights   those that lie in the file of packed weights (loading/panel_file.py): they are read from it again when
          they are needed; embeddings and norms stay
"""

from collections.abc import Callable, Iterable

from replicas.cache.kv import KvCache
from replicas.config import Device
from replicas.errors import InvalidRequest, Overloaded

PARTS = frozenset({"kv_cache", "weights"})


class Occupation:
    """The memory of one engine, by part: in use or given back."""

    def __init__(self, kv: KvCache, *, device: Device, pinned: bool, give_back: Callable[[frozenset[str]], None]):
        """``pinned``: RDMA devices may hold the pool's memory. ``give_back``: gives memory of these parts back on all
        ranks."""
        self.released: frozenset[str] = frozenset()
        self._kv = kv
        self._device = device
        self._pinned = pinned
        self._give_back = give_back

    def parts_of(self, tags: Iterable[str]) -> frozenset[str]:
        """Return the parts that ``tags`` name, all if none. Raises: InvalidRequest for another name, or where memory
        cannot be given back."""
        if unknown := set(tags) - PARTS:
            named = ", ".join(sorted(unknown))[:200]
            raise InvalidRequest(f"tags: {named} unknown; there are kv_cache and weights", param="tags")
        if self._device != "cpu":
            raise InvalidRequest("memory of a GPU cannot be given back: captured graphs hold its addresses")
        if self._pinned:
            raise InvalidRequest(
                "memory cannot be given back where pages may come by RDMA, which pins it: with UCX_TLS=tcp in the "
                "environment it can, and with mode: unified without transfer.fetch"
            )
        return frozenset(tags) or PARTS

    def release(self, parts: frozenset[str]) -> None:
        """Give back ``parts`` that are in use; nothing may be open. The cache is on the host then, or gone."""
        if "kv_cache" in parts - self.released:
            store, tiers = self._kv.store, self._kv.store.tiers
            if tiers is not None:
                tiers.copy(tiers.hottest(tiers.host.num_pages))
            store.make_room(store.num_pages, "giving memory back")
        self._give_back(parts - self.released)
        self.released |= parts

    def resume(self, parts: frozenset[str]) -> None:
        """Use ``parts`` again: their memory comes as it is touched."""
        self.released -= parts

    def require(self) -> None:
        """Raises: Overloaded while a part is given back."""
        if self.released:
            raise Overloaded(f"this replica has given back {', '.join(sorted(self.released))}: resume it first")

    def check(self) -> None:
        """Raises AssertionError if the device holds pages whose memory was given back."""
        assert self.released <= PARTS
        if "kv_cache" in self.released:
            pool = self._kv.store.stats()
            assert pool.free_pages == pool.num_pages, "pages are in use, and their memory is given back"
