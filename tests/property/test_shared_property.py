"""Groups of requests with one prefix, under random admissions, commits, releases and evictions."""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from replicas.cache.kv import KvCache
from replicas.config import CacheConfig
from replicas.errors import PagesExhausted, RowsExhausted
from replicas.request import Req
from replicas.scheduler.decode import SharedPrefixes
from tests.harness import choice_of, pool_of

MIN_LEN = 3


class SharedUnderLoad(RuleBasedStateMachine):
    """Prompts of few tokens and two values, so that they share much; the pool is small, so that pages are evicted."""

    @initialize(page_size=st.sampled_from([1, 2, 4]), prefix_cache=st.sampled_from(["radix", "radix", "chunk"]))
    def start(self, page_size: int, prefix_cache: str) -> None:
        self.kv = KvCache(
            size=pool_of(80 // page_size, page_size), max_requests=8, context_len=64,
            cache=CacheConfig(prefix_cache=prefix_cache),
        )
        self.shared = SharedPrefixes()
        self.held: list[Req] = []

    @rule(
        start=st.sampled_from([(), (0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 1)]),
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        salt=st.sampled_from(["", "", "x"]),
    )
    def admit(self, start: tuple[int, ...], prompt: list[int], salt: str) -> None:
        req = choice_of("r", [*start, *prompt], max_new_tokens=40, cache_salt=salt)
        try:
            self.kv.admit(req)
        except RowsExhausted:
            return
        self.held.append(req)

    @rule(which=st.integers(0, 100), chunk=st.integers(1, 20))
    def extend(self, which: int, chunk: int) -> None:
        waiting = [req for req in self.held if req.extend_len > 0]
        if not waiting:
            return
        req = waiting[which % len(waiting)]
        try:
            self.kv.extend(req, req.computed_len + min(chunk, req.extend_len))
        except PagesExhausted:
            return
        assert req.holding is not None
        req.computed_len = req.holding.kv_len
        self.kv.commit(req)

    @rule(which=st.integers(0, 100), keep=st.booleans())
    def release(self, which: int, keep: bool) -> None:
        if self.held:
            self.kv.release(self.held.pop(which % len(self.held)), keep=keep)

    @rule(first=st.integers(0, 3))
    def check_groups(self, first: int) -> None:
        groups = self.shared.groups(self.held, first=first, min_len=MIN_LEN)
        grouped = [int(member) for group in groups for member in group.members]
        assert len(grouped) == len(set(grouped)), "a request is in two groups"
        for group in groups:
            members = [self.held[member - first] for member in group.members]
            assert len(members) >= 2
            assert group.members.tolist() == sorted(group.members.tolist())
            assert group.length >= MIN_LEN
            assert group.length % self.kv.page_size == 0
            slots = [self.kv.slots_of(req, 0, group.length).tolist() for req in members]
            assert all(own == slots[0] for own in slots)
            assert all(group.length < req.num_tokens + 1 and group.length <= req.computed_len for req in members)
        alone = [req for index, req in enumerate(self.held) if index + first not in grouped]
        for one, other in itertools.combinations(alone, 2):
            assert self.common_len(one, other) < MIN_LEN, "two requests that share a prefix are both in no group"

    def common_len(self, one: Req, other: Req) -> int:
        """Leading tokens in pages of the tree that both have."""
        assert one.holding is not None
        assert other.holding is not None
        length = min(one.holding.prefix_len, other.holding.prefix_len)
        same = self.kv.slots_of(one, 0, length) == self.kv.slots_of(other, 0, length)
        return length if same.all() else int(same.argmin())

    @invariant()
    def sound(self) -> None:
        self.kv.check(self.held)


TestSharedUnderLoad = SharedUnderLoad.TestCase
TestSharedUnderLoad.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
