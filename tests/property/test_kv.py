"""KvCache under random requests in tiny pools: every invariant after every step, no leak at idle."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from replicas.cache.evict import POLICIES
from replicas.cache.kv import KvCache
from replicas.errors import PagesExhausted, RowsExhausted
from replicas.request import Req
from tests.harness import choice_of

ROWS = 3


class KvUnderLoad(RuleBasedStateMachine):
    """SPEC B05, D07, D10, D16, E08, E09. ``device`` is the table as a rank sees it: the drained writes, applied."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(4, 10),
        prefix_cache=st.sampled_from(["radix", "radix", "chunk"]),
        eviction=st.sampled_from(sorted(POLICIES)),
    )
    def start(self, page_size: int, num_pages: int, prefix_cache: str, eviction: str) -> None:
        self.kv = KvCache(
            num_pages=num_pages,
            page_size=page_size,
            max_requests=ROWS,
            context_len=64,
            prefix_cache=prefix_cache,
            eviction=eviction,
        )
        self.num_pages = num_pages
        self.held: list[Req] = []
        self.content = {}  # slot -> (salt, tokens up to and with the one whose K/V it holds)
        self.device = np.zeros((ROWS + 1, 68), dtype=np.int32)

    def compute(self, req: Req, slots: np.ndarray) -> None:
        """What the device does: reads the prefix through its table, writes the new tokens' K/V."""
        for row, start, values in self.kv.drain_table_writes():
            self.device[row, start : start + len(values)] = values
        assert req.holding is not None
        self.device[req.holding.row, req.computed_len : req.holding.kv_len] = slots  # the plan's own
        for position, slot in zip(range(req.computed_len, req.holding.kv_len), slots.tolist(), strict=True):
            self.content[slot] = (req.salt, tuple(req.ids[: position + 1].tolist()))
        req.computed_len = req.holding.kv_len
        for position in range(req.computed_len):
            slot = int(self.device[req.holding.row, position])
            assert self.content[slot] == (req.salt, tuple(req.ids[: position + 1].tolist()))

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from(["", "x"]))
    def admit(self, prompt: list[int], salt: str) -> None:
        req = choice_of("r", prompt, max_new_tokens=40, cache_salt=salt)
        try:
            reused = self.kv.admit(req)
        except RowsExhausted:
            assert len(self.held) == ROWS
            return
        assert reused < len(prompt)
        self.held.append(req)

    @rule(which=st.integers(0, 100), chunk=st.integers(1, 12))
    def extend(self, which: int, chunk: int) -> None:
        waiting = [req for req in self.held if req.extend_len > 0]
        if not waiting:
            return
        req = waiting[which % len(waiting)]
        before = self.kv.store.stats()
        try:
            slots = self.kv.extend(req, req.computed_len + min(chunk, req.extend_len))
        except PagesExhausted:
            assert self.kv.store.stats() == before
            return
        self.compute(req, slots)
        self.kv.commit(req)

    @rule(token=st.integers(0, 1))
    def decode(self, token: int) -> None:
        reqs = [req for req in self.held if req.extend_len == 0 and req.max_remaining > 0]
        if not reqs:
            return
        fits = self.kv.pages_needed_decode(reqs) * self.kv.page_size <= self.kv.available_tokens()
        try:
            slots = self.kv.extend_decode(reqs)
        except PagesExhausted:
            assert not fits
            return
        assert fits
        for i, req in enumerate(reqs):
            req.append(token)
            self.compute(req, slots[i : i + 1])

    @rule(which=st.integers(0, 100), keep=st.booleans())
    def release(self, which: int, keep: bool) -> None:
        if self.held:
            req = self.held.pop(which % len(self.held))
            self.kv.release(req, keep=keep)
            assert (req.holding, req.computed_len) == (None, 0)

    @invariant()
    def sound(self) -> None:
        self.kv.check(self.held)
        stats = self.kv.store.stats()
        total = stats.free_pages + stats.evictable_pages + stats.protected_pages + stats.reserved_pages
        assert total == self.num_pages
        if not self.held:
            assert self.kv.available_tokens() == self.kv.capacity_tokens

    def teardown(self) -> None:
        for req in getattr(self, "held", []):
            self.kv.release(req, keep=True)
        if hasattr(self, "kv"):
            self.kv.check([])
            self.kv.flush()
            assert self.kv.store.stats().free_pages == self.num_pages


TestKvUnderLoad = KvUnderLoad.TestCase
TestKvUnderLoad.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
