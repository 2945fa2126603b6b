"""Tenants of a served fleet: one sends far more at once than there are places, and nine ask now and then.

Owns:      the loads, and what each tenant had of the fleet.
Invariant: the arms of a round ask at the same times for as many tokens; no prompt begins as another does.

    alone       the nine without the heavy one: what their times are held against
    no tenants  all ten with one key
    tenants     each with its own

A light request without a first token counts with the time until its arm ended: it waited at least so long.
"""

import argparse
import asyncio
import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import live_app
from benchmarks.client import Client, ClosedLoop, OpenLoop, Run
from benchmarks.harness import MODEL, Row, Table, in_turn, percentile, rounds_of, say
from benchmarks.sim_tenants import HEAVY, NUM_LIGHT, fairness
from benchmarks.workloads import random_lengths
from deployments.tenancy.keys import digest

ALONE, TOGETHER, NAMED = ARMS = ("alone", "no tenants", "tenants")
LIGHT = tuple(f"light-{number + 1}" for number in range(NUM_LIGHT))
SIZES = {HEAVY: (300, 64), **dict.fromkeys(LIGHT, (128, 32))}  # tokens of a prompt and of its answer
ANYONE = "anyone"  # whose key all have in the arm without tenants
AT_ONCE = 256  # requests of the heavy one: twice the places of two replicas
EVERY_S = 10.0  # between two of a light one, on average
BEGIN_S, LAST_S = 2.0, 5.0  # from the heavy one's first request to the light ones'; before the end none is counted
Runs = Mapping[str, Run]  # of the tenants, in one arm


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Serve two replicas whose queues refuse nothing; each tenant's key is its name."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as keys:
        json.dump([{"id": each, "sha256": digest(each).hex()} for each in (*SIZES, ANYONE)], keys)
        keys.flush()
        args = {
            "replicas": {"count": 2, "cpus": 1},
            "scheduler": {"max_queued_requests": 2000},
            "router": {"keys_file": keys.name, "max_wait_s": 600.0},
        }
        with live_app.serving("serve_config.yaml", args, observatory=False) as url:
            yield url


async def measured(url: str, arm: str, *, seconds: float, seed: int) -> Runs:
    """Run one arm, at most ``seconds``."""

    async def one(at: int, tenant: str) -> Run:
        (input_len, output_len), heavy = SIZES[tenant], tenant == HEAVY
        wait_s = 0.0 if heavy else BEGIN_S + at * EVERY_S / NUM_LIGHT
        prompts = random_lengths(
            num_requests=AT_ONCE + round(20 * seconds) if heavy else round(seconds), input_len=input_len,
            output_len=output_len, vocab_size=32_000, seed=len(ARMS) * seed + ARMS.index(arm) + 1_000 * at,
        )  # fmt: skip
        load = ClosedLoop(concurrency=AT_ONCE) if heavy else OpenLoop(rate=1 / EVERY_S, seed=1_000 * at + seed)
        await asyncio.sleep(wait_s)
        client = Client(url, Path(MODEL).name, api_key=ANYONE if arm == TOGETHER else tenant)
        return await client.run(prompts, load, max_s=seconds - wait_s)

    tenants = LIGHT if arm == ALONE else (*LIGHT, HEAVY)
    return dict(zip(tenants, await asyncio.gather(*map(one, range(len(tenants)), tenants)), strict=True))


def light_s(runs: Runs) -> list[float]:
    """Return the seconds to the first token of each light request."""
    return [
        run.wall_s - sample.start_s if sample.ttft_s is None else sample.ttft_s
        for tenant in LIGHT
        for run in [runs[tenant]]
        for sample in run.samples
        if 0.0 < sample.start_s < run.wall_s - LAST_S
    ]


def tokens(runs: Runs) -> tuple[Counter[str], Counter[str]]:
    """Return by tenant the tokens that were computed, of answers as they came, and those that were asked for."""
    had, asked = Counter[str](), Counter[str]()
    for tenant, run in runs.items():
        had[tenant] = sum(SIZES[tenant][0] + len(each.token_ids) for each in run.samples if each.token_ids)
        asked[tenant] = sum(SIZES[tenant]) * sum(each.start_s > 0.0 for each in run.samples)
    return had, asked


def rows_of(found: Mapping[str, Sequence[Runs]], seconds: float) -> list[Row]:
    """Return a line for each arm: times over all rounds, tokens and Jain's index by round."""
    table = Table(f"one tenant floods 2 replicas, {NUM_LIGHT} ask now and then: {seconds:g} s an arm")
    all_s = {arm: [each for runs in rounds for each in light_s(runs)] for arm, rounds in found.items()}
    per_s = {arm: [tokens(runs)[0].total() / seconds for runs in rounds] for arm, rounds in found.items()}
    for arm, rounds in found.items():
        errors = [error for runs in rounds for run in runs.values() for error in run.errors if "cut off" not in error]
        note = "; ".join([f"{len(all_s[arm])} light requests", *errors[:1]])
        for q in (50, 95):
            value, alone = (percentile(all_s[each], q) for each in (arm, ALONE))
            table.add(arm, [value], "s", figure=f"light TTFT p{q}", note=note)
            table.add(arm, [value / alone], "x", figure=f"p{q} by alone's")
        table.add(arm, per_s[arm], "1/s", figure="tokens")
        table.add(arm, [fairness(*tokens(runs)) for runs in rounds], figure="Jain")
        if arm != ALONE:
            ratios = [mine / without for mine, without in zip(per_s[arm], per_s[TOGETHER], strict=True)]
            table.add(arm, ratios, "x", figure="tokens by no tenants'")
            heavy_s = [each.ttft_s for runs in rounds for each in runs[HEAVY].samples if each.ttft_s is not None]
            table.add(arm, [percentile(heavy_s, 50)], "s", figure="heavy TTFT p50")
    return table.rows


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the times to first tokens, the tokens computed, and how fairly, of each arm on the same replicas."""
    if options.url:
        raise SystemExit("serving tenants: starts a server of its own, with ten keys; leave --url out")
    seconds, found = 15.0 if options.quick else 80.0, {arm: list[Runs]() for arm in ARMS}
    with served() as url:
        asyncio.run(measured(url, TOGETHER, seconds=8.0, seed=options.seed - 1))  # what first requests compile
        for round_, arm in in_turn(ARMS, rounds_of(options, 5)):
            found[arm].append(asyncio.run(measured(url, arm, seconds=seconds, seed=options.seed + round_)))
            say(f"{arm}: light TTFT p95 {percentile(light_s(found[arm][-1]), 95):.2f} s")
    yield from rows_of(found, seconds)
