"""Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections and none on the output.

Source: Yang et al. 2024 (arXiv:2407.10671).
"""

from replicas.attention.base import AttentionBackend
from replicas.config import ModelConfig
from replicas.models.llama import Llama
from replicas.layers.tp_group import TpGroup


class Qwen2(Llama):
    """Qwen2ForCausalLM. The checkpoints' config.json does not mention the biases; they are part of the family."""

    def __init__(self, config: ModelConfig, tp: TpGroup, attention: AttentionBackend) -> None:
        if (config.attention_bias, config.output_bias) != (True, False):
            raise ValueError(f"{config.path}: Qwen2 has biases on q, k and v and none on o; the config says otherwise")
        super().__init__(config, tp, attention)
