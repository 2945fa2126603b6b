"""Tenants that share a replica: one that sends all it has at once, and nine that ask now and then; the production
scheduler with simulated steps (sim_engine.py), once with their tenants' names, once without.

Owns:      the loads, and what is fair of them.
Invariant: every run of a load has the same requests at the same times, and each tenant its own cache.

    alone       the nine without the heavy one: what their times are held against
    no tenants  all ten under one name: the order that a replica had without names
    tenants     each under its own name

Short prompts take a step or two: what the one under way costs them beside the heavy tenant, no order can mend.
"""

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Row, Table, percentile
from benchmarks.sim_cluster import Cluster, Record, Setup
from benchmarks.sim_engine import Build, StepTime
from benchmarks.sim_load import SimRequest
from replicas.config import SchedulerConfig

NUM_LIGHT = 9
HEAVY = "heavy"
# what a light tenant asks: its own tokens of a prompt, and the seconds between two, on average
LIGHT = {"short prompts": (64, 192, 3.0), "long prompts": (1_024, 2_048, 20.0), "chats": (64, 192, 30.0)}
CHATS = ("chats",)  # in which a prompt goes on with all that came before
# about SmolLM2 on two cores with AVX-512 (docs/performance.md): 2,500 prompt tokens a second, 16 rows 36 ms
STEP = StepTime(base_s=0.02, prompt_token_s=0.0004, row_s=0.001)


def load(kind: str, seconds: float, *, seed: int) -> list[SimRequest]:
    """Make the requests of ``seconds``: those of nine tenants, each with a system prompt of its own, and at the start
    more of the heavy one than there is time for."""
    rng, (least, most, every_s) = Random(f"{seed}/tenants"), LIGHT[kind]
    asked: list[tuple[float, str, int, int]] = []  # arrival, tenant, prefix that others of it have, its own tokens
    for light in range(NUM_LIGHT):
        at_s = 2.0 + rng.uniform(0, every_s)
        while at_s < seconds:
            asked.append((at_s, f"light {light + 1}", 256, rng.randint(least, most)))
            at_s += rng.expovariate(1 / every_s)
    asked += [(rng.uniform(0, 1), HEAVY, 128, rng.randint(256, 1024)) for _ in range(int(3 * seconds))]
    requests, history = list[SimRequest](), dict[str, npt.NDArray[np.int32]]()
    for number, (at_s, tenant, prefix_len, own_len) in enumerate(sorted(asked)):
        prefix = 1 + (0 if tenant == HEAVY else int(tenant.split()[1]))
        before = history.get(tenant, np.full(prefix_len, prefix))
        prompt = np.concatenate([before, np.full(own_len, 1_000 + number)]).astype(np.int32)
        requests.append(
            SimRequest(
                number=number, arrival_s=at_s, after=None, input_len=len(prompt), output_len=rng.randint(16, 64),
                prompt=prompt, repeat=1, answer=np.array([1_000_000 + number], dtype=np.int32), tenant=tenant,
            )
        )  # fmt: skip
        if kind in CHATS and tenant != HEAVY:
            history[tenant] = requests[-1].token_ids()
    return requests


def run(requests: Sequence[SimRequest], *, named: bool, queue: str, seed: int) -> list[Record]:
    """Run the requests over one replica; ``named``: the scheduler knows whose they are."""
    build = Build(
        step=STEP, page_size=16, pool_pages=4_096, max_running=64, context_len=4_096, way_s=0.002,
        scheduler=SchedulerConfig(policy=queue, chunked_prefill_size=512), knows_tenants=named,
    )  # fmt: skip
    numbered = [replace(request, number=number) for number, request in enumerate(requests)]
    cluster = Cluster("estimated_ttft", numbered, Setup(num_replicas=1, build=build, seed=seed))
    records = cluster.run()
    cluster.check()
    return records


def served(requests: Sequence[SimRequest], records: Sequence[Record], seconds: float) -> Counter[str]:
    """Count by tenant the tokens that were computed for requests that ended within ``seconds``."""
    tokens = Counter[str]()
    for record in records:
        request = requests[record.number]
        if record.ended_s <= seconds:
            tokens[request.tenant] += request.input_len - record.cached_tokens + request.output_len
    return tokens


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index of ``shares``: 1 where all are equal, 1 / n where one has everything (Jain et al. 1984)."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def fair(asked: Mapping[str, float], whole: float) -> dict[str, float]:
    """Divide ``whole`` so that nobody has more than asked for, and what is left over goes to the others in equal parts
    (max-min fairness)."""
    parts, left = dict[str, float](), whole
    for at, tenant in enumerate(sorted(asked, key=lambda tenant: asked[tenant])):
        parts[tenant] = min(asked[tenant], left / (len(asked) - at))
        left -= parts[tenant]
    return parts


def fairness(had: Counter[str], asked: Counter[str]) -> float:
    """Return Jain's index of what each tenant had by what a fair division of the same work gives it."""
    parts = fair(asked, had.total())
    return jain([had[tenant] / parts[tenant] for tenant in parts])


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the light tenants' TTFT, the tokens that were served, and how fairly, of each load."""
    seconds, seeds = (60.0, [0]) if options.quick else (300.0, range(options.seed, options.seed + 3))
    table = Table(f"one tenant floods a replica, {NUM_LIGHT} ask now and then: {seconds:g} s")
    for queue, kind, line in itertools.product(options.queue or ["lpm"], LIGHT, ("alone", "no tenants", "tenants")):
        ttfts, tokens, index, cached = list[list[float]](), list[float](), list[float](), list[float]()
        for seed in seeds:
            requests = [each for each in load(kind, seconds, seed=seed) if line != "alone" or each.tenant != HEAVY]
            records = run(requests, named=line == "tenants", queue=queue, seed=seed)
            ttfts.append([each.ttft_s for each in records if requests[each.number].tenant != HEAVY])
            in_time = [requests[each.number] for each in records if each.ended_s <= seconds]
            tokens.append(sum(each.input_len + each.output_len for each in in_time) / seconds)
            index.append(fairness(served(requests, records, seconds), served(requests, records, math.inf)))
            light = [each for each in records if requests[each.number].tenant != HEAVY]
            input_len = sum(requests[each.number].input_len for each in light)
            cached.append(sum(each.cached_tokens for each in light) / input_len)
        name = f"{queue}, {kind}, {line}"
        for q in (50, 95):
            table.add(name, [percentile(each, q) for each in ttfts], "s", figure=f"light TTFT p{q}")
        table.add(name, tokens, "1/s", figure="tokens")
        table.add(name, index, figure="Jain")
        table.add(name, cached, figure="light cached")
    yield from table.rows
