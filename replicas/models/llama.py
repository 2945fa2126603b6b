"""Llama and Mistral: pre-norm decoder blocks with grouped-query attention, rotary positions and a gated MLP.

Owns:      the order of operations of one forward pass, and the weights' names in Hugging Face checkpoints.
Never:     knows where K and V lie (the attention backend does), or how a layer is split over ranks (layers do).
Source:    Touvron et al. 2023 (arXiv:2302.13971); Jiang et al. 2023 (arXiv:2310.06825).
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from replicas.attention.base import AttentionBackend, BatchMeta, HeadTurn, RotatingAttention
from replicas.config import ModelConfig
from replicas.layers.embedding import ParallelLMHead, RotaryEmbedding, Rotation, VocabParallelEmbedding
from replicas.layers.fused import Block, FusedBlocks, StagedAttention, adds, fits_programs
from replicas.layers.layer import Layer, computes_in
from replicas.layers.linear import GatedMLP, Linear, QKVParallelLinear, RowParallelLinear
from replicas.layers.norm import RMSNorm
from replicas.layers.tp_group import TpGroup

if TYPE_CHECKING:
    from replicas.layers.moe import MoE


class BlockAttention(Layer):
    """The attention of block ``index``, on this rank; what a family makes of it is in a subclass."""

    def __init__(self, config: ModelConfig, index: int, tp: TpGroup, backend: AttentionBackend) -> None:
        self._index = index
        self._backend = backend

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Run the attention on [T, hidden]."""
        raise NotImplementedError


class LlamaAttention(BlockAttention):
    """Attention with grouped queries. This rank holds H query heads and K KV heads of D dimensions."""

    def __init__(self, config: ModelConfig, index: int, tp: TpGroup, backend: AttentionBackend) -> None:
        super().__init__(config, index, tp, backend)
        self.qkv = QKVParallelLinear(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            tp=tp,
            bias=config.attention_bias,
        )
        self.o_proj = RowParallelLinear(tp=tp, bias=config.output_bias)

    def parts(self) -> Mapping[str, Layer]:
        return {"": self.qkv, "o_proj": self.o_proj}

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Run the attention on [T, hidden]."""
        q, k, v = self.qkv.split(self.qkv(x))
        backend, norms = self._backend, self.head_norms()
        if isinstance(backend, RotatingAttention) and backend.rotates:
            turn = HeadTurn(rotation.cos, rotation.sin, _weights(norms))
            return self.o_proj(backend.forward_rotating(self._index, q, k, v, turn))
        q, k = self.rotate(q, k, rotation)
        return self.o_proj(backend.forward(self._index, q, k, v))

    def head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """Return the norms of query heads and key heads before the rotation, if the model has them."""
        return None

    def rotate(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Rotate q [T, H, D] and k [T, K, D] by their positions."""
        return rotation(q), rotation(k)


def _weights(norms: tuple[RMSNorm, RMSNorm] | None) -> tuple[Tensor, Tensor, float] | None:
    if norms is None:
        return None
    of_q, of_k = (norm.weight for norm in norms)
    assert of_q is not None, "finalize() comes before the first call"
    assert of_k is not None
    return of_q, of_k, norms[0].eps


class LlamaBlock(Layer):
    """One block: attention, and an MLP or experts. Each stands behind a norm, and is added to the residual stream."""

    attention: type[BlockAttention] = LlamaAttention

    def __init__(self, config: ModelConfig, index: int, tp: TpGroup, backend: AttentionBackend) -> None:
        self.input_norm = RMSNorm(config.rms_norm_eps)
        self.attn = self.attention(config, index, tp, backend)
        self.post_norm = RMSNorm(config.rms_norm_eps)
        self.mlp = self.feed_forward(config, index, tp)

    def feed_forward(self, config: ModelConfig, index: int, tp: TpGroup) -> "GatedMLP | MoE":
        """Make what comes after attention."""
        return GatedMLP(tp=tp, bias=config.mlp_bias)

    def parts(self) -> Mapping[str, Layer]:
        return {
            "input_layernorm": self.input_norm,
            "self_attn": self.attn,
            "post_attention_layernorm": self.post_norm,
            "mlp": self.mlp,
        }

    def __call__(self, residual: Tensor, term: Tensor | None, rotation: Rotation) -> Tensor:
        """Add ``term``, what the block before has made, and this block's first term to ``residual`` [T, hidden] in
        place. Returns: the second term [T, hidden], which is still to be added."""
        return self.feed(residual, self.attend(residual, term, rotation))

    def attend(self, residual: Tensor, term: Tensor | None, rotation: Rotation) -> Tensor:
        """Add ``term`` to ``residual`` in place. Returns: this block's first term."""
        return self.attn(self.input_norm.after_adding(term, residual), rotation)

    def feed(self, residual: Tensor, term: Tensor) -> Tensor:
        """Add the first term to ``residual`` in place. Returns: the second term."""
        return self.mlp(self.post_norm.after_adding(term, residual))


class Llama(Layer):
    """The Llama family: LlamaForCausalLM, MistralForCausalLM."""

    block = LlamaBlock

    def __init__(self, config: ModelConfig, tp: TpGroup, attention: AttentionBackend) -> None:
        self.config = config
        self._tp = tp
        self._attention = attention
        self.embed = VocabParallelEmbedding(config.vocab_size, tp=tp)
        self.blocks = [self.block(config, i, tp, attention) for i in range(config.num_layers)]
        self.norm = RMSNorm(config.rms_norm_eps)
        self.head = ParallelLMHead(config.vocab_size, tp=tp, tied=self.embed if config.tie_embeddings else None)
        self.rope = RotaryEmbedding(
            config.head_dim,
            config.rope,
            context_len=config.context_len,
            dtype=computes_in(tp.device, getattr(torch, config.dtype)),
            device=tp.device,
        )

    @functools.cached_property
    def fused(self) -> FusedBlocks | None:
        """The programs of a step; None if the layers run it one by one."""
        if self._tp.device.type != "cpu" or self._tp.size > 1 or self.config.moe or self.config.mla:
            return None  # experts are chosen in the middle of a block, and programs know one kind of attention
        blocks = cast("list[Block]", self.blocks)  # whose MLPs are dense
        if not blocks or not fits_programs(blocks, self.norm):
            return None
        return FusedBlocks(blocks, self.norm, self._attention.forward, torch.get_num_threads(), self._staged)

    def adaptable(self) -> dict[str, Linear]:
        """Return the products that adapters can add to, by name: not those of latent attention or of experts."""
        parts = {
            f"model.layers.{i}.{name}": part
            for i, block in enumerate(self.blocks)
            for name, part in (("self_attn", block.attn), ("mlp", block.mlp))
            if isinstance(part, LlamaAttention | GatedMLP)
        }
        return {n: x for at, part in parts.items() for n, x in part.walk(at) if isinstance(x, Linear)}

    def parts(self) -> Mapping[str, Layer]:
        blocks = {f"model.layers.{i}": block for i, block in enumerate(self.blocks)}
        return {"model.embed_tokens": self.embed, **blocks, "model.norm": self.norm, "lm_head": self.head}

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, meta: BatchMeta, logits_rows: Tensor | None = None) -> Tensor:
        """Run one step; stores the K and V of its tokens through the attention backend.

        Args:    input_ids: [T] on the model's device, packed as ``meta`` says.
                 logits_rows: [S] int64, the packed tokens that need logits; None: all T.
        Returns: [S, V] fp32, the same on every rank.
        """
        return self.head(self.hidden(input_ids, meta, logits_rows))

    @torch.inference_mode()
    def hidden(self, input_ids: Tensor, meta: BatchMeta, wanted: Tensor | None = None) -> Tensor:
        """Run one step, up to the states [S, hidden] that ``head`` makes logits of; arguments as of `forward`."""
        self._attention.begin(meta)
        rotation = self.rope.at(meta.positions)
        hidden = self.embed(input_ids)  # [T, hidden]
        early = wanted if self._narrows(meta, wanted) else None  # from the last block's attention on
        late = wanted if early is None else None
        if self.fused is not None and meta.num_tokens > 0:
            return _rows(self.fused(hidden, rotation, early), late)
        term = None
        for block in self.blocks[:-1]:
            term = block(hidden, term, rotation)
        last = self.blocks[-1]
        if early is not None and self._staged is not None:
            self._staged.narrow(early)
        term = last.attend(hidden, term, rotation)
        hidden, term = _rows(hidden, early), _rows(term, early)
        if early is not None and not len(early):
            return hidden
        term = last.feed(hidden, term)
        return self.norm.after_adding(_rows(term, late), _rows(hidden, late))

    @functools.cached_property
    def _staged(self) -> StagedAttention | None:
        """The attention backend behind what the runner puts before it, if it can be part of a program."""
        backend = getattr(self._attention, "ready", self._attention)
        return backend if isinstance(backend, StagedAttention) else None

    @functools.cached_property
    def _a_product(self) -> Linear | None:
        return next(iter(self.adaptable().values()), None)

    def _narrows(self, meta: BatchMeta, wanted: Tensor | None) -> bool:
        """Whether the last block computes the ``wanted`` tokens alone, behind K and V of all: on a CPU, whose rows do
        not depend on each other, if no row has an adapter, whose rows are counted in the whole step."""
        if wanted is None or self._tp.device.type != "cpu" or len(wanted) >= meta.num_tokens:
            return False
        return self._a_product is None or not adds(self._a_product)


def _rows(hidden: Tensor, wanted: Tensor | None) -> Tensor:
    return hidden if wanted is None else hidden.index_select(0, wanted)
