"""Models of known shapes with random weights, made on the device: no checkpoint is read."""

import functools
from dataclasses import dataclass
from unittest import mock

import torch

from replicas import launch
from replicas.config import (
    Attention,
    CacheConfig,
    DType,
    KvDType,
    ModelConfig,
    ParallelConfig,
    RopeConfig,
    SchedulerConfig,
)
from replicas.engine.engine import Engine
from replicas.engine.ranks import LocalWorkers, local_worker
from replicas.layers.tp_group import TpGroup
from replicas.models.llama import Llama
from replicas.ranks.worker import WorkerSpec
from replicas.runner import model_runner


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
        """Return the shape of the whole weight that a checkpoint calls ``name``."""
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
        """Return the size of the embedding table, which a step that does not use it as the head hardly reads."""
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


class NoText:
    """A tokenizer whose tokens have no text."""

    strips_leading_space = False
    eos_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self._pieces = [b""] * vocab_size

    def pieces(self, skip_special_tokens: bool) -> list[bytes]:
        return self._pieces


@dataclass(frozen=True, slots=True)
class Fill:
    """A `load_weights` that reads no files; every rank makes the same weights."""

    shape: Shape

    def __call__(self, model: Llama, config: ModelConfig, tp: TpGroup, *, one_order: bool) -> None:
        made = getattr(torch, config.dtype)
        torch.manual_seed(0)
        for name, put in model.weights().items():
            put(torch.randn(self.shape.weight(name), device=tp.device, dtype=made) * 0.02)
        for _, layer in model.walk():
            layer.multiply_by(config.weight_format, one_order=one_order)
            layer.finalize(tp.device, made)


def _follow(shape: Shape, spec: WorkerSpec) -> None:
    """Run a follower whose weights are made like rank 0's."""
    model_runner.load_weights = Fill(shape)
    local_worker(spec)


def start_engine(
    shape: Shape, *, max_running: int, max_len: int, tp: int = 1, cuda_graphs: bool = True,
    kv_dtype: KvDType | None = None, attention: Attention = "auto",
) -> Engine:  # fmt: skip
    """Return an engine as deployments start it, on whatever device there is: bf16 on a GPU, fp32 on a CPU.

    Only what it reads of a model's folder is made up.
    """
    dtype: DType = "bfloat16" if torch.cuda.is_available() else "float32"
    config = shape.model_config(context_len=max_len, dtype=dtype)
    with (
        mock.patch.object(model_runner, "load_weights", Fill(shape)),
        mock.patch.object(launch, "load_model_config", return_value=config),
        mock.patch.object(launch, "Tokenizer", return_value=NoText(shape.vocab_size)),
    ):
        return launch.load_engine(
            launch.EngineSettings(
                model=shape.name,
                cache=CacheConfig(max_total_tokens=4096 if shape.name == TINY.name else None, kv_dtype=kv_dtype),
                scheduler=SchedulerConfig(max_running_requests=max_running),
                num_threads=1,
                parallel=ParallelConfig(tp=tp),
                workers=LocalWorkers(functools.partial(_follow, shape)),
                cuda_graphs=cuda_graphs,
                attention=attention,
            )
        )
