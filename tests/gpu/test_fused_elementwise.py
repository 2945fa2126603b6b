"""The operations between the matrix products in one launch each: PyTorch's numbers in fewer launches.
Compiled on a GPU, interpreted on a CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.attention.base import HeadTurn
from replicas.kernels import gpu as fused
from replicas.kernels import triton_rows
from replicas.layers import linear
from replicas.layers.embedding import Rotation
from replicas.scheduler.plan import idle_decode
from tests.gpu import fake_cuda
from tests.gpu.device_steps import DEVICE, device_step
from tests.gpu.fake_cuda import Launches
from tests.gpu.rigs import engine_config, make_rig
from tests.gpu.triton_or_skip import triton_paged
from tests.numerics import tiny

DTYPES = [pytest.param(torch.float32, 1e-5, id="fp32"), pytest.param(torch.float16, 4e-3, id="fp16")]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(fused, "kernels", lambda: triton_rows)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize(("dtype", "allowed"), DTYPES)
@pytest.mark.parametrize("size", [80, 576])
def test_a_term_is_added_to_the_residual_and_the_sum_normalised(dtype: torch.dtype, allowed: float, size: int) -> None:
    x, term, weight = randn(5, size, dtype=dtype), randn(5, size, dtype=dtype) * 3, randn(size, dtype=dtype)
    total = x + term
    for given, before, after in ((term, x.clone(), total), (None, x.clone(), x)):
        made = fused.add_rms_norm(before, given, weight, 1e-5)
        assert torch.equal(before, after)
        assert float((made - F.rms_norm(after, (size,), weight, 1e-5)).abs().max()) < allowed * 4


@pytest.mark.parametrize(("dtype", "allowed"), DTYPES)
def test_silu_times_up_is_pytorchs(dtype: torch.dtype, allowed: float) -> None:
    """1,536 columns a half are more than a program's block."""
    gate_up = randn(3, 3072, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    assert float((fused.silu_mul(gate_up) - F.silu(gate) * up).abs().max()) < allowed * 4
    assert fused.silu_mul(gate_up[:0]).shape == (0, 1536)


@pytest.mark.parametrize("norms", [False, True], ids=["llama", "qwen3"])
@pytest.mark.parametrize("head_dim", [16, 48])
def test_heads_are_turned_and_stored_as_rotation_and_store_do_it(head_dim: int, norms: bool) -> None:
    """7 tokens of 6 query and 2 KV heads; q and k are parts of one product, as the model's are."""
    step = device_step([(3, 4), (20, 3)], num_heads=6, num_kv_heads=2, head_dim=head_dim, page_size=4, num_layers=2)
    q, k, v, slots = step.q, step.k, step.v, step.batch.out_slots
    cos, sin = (randn(7, 1, head_dim // 2, dtype=torch.float32) for _ in range(2))
    rotation = Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    weights = randn(2, head_dim, dtype=torch.float32)
    turn = HeadTurn(rotation.cos, rotation.sin, (weights[0], weights[1], 1e-6) if norms else None)
    of_q, of_k = q, k
    if norms:
        of_q, of_k = (F.rms_norm(x, (head_dim,), w, 1e-6) for x, w in zip((q, k), weights, strict=True))
    wanted_q, wanted_k = ((x * rotation.cos) + x.roll(head_dim // 2, -1) * rotation.sin for x in (of_q, of_k))
    before = step.pool.data.clone()
    step.pool.set_kv_buffer(1, slots, wanted_k, v)
    wanted = step.pool.data.clone()
    step.pool.data.copy_(before)
    triton_paged.store_kv(q, k, v, step.pool, 1, slots, turn)
    assert float((q - wanted_q).abs().max()) < 1e-5
    assert float((step.pool.data - wanted).abs().max()) < 1e-5


def test_the_mlp_of_an_8b_model_is_one_launch_between_its_products(gpu: fake_cuda.FakeCuda | None) -> None:
    """28,672 columns, more than a program of `add_rms_norm` may hold."""
    if gpu is None:
        pytest.skip("a real device's launches are counted by nsys (docs/gpu.md)")
    gate_up, before = torch.zeros(1, 2 * 14_336, device="cuda"), gpu.kernels
    with Launches() as seen:
        linear.silu_mul(gate_up)
    assert len(seen.names) + gpu.kernels - before == 1


def test_a_layer_of_a_decode_step_is_ten_launches(
    tmp_path: Path, gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norm, product, norms, turn and store, attention and merge, product, add and norm, product, SiLU x up, product.
    Counted as what a second layer adds; queries and keys have norms too, as Qwen3's."""
    if gpu is None:
        pytest.skip("a real device's launches are counted by nsys (docs/gpu.md)")

    def launches(layers: int) -> int:
        folder = tmp_path / f"{layers}"
        tiny.save("qwen3-tied", folder, num_hidden_layers=layers)
        rig = make_rig(replace(engine_config(folder, "cuda"), cuda_graphs=False))
        plan, before = idle_decode(2), gpu.kernels
        with Launches() as seen:
            rig.runner.forward(plan)
        return len(seen.names) + gpu.kernels - before

    assert launches(2) - launches(1) == 10
    monkeypatch.setattr(fused, "serves", lambda x, **_: False)
    monkeypatch.setattr("replicas.runner.model_runner._LateAttention.rotates", False)
    assert launches(2) - launches(1) == 21
