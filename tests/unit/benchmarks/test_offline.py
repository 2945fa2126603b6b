"""The whole offline benchmark on a tiny random model: every table is there and its counts are right."""

from pathlib import Path

import pytest

from benchmarks import offline
from benchmarks.report import Row
from benchmarks.scale import Scale
from tests.numerics import tiny
from tests.unit.tokenizer_folders import byte_level_folder

SCALE = Scale(
    rounds=1,
    batches=(1, 3),
    decode_prompt_len=8,
    decode_len=6,
    prefill_lens=(40,),
    prefix_rounds=1,
    num_groups=2,
    per_group=3,
    prefix_len=64,
    question_len=8,
    prefix_output_len=4,
    concurrency=1,
    unique_requests=2,
    unique_len=32,
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Row]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    byte_level_folder(folder)
    tiny.save("llama", folder, vocab_size=512)
    return {(row.section, row.name): row for row in offline.measure(str(folder), num_threads=1, scale=SCALE)}


def test_decode_and_prefill_stand_beside_transformers_with_their_limits(rows: dict[tuple[str, str], Row]) -> None:
    decode = [row for (section, _), row in rows.items() if section == "decode, context 8, fp32"]
    prefill = [row for (section, _), row in rows.items() if section == "prefill, fp32"]
    assert [row.name for row in decode] == ["batch 1", "batch 3", "Transformers generate, batch 1"]
    assert [row.name for row in prefill] == ["40 tokens", "Transformers, 40 tokens"]
    assert all(row.limit and row.share == row.value / row.limit for row in decode + prefill)


def test_the_compared_runs_made_the_same_tokens(rows: dict[tuple[str, str], Row]) -> None:
    assert rows["decode, context 8, fp32", "batch 1"].note == "1 of 1 runs equal to Transformers' ids"
    shared = next(row for (_, name), row in rows.items() if name == "times faster with RadixCache")
    assert shared.note == "1 of 1 runs with equal token ids"


def test_the_parts_of_a_step_make_up_the_whole(rows: dict[tuple[str, str], Row]) -> None:
    for case in ("decode, batch 1", "decode, batch 3", "prefill, 40 tokens"):
        names = ("products, norms, rope, SiLU", "attention")
        parts = [rows["time of a step", f"{case}: {name}"].value for name in names]
        outside = rows["time of a step", f"{case}: outside both"].value
        assert min(*parts, outside) > 0
        assert sum(parts) + outside == pytest.approx(100)


def test_one_at_a_time_the_radix_cache_reuses_all_that_whole_pages_allow(rows: dict[tuple[str, str], Row]) -> None:
    hits = next(row for (_, name), row in rows.items() if name == "cached prompt tokens")
    assert hits.value == pytest.approx(100 * 4 * 64 / (6 * 72))  # 4 of 6 requests find their prefix of 4 pages
    assert hits.note == "at best 59.3"
