"""The choice between our products and BLAS: by shape and rows, measured once a machine, whatever else runs."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from replicas.config import CacheConfig, EngineConfig, Hardware, KvDType, ModelConfig, Products
from replicas.errors import InvalidConfig
from replicas.kernels import bf16_tiles
from replicas.layers.tp_group import TpGroup
from replicas.resolve import resolve
from replicas.runner import product_choice
from replicas.runner.model_files import load_model_config
from replicas.runner.product_choice import BLAS_ROWS, Measured, Shape, choose_products, faster, product_shapes
from tests.harness import model_config
from tests.numerics import tiny
from tests.numerics.paged import PagedModel

MODEL = model_config(hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512)
SHAPES = [(128, 64), (64, 64), (256, 64), (64, 128), (512, 64)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where measurements are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "manta"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[Shape]]:
    """The shapes of each measurement; BLAS is twice as fast with 256 rows of the down product."""
    calls: list[list[Shape]] = []

    def measure(shapes: Sequence[Shape]) -> Measured:
        calls.append(list(shapes))
        by_rows = {32: (60.0, 66.0), 64: (60.0, 60.0), 256: (40.0, 80.0)}
        return {shape: by_rows for shape in shapes if shape[1] > 64}, True

    monkeypatch.setattr(product_choice, "_measure", measure)
    return calls


def config(model: ModelConfig = MODEL, *, kv_dtype: KvDType | None = None) -> EngineConfig:
    hardware = Hardware(device="cpu", num_cpus=2, available_memory_bytes=1 << 30)
    return resolve(model, hardware, cache=CacheConfig(kv_dtype=kv_dtype))


@pytest.mark.parametrize(
    ("by_rows", "taken"),
    [
        ({32: (60, 70), 64: (60, 70), 256: (60, 70)}, 32),
        ({32: (60, 68), 64: (60, 70), 256: (60, 70)}, 64),  # 1.13 x is no clear difference
        ({32: (60, 90), 64: (60, 60), 256: (60, 90)}, 256),  # from there on, in all that was measured
        ({32: (60, 90), 64: (60, 90), 256: (60, 60)}, None),
    ],
)
def test_blas_takes_steps_from_the_rows_on_at_which_it_is_clearly_faster(
    by_rows: dict[int, tuple[float, float]], taken: int | None
) -> None:
    assert faster({(64, 128): by_rows}).blas_rows == ({} if taken is None else {(64, 128): taken})


def test_shapes_are_those_that_a_rank_multiplies_by(tmp_path: Path) -> None:
    tiny.save("qwen2-tied", tmp_path, hidden_size=64, intermediate_size=96)
    model = load_model_config(str(tmp_path))
    llama = PagedModel(model, TpGroup(device="cpu"), page_size=4, num_pages=8).model
    block = llama.blocks[0]
    products = (block.attn.qkv, block.attn.o_proj, block.mlp.gate_up, block.mlp.down, llama.head)
    assert product_shapes(model, 1) == [product.matmul.shape for product in products]
    assert product_shapes(MODEL, 1) == SHAPES
    assert product_shapes(MODEL, 2) == [(64, 64), (64, 32), (128, 64), (64, 64), (256, 64)]


def test_a_measurement_is_read_by_the_next_engine_of_this_machine(
    measured: list[list[Shape]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, why = choose_products(config(), "auto")
    assert first == Products(blas_rows={(64, 128): 256})
    assert why == "BLAS for 64 x 128 from 256 rows; else own, as measured on this CPU"
    assert choose_products(config(), "auto") == (first, why)
    assert measured == [sorted(SHAPES)]
    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["rates"] == [[64, 128, {"32": [60, 66], "64": [60, 60], "256": [40, 80]}]]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # another machine, in effect
    choose_products(config(), "auto")
    file.write_text("{")  # a process that was killed, or another version
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    choose_products(config(), "auto")
    assert len(measured) == 3
    assert sorted(path.suffix for path in folder.iterdir()) == [".json"] * 2


def test_a_folder_that_cannot_be_written_costs_a_measurement_at_each_start(
    measured: list[list[Shape]], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    folder.write_text("a file in its place")
    assert choose_products(config(), "auto") == choose_products(config(), "auto")
    assert len(measured) == 2


def test_a_setting_is_followed_without_measuring(measured: list[list[Shape]]) -> None:
    assert choose_products(config(), "own")[0] == Products()
    assert choose_products(config(), "blas")[0] == Products(blas_rows=dict.fromkeys(SHAPES, BLAS_ROWS))
    assert not measured
    with pytest.raises(InvalidConfig, match=r"model\.products = 'mkl' is unknown; allowed: auto, own, blas"):
        choose_products(config(), "mkl")  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("setting", ["auto", "own", "blas"])
def test_blas_is_not_used_if_k_and_v_are_rounded(
    measured: list[list[Shape]], setting: product_choice.ProductSetting, kv_dtype: KvDType
) -> None:
    products, why = choose_products(config(kv_dtype=kv_dtype), setting)
    assert products == Products(one_order=True)
    assert "rounded" in why
    assert not measured


def test_what_a_format_gains_is_measured_once_a_machine_and_said(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    calls: list[tuple[str, str]] = []

    def measure(format_: str, dtype: str, shapes: Sequence[Shape]) -> Measured:
        calls.append((format_, dtype))
        return {shape: {1: (40.0, 80.0), 256: (80.0, 60.0)} for shape in shapes}, True

    monkeypatch.setattr(product_choice, "_beside_floats", measure)
    monkeypatch.setattr(bf16_tiles, "way", lambda: "dots")
    for _ in range(2):
        assert product_choice.gains("bfloat16") == {1: 2.0, 256: 0.75}
    assert calls == [("bfloat16", "float32")]
    told = product_choice.instructions_told()
    assert told["bfloat16"] == (
        "by AVX-512's dot products: 2 times float32 for 1 token, 0.75 times float32 for 256 tokens"
    )
    assert list(told) == ["float32", "bfloat16", "int8", "q4_1", "q4_1 in bfloat16"]
    assert calls == [*((each, "float32") for each in ("bfloat16", "int8", "q4_1")), ("q4_1", "bfloat16")]


def test_a_default_of_bfloat16_is_said_with_what_it_gains(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    measured = {product_choice.GAIN_SHAPE: {1: (40.0, 80.0)}}, True
    monkeypatch.setattr(product_choice, "_beside_floats", lambda *_: measured)
    gain = "2 times float32 for 1 token"
    assert product_choice.default_told("bfloat16") == f"the checkpoint's, which this CPU multiplies: {gain}"
    assert product_choice.default_told("float32") is None


def test_narrower_weights_are_measured_by_the_kernels_that_serve_them() -> None:
    """Half the bytes, read from memory: with one row nothing but a fault of the measurement would be slower."""
    for format_ in ("bfloat16", "int8"):
        by_rows = product_choice.gains(format_)  # type: ignore[arg-type]
        assert list(by_rows) == list(product_choice.GAIN_ROWS)
        assert by_rows[1] > 1


@pytest.mark.parametrize("setting", ["auto", "blas"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization": "int4"}, "q4_1 weights in fp32 arithmetic"),
        ({"dtype": "bfloat16"}, "bfloat16 weights in fp32 arithmetic"),
        ({"dtype": "float16"}, "float16 weights in fp32 arithmetic"),
    ],
)
def test_weights_in_another_format_are_for_our_kernels_alone(
    measured: list[list[Shape]], setting: product_choice.ProductSetting, changes: dict[str, Any], says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Their sums need one order only if K and V, which are bfloat16 as the model is unless set, are rounded."""
    monkeypatch.setattr(bf16_tiles, "way", lambda: None)
    model = replace(MODEL, **changes)
    for kv_dtype, rounds in ((None, model.dtype == "bfloat16"), ("float32", False), ("int8", True)):
        products, why = choose_products(config(model, kv_dtype=kv_dtype), setting)
        assert products == Products(one_order=rounds)
        assert says in why
    assert not measured


@pytest.mark.parametrize(("way", "says"), [("amx", "by AMX's tiles"), ("dots", "by AVX-512's dot products")])
def test_bfloat16_is_multiplied_in_one_order_where_this_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, way: str, says: str
) -> None:
    """Activations are rounded, so a last bit can become a step, whatever K and V are."""
    monkeypatch.setattr(bf16_tiles, "way", lambda: way)
    for changes in ({"dtype": "bfloat16"}, {"dtype": "float32"}):
        products, why = choose_products(config(replace(MODEL, **changes), kv_dtype="float32"), "own")
        assert products == Products(one_order=changes["dtype"] == "bfloat16")
        assert (f"own, bfloat16 weights and activations {says}, summed in fp32" == why) == products.one_order


@pytest.mark.parametrize(("way", "how"), [
    ("dots", "own, q4_1 weights and bfloat16 activations by AVX-512's dot products, summed in fp32"),
    ("amx", "own, q4_1 weights in fp32 arithmetic"),
])  # fmt: skip
def test_weights_of_4_bits_are_multiplied_by_bfloat16_where_that_is_the_dtype_and_the_cpu_has_dots(
    monkeypatch: pytest.MonkeyPatch, way: str, how: str
) -> None:
    monkeypatch.setattr(bf16_tiles, "way", lambda: way)
    for dtype, says in (("bfloat16", how), ("float32", "own, q4_1 weights in fp32 arithmetic")):
        model = replace(MODEL, quantization="int4", dtype=dtype)
        assert choose_products(config(model, kv_dtype="float32"), "auto") == (Products(one_order="dot" in says), says)


@pytest.mark.parametrize(("has_vnni", "says"), [(True, "multiplied as bytes"), (False, "this CPU has no VNNI")])
def test_int8_says_how_this_cpu_multiplies(monkeypatch: pytest.MonkeyPatch, has_vnni: bool, says: str) -> None:
    monkeypatch.setattr(product_choice, "cpu_has_vnni", lambda: has_vnni)
    products, why = choose_products(config(replace(MODEL, quantization="int8")), "auto")
    assert products == Products(one_order=True)
    assert says in why


def test_other_load_does_not_decide_which_product_is_taken() -> None:
    """Time in which others have the processor does not count: work that only waits is quicker than what computes."""

    def computes(x: torch.Tensor) -> None:
        until_s = time.thread_time() + 0.001
        while time.thread_time() < until_s:
            pass

    def waits(x: torch.Tensor) -> None:
        threading.Event().wait(0.005)

    before = torch.get_num_threads()
    case = product_choice._Case((64, 64), torch.ones(32, 64), 1 << 16, (computes, waits))  # type: ignore[arg-type]
    own, blas = product_choice._rates([case])[0][64, 64][32]
    assert blas > 2 * own
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("own_ms", "blas_ms", "rates", "kept"),
    [
        ([2] * 8, [1] * 8, (0.1, 0.3), True),
        ([2, 9, 2, 2, 9, 9, 9, 2], [9, 1, 1, 1, 1, 1, 9, 1], (0.1, 0.3), True),  # each half has good runs
        ([2, 2, 3, 3, 2, 2, 3, 3], [1] * 8, (0.1, 0.3), False),
        ([2] * 8, [9, 9, 1, 1, 9, 9, 9, 9], (0.1, 0.3), False),  # the second and the last round are one half
    ],
)
def test_rates_whose_repeats_differ_are_used_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    own_ms: list[int],
    blas_ms: list[int],
    rates: tuple[float, float],
    kept: bool,
) -> None:
    """Four rounds of two runs each, by a clock of the test's. The next start measures anew."""
    now_s = 0.0

    def takes(ms: list[int]) -> Callable[[torch.Tensor], None]:
        left = iter(ms)

        def work(_: torch.Tensor) -> None:
            nonlocal now_s
            now_s += next(left) / 1000

        return work

    starts = 0

    def measure(shapes: Sequence[Shape]) -> Measured:
        nonlocal starts
        starts += 1
        works: Any = (takes(own_ms), takes(blas_ms))
        case = product_choice._Case((64, 64), torch.ones(32, 64), 64, works)
        return product_choice._rates([case], lambda: now_s)

    monkeypatch.setattr(product_choice, "_measure", measure)
    for _ in range(2):
        assert choose_products(config(), "auto")[0] == Products(blas_rows={(64, 64): 32})
        assert product_choice._recorded("own and BLAS", measure, [(64, 64)])[64, 64][32] == rates
    assert starts == (2 if kept else 4)
    assert len(list(folder.glob("*.json"))) == (2 if kept else 0)
