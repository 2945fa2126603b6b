"""The engine's measurements on a tiny random model: every table is there and its counts are right."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5TextConfig

from benchmarks import engine, limits
from benchmarks.engine import Scale
from benchmarks.harness import Row
from benchmarks.limits import ModelCost
from replicas.config import ModelConfig, RopeConfig
from replicas.kernels.team import team
from tests.numerics import tiny
from tests.unit.tokenizer_folders import byte_level_folder

SCALE = Scale(
    rounds=1,
    batches=(1, 3),
    decode_prompt_len=8,
    decode_len=6,
    prefill_lens=(40,),
)


def measured(folder: Path, *formats: str, beside: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Row]]:
    """The rows by name of each section."""
    byte_level_folder(folder)
    tiny.save("llama", folder, vocab_size=512)
    monkeypatch.setattr(engine, "FULL", SCALE)
    rows = engine.measured(Namespace(model=str(folder), threads=1, seed=0, quick=False), formats, beside=beside)
    return {section: {row.name: row for row in rows if row.section == section} for section in {r.section for r in rows}}


def test_decode_and_prefill_stand_beside_transformers_with_limits_and_the_same_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(tmp_path, "float32", beside=True, monkeypatch=monkeypatch)
    for section in ("decode, 1 requests of 8 tokens", "decode, 3 requests of 8 tokens", "prompt of 40 tokens"):
        ours, theirs, ratio = found[section].values()
        assert (ours.name, theirs.name, ratio.name) == ("float32", "Transformers", "float32 / Transformers")
        assert all(row.value and row.limit and row.share == row.value / row.limit for row in (ours, theirs))
        assert theirs.note == ("1 of 1 runs with float32's ids" if section.startswith("decode") else "")


@pytest.mark.slow
def test_every_format_of_weights_stands_beside_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(tmp_path, *limits.FORMATS, beside=False, monkeypatch=monkeypatch)
    decode = found["decode, 1 requests of 8 tokens"]
    assert decode.keys() == {
        "float32", "bfloat16", "bfloat16 / float32", "int8", "int8 / float32", "int4", "int4 / float32",
        "int4, bf16", "int4, bf16 / float32",
    }  # fmt: skip
    assert decode["int4 / float32"].value == pytest.approx(decode["int4"].value / decode["float32"].value)
    assert decode["int4 / float32"].target == ">= 2.2 x"
    limits_of = [decode[name].limit for name in limits.FORMATS]
    assert limits_of == sorted(limits_of)  # the fewer bytes, the more tokens
    assert found.keys() > {"decode, 3 requests of 8 tokens", "prompt of 40 tokens"}


SMOLLM2 = ModelConfig(
    path="x", architecture="LlamaForCausalLM", vocab_size=49_152, hidden_size=576, intermediate_size=1536,
    num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, rms_norm_eps=1e-5, rope=RopeConfig(), context_len=8192,
    tie_embeddings=True, attention_bias=False, output_bias=False, mlp_bias=False, qk_norm=False,
    eos_ids=(2,), dtype="float32",
)  # fmt: skip


def test_the_peak_is_measured_on_sums_that_are_all_made() -> None:
    memory = torch.ones(limits.SUMS * 16)
    team(1).run(limits._peak, limits.PeakArgs(rounds=3, memory=memory.data_ptr()))
    assert memory[:16].eq(4 * limits.SUMS).all()  # 1 -> 2 -> 3 -> 4, in each
    assert limits.peak_flops(1) > 0


def test_weights_are_106_m_in_the_blocks_and_134_5_m_with_the_head() -> None:
    cost = ModelCost.of(SMOLLM2)
    assert cost.layer_params == pytest.approx(106.2e6, rel=1e-3)
    assert cost.layer_params + cost.head_params == pytest.approx(134.5e6, rel=1e-3)
    assert cost.weight_bytes == pytest.approx(538e6, rel=1e-3)


def test_batch_1_decode_is_bound_by_bytes_and_batch_32_by_products() -> None:
    cost = ModelCost.of(SMOLLM2)
    assert cost.decode_limit_s(1, 20.4e9, 260e9) == pytest.approx(0.0264, rel=1e-2)  # 38 tokens/s
    assert cost.decode_limit_s(32, 20.4e9, 260e9) == pytest.approx(2 * 134.5e6 * 32 / 260e9, rel=1e-3)


def test_prefill_of_one_token_is_its_products_and_one_score_a_head() -> None:
    cost = ModelCost.of(SMOLLM2)
    assert cost.prefill_flops(1) == 2 * (cost.layer_params + cost.head_params) + 4 * 30 * 9 * 64
    # causal: token t attends to t + 1 tokens
    assert cost.prefill_flops(3) - cost.prefill_flops(2) == 2 * cost.layer_params + 4 * 30 * 9 * 64 * 3


def test_a_recurrent_family_stands_beside_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its ids, and the memory of a request: K and V in one layer of four, states in the others."""
    small = Qwen3_5TextConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=32,
        vocab_size=engine.VOCAB, tie_word_embeddings=True, max_position_embeddings=4096,
    )  # fmt: skip
    monkeypatch.setattr(engine, "SHAPE", small)
    monkeypatch.setattr(engine, "FAMILY", SCALE)
    rows = engine.family_rows(Namespace(quick=False, rounds=1, threads=1, seed=0))
    found = {(row.section, row.name): row for row in rows}
    for batch in (1, 3):
        note = found[f"decode, {batch} requests of 8 tokens", "Transformers"].note
        assert note == "1 of 1 runs with float32's ids"
    assert found["prompt of 40 tokens", "float32 / Transformers"].value
    of_states = 3 * 3 * 4 * (2 * 32 * 32 + 3 * 64 * 4)  # bytes: places, layers, fp32, sums and the last inputs
    share = found["memory of a request of 32,768 tokens", "K, V and states"].share
    assert share == pytest.approx(1 / 4 + of_states / (4 * 2 * 2 * 16 * 4 * 32_768))
