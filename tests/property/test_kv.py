"""KvCache under random requests in tiny pools: every invariant after every step, no leak at idle."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from deployments.channel.frames import LENGTH, CacheChanges, CacheKeys, decode, encode
from kvtransfer.layout import Carried
from kvtransfer.pages import page_keys
from kvtransfer.types import PdTicket, PeerAddress
from replicas.cache.host_pages import HostTier
from replicas.cache.kv import KvCache, came, carried_parts, handed_len, see_no_more
from replicas.cache.parts import SnapshotAllocator, WindowAllocator
from replicas.cache.retention import POLICIES
from replicas.config import CacheConfig, tail_pages
from replicas.errors import Overloaded, PagesExhausted, RowsExhausted
from replicas.memory.sizing import WindowPool
from replicas.memory.state_pool import StatePool
from replicas.request import Leg, Req
from replicas.runner.batch import WindowTable
from replicas.scheduler.plan import TableWrite
from replicas.types import PdLeg, PdTransfer
from routing.fleet_state import Feed
from routing.index import Borders, TierIndex, pages_of
from tests.harness import choice_of, load_always, pool_of, to_host

ROWS = 3
DRAFTED = 3  # tokens


def window_pool(reach: int, page_size: int, num_pages: int) -> WindowPool:
    """As small as one request and its chunk of 12 tokens need, as far as that is less than all."""
    least = WindowPool.of(0, page_size=page_size, cell_bytes=1, reach=reach, step_tokens=12, drafted=DRAFTED)
    return replace(least, num_pages=min(num_pages, least.num_pages))


class FakeCopier:
    """Host memory that holds what the slots of a page held; a page in ``wrong`` has a flipped bit."""

    def __init__(self, test: "KvUnderLoad", page_size: int) -> None:
        self.test, self.page_size = test, page_size
        self.host: dict[int, list[Any]] = {}
        self.wrong: set[int] = set()

    @property
    def content(self) -> Any:
        """What slots hold: of pages in which snapshots may lie, their numbers."""
        content = self.test.content
        return content.slots.numpy() if isinstance(content, InPages) else content

    def slots(self, page: int) -> range:
        return range(page * self.page_size, (page + 1) * self.page_size)

    def backup(self, device_pages: np.ndarray, host_pages: np.ndarray, *, wait: bool = True) -> None:
        assert len(np.unique(host_pages)) == len(host_pages)
        for device, host in zip(device_pages.tolist(), host_pages.tolist(), strict=True):
            self.host[host] = [self.content[slot] for slot in self.slots(device)]
            self.wrong.discard(host)

    def load(self, host_pages: np.ndarray, device_pages: np.ndarray) -> np.ndarray:
        for device, host in zip(device_pages.tolist(), host_pages.tolist(), strict=True):
            for slot, held in zip(self.slots(device), self.host[host], strict=True):
                if host not in self.wrong:
                    self.content[slot] = held
        return np.array([host not in self.wrong for host in host_pages.tolist()])


class InPages(dict[int, object]):
    """What slots hold, by numbers in the pages in which snapshots of states lie too."""

    def __init__(self, pages: torch.Tensor, texts: list[object]) -> None:
        """``texts``: what the numbers stand for, in pages and in the places of states."""
        self.slots, self.texts = pages.view(-1), texts

    def __setitem__(self, slot: int, text: object) -> None:
        self.slots[slot] = len(self.texts)
        self.texts.append(text)

    def __getitem__(self, slot: int) -> object:
        return self.texts[int(self.slots[slot])]


def fetch_leg(end_len: int) -> Leg:
    peer = PeerAddress(host="", port=0, incarnation="")
    ticket = PdTicket(room=0, generation=0, prefill=peer, end_len=end_len)
    return Leg(kv_transfer=PdTransfer(leg=PdLeg.FETCH, ticket=ticket))


class KvUnderLoad(RuleBasedStateMachine):
    """SPEC B05, D07, D10, D16, E08, E09. ``device`` is the table as a rank sees it: the drained writes, applied."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(4, 10),
        prefix_cache=st.sampled_from(["radix", "radix", "chunk"]),
        eviction=st.sampled_from(sorted(POLICIES)),
        host_pages=st.sampled_from([0, 1, 3, 8]),
        write=st.sampled_from(["write_through", "write_through_selective", "write_back", "adaptive"]),
        host_eviction=st.sampled_from([*sorted(POLICIES), "arc"]),
        reach=st.sampled_from([0, 0, 1, 3, 6]),
        snapshot_pages=st.sampled_from([0, 0, 2, 3]),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        prefix_cache: str,
        eviction: str,
        host_pages: int,
        write: str,
        host_eviction: str,
        reach: int = 0,
        snapshot_pages: int = 0,
    ) -> None:
        """``reach``: tokens that window layers see, which have a pool of their own then. ``snapshot_pages``: else, of
        each snapshot of the recurrent states that requests keep then. With windows there is no host tier."""
        self.reused = 0  # tokens
        self.reach, windows, self.states = reach, None, None
        if reach:
            host_pages, num_pages = 0, 2 * num_pages
            windows = window_pool(reach, page_size, num_pages)
        elif snapshot_pages:
            host_pages, num_pages = 2 * host_pages, 2 * num_pages
            pages, self.texts = torch.zeros(num_pages + 1, page_size, dtype=torch.int64), [None]
            of_pages = {"pages": pages.view(torch.uint8), "page_size": page_size}
            self.states = StatePool([((1,), torch.int64)], ROWS + 1, torch.device("cpu"), **of_pages)
        self.copier = FakeCopier(self, page_size)
        tier = HostTier(num_pages=host_pages, copier=self.copier, eviction=host_eviction, write=write)
        self.kv = KvCache(
            size=replace(
                pool_of(num_pages, page_size, windows),
                num_snapshots=num_pages // snapshot_pages if snapshot_pages else 0,
                snapshot_pages=snapshot_pages,
            ),
            max_requests=ROWS,
            context_len=64,
            cache=CacheConfig(prefix_cache=prefix_cache, eviction=eviction),
            host=tier if host_pages else None,
            record_events=True,
            carried=Carried(
                window_pages=tail_pages(reach, page_size) if reach else 0,
                window_layers=1,
                state_pages=0 if self.states is None else 1,
            ),
        )
        self.feed, self.index = self.router_side()
        shape = self.kv.table.shape
        self.window_table = WindowTable(*shape, num_pages=num_pages, page_size=page_size)
        self.coming: list[Req] = []  # that another replica computes
        self.window_content: dict[int, object] = {}
        self.num_pages = num_pages
        self.held: list[Req] = []
        self.content = {}  # slot -> (salt, tokens up to and with the one whose K/V it holds)
        if self.states is not None:
            self.content = InPages(pages, self.texts)
        if isinstance(self.kv.store.parts, SnapshotAllocator):
            self.kv.store.parts.run = self.states.copy
        self.device = np.zeros(shape, dtype=np.int32)

    def router_side(self) -> tuple[Feed, TierIndex]:
        parts, index, size = self.kv.store.parts, TierIndex(), self.kv.store.size
        borders = None if parts is None else Borders(parts.border_pages, at_ends=parts.kind == "state")
        index.join(0, capacity=size.num_pages, host_pages=64, borders=borders)
        return Feed(index, 0, lambda number: False), index

    def expected(self, prompt: list[int], salt: str) -> tuple[int, int]:
        """What a router expects to be reused of the device, and of the host too, by the events so far; by a snapshot it
        expects the same."""
        changes, keys = decode(encode(CacheChanges.of(self.kv.store.drain_events()))[LENGTH.size :]), decode(
            encode(CacheKeys.of(self.kv.store.snapshot()))[LENGTH.size :]
        )  # fmt: skip
        assert isinstance(changes, CacheChanges)
        assert isinstance(keys, CacheKeys)
        self.feed.apply(changes.events())
        assert self.feed.in_sync or not self.kv.store.event_seq
        feed, index = self.router_side()
        assert feed.apply_snapshot(keys.snapshot())
        pages = pages_of(page_keys(np.array(prompt[:-1], dtype=np.int32), self.kv.page_size, salt))
        by_events, by_snapshot = (each.reach(pages, np.array([0])) for each in (self.index, index))
        assert (by_events.device, by_events.own) == (by_snapshot.device, by_snapshot.own)
        return int(by_events.device[0]) * self.kv.page_size, int(by_events.own[0]) * self.kv.page_size

    def compute(self, req: Req, slots: np.ndarray) -> None:
        """What the device does: reads the prefix through its table, writes the new tokens' K/V."""
        self.take_writes()
        assert req.holding is not None
        if self.reach:
            self.compute_windows(req, slots)
        elif self.states is not None and isinstance(self.kv.store.parts, SnapshotAllocator):
            self.compute_states(req, self.states, self.kv.store.parts, slots)
        self.device[req.holding.row, req.computed_len : req.holding.kv_len] = slots  # the plan's own
        for position, slot in zip(range(req.computed_len, req.holding.kv_len), slots.tolist(), strict=True):
            self.content[slot] = (req.salt, tuple(req.ids[: position + 1].tolist()))
        req.computed_len = req.holding.kv_len
        for position in range(req.computed_len):
            slot = int(self.device[req.holding.row, position])
            assert self.content[slot] == (req.salt, tuple(req.ids[: position + 1].tolist()))

    def take_writes(self) -> None:
        """What a plan brings the devices' tables."""
        writes = [TableWrite(*write) for write in self.kv.table.drain_writes()]
        for write in writes:
            self.device[write.row, write.start : write.start + len(write.slots)] = write.slots
        if self.reach and self.kv.store.parts is not None:
            self.window_table.apply((*self.kv.store.parts.drain(), *writes))

    def compute_states(self, req: Req, states: StatePool, parts: SnapshotAllocator, slots: np.ndarray) -> None:
        """The same of a model that keeps states: each part of the step goes on from that of the tokens before it."""
        assert req.holding is not None
        states.copy(parts.drain())
        num_new, kv_len = len(slots), req.holding.kv_len
        if not num_new:
            return
        (held,), ids = states.tensors, tuple(req.ids[:kv_len].tolist())
        for part in states.begin([req.holding.row], [0, num_new], [kv_len], torch.from_numpy(slots)):
            before = part.seen - (part.end - part.start)
            assert (part.read is None) == (before == 0)
            assert part.read is None or self.texts[int(held[part.read])] == (req.salt, ids[:before])
            held[part.write] = len(self.texts)
            self.texts.append((req.salt, ids[: part.seen]))
        states.end()

    def compute_windows(self, req: Req, slots: np.ndarray) -> None:
        """The same of window layers: each new token reads the window that ends with it, through their own table."""
        holding = req.holding
        assert holding is not None
        row = self.window_table.slots[holding.row].numpy()
        new = range(req.computed_len, holding.kv_len)
        row[req.computed_len : holding.kv_len] = self.window_table._apart(slots)
        texts = [(req.salt, tuple(req.ids[: position + 1].tolist())) for position in range(holding.kv_len)]
        for position in new:
            assert row[position] >= self.kv.page_size, "a new token's K and V go to the sink"
            self.window_content[int(row[position])] = texts[position]
        for seen in range(max(0, new.start - self.reach + 1), new.stop) if new else ():
            assert self.window_content[int(row[seen])] == texts[seen]

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from(["", "x"]),
        most=st.sampled_from([0, 4, 100]),
    )
    def admit(self, prompt: list[int], salt: str, most: int) -> None:
        self.start_request(prompt, salt, most)

    def start_request(self, prompt: list[int], salt: str, most: int) -> None:
        req = choice_of("r", prompt, max_new_tokens=40, cache_salt=salt)
        expected, own = self.expected(prompt, salt)
        try:
            reused = self.kv.admit(req)
        except RowsExhausted:
            assert len(self.held) + len(self.coming) == ROWS
            return
        assert reused == expected
        assert reused < len(prompt)
        self.reused += reused
        if not self.kv.store.available_tokens() and self.reach and self.held + self.coming:
            self.kv.release(req, keep=False)  # as the scheduler does: what runs may see all parts
            return
        self.held.append(req)
        tiers = self.kv.store.tiers
        host_len = tiers.match_prefix(req.ids[: len(prompt) - 1], salt).host_len if tiers is not None else 0
        parts, page_size = self.kv.store.parts, self.kv.page_size
        wrong = bool(self.copier.wrong)
        try:
            loaded, left = self.kv.load(req, most)
        except PagesExhausted:
            return
        if isinstance(parts, SnapshotAllocator):
            few = self.kv.store.available_tokens() < 2 * own + parts.snapshot_pages * page_size
            assert left or req.computed_len == own or (loaded == 0 and (few or wrong))
            assert not left or (loaded + left >= parts.snapshot_pages * page_size and req.computed_len == reused)
        else:
            assert loaded == min(host_len, most // page_size * page_size) or wrong
            assert loaded + left == host_len == own - reused or wrong
            assert req.computed_len == reused + loaded
        self.compute(req, np.empty(0, dtype=np.int32))  # what is loaded is what the row says

    @rule(
        prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=5),
        salt=st.sampled_from(["", "x"]),
    )
    def serve(self, prompts: list[list[int]], salt: str) -> None:
        """Whole requests one after the other: the pool fills, pages leave it and come back."""
        for prompt in prompts:
            num_held = len(self.held)
            self.start_request(prompt, salt, 100)
            if len(self.held) > num_held:
                self.run_chunk(self.held[-1], 12)
                self.end(self.held.pop(), keep=True)
            self.sound()

    @rule(most=st.integers(0, 4), to_store=st.booleans())
    def idle(self, most: int, to_store: bool) -> None:
        if self.kv.store.tiers is not None:
            self.kv.store.tiers.copy_idle(most, to_store=to_store)

    @rule(page=st.integers(0, 100))
    def flip(self, page: int) -> None:
        """A bit of a page on the host."""
        if self.copier.host:
            self.copier.wrong.add(sorted(self.copier.host)[page % len(self.copier.host)])

    @rule(which=st.integers(0, 100), chunk=st.integers(1, 12))
    def extend(self, which: int, chunk: int) -> None:
        waiting = [req for req in self.held if req.extend_len > 0]
        if not waiting:
            return
        self.run_chunk(waiting[which % len(waiting)], chunk)

    def run_chunk(self, req: Req, chunk: int) -> None:
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
        fits = self.kv.pages_needed_decode(reqs) * self.kv.page_size <= self.kv.store.available_tokens()
        try:
            slots = self.kv.extend_decode(reqs)
        except PagesExhausted:
            assert not fits
            return
        assert fits
        for i, req in enumerate(reqs):
            req.append(token)
            self.compute(req, slots[i : i + 1])

    @rule(which=st.integers(0, 100), num_tokens=st.integers(1, DRAFTED))
    def draft(self, which: int, num_tokens: int) -> None:
        """Guesses of which none comes true."""
        reqs = [req for req in self.held if req.extend_len == 0]
        if reqs:
            req = reqs[which % len(reqs)]
            self.kv.extend_draft(req, num_tokens)
            self.take_writes()
            self.kv.cut(req)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from(["", "x"]),
        fetches=st.booleans(),
    )
    def receive(self, prompt: list[int], salt: str, fetches: bool) -> None:
        """Take pages for a prompt that another replica computes, or for what is fetched of it."""
        req = choice_of("r", prompt, max_new_tokens=40, cache_salt=salt)
        if len(self.held) + len(self.coming) == ROWS:
            return
        if fetches:
            req.leg = fetch_leg(len(prompt) // self.kv.page_size * self.kv.page_size)
        reused = self.kv.admit(req, whole=True)
        end_len = max(handed_len(req, self.kv), reused)
        if end_len - reused > self.kv.store.available_tokens():
            self.kv.release(req, keep=False)
            return
        self.kv.extend(req, end_len)
        self.take_writes()  # with the next step of the others
        self.coming.append(req)

    @rule(which=st.integers(0, 100), arrives=st.booleans(), is_taken=st.booleans(), short=st.integers(0, 2))
    def arrive(self, which: int, arrives: bool, is_taken: bool, short: int) -> None:
        """What was to come is here, with its windows or without, or will not come. Of a fetch, ``short`` pages less:
        it is found again behind the last one that came."""
        if not self.coming:
            return
        req, page_size = self.coming.pop(which % len(self.coming)), self.kv.page_size
        if not arrives:
            self.end(req, keep=False)
            return
        assert req.holding is not None
        num_tokens = req.num_tokens
        if req.leg is not None:
            num_tokens = max(req.holding.prefix_len, req.leg.ticket.end_len - short * page_size)
        slots = self.kv.slots_of(req, 0, num_tokens).tolist()
        texts = [(req.salt, tuple(req.ids[: position + 1].tolist())) for position in range(num_tokens)]
        for position in range(req.holding.prefix_len, num_tokens):
            self.content[slots[position]] = texts[position]
        parts = came(req, self.kv, num_tokens)
        if not is_taken:
            see_no_more(req, self.kv, parts)
            self.kv.check([*self.held, *self.coming, req])
            self.end(req, keep=False)
            return
        first = -(-num_tokens // page_size) - len(parts)
        for position in range(first * page_size, num_tokens) if len(parts) else ():
            if part := int(parts[position // page_size - first]):
                self.window_content[part * page_size + position % page_size] = texts[position]
        if self.states is not None and num_tokens:
            self.states.write(req.holding.row, num_tokens, torch.tensor([len(self.texts)]).view(torch.uint8))
            self.texts.append(texts[num_tokens - 1])
        req.computed_len = num_tokens
        self.kv.cut(req)
        if req.leg is None:
            self.kv.commit(req)
            self.held.append(req)
            return
        self.end(req, keep=True)
        text = [*req.ids[:num_tokens].tolist(), 0]
        again = choice_of("again", text, cache_salt=req.salt)
        assert self.kv.admit(again) == num_tokens * self.kv.store.reuses_prefixes
        self.kv.release(again, keep=False)
        self.serve(prompts=[text], salt=req.salt)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from(["", "x"]))
    def lend(self, prompt: list[int], salt: str) -> None:
        """Let another replica fetch what is cached of a prompt: what the token behind it sees is there."""
        parts, page_size = self.kv.store.parts, self.kv.page_size
        try:
            pages, receipt = self.kv.store.lend(np.array(prompt, dtype=np.int32), salt, "lent", self.kv.carried)
        except PagesExhausted:
            return
        self.kv.check(self.held + self.coming)
        if isinstance(parts, WindowAllocator):
            lent = carried_parts(pages, self.kv)
            assert len(lent) == len(receipt.pages)
            for page in range(max(0, len(pages) - parts.windows.seen_pages), len(pages)):
                for position in range(page * page_size, (page + 1) * page_size):
                    slot = int(lent[page - len(pages)]) * page_size + position % page_size
                    assert self.window_content[slot] == (salt, tuple(prompt[: position + 1]))
        elif isinstance(parts, SnapshotAllocator) and self.states is not None and len(pages):
            parts.show(pages)
            end = len(pages) * page_size
            number = int(self.states.read(0, end).view(torch.int64))
            assert self.texts[number] == (salt, tuple(prompt[:end]))
        self.kv.store.release_quarantined(receipt)

    @rule(which=st.integers(0, 100))
    def hand_over(self, which: int) -> None:
        """Send another replica what it needs to go on: all parts at the end are there, and what they hold is right."""
        reqs = [req for req in self.held if req.extend_len == 0]
        if not reqs or not self.reach:
            return
        req, page_size = reqs[which % len(reqs)], self.kv.page_size
        try:
            self.kv.extend(req, handed_len(req, self.kv), carries=True)
        except PagesExhausted:
            pass
        else:
            self.sound()
            parts = carried_parts(self.kv.pages(req, 0, -(-req.num_tokens // page_size)), self.kv)
            first = -(-req.num_tokens // page_size) - len(parts)
            for position in range(first * page_size, req.num_tokens):
                slot = int(parts[position // page_size - first]) * page_size + position % page_size
                assert self.window_content[slot] == (req.salt, tuple(req.ids[: position + 1].tolist()))
            see_no_more(req, self.kv)
            self.sound()
        self.held.remove(req)
        self.end(req, keep=True)

    @rule(which=st.integers(0, 100), keep=st.booleans())
    def release(self, which: int, keep: bool) -> None:
        if self.held:
            self.end(self.held.pop(which % len(self.held)), keep=keep)

    def end(self, req: Req, *, keep: bool) -> None:
        self.kv.release(req, keep=keep)
        assert (req.holding, req.computed_len) == (None, 0)

    @invariant()
    def sound(self) -> None:
        self.kv.check(self.held + self.coming)
        stats = self.kv.store.stats()
        total = stats.free_pages + stats.evictable_pages + stats.protected_pages + stats.reserved_pages
        assert total == self.num_pages
        if not self.held + self.coming:
            assert self.kv.store.available_tokens() == self.kv.store.stats().total_tokens

    def teardown(self) -> None:
        for req in getattr(self, "coming", []):
            self.kv.release(req, keep=False)
        for req in getattr(self, "held", []):
            self.kv.release(req, keep=True)
        if hasattr(self, "kv"):
            self.kv.check([])
            self.kv.flush()
            if self.kv.store.tiers is not None:
                assert self.kv.store.tiers.host.num_free == self.kv.store.tiers.host.num_pages
            assert self.kv.store.stats().free_pages == self.num_pages


TestKvUnderLoad = KvUnderLoad.TestCase
TestKvUnderLoad.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("reach", "snapshot_pages"), [(0, 0), (1, 0), (3, 0), (6, 0), (0, 2), (0, 3)])
def test_in_long_histories_every_row_holds_its_own_tokens(seed: int, reach: int, snapshot_pages: int) -> None:
    """With a host tier, with window layers apart, or with snapshots of states. Hypothesis seldom fills both pools;
    these fill them over and over. 0.2 s each."""
    draw, machine = random.Random(seed), KvUnderLoad()
    machine.start(
        page_size=draw.choice([1, 2, 4]),
        num_pages=draw.randint(4, 10),
        prefix_cache="radix",
        eviction=draw.choice(sorted(POLICIES)),
        host_pages=draw.choice([1, 3, 8, 20]),
        write=draw.choice(["write_through", "write_through_selective", "write_back", "adaptive"]),
        host_eviction=draw.choice([*sorted(POLICIES), "arc"]),
        reach=reach,
        snapshot_pages=snapshot_pages,
    )
    tiers, parts = machine.kv.store.tiers, machine.kv.store.parts
    for _ in range(150):
        salt, kind = draw.choice(["", "", "x"]), draw.random()
        if kind < 0.5:
            starts = [[draw.randint(0, 1)] * draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
            machine.serve(prompts=[start + [0] * draw.randint(0, 8) for start in starts], salt=salt)
        elif kind < 0.6:
            prompt = [draw.randint(0, 1) for _ in range(draw.randint(1, 12))]
            machine.admit(prompt=prompt, salt=salt, most=draw.choice([0, 4, 100]))
        elif kind < 0.7:
            machine.extend(which=draw.randint(0, 9), chunk=draw.randint(1, 12))
        elif kind < 0.8:
            machine.decode(token=draw.randint(0, 1))
        elif kind < 0.87:
            machine.release(which=draw.randint(0, 9), keep=draw.random() < 0.7)
        elif kind < 0.9:
            prompt, fetches = [draw.randint(0, 1) for _ in range(draw.randint(1, 12))], draw.random() < 0.5
            machine.receive(prompt=prompt, salt=salt, fetches=fetches)
            machine.sound()
            machine.serve(prompts=[[draw.randint(0, 1)] * 9], salt=salt)
            is_taken = draw.random() < 0.7
            machine.arrive(
                which=draw.randint(0, 9), arrives=draw.random() < 0.8, is_taken=is_taken, short=draw.randint(0, 2)
            )
            machine.hand_over(which=draw.randint(0, 9))
            machine.lend(prompt=prompt, salt=salt)
        elif kind < 0.95:
            machine.idle(most=draw.randint(0, 4), to_store=draw.random() < 0.5)
        else:
            machine.flip(page=draw.randint(0, 99))
        machine.sound()
    assert reach == 0 or (parts is not None and (parts.evicted > 0 or parts.parts.num_pages >= machine.num_pages))
    assert snapshot_pages == 0 or (machine.reused > 0 and parts is not None and parts.evicted > 0)
    assert parts is not None or (tiers is not None and tiers.counters.written_pages > 0)
    machine.teardown()


def with_states(write: str, *, num_pages: int, host_pages: int) -> KvUnderLoad:
    kv = KvUnderLoad()
    kv.start(1, num_pages, "radix", "lru", host_pages, write, "arc", snapshot_pages=3)
    load_always(kv.kv)
    return kv


def serve(self: KvUnderLoad, prompt: list[int], salt: str = "") -> int:
    """Run a request to its end. Returns: the tokens of ``prompt`` that it loaded from the host."""
    req, last = choice_of("r", prompt, max_new_tokens=40, cache_salt=salt), len(prompt) - 1
    self.kv.admit(req)
    self.kv.load(req, 1000)
    loaded = req.cached.host
    self.compute(req, np.empty(0, dtype=np.int32))
    if req.computed_len < last:
        self.run_chunk(req, last - req.computed_len)
    self.run_chunk(req, 100)
    self.kv.release(req, keep=True)
    self.kv.check([])
    return loaded


@pytest.mark.parametrize("write", ["write_back", "write_through", "write_through_selective"])
def test_a_full_host_goes_on_taking_snapshots(write: str) -> None:
    rig = with_states(write, num_pages=20, host_pages=60)
    shares = []
    for salt in "abcd":
        texts = [[int(bit) for bit in f"{number:05b}00000"] for number in range(5)]
        for text in texts * 2:
            serve(rig, text, salt)
        shares.append(sum(serve(rig, text, salt) for text in texts * 4))
        rig.kv.store.drain_events()
    assert min(shares) > max(shares) / 2, shares


def test_what_is_loaded_at_once_counts_the_pages_of_snapshots_which_come_whole() -> None:
    """Nine pages of K and V, and a snapshot of three."""
    for most, found in ((4, [(4, 8), (4, 4), (4, 0)]), (5, [(5, 7), (4, 3), (3, 0)]), (12, [(12, 0)]), (0, [(0, 12)])):
        rig = with_states("write_back", num_pages=20, host_pages=60)
        serve(rig, [0] * 10)
        to_host(rig.kv)
        req = choice_of("r", [0] * 10, max_new_tokens=40)
        rig.kv.admit(req)
        rig.held = [req]
        for loaded in found:
            assert rig.kv.load(req, most) == loaded
            assert req.computed_len == (0 if loaded[1] else 9)
            rig.sound()
        assert not most or rig.kv.load(req, most) == (0, 0)
        rig.teardown()


@pytest.mark.parametrize("snapshot_pages", [0, 3])
@pytest.mark.parametrize("write", ["write_back", "write_through"])
def test_an_order_to_the_ranks_that_fails_loses_no_page(
    write: str, snapshot_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = KvUnderLoad()
    rig.start(1, 20, "radix", "lru", 60, write, "arc", snapshot_pages=snapshot_pages)
    load_always(rig.kv)
    tiers = rig.kv.store.tiers
    assert tiers is not None
    serve(rig, [1] * 10)
    to_host(rig.kv)

    def fails(*orders: object, **how: object) -> Any:
        raise Overloaded("no memory is left to send the orders")

    with monkeypatch.context() as patched:
        patched.setattr(rig.copier, "backup", fails)
        for number in range(8):
            serve(rig, [0] * 10, str(number))
        to_host(rig.kv)
        rig.sound()
        patched.setattr(rig.copier, "load", fails)
        req = choice_of("r", [1] * 10, max_new_tokens=40)
        rig.kv.admit(req)
        with pytest.raises(Overloaded):
            rig.kv.load(req, 100)
        rig.kv.release(req, keep=False)
        rig.sound()
    assert serve(rig, [0] * 10, "1") == 0
    assert serve(rig, [1] * 10) == 9  # what had come there before is right
    rig.teardown()


def test_a_snapshot_that_the_ranks_were_not_told_of_or_did_not_make_is_given_up_with_its_pages() -> None:
    rig = KvUnderLoad()
    rig.start(1, 20, "radix", "lru", 0, "write_back", "arc", snapshot_pages=3)
    parts = rig.kv.store.parts
    assert isinstance(parts, SnapshotAllocator)

    def fails(copies: object) -> Any:
        raise Overloaded("no memory is left to send the orders")

    def served(salt: str) -> int:
        """Leave a snapshot of two texts, whose copies are ordered."""
        for token in (0, 1):
            req = choice_of("r", [token] * 5, max_new_tokens=40, cache_salt=salt)
            rig.kv.admit(req)
            rig.run_chunk(req, 4)
            rig.kv.release(req, keep=True)
        assert not rig.held
        return len(parts._log)

    parts.run = fails
    assert served("a") == 1  # of the first the step of the second has made it
    with pytest.raises(Overloaded):
        rig.kv.flush()
    rig.kv.flush()
    assert (parts.drain(), rig.kv.store.allocator.num_free) == ([], 40)
    assert served("b") == 1
    parts.run = lambda copies: [copy.number for copy in copies]
    before = parts.num_part_pages
    parts._run_now()
    assert (before, parts.num_part_pages) == (6, 3)
    rig.teardown()


def test_adaptive_asks_for_all_pages_that_a_snapshot_takes() -> None:
    """What nobody came back to does not push out what is younger than the typical wait, an hour; but the host fills."""
    rig = with_states("adaptive", num_pages=60, host_pages=60)
    tiers = rig.kv.store.tiers
    assert tiers is not None
    for _ in range(50):
        tiers._write.gaps.waited(3600.0)
    for number in range(16):
        serve(rig, [0] * 10, str(number))
        to_host(rig.kv)
    assert serve(rig, [0] * 10, "1") == 9
