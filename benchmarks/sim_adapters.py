"""Many adapters (LoRA) on few replicas: how often one is loaded where the router looks at where they
are, and where it does not.

Owns:      the load.
Invariant: both routers see the same requests at the same times; only the seconds to load an adapter are missing in one
           router's estimate. No prompt has a prefix of another, so that adapters alone draw requests to a replica.

A request draws its adapter: a hot one nine times of ten, each as likely, else one of all others. Replicas hold some of
the adapters: fewer than are hot, or a few more. Loads are counted behind the first third of the time, in which each is
loaded for the first time.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import numpy as np

from benchmarks.harness import Row, Table, percentile
from benchmarks.sim_cluster import Cluster, Record, Setup
from benchmarks.sim_load import SimRequest
from benchmarks.sim_replica import Speed

NUM_ADAPTERS, NUM_HOT, HOT_SHARE = 200, 20, 0.9
HELD = (8, 16, 24)  # by each of the replicas
NUM_REPLICAS, RATE = 4, 8.0
# about SmolLM2 on two cores (docs/performance.md), and 20 MB of an adapter read and checked
SPEED = Speed(prefill_tokens_per_s=2_500.0, decode_base_s=0.02, decode_per_request_s=0.001, adapter_load_s=0.1)
SETUP = Setup(num_replicas=NUM_REPLICAS, pool_tokens=65_536, page_size=16, speed=SPEED)


def load(num: int, *, seed: int) -> list[SimRequest]:
    """Make ``num`` requests that come at random, RATE a second."""
    rng, arrival_s, requests = Random(f"{seed}/adapters"), 0.0, []
    for number in range(num):
        arrival_s += rng.expovariate(RATE)
        at = rng.randrange(NUM_HOT) if rng.random() < HOT_SHARE else rng.randrange(NUM_HOT, NUM_ADAPTERS)
        requests.append(
            SimRequest(
                number=number, arrival_s=arrival_s, after=None, input_len=rng.randint(64, 512),
                output_len=rng.randint(16, 128), prompt=np.array([number], dtype=np.int32), repeat=512,
                answer=np.array([1_000_000 + number], dtype=np.int32), adapter=f"adapter {at}",
            )
        )  # fmt: skip
    return requests


def run(requests: Sequence[SimRequest], *, held: int, knows: bool, seed: int) -> tuple[list[Record], float]:
    """Run the requests. Returns: their records, and how many adapters were loaded for 100 of them."""
    setup = replace(SETUP, speed=replace(SPEED, adapters=held), knows_adapters=knows, seed=seed)
    cluster = Cluster("estimated_ttft", requests, setup)
    records = cluster.run()
    cluster.check()
    first = len(requests) // 3
    counted = [at_s for each in cluster.replicas for at_s in each.loaded_s if at_s > requests[first].arrival_s]
    return records, 100 * len(counted) / (len(requests) - first)


def fewest_loads(held: int) -> float:
    """Return the loads for 100 requests where each hot adapter is held by one replica and all other places have cold
    ones: who does not know the future has no fewer, since each cold one is as likely to be asked for as any other."""
    num_cold = NUM_ADAPTERS - NUM_HOT
    return 100 * (1 - HOT_SHARE) * (1 - (NUM_REPLICAS * held - NUM_HOT) / num_cold)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the loads and TTFT, with the router that looks at adapters and with the one that does not."""
    num, seeds = (600, [0]) if options.quick else (options.requests or 3_000, range(options.seed, options.seed + 3))
    table = Table(f"{NUM_ADAPTERS} adapters, {NUM_HOT} of them hot, over {NUM_REPLICAS} replicas")
    for held in HELD:
        for knows in (False, True):
            runs = [run(load(num, seed=seed), held=held, knows=knows, seed=seed) for seed in seeds]
            name = f"{held} held by each, {'looks at' if knows else 'ignores'} adapters"
            table.add(name, [loads for _, loads in runs], figure="loads per 100 requests")
            for q in (50, 95):
                ttfts = [percentile([record.ttft_s for record in records], q) for records, _ in runs]
                table.add(name, ttfts, "s", figure=f"TTFT p{q}")
        least = f"{held} held by each, the least that any router can have"
        table.add(least, [fewest_loads(held)], figure="loads per 100 requests")
    yield from table.rows
