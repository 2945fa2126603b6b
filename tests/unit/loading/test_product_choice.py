"""How products are computed, in words and in which order."""

from dataclasses import replace
from typing import Any

import pytest

from replicas.config import CacheConfig, EngineConfig, Hardware, KvDType, ModelConfig, MoEConfig
from replicas.kernels import bf16_tiles
from replicas.loading import product_choice
from replicas.loading.product_choice import describe_products
from replicas.resolve import resolve
from tests.harness import model_config

MODEL = model_config(hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512)


def config(model: ModelConfig = MODEL, *, kv_dtype: KvDType | None = None) -> EngineConfig:
    hardware = Hardware(device="cpu", num_cpus=2, available_memory_bytes=1 << 30)
    return resolve(model, hardware, cache=CacheConfig(kv_dtype=kv_dtype))


def test_the_way_of_each_format_is_told_as_this_cpu_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_tiles, "way", lambda: "dots")
    told = product_choice.instructions_told()
    assert told["bfloat16"] == told["q4_1 in bfloat16"] == "by AVX-512's dot products"
    assert list(told) == ["float32", "bfloat16", "int8", "q4_1", "q4_1 in bfloat16"]
    monkeypatch.setattr(bf16_tiles, "way", lambda: None)
    assert product_choice.instructions_told()["bfloat16"] == told["q4_1"] == "widened for fp32 arithmetic"


@pytest.mark.parametrize(
    ("way", "changes", "says"),
    [
        (None, {}, "own, float32 weights in fp32 arithmetic"),
        (None, {"quantization": "int4"}, "own, q4_1 weights in fp32 arithmetic"),
        (None, {"dtype": "bfloat16"}, "own, bfloat16 weights in fp32 arithmetic"),
        ("amx", {"dtype": "bfloat16"}, "own, bfloat16 weights and activations by AMX's tiles, summed in fp32"),
        ("amx", {"dtype": "bfloat16", "quantization": "int4"}, "own, q4_1 weights in fp32 arithmetic"),
        ("dots", {"dtype": "bfloat16", "quantization": "int4"},
         "own, q4_1 weights and bfloat16 activations by AVX-512's dot products, summed in fp32"),
    ],
)  # fmt: skip
def test_ranks_add_in_one_order_where_a_last_bit_could_become_a_step(
    monkeypatch: pytest.MonkeyPatch, way: str | None, changes: dict[str, Any], says: str
) -> None:
    """K and V are rounded, which are as the model is unless set, or activations, or experts are chosen."""
    monkeypatch.setattr(bf16_tiles, "way", lambda: way)
    model = replace(MODEL, **changes)
    rounds = "activations" in says
    assert describe_products(config(model, kv_dtype="float32")) == (rounds, says)
    one_order, how = describe_products(config(model, kv_dtype="int8"))
    assert one_order
    assert how == f"{says}; in one order, for K and V rounded to int8"
    assert describe_products(config(model))[0] == (rounds or model.dtype == "bfloat16")
    experts = replace(model, moe=MoEConfig(num_experts=8, top_k=2, intermediate_size=32, normalize=True))
    one_order, how = describe_products(config(experts, kv_dtype="float32"))
    assert (one_order, how.endswith("in one order, since a last bit may choose another expert")) == (True, True)


@pytest.mark.parametrize(("has_vnni", "says"), [(True, "multiplied as bytes"), (False, "this CPU has no VNNI")])
def test_int8_says_how_this_cpu_multiplies(monkeypatch: pytest.MonkeyPatch, has_vnni: bool, says: str) -> None:
    monkeypatch.setattr(product_choice, "cpu_has_vnni", lambda: has_vnni)
    one_order, how = describe_products(config(replace(MODEL, quantization="int8")))
    assert one_order
    assert says in how
