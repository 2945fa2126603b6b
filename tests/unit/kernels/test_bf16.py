"""Products in bf16: sums of rounded numbers, a row's bits the same among any others, by each instruction that is here.

`python -m tests.unit.kernels.test_bf16 [WAY ...]` compiles those kernels, on any x86 for the CPU that the environment
names, and prints how many of either's instructions they have.
"""

import functools
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from replicas.kernels import bf16, bf16_tiles, panels
from replicas.kernels.bf16 import BLOCK_ROWS, FEW_ROWS, PART, UNPACKED, Bf16Kernel, pack
from replicas.kernels.bf16_tiles import DOT_ROWS, Way
from replicas.kernels.instructions import VARIABLE
from replicas.kernels.linear import LinearKernel
from replicas.kernels.panels import Panels
from replicas.kernels.scaled_dots import PAIR_ROWS
from replicas.kernels.simd import compiles_for
from replicas.kernels.team import Program, Team
from replicas.kernels.weight_formats import WeightFormat
from replicas.layers.linear import Matmul

ROOT = Path(__file__).resolve().parents[3]
# outputs: half a panel, and one, three and thirty of them; inputs: less than a step, and more than are taken at once
SHAPES = [(16, 16), (33, 1), (101, 77), (80, 72), (960, 576), (70, 3 * PART + 16)]
ROWS = [*range(1, 18), FEW_ROWS - 1, FEW_ROWS, FEW_ROWS + 1, 48, BLOCK_ROWS, BLOCK_ROWS + DOT_ROWS + 1, 300]
FEATURES = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "avx2", "fma", "f16c")
TILES = ("amx-tile", "amx-bf16")


@functools.cache
def here() -> tuple[Way, ...]:
    """The ways of this CPU, whichever is faster."""
    dots: tuple[Way, ...] = ("dots",) if compiles_for("avx512bf16") else ()
    way = bf16_tiles.way()
    return dots if way is None or way in dots else (way, *dots)


def by(way: Way) -> Way:
    if way not in here():
        pytest.skip(f"this CPU has no {LACKS[way]}")
    return way


LACKS = {"amx": "AMX, or the system forbids it", "dots": "AVX512_BF16"}
each_way = pytest.mark.parametrize("way", LACKS)


# how weights are multiplied, and in which format
WAYS: list[tuple[Way, WeightFormat]] = [
    ("amx", "bfloat16"), ("dots", "bfloat16"), ("dots", "q4_1"), ("dots", "q8_0"),
]  # fmt: skip
each_product = pytest.mark.parametrize(("way", "format_"), WAYS)


def packed(weight: Tensor, format_: WeightFormat) -> Panels:
    return pack(weight) if format_ == "bfloat16" else panels.pack(weight, format_)


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


@each_product
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_a_product_is_that_of_rounded_numbers_and_a_row_has_the_same_bits_among_any_others(
    way: Way, format_: WeightFormat, shape: tuple[int, int]
) -> None:
    """Up to k / 2 additions in a row of what is about sqrt(k) large round by 6e-8, with random signs.
    Of 4 bits what is summed are whole numbers, up to 15 steps of a weight that may be one, and their least
    number comes in at the end."""
    weight, x, bias, first = torch.randn(shape), torch.randn(500, shape[1]), torch.randn(shape[0]), 0
    alone, together = (Bf16Kernel(packed(weight, format_), Team(threads), bias, by=by(way)) for threads in (1, 3))
    whole, stands_for = alone(x), alone.rows(torch.arange(shape[0])).double()
    exact = rounded(x) @ stands_for.T + bias
    near = 6 * 6e-8 * rounded(x).norm(dim=1, keepdim=True) * stands_for.norm(dim=1).clamp(min=1)
    larger = 4 if format_ == "q4_1" else 1
    assert bool(((whole - exact).abs() <= larger * near + 1e-7 * exact.abs()).all())
    for rows in ROWS:
        first = (first + 37) % (501 - rows)
        for product in (alone, together):
            assert torch.equal(product(x[first : first + rows]), whole[first : first + rows])


@pytest.mark.parametrize("format_", ["q4_1", "q8_0"])
def test_weights_with_scales_are_multiplied_as_in_fp32_by_rounded_rows(format_: WeightFormat) -> None:
    """Not by weights that were rounded to bf16 first: those are 1e-3 away."""
    inputs = 4 * UNPACKED + 32
    weight, x = panels.pack(torch.randn(96, inputs), format_), torch.randn(2 * PAIR_ROWS + 1, inputs)
    wanted = LinearKernel(weight, Team(1))(x.bfloat16().float())
    made = Bf16Kernel(weight, Team(1), by=by("dots"))(x)
    assert (made - wanted).norm() < 1e-6 * wanted.norm()


@each_way
def test_what_is_multiplied_is_rounded_to_nearest_ties_to_even(way: Way) -> None:
    x = torch.randn(40, 96) * 10.0 ** torch.randint(-30, 30, (40, 96))
    x[0, :4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-20])  # ties, and beside one
    assert torch.equal(Bf16Kernel(pack(torch.eye(96)), Team(2), by=by(way))(x), x.bfloat16().float())


@each_product
def test_what_is_no_number_in_a_row_stays_there(way: Way, format_: WeightFormat) -> None:
    product, x = Bf16Kernel(packed(torch.randn(40, 90), format_), Team(2), by=by(way)), torch.randn(19, 90)
    x[2, 40], x[16, 89] = float("nan"), float("-inf")
    x.view(torch.int32)[5, 1] = 0x7FFFFFFF  # NaN that rounding its bits would make a number
    assert (~product(x).isfinite().all(dim=1)).nonzero().flatten().tolist() == [2, 5, 16]


@each_product
def test_rows_that_lie_apart_are_read_in_place_and_a_program_runs_it_at_any_number_of_rows(
    way: Way, format_: WeightFormat
) -> None:
    weight, wide, out, team = torch.randn(96, 64), torch.randn(70, 200), torch.zeros(70, 100), Team(2)
    product = Bf16Kernel(packed(weight, format_), team, by=by(way))
    program = Program([product.stage(wide[:, 9:73], out[:, :96], team)], team)
    whole = product(wide[:, 9:73].contiguous())
    for rows in (70, 1, 20, 33):
        out.zero_()
        program.run(rows)
        assert torch.equal(out[:rows, :96], whole[:rows])
        assert not out[rows:].any()
        assert not out[:, 96:].any()


@each_way
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=lambda s: f"{s[0]}x{s[1]}")
def test_rows_of_the_packed_weight_are_its_numbers_in_bf16(shape: tuple[int, int], way: Way) -> None:
    weight = torch.randn(shape)
    ids = torch.tensor([shape[0] - 1, 0, 3, 3, 15, 16, 31, 32])
    assert torch.equal(Bf16Kernel(pack(weight), Team(1), by=way).rows(ids), weight.bfloat16().float()[ids])


def test_many_rows_are_packed_in_parts_to_the_same_numbers_and_what_is_missing_is_zeros() -> None:
    weight = torch.randn(4096 + 45, 33)
    packed = pack(weight)
    assert torch.equal(Bf16Kernel(packed, Team(1), by="dots").rows(torch.arange(4141)), weight.bfloat16().float())
    pairs = packed.data.view(torch.bfloat16).view(-1, 32, 32, 2)  # [panels, pairs, channels, inputs]
    assert not pairs[:, 17:].any()
    assert not pairs[:, 16, :, 1].any()
    assert not pairs[-1, :, 45 % 32 :].any()


@pytest.mark.parametrize("way", ["amx", "dots", None])
def test_a_layer_multiplies_so_where_the_cpu_does_and_activations_may_be_rounded(
    monkeypatch: pytest.MonkeyPatch, way: Way | None
) -> None:
    monkeypatch.setattr(bf16_tiles, "way", lambda: way)
    kinds = set()
    for format_ in ("bfloat16", "float32", "float16", "int8", "q4_1", "q8_0"):
        for dtype in (torch.float32, torch.bfloat16):
            matmul = Matmul(format_=format_)  # type: ignore[arg-type]
            matmul.prepare(lambda: torch.randn(64, 32), None, dtype=dtype)
            if isinstance(matmul._kernel, Bf16Kernel):
                kinds.add((format_, dtype))
    in_bf16 = {("bfloat16", torch.float32), ("bfloat16", torch.bfloat16)}
    scaled = {("q4_1", torch.bfloat16), ("q8_0", torch.bfloat16)}
    assert kinds == {"amx": in_bf16, "dots": in_bf16 | scaled, None: set()}[way]


def test_rows_of_several_weights_do_not_share_a_tile_of_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    for way, grouped in (("amx", False), ("dots", True)):
        monkeypatch.setattr(bf16_tiles, "way", lambda way=way: way)  # type: ignore[misc]
        assert bf16.serves("bfloat16", torch.bfloat16)
        assert bf16.serves("bfloat16", torch.bfloat16, grouped=True) == grouped


AMX = {"avx512bf16", "amx-tile", "amx-bf16"}


@pytest.mark.parametrize(
    ("cpu", "has", "permitted", "found"),
    [
        ("znver5", {"avx512bf16"}, True, "dots"), ("znver5", {"avx512f"}, True, None),
        ("cooperlake", {"avx512bf16"}, True, None), ("sapphirerapids", AMX, True, "amx"),
        ("sapphirerapids", AMX, False, None), ("neoverse-v1", {"neon"}, False, None),
    ],
)  # fmt: skip
def test_it_is_done_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, cpu: str, has: set[str], permitted: bool, found: Way | None
) -> None:
    """Not by an Intel's dots, which are slower than multiply-adds; not where MANTA_CPU or the system forbids it."""
    monkeypatch.setattr(bf16_tiles, "compiles_for", lambda *features: set(features) <= has)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: cpu)
    monkeypatch.setattr(bf16_tiles, "_permitted", lambda: permitted)
    assert bf16_tiles.way.__wrapped__() == found


def compiled(folder: Path, cpu: str, features: Sequence[str], *ways: str) -> dict[str, dict[str, int]]:
    """Compile what multiplies so for ``cpu``, and count its instructions."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | {
        "NUMBA_CACHE_DIR": str(folder), "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": ",".join(f"+{each}" for each in features),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.unit.kernels.test_bf16", *ways]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numba compiles for the machine that it runs on")
def test_the_kernels_compile_to_either_instruction(tmp_path: Path) -> None:
    told = compiled(tmp_path, "sapphirerapids", [*FEATURES, *TILES])
    assert told["amx bfloat16"]["tdpbf16ps"] >= 12  # 2 of one group of rows, 4 of two; both with and without fetches
    assert told["amx bfloat16"]["vdpbf16ps"] == 0
    assert told["dots bfloat16"]["vdpbf16ps"] >= DOT_ROWS * (DOT_ROWS + 1)  # two for each row of each tile
    for format_ in ("q4_1", "q8_0"):  # of rows that unpack what they read, and of rows that share it
        assert told[f"dots {format_}"]["vdpbf16ps"] >= 2 * PAIR_ROWS * (PAIR_ROWS + 1)
    assert not any(told[name]["spills"] for name in told if "dots" in name)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numba compiles for the machine that it runs on")
def test_dots_compile_for_a_cpu_without_tiles(tmp_path: Path) -> None:
    """LLVM ends the process where it meets an instruction that the CPU lacks."""
    told = compiled(tmp_path, "znver4", FEATURES, "dots")
    assert told["dots bfloat16"]["vdpbf16ps"] >= DOT_ROWS * (DOT_ROWS + 1)


def main() -> None:
    from replicas.kernels.bf16 import PRODUCTS

    told = {}
    for (way, format_), product in PRODUCTS.items():
        if way not in (sys.argv[1:] or ("amx", "dots")):
            continue
        assert product.address
        assembly = product._compiled._library.get_asm_str()
        told[f"{way} {format_}"] = {
            "vdpbf16ps": len(re.findall("\tvdpbf16ps\t", assembly)),
            "tdpbf16ps": len(re.findall("\ttdpbf16ps\t", assembly)),
            "spills": len(re.findall(r"zmm.*Spill", assembly)),
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
