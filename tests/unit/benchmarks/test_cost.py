"""Costs of SmolLM2-135M's shape, against the figures of notes/cpu.md and notes/peers.md section 9."""

import pytest

from benchmarks.cost import ModelCost
from replicas.config import ModelConfig, RopeConfig

SMOLLM2 = ModelConfig(
    path="x",
    architecture="LlamaForCausalLM",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    context_len=8192,
    tie_embeddings=True,
    attention_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    eos_ids=(2,),
    dtype="float32",
)


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
