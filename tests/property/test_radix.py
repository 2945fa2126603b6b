"""The radix cache against a dictionary: {(salt, tokens of a whole-page prefix): page id}."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtransfer.pages import page_keys
from replicas.cache.base import Lock
from replicas.cache.events import AllCleared, EventLog, PagesRemoved, PagesStored
from replicas.cache.radix import RadixCache
from replicas.cache.retention import POLICIES

TOKENS = st.lists(st.integers(0, 1), max_size=12)
SALTS = st.sampled_from(["", "x"])


class RadixAgainstDictionary(RuleBasedStateMachine):
    """SPEC E02-E13, E17, E20."""

    @initialize(page_size=st.sampled_from([1, 2, 3]), policy=st.sampled_from(sorted(POLICIES)))
    def start(self, page_size: int, policy: str) -> None:
        self.ps = page_size
        self.log = EventLog()
        self.cache = RadixCache(page_size, policy=policy, events=self.log, clock=lambda: self.now_s)
        self.model: dict[tuple[str, tuple[int, ...]], int] = {}
        self.locks: list[tuple[Lock, set[int]]] = []
        self.next_page = 1
        self.now_s = 0.0
        self.mirror: set[int] = set()  # keys, as a reader of the events knows them

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(self.ps, len(tokens) + 1, self.ps)]

    def known(self, tokens: list[int], salt: str) -> list[int]:
        pages = []
        for prefix in self.prefixes(tokens):
            if (salt, prefix) not in self.model:
                break
            pages.append(self.model[salt, prefix])
        return pages

    def forget(self, pages: list[int]) -> None:
        self.model = {prefix: page for prefix, page in self.model.items() if page not in pages}

    @rule(tokens=TOKENS, salt=SALTS)
    def insert(self, tokens: list[int], salt: str) -> None:
        prefixes, known = self.prefixes(tokens), self.known(tokens, salt)
        pages = known + list(range(self.next_page, self.next_page + len(prefixes) - len(known)))
        self.next_page += len(prefixes)
        ids = np.array(tokens[: len(prefixes) * self.ps], dtype=np.int32)
        already = self.cache.insert(ids, np.array(pages, dtype=np.int32), salt)
        assert already == len(known) * self.ps
        self.model.update(zip(((salt, prefix) for prefix in prefixes), pages, strict=True))

    @rule(tokens=TOKENS, salt=SALTS, lock=st.booleans(), tenant=st.sampled_from(["", "one", "two"]))
    def match(self, tokens: list[int], salt: str, lock: bool, tenant: str) -> None:
        known, ids = self.known(tokens, salt), np.array(tokens, dtype=np.int32)
        assert self.cache.peek_len(ids, salt) == len(known) * self.ps
        match = self.cache.match_prefix(ids, salt)
        assert (match.prefix_len, match.pages.tolist()) == (len(known) * self.ps, known)
        self.cache.retention.used_by(match.node, tenant, 2.0 if tenant == "two" else 1.0)
        if lock:
            self.locks.append((self.cache.inc_lock_ref(match.node), set(known)))

    @rule(which=st.integers(0, 100))
    def unlock(self, which: int) -> None:
        if self.locks:
            lock, _ = self.locks.pop(which % len(self.locks))
            self.cache.dec_lock_ref(lock)

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        evictable = self.cache.evictable_pages
        freed = self.cache.evict(num_pages).tolist()
        assert len(freed) == min(num_pages, evictable)
        assert not set(freed) & self.pinned()
        assert set(freed) <= set(self.model.values())
        self.forget(freed)
        for salt, prefix in self.model:  # no page lost the page before it
            assert len(prefix) == self.ps or (salt, prefix[: -self.ps]) in self.model

    @rule(tokens=TOKENS, salt=SALTS)
    def prompt_arrives(self, tokens: list[int], salt: str) -> None:
        ids = np.array(tokens, dtype=np.int32)
        self.cache.retention.sessions.returns(
            self.cache.nodes_of(ids, salt), keys=lambda: page_keys(ids, self.ps, salt)
        )

    @rule(tokens=TOKENS, salt=SALTS, prompt_len=st.integers(0, 12), name=st.sampled_from(["", "a", "b"]))
    def answer(self, tokens: list[int], salt: str, prompt_len: int, name: str) -> None:
        ids = np.array(tokens, dtype=np.int32)
        self.cache.match_prefix(ids[:prompt_len], salt)
        self.cache.retention.sessions.answered(self.cache.nodes_of(ids, salt), prompt_len, name=name)

    @rule(tokens=TOKENS, salt=SALTS, ttl_s=st.sampled_from([5.0, 60.0]), tenant=st.sampled_from(["", "one"]))
    def mark(self, tokens: list[int], salt: str, ttl_s: float, tenant: str) -> None:
        path = self.cache.nodes_of(np.array(tokens, dtype=np.int32), salt, split=True)
        self.cache.retention.set_breakpoint(path, ttl_s, tenant=tenant, weight=1.0)

    @rule(seconds=st.integers(1, 70))
    def time_passes(self, seconds: int) -> None:
        self.now_s += seconds

    @rule()
    def reset(self) -> None:
        if not self.pinned():
            assert sorted(self.cache.reset().tolist()) == sorted(self.model.values())
            self.model = {}
            self.locks = []

    def pinned(self) -> set[int]:
        return set().union(*(pages for _, pages in self.locks))

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        assert sorted(self.cache.all_pages().tolist()) == sorted(self.model.values())
        assert self.cache.protected_pages == len(self.pinned())
        for event in self.log.drain():
            match event:
                case PagesStored():
                    assert event.parent_key is None or event.parent_key in self.mirror
                    self.mirror |= set(event.keys.tolist())
                case PagesRemoved():
                    assert set(event.keys.tolist()) <= self.mirror
                    self.mirror -= set(event.keys.tolist())
                case AllCleared():
                    self.mirror = set()
        keys = [key for run in self.cache.snapshot().stored for key in run.keys.tolist()]
        assert len(keys) == len(self.model)
        assert set(keys) == self.mirror


TestRadixAgainstDictionary = RadixAgainstDictionary.TestCase
TestRadixAgainstDictionary.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
