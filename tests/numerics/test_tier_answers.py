"""What comes back from host memory or a file store answers as what was never away: tiny engines, greedy ids.

Device pages hold 512 tokens, so that four prompts of 160 leave it by themselves.
"""

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from replicas.config import KvDType
from replicas.engine.engine import Engine
from replicas.types import GenerateRequest, SamplingParams, TierStats
from tests import s3_server
from tests.harness import load_always, small_engine, to_host
from tests.numerics import tiny
from tests.numerics.interrupted import save_model

pytestmark = pytest.mark.model

NUM_NEW = 6
PROMPTS = [np.random.default_rng(seed).integers(0, tiny.VOCAB, 160).astype(np.int32) for seed in range(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@contextmanager
def engine_of(
    model: str, *, page: int = 16, host_bytes: int = 8 << 20, store: str | None = None, kv_dtype: KvDType | None = None
) -> Iterator[Engine]:
    cache = {"kv_dtype": kv_dtype, "host_memory_bytes": host_bytes, "write_policy": "write_back", "store": store}
    engine = small_engine(model, page=page, tokens=512, running=4, cache={**cache, "prefetch": "wait_complete"})
    try:
        load_always(engine.kv)
        yield engine
    finally:
        engine.close()


def run(engine: Engine, prompts: list[np.ndarray]) -> list[list[int]]:
    """One after the other; the engine's books are right afterwards."""
    answers = []
    for at, prompt in enumerate(prompts):
        sampling = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
        engine.submit(GenerateRequest(rid=f"{at}", token_ids=prompt, sampling=sampling))
        ids: list[int] = []
        deadline_s = time.monotonic() + 60.0
        while engine.has_work:
            ids += [token for delta in engine.step() for token in delta.token_ids]
            assert time.monotonic() < deadline_s, engine.scheduler.last.refusals
        answers.append(ids)
    engine.scheduler.check()
    pool = engine.stats().pool
    assert pool.free_pages + pool.evictable_pages == pool.num_pages
    return answers


def tiers_of(engine: Engine) -> TierStats:
    stats = engine.stats().tiers
    assert stats is not None
    return stats


def write_all(engine: Engine, num_tokens: int) -> None:
    """Idle until the store has ``num_tokens``."""
    deadline_s = time.monotonic() + 60.0
    while tiers_of(engine).store_written_tokens < num_tokens:
        engine.poll()
        engine.tidy()
        assert time.monotonic() < deadline_s, tiers_of(engine)


@pytest.fixture(scope="module")
def wanted(model: str) -> list[list[int]]:
    with engine_of(model, host_bytes=0) as engine:
        return run(engine, PROMPTS)


@pytest.mark.parametrize("page", [1, 16])
def test_prompts_that_left_the_pool_come_back_with_the_same_answers(
    model: str, wanted: list[list[int]], page: int
) -> None:
    with engine_of(model, page=page) as engine:
        assert run(engine, PROMPTS) == wanted
        assert run(engine, PROMPTS) == wanted
        tiers = tiers_of(engine)
        assert tiers.host_hit_tokens > 2 * 160
        assert tiers.host_wrong_pages == 0


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "bfloat16"])
def test_narrow_pages_come_back_with_their_scales(model: str, kv_dtype: KvDType) -> None:
    """Against the same engine's pages on the device: a miss computes with numbers that are not rounded yet."""
    with engine_of(model, kv_dtype=kv_dtype) as engine:
        for prompt in PROMPTS[:2]:
            run(engine, [prompt])
            on_device = run(engine, [prompt])
            to_host(engine.kv)
            assert run(engine, [prompt]) == on_device
        assert tiers_of(engine).host_hit_tokens == 2 * 144


def test_flipped_bits_on_the_host_are_found_and_computed_anew(model: str, wanted: list[list[int]]) -> None:
    """In every third host page. The first wrong page of a prompt ends its load."""
    with engine_of(model) as engine:
        run(engine, PROMPTS)
        to_host(engine.kv)
        tiers = engine.kv.store.tiers
        assert tiers is not None
        view = tiers.copier.host.view  # type: ignore[attr-defined]
        draw = np.random.default_rng(0)
        for page in range(1, len(view), 3):
            view[page, draw.integers(view.shape[1])] ^= 1 << draw.integers(8)
        assert run(engine, PROMPTS) == wanted
        stats = tiers_of(engine)
        assert stats.host_wrong_pages >= 3
        assert stats.host_hit_tokens > 0
        tiers.check()


def test_another_process_answers_from_the_files_and_damaged_ones_are_computed(
    model: str, wanted: list[list[int]], tmp_path: Path
) -> None:
    """Nine of the ten pages of each prompt are read, 720 tokens in all; then every fourth file has a flipped bit, or
    half its length."""
    with engine_of(model, store=f"file://{tmp_path}") as engine:
        assert run(engine, PROMPTS) == wanted
        write_all(engine, 5 * 160)
    with engine_of(model, store=f"file://{tmp_path}") as engine:
        assert run(engine, PROMPTS) == wanted
        assert tiers_of(engine).store_hit_tokens == 5 * 144
        assert tiers_of(engine).store_wrong_pages == 0
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4096)
    assert len(files) >= 50
    for at, path in enumerate(files[::4]):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data if at % 2 else data[: len(data) // 2])
    with engine_of(model, store=f"file://{tmp_path}") as engine:
        assert run(engine, PROMPTS) == wanted
        stats = tiers_of(engine)
        assert stats.store_wrong_pages > 0
        assert 0 < stats.store_hit_tokens < 5 * 144


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_replica_answers_from_what_another_one_stores_while_both_serve(
    model: str, wanted: list[list[int]], tmp_path: Path, kind: str
) -> None:
    """As those of two nodes do, that share a folder or a bucket."""
    with contextlib.ExitStack() as opened:
        url = f"file://{tmp_path}"
        if kind == "bucket":
            url = f"s3://{s3_server.BUCKET}/pages?endpoint={opened.enter_context(s3_server.serving())}"
        one, other = (opened.enter_context(engine_of(model, store=url)) for _ in range(2))
        assert run(one, PROMPTS[:2]) == wanted[:2]
        write_all(one, 2 * 160)
        assert run(other, PROMPTS[:2]) == wanted[:2]
        stats = tiers_of(other)
        assert (stats.store_hit_tokens, stats.store_wrong_pages, stats.store_errors) == (2 * 144, 0, 0)


def test_files_of_another_number_format_are_not_found(model: str, tmp_path: Path) -> None:
    with engine_of(model, store=f"file://{tmp_path}") as engine:
        run(engine, PROMPTS[:1])
        write_all(engine, 160)
    with engine_of(model, store=f"file://{tmp_path}", kv_dtype="bfloat16") as engine:
        run(engine, PROMPTS[:1])
        assert tiers_of(engine).store_hit_tokens == 0
        assert tiers_of(engine).store_wrong_pages == 0
