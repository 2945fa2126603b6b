"""What a router expects to be cached is what tiny real engines then reuse, of models whose pages have parts.

Two replicas, quiet before each request, with pools too small for all texts: pages, windows and states go.
"""

import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from deployments.channel.frames import LENGTH, CacheChanges, decode, encode
from deployments.fleet.fleet import view_of
from deployments.replica.served_engine import ServedEngine
from replicas.engine.engine import Engine
from replicas.engine.loop import EngineLoop
from replicas.types import CacheBreakpoint
from routing.router import Router
from routing.types import Ending, RouteOutcome, RouteQuery
from tests.harness import load_always, small_engine
from tests.numerics.test_states import asked, finished, ids_of, saved_model, snapshot_len
from tests.numerics.test_transformers_models import save

PAGE_SIZE = 4
WINDOWS: dict[str, dict[str, Any]] = {"gemma3_text": {"sliding_window": 17}, "llama4_text": {}}  # of 4 pages, and of 2
STATES = ("qwen3_next", "lfm2")
RATE = 1000.0  # of both, in tokens/s: a slow first step would send every prompt to the other one


def engine_of(folder: Path, host_bytes: int) -> Engine:
    tokens = (150 if host_bytes else 400) + (2 if host_bytes else 12) * snapshot_len(folder)
    engine = small_engine(
        folder, page=PAGE_SIZE, tokens=tokens, chunk=16, running=4, context=128, record_events=True,
        implementation="transformers", cache={"host_memory_bytes": host_bytes, "write_policy": "write_back"},
    )  # fmt: skip
    load_always(engine.kv)
    return engine


class Replicas:
    """Two engines and their router, in step: what a replica tells arrives before the next request."""

    def __init__(self, folder: Path, host_bytes: int) -> None:
        self.router = Router("estimated_ttft", Random(0), time.monotonic, page_size=PAGE_SIZE)
        self.engines = {name: engine_of(folder, host_bytes) for name in ("a", "b")}
        self.served = {
            name: ServedEngine(EngineLoop(engine), replica_id=name, node_id="here")
            for name, engine in self.engines.items()
        }
        self.ended_by = Counter[str]()  # hits
        self.tell()

    def tell(self) -> None:
        for name, engine in self.engines.items():
            served = self.served[name]
            info = served._info(None)
            assert info.part_bytes.keys() == {"token", info.part}  # as GET /get_server_info shows
            view = view_of(info, served._report(engine.stats()), as_of_s=time.monotonic())
            self.router.report(replace(view, prefill_tokens_per_s=RATE))
            message = decode(encode(CacheChanges.of(engine.drain_cache_events()))[LENGTH.size :])
            assert isinstance(message, CacheChanges)
            self.router.apply(name, message.events())

    def ask(self, prompt: list[int], most: int, marks: tuple[CacheBreakpoint, ...]) -> tuple[int, int, list[int]]:
        """Return what the router expected to be cached, what was, and the answer."""
        decision = self.router.choose(RouteQuery(rid="r", token_ids=prompt, max_new_tokens=most))
        engine = self.engines[decision.replica_id]
        chosen = next(each for each in decision.candidates if each.replica_id == decision.replica_id)
        store = engine.kv.store
        assert store.radix is not None
        pages = store.radix.peek_len(np.array(prompt[:-1], np.int32), "")
        assert chosen.terms.gone_tokens == pages - decision.overlap_tokens
        self.ended_by[chosen.ended_by] += 1
        engine.submit(asked("r", prompt, most, cache_breakpoints=marks))
        deltas = finished(engine)
        cached = deltas[-1].usage.cached_tokens
        self.router.done(decision, RouteOutcome(ending=Ending.OK, cached_tokens=cached, ttft_s=0.1))
        for _ in range(3):  # what was expected and did not come is dropped with the second batch of events
            self.tell()
        return decision.overlap_tokens, cached, ids_of(deltas, "r")

    def close(self) -> None:
        self.router.check()
        for engine in self.engines.values():
            engine.scheduler.check()
            engine.close()


def assert_counted(engine: Engine) -> None:
    """Statistics and the tree's view count what pages have by group; nothing runs."""
    full, apart = engine.stats().groups
    size, tree = engine.kv.store.size, engine.cache_tree(max_nodes=10_000, max_depth=64)
    assert (full.group, apart.group) == ("full", tree.part)
    assert full.num_parts == apart.num_parts + apart.num_holes == tree.tokens // PAGE_SIZE
    assert full.capacity_bytes == size.num_tokens * size.cell_bytes
    nodes, seen = list(tree.root.children), 0
    for node in nodes:
        nodes += node.children
        seen += node.parts or 0
    assert seen == apart.num_parts


@pytest.mark.parametrize(
    ("model_type", "host_bytes"),
    [*((each, 0) for each in (*WINDOWS, *STATES)), pytest.param("qwen3_next", 1 << 20, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("num_requests", [60, pytest.param(150, marks=pytest.mark.slow)])
def test_what_a_router_expects_is_what_is_reused(
    model_type: str, host_bytes: int, num_requests: int, tmp_path: Path
) -> None:
    """Conversations behind common beginnings; some prompts are answered anew, some have a mark. With a host tier that
    is too small too, and a device for two snapshots."""
    if model_type in WINDOWS:
        save(model_type, tmp_path, **WINDOWS[model_type])
    else:
        saved_model(model_type, tmp_path)
    draw, replicas = random.Random(1), Replicas(tmp_path, host_bytes)
    starts = [[draw.randrange(3, 190) for _ in range(length)] for length in (9, 21, 34)]
    texts, apart, reused = [list(draw.choice(starts)) for _ in range(10)], [], 0
    try:
        for number in range(num_requests):
            at = draw.randrange(len(texts))
            prompt = [*texts[at], *(draw.randrange(3, 190) for _ in range(draw.randint(1, 15)))]
            marks = (CacheBreakpoint(len(texts[at]), 60.0),) if draw.random() < 0.1 else ()
            expected, cached, answer = replicas.ask(prompt, draw.randint(1, 8), marks)
            if expected != cached:
                apart.append((number, expected, cached))
            reused += cached
            texts[at] = [*prompt, *answer] if draw.random() < 0.7 else texts[at]
            if len(texts[at]) > 90:
                texts[at] = list(draw.choice(starts))
        for engine in replicas.engines.values():
            if (tiers := engine.kv.store.tiers) is None:
                assert_counted(engine)
            else:
                assert min(tiers.counters.loaded_pages, tiers.counters.evicted_pages) > 0
    finally:
        replicas.close()
    assert apart == []
    assert reused > 0
    assert replicas.ended_by["window" if model_type in WINDOWS else "state"] > 0
