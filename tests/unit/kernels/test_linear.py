"""Products by packed weights: sums of what each format stands for, and a row's bits the same among any others."""

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import FP4_VALUES as E2M1
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from replicas.checkpoints.stored import Floats4, Window
from replicas.kernels.linear import FUSED_ROWS, TILE_ROWS, LinearKernel
from replicas.kernels.panels import PLAIN, Panels, Rows, pack
from replicas.kernels.team import Team
from replicas.kernels.weight_formats import GROUP, NUMBER_BYTES, WeightFormat

FORMATS: list[WeightFormat] = [each for each in get_args(WeightFormat) if each != "fp8"]  # which GPUs alone have
EXACT = tuple(PLAIN)
# outputs: half a panel, and one, three and thirty of them; inputs: less than a group, and more than are summed at once
SHAPES = [(16, 16), (33, 1), (101, 77), (80, 72), (960, 576), (70, 1552)]
ROWS = [*range(1, 14), FUSED_ROWS, FUSED_ROWS + 1, 300]
in_each_format = pytest.mark.parametrize("format_", FORMATS)
of_each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")


def widened(weight: Panels) -> Tensor:
    """Every number of the weight, [N, K] fp32."""
    return weight.rows(torch.arange(weight.n))


def rounding(x: Tensor, weight: Tensor) -> Tensor:
    """How far from fp64 [M, N] results may be: partial sums of k products with random signs are about sqrt(k) large,
    and each of up to 192 + k / 192 additions in a row rounds them by 6e-8; with random signs that is a factor of 14,
    and 5 covers the largest of 10^5 results."""
    norms = x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
    return 5 * 14 * 6e-8 / weight.shape[1] ** 0.5 * norms.double()


def counted(generator: torch.Generator, format_: WeightFormat, n: int, k: int) -> Tensor:
    """[N, K] fp32 that is made of numbers of ``format_``, as a checkpoint of ggml's or gpt-oss, widened: the largest
    and the least of a group are among them."""
    if format_ == "mxfp4":
        numbers, exponents = torch.randint(16, (n, k // GROUP, GROUP), generator=generator), torch.arange(n) % 40 - 30
        numbers[:, :, 5] = 7
        return (torch.tensor(E2M1)[numbers] * torch.exp2(exponents)[:, None, None]).flatten(1)
    low, high = (0, 15) if format_ == "q4_1" else (-127, 127)
    numbers = torch.randint(low, high + 1, (n, k // GROUP, GROUP), generator=generator)
    numbers[:, :, 5], numbers[:, :, 9] = low, high
    steps = (0.001 + torch.rand(n, k // GROUP, 1, generator=generator) / 50).half().float()
    least = torch.randn(n, k // GROUP, 1, generator=generator).half().float() if format_ == "q4_1" else 0.0
    return (numbers * steps + least).flatten(1)  # in fp32: the product of so few bits is exact, the sum is rounded once


@in_each_format
@of_each_shape
def test_a_product_is_that_of_the_packed_numbers_and_a_row_has_the_same_bits_among_any_others(
    shape: tuple[int, int], format_: WeightFormat
) -> None:
    weight = pack(torch.randn(shape), format_)
    x, bias, first = torch.randn(300, shape[1]), torch.randn(shape[0]), 0
    alone, together = LinearKernel(weight, Team(1), bias), LinearKernel(weight, Team(3), bias)
    whole, numbers = alone(x), widened(weight)
    exact = x.double() @ numbers.double().T + bias
    assert bool(((whole - exact).abs() <= rounding(x, numbers) + 1e-7 * exact.abs()).all())
    for rows in ROWS:
        first = (first + 37) % (301 - rows)
        for product in (alone, together):
            assert torch.equal(product(x[first : first + rows]), whole[first : first + rows])


@in_each_format
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=lambda s: f"{s[0]}x{s[1]}")
def test_rows_of_the_weight_are_what_a_product_multiplies_by(shape: tuple[int, int], format_: WeightFormat) -> None:
    product = LinearKernel(pack(torch.randn(shape), format_), Team(1))
    ids = torch.tensor([shape[0] - 1, 0, 3, 3, 20, 15, 16, 31, 32])  # of both halves of a panel, and of the last one
    assert torch.equal(product(torch.eye(shape[1])).T[ids], product.rows(ids))


@pytest.mark.parametrize("format_", ["q8_0", "q4_1", "mxfp4"])
@pytest.mark.parametrize("rows", [1, 2, 5, FUSED_ROWS + 1])
def test_weights_that_are_made_of_a_formats_numbers_give_the_bits_of_fp32(rows: int, format_: WeightFormat) -> None:
    weight, x = counted(torch.Generator().manual_seed(rows), format_, 101, 224), torch.randn(rows, 224)
    packed = pack(weight, format_)
    assert torch.equal(widened(packed), weight)
    assert torch.equal(LinearKernel(packed, Team(2))(x), LinearKernel(weight, Team(2))(x))


def test_each_of_the_sixteen_floats_of_4_bits_is_exact_at_the_least_and_the_largest_scale() -> None:
    """Of a checkpoint: the lower half of a byte comes first. 2 ** -127, and half of it, are subnormal; 6 * 2 ** 126 is
    beyond fp32, as in Transformers."""
    exponents, numbers = torch.tensor([0, 1, 2, 127, 251, 252, 253, 254], dtype=torch.uint8), torch.arange(16)
    both = (numbers[::2] | numbers[1::2] << 4).to(torch.uint8).repeat(2)
    blocks, scales = both.expand(8, 1, 16), exponents.unsqueeze(1)
    stored = Window.of(Floats4("a weight", blocks, scales))
    exact = torch.tensor(E2M1 * 2, dtype=torch.float64) * torch.exp2(exponents.double() - 127).unsqueeze(1)
    wanted = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
    assert torch.equal(wanted, exact.float())
    assert wanted[7, 7].isinf()
    packed = pack(Rows([stored]), "mxfp4")
    assert packed.nbytes == 32 * 17  # of one panel
    assert torch.equal(stored.floats(0, 8), wanted)
    assert torch.equal(widened(packed), wanted)
    finite = pack(Rows([stored.narrow(0, 0, 6)]), "mxfp4")
    assert torch.equal(LinearKernel(finite, Team(1))(torch.eye(32)).T, wanted[:6])


@pytest.mark.parametrize("format_", EXACT)
def test_plain_formats_round_to_nearest(format_: WeightFormat) -> None:
    weight = torch.randn(70, 50)
    assert torch.equal(widened(pack(weight, format_)), weight.to(PLAIN[format_]).float())
    assert torch.equal(widened(pack(weight.bfloat16(), format_)), weight.bfloat16().to(PLAIN[format_]).float())


@pytest.mark.parametrize(("format_", "steps"), [("int8", 2 * 127), ("q8_0", 2 * 127), ("q4_1", 15)])
@pytest.mark.parametrize("k", [64, 77, 1])
def test_a_number_is_rounded_by_half_a_step_of_its_group_and_zeros_stay(
    k: int, steps: int, format_: WeightFormat
) -> None:
    """Scales and least numbers are rounded themselves, by 1 / 128 (bf16, up) or 1 / 2048 of what they are, in fp16 by
    3e-8 at least: 127 times that where a group of one small number has a scale of its own."""
    weight = torch.randn(40, k) / 20
    weight[7] = 0.0
    packed = pack(weight, format_)
    got, group = widened(packed), packed.group
    for start in range(0, k, group):
        part = weight[:, start : start + group]
        if format_ == "q4_1":
            extent = part.amax(dim=1) - part.amin(dim=1) + part.abs().amax(dim=1) / 50  # the least is rounded too
        else:
            extent = 2 * part.abs().amax(dim=1)
        error = (got[:, start : start + group] - part).abs().amax(dim=1)
        assert bool((error <= 0.51 * extent / steps + 127 * 3e-8).all())
    assert not got[7].any()


@in_each_format
def test_a_large_number_costs_its_own_group_only(format_: WeightFormat) -> None:
    weight = torch.ones(2, 4 * GROUP)
    weight[0, 0] = 1000.0
    got = widened(pack(weight, format_))
    assert torch.allclose(got[0, GROUP:], torch.ones(3 * GROUP), rtol=0.01)
    assert torch.allclose(got[1], torch.ones(4 * GROUP), rtol=0.01)


@in_each_format
def test_many_rows_are_packed_in_parts_to_the_same_numbers(format_: WeightFormat) -> None:
    weight = torch.randn(4096 + 45, 33)
    packed = widened(pack(weight, format_))
    assert torch.equal(packed[4090:], torch.cat([widened(pack(part, format_)) for part in weight[4090:].split(3)]))


@in_each_format
def test_what_is_no_number_in_a_row_of_x_stays_there(format_: WeightFormat) -> None:
    product, x = LinearKernel(pack(torch.randn(40, 96), format_), Team(2)), torch.randn(TILE_ROWS + 3, 96)
    x[2, 40], x[TILE_ROWS, 95] = float("nan"), float("nan")
    finite = torch.isfinite(product(x)).all(dim=1)
    assert finite.tolist() == [row not in (2, TILE_ROWS) for row in range(TILE_ROWS + 3)]


@in_each_format
def test_memory_is_that_of_the_format(format_: WeightFormat) -> None:
    """As start-up counts it (memory/sizing.py), where whole panels and groups are filled."""
    bias = torch.zeros(576)
    kernel = LinearKernel(pack(torch.randn(576, 1536), format_), Team(1), bias)
    assert kernel.num_bytes == 576 * 1536 * NUMBER_BYTES[format_] + bias.nbytes


def test_rows_that_lie_apart_are_read_in_place_and_transposed_input_is_copied() -> None:
    weight, wide, tall = torch.randn(64, 32), torch.randn(5, 96), torch.randn(32, 5)
    product = LinearKernel(weight, Team(1))
    assert torch.equal(product(wide[:, 32:64]), product(wide[:, 32:64].contiguous()))
    assert torch.equal(product(tall.T), product(tall.T.contiguous()))


@in_each_format
def test_no_rows_give_no_rows(format_: WeightFormat) -> None:
    assert LinearKernel(pack(torch.randn(33, 64), format_), Team(2))(torch.zeros(0, 64)).shape == (0, 33)


MULTIPLIED = """
import sys, torch
from replicas.kernels.linear import LinearKernel
from replicas.kernels.panels import pack
from replicas.kernels.team import Team
x = torch.randn(5, 40)
for format_ in sys.argv[1:]:
    weight = pack(torch.randn(33, 40), format_)
    assert torch.allclose(LinearKernel(weight, Team(1))(x), x @ weight.rows(torch.arange(33)).T, atol=1e-4), format_
"""


@pytest.mark.slow
def test_kernels_that_several_processes_compiled_run_together(tmp_path: Path) -> None:
    """Both kept on disk, the second format's kernel called the first one's function, by a symbol that was equal: always
    with one seed of hashes, since numba's symbols have options in the order of a set."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": "0"}
    for formats in (["bfloat16"], ["float16"], ["bfloat16", "float16"]):
        subprocess.run([sys.executable, "-c", MULTIPLIED, *formats], check=True, env=environment)
