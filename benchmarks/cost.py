"""What a forward pass must at least read and compute, from the model's shape. Pure."""

from dataclasses import dataclass

from replicas.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one token costs on the whole model."""

    layer_params: int  # weights of the products of all blocks
    head_params: int
    attention_width: int  # query heads x head_dim x layers
    weight_bytes: int  # read once a step

    @staticmethod
    def of(model: ModelConfig) -> "ModelCost":
        qkv = model.hidden_size * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        out = model.num_heads * model.head_dim * model.hidden_size
        mlp = 3 * model.hidden_size * model.intermediate_size
        layer_params = model.num_layers * (qkv + out + mlp)
        head_params = model.vocab_size * model.hidden_size
        width = model.num_layers * model.num_heads * model.head_dim
        return ModelCost(layer_params, head_params, width, 4 * (layer_params + head_params))

    def prefill_flops(self, num_tokens: int) -> float:
        """Products of all tokens, the head once, causal scores and their sum over values."""
        attention = 4 * self.attention_width * num_tokens * (num_tokens + 1) / 2
        return 2 * self.layer_params * num_tokens + 2 * self.head_params + attention

    def decode_limit_s(self, batch: int, bandwidth: float, flops: float) -> float:
        return max(self.weight_bytes / bandwidth, 2 * (self.layer_params + self.head_params) * batch / flops)
