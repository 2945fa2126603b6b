"""Adapters (LoRA) of random numbers, as PEFT writes them, for tests and benchmarks."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from replicas.checkpoints.adapters import CONFIG, WEIGHTS, identify
from replicas.types import AdapterRef

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path, model: Path, *, rank: int = 8, seed: int = 0, targets: tuple[str, ...] = TARGETS, size: float = 0.05,
    dtype: torch.dtype = torch.float32, **config: object,
) -> AdapterRef:  # fmt: skip
    """Write an adapter of the model in folder ``model``, in ``dtype``, that changes its answers by about ``size``."""
    of = json.loads((model / "config.json").read_text())
    hidden, inner = of["hidden_size"], of["intermediate_size"]
    head_dim = of.get("head_dim") or hidden // of["num_attention_heads"]
    heads, kv = of["num_attention_heads"] * head_dim, of["num_key_value_heads"] * head_dim
    shapes = {
        "q_proj": (heads, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, heads),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
    }  # fmt: skip
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(of["num_hidden_layers"]):
        for target in targets:
            out, into = shapes[target]
            name = f"base_model.model.model.layers.{layer}.{'self_attn' if target in ATTENTION else 'mlp'}.{target}"
            for part, shape, deviation in (("A", (rank, into), into**-0.5), ("B", (out, rank), size * rank**-0.5)):
                values = rng.standard_normal(shape, np.float32) * np.float32(deviation)
                tensors[f"{name}.lora_{part}.weight"] = torch.from_numpy(values).to(dtype)
    settings = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none",
        "task_type": "CAUSAL_LM", "base_model_name_or_path": model.name, **config,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(settings))
    save_file(tensors, folder / WEIGHTS)
    return AdapterRef(identity=identify(folder).identity, path=str(folder))
