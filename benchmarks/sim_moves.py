"""Requests that wait move: the production rule (routing/moves.py) over simulated replicas, on and off.

Owns:      the scenarios, and what stands between the rule and the replicas: a question and its answer take a way each.
Invariant: a job is at one replica at a time; a replica that has begun it says so, and it stays.

    look ─> moves() ─> ask ──(delay; a replica that stands still answers later)──> given back ─> the other replica
                                                                              └──> kept ─────> stays

`join`: the second replica joins while the first has a queue. `uneven decode`: a few long answers hold the places of
some replicas. `hot prefix`: most requests begin alike. `silent`: a replica of three stands still for 3 s, shorter than
`router.hang_timeout_s`. `even`: nothing happens, so that moves can only do harm.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import mean

import numpy as np

from benchmarks.harness import Row, Table, percentile
from benchmarks.sim_cluster import Cluster, Record, Setup
from benchmarks.sim_load import SimRequest
from benchmarks.sim_replica import SimJob, Speed
from benchmarks.sim_routers import Routed
from routing.moves import LOOK_S, Move, Waiting, moves
from routing.types import Ending, RouteOutcome, RouteQuery

CANCELLED = RouteOutcome(ending=Ending.CANCELLED)
STEP_S = 0.1  # at whose end a replica answers
PAGE_SIZE = 16
SPEED = Speed(prefill_tokens_per_s=5000.0)


@dataclass(slots=True, eq=False)
class _At:
    """A job that may wait, and where."""

    job: SimJob
    waiting: Waiting
    routed: Routed


class SimMoves:
    """The moves of one cluster's requests."""

    def __init__(self, cluster: Cluster, *, delay_s: float, rng: Random) -> None:
        self.num_moved: dict[str, int] = {}  # by cause
        self.num_kept = 0
        self._cluster = cluster
        self._delay_s = delay_s
        self._rng = rng
        self._at: dict[int, _At] = {}  # by request
        cluster.on_sent = self._sent
        cluster.events.after(LOOK_S, self._look)

    def _sent(self, job: SimJob, query: RouteQuery, routed: Routed) -> None:
        now_s = self._cluster.events.now_s
        self._at[job.request.number] = _At(job, Waiting(query=query, decision=routed.decision, arrived_s=now_s), routed)

    def _look(self) -> None:
        cluster, routers = self._cluster, self._cluster.routers
        assert routers is not None
        for at in [at for at in self._at.values() if at.job.ttft_s]:
            routers.all[at.routed.router].began(at.routed.decision, at.job.ttft_s)
            del self._at[at.job.request.number]
        for index, router in enumerate(routers.all):
            mine = {at.waiting: at for at in self._at.values() if at.routed.router == index}
            for move in list(moves(router, mine, cluster.events.now_s)):
                move.waiting.is_asked = True
                cluster.events.after(self._delay_s, partial(self._ask, mine[move.waiting], move))
        cluster.events.after(LOOK_S, self._look)

    def _ask(self, at: _At, move: Move) -> None:
        """The question has arrived."""
        events, replica = self._cluster.events, self._cluster.replica(at.waiting.decision.replica_id)
        answers_s = max(events.now_s + self._rng.uniform(0.0, STEP_S), replica.still_until_s)
        events.at(answers_s, lambda: self._answer(at, move))

    def _answer(self, at: _At, move: Move) -> None:
        given = self._cluster.replica(at.waiting.decision.replica_id).take_back(at.job)
        self._cluster.events.after(self._delay_s, lambda: self._heard(at, move, given=given))

    def _heard(self, at: _At, move: Move, *, given: bool) -> None:
        routers = self._cluster.routers
        assert routers is not None
        routed = Routed(decision=move.decision, router=at.routed.router, decision_s=0.0)
        at.waiting.is_asked = False
        if given:
            self.num_moved[move.cause] = self.num_moved.get(move.cause, 0) + 1
            self._cluster.move(at.job, routed)
            at.waiting.decision, at.routed = move.decision, routed
        else:
            self.num_kept += 1
            self._at.pop(at.job.request.number, None)
            routers.done(routed, CANCELLED)
            routers.all[routed.router].stays(at.waiting.decision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A load, the replicas that meet it, and what happens to them."""

    num_replicas: int
    requests: Sequence[SimRequest]
    speed: Speed = SPEED
    happens: Callable[[Cluster], None] = lambda cluster: None


def _load(
    rng: Random, *, num: int, rate: float, input_len: Callable[[], int], output_len: Callable[[], int],
    hot: Callable[[], tuple[int, int]] = lambda: (0, 0),
) -> list[SimRequest]:  # fmt: skip
    """Return requests that come at random; ``hot``: a prefix and its length, shared by all that draw the same."""
    arrival_s, requests = 0.0, []
    for number in range(num):
        arrival_s += rng.expovariate(rate)
        prefix, prefix_len = hot()
        own_len = input_len()
        prompt = np.concatenate([np.full(prefix_len, prefix), np.full(own_len, 1_000 + number)]).astype(np.int32)
        requests.append(
            SimRequest(
                number=number, arrival_s=arrival_s, after=None, input_len=len(prompt), output_len=output_len(),
                prompt=prompt, repeat=1, answer=np.array([1_000_000 + number], dtype=np.int32),
            )
        )  # fmt: skip
    return requests


def scenarios(num: int, seed: int) -> dict[str, Scenario]:
    """Make the scenarios, each of about ``num`` requests."""
    rng = Random(f"{seed}/moves")
    lengths = partial(rng.randint, 500, 7_500)

    def join(cluster: Cluster) -> None:
        cluster.replicas[-1].joins_s = num / 1.9 / 4  # after a quarter of the requests

    def stand_still(cluster: Cluster) -> None:
        for at_s in range(10, int(num / 3.2), 30):
            cluster.events.at(at_s, partial(cluster.replicas[0].stand_still, 3.0))

    few_places = Speed(prefill_tokens_per_s=20_000.0, max_running=8)
    return {
        "join": Scenario(
            num_replicas=2, happens=join,
            requests=_load(rng, num=num, rate=1.9, input_len=lengths, output_len=partial(rng.randint, 16, 256)),
        ),
        "uneven decode": Scenario(
            num_replicas=4, speed=few_places,
            requests=_load(
                rng, num=num, rate=8.5, input_len=partial(rng.randint, 200, 2_000),
                output_len=lambda: rng.choice((32, 32, 32, 32, 32, 32, 32, 1_500)),
            ),
        ),
        "hot prefix": Scenario(
            num_replicas=4,
            requests=_load(
                rng, num=num, rate=9.0, input_len=partial(rng.randint, 200, 3_000), output_len=lambda: 64,
                hot=lambda: (rng.choice((1, 1, 1, 2, 3)), 8_000),
            ),
        ),
        "silent": Scenario(
            num_replicas=3,
            happens=stand_still,
            requests=_load(rng, num=num, rate=3.2, input_len=lengths, output_len=lambda: 128),
        ),
        "even": Scenario(
            num_replicas=4,
            requests=_load(rng, num=num, rate=4.6, input_len=lengths, output_len=partial(rng.randint, 16, 256)),
        ),
    }  # fmt: skip


def run(scenario: Scenario, *, move: bool, queue: str, seed: int) -> tuple[list[Record], dict[str, int]]:
    """Run ``scenario`` once. Returns: its records, and how many requests moved, by cause."""
    setup = Setup(
        num_replicas=scenario.num_replicas, pool_tokens=400_000, page_size=PAGE_SIZE,
        speed=replace(scenario.speed, queue=queue), seed=seed,
    )  # fmt: skip
    cluster = Cluster("estimated_ttft", scenario.requests, setup)
    scenario.happens(cluster)
    moved = SimMoves(cluster, delay_s=setup.limits.delay_s, rng=Random(f"{seed}/answers")) if move else None
    records = cluster.run()
    cluster.check()
    return records, moved.num_moved if moved else {}


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each scenario's TTFT with the moves off and on."""
    num, seeds = (60, [0]) if options.quick else (options.requests or 400, range(options.seed, options.seed + 3))
    table, queue = Table("requests that wait move, or stay"), options.queue or "fcfs"
    for name in scenarios(num, 0):
        for move in (False, True):
            runs = [run(scenarios(num, seed)[name], move=move, queue=queue, seed=seed) for seed in seeds]
            ttfts = [[record.ttft_s for record in records] for records, _ in runs]
            moved = sum((Counter(causes) for _, causes in runs), Counter())
            said = ", ".join(f"{cause} {number}" for cause, number in sorted(moved.items()))
            line = f"{name}, {'moves' if move else 'stay'}"
            table.add(line, [mean(each) for each in ttfts], "s", figure="TTFT mean", note=said)
            for q in (50, 95, 99):
                table.add(line, [percentile(each, q) for each in ttfts], "s", figure=f"TTFT p{q}")
    yield from table.rows
