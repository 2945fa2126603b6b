"""DeepSeek-V2, V2-Lite, V3 and R1: multi-head latent attention, and a mixture of experts behind the first dense blocks.

Owns:      the order of operations of a block, and the weights' names in Hugging Face checkpoints.
Never:     makes keys or values of a head: queries go into the latent space (layers/latent.py), and the backend attends
           there with one KV head, whose values are its keys' first columns (memory/latent_pool.py).
Invariant: prompts, chunks of them and single tokens run the same operations, so hits equal misses. To expand a long
           chunk's keys and values instead is 1.7 times as fast (docs/performance.md), and gives other last bits.
Source:    DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1; DeepSeek-AI 2024 (arXiv:2412.19437), section 2.1.

    x ─┬─ q_a, norm, q_b ─> each head's query ─┬─ nope ─ into the latent space ─┬─> attention ─> out of it ─> o
       │                                       └─ rope ─ rotation ──────────────┤    (scores, weighted vectors)
       └─ kv_a ─┬─ latent, norm ────────────────────────────────────────────────┤
                └─ rope ─ rotation ─────────────────────────────────────────────┘ (cached, one vector a token)
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from replicas.attention.base import AttentionBackend
from replicas.config import ModelConfig
from replicas.layers.embedding import RotaryEmbedding, Rotation
from replicas.layers.latent import LatentProjection
from replicas.layers.layer import Layer, computes_in
from replicas.layers.linear import ColumnParallelLinear, RowParallelLinear
from replicas.layers.norm import RMSNorm
from replicas.layers.tp_group import TpGroup
from replicas.models.llama import BlockAttention, Llama
from replicas.models.moe import MoEBlock

LATENT_EPS = 1e-6  # of the norms of latent vectors, whatever rms_norm_eps is


class LatentAttention(BlockAttention):
    """Latent attention. This rank holds H heads; what is made before them lies on every rank."""

    def __init__(self, config: ModelConfig, index: int, tp: TpGroup, backend: AttentionBackend) -> None:
        assert config.mla is not None, f"{config.architecture} has latent attention"
        super().__init__(config, index, tp, backend)
        self._mla = config.mla
        self._num_heads = config.num_heads // tp.size
        whole, has_low_rank = TpGroup(device=tp.device), config.mla.q_lora_rank is not None
        down = ("q_a_proj", "kv_a_proj_with_mqa") if has_low_rank else ("kv_a_proj_with_mqa",)
        self.down = ColumnParallelLinear(down, tp=whole, bias=config.attention_bias)
        self.q_norm = RMSNorm(LATENT_EPS) if has_low_rank else None
        self.q = ColumnParallelLinear(("",), tp=tp)
        self.kv_norm = RMSNorm(LATENT_EPS)
        self.up = LatentProjection(self._num_heads, config.mla, tp)
        self.o_proj = RowParallelLinear(tp=tp, bias=config.output_bias)

    def parts(self) -> Mapping[str, Layer]:
        query = {"q_proj": self.q} if self.q_norm is None else {"q_a_layernorm": self.q_norm, "q_b_proj": self.q}
        latent = {"kv_a_layernorm": self.kv_norm, "kv_b_proj": self.up}
        return {"": self.down, **query, **latent, "o_proj": self.o_proj}

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Run the attention on [T, hidden]."""
        mla = self._mla
        sizes = [mla.q_lora_rank or 0, mla.kv_lora_rank, mla.qk_rope_head_dim]
        low, latent, k_rope = torch.split(self.down(x), sizes, dim=1)
        q = self.q(x if self.q_norm is None else self.q_norm(low)).view(len(x), self._num_heads, -1)
        q_nope, q_rope = torch.split(q, [mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=2)
        q = torch.cat((self.up.keys(q_nope), self._rotate(q_rope, rotation)), dim=2)  # [T, H, rank + rope]
        k = torch.cat((self.kv_norm(latent).unsqueeze(1), self._rotate(k_rope.unsqueeze(1), rotation)), dim=2)
        out = self._backend.forward(self._index, q, k, k[..., : mla.kv_lora_rank])  # [T, H * rank]
        return self.o_proj(self.up.values(out.view(len(x), self._num_heads, -1)).flatten(1))

    def _rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate x [T, heads, rope], whose dimensions 2 i and 2 i + 1 turn together: they are brought to i and
        i + rope / 2, in queries and keys alike, so that their products are the same."""
        return rotation(torch.cat((x[..., ::2], x[..., 1::2]), dim=-1) if self._mla.interleaved else x.contiguous())


class DeepseekBlock(MoEBlock):
    """A block of latent attention, and an MLP or experts."""

    attention = LatentAttention


class Deepseek(Llama):
    """DeepseekV2ForCausalLM, DeepseekV3ForCausalLM: the frame is Llama's, embedding, residual stream and head."""

    block = DeepseekBlock

    def __init__(self, config: ModelConfig, tp: TpGroup, attention: AttentionBackend) -> None:
        assert config.mla is not None, f"{config.architecture} has latent attention"
        super().__init__(config, tp, attention)
        self.rope = RotaryEmbedding(  # of the part of a head that turns
            config.mla.qk_rope_head_dim,
            config.rope,
            context_len=config.context_len,
            dtype=computes_in(tp.device, getattr(torch, config.dtype)),
            device=tp.device,
        )
