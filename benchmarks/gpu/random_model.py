"""Models of known shapes with random weights, made on the device: no checkpoint is read."""

from dataclasses import dataclass
from unittest import mock

import torch

from replicas.config import (
    CacheConfig,
    DType,
    EngineConfig,
    Hardware,
    ModelConfig,
    RopeConfig,
    SchedulerConfig,
    resolve,
)
from replicas.models.llama import Llama
from replicas.parallel import TpGroup
from replicas.runner import model_runner
from replicas.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama without biases."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool

    def weight(self, name: str) -> tuple[int, ...]:
        """Shape of the whole weight that a checkpoint calls ``name``."""
        hidden, kv = self.hidden_size, self.num_kv_heads * self.head_dim
        by_name = {
            "embed_tokens": (self.vocab_size, hidden), "lm_head": (self.vocab_size, hidden),
            "q_proj": (self.num_heads * self.head_dim, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden),
            "o_proj": (hidden, self.num_heads * self.head_dim), "gate_proj": (self.intermediate_size, hidden),
            "up_proj": (self.intermediate_size, hidden), "down_proj": (hidden, self.intermediate_size),
        }  # fmt: skip
        return by_name.get(name.split(".")[-2], (hidden,))  # the rest are norms

    def model_config(self, *, context_len: int = 1, dtype: DType = "float32") -> ModelConfig:
        return ModelConfig(
            path="", architecture="LlamaForCausalLM", vocab_size=self.vocab_size, hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size, num_layers=self.num_layers, num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, rms_norm_eps=1e-5, rope=RopeConfig(),
            context_len=context_len, tie_embeddings=self.tied, attention_bias=False, output_bias=False,
            mlp_bias=False, qk_norm=False, eos_ids=(), dtype=dtype,
        )  # fmt: skip

    def embedding_bytes(self, dtype: torch.dtype) -> int:
        """Of the embedding table, which a step that does not use it as the head hardly reads."""
        return self.vocab_size * self.hidden_size * dtype.itemsize


SHAPES = (
    Shape(
        name="llama-8b", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32,
        num_kv_heads=8, head_dim=128, tied=False,
    ),
    Shape(
        name="smollm2-135m", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, tied=True,
    ),
)  # fmt: skip
TINY = Shape(
    name="tiny", vocab_size=256, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, tied=True,
)  # fmt: skip


def make_runner(shape: Shape, device: torch.device, *, max_running: int, max_len: int) -> ModelRunner:
    """One rank of an engine with random weights: bf16 on a GPU, fp32 on a CPU."""
    config = _config(shape, device, max_running=max_running, max_len=max_len)

    def fill(model: Llama, config: ModelConfig, tp: TpGroup) -> None:
        dtype = getattr(torch, config.dtype)
        for name, put in model.weights().items():
            put(torch.randn(shape.weight(name), device=device, dtype=dtype) * 0.02)
        for _, layer in model.walk():
            layer.finalize(tp.device, dtype)

    with mock.patch.object(model_runner, "load_weights", fill):
        return ModelRunner(config, TpGroup(device=device))


def _config(shape: Shape, device: torch.device, *, max_running: int, max_len: int) -> EngineConfig:
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 1 << 30
    return resolve(
        shape.model_config(context_len=max_len, dtype="bfloat16" if device.type == "cuda" else "float32"),
        Hardware(device="cuda" if device.type == "cuda" else "cpu", num_cpus=1, available_memory_bytes=free),
        cache=CacheConfig(max_total_tokens=4096 if shape is TINY else None),
        scheduler=SchedulerConfig(max_running_requests=max_running),
    )
