"""Products in int8: exact sums of what was rounded, the same bits at every number of rows, on any CPU right answers."""

from collections.abc import Callable

import pytest
import torch
from numba.core import config
from torch import Tensor

from replicas.kernels import int8
from replicas.kernels.int8 import Int8Kernel
from replicas.kernels.int8_tiles import cpu_has_vnni
from replicas.kernels.linear import LinearKernel
from replicas.kernels.panels import pack_int8, round_int8
from replicas.kernels.team import Team
from replicas.kernels.weight_formats import GROUP, group_length
from replicas.layers.linear import Matmul
from tests.rounding import num_groups, round_activations

Make = Callable[[Tensor, Tensor, Tensor | None, Team], Int8Kernel | LinearKernel]

ENABLED = "+avx512bw,+avx512vnni"
needs_vnni = pytest.mark.skipif(not cpu_has_vnni(), reason="this CPU has no AVX-512 VNNI")


def as_bytes(weight: Tensor, scales: Tensor, bias: Tensor | None, team: Team) -> Int8Kernel:
    return Int8Kernel(int8.pack(weight, scales), bias, team)


def widened(weight: Tensor, scales: Tensor, bias: Tensor | None, team: Team) -> LinearKernel:
    return LinearKernel(pack_int8(weight, scales), team, bias, rounds=True)


each_kernel = pytest.mark.parametrize(
    "make", [pytest.param(as_bytes, id="kernel", marks=needs_vnni), pytest.param(widened, id="widened")]
)
SHAPES = [(16, 16), (101, 48), (80, 64), (960, 576), (576, 1536)]  # 101 and 80 outputs do not fill panels of 32


def parts(n: int, k: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rounded weight, its scales, a bias, activations."""
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return weight, torch.rand(n, num_groups(k)).bfloat16(), torch.randn(n), torch.randn(rows, k)


def prepared(weight: Tensor, bias: Tensor | None = None) -> Matmul:
    matmul = Matmul(format_="int8")
    matmul.prepare(lambda: weight, bias)
    return matmul


def ones(n: int, groups: int) -> torch.Tensor:
    return torch.ones(n, groups, dtype=torch.bfloat16)


@each_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_the_kernel_multiplies_what_was_rounded(shape: tuple[int, int], make: Make) -> None:
    weight, scales, bias, x = parts(*shape, 29)
    numbers = weight.double().view(shape[0], num_groups(shape[1]), -1) * scales.unsqueeze(2)
    wanted = round_activations(x, num_groups(shape[1])).double() @ numbers.flatten(1).T + bias
    got = make(weight, scales, bias, Team(1))(x)
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-6


@each_kernel
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [*SHAPES, (48, 72)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_a_row_has_the_same_bits_among_any_others(shape: tuple[int, int], threads: int, make: Make) -> None:
    if make is as_bytes and shape[1] % 16:
        return  # widened on every CPU
    weight, scales, bias, x = parts(*shape, 300)
    product, alone = make(weight, scales, bias, Team(threads)), make(weight, scales, bias, Team(1))
    whole = product(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 64, 253):
        assert torch.equal(product(x[:rows]), whole[:rows])
    assert torch.equal(alone(x[77:78])[0], whole[77])


@needs_vnni
def test_the_largest_numbers_do_not_saturate() -> None:
    weight = torch.full((32, 1536), -127, dtype=torch.int8)
    got = as_bytes(weight, ones(32, 48), None, Team(1))(torch.full((1, 1536), 127.0))
    assert got.tolist() == [[-127.0 * 127 * 1536] * 32]  # 24,774,144: more than fp32 counts one by one


@each_kernel
def test_an_outlier_costs_its_own_group_only(make: Make) -> None:
    """Beside 1,000 a step is 7.9, and 1 rounds to 0; in other groups it stays 1."""
    weight, x = torch.ones(32, 4 * GROUP, dtype=torch.int8), torch.ones(1, 4 * GROUP)
    x[0, 0] = 1000.0
    got = make(weight, ones(32, 4), None, Team(1))(x)
    assert got[0, 0].item() == pytest.approx(1000 + 3 * GROUP)


@each_kernel
def test_a_row_of_zeros_gives_the_bias(make: Make) -> None:
    weight, scales, bias, x = parts(64, 64, 2)
    x[0] = 0.0
    assert torch.equal(make(weight, scales, bias, Team(1))(x)[0], bias)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "widened"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_gives_none(monkeypatch: pytest.MonkeyPatch, kernel: bool, odd: float) -> None:
    """A request whose activations broke ends, as it does in fp32, and does not go on with zeros."""
    if not kernel:
        monkeypatch.setattr(int8, "serves", lambda inputs: False)
    matmul, x = prepared(torch.randn(64, 96)), torch.randn(3, 96)
    x[1, 40] = odd
    assert torch.isfinite(matmul(x)).all(dim=1).tolist() == [True, False, True]
    assert bool(torch.isnan(matmul(x)[1]).all())


def test_a_large_weight_costs_its_own_group_only() -> None:
    """Beside 1,000 a step is 7.9, and 1 rounds to 0; in other groups and other channels it stays 1."""
    weight = torch.ones(2, 4 * GROUP)
    weight[0, 0] = 1000.0
    got = prepared(weight)(torch.ones(1, 4 * GROUP))
    assert got[0].tolist() == pytest.approx([1000 + 3 * GROUP, 4 * GROUP], rel=0.01)


def test_weights_are_rounded_to_within_half_a_step_and_groups_of_zeros_stay() -> None:
    weight = torch.randn(5, 2 * GROUP)
    weight[2, GROUP:] = 0.0
    rounded, scales = round_int8(weight)
    parts, steps = weight.view(5, 2, GROUP), scales.float().unsqueeze(2)
    assert bool(((rounded.view(5, 2, GROUP) * steps - parts).abs() <= steps * 0.50001).all())
    largest = rounded.view(5, 2, GROUP).abs().amax(dim=2)
    assert largest[2].tolist()[1] == 0
    assert 126 <= int(largest[[0, 1, 3, 4]].min()) <= int(largest.max()) <= 127  # bf16 steps: up to 0.8 % longer


def test_activations_are_rounded_to_within_half_a_step() -> None:
    x = torch.randn(3, 2 * GROUP)
    x[1, :GROUP] = 0.0
    parts, rounded = x.view(3, 2, GROUP), round_activations(x, 2).view(3, 2, GROUP)
    steps = parts.abs().amax(dim=2, keepdim=True) / 127
    assert bool(((rounded - parts).abs() <= steps * 0.50001).all())
    counts = rounded / steps.clamp(min=1e-30)
    assert torch.allclose(counts, counts.round(), atol=1e-4)


@needs_vnni
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_a_cpu_without_vnni_multiplies_the_same_rounded_numbers(shape: tuple[int, int]) -> None:
    weight, scales, bias, x = parts(*shape, 40)
    kernel, other = as_bytes(weight, scales, bias, Team(1)), widened(weight, scales, bias, Team(1))
    got, wanted = kernel(x), other(x)
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 2e-6
    ids = torch.tensor([shape[0] - 1, 0, 3])
    assert torch.equal(kernel.rows(ids), other.rows(ids))


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "widened"])
@pytest.mark.parametrize("shape", [(101, 48), (960, 576), (48, 72)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_products_are_near_those_in_fp32_on_every_cpu(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], kernel: bool
) -> None:
    """Steps of 1 / 127 of the largest of a row or group round by a third of a step: 1 % of a typical number."""
    if not kernel:
        monkeypatch.setattr(int8, "serves", lambda inputs: False)
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(40, shape[1])
    matmul = prepared(weight, bias)
    assert isinstance(matmul._kernel, Int8Kernel) == int8.serves(shape[1])
    wanted = x @ weight.T + bias
    assert float((matmul(x) - wanted).std() / wanted.std()) < 0.02
    ids = torch.tensor([0, shape[0] - 1])
    assert float((matmul.rows(ids) - weight[ids]).abs().max()) < 0.02


def test_memory_is_little_more_than_a_quarter_and_the_loaded_weight_is_let_go() -> None:
    bias = torch.zeros(576)
    num_bytes = 576 * 1536 + 2 * 576 * 48 + bias.nbytes  # a byte each, and a scale of two bytes for 32
    matmul = prepared(torch.randn(576, 1536), bias)
    assert matmul.weight is None
    assert matmul.num_bytes == num_bytes
    assert widened(*round_int8(torch.randn(576, 1536)), bias, Team(1)).num_bytes == num_bytes


def test_ranks_that_split_the_outputs_make_the_same_bits_as_one() -> None:
    weight, x = torch.randn(960, 576), torch.randn(9, 576)
    assert torch.equal(prepared(weight[320:640])(x), prepared(weight)(x)[:, 320:640])


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "widened"])
def test_ranks_that_split_the_inputs_round_as_one(monkeypatch: pytest.MonkeyPatch, kernel: bool) -> None:
    """Groups lie within ranks: only the order of the sums differs."""
    if not kernel:
        monkeypatch.setattr(int8, "serves", lambda inputs: False)
    weight, x = torch.randn(576, 1536), torch.randn(9, 1536)
    total = torch.zeros(9, 576)
    for first in range(0, 1536, 512):
        total += prepared(weight[:, first : first + 512])(x[:, first : first + 512])
    wanted = prepared(weight)(x)
    assert float((total - wanted).abs().max() / wanted.abs().max()) < 2e-6


@needs_vnni
def test_kernels_are_those_that_numba_compiles_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment may name less than the CPU has; LLVM would end the process at a missing instruction."""
    for features, ours in ((ENABLED, True), ("+avx2,+fma", False), ("+avx512bw,-avx512vnni", False), ("", False)):
        monkeypatch.setattr(config, "CPU_FEATURES", features)
        assert cpu_has_vnni() == ours
    monkeypatch.setattr(config, "CPU_FEATURES", None)
    monkeypatch.setattr(config, "ENABLE_AVX", 0)
    assert not cpu_has_vnni()


@pytest.mark.parametrize(("inputs", "length"), [(576, 32), (16, 16), (48, 16), (72, 72)])
def test_a_row_is_cut_into_groups_of_32_or_16_or_not_at_all(inputs: int, length: int) -> None:
    assert group_length(inputs) == length
    assert num_groups(inputs) == inputs // length
