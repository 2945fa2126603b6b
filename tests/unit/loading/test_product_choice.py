"""How products are computed, in words and in which order, and what a format gains: measured once a machine."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from replicas.config import CacheConfig, EngineConfig, Hardware, KvDType, ModelConfig, MoEConfig
from replicas.kernels import bf16_tiles
from replicas.loading import product_choice
from replicas.loading.product_choice import Measured, compare, describe_products
from replicas.resolve import resolve
from tests.harness import model_config

MODEL = model_config(hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where measurements are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "manta"


def config(model: ModelConfig = MODEL, *, kv_dtype: KvDType | None = None) -> EngineConfig:
    hardware = Hardware(device="cpu", num_cpus=2, available_memory_bytes=1 << 30)
    return resolve(model, hardware, cache=CacheConfig(kv_dtype=kv_dtype))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The formats and dtypes of each measurement."""
    calls: list[tuple[str, str]] = []

    def measure(format_: str, dtype: str) -> Measured:
        calls.append((format_, dtype))
        return {1: 2.0, 256: 0.75}, True

    monkeypatch.setattr(product_choice, "_measure", measure)
    return calls


def test_what_a_format_gains_is_measured_once_a_machine_and_said(
    measured: list[tuple[str, str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bf16_tiles, "way", lambda: "dots")
    for _ in range(2):
        assert product_choice.gains("bfloat16") == {1: 2.0, 256: 0.75}
    assert measured == [("bfloat16", "float32")]
    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["gains"] == {"1": 2.0, "256": 0.75}
    file.write_text("{")  # a process that was killed, or another version
    assert product_choice.gains("bfloat16")[1] == 2
    assert [path.suffix for path in folder.iterdir()] == [".json"]
    told, gain = product_choice.instructions_told(), "2 times float32 for 1 token"
    assert told["bfloat16"] == f"by AVX-512's dot products: {gain}, 0.75 times float32 for 256 tokens"
    assert list(told) == ["float32", "bfloat16", "int8", "q4_1", "q4_1 in bfloat16"]
    assert measured[2:] == [("int8", "float32"), ("q4_1", "float32"), ("q4_1", "bfloat16")]
    assert product_choice.default_told("bfloat16") == f"the checkpoint's, which this CPU multiplies: {gain}" + (
        ", 0.75 times float32 for 256 tokens"
    )
    assert product_choice.default_told("float32") is None


def test_a_folder_that_cannot_be_written_costs_a_measurement_each_time(
    measured: list[tuple[str, str]], folder: Path
) -> None:
    folder.write_text("a file in its place")
    assert product_choice.gains("int8") == product_choice.gains("int8")
    assert len(measured) == 2


def test_narrower_weights_are_measured_by_the_kernels_that_serve_them() -> None:
    """Half the bytes, read from memory: with one row nothing but a fault of the measurement would be slower."""
    for format_ in ("bfloat16", "int8"):
        by_rows = product_choice.gains(format_)  # type: ignore[arg-type]
        assert list(by_rows) == list(product_choice.ROWS)
        assert by_rows[1] > 1


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


def test_time_in_which_others_have_the_processor_does_not_count() -> None:
    """Work that only waits is quicker than what computes."""

    def computes(x: torch.Tensor) -> None:
        until_s = time.thread_time() + 0.001
        while time.thread_time() < until_s:
            pass

    def waits(x: torch.Tensor) -> None:
        threading.Event().wait(0.005)

    assert compare((computes, waits), [torch.ones(32, 64)])[0][32] > 2


@pytest.mark.parametrize(
    ("own_ms", "other_ms", "times", "kept"),
    [
        ([2] * 8, [1] * 8, 2, True),
        ([2, 9, 2, 2, 9, 9, 9, 2], [9, 1, 1, 1, 1, 1, 9, 1], 2, True),  # each half has good runs
        ([2, 2, 3, 3, 2, 2, 3, 3], [1] * 8, 2, False),
        ([2] * 8, [9, 9, 1, 1, 9, 9, 9, 9], 2, False),  # the second and the last round are one half
    ],
)
def test_gains_whose_repeats_differ_are_used_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, folder: Path, own_ms: list[int], other_ms: list[int], times: float, kept: bool
) -> None:
    """Four rounds of two runs each, by a clock of the test's."""
    now_s = 0.0

    def takes(ms: list[int]) -> Callable[[torch.Tensor], None]:
        left = iter(ms)

        def work(_: torch.Tensor) -> None:
            nonlocal now_s
            now_s += next(left) / 1000

        return work

    works = takes(own_ms), takes(other_ms)
    found, agree = compare(works, [torch.ones(32, 64)], lambda: now_s)
    assert (found, agree) == ({32: times}, kept)
    monkeypatch.setattr(product_choice, "_measure", lambda *_: (found, agree))
    assert product_choice.gains("bfloat16") == found
    assert len(list(folder.glob("*.json"))) == kept
