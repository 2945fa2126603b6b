"""FlashInfer's wrappers as its documentation has them, computed in PyTorch: plan, then run over pages.

What they are given is checked as FlashInfer 0.6.13 and 0.7.2 want it: numbers of requests on the host, page numbers,
workspaces and queries on the device, in the dtypes and with the strides that the kernels read.

Owns:      CALLS, which its users clear.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import fake_cuda

CALLS: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = []  # class, method, arguments of every call
BACKENDS = ("auto", "fa2", "fa3")


class _Wrapper:
    name = ""
    held: tuple[Tensor, ...] | None = None

    def __init__(self, workspace: Tensor, kv_layout: str, **options: Any) -> None:
        CALLS.append((self.name, "__init__", (workspace, kv_layout), options))
        self._staged = torch.empty(1 << 16, dtype=torch.int32, pin_memory=workspace.is_cuda)  # of plans
        assert kv_layout == "HND"
        assert workspace.dtype == torch.uint8
        assert options.get("backend", "auto") in BACKENDS
        self.device, self.options = workspace.device, options
        for name, buffer in options.items():
            if isinstance(buffer, Tensor):
                self.require(buffer, torch.int32, name)

    def require(self, x: Tensor, dtype: torch.dtype, what: str, *, on_host: bool = False) -> None:
        where = torch.device("cpu") if on_host else self.device
        assert x.dtype == dtype, f"{what} is {x.dtype}, {dtype} is wanted"
        assert x.device == where, f"{what} is on {x.device}, {where} is wanted"
        assert x.is_contiguous(), f"{what} has strides {x.stride()}"

    def planned(self, bounds: Tensor, pages: tuple[Tensor, ...], shape: tuple[int, ...], options: Any) -> None:
        """``pages``: indptr, indices, last_page_len; ``shape``: H, K, D, page_size."""
        self.indptr, self.indices, self.last = pages
        for name, x in (("qo_indptr", bounds), ("indptr", self.indptr), ("last_page_len", self.last)):
            self.require(x, torch.int32, name, on_host=True)
        self.require(self.indices, torch.int32, "indices")
        assert len(bounds) == len(self.indptr) == len(self.last) + 1
        assert len(self.indices) == int(self.indptr[-1])
        assert options["q_data_type"] in (torch.float16, torch.bfloat16)
        self.kv_dtype = options["kv_data_type"]
        assert self.kv_dtype in (options["q_data_type"], torch.float8_e4m3fn)
        assert self.options.get("backend") != "fa3" or self.kv_dtype == options["q_data_type"]
        assert all(1 <= int(n) <= shape[3] for n in self.last)
        plan = torch.cat((bounds, self.indptr, self.last))  # as FlashInfer's planner stages what it has made of these
        self._staged[: len(plan)] = plan
        there = torch.empty(len(plan), dtype=torch.int32, device=self.device)
        there.copy_(self._staged[: len(plan)], non_blocking=True)
        self.bounds, self.shape, self.dtype = bounds, shape, options["q_data_type"]
        self.kind = {name: options.get(name) for name in ("sm_scale", "window_left", "logits_soft_cap")}

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], **options: Any) -> Any:
        CALLS.append((self.name, "run", (q, kv), options))
        num_heads, num_kv_heads, head_dim, page_size = self.shape
        assert q.device == kv[0].device == kv[1].device == self.device
        assert q.dtype == self.dtype
        assert kv[0].dtype == kv[1].dtype == self.kv_dtype
        scales = options.get("k_scale", 1.0), options.get("v_scale", 1.0)
        assert q.shape == (int(self.bounds[-1]), num_heads, head_dim)
        assert q.stride()[1:] == (head_dim, 1), "heads lie in a row"
        assert kv[0].shape[1:] == kv[1].shape[1:] == (num_kv_heads, page_size, head_dim)
        assert kv[0].stride() == kv[1].stride(), "one stride between pages for K and V"
        assert kv[0].stride()[1:] == (page_size * head_dim, head_dim, 1)
        out = options.get("out")
        if out is None:
            out = torch.empty_like(q)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)

        def compute() -> None:
            lists = self.held or (self.indptr, self.indices, self.last)
            indptr, indices, last = (fake_cuda.plain(x) for x in lists)
            for b in range(len(last)):
                pages = indices[int(indptr[b]) : int(indptr[b + 1])].long()
                length = (len(pages) - 1) * page_size + int(last[b])
                read = (x.float()[pages].transpose(1, 2).flatten(0, 1)[:length] for x in kv)
                k, v = (x * scale for x, scale in zip(read, scales, strict=True))  # [n, K, D]
                span = slice(int(self.bounds[b]), int(self.bounds[b + 1]))
                out[span] = _attend(q[span].float(), k, v, causal=self.causal, **self.kind)

        fake_cuda.FAKE.kernel(compute)  # of the plan at the time of a replay
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"
    causal = False
    compiled = False

    def plan(self, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **options: Any) -> None:
        CALLS.append((self.name, "plan", (indptr, indices, last, *shape), options))
        self.compiled = True
        self.plan_on_host(indptr, indices, last, shape, options)
        if self.held is not None:
            for buffer, x in zip(self.held, (indptr, indices, last), strict=True):
                buffer[: len(x)].copy_(x)

    def plan_on_host(self, indptr: Tensor, indices: Tensor, last: Tensor, shape: tuple[int, ...], options: Any) -> None:
        if self.held is not None:
            assert len(last) == len(self.held[2]) == len(self.held[0]) - 1
            assert len(indices) <= len(self.held[1])
        bounds = torch.arange(len(last) + 1, dtype=torch.int32)
        self.planned(bounds, (indptr, indices, last), shape, options)

    @property
    def held(self) -> tuple[Tensor, ...] | None:
        """What a captured step reads in place of what it was planned with: indptr, indices, last_page_len."""
        if not self.options.get("use_cuda_graph"):
            return None
        return tuple(self.options[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len"))


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int,
    **options: Any,
) -> None:  # fmt: skip
    """`plan` of a wrapper that was planned before, which writes no buffer of a graph: its user does."""
    CALLS.append(("fast_decode_plan", "", (wrapper, indptr, indices, last, *shape), options))
    assert wrapper.compiled, "`plan` chooses the kernels"
    wrapper.plan_on_host(indptr, indices, last, shape, options)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    name = "BatchPrefillWithPagedKVCacheWrapper"

    def plan(self, bounds: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **options: Any) -> None:
        CALLS.append((self.name, "plan", (bounds, indptr, indices, last, *shape), options))
        self.planned(bounds, (indptr, indices, last), shape, options)
        self.causal = options["causal"]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float | None, window_left: int | None,
    logits_soft_cap: float | None,
) -> Tensor:
    """q [E, H, D], k and v [n, K, D] -> [E, H, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    score = torch.einsum("ehd,nhd->ehn", q, k) * (q.shape[2] ** -0.5 if sm_scale is None else sm_scale)
    if logits_soft_cap:
        score = logits_soft_cap * torch.tanh(score / logits_soft_cap)
    position = torch.arange(len(k), device=k.device)
    if window_left is not None and window_left >= 0:
        unseen = position < position[len(k) - len(q) :, None] - window_left
        score = score.masked_fill(unseen[:, None], -torch.inf)
    if causal:
        score = score.masked_fill((position > position[len(k) - len(q) :, None])[:, None], -torch.inf)
    return torch.einsum("ehn,nhd->ehd", score.softmax(-1), v)


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """replicas/attention/flashinfer.py, imported anew over this module, with a small workspace."""
    stand_in = ModuleType("flashinfer")
    for thing in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, fast_decode_plan):
        setattr(stand_in, thing.__name__, thing)
    name = "replicas.attention.flashinfer"
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.setitem(sys.modules, name, stand_in)  # so that what was there, or nothing, is there again in the end
    del sys.modules[name]
    module = importlib.import_module(name)
    monkeypatch.setattr(module, "workspace_bytes", lambda **shape: 1 << 10)
    CALLS.clear()
    return module
