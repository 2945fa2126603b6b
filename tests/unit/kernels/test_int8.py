"""Products in int8: exact sums of what was rounded, the same bits at every number of rows, on any CPU right answers."""

import pytest
import torch

from replicas.kernels.int8 import GROUP, Int8Kernel, num_groups, serves
from replicas.kernels.int8_tiles import cpu_has_vnni
from replicas.kernels.team import Team
from replicas.layers import int8
from replicas.layers.int8 import Int8Matmul, WidenedInt8, round_rows

needs_vnni = pytest.mark.skipif(not cpu_has_vnni(), reason="this CPU has no AVX-512 VNNI")
SHAPES = [(16, 16), (101, 48), (80, 64), (960, 576), (576, 1536)]  # 101 and 80 outputs do not fill panels of 32


def parts(n: int, k: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return weight, torch.rand(n), torch.randn(n), torch.randn(rows, k)


@needs_vnni
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_the_kernel_multiplies_what_was_rounded(shape: tuple[int, int]) -> None:
    weight, scales, bias, x = parts(*shape, 29)
    groups = x.view(29, num_groups(shape[1]), -1)
    steps = groups.abs().amax(dim=2, keepdim=True) / 127
    rounded = ((groups / steps).round() * steps).view(x.shape)
    wanted = (rounded.double() @ weight.double().T) * scales + bias
    got = Int8Kernel(weight, scales, bias, Team(1))(x)
    assert float((got - wanted).abs().max() / wanted.abs().max()) < 1e-6


@needs_vnni
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_a_row_has_the_same_bits_among_any_others(shape: tuple[int, int], threads: int) -> None:
    weight, scales, bias, x = parts(*shape, 300)
    product, alone = Int8Kernel(weight, scales, bias, Team(threads)), Int8Kernel(weight, scales, bias, Team(1))
    whole = product(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 64, 253):
        assert torch.equal(product(x[:rows]), whole[:rows])
    assert torch.equal(alone(x[77:78])[0], whole[77])


@needs_vnni
def test_the_largest_numbers_do_not_saturate() -> None:
    weight = torch.full((32, 1536), -127, dtype=torch.int8)
    got = Int8Kernel(weight, torch.ones(32), None, Team(1))(torch.full((1, 1536), 127.0))
    assert got.tolist() == [[-127.0 * 127 * 1536] * 32]  # 24,774,144: more than fp32 counts one by one


@needs_vnni
def test_an_outlier_costs_its_own_group_only() -> None:
    """Beside 1,000 a step is 7.9, and 1 rounds to 0; in other groups it stays 1."""
    weight, x = torch.ones(32, 4 * GROUP, dtype=torch.int8), torch.ones(1, 4 * GROUP)
    x[0, 0] = 1000.0
    got = Int8Kernel(weight, torch.ones(32), None, Team(1))(x)
    assert got[0, 0].item() == pytest.approx(1000 + 3 * GROUP)


@needs_vnni
def test_a_row_of_zeros_gives_the_bias() -> None:
    weight, scales, bias, x = parts(64, 64, 2)
    x[0] = 0.0
    assert torch.equal(Int8Kernel(weight, scales, bias, Team(1))(x)[0], bias)


def test_weights_are_rounded_to_within_half_a_step_and_rows_of_zeros_stay() -> None:
    weight = torch.randn(5, 64)
    weight[2] = 0.0
    rounded, scales = round_rows(weight)
    assert float(((rounded.float() * scales.unsqueeze(1)) - weight).abs().max()) <= float(scales.max()) / 2 * 1.0001
    assert rounded.abs().amax(dim=1).tolist() == [127, 127, 0, 127, 127]


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


@needs_vnni
def test_memory_is_a_quarter_and_the_loaded_weight_is_let_go() -> None:
    matmul = Int8Matmul()
    matmul.prepare(torch.randn(576, 1536), None)
    assert matmul.num_bytes == 576 * 1536 + 2 * 4 * 576  # a byte each; scale and bias of an output channel
    assert WidenedInt8(*round_rows(torch.randn(576, 1536)), None).num_bytes == 576 * 1536 + 4 * 576


@needs_vnni
def test_ranks_that_split_the_outputs_make_the_same_bits_as_one() -> None:
    weight, x = torch.randn(960, 576), torch.randn(9, 576)
    whole, part = Int8Matmul(), Int8Matmul()
    whole.prepare(weight, None)
    part.prepare(weight[320:640], None)
    assert torch.equal(part(x), whole(x)[:, 320:640])
