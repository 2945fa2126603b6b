import logging
from dataclasses import replace

import pytest
import torch

from replicas.config import LONGEST_DRAFT, AttentionKind, CacheConfig, EngineConfig, Hardware, ParallelConfig
from replicas.errors import InvalidConfig
from replicas.layers.tp_group import TpGroup
from replicas.memory import sizing
from replicas.resolve import resolve
from replicas.runner.model_runner import ModelRunner
from replicas.types import PoolStats, PressureLevel
from tests.harness import model_config

GIB = 2**30


def test_kv_gets_what_weights_and_reserve_leave() -> None:
    """SPEC A05, A09: of 10 GiB weights take 4, a tenth is the reserve: 6 - 1 = 5."""
    assert sizing.kv_bytes(10 * GIB, 4 * GIB, 0.9) == pytest.approx(5 * GIB, abs=8)


def test_engines_on_one_gpu_each_have_their_share_of_all_of_it_in_whatever_order_they_start() -> None:
    """Two of 0.4: the second sees 80, 60 or 48 GiB free, as the first has loaded nothing, its weights, or its pool."""
    for free in (80, 60, 48):
        memory = sizing.rank_memory(80 * GIB, free * GIB, None, 0.4)
        assert sizing.kv_bytes(memory, 12 * GIB, 0.4) == pytest.approx(20 * GIB, abs=8)


def test_a_share_that_others_have_taken_already_is_one_of_what_is_free(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert sizing.rank_memory(80 * GIB, 70 * GIB, None, 0.9) == 70 * GIB
    assert "0.9 of the GPU's 81,920 MiB is more than the 71,680 MiB that are free" in caplog.text
    assert "their fractions must sum to less than 1" in caplog.text


def test_a_budget_on_a_gpu_is_honoured_and_refused_where_the_gpu_has_not_as_much() -> None:
    assert sizing.rank_memory(80 * GIB, 48 * GIB, 32 * GIB, 0.9) == 32 * GIB
    with pytest.raises(InvalidConfig, match="each rank 32,768 MiB, but of the GPU's 81,920 MiB only 20,480 MiB are"):
        sizing.rank_memory(80 * GIB, 20 * GIB, 32 * GIB, 0.9)


class LeastOfTwo:
    """A group of two ranks, whose other rank has half of what this one asks about."""

    rank, size = 0, 2

    def min_int(self, value: int) -> int:
        return value // 2


def test_a_rank_sizes_its_pool_by_the_rank_with_the_least_memory() -> None:
    """SPEC A04: pools are equal on all ranks."""
    model = model_config(num_kv_heads=2, num_heads=2)
    cache = CacheConfig(page_size=4, device_memory_bytes=1 << 24)
    hardware = Hardware(device="cpu", num_cpus=2, available_memory_bytes=1 << 30)
    runner = object.__new__(ModelRunner)
    runner._config = resolve(model, hardware, cache=cache, parallel=ParallelConfig(tp=2))
    runner.device = torch.device("cpu")
    pools = []
    for tp in (TpGroup(device="cpu"), LeastOfTwo()):
        runner.tp = tp  # type: ignore[assignment]
        runner.tp.size = 2
        pools.append(runner._size_pool(1 << 23, 1 << 20).bytes)
    assert pools[1] == pytest.approx(pools[0] / 2, rel=0.01)


@pytest.mark.parametrize(
    ("used", "level"),
    [(70, "LOW"), (71, "MEDIUM"), (85, "MEDIUM"), (86, "HIGH"), (95, "HIGH"), (96, "CRITICAL"), (100, "CRITICAL")],
)
def test_pressure_is_by_the_share_that_no_new_request_can_have(used: int, level: str) -> None:
    """SPEC D15: more than 0.70, 0.85 and 0.95. Evictable pages are not used."""
    free = (100 - used) // 2
    pool = PoolStats(
        page_size=16,
        num_pages=100,
        free_pages=free,
        evictable_pages=100 - used - free,
        protected_pages=10,
        reserved_pages=used - 15,
        quarantined_pages=5,
    )
    assert pool.pressure is PressureLevel[level]


def test_no_room_for_kv_names_the_setting_and_the_value_that_would_do() -> None:
    with pytest.raises(InvalidConfig, match=r"weights took 8,192 MiB.*increase mem_fraction_static above 0.80"):
        sizing.kv_bytes(10 * GIB, 8 * GIB, 0.75)
    with pytest.raises(InvalidConfig, match=r"reserves 2,560 MiB: give the replica more memory"):  # no share would do
        sizing.kv_bytes(10 * GIB, 10 * GIB, 0.75)


def test_tokens_are_bytes_over_cell_floored_to_pages() -> None:
    """SPEC A06: 1,050 bytes at 10 a token are 105 tokens, 6 whole pages of 16."""
    assert sizing.pool_tokens(1050, 10, 16, None) == 96
    size = sizing.pool_size(1050, 10, 16, None)
    assert (size.num_pages, size.num_tokens, size.bytes) == (6, 96, 960)


@pytest.mark.parametrize(
    ("context_len", "num_windowed", "changes", "more"),
    [
        (8_192, 5, {}, 2.0),  # five of six layers keep 0.4 of the tokens: 1 / (1/6 + 5/6 * 0.4)
        (512, 5, {}, 1.71),  # four windows of 64 in a text are half of it
        (256, 5, {}, 1.0),  # all of it
        (8_192, 0, {}, 1.0),
        (8_192, 6, {}, 1.0),  # a request leaves the pages behind that no layer sees
        (8_192, 5, {"hands_off": True}, 2.0),
        (8_192, 5, {"hands_off": True, "whole_pages": True}, 1.0),
    ],
)
def test_window_layers_with_a_pool_of_their_own_leave_room_for_more_tokens_in_the_same_bytes(
    context_len: int, num_windowed: int, changes: dict[str, bool], more: float
) -> None:
    kinds = (AttentionKind(window=64),) * num_windowed + (AttentionKind(),) * (6 - num_windowed)
    model = model_config(num_layers=6, context_len=context_len, attention_kinds=kinds)
    hardware = Hardware(device="cpu", num_cpus=2, available_memory_bytes=GIB)
    config = replace(resolve(model, hardware, cache=CacheConfig(page_size=16)), **changes)
    cell = model.kv_cell_bytes(tp=1, kv_dtype=config.kv_dtype)
    num_bytes = 1_000 * 16 * cell
    size = sizing.with_windows(config, sizing.pool_size(num_bytes, cell, 16, None), num_bytes)
    assert size.num_tokens / 16_000 == pytest.approx(more, abs=0.02)
    assert num_bytes - 16 * cell < size.bytes <= num_bytes
    assert (size.windows is not None) == (more > 1)
    if size.windows is not None:  # behind 63 tokens one sees four pages; as much as one request and a step need
        assert (size.windows.seen_pages, size.windows.reach) == (4, 64)
        assert size.windows.request_pages == -(-(64 + sizing.SLACK + LONGEST_DRAFT) // 16) + 1
        assert size.windows.num_pages >= size.windows.request_pages + config.chunked_prefill_size // 16


def test_window_layers_of_replicas_that_hand_over_have_a_pool_of_their_own_in_any_memory() -> None:
    """A request's windows and a step of 512 tokens take 39 pages of window layers: of 150 pages as they are whole that
    pays, of 40 it does not, and in 30 they do not fit."""
    kinds = (AttentionKind(window=64),) * 5 + (AttentionKind(),)
    model = model_config(num_layers=6, context_len=8_192, attention_kinds=kinds)
    hardware = Hardware(device="cpu", num_cpus=2, available_memory_bytes=GIB)
    alone = resolve(model, hardware, cache=CacheConfig(page_size=16))
    apart = replace(alone, hands_off=True)
    cell = model.kv_cell_bytes(tp=1, kv_dtype=alone.kv_dtype)

    def sized(config: EngineConfig, num_pages: int) -> sizing.PoolSize:
        num_bytes = num_pages * 16 * cell
        return sizing.with_windows(config, sizing.pool_size(num_bytes, cell, 16, None), num_bytes)

    for num_pages, is_apart in ((150, True), (40, False)):
        assert (sized(alone, num_pages).windows is not None) == is_apart
        assert sized(apart, num_pages).windows is not None
    assert (apart.carried.window_pages, apart.carried.window_layers, apart.carried.num_layers) == (5, 5, 1)
    with pytest.raises(InvalidConfig, match="the windows of one request and a step's prompts take"):
        sized(apart, 30)


def test_what_a_model_keeps_is_counted_by_group() -> None:
    """Six layers, five with windows of 64 tokens; K and V of a token and layer take 2 heads x 16 x 2 x 4 bytes."""
    kinds = (AttentionKind(window=64),) * 5 + (AttentionKind(),)
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    model = model_config(num_layers=6, context_len=4096, attention_kinds=kinds, **heads)
    hardware = Hardware(device="cpu", num_cpus=2, available_memory_bytes=GIB)
    config = resolve(model, hardware, cache=CacheConfig(page_size=16))
    assert sizing.part_bytes(config, apart=True) == {"token": 256, "window": 5 * 64 * 256}
    assert sizing.part_bytes(config, apart=False) == {"token": 6 * 256}
    assert sizing.describe_parts(config, apart=True) == (
        "K and V of a token take 256 bytes; those of a window of 64 tokens, in 5 layers, 81,920 bytes more"
    )


def test_the_cap_is_used_when_it_is_lower_and_warned_about_when_it_is_higher(caplog: pytest.LogCaptureFixture) -> None:
    """SPEC A07, K1: the snippet of the text applied the cap when it was None."""
    with caplog.at_level(logging.WARNING):
        assert sizing.pool_tokens(1050, 10, 16, 50) == 48
        assert caplog.records == []
        assert sizing.pool_tokens(1050, 10, 16, 5000) == 96
    assert "max_total_tokens = 5000 is more than fits; using 105 tokens" in caplog.text


def test_less_than_a_page_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"less than a page of 16 tokens.*is 15 tokens, no cap"):
        sizing.pool_tokens(159, 10, 16, None)
    with pytest.raises(InvalidConfig, match="max_total_tokens = 8"):
        sizing.pool_tokens(1050, 10, 16, 8)


@pytest.mark.parametrize(
    ("tokens", "given", "rows"),
    [(8_192, None, 2048), (48 * 1024, None, 3072), (1_000_000, None, 4096), (1_000_000, 7, 7)],
)
def test_request_rows_follow_the_pool_within_bounds_unless_given(tokens: int, given: int | None, rows: int) -> None:
    """SPEC A08 at a context of 8,192: 48k tokens are 6 contexts of 512 rows."""
    assert sizing.max_running_requests(tokens, 8192, given) == rows


def test_the_pool_describes_itself_in_one_line() -> None:
    size = sizing.PoolSize(num_pages=2048, page_size=16, cell_bytes=4096)
    assert size.describe() == "32,768 tokens, 2,048 pages, 128 MiB"
