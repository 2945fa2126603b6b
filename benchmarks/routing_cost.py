"""What one routing decision costs, and what the prefix index weighs: the production router alone, one thread.

    python -m benchmarks.routing_cost                 8, 64, 1,000 replicas x 1k, 8k, 32k tokens, and memory
    python -m benchmarks.routing_cost --json OUT      also as JSON
    python -m benchmarks.routing_cost --sglang-router VENV/bin/python      SGLang's router beside it (routing_peer.py)

A request shares three quarters of its prompt with one of 50 prefixes, as chats with long histories do; `choose` hashes
it, looks it up, scores every replica, and takes its pages into the index. With events, as in the app, each replica
tells what it stored and removed (not timed: that is off the request path); without, the index keeps the order of use
itself. Pools are small enough to be full at 8 replicas. Every replica reports each 0.1 s of simulated time, as in the
app (not timed either, but the choice after it takes the new numbers in).
"""

import argparse
import itertools
import json
import statistics
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from benchmarks.routing_peer import Peer, peer_cost
from benchmarks.routing_weight import index_weights
from routing.router import Router
from routing.types import Decision, Ending, IndexEvent, KeysRemoved, KeysStored, ReplicaView, RouteOutcome, RouteQuery

PAGE_SIZE = 16
POOL_PAGES = 8_192
REPORT_S = 0.1
NUM_PREFIXES = 50
VOCABULARY = 49_152
WARM_UP = 400  # decisions
TARGETS_MS = {(8, 8_192): 0.3, (1_000, 8_192): 2.0}  # p50
FINISHED = RouteOutcome(ending=Ending.FINISHED, ttft_s=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """`Router.choose` at one size."""

    policy: str
    events: bool
    num_replicas: int
    prompt_len: int
    p50_ms: float
    p99_ms: float
    runs: int


def prompts(prompt_len: int, rng: np.random.Generator) -> Iterator[npt.NDArray[np.int32]]:
    """Endless prompts [prompt_len], three quarters of each one of `NUM_PREFIXES` prefixes."""
    shared_len = prompt_len * 3 // 4
    prefixes = rng.integers(0, VOCABULARY, (NUM_PREFIXES, shared_len), dtype=np.int32)
    while True:
        own = rng.integers(0, VOCABULARY, prompt_len - shared_len, dtype=np.int32)
        yield np.concatenate([prefixes[rng.integers(NUM_PREFIXES)], own])


class Pool:
    """A replica's cache as far as its events tell: pages in order of use, the oldest out first."""

    def __init__(self) -> None:
        self._pages: OrderedDict[int, None] = OrderedDict()
        self._seq = 0

    def serve(self, decision: Decision) -> list[IndexEvent]:
        """Take in the prompt's pages; what that stored and removed."""
        keys = decision.keys.tolist()
        new = [key for key in keys if key not in self._pages]
        for key in reversed(keys):  # the deepest is the oldest
            self._pages[key] = None
            self._pages.move_to_end(key)
        gone = [self._pages.popitem(last=False)[0] for _ in range(len(self._pages) - POOL_PAGES)]
        self._seq += 2
        return [
            KeysRemoved(self._seq - 1, np.array(gone, dtype=np.uint64)),
            KeysStored(self._seq, np.array(new, dtype=np.uint64)),
        ]


def decision_cost(policy: str, num_replicas: int, prompt_len: int, *, events: bool, runs: int) -> Cost:
    """Warm the index up with a few hundred decisions, then time each of ``runs``."""
    now_s = 0.0
    router = Router(policy, Random(0), lambda: now_s, page_size=PAGE_SIZE)
    router.update(_views(num_replicas, now_s))
    reported_s = now_s
    pools = {view.replica_id: Pool() for view in router.views}
    source = prompts(prompt_len, np.random.default_rng(0))
    times_s = []
    for at in range(WARM_UP + runs):
        query = RouteQuery(rid=str(at), token_ids=next(source))
        now_s += 1.6 * prompt_len / 5_000.0 / num_replicas
        if now_s - reported_s >= REPORT_S:
            router.update(_views(num_replicas, now_s))
            reported_s = now_s
        begun_s = time.perf_counter()
        decision = router.choose(query)
        times_s.append(time.perf_counter() - begun_s)
        if events:
            router.apply(decision.replica_id, pools[decision.replica_id].serve(decision))
        router.done(decision, FINISHED)
    timed = sorted(times_s[WARM_UP:])
    return Cost(
        policy=policy,
        events=events,
        num_replicas=num_replicas,
        prompt_len=prompt_len,
        p50_ms=1e3 * statistics.median(timed),
        p99_ms=1e3 * timed[int(0.99 * (len(timed) - 1))],
        runs=runs,
    )


def _views(num_replicas: int, now_s: float) -> list[ReplicaView]:
    return [
        ReplicaView(
            replica_id=f"replica-{at:04}",
            time_s=now_s,
            pool_pages=POOL_PAGES,
            page_size=PAGE_SIZE,
            prefill_tokens_per_s=5_000.0,
            decode_step_s=0.03,
            max_running_requests=256,
        )
        for at in range(num_replicas)
    ]


def _peers(options: argparse.Namespace) -> list[Peer]:
    print(
        f"{'sglang-router':14} {'workers':>8} {'tokens':>7}  p50 / p99 ms: direct, over one worker, cache-aware; choice"
    )
    peers = []
    for num_replicas, prompt_len in itertools.product(options.replicas, options.tokens):
        source = prompts(prompt_len, np.random.default_rng(0))
        peer = peer_cost(options.sglang_router, num_replicas, prompt_len, source, runs=min(options.runs, 300))
        peers.append(peer)
        ways = "  ".join(
            f"{p50:.3f} / {p99:.3f}" for p50, p99 in (peer.direct_ms, peer.one_worker_ms, peer.cache_aware_ms)
        )
        print(f"{'':14} {num_replicas:8,} {prompt_len:7,}  {ways}  {peer.choice_cpu_us:.0f} us of CPU time")
    return peers


def main(argv: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(
        prog="python -m benchmarks.routing_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parse.add_argument("--policy", default="estimated_ttft")
    parse.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 1_000])
    parse.add_argument("--tokens", type=int, nargs="+", default=[1_024, 8_192, 32_768], help="prompt lengths")
    parse.add_argument("--runs", type=int, default=600, help="decisions timed at each size")
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    parse.add_argument("--sglang-router", type=Path, metavar="PYTHON", help="of an environment that has sglang-router")
    options = parse.parse_args(argv)
    print(f"{'policy':16} {'events':>6} {'replicas':>8} {'tokens':>7} {'p50 ms':>8} {'p99 ms':>8}  target")
    costs = []
    for events, num_replicas, prompt_len in itertools.product((True, False), options.replicas, options.tokens):
        cost = decision_cost(options.policy, num_replicas, prompt_len, events=events, runs=options.runs)
        costs.append(cost)
        target = TARGETS_MS.get((num_replicas, prompt_len))
        note = "" if target is None else f"p50 < {target} ms: {'met' if cost.p50_ms < target else 'MISSED'}"
        print(
            f"{cost.policy:16} {'yes' if events else 'no':>6} {num_replicas:8,} {prompt_len:7,} "
            f"{cost.p50_ms:8.3f} {cost.p99_ms:8.3f}  {note}"
        )
    weights = list(index_weights())
    peers = [] if options.sglang_router is None else _peers(options)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            found = {
                "decisions": [asdict(each) for each in costs],
                "index": [asdict(each) for each in weights],
                "sglang_router": [asdict(each) for each in peers],
            }
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
