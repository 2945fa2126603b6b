"""Serves a causal model through Transformers' own module, with the engine's attention, pool and packed batch.

Owns:      how such a model is loaded (by Transformers' loader, in the served dtype, one copy of each weight), and its
           forward pass.
Never:     decides whether a model can be served so (models/outline.py does, before weights are read), or runs code that
           comes with a checkpoint.
Invariant: attention is called as often, and in the order, that the outline says: the n-th call reads and writes layer n
           of the pool. A batch is [1, T], packed, with each token's own position; a token's K and V come from the pool
           alone, so the module has no cache and no mask. Rotary frequencies never depend on the batch: those that
           follow the longest sequence are set for the longest that is served.
Unrun:     on a GPU: the module runs there in the served dtype; its decode steps are not captured.
"""

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from replicas.attention.base import AttentionBackend, BatchMeta, ChoosingAttention
from replicas.config import ModelConfig
from replicas.errors import InvalidConfig
from replicas.layers.layer import computes_in
from replicas.layers.tp_group import TpGroup
from replicas.memory.state_pool import StatePool
from replicas.models.indexes import AnyMask, ServedIndexes
from replicas.models.outline import (
    attend_by,
    causal_class,
    changing_ropes,
    counting,
    first_position,
    made_with,
    read,
    silence_padding,
    takes_positions,
)
from replicas.models.own_parts import product_bytes, use_own_norms, use_own_products
from replicas.models.sharding import shard
from replicas.models.states import ServedStates

SERVED = "manta"  # the attention function of a served model; there is no mask function of this name, so no mask is made


class TransformersModel:
    """One rank's part of a model that Transformers has a module for."""

    def __init__(self, config: ModelConfig, tp: TpGroup, attention: AttentionBackend) -> None:
        self.config = config
        self._tp = tp
        self._attention = attention
        self._module: PreTrainedModel | None = None
        self._states: ServedStates | None = None  # of modules that keep more than K and V
        self._indexes: ServedIndexes | None = None  # of modules that choose what tokens attend to
        self._num_kv_heads = max(1, config.num_kv_heads // tp.size)
        self._takes_positions = True
        self._calls = 0  # of attention in the forward pass that runs
        self._first_position = 0
        self._keeps = True  # its forward pass sends the wanted rows alone through the head; some send all
        self._positions = torch.empty(0)  # [1, T] of the step that runs
        self._dtype = computes_in(tp.device, getattr(torch, config.dtype))  # of activations

    def load(self) -> None:
        """Read the weights from the config's folder. Raises: InvalidConfig if some are missing or do not fit."""
        config, device = self.config, self._tp.device
        family = read(Path(config.path))
        with _quiet():
            module, told = causal_class(family).from_pretrained(
                config.path,
                dtype=getattr(torch, config.dtype),
                attn_implementation=made_with(family, SERVED),
                **({"experts_implementation": SERVED} if device.type == "cpu" else {}),
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        lacking = sorted([*told["missing_keys"], *(str(key) for key in told["mismatched_keys"])])
        if lacking:
            raise InvalidConfig(
                f"model: the weights in {config.path} do not fit its config.json: {len(lacking)} are missing or of "
                f"another shape ({', '.join(lacking[:5])}{', ...' if len(lacking) > 5 else ''}): fetch the folder again"
            )
        attend_by(module, SERVED)
        module.eval().requires_grad_(requires_grad=False)
        silence_padding(module)
        self._first_position = first_position(module)
        self._keeps = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._takes_positions = takes_positions(module) or not self.config.states
        if not takes_positions(module):
            for part in counting(module):
                part.register_forward_pre_hook(self._tell_positions, with_kwargs=True)
        if self._tp.size > 1:
            shard(module, self._tp)
        module.to(device)
        _freeze_rope(module, config.context_len)
        if device.type == "cpu":
            use_own_products(module, config)
            use_own_norms(module)
        for part in module.modules():
            part._manta = self
        if config.states:
            self._states = ServedStates(module, config.states, self._dtype)
        if config.indexes:
            assert isinstance(self._attention, ChoosingAttention)
            self._indexes = ServedIndexes(module, config.indexes, self._attention)
        self._module = module

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's weights; tied ones count once."""
        assert self._module is not None, "load() comes first"
        tensors = [*self._module.parameters(), *self._module.buffers()]
        others: int = sum(tensor.nbytes for tensor in tensors)
        return product_bytes(self._module) + others

    @property
    def states(self) -> StatePool | None:
        """What its modules keep of each request, once a step has run; None of a model that keeps no state."""
        return None if self._states is None else self._states.pool

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, meta: BatchMeta, logits_rows: Tensor | None = None) -> Tensor:
        """Run one step; stores the K and V of its tokens through the attention backend.

        Args:    input_ids: [T] on the model's device, packed as ``meta`` says.
                 logits_rows: [S] int64, the packed tokens that need logits; None: all T.
        Returns: [S, V] fp32, the same on every rank.
        """
        assert self._module is not None, "load() comes before the first step"
        self._attention.begin(meta)
        if self._states is not None:
            self._states.begin(meta)
        if self._indexes is not None:
            self._indexes.begin(meta)
        self._calls = 0
        self._positions = (meta.positions + self._first_position).unsqueeze(0)
        out = self._module(
            input_ids=input_ids.unsqueeze(0),
            **({"position_ids": self._positions} if self._takes_positions else {}),
            use_cache=False,
            **({"attention_mask": AnyMask(len(input_ids), input_ids.device)} if self._indexes is not None else {}),
            **({"logits_to_keep": logits_rows} if self._keeps and logits_rows is not None else {}),
        )
        assert self._calls == self.config.num_layers, f"{self._calls} calls of attention"
        if self._states is not None:
            self._states.end()
        logits: Tensor = out.logits[0].float()
        return logits if self._keeps or logits_rows is None else logits.index_select(0, logits_rows)

    def _tell_positions(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return given, {**named, "position_ids": self._positions[0]}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, chosen: Tensor | None) -> Tensor:
        """Run the next call of attention. query [1, H, T, D], key [1, K, T, D], value [1, K, T, Dv]: [1, T, H, Dv].
        chosen: [1, T, C] by models/indexes.py, in layers that have an index."""
        size, value_size = self.config.head_dim, value.shape[3]
        q, k, v = (_packed(x, size, self._dtype) for x in (query, key, value))
        num_heads, of_pool = q.shape[1], self.config.num_heads // self._tp.size
        if num_heads != of_pool or k.shape[1] != self._num_kv_heads:
            q, k, v = _widened(q, k, v, of_pool, self._num_kv_heads)
            sinks = None if sinks is None else F.pad(sinks, (0, of_pool - num_heads))
        layer, self._calls = self._calls, self._calls + 1
        if chosen is None:
            out = self._attention.forward(layer, q, k, v, sinks=sinks)
        else:
            assert isinstance(self._attention, ChoosingAttention)
            out = self._attention.forward_chosen(layer, q, k, v, sinks, chosen[0])
        heads = out.view(1, q.shape[0], q.shape[1], size)[:, :, :num_heads]
        if value_size < size:
            heads = heads[..., :value_size]
        return heads.to(query.dtype, copy=True, memory_format=torch.contiguous_format)  # the next call overwrites it


def _packed(x: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Bring [1, heads, T, D] into [T, heads, size], heads in a row, filled with zeros."""
    x = x[0].transpose(0, 1).to(dtype)
    x = F.pad(x, (0, size - x.shape[2])) if x.shape[2] < size else x.contiguous()
    return x.flatten(1).view(len(x), x.shape[1], size)  # of one head, torch takes any stride between heads for right


def _widened(q: Tensor, k: Tensor, v: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bring the heads of a layer into a pool's shape, [T, num_heads, D] and twice [T, num_kv_heads, D]: KV heads that
    more query heads share there than here are repeated, missing ones are zero."""
    times = q.shape[1] * num_kv_heads // (k.shape[1] * num_heads)
    k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    q, k, v = (
        F.pad(x, (0, 0, 0, count - x.shape[1]))
        for x, count in ((q, num_heads), (k, num_kv_heads), (v, num_kv_heads))
    )
    return q, k, v


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Transformers' attention function. Scale, window and the like are the outline's; the backend has them."""
    served: TransformersModel = module._manta  # type: ignore[assignment]
    return served.attend(query, key, value, arguments.get("s_aux"), arguments.get("indices")), None


AttentionInterface.register(SERVED, _attend)


def _experts(self: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Transformers' experts function on a CPU: rows sorted by expert, weights in the served dtype, arithmetic in fp32.

    Args:    x: [T, hidden]; chosen, weights: [T, k] the experts of each token.
    Returns: [T, hidden], each token's experts summed in their order.
    """
    out, top_k = torch.zeros_like(x), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=self.num_experts).tolist()
    names = ("gate_up_proj" if self.has_gate else "up_proj", "down_proj")
    for expert, rows in enumerate(torch.split(order, counts)):
        if len(rows) == 0:
            continue
        tokens = rows // top_k
        inner = _expert(self, names[0], expert, x[tokens])
        made = _expert(self, names[1], expert, self._apply_gate(inner) if self.has_gate else self.act_fn(inner))
        if self.has_post_expert_norm:
            made = self.post_expert_norm(made)
        out.index_add_(0, tokens, made * weights.flatten()[rows, None].to(made.dtype))
    return out


def _expert(experts: Any, name: str, expert: int, x: Tensor) -> Tensor:
    """Multiply x [N, in] by the weight ``name`` of one expert."""
    weight = getattr(experts, name)[expert].to(x.dtype)
    bias = getattr(experts, f"{name}_bias")[expert].to(x.dtype) if experts.has_bias else None
    return F.linear(x, weight.T if experts.is_transposed else weight, bias)


ExpertsInterface.register(SERVED, _experts)


def _freeze_rope(module: nn.Module, context_len: int) -> None:
    """Set rotary frequencies that follow the longest sequence for ``context_len``, for every batch."""
    for rope in changing_ropes(module):
        last = torch.tensor([[context_len - 1]], device=next(rope.part.buffers()).device)
        rope.part(last.float(), last, **({} if rope.layer_type is None else {"layer_type": rope.layer_type}))
        rope.settle()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Transformers' bar and its report of what it loads out of a server's log."""
    from transformers.utils import logging

    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
