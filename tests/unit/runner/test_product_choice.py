"""The choice between our products and BLAS: by shape and rows, measured once a machine, whatever else runs."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replicas.config import CacheConfig, EngineConfig, Hardware, KvDType, ModelConfig, Products, resolve
from replicas.errors import InvalidConfig
from replicas.kernels.linear import FEW_ROWS
from replicas.layers.tp_group import TpGroup
from replicas.runner import product_choice
from replicas.runner.model_files import load_model_config
from replicas.runner.product_choice import Rates, Shape, choose_products, faster, int8_warning, product_shapes
from tests.harness import model_config
from tests.numerics import tiny
from tests.numerics.paged import PagedModel

MODEL = model_config(
    hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512
)
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

    def measure(shapes: Sequence[Shape]) -> Rates:
        calls.append(list(shapes))
        return {shape: {32: (60.0, 66.0), 64: (60.0, 60.0), 256: (40.0, 80.0)} for shape in shapes if shape[1] > 64}

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
    assert choose_products(config(), "blas")[0] == Products(blas_rows=dict.fromkeys(SHAPES, FEW_ROWS))
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


def test_int8_without_vnni_warns_with_the_measured_speed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rates = {1: (10.0, 2.5), 256: (60.0, 48.0)}
    monkeypatch.setattr(product_choice, "_measure_int8", lambda shapes: dict.fromkeys(shapes, rates))
    int8 = config(replace(MODEL, quantization="int8"))
    for has_vnni, told in ((True, ""), (False, "times 0.25 with 1 row and 0.80 with 256 rows; leave")):
        monkeypatch.setattr(product_choice, "cpu_has_vnni", lambda has_vnni=has_vnni: has_vnni)
        caplog.clear()
        assert choose_products(int8, "auto")[0] == Products(one_order=True)
        assert [told in record.message for record in caplog.records if record.levelname == "WARNING"] == (
            [True] if told else []
        )
    assert "leave" not in int8_warning({1: 1.6, 256: 1.0})


def test_other_load_does_not_decide_which_product_is_taken() -> None:
    """With both cores taken by others, a measurement by wall time was wrong one time in eight."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    before = torch.get_num_threads()
    try:
        rates = [product_choice._measure([(576, 576), (30, 576)]) for _ in range(4)]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert [sorted(measured) for measured in rates] == [[(576, 576)]] * 4  # 30 outputs are not for our kernels
    for rows in product_choice.ROWS:
        ratios = [own / blas for own, blas in (measured[576, 576][rows] for measured in rates)]
        assert max(ratios) < 1.5 * min(ratios)
    assert torch.get_num_threads() == before


def test_int8_is_measured_beside_fp32() -> None:
    speed = product_choice.int8_speed(MODEL)
    assert sorted(speed) == [1, 256]
    assert all(0.05 < times < 20 for times in speed.values())
