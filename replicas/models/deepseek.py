"""DeepSeek-V2, V2-Lite, V3, R1 and V3.2, GLM-4.7-Flash and GLM-5: multi-head latent attention, and a mixture of experts
behind the first dense blocks. In V3.2 and GLM-5 an index chooses what a token attends to.

Owns:      the order of operations of a block, and the weights' names in Hugging Face checkpoints.
Never:     makes keys or values of a head: queries go into the latent space (layers/latent.py), and the backend attends
           there with one KV head, whose values are its keys' first columns (memory/latent_pool.py).
Invariant: without an index, prompts, chunks of them and single tokens run the same operations, so hits equal misses. To
           expand a long chunk's keys and values instead is 1.7 times as fast (docs/performance.md), and gives other
           last bits.
           A token's choice is made of keys as the pool has them. Where scores are equal, as zeros are, later tokens are
           chosen, and not those that a sort happens to meet first.
Source:    DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1; DeepSeek-AI 2024 (arXiv:2412.19437), section 2.1;
           DeepSeek-AI 2025 (arXiv:2512.02556), section 2.1, the index.

    x ─┬─ q_a, norm, q_b ─> each head's query ─┬─ nope ─ into the latent space ─┬─> attention ─> out of it ─> o
       │                                       └─ rope ─ rotation ──────────────┤    (scores, weighted vectors)
       └─ kv_a ─┬─ latent, norm ────────────────────────────────────────────────┤
                └─ rope ─ rotation ─────────────────────────────────────────────┘ (cached, one vector a token)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replicas.attention.base import AttentionBackend, BatchMeta, ChoosingAttention, index_bias
from replicas.config import ModelConfig
from replicas.layers.embedding import RotaryEmbedding, Rotation
from replicas.layers.latent import LatentProjection
from replicas.layers.layer import Layer, computes_in
from replicas.layers.linear import ColumnParallelLinear, RowParallelLinear
from replicas.layers.moe import ExactLinear
from replicas.layers.norm import LayerNorm, RMSNorm
from replicas.layers.tp_group import TpGroup
from replicas.models.llama import BlockAttention, Llama
from replicas.models.moe import MoEBlock

SCORES = 1 << 24  # of an index's heads that are made at once
LATENT_EPS = 1e-6  # of the norms of latent vectors, whatever rms_norm_eps is


@dataclass(slots=True)
class Choices:
    """What the tokens of the step that runs attend to."""

    bounds: list[int] = field(default_factory=list)  # [B + 1] request b owns tokens [bounds[b], bounds[b + 1])
    seq_lens: list[int] = field(default_factory=list)
    last: Tensor | None = None  # [T, C] positions that the last index chose, -1 for none

    def begin(self, meta: BatchMeta) -> None:
        self.bounds, self.seq_lens = (lengths.tolist() for lengths in meta.on_host())
        self.last = None


class LightningIndex(Layer):
    """Scores all tokens before a token by heads of its own, and chooses the best, the same on all ranks."""

    def __init__(self, config: ModelConfig, layer: int, tp: TpGroup, choices: Choices) -> None:
        assert config.mla is not None
        assert config.mla.index is not None
        self._layer, self._index, self._choices = layer, config.mla.index, choices
        self._rope_dim = config.mla.qk_rope_head_dim
        whole = TpGroup(device=tp.device)
        self.q, self.k = (ColumnParallelLinear(("",), tp=whole) for _ in range(2))
        self.k_norm = LayerNorm(LATENT_EPS)
        self.weights_of = ExactLinear()  # whose rounding would choose others

    def parts(self) -> Mapping[str, Layer]:
        return {"wq_b": self.q, "wk": self.k, "k_norm": self.k_norm, "weights_proj": self.weights_of}

    def choose(self, x: Tensor, low: Tensor, rotation: Rotation, backend: ChoosingAttention) -> Tensor:
        """Keep the keys of x [T, hidden], and choose for its tokens, of whose queries ``low`` [T, rank] is the low-rank
        form. Returns: [T, C] positions, -1 for none; of a request with at most C tokens they mean nothing."""
        (dim, most), seen = (self._index.head_dim, self._index.top_k), self._choices
        k = self._rotate(self.k_norm(self.k(x)).unsqueeze(1), rotation).squeeze(1)
        backend.set_index_keys(self._layer, torch.arange(len(x), device=x.device), k)
        if max(seen.seq_lens) <= most:
            seen.last = x.new_full((1, 1), -1, dtype=torch.int64).expand(len(x), most)
            return seen.last
        q = self._rotate(self.q(low).view(len(x), -1, dim), rotation)
        weights = self.weights_of(x) * (self._index.num_heads * dim) ** -0.5  # [T, heads]
        seen.last = chosen = x.new_full((len(x), most), -1, dtype=torch.int64)
        for request, seq_len in enumerate(seen.seq_lens):
            if seq_len <= most:
                continue
            keys = backend.read_index_keys(self._layer, request, seq_len, dim).float()
            first, end = seen.bounds[request], seen.bounds[request + 1]
            rows = max(1, SCORES // (seq_len * self._index.num_heads))
            for start in range(first, end, rows):
                span = slice(start, min(start + rows, end))
                chosen[span] = self._best(q[span], weights[span], keys, seq_len - (end - start))
        return chosen

    def _best(self, q: Tensor, weights: Tensor, keys: Tensor, first: int) -> Tensor:
        """Choose from keys [n, D] for q [E, heads, D] of the tokens at positions ``first`` to first + E - 1."""
        scores = (q.float() @ keys.T).relu_()  # [E, heads, n]
        total = (weights.unsqueeze(1) @ scores).squeeze(1)
        query = torch.arange(first, first + len(q), device=q.device)
        best = (total + index_bias(query, len(keys))).topk(self._index.top_k).indices
        return best.masked_fill_(best > query.unsqueeze(1), -1)

    def _rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate the first dimensions of x [T, heads, D]."""
        turned, rest = torch.split(x, [self._rope_dim, x.shape[2] - self._rope_dim], dim=2)
        return torch.cat((rotation(_pairs(turned, interleaved=self._index.interleaved)), rest), dim=2)


class LatentAttention(BlockAttention):
    """Latent attention. This rank holds H heads; what is made before them lies on every rank."""

    index: LightningIndex | None = None
    choices: Choices | None = None  # None: a token attends to all before it

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
        index = {} if self.index is None else {"indexer": self.index}
        return {"": self.down, **query, **latent, **index, "o_proj": self.o_proj}

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Run the attention on [T, hidden]."""
        mla = self._mla
        sizes = [mla.q_lora_rank or 0, mla.kv_lora_rank, mla.qk_rope_head_dim]
        low, latent, k_rope = torch.split(self.down(x), sizes, dim=1)
        low = x if self.q_norm is None else self.q_norm(low)
        q = self.q(low).view(len(x), self._num_heads, -1)
        q_nope, q_rope = torch.split(q, [mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=2)
        q = torch.cat((self.up.keys(q_nope), self._rotate(q_rope, rotation)), dim=2)  # [T, H, rank + rope]
        k = torch.cat((self.kv_norm(latent).unsqueeze(1), self._rotate(k_rope.unsqueeze(1), rotation)), dim=2)
        out = self._attended(q, k, x, low, rotation)  # [T, H * rank]
        return self.o_proj(self.up.values(out.view(len(x), self._num_heads, -1)).flatten(1))

    def _attended(self, q: Tensor, k: Tensor, x: Tensor, low: Tensor, rotation: Rotation) -> Tensor:
        backend, v = self._backend, k[..., : self._mla.kv_lora_rank]
        if self.choices is None:
            return backend.forward(self._index, q, k, v)
        assert isinstance(backend, ChoosingAttention)
        chosen = self.choices.last if self.index is None else self.index.choose(x, low, rotation, backend)
        assert chosen is not None, "the first layer has an index of its own"
        return backend.forward_chosen(self._index, q, k, v, None, chosen)

    def _rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        return rotation(_pairs(x, interleaved=self._mla.interleaved))


def _pairs(x: Tensor, *, interleaved: bool) -> Tensor:
    """Bring dimensions 2 i and 2 i + 1 of x [T, heads, rope], which turn together, to i and i + rope / 2: in queries
    and keys alike, so that their products are the same."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1) if interleaved else x.contiguous()


class DeepseekBlock(MoEBlock):
    """A block of latent attention, and an MLP or experts."""

    attention = LatentAttention


class Deepseek(Llama):
    """DeepSeek's and GLM's classes of registry.py: the frame is Llama's, embedding, residual stream and head."""

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
        self._choices = None
        if config.mla.index is None:
            return
        self._choices = choices = Choices()
        for layer, (block, shared) in enumerate(zip(self.blocks, config.mla.index.shared, strict=True)):
            assert isinstance(block.attn, LatentAttention)
            block.attn.choices = choices
            block.attn.index = None if shared else LightningIndex(config, layer, tp, choices)

    @torch.inference_mode()
    def hidden(self, input_ids: Tensor, meta: BatchMeta, wanted: Tensor | None = None) -> Tensor:
        if self._choices is not None:
            self._choices.begin(meta)
        return super().hidden(input_ids, meta, wanted)
