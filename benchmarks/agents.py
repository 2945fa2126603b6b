"""Agents beside chats on one engine whose pool is too small for all of them: with and without `cache.sessions`.
And requests alone on one engine and beside the lines of a batch.

    python -m benchmarks agents
    python -m benchmarks agents lines

Each agent is a session after another: a first prompt, of which all share the beginning (system prompt and tools), then
turns that send the whole history again and what a tool returned, with a pause for the tool between (lognormal, median
3.7 s). Chats are the same with a person's pauses. The pool holds the mean histories of some of them. In each round the
ways run in turn, from an empty cache; what is counted begins after a while.

The requests of `lines` come at random (Poisson), at a rate at which they keep the engine busy for a part of its time;
the batch always has as many lines open as a router would. What the batch gets is compared with what it gets alone, in
the part of the time that the requests leave.

The clock counts the CPU time of this process, so that other work on the machine does not count, and jumps over the time
in which every client pauses. With --slower N a second of CPU time counts as N: an engine that is as much slower.
"""

import argparse
import heapq
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from random import Random

from benchmarks import driver, harness
from benchmarks.harness import Part, Row, Table
from benchmarks.workloads import FIRST_ID, TOOL_PAUSE_S, TOOL_SPREAD
from replicas.config import CacheConfig
from replicas.engine.engine import Engine
from replicas.launch import EngineSettings, load_engine
from replicas.types import TokenDelta

PAGE = 16
CHAT_PAUSE_S = 10.0  # median of a person's lognormal pauses, which are half as far apart as tools'
HOST_BYTES = 1 << 30
HELD_S = 0.05  # for which time goes on where no request may begin
RATES, QUICK_RATES = (0.3, 0.6, 0.9), (0.5,)  # of requests beside a batch, a second
PROMPT_LEN, ANSWER_LEN = 256, 32  # of those, and of lines
LINES_WAITING = 4  # at the replica, beyond its rows, as a router keeps there


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large everything is, in tokens."""

    num_agents: int = 20
    fit: int = 15  # agents whose mean history the pool holds
    num_chats: int = 3
    shared_len: int = 128
    first_len: int = 384  # of a first prompt, the shared part included
    tool_len: int = 48
    answer_len: int = 8
    num_turns: int = 16
    warm_s: float = 60.0
    run_s: float = 200.0

    @property
    def mean_len(self) -> int:
        """Of a session's history, over its turns."""
        return self.first_len + (self.num_turns * (self.tool_len + self.answer_len)) // 2

    @property
    def pool_tokens(self) -> int:
        return self.shared_len + self.fit * (self.mean_len - self.shared_len)


@dataclass(slots=True, eq=False)
class Client:
    """One agent or chat, which begins a new session when one is done."""

    name: str
    random: Random
    shape: Shape
    vocab_size: int
    shared: list[int]
    median_s: float
    spread: float
    turn: int = 0
    history: list[int] = field(default_factory=list)
    sent_s: float = 0.0
    first_s: float | None = None

    def prompt(self) -> list[int]:
        """Return the next prompt: the history and what is new."""
        shape = self.shape
        if self.turn == 0:
            self.history = list(self.shared) + self._tokens(shape.first_len - shape.shared_len)
        else:
            self.history += self._tokens(shape.tool_len)
        return self.history

    def age(self, num_turns: int) -> None:
        """Be in the middle of a session, which began before."""
        self.prompt()
        self.turn = num_turns
        self.history += self._tokens(num_turns * (self.shape.tool_len + self.shape.answer_len))

    def pause_s(self) -> float:
        return self.random.lognormvariate(math.log(self.median_s), self.spread)

    def _tokens(self, num: int) -> list[int]:
        return [self.random.randrange(FIRST_ID, self.vocab_size) for _ in range(num)]


@dataclass(slots=True)
class Seen:
    """What was counted of the agents and the chats."""

    cached: int = 0
    asked: int = 0
    turns: int = 0
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: {"agent": [], "chat": []})

    def count(self, client: Client, delta: TokenDelta, first_s: float) -> None:
        kind = client.name.split("-")[0]
        self.ttft_s[kind].append(first_s - client.sent_s)
        if kind == "agent":
            self.cached += delta.usage.cached_tokens
            self.asked += delta.usage.prompt_tokens
            self.turns += 1


class CpuClock:
    """Seconds that this process computed, each counted ``slower`` times, and those that were skipped."""

    def __init__(self, slower: float) -> None:
        self._slower = slower
        self._skipped_s = 0.0

    def __call__(self) -> float:
        return self._skipped_s + time.process_time() * self._slower

    def skip_to(self, until_s: float) -> None:
        self._skipped_s += max(0.0, until_s - self())


class Run:
    """Clients in front of one engine, until their time is over."""

    def __init__(self, engine: Engine, shape: Shape, seed: int, clock: CpuClock, *, tells: bool) -> None:
        """``tells``: the engine is told that an agent's answer calls a tool, and that its last one calls none."""
        self._engine, self._shape, self._clock, self._tells = engine, shape, clock, tells
        vocab_size = engine.config.model.vocab_size
        shared = [Random(f"{seed}/shared").randrange(FIRST_ID, vocab_size) for _ in range(shape.shared_len)]
        kinds = [
            ("agent", shape.num_agents, TOOL_PAUSE_S, TOOL_SPREAD),
            ("chat", shape.num_chats, CHAT_PAUSE_S, TOOL_SPREAD / 2),
        ]
        self._clients = [
            Client(f"{kind}-{i}", Random(f"{seed}/{kind}/{i}"), shape, vocab_size, shared, median_s, spread)
            for kind, num, median_s, spread in kinds
            for i in range(num)
        ]
        self._open: dict[str, Client] = {}
        self._due: list[tuple[float, int]] = []  # when a client sends next, and which

    def run(self) -> Seen:
        """Returns: what was seen after ``warm_s``."""
        began_s, seen, num = self._clock(), Seen(), len(self._clients)
        self._due = [(began_s + self._clients[i].pause_s(), i) for i in range(num)]
        for i, client in enumerate(self._clients):
            client.age(i * self._shape.num_turns // num)
        heapq.heapify(self._due)
        while (now_s := self._clock()) < began_s + self._shape.warm_s + self._shape.run_s:
            while self._due and self._due[0][0] <= now_s:
                self._send(heapq.heappop(self._due)[1])
            if not self._open:
                self._clock.skip_to(self._due[0][0])
                continue
            deltas = self._engine.step()
            for delta in deltas:
                self._take(delta, seen if now_s > began_s + self._shape.warm_s else Seen())
            if not deltas and not self._engine.scheduler.last.made_progress:  # all that are open are held
                self._clock.skip_to(min(now_s + HELD_S, self._due[0][0] if self._due else math.inf))
        for rid in list(self._open):
            self._engine.abort(rid)
        while self._engine.has_work:
            self._engine.step()
        return seen

    def _send(self, which: int) -> None:
        client = self._clients[which]
        request = driver.request(client.prompt(), self._shape.answer_len)
        self._open[request.rid], client.sent_s, client.first_s = client, self._clock(), None
        self._engine.submit(request)

    def _take(self, delta: TokenDelta, seen: Seen) -> None:
        client, now_s = self._open[delta.rid], self._clock()
        client.history += delta.token_ids
        if delta.token_ids and client.first_s is None:
            client.first_s = now_s
        if delta.finish is None:
            return
        assert client.first_s is not None, f"{delta.rid}: {delta.finish}"
        seen.count(client, delta, client.first_s)
        del self._open[delta.rid]
        client.turn = (client.turn + 1) % self._shape.num_turns
        if self._tells and client.name.startswith("agent"):
            self._engine.kv.told(delta.rid, ["tool"] if client.turn else [])
        heapq.heappush(self._due, (now_s + client.pause_s(), self._clients.index(client)))


TOLD = "tools told"
ALONE = "chats alone"  # the same chats, without agents
WAYS = {
    "lru": CacheConfig(sessions=False),
    "sessions": CacheConfig(sessions=True),
    f"sessions, {TOLD}": CacheConfig(sessions=True),
    "lru, host tier": CacheConfig(sessions=False, host_memory_bytes=HOST_BYTES),
    "sessions, host tier": CacheConfig(sessions=True, host_memory_bytes=HOST_BYTES),
    f"sessions, host tier, {TOLD}": CacheConfig(sessions=True, host_memory_bytes=HOST_BYTES),
}
QUICK = Shape(num_agents=4, fit=2, num_chats=1, num_turns=4, warm_s=8.0, run_s=30.0)


def sessions(options: argparse.Namespace) -> Iterator[Row]:
    """Yield what each way found, and how long agents and chats waited."""
    shape = QUICK if options.quick else Shape(num_agents=options.agents, run_s=options.seconds)
    ways = [way for way in WAYS if not options.way or way in options.way]
    found: dict[str, list[Seen]] = {way: [] for way in [ALONE, *ways]}
    for round_, way in harness.in_turn(found, harness.rounds_of(options, 1)):
        clients = replace(shape, num_agents=0) if way == ALONE else shape
        cache = replace(WAYS.get(way, CacheConfig()), page_size=PAGE, max_total_tokens=shape.pool_tokens)
        clock = CpuClock(options.slower)
        settings = EngineSettings(model=options.model, cache=cache, num_threads=options.threads, clock=clock)
        with closing(load_engine(settings)) as engine:
            run = Run(engine, clients, options.seed + round_, clock, tells=way.endswith(TOLD))
            found[way].append(run.run())
    alone_s = [harness.percentile(run.ttft_s["chat"], 95) for run in found.pop(ALONE)]
    table = Table(f"{shape.num_agents} agents and {shape.num_chats} chats, a pool for {shape.fit} agents")
    table.add(f"{ALONE}: chats' first token, p95", alone_s, "s")
    for way, runs in found.items():
        table.add(f"{way}: agents' hit rate", [run.cached / run.asked for run in runs])
        rate = 60 / (shape.run_s * shape.num_turns)
        table.add(f"{way}: sessions a minute", [run.turns * rate for run in runs])
        for kind in ("agent", "chat"):
            waits = [run.ttft_s[kind] for run in runs]
            for name, q in (("median", 50), ("p95", 95)):
                table.add(f"{way}: {kind}s' first token, {name}", [harness.percentile(each, q) for each in waits], "s")
        beside_s = [harness.percentile(run.ttft_s["chat"], 95) for run in runs]
        ratios = [beside / alone for beside, alone in zip(beside_s, alone_s, strict=True)]
        table.add(f"{way}: chats' p95, beside agents / alone (<= 1.05)", ratios, "x")
    yield from table.rows


@dataclass(slots=True)
class Gaps:
    """Requests, if any, in front of one engine, beside lines of a batch, if any."""

    engine: Engine
    clock: CpuClock
    seed: str  # the requests that come, and when, follow from it, beside lines or not
    rate: float  # requests a second; 0: none
    has_lines: bool
    ttft_s: list[float] = field(default_factory=list)
    line_tokens: int = 0  # prompts and output of lines, as far as they are made
    idle_s: float = 0.0
    _sent_s: dict[str, float] = field(default_factory=dict)  # by rid of a request without a token
    _online: set[str] = field(default_factory=set)  # rids of open requests, which are no lines
    _num_lines: int = 0  # open
    _times: Random = field(init=False)
    _ids: dict[bool, Random] = field(init=False)  # of the tokens of requests and of lines

    def __post_init__(self) -> None:
        self._times = Random(f"{self.seed}/times")
        self._ids = {offline: Random(f"{self.seed}/{offline}") for offline in (False, True)}

    def _line_places(self) -> int:
        """Count the lines that may be sent now, as `Fleet.line_places` does."""
        rows = self.engine.stats().max_running_requests - len(self._online)
        return max(rows, 0) + LINES_WAITING - self._num_lines

    def _pause_s(self) -> float:
        return self._times.expovariate(self.rate) if self.rate else math.inf

    def run(self, run_s: float) -> "Gaps":
        began_s = now_s = self.clock()
        due_s = began_s + self._pause_s()
        while now_s < began_s + run_s:
            while due_s <= now_s:
                rid = self._submit(offline=False)
                self._online.add(rid)
                self._sent_s[rid] = due_s
                due_s += self._pause_s()
            for _ in range(self._line_places() if self.has_lines else 0):
                self._submit(offline=True)
                self._num_lines += 1
            if not self.engine.has_work:
                self.idle_s += min(due_s, began_s + run_s) - now_s
                self.clock.skip_to(due_s)
            for delta in self.engine.step() if self.engine.has_work else ():
                self._take(delta)
            now_s = self.clock()
        return self

    def _submit(self, *, offline: bool) -> str:
        vocab_size = self.engine.config.model.vocab_size
        ids = [self._ids[offline].randrange(FIRST_ID, vocab_size) for _ in range(PROMPT_LEN)]
        asked = replace(driver.request(ids, ANSWER_LEN), offline=offline)
        self.engine.submit(asked)
        return asked.rid

    def _take(self, delta: TokenDelta) -> None:
        if delta.rid in self._sent_s:
            self.ttft_s.append(self.clock() - self._sent_s.pop(delta.rid))
        if delta.rid in self._online:
            if delta.finish is not None:
                self._online.remove(delta.rid)
            return
        self._num_lines -= delta.finish is not None
        num_new, num_made = len(delta.token_ids), delta.usage.completion_tokens
        self.line_tokens += num_new + (PROMPT_LEN if num_new == num_made else 0)


def lines(options: argparse.Namespace) -> Iterator[Row]:
    """Yield how long requests wait alone and beside a batch, and what the batch gets of the time that they leave."""
    table = Table(f"requests of {PROMPT_LEN} tokens, {ANSWER_LEN} out, alone and beside a batch of the same")
    batch = _gaps(options, rate=0.0, has_lines=True)
    for rate in QUICK_RATES if options.quick else RATES:
        for _ in range(harness.rounds_of(options, 1)):
            alone, beside = (_gaps(options, rate=rate, has_lines=has) for has in (False, True))
            free = alone.idle_s / options.seconds
            p95 = [harness.percentile(each.ttft_s, 95) for each in (alone, beside)]
            table.add(f"{rate:g} a second: busy alone", [100 * (1 - free)], "%")
            table.add(f"{rate:g} a second: first token p95, alone", [p95[0]], "s")
            table.add(f"{rate:g} a second: first token p95, beside a batch", [p95[1]], "s")
            table.add(f"{rate:g} a second: beside / alone (<= 1.2)", [p95[1] / p95[0]])
            table.add(
                f"{rate:g} a second: batch, of its rate alone in the time left (>= 85)",
                [100 * beside.line_tokens / (free * batch.line_tokens)], "%",
            )  # fmt: skip
    yield from table.rows


def _gaps(options: argparse.Namespace, *, rate: float, has_lines: bool) -> Gaps:
    clock = CpuClock(options.slower)
    settings = EngineSettings(model=options.model, num_threads=options.threads, clock=clock)
    with closing(load_engine(settings)) as engine:
        return Gaps(engine, clock, f"{options.seed}/{rate}", rate, has_lines).run(options.seconds)


PARTS = {
    "sessions": Part(about="agents' sessions on a pool that is too small for them", measure=sessions),
    "lines": Part(about="requests alone and beside the lines of a batch", measure=lines, asked=True),
}


def _options(parse: argparse.ArgumentParser) -> None:
    parse.add_argument("--agents", type=int, default=Shape().num_agents)
    parse.add_argument("--seconds", type=float, default=Shape().run_s, help="of each run, after its beginning")
    parse.add_argument("--slower", type=float, default=1.0, help="times that a second of CPU time counts (1)")
    parse.add_argument("--way", action="append", choices=sorted(WAYS), help="only this one; may be given again (all)")


def main(argv: Sequence[str] | None = None) -> None:
    harness.run("agents", __doc__, PARTS, argv, options=_options)
