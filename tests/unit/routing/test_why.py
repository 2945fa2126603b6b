"""Each answer that reused less than it could have gets the cause that was brought about, and no other gets one.

Real are router, index, radix caches, their events and the frames between; what a replica computes is what its cache
did not have.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from dashboards.catalog import MISSES
from deployments.channel.frames import CacheChanges, decode, encode
from kvtransfer.pages import Tier
from replicas.cache.events import EventLog
from replicas.cache.radix import RadixCache
from replicas.text.tokenizer import Tokenizer
from routing.router import Router
from routing.types import Decision, Ending, KeysStored, ReplicaView, RouteOutcome, RouteQuery
from routing.why import SAID, Asked, Departure, Miss, MissCause, PromptHistory, _Turn
from tests.embedded import MODEL
from tests.harness import Clock

PAGE = 16
POOL = 4096
Messages = list[dict[str, Any]]


class Replica:
    """A radix cache of POOL pages, and its events."""

    def __init__(self, clock: Clock) -> None:
        self.events = EventLog()
        self.cache = RadixCache(PAGE, events=self.events, clock=clock)
        self.ids = itertools.cycle(range(1, POOL + 1))

    def compute(self, ids: np.ndarray[Any, Any], salt: str) -> int:
        """Returns: how many of ``ids`` were cached."""
        found = self.cache.match_prefix(ids[: len(ids) - 1], salt).prefix_len
        num = len(ids) // PAGE
        pages = np.array([next(self.ids) for _ in range(num)], dtype=np.int32)
        self.cache.insert(ids[: num * PAGE], pages, salt)
        return found

    def evict(self, num_pages: int, tenant: str) -> None:
        self.events.needed_by = tenant
        self.cache.evict(num_pages)
        self.events.needed_by = ""


class Fleet:
    """A router and its replicas."""

    def __init__(self, *names: str) -> None:
        self.clock = Clock()
        self.router = Router("estimated_ttft", Random(0), self.clock, page_size=PAGE)
        self.replicas: dict[str, Replica] = {}
        self.tokenizer = Tokenizer(MODEL)
        self.last: Decision | None = None
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        self.replicas[name] = Replica(self.clock)
        self.report(name)
        self.router.apply(name, [])

    def report(self, name: str, **fields: Any) -> None:
        fields = {"pool_pages": POOL, "prefill_tokens_per_s": 1000.0} | fields
        self.router.report(ReplicaView(replica_id=name, time_s=self.clock(), page_size=PAGE, **fields))

    def tell(self) -> None:
        for name, replica in self.replicas.items():
            body = encode(CacheChanges.of(replica.events.drain()))
            changes = decode(body[4:])
            assert isinstance(changes, CacheChanges)
            self.router.apply(name, changes.events())

    def ask(
        self, messages: Messages, *, tools: Sequence[Any] = (), only: str = "", salt: str = "", owner: str = "",
        adapter: str = "", session: str = "", tenant: str = "",
    ) -> Miss | None:  # fmt: skip
        ids = np.asarray(self.tokenizer.chat(messages, tools=list(tools) or None), dtype=np.int32)
        space = f"{adapter}/{owner}/{salt}" if adapter or owner or salt else ""
        return self.send(
            ids, space, only=only, parts=messages, tools=tools, owner=owner, salt=salt, adapter=adapter,
            session_id=session, tenant=tenant,
        )  # fmt: skip

    def send(
        self, ids: np.ndarray[Any, Any], space: str, *, only: str = "", parts: Messages | None = None,
        tools: Sequence[Any] = (), **names: str,
    ) -> Miss | None:  # fmt: skip
        """Serve a prompt as the dispatcher does."""
        self.clock.now_s += 1.0
        router, allowed = self.router, frozenset([only]) if only else None
        decision = self.last = router.choose(RouteQuery(rid="r", token_ids=ids, salt=space, allowed=allowed))
        cached = self.replicas[decision.replica_id].compute(ids, space)
        hashed = None if parts is None else router.prompts.parts(parts, tools)
        miss = router.prompts.judge(decision, cached, Asked(token_ids=ids, parts=hashed, **names))
        router.done(decision, RouteOutcome(ending=Ending.OK, cached_tokens=cached, ttft_s=0.01))
        self.tell()
        self.clock.now_s += 1.0
        self.tell()
        return None if miss is None else router.prompts.settled(miss, decision)


RNG = Random(7)
WORDS = [f"word{number}" for number in range(500)]


def text(num: int = 60) -> str:
    return " ".join(RNG.choices(WORDS, k=num))


def chat(turns: int = 1, system: str | None = None) -> Messages:
    made: Messages = [{"role": "system", "content": text() if system is None else system}]
    for _ in range(turns):
        made += [{"role": "user", "content": text()}, {"role": "assistant", "content": text(20)}]
    return made[:-1]


def next_turn(messages: Messages) -> Messages:
    return [*messages, {"role": "assistant", "content": text(8)}, {"role": "user", "content": text(8)}]


def tool(name: str, says: str = "") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": says or text(10), "parameters": {}}}


def changed(fleet: Fleet, number: int) -> Miss | None:
    before = chat(3)
    fleet.ask(before, only="r0")
    after = next_turn(before)
    at = number % 5
    after[at] = {**after[at], "content": text()}
    miss = fleet.ask(after, only="r0")
    assert miss is not None
    assert miss.what == ("the system text" if at == 0 else f"message {at + 1} ({after[at]['role']})")
    return miss


def reordered(fleet: Fleet, number: int) -> Miss | None:
    if number % 2:  # its retrieved documents
        before = chat(3)
        fleet.ask(before, only="r0")
        after = next_turn(before)
        after[1], after[3] = after[3], after[1]
        return fleet.ask(after, only="r0")
    tools, system = [tool(f"tool{number}_{each}") for each in range(4)], text()
    fleet.ask(chat(1, system), tools=tools, only="r0")
    return fleet.ask(chat(1, system), tools=tools[::-1], only="r0")  # another conversation of the same application


STAMPS = ("2026-11-29T16:06:{:02d}Z", "16:{:02d}", "Sunday, November {:d}, 2026", "17640000{:02d}", "11/{:02d}/2026")


def time_stamp(fleet: Fleet, number: int) -> Miss | None:
    rules, stamp = text(), STAMPS[number % len(STAMPS)]
    before = chat(1, f"You help. Now it is {stamp.format(10 + number)}. {rules}")
    fleet.ask(before, only="r0")
    after = next_turn(before) if number % 2 else chat(1)
    after[0] = {"role": "system", "content": f"You help. Now it is {stamp.format(20 + number)}. {rules}"}
    return fleet.ask(after, only="r0")


def evicted(fleet: Fleet, number: int) -> Miss | None:
    before = chat(2)
    fleet.ask(before, only="r0")
    fleet.clock.now_s += 5.0
    kept = 0 if number % 2 else 4  # pages of its beginning
    fleet.replicas["r0"].evict(fleet.replicas["r0"].cache.evictable_pages - kept, "greedy")
    fleet.tell()
    miss = fleet.ask(next_turn(before) if number % 3 else before, only="r0")
    assert miss is not None
    assert miss.by is not None
    assert (miss.by.replica_id, miss.by.tier, miss.by.tenant) == ("r0", Tier.DEVICE, "greedy")
    assert miss.by.idle_s == pytest.approx(6.0)
    return miss


def elsewhere(fleet: Fleet, number: int) -> Miss | None:
    before = chat(2)
    fleet.ask(before, only="r0")
    if number % 2:  # it drains
        fleet.report("r0", accepting=False)
    miss = fleet.ask(next_turn(before), only="" if number % 2 else "r1")
    fleet.report("r0")
    assert miss is not None
    assert miss.what == "r0"
    return miss


def elsewhere_by_load(fleet: Fleet, number: int) -> Miss | None:
    before = chat(2)
    fleet.ask(before, only="r0")
    fleet.report("r1")
    fleet.report("r0", num_waiting=4, queued_uncached_tokens=9000 + number)
    miss = fleet.ask(next_turn(before))
    fleet.report("r0")
    assert fleet.last is not None
    assert miss is not None
    assert "its first token would have come after" in miss.words(fleet.last)
    return miss


def other(**names: str) -> Callable[[Fleet, int], Miss | None]:
    def make(fleet: Fleet, number: int) -> Miss | None:
        before = chat(2)
        fleet.ask(before, owner="key1", only="r0")
        return fleet.ask(before if number % 2 else next_turn(before), **({"owner": "key1", "only": "r0"} | names))

    return make


def page(fleet: Fleet, number: int) -> Miss | None:
    ids = np.arange(3 + number, dtype=np.int32) + 20_000 + 100 * number
    fleet.send(ids, "")
    return fleet.send(ids, "")


def part(fleet: Fleet, number: int) -> Miss | None:
    """K and V are told, the state is not."""
    fleet.add("hybrid")
    fleet.router.forget("hybrid")
    fleet.report("hybrid", part="state", border_pages=1)
    fleet.replicas["hybrid"].compute = lambda ids, salt: 0  # type: ignore[method-assign]
    ids = np.asarray(fleet.tokenizer.chat(chat(2)), dtype=np.int32)
    decision = fleet.router.choose(RouteQuery(rid="r", token_ids=ids, allowed=frozenset(["hybrid"])))
    fleet.router.apply("hybrid", [KeysStored(1, decision.keys)])
    fleet.router.done(decision, RouteOutcome(ending=Ending.OK, cached_tokens=0, ttft_s=0.01))
    for _ in range(3):
        fleet.router.apply("hybrid", [])
    miss = fleet.send(ids, "", only="hybrid")
    fleet.router.forget("hybrid")
    del fleet.replicas["hybrid"]
    return miss


def restarted(fleet: Fleet, number: int) -> Miss | None:
    before = chat(2)
    fleet.ask(before, only="r1")
    if number % 2:
        fleet.replicas["r1"].cache.reset()
        fleet.tell()
    else:
        fleet.router.forget("r1")
        fleet.add("r1")
    for _ in range(number):  # others write meanwhile, so that the sweep comes to its pages
        fleet.ask(chat(3), only="r0")
    miss = fleet.ask(next_turn(before))
    assert miss is not None
    assert miss.by is not None
    assert miss.by.replica_id == "r1"
    return miss


def never(fleet: Fleet, number: int) -> Miss | None:
    return fleet.ask(chat(1 + number % 3), owner=f"key{number % 2}")


CAUSES: dict[MissCause, Sequence[Callable[[Fleet, int], Miss | None]]] = {
    MissCause.CHANGED: [changed],
    MissCause.REORDERED: [reordered],
    MissCause.TIME_STAMP: [time_stamp],
    MissCause.EVICTED: [evicted],
    MissCause.ELSEWHERE: [elsewhere, elsewhere_by_load],
    MissCause.SALT: [other(salt="mine")],
    MissCause.TENANT: [other(owner="key2")],
    MissCause.ADAPTER: [other(adapter="lora")],
    MissCause.PAGE: [page],
    MissCause.PART: [part],
    MissCause.RESTARTED: [restarted],
    MissCause.NEVER: [never],
}


def test_of_six_of_each_cause_every_one_is_named() -> None:
    assert CAUSES.keys() == set(MissCause) == SAID.keys()
    assert tuple(each.value for each in MissCause) == MISSES
    fleet, told = Fleet("r0", "r1"), dict[MissCause, list[str]]()
    for number, (cause, makers) in itertools.product(range(6), CAUSES.items()):
        miss = makers[number // 2 % len(makers)](fleet, number)
        told.setdefault(cause, []).append("none" if miss is None else miss.cause.value)
        assert fleet.last is not None
        assert miss is None or "{" not in miss.words(fleet.last)
    assert told == {cause: 6 * [cause.value] for cause in MissCause}
    fleet.router.check()


def test_a_turn_that_goes_on_unchanged_misses_nothing() -> None:
    """200 turns of 25 conversations of four keys, among them equal first questions, tools, and sessions."""
    fleet, asked = Fleet("r0"), 0
    opening = text(20)
    tools = [tool("search"), tool("run")]
    chats = [chat(1) for _ in range(23)] + [[{"role": "user", "content": opening}] for _ in range(2)]
    names = [{"owner": f"key{number % 4}", "session": f"s{number}" if number % 3 else ""} for number in range(25)]
    for number, messages in enumerate(chats):
        fleet.ask(messages, tools=tools if number % 2 else (), **names[number])  # type: ignore[arg-type]
    for turn in range(8):
        for number in RNG.sample(range(25), 25):
            chats[number] = next_turn(chats[number]) if turn % 5 else chats[number]  # else it is asked again
            miss = fleet.ask(chats[number], tools=tools if number % 2 else (), **names[number])  # type: ignore[arg-type]
            assert miss is None, f"turn {turn} of {number}: {miss}"
            asked += 1
    assert asked == 200
    assert len(fleet.router.prompts.misses.table(3600.0)) > 0, "first turns were never seen"


@pytest.mark.parametrize(
    ("name", "cause"), [("owner", MissCause.TENANT), ("salt", MissCause.SALT), ("adapter", MissCause.ADAPTER)]
)
def test_a_client_is_not_told_that_another_one_sent_the_same_prompt(name: str, cause: MissCause) -> None:
    """Salts separate users of one key, too."""
    fleet, words = Fleet("r0"), chat(2)
    fleet.ask(words, **{name: "one"})
    miss = fleet.ask(words, **{name: "two"})
    assert miss is not None
    assert (miss.cause, miss.told) == (cause, "never_seen")


def test_the_table_sums_up_by_tenant_and_cause_what_the_last_minutes_had() -> None:
    fleet = Fleet("r0")
    for number in range(3):
        fleet.ask(chat(1), tenant="acme" if number else "umbrella")
    fleet.clock.now_s += 4000.0
    miss = fleet.ask(chat(1), tenant="acme")
    assert miss is not None
    misses = fleet.router.prompts.misses
    [row] = misses.table(600.0)
    assert row == {
        "tenant": "acme", "cause": "never_seen", "requests": 1, "tokens": miss.tokens, "seconds": miss.tokens / 1000.0,
    }  # fmt: skip
    assert [(each["tenant"], each["requests"]) for each in misses.table(86_400.0)] == [("acme", 3), ("umbrella", 1)]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MOST_TURNS", 30), ("MOST_TURN_PAGES", 100), ("MOST_MESSAGES", 40), ("MOST_ROWS", 4)):
        monkeypatch.setattr(f"routing.why.{name}", most)
    fleet = Fleet("r0")
    prompts = fleet.router.prompts
    prompts._spaces._most = prompts._timeless._most = 20
    for number in range(60):
        fleet.ask(chat(1), session=f"s{number}", tenant=f"t{number}")
        fleet.clock.now_s += 100.0
        turns: list[_Turn] = list(prompts._turns.entries.values())
        assert sum(len(turn.keys) for turn in turns) == prompts._num_turn_pages <= 100
        assert sum(len(turn.parts.messages) for turn in turns) == prompts._num_messages <= 40
        assert len(turns) <= 30
        assert max(len(prompts._spaces.entries), len(prompts._timeless.entries)) <= 20
        assert prompts.misses.num_rows <= 4 + 3  # a row is dropped with all of its five minutes


def test_a_thousand_new_messages_and_a_long_prompt_that_left_take_the_router_milliseconds() -> None:
    """Stamped, so that each is looked through for times; and 6,250 pages that were evicted."""
    prompts = PromptHistory(PAGE, time.monotonic, departure=lambda key: departed)
    departed = Departure(cause=MissCause.EVICTED, replica_id="r0", time_s=0.0)
    texts = (f"at 12:{number % 60:02d} on 2026-11-29 " + 400 * f"{number} 10:30 " for number in range(1000))
    messages = [{"role": "user", "content": each} for each in texts]
    ids = np.arange(100_000, dtype=np.int32)
    fleet = Fleet("r0")
    decision = fleet.router.choose(RouteQuery(rid="r", token_ids=ids))
    began_s = time.thread_time()
    parts = prompts.parts(messages)
    parts_s, began_s = time.thread_time() - began_s, time.thread_time()
    miss = prompts.judge(decision, 0, Asked(token_ids=ids, parts=parts))
    judged_s = time.thread_time() - began_s
    assert miss is not None
    assert (miss.cause, miss.tokens) == (MissCause.EVICTED, (len(ids) - 1) // PAGE * PAGE)
    print(f"{1e3 * parts_s:.1f} ms, {1e3 * judged_s:.1f} ms")
    assert parts_s < 0.1, "600 before only the beginnings of messages were looked through"
    assert judged_s < 0.01, "14 ms before only so many pages were looked at"


def test_a_page_that_left_twice_is_told_as_it_left_last() -> None:
    fleet, words = Fleet("r0"), chat(2)
    for tenant in ("first", "second"):
        fleet.ask(words)
        fleet.replicas["r0"].evict(POOL, tenant)
        fleet.tell()
    miss = fleet.ask(words)
    assert miss is not None
    assert isinstance(miss.by, Departure)
    assert miss.by.tenant == "second"
