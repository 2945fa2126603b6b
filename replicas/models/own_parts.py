"""Puts our CPU kernels in the place of parts of a Transformers module: Linears, norms that compute the same, and the
gated delta rule with its convolution.

Owns:      which parts are replaced, and the products that Linears with the same input share.
Never:     changes what a part computes, but for the order of its sums.
Invariant: a weight lies in memory once: its panels are made layer by layer, and what it was read into is dropped.
"""

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from replicas.config import ModelConfig, StateLayer
from replicas.kernels import elementwise, gated_delta
from replicas.layers.linear import Matmul

SAME_INPUT = (  # called in this order, in every family
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
)

READ = ".dt_proj"  # its weight and bias are read, and it is never called (Mamba)


class _Product(nn.Module):
    """A Linear whose product is ours; its weight lies in panels alone, below those of others that read the same input.

    The first of them that is called makes the outputs of all, and keeps them until the last one has been called.
    """

    def __init__(self, shared: "_Shared", first: int, size: int) -> None:
        super().__init__()
        self._shared, self._rows = shared, slice(first, first + size)
        self.out_features, self.in_features = size, shared.in_features

    @property
    def matmul(self) -> Matmul:
        return self._shared.matmul

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], read back from the panels: for the few modules that look at it."""
        return self.matmul.rows(torch.arange(self._rows.start, self._rows.stop))

    def forward(self, x: Tensor) -> Tensor:
        shared = self._shared
        if shared.x is not x:
            shared.x, shared.out = x, shared.matmul(x.reshape(-1, self.in_features))
        out = shared.out[:, self._rows].view(*x.shape[:-1], self.out_features)
        if self._rows.stop == shared.out_features:
            shared.x, shared.out = None, torch.empty(0)
        return out


class _Shared:
    """The product by the weights of one or more Linears, and its result while they are called one after the other."""

    def __init__(self, linears: Sequence[nn.Linear], matmul: Matmul, dtype: torch.dtype) -> None:
        self.matmul = matmul
        self.x: Tensor | None = None  # the input that ``out`` was made of
        self.out = torch.empty(0)
        weights = [linear.weight for linear in linears]
        self.in_features, self.out_features = weights[0].shape[1], sum(len(weight) for weight in weights)
        biases = [linear.bias.float() for linear in linears if linear.bias is not None]
        whole = (lambda: weights[0]) if len(weights) == 1 else (lambda: torch.cat(weights))
        matmul.prepare(whole, torch.cat(biases) if biases else None, dtype=dtype)


class _Rows(nn.Module):
    """An embedding that is tied to the head: it reads the rows of the head's panels."""

    def __init__(self, head: _Product) -> None:
        super().__init__()
        self._head = [head]  # in a list: the head's own place in the module is enough

    def forward(self, ids: Tensor) -> Tensor:
        return self._head[0].matmul.rows(ids.flatten()).view(*ids.shape, -1)


def _siblings(name: str, linears: Mapping[str, nn.Linear]) -> list[str]:
    """List the Linears that read the same input as ``name``, itself among them, in order of their calls."""
    parent, _, own = name.rpartition(".")
    for together in SAME_INPUT:
        names = [f"{parent}.{each}" for each in together]
        parts = [linears[each] for each in names if each in linears and linears[each].weight is not None]
        if own in together and len(parts) == len(names):  # one that has been replaced has no weight
            shapes = {(part.weight.shape[1], part.bias is None, len(part._forward_hooks)) for part in parts}
            if len(shapes) == 1:
                return names
    return [name]


def use_own_products(module: PreTrainedModel, config: ModelConfig) -> None:
    """Put our products in the place of Linears, one by one, and compute the rest in fp32."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    tied = head is not None and embedding is not None and head.weight is embedding.weight
    own_rows = tied and type(embedding) is nn.Embedding and type(head) is nn.Linear
    linears = {name: part for name, part in module.named_modules() if type(part) is nn.Linear}
    dtype: torch.dtype = getattr(torch, config.dtype)
    for name, part in linears.items():
        replaced = type(module.get_submodule(name)) is not nn.Linear
        if replaced or (part is head and tied and not own_rows) or name.endswith(READ):
            continue
        names = _siblings(name, linears)
        parts = [linears[each] for each in names]
        shared, first = _Shared(parts, Matmul(config.weight_format), dtype), 0
        for each, linear in zip(names, parts, strict=True):
            product = _Product(shared, first, len(linear.weight))
            first += product.out_features
            product._forward_hooks.update(linear._forward_hooks)  # the sum over ranks
            if linear is head and own_rows:
                module.set_input_embeddings(_Rows(product))
                embedding.weight = None
            module.set_submodule(each, product)
            linear.weight = linear.bias = None  # type: ignore[assignment]
    kept = {
        id(parameter)
        for part in module.modules()
        if hasattr(part, "has_gate") and hasattr(part, "is_transposed")  # experts, which _experts multiplies by
        for parameter in part.parameters(recurse=False)
    }
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point() and id(tensor) not in kept:
            tensor.data = tensor.data.float()


class _Norm(nn.Module):
    """An RMSNorm in one launch of ours."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        if elementwise.serves(rows := x.reshape(-1, x.shape[-1])):
            return elementwise.rms_norm(rows, self.weight, self.eps).view(x.shape)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def use_own_norms(module: nn.Module) -> None:
    """Put our RMSNorm in the place of norms that compute the same: told by what they make of random numbers."""
    for name, part in list(module.named_modules()):
        weight, eps = getattr(part, "weight", None), getattr(part, "variance_epsilon", getattr(part, "eps", None))
        if not type(part).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or not isinstance(eps, float):
            continue
        if weight.dim() != 1 or len(inspect.signature(part.forward).parameters) != 1:
            continue  # it takes a gate too
        x = torch.randn(3, *weight.shape)
        made = part(x)
        for factor in (weight, 1 + weight):  # as it is stored, or centred at zero (Gemma, Qwen3.5)
            if torch.allclose(made, F.rms_norm(x, weight.shape, factor, eps), rtol=1e-5, atol=1e-5):
                module.set_submodule(name, _Norm(factor, eps))
                break


def product_bytes(module: nn.Module) -> int:
    """Count the bytes of the weights that lie in panels."""
    shared = {part._shared for part in module.modules() if isinstance(part, _Product)}
    return sum(each.matmul.num_bytes for each in shared)


CONVOLUTION = "causal_conv1d_fn"  # that such a module calls, and one of the others
DELTA_RULES = {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"}


class DeltaRule:
    """The forward pass of a module with a gated delta rule (Qwen3-Next, Qwen3.5, OLMo-Hybrid, Kimi-Linear).

    Our kernels stand in the place of the two functions that it calls without a cache, and have the requests' states.
    """

    def __init__(self, part: nn.Module, layer: StateLayer) -> None:
        forward = inspect.unwrap(type(part).forward)
        names = {**forward.__globals__, CONVOLUTION: self._convolve, **dict.fromkeys(DELTA_RULES, self._advance)}
        self._forward = types.MethodType(types.FunctionType(forward.__code__, names), part)
        convolution: Any = part.conv1d
        self._weight, self._bias = convolution.weight[:, 0].T.contiguous(), convolution.bias  # [K, C], [C]
        (self.conv,), (self._sums,) = (
            [i for i, tensor in enumerate(layer.tensors) if tensor.kind == kind] for kind in ("conv", "recurrent")
        )
        self._step: tuple[Sequence[Tensor], Tensor] | None = None  # the states' memory, where the requests stand

    @staticmethod
    def fits(part: nn.Module, layer: StateLayer) -> bool:
        """Tell whether ``part`` is such a module, and of widths that the kernels have."""
        shapes = {tensor.kind: tensor.shape for tensor in layer.tensors}
        code = inspect.unwrap(type(part).forward).__code__
        return (
            CONVOLUTION in code.co_names
            and hasattr(part, "conv1d")
            and not code.co_freevars
            and not DELTA_RULES.isdisjoint(code.co_names)
            and shapes.keys() == {"conv", "recurrent"}
            and len(layer.tensors) == 2
            and getattr(part, "activation", None) == "silu"
            and gated_delta.serves(shapes["conv"][0], *shapes["recurrent"][1:])
        )

    def __call__(self, states: Sequence[Tensor], segments: Tensor, named: Mapping[str, Any]) -> Tensor:
        """Run a step's tokens. ``segments`` [N, 4] int64: the tokens' start and end, the place of the state before (-1:
        none) and behind them."""
        self._step = states, segments
        out: Tensor = self._forward(**named)
        return out

    def _convolve(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Stand for ``causal_conv1d_fn``: x [1, C, T]. A state [C, K] lies in memory as [K, C]."""
        assert self._step is not None
        states, segments = self._step
        rows, kept = x[0].T, states[self.conv].transpose(1, 2)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        return gated_delta.convolve(rows, self._weight, self._bias, kept, segments, silu=True).T.unsqueeze(0)

    def _advance(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Stand for the delta rule: [1, T, heads, size] each, g [1, T, heads] or for each row, beta [1, T, heads]."""
        assert self._step is not None
        assert use_qk_l2norm_in_kernel, "the kernel makes queries and keys of length 1, as each module so far asks"
        states, segments = self._step
        q, k, v = (
            x[0] if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x[0].contiguous() for x in (query, key, value)
        )
        decay = g[0].exp().contiguous()
        made = gated_delta.gated_delta_rule(q, k, v, decay, beta[0].contiguous(), states[self._sums], segments)
        return made.unsqueeze(0), None
