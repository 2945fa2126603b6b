"""Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections and none on the output. Qwen3 (dense):
Llama with an RMSNorm on each query head and each key head before the rotation.

Source: Yang et al. 2024 (arXiv:2407.10671); Yang et al. 2025 (arXiv:2505.09388).
"""

from collections.abc import Mapping

from torch import Tensor

from replicas.attention.base import AttentionBackend
from replicas.config import ModelConfig
from replicas.layers.embedding import Rotation
from replicas.layers.layer import Layer
from replicas.layers.norm import RMSNorm
from replicas.layers.tp_group import TpGroup
from replicas.models.llama import Llama, LlamaAttention, LlamaBlock


class Qwen2(Llama):
    """Qwen2ForCausalLM. The checkpoints' config.json does not mention the biases; they are part of the family."""

    def __init__(self, config: ModelConfig, tp: TpGroup, attention: AttentionBackend) -> None:
        if (config.attention_bias, config.output_bias) != (True, False):
            raise ValueError(f"{config.path}: Qwen2 has biases on q, k and v and none on o; the config says otherwise")
        super().__init__(config, tp, attention)


class Qwen3Attention(LlamaAttention):
    """Attention with head norms; their weights [D] are shared by all heads, so every rank has them whole."""

    def __init__(self, config: ModelConfig, index: int, tp: TpGroup, backend: AttentionBackend) -> None:
        super().__init__(config, index, tp, backend)
        self.q_norm = RMSNorm(config.rms_norm_eps)
        self.k_norm = RMSNorm(config.rms_norm_eps)

    def parts(self) -> Mapping[str, Layer]:
        return {**super().parts(), "q_norm": self.q_norm, "k_norm": self.k_norm}

    def head_norms(self) -> tuple[RMSNorm, RMSNorm]:
        return self.q_norm, self.k_norm

    def rotate(self, q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        return rotation(self.q_norm(q)), rotation(self.k_norm(k))


class Qwen3Block(LlamaBlock):
    """A Llama block with Qwen3's attention, which normalises queries and keys."""

    attention = Qwen3Attention


class Qwen3(Llama):
    """The dense Qwen3 models: Qwen3ForCausalLM."""

    block = Qwen3Block
