"""What the observatory costs: a router's answer, a poll, a viewer, in milliseconds of one core per second.

    python -m benchmarks.observatory_cost [--replicas 8] [--requests-per-s 20] [--viewers 16] [--polls 300]

The real state and the real streams over made-up answers of one router, all numbers of which change each second. Ray's
calls and Serve's proxy are not in it. Medians over the polls.
"""

import argparse
import asyncio
import dataclasses
import pickle
import statistics
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

from deployments.channel.frames import ReplicaReport
from deployments.dispatch.leases import ReplicaInfo
from deployments.fleet.seen import SeenReplica
from deployments.watch.observatory.router_view import RouterView
from deployments.watch.observatory.serve_details import Listed, ServeDetails
from deployments.watch.observatory.state import State
from deployments.watch.observatory.viewers import Viewers, event
from replicas.types import EngineStats, PoolStats
from routing.types import Role

PAGES = 4096


def zeros(cls: type, **given: Any) -> Any:
    """A value of dataclass ``cls``, 0 or "" or the default where nothing is given."""
    plain: dict[Any, Any] = {int: 0, float: 0.0, str: ""}
    required = [field for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
    return cls(**{field.name: plain.get(field.type) for field in required if field.name not in given}, **given)


def seen(name: str, second: int, rng: Random) -> SeenReplica:
    """A busy replica."""
    free = rng.randrange(PAGES)
    pool = PoolStats(
        page_size=16, num_pages=PAGES, free_pages=free, evictable_pages=PAGES - free, protected_pages=0,
        reserved_pages=0,
    )  # fmt: skip
    counts = {field: second * rng.randrange(900, 1000) for field in ("prefill_tokens", "cached_tokens")}
    stats = zeros(
        EngineStats, pool=pool, num_running=rng.randrange(64), num_waiting=rng.randrange(9),
        max_running_requests=64, waiting_uncached_tokens=rng.randrange(9999), decode_tokens=second * 1234,
        prefill_tokens_per_s=rng.uniform(1000, 2000), decode_step_s=rng.uniform(0.01, 0.02), **counts,
    )  # fmt: skip
    return SeenReplica(
        replica_id=name,
        role="unified",
        state="accepting",
        info=zeros(ReplicaInfo, replica_id=name, node_id="ab" * 28, role=Role.UNIFIED, page_size=16),
        report=ReplicaReport(stats=stats, error=None, num_open=0),
        report_age_s=rng.uniform(0, 0.1),
    )


def row(number: int, now_s: float, replica: str, *, ended: bool) -> dict[str, Any]:
    stages = {"route_s": 0.001, "queue_s": 0.02, "prefill_s": 0.3, "transfer_s": 0.0, "decode_s": 1.2}
    return {
        "rid": f"chat-{number:012d}", "router": "r0", "time": now_s, "endpoint": "chat",
        "outcome": "finished" if ended else "running", "replica": replica, "prefill": None,
        "policy": "estimated_ttft", "reason": "soonest_first_token", "tries": 1, "prompt_tokens": 1800,
        "output_tokens": 128 if ended else 1, "cached_tokens": 1600, "predicted_tokens": 1600, "best_tokens": 1712,
        "ttft_s": 0.321, "total_s": 1.521 if ended else None, "stages": stages if ended else None, "hand_offs": [],
        "key": f"{number:016x}.0-chat-{number:012d}",
    }  # fmt: skip


def answer(second: int, names: list[str], per_s: int, rng: Random) -> RouterView:
    """Each request is told twice: with its first token, and two seconds later with its end."""
    begun = [row(second * per_s + i, float(second), names[i % len(names)], ended=False) for i in range(per_s)]
    before = second - 2
    ended = [row(before * per_s + i, float(before), names[i % len(names)], ended=True) for i in range(per_s)]
    return RouterView(
        router_id="r0", node_id="ab" * 28, target=None, model="model", mode="unified", num_open=2 * per_s,
        replicas=tuple(seen(name, second, rng) for name in names), requests=(*ended, *begun), time_s=float(second),
        seq=second,
        autoscaling={},
    )  # fmt: skip


async def take_all(stream: AsyncIterator[bytes], sizes: list[int]) -> None:
    async for data in stream:
        sizes += [len(data)]


async def measure(options: argparse.Namespace) -> None:
    rng, state = Random(0), State()
    viewers = Viewers(lambda: state.snapshot, most=options.viewers)
    names = [f"replica-{i}" for i in range(options.replicas)]
    listed = tuple(Listed(replica_id=name, role="unified", node_id="ab" * 28, state="RUNNING") for name in names)
    details = ServeDetails(replicas=listed, desired={"unified": len(names)})
    sizes: list[int] = []
    watching = [asyncio.create_task(take_all(viewers.watch(), sizes)) for _ in range(options.viewers)]
    times: dict[str, list[float]] = {name: [] for name in ("answer read", "state and delta", "to all viewers")}
    pickled = 0
    for second in range(2, options.polls + 2):
        sent = pickle.dumps(answer(second, names, options.requests_per_s, rng))
        pickled = len(sent)
        moments = [time.process_time()]
        view = pickle.loads(sent)
        moments.append(time.process_time())
        delta = state.advance([view], details, float(second))
        moments.append(time.process_time())
        viewers.publish(delta)
        await asyncio.sleep(0.001)  # the streams run
        moments.append(time.process_time())
        for kept, begin, end in zip(times.values(), moments, moments[1:], strict=False):
            kept.append(1e3 * (end - begin))
    for task in watching:
        task.cancel()
    took = {name: statistics.median(values) for name, values in times.items()}
    whole = len(event("state", state.snapshot))
    print(f"{options.replicas} replicas, {options.requests_per_s} requests/s, {options.viewers} viewers")
    for name, milliseconds in took.items():
        print(f"  {name:16s} {milliseconds:7.3f} ms a second")
    print(f"  a router's answer: {pickled / 1e3:.1f} kB; a delta: {statistics.median(sizes) / 1e3:.1f} kB; "
          f"the whole state: {whole / 1e3:.1f} kB")  # fmt: skip
    print(f"  a viewer: {took['to all viewers'] / options.viewers:.3f} ms a second, without Serve's proxy")


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--replicas", type=int, default=8)
    parse.add_argument("--requests-per-s", type=int, default=20)
    parse.add_argument("--viewers", type=int, default=16)
    parse.add_argument("--polls", type=int, default=300)
    asyncio.run(measure(parse.parse_args()))


if __name__ == "__main__":
    main()
