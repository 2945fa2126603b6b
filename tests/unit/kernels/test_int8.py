"""Products in int8: exact sums of what was rounded, the same bits at every number of rows, on any CPU right answers."""

import pytest
import torch
from numba.core import config

from replicas.kernels.int8 import Int8Kernel, num_groups, serves
from replicas.kernels.int8_groups import GROUP, group_length
from replicas.kernels.int8_tiles import cpu_has_vnni
from replicas.kernels.team import Team
from replicas.kernels.widened import WidenedKernel
from replicas.layers import int8
from replicas.layers.int8 import Int8Matmul, round_weight
from tests.rounding import round_activations

ENABLED = "+avx512bw,+avx512vnni"
needs_vnni = pytest.mark.skipif(not cpu_has_vnni(), reason="this CPU has no AVX-512 VNNI")
each_kernel = pytest.mark.parametrize(
    "make", [pytest.param(Int8Kernel, id="kernel", marks=needs_vnni), pytest.param(WidenedKernel, id="widened")]
)
Make = type[Int8Kernel] | type[WidenedKernel]
SHAPES = [(16, 16), (101, 48), (80, 64), (960, 576), (576, 1536)]  # 101 and 80 outputs do not fill panels of 32


def parts(n: int, k: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rounded weight, its scales, a bias, activations."""
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return weight, torch.rand(n, num_groups(k)).bfloat16(), torch.randn(n), torch.randn(rows, k)


def ones(n: int, groups: int) -> torch.Tensor:
    return torch.ones(n, groups, dtype=torch.bfloat16)


@each_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_the_kernel_multiplies_what_was_rounded(shape: tuple[int, int], make: Make) -> None:
    weight, scales, bias, x = parts(*shape, 29)
    widened = weight.double().view(shape[0], num_groups(shape[1]), -1) * scales.unsqueeze(2)
    wanted = round_activations(x, num_groups(shape[1])).double() @ widened.flatten(1).T + bias
    got = make(weight, scales, bias, Team(1))(x)
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-6


@each_kernel
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [*SHAPES, (48, 72)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_a_row_has_the_same_bits_among_any_others(shape: tuple[int, int], threads: int, make: Make) -> None:
    if make is Int8Kernel and shape[1] % 16:
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
    got = Int8Kernel(weight, ones(32, 48), None, Team(1))(torch.full((1, 1536), 127.0))
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
        monkeypatch.setattr(int8, "serves", lambda weight: False)
    matmul, x = Int8Matmul(), torch.randn(3, 96)
    matmul.prepare(torch.randn(64, 96), None)
    x[1, 40] = odd
    assert torch.isfinite(matmul(x)).all(dim=1).tolist() == [True, False, True]
    assert bool(torch.isnan(matmul(x)[1]).all())


def test_a_large_weight_costs_its_own_group_only() -> None:
    """Beside 1,000 a step is 7.9, and 1 rounds to 0; in other groups and other channels it stays 1."""
    weight = torch.ones(2, 4 * GROUP)
    weight[0, 0] = 1000.0
    matmul = Int8Matmul()
    matmul.prepare(weight, None)
    got = matmul(torch.ones(1, 4 * GROUP))
    assert got[0].tolist() == pytest.approx([1000 + 3 * GROUP, 4 * GROUP], rel=0.01)


def test_weights_are_rounded_to_within_half_a_step_and_groups_of_zeros_stay() -> None:
    weight = torch.randn(5, 2 * GROUP)
    weight[2, GROUP:] = 0.0
    rounded, scales = round_weight(weight)
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
    kernel, widened = Int8Kernel(weight, scales, bias, Team(1)), WidenedKernel(weight, scales, bias, Team(1))
    got, wanted = kernel(x), widened(x)
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 2e-6
    ids = torch.tensor([shape[0] - 1, 0, 3])
    assert torch.equal(kernel.rows(ids), widened.rows(ids))


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "widened"])
@pytest.mark.parametrize("shape", [(101, 48), (960, 576), (48, 72)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_products_are_near_those_in_fp32_on_every_cpu(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], kernel: bool
) -> None:
    """Steps of 1 / 127 of the largest of a row or group round by a third of a step: 1 % of a typical number."""
    if not kernel:
        monkeypatch.setattr(int8, "serves", lambda weight: False)
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(40, shape[1])
    matmul = Int8Matmul()
    matmul.prepare(weight, bias)
    assert isinstance(matmul.product, Int8Kernel) == (kernel and serves(torch.empty(shape, dtype=torch.int8)))
    wanted = x @ weight.T + bias
    assert float((matmul(x) - wanted).std() / wanted.std()) < 0.02
    ids = torch.tensor([0, shape[0] - 1])
    assert float((matmul.rows(ids) - weight[ids]).abs().max()) < 0.02


def test_memory_is_little_more_than_a_quarter_and_the_loaded_weight_is_let_go() -> None:
    matmul = Int8Matmul()
    matmul.prepare(torch.randn(576, 1536), None)
    num_bytes = 576 * 1536 + 2 * 576 * 48  # a byte each, and a scale of two bytes for 32
    assert matmul.num_bytes == num_bytes + 4 * 576  # a bias of an output channel
    assert WidenedKernel(*round_weight(torch.randn(576, 1536)), None, Team(1)).num_bytes == matmul.num_bytes


def test_ranks_that_split_the_outputs_make_the_same_bits_as_one() -> None:
    weight, x = torch.randn(960, 576), torch.randn(9, 576)
    whole, part = Int8Matmul(), Int8Matmul()
    whole.prepare(weight, None)
    part.prepare(weight[320:640], None)
    assert torch.equal(part(x), whole(x)[:, 320:640])


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "widened"])
def test_ranks_that_split_the_inputs_round_as_one(monkeypatch: pytest.MonkeyPatch, kernel: bool) -> None:
    """Groups lie within ranks: only the order of the sums differs."""
    if not kernel:
        monkeypatch.setattr(int8, "serves", lambda weight: False)
    weight, x = torch.randn(576, 1536), torch.randn(9, 1536)
    whole, total = Int8Matmul(), torch.zeros(9, 576)
    whole.prepare(weight, None)
    for first in range(0, 1536, 512):
        part = Int8Matmul()
        part.prepare(weight[:, first : first + 512], None)
        total += part(x[:, first : first + 512])
    wanted = whole(x)
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
