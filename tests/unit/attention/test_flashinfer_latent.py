"""What FlashInfer's wrapper for latent vectors is given, by a stand-in that computes what its documentation says."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from replicas.attention.base import AttentionSpec
from replicas.attention.choice import make_attention
from replicas.attention.registry import NO_LATENT
from replicas.attention.torch_native import TorchNativeAttention
from replicas.config import AttentionKind
from replicas.errors import InvalidConfig
from tests.attention_steps import Step, make_step


class Wrapper:
    """BatchMLAPagedAttentionWrapper: q_nope [T, H, 512], q_pe [T, H, 64], pages [P, page_size, 512] and [.., 64]."""

    def __init__(self, workspace: Tensor) -> None:
        assert (workspace.dtype, workspace.numel()) == (torch.uint8, 128 << 20)

    def plan(
        self, bounds: Tensor, indptr: Tensor, indices: Tensor, lens: Tensor, heads: int, ckv: int, kpe: int,
        page_size: int, causal: bool, scale: float, q_dtype: torch.dtype, kv_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        assert (ckv, kpe, causal, q_dtype, kv_dtype) == (512, 64, True, torch.bfloat16, torch.bfloat16)
        assert all(x.dtype == torch.int32 for x in (bounds, indptr, indices, lens))
        self.bounds, self.indptr, self.indices, self.lens = bounds, indptr, indices, lens
        self.heads, self.page_size, self.scale = heads, page_size, scale

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor) -> Tensor:
        assert (q_nope.shape[1:], q_pe.shape[1:]) == ((self.heads, 512), (self.heads, 64))
        assert (ckv.shape[1:], kpe.shape[1:]) == ((self.page_size, 512), (self.page_size, 64))
        out = torch.empty(q_nope.shape)
        for b, length in enumerate(self.lens.tolist()):
            own = self.indices[int(self.indptr[b]) : int(self.indptr[b + 1])].long()
            latent, rope = (pages[own].flatten(0, 1)[:length].float() for pages in (ckv, kpe))
            span = slice(int(self.bounds[b]), int(self.bounds[b + 1]))
            scores = torch.einsum("thd,nd->htn", q_nope[span].float(), latent)
            scores = (scores + torch.einsum("thd,nd->htn", q_pe[span].float(), rope)) * self.scale
            seen = torch.arange(length) <= torch.arange(length)[length - scores.shape[1] :].unsqueeze(1)
            out[span] = torch.einsum("htn,nd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), latent)
        return out.to(q_nope.dtype)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    module.BatchMLAPagedAttentionWrapper = package.mla = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    monkeypatch.delitem(sys.modules, "replicas.attention.flashinfer_mla", raising=False)


def step() -> Step:
    made = make_step(
        [(0, 5), (33, 4), (40, 1), (16, 1)], num_heads=4, num_kv_heads=1, head_dim=576, kv_dtype="bfloat16",
        kv_lora_rank=512, num_decode=2,
    )  # fmt: skip
    made.q, made.k, made.v = (x.to(torch.bfloat16) for x in (made.q, made.k, made.v))
    return made


@pytest.mark.usefixtures("stand_in")
def test_a_mixed_step_is_that_of_the_plain_backend() -> None:
    from replicas.attention.flashinfer_mla import FlashInferLatentAttention

    made = step()
    backend: Any = FlashInferLatentAttention(made.pool, dtype=torch.bfloat16, num_heads=4, scale=0.07)
    plain = TorchNativeAttention(made.pool, (AttentionKind(scale=0.07),))
    for each in (backend, plain):
        each.begin(made.batch)
    ours, wanted = (each.forward(0, made.q, made.k, made.v) for each in (backend, plain))
    torch.testing.assert_close(ours, wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("stand_in")
def test_vectors_that_its_kernels_do_not_know_are_refused() -> None:
    from replicas.attention.flashinfer_mla import why_not

    tiny = make_step([(3, 1)], num_heads=4, num_kv_heads=1, head_dim=48, kv_dtype="bfloat16", kv_lora_rank=32)
    reason = "knows latent vectors of (512, 64) numbers, this model's are of (32, 16)"
    assert why_not(tiny.pool, dtype=torch.bfloat16) == reason
    assert why_not(step().pool, dtype=torch.bfloat16) is None
    assert str(why_not(step().pool, dtype=torch.float16)).startswith("wants model and latent vectors in bfloat16")


def test_triton_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pool: Any = step().pool
    monkeypatch.setattr("replicas.attention.choice.missing", lambda package: None)
    monkeypatch.setattr(pool, "device", torch.device("meta"))
    spec = AttentionSpec(pool=pool, dtype=torch.bfloat16, num_heads=4, num_kv_heads=1, head_dim=576)
    with pytest.raises(InvalidConfig, match=NO_LATENT):
        make_attention("triton", spec)
