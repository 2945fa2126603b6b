"""Extensions of another package: each is one entry of one table, and a tiny engine serves with it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from deployments.settings.groups import RoleSettings
from deployments.settings.schema import parse
from replicas.attention.base import AttentionBackend, AttentionSpec
from replicas.attention.registry import BACKENDS, Backend
from replicas.attention.torch_native import TorchNativeAttention
from replicas.cache.node import TreeNode
from replicas.cache.retention import POLICIES
from replicas.cache.store_tier import PREFETCH
from replicas.cache.write_policy import RULES, WriteRule
from replicas.config import CacheConfig, SchedulerConfig
from replicas.engine.engine import Engine
from replicas.errors import InvalidConfig
from replicas.launch import EngineSettings, load_engine
from replicas.scheduler.orders import ORDERS, Key, Order, QueueEntry
from tests.harness import ask, load_always
from tests.numerics import tiny
from tests.numerics.interrupted import save_model

pytestmark = pytest.mark.model

PROMPTS = [np.random.default_rng(seed).integers(0, tiny.VOCAB, length) for seed, length in enumerate((160, 40, 90))]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    """Of a pool of 512 tokens, in pages of 16."""
    return EngineSettings(
        model=save_model(tmp_path_factory.mktemp("model")),
        cache=CacheConfig(page_size=16, max_total_tokens=512),
        scheduler=SchedulerConfig(chunked_prefill_size=64, max_running_requests=1),
        num_threads=1,
        context_len=256,
    )


def run(engine: Engine, prompts: Sequence[np.ndarray]) -> dict[str, list[int]]:
    """Submit all, and return the answers in the order of their ends."""
    for at, prompt in enumerate(prompts):
        engine.submit(ask(f"{at}", prompt.tolist(), max_new_tokens=6))
    ids: dict[str, list[int]] = {f"{at}": [] for at in range(len(prompts))}
    ended: list[str] = []
    while engine.has_work:
        for delta in engine.step():
            ids[delta.rid] += delta.token_ids
            ended += [delta.rid] if delta.finish is not None else []
    engine.kv.check([])
    return {rid: ids[rid] for rid in ended}


@pytest.fixture(scope="module")
def wanted(settings: EngineSettings) -> Mapping[str, list[int]]:
    engine = load_engine(settings)
    try:
        return run(engine, PROMPTS)
    finally:
        engine.close()


def serve(settings: EngineSettings, check: Callable[[Engine], None]) -> None:
    engine = load_engine(settings)
    try:
        check(engine)
    finally:
        engine.close()


def test_a_backend(
    settings: EngineSettings, wanted: Mapping[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = Counter[int]()

    class Counting(TorchNativeAttention):
        """The plain backend, which counts its calls."""

        def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            layers[layer] += 1
            return super().forward(layer, q, k, v, sinks)

    def make(spec: AttentionSpec) -> AttentionBackend:
        return Counting(spec.pool, spec.kinds)

    monkeypatch.setitem(BACKENDS, "toy", Backend(devices=("cpu",), make=make))

    def check(engine: Engine) -> None:
        assert engine.started.attention.name == "toy"
        assert run(engine, PROMPTS) == wanted
        assert len(set(layers.values())) == 1, "every layer is called in every step"

    serve(replace(settings, attention="toy"), check)


def test_a_backend_that_lacks_something_is_refused_in_its_words(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(spec: AttentionSpec) -> AttentionBackend:
        raise AssertionError("it is not made")

    toy = Backend(devices=("cpu",), make=make, why_not=lambda spec: f"wants heads of 7, not {spec.head_dim}")
    monkeypatch.setitem(BACKENDS, "toy", toy)
    with pytest.raises(InvalidConfig, match=r"attention: toy wants heads of 7, not \d+; set attention: auto"):
        load_engine(replace(settings, attention="toy"))


def shortest(waiting: Sequence[QueueEntry], running: Counter[str], random: Random) -> list[Key]:
    return [(each.uncached_len,) for each in waiting]


def test_an_order_of_the_queue(
    settings: EngineSettings, wanted: Mapping[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ORDERS, "shortest", Order(keys=shortest, reads_prefix=True))
    assert settings.scheduler is not None

    def check(engine: Engine) -> None:
        found = run(engine, PROMPTS)
        assert found == wanted
        assert list(found) == ["1", "2", "0"]  # 40, 90 and 160 tokens

    serve(replace(settings, scheduler=replace(settings.scheduler, policy="shortest")), check)


def test_policies_of_the_host_tier(
    settings: EngineSettings, wanted: Mapping[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five prompts of 160 tokens go through a pool of 512 and a host tier of about 320."""
    ranked = Counter[int]()

    def longest(node: TreeNode) -> tuple[int, ...]:
        ranked[node.num_pages] += 1
        return (-node.num_pages, node.last_access)

    monkeypatch.setitem(POLICIES, "longest", longest)
    monkeypatch.setitem(RULES, "eager", WriteRule(insert_hits=0, at_eviction=True))
    monkeypatch.setitem(PREFETCH, "patient", lambda wait: wait.asked_s + 60.0)
    assert settings.cache is not None
    cache = replace(
        settings.cache, host_memory_bytes=260_000, host_eviction="longest", write_policy="eager", prefetch="patient"
    )
    others = [np.random.default_rng(seed).integers(0, tiny.VOCAB, 160) for seed in range(10, 15)]

    def check(engine: Engine) -> None:
        load_always(engine.kv)
        first = run(engine, others)
        assert run(engine, others) == first
        assert run(engine, PROMPTS) == wanted
        tiers = engine.stats().tiers
        assert tiers is not None
        assert tiers.host_evicted_tokens > 0
        assert ranked

    serve(replace(settings, cache=cache), check)


def test_the_settings_take_the_names_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {
        "model": {"path": "x"}, "attention": "toy", "scheduler": {"policy": "toy"},
        "cache": {"eviction": "toy", "host_eviction": "toy", "write_policy": "toy", "prefetch": "toy"},
    }  # fmt: skip
    with pytest.raises(InvalidConfig) as refused:
        parse(asked)
    assert [problem.partition(":")[0] for problem in refused.value.problems] == [
        "cache.eviction", "cache.host_eviction", "cache.write_policy", "cache.prefetch", "scheduler.policy",
        "attention",
    ]  # fmt: skip
    tables: list[dict[str, Any]] = [BACKENDS, ORDERS, POLICIES, RULES, PREFETCH]
    for table in tables:
        monkeypatch.setitem(table, "toy", next(iter(table.values())))
    assert parse(asked).cache.host_eviction == "toy"
    assert RoleSettings.model_validate({"cache": {"eviction": "toy"}}).cache == {"eviction": "toy"}
