"""gpt-oss: attention with sinks and, in every other layer, a window; experts with biases and a clamped gate.

Owns:      the weights' names in Hugging Face checkpoints.
Never:     widens experts of 4 bits on a CPU: products multiply them as they are (kernels/panel_tiles.py).
State:     on a GPU, where experts are widened when they are loaded, never run by us.
Source:    OpenAI 2025 (arXiv:2508.10925).
"""

from collections.abc import Mapping

from torch import Tensor

from replicas.attention.base import AttentionBackend
from replicas.config import ModelConfig
from replicas.layers.embedding import Rotation
from replicas.layers.layer import Layer
from replicas.layers.linear import HeadSinks
from replicas.layers.moe import ClampedMoE
from replicas.layers.tp_group import TpGroup
from replicas.models.llama import Llama, LlamaAttention, LlamaBlock


class SinkAttention(LlamaAttention):
    """Attention whose softmax has one more score in each head: a weight, of no token."""

    def __init__(self, config: ModelConfig, index: int, tp: TpGroup, backend: AttentionBackend) -> None:
        super().__init__(config, index, tp, backend)
        self.sinks = HeadSinks(self.qkv.num_heads, tp)

    def parts(self) -> Mapping[str, Layer]:
        return {**super().parts(), "sinks": self.sinks}

    def __call__(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Run the attention on [T, hidden]."""
        q, k, v = self.qkv.split(self.qkv(x))
        q, k = self.rotate(q, k, rotation)
        return self.o_proj(self._backend.forward(self._index, q, k, v, self.sinks.scores))


class GptOssBlock(LlamaBlock):
    """A Llama block with sinks, and experts in place of the MLP."""

    attention = SinkAttention

    def feed_forward(self, config: ModelConfig, index: int, tp: TpGroup) -> ClampedMoE:
        assert config.moe is not None, f"{config.architecture} has experts; its config does not say which"
        return ClampedMoE(config.moe, config.hidden_size, tp)


class GptOss(Llama):
    """The gpt-oss models: GptOssForCausalLM (gpt-oss-20b, gpt-oss-120b)."""

    block = GptOssBlock
