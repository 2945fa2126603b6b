"""Agents beside chats on one engine whose pool is too small for all of them: with and without `cache.sessions`.

    python -m benchmarks agents

Each agent is a session after another: a first prompt, of which all share the beginning (system prompt and tools), then
turns that send the whole history again and what a tool returned, with a pause for the tool between (lognormal, median
3.7 s). Chats are the same with a person's pauses. The pool holds the mean histories of some of them. In each round the
ways run in turn, from an empty cache; what is counted begins after a while.

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
from benchmarks.workloads import FIRST_ID
from replicas.config import CacheConfig
from replicas.engine.engine import Engine
from replicas.launch import EngineSettings, load_engine
from replicas.types import TokenDelta

PAGE = 16
AGENT_PAUSE_S, CHAT_PAUSE_S = 3.7, 10.0  # medians
SPREAD = 1.0  # sigma of the lognormal pauses of tools; a person's are half as far apart
HOST_BYTES = 1 << 30


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

    def __init__(self, engine: Engine, shape: Shape, seed: int, clock: CpuClock) -> None:
        self._engine, self._shape, self._clock = engine, shape, clock
        vocab_size = engine.config.model.vocab_size
        shared = [Random(f"{seed}/shared").randrange(FIRST_ID, vocab_size) for _ in range(shape.shared_len)]
        kinds = [
            ("agent", shape.num_agents, AGENT_PAUSE_S, SPREAD),
            ("chat", shape.num_chats, CHAT_PAUSE_S, SPREAD / 2),
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
            for delta in self._engine.step():
                self._take(delta, seen if now_s > began_s + self._shape.warm_s else Seen())
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
        heapq.heappush(self._due, (now_s + client.pause_s(), self._clients.index(client)))


WAYS = {
    "lru": CacheConfig(sessions=False),
    "sessions": CacheConfig(sessions=True),
    "lru, host tier": CacheConfig(sessions=False, host_memory_bytes=HOST_BYTES),
    "sessions, host tier": CacheConfig(sessions=True, host_memory_bytes=HOST_BYTES),
}
QUICK = Shape(num_agents=4, fit=2, num_chats=1, num_turns=4, warm_s=8.0, run_s=30.0)


def sessions(options: argparse.Namespace) -> Iterator[Row]:
    """Yield what each way found, and how long agents and chats waited."""
    shape = QUICK if options.quick else Shape(num_agents=options.agents, run_s=options.seconds)
    ways = [way for way in WAYS if not options.way or way in options.way]
    found: dict[str, list[Seen]] = {way: [] for way in ways}
    for round_, way in harness.in_turn(ways, harness.rounds_of(options, 1)):
        cache = replace(WAYS[way], page_size=PAGE, max_total_tokens=shape.pool_tokens)
        clock = CpuClock(options.slower)
        settings = EngineSettings(model=options.model, cache=cache, num_threads=options.threads, clock=clock)
        with closing(load_engine(settings)) as engine:
            found[way].append(Run(engine, shape, options.seed + round_, clock).run())
    table = Table(f"{shape.num_agents} agents and {shape.num_chats} chats, a pool for {shape.fit} agents")
    for way, runs in found.items():
        table.add(f"{way}: agents' hit rate", [run.cached / run.asked for run in runs])
        rate = 60 / (shape.run_s * shape.num_turns)
        table.add(f"{way}: sessions a minute", [run.turns * rate for run in runs])
        for kind in ("agent", "chat"):
            waits = [run.ttft_s[kind] for run in runs]
            for name, q in (("median", 50), ("p95", 95)):
                table.add(f"{way}: {kind}s' first token, {name}", [harness.percentile(each, q) for each in waits], "s")
    yield from table.rows


PARTS = {"sessions": Part(about="agents' sessions on a pool that is too small for them", measure=sessions)}


def _options(parse: argparse.ArgumentParser) -> None:
    parse.add_argument("--agents", type=int, default=Shape().num_agents)
    parse.add_argument("--seconds", type=float, default=Shape().run_s, help="of each run, after its beginning")
    parse.add_argument("--slower", type=float, default=1.0, help="times that a second of CPU time counts (1)")
    parse.add_argument("--way", action="append", choices=sorted(WAYS), help="only this one; may be given again (all)")


def main(argv: Sequence[str] | None = None) -> None:
    harness.run("agents", __doc__, PARTS, argv, options=_options)
