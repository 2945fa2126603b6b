"""What the FlashInfer backend asks of FlashInfer, answered by a stand-in that computes it in PyTorch; the real
library's signatures are held against the same calls where it is installed. On a GPU with the library, its kernels run.
"""

import importlib.util
import inspect
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from replicas.attention import registry
from replicas.errors import InvalidConfig
from replicas.memory.pool import MHATokenToKVPool
from tests.attention_steps import Step
from tests.gpu.device_steps import DEVICE, device_step, error, share
from tests.gpu.triton_or_skip import triton_paged  # with one of whose kernels the backend stores K and V

REAL = importlib.util.find_spec("flashinfer") is not None
CALLS: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = []  # class, method, arguments of every call


class _Wrapper:
    """FlashInfer's wrappers as their documentation has them: plan, then run over pages [P, K, page_size, D]."""

    name = ""

    def __init__(self, workspace: Tensor, kv_layout: str, **options: Any) -> None:
        CALLS.append((self.name, "__init__", (workspace, kv_layout), options))
        assert kv_layout == "HND"
        self.options = options

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], **options: Any) -> Any:
        CALLS.append((self.name, "run", (q, kv), options))
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)  # [T, H, D], [T, H]
        for b in range(len(self.last)):
            pages = self.indices[self.indptr[b] : self.indptr[b + 1]].long()
            length = (len(pages) - 1) * self.page_size + int(self.last[b])
            k, v = (x[pages].transpose(1, 2).flatten(0, 1)[:length].float() for x in kv)  # [n, K, D]
            span = slice(int(self.bounds[b]), int(self.bounds[b + 1]))
            out[span], lse[span] = _attend(q[span].float(), k, v, causal=self.causal)
        if options.get("out") is not None:
            options["out"].copy_(out)
            out = options["out"]
        return (out, lse) if options.get("return_lse") else out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"

    def plan(self, indptr: Tensor, indices: Tensor, last: Tensor, *rest: Any, **options: Any) -> None:
        CALLS.append((self.name, "plan", (indptr, indices, last, *rest), options))
        self.indptr, self.indices, self.last, self.page_size = indptr, indices, last, rest[3]
        self.bounds, self.causal = torch.arange(len(last) + 1), False
        if self.options.get("use_cuda_graph"):
            assert len(last) == len(self.options["paged_kv_last_page_len_buffer"])
            assert len(indices) <= len(self.options["paged_kv_indices_buffer"])


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    name = "BatchPrefillWithPagedKVCacheWrapper"

    def plan(
        self, bounds: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, *rest: Any, **options: Any
    ) -> None:
        CALLS.append((self.name, "plan", (bounds, indptr, indices, last, *rest), options))
        self.bounds, self.indptr, self.indices, self.last, self.page_size = bounds, indptr, indices, last, rest[3]
        self.causal = options["causal"]


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    CALLS.append(("merge_state", "", (v_a, s_a, v_b, s_b), {}))
    both = torch.stack((s_a, s_b)) * math.log(2)
    weights = torch.softmax(both, dim=0)[..., None]
    return (weights[0] * v_a + weights[1] * v_b).to(v_a.dtype), both.logsumexp(0) / math.log(2)


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """q [E, H, D], k and v [n, K, D] -> [E, H, D] and the base-2 logarithms of the sums of weights [E, H]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    score = torch.einsum("ehd,nhd->ehn", q, k) / q.shape[2] ** 0.5
    if causal:
        position = torch.arange(len(k), device=k.device)
        score = score.masked_fill((position > position[len(k) - len(q) :, None])[:, None], -torch.inf)
    return torch.einsum("ehn,nhd->ehd", score.softmax(-1), v), score.logsumexp(-1) / math.log(2)


@pytest.fixture
def flashinfer_attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """replicas/attention/flashinfer.py over the real library on a GPU, else over the stand-in."""
    name = "replicas.attention.flashinfer"
    if DEVICE == "cpu" or not REAL:
        stand_in = ModuleType("flashinfer")
        for thing in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, merge_state):
            setattr(stand_in, thing.__name__, thing)
        monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    if DEVICE == "cpu":
        monkeypatch.setattr(module, "workspace_bytes", lambda **shape: 1 << 10)
    CALLS.clear()
    yield module
    sys.modules.pop(name, None)


def backend(module: Any, step: Step) -> Any:
    return module.FlashInferAttention(
        step.pool, dtype=step.q.dtype, num_heads=step.q.shape[1], num_kv_heads=step.k.shape[1], head_dim=step.q.shape[2]
    )


def half_step(lengths: list[tuple[int, int]], **changes: Any) -> Step:
    shape = {"dtype": torch.float16, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    return device_step(lengths, **{**shape, **changes})


ALLOWED = 4e-3  # fp16


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float16, ALLOWED), (torch.bfloat16, 3e-2)], ids=["fp16", "bf16"])
@pytest.mark.parametrize("heads", [(9, 3), (8, 2), (14, 2)], ids=lambda h: f"{h[0]}q{h[1]}kv")
def test_decode_extend_and_a_group_equal_the_oracle(
    flashinfer_attention: Any, heads: tuple[int, int], dtype: torch.dtype, allowed: float, page_size: int
) -> None:
    """Both decode kernels of FlashInfer: 3 query heads a KV head, and 4 and 7, for which tensor cores decode."""
    shape = {"dtype": dtype, "num_heads": heads[0], "num_kv_heads": heads[1], "page_size": page_size}
    for lengths in ([(0, 1), (1, 1), (16, 1), (70, 1)], [(0, 9), (33, 20), (16, 1)]):
        step = half_step(lengths, **shape)
        assert error(backend(flashinfer_attention, step), step) < allowed
    step = half_step([(40, 1), (3, 1), (33, 1)], **shape)
    share(step, [0, 2], 32, num_decode=3)
    assert error(backend(flashinfer_attention, step), step) < allowed


def test_a_mixed_step_with_a_group_equals_the_oracle(flashinfer_attention: Any) -> None:
    """One request extends; four decode, of which two share 32 keys."""
    step = half_step([(30, 9), (40, 1), (33, 1), (60, 1), (3, 1)])
    share(step, [1, 3], 32, num_decode=4)
    assert error(backend(flashinfer_attention, step), step) < ALLOWED


def test_a_step_for_a_graph_takes_the_wrapper_of_its_size_and_leaves_groups_out(flashinfer_attention: Any) -> None:
    step = half_step([(40, 1), (40, 1), (9, 1)])
    share(step, [0, 1], 32, num_decode=3)
    attention = backend(flashinfer_attention, step)
    attention.begin_graph(step.batch)
    first = attention.forward(0, step.q, step.k, step.v)
    attention.begin_graph(step.batch)
    again = attention.forward(0, step.q, step.k, step.v)
    assert torch.equal(first, again)
    attention.begin(step.batch)
    assert float((attention.forward(0, step.q, step.k, step.v) - first).abs().max()) < ALLOWED
    if DEVICE == "cpu":
        assert sum(method == "__init__" and "use_cuda_graph" in options for _, method, _, options in CALLS) == 1


def test_it_says_which_pools_it_does_not_know(flashinfer_attention: Any) -> None:
    why_not = flashinfer_attention.why_not
    half, full = torch.bfloat16, torch.float32
    assert why_not(half, dtype=half, head_dim=128) is None
    assert why_not(full, dtype=full, head_dim=128) == "knows K and V in bfloat16 and float16, not float32"
    assert why_not(half, dtype=full, head_dim=128) == (
        "wants queries in the dtype of K and V, which is bfloat16, not in float32"
    )
    assert why_not(half, dtype=half, head_dim=80) == "knows heads of 64, 128, 256 dimensions, not 80"


def test_auto_takes_triton_where_flashinfer_fails_in_its_trial_step(
    flashinfer_attention: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial is a mixed step with a group, so that every kernel and the merge is there before the first request."""
    pool = MHATokenToKVPool(2, 4, 1, 2, 64, torch.float16, DEVICE)
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    chosen = registry._flashinfer_if_it_runs(pool, torch.float16, shape, 0)
    assert isinstance(chosen, flashinfer_attention.FlashInferAttention)
    if DEVICE == "cpu":
        assert [method for _, method, _, _ in CALLS].count("run") == 3
        assert CALLS[-1][0] == "merge_state"

    def no_compiler(self: object, batch: object) -> None:
        raise RuntimeError("nvcc is not there")

    monkeypatch.setattr(flashinfer_attention.FlashInferAttention, "begin", no_compiler)
    chosen = registry._flashinfer_if_it_runs(pool, torch.float16, shape, 0)
    assert isinstance(chosen, triton_paged.TritonAttention)
    assert "triton, since flashinfer failed in a trial step: RuntimeError: nvcc is not there" in caplog.text


def test_a_pool_on_a_cpu_is_refused() -> None:
    pool = MHATokenToKVPool(2, 4, 1, 2, 64, torch.float16, "cpu")
    for name in ("flashinfer", "triton"):
        with pytest.raises(InvalidConfig, match=f"{name} runs on a GPU"):
            registry.make_attention(
                name, pool, dtype=torch.float16, num_heads=8, num_kv_heads=2, head_dim=64, num_threads=1
            )


@pytest.mark.skipif(not REAL, reason="flashinfer is not installed; its signatures cannot be held against our calls")
@pytest.mark.skipif(DEVICE == "cuda", reason="the real library answers the other tests here")
def test_every_call_fits_the_real_librarys_signature(
    flashinfer_attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = half_step([(30, 9), (40, 1), (33, 1), (60, 1)])
    share(step, [1, 3], 32, num_decode=3)
    attention = backend(flashinfer_attention, step)
    attention.begin(step.batch)
    attention.forward(0, step.q, step.k, step.v)
    decode = half_step([(40, 1), (9, 1)])
    attention = backend(flashinfer_attention, decode)
    attention.begin_graph(decode.batch)
    attention.forward(0, decode.q, decode.k, decode.v)
    calls = list(CALLS)
    monkeypatch.delitem(sys.modules, "flashinfer")
    real = importlib.import_module("flashinfer")
    for name, method, arguments, options in calls:
        thing = getattr(real, name)
        if not method:
            inspect.signature(thing).bind(*arguments, **options)
            continue
        function = getattr(thing, method)
        if method == "plan":  # newer ones hide their names behind **kwargs
            function = getattr(thing, "_plan_impl", function)
        inspect.signature(function).bind(None, *arguments, **options)
    assert {(name, method) for name, method, _, _ in calls} == {
        (kind, method)
        for kind in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
        for method in ("__init__", "plan", "run")
    } | {("merge_state", "")}
