"""The one product of all layers: which kernel multiplies by a weight, and what is kept of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.kernels import bf16_tiles, int8
from replicas.kernels.int8 import Int8Kernel
from replicas.kernels.linear import LinearKernel
from replicas.kernels.panels import pack
from replicas.layers.linear import Matmul

SHAPES = [(960, 576), (72, 1536), (30, 25)]  # 30 and 72 outputs do not fill panels of 32; 25 inputs are no vectors


def prepared(weight: Tensor, bias: Tensor | None = None, *, of: Matmul | None = None) -> Matmul:
    matmul = of or Matmul()
    matmul.prepare(lambda: weight, bias)
    return matmul


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_it_is_pytorchs_product_within_rounding_whatever_the_shape(rows: int, shape: tuple[int, int]) -> None:
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(rows, shape[1])
    assert torch.allclose(prepared(weight, bias)(x), F.linear(x, weight, bias), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_in_the_checkpoints_dtype_is_packed_in_the_models(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 activations by fp32 of the checkpoint's numbers, or by those rounded to the model's dtype."""
    monkeypatch.setattr(bf16_tiles, "way", lambda: None)
    weight, x = torch.randn(48, 32).to(dtype), torch.randn(3, 32)
    assert torch.equal(prepared(weight)(x), prepared(weight.float())(x))
    assert torch.equal(prepared(weight.float(), of=Matmul(format_="bfloat16"))(x), prepared(weight.bfloat16())(x))


def test_a_weight_in_panels_is_not_read_and_lies_nowhere_else() -> None:
    """Panels that are kept, by another replica of the host for example, are all that a product needs."""
    weight, x = torch.randn(64, 32), torch.randn(3, 32)
    panels, read = pack(weight, "float32"), list[Tensor]()

    def must_not() -> Tensor:
        read.append(weight)
        return weight

    ours = Matmul()
    ours.prepare(must_not, None, lambda make: panels)
    assert torch.equal(ours(x), prepared(weight)(x))
    assert (ours.weight, ours.num_bytes, ours.shape, read) == (None, panels.nbytes, (64, 32), [])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_our_product_has_the_same_bits_in_steps_of_any_number_of_rows(shape: tuple[int, int]) -> None:
    matmul, x = prepared(torch.randn(shape), torch.randn(shape[0])), torch.randn(700, shape[1])
    whole = matmul(x)
    for rows in (1, 5, 63, 64, 200):
        assert torch.equal(matmul(x[:rows]), whole[:rows])


@pytest.mark.parametrize("serves", [True, False], ids=["bytes", "widened"])
def test_int8_is_multiplied_as_bytes_where_the_cpu_can(monkeypatch: pytest.MonkeyPatch, serves: bool) -> None:
    monkeypatch.setattr(int8, "serves", lambda inputs: serves)
    kernel = prepared(torch.randn(64, 96), of=Matmul(format_="int8"))._kernel
    assert type(kernel) is (Int8Kernel if serves else LinearKernel)


def test_a_gpus_weight_is_kept_as_pytorch_multiplies_by_it() -> None:
    weight, bias, x = torch.randn(30, 32).bfloat16(), torch.randn(30).bfloat16(), torch.randn(3, 32).bfloat16()
    matmul = Matmul(format_="bfloat16")
    matmul.keep(weight, bias)
    assert torch.equal(matmul(x), F.linear(x, weight, bias))
    assert (matmul.in_program, matmul.shape, matmul.num_bytes) == (False, (30, 32), weight.nbytes + bias.nbytes)


def test_no_rows_give_no_rows() -> None:
    assert prepared(torch.randn(32, 64))(torch.zeros(0, 64)).shape == (0, 32)
