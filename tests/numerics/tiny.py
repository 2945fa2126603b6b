"""Tiny random models of each family, saved by Transformers: what the numerics tests load."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SINKS: dict[str, Any] = {  # of GPT-OSS: every other layer has a window, as its config says by default
    "sliding_window": 9,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "gpt-oss": (GptOssConfig, SINKS),
    "llama": (LlamaConfig, {}),
    "llama-tied-biased": (LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (Qwen2MoeConfig, {**EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    "qwen3-moe": (Qwen3MoeConfig, {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-one-kv-head": (MistralConfig, {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": (Qwen2Config, {}),
    "qwen2-tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {}),
    "qwen3-tied": (Qwen3Config, {"tie_word_embeddings": True}),
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
LATENT: dict[str, Any] = {  # the shape of DeepSeek's, a latent vector of 16 + 16 numbers
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
# which chooses 8 tokens of texts several times as long; of so many heads that no scores are equal, among which
# Transformers' choice depends on the length of the text
INDEX = {"index_topk": 8, "index_n_heads": 32, "index_head_dim": 20}
LATENT_CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "v2": (DeepseekV2Config, {"n_shared_experts": 2, "routed_scaling_factor": 1.5}),
    "v2-lite": (DeepseekV2Config, {"q_lora_rank": None, "qk_rope_head_dim": 8, "first_k_dense_replace": 3}),
    "v2-groups-biased": (DeepseekV2Config, {"topk_method": "group_limited_greedy", "attention_bias": True, **GROUPS}),
    "v2-yarn": (DeepseekV2Config, {"rope_parameters": YARN}),
    "v3": (DeepseekV3Config, {"routed_scaling_factor": 2.5, **GROUPS}),
    "v3-yarn": (DeepseekV3Config, {"rope_parameters": YARN, **GROUPS}),
    "v3-halves": (DeepseekV3Config, {"rope_interleave": False, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "v3.2": (DeepseekV32Config, {**INDEX, **GROUPS}),
    "v3.2-yarn": (DeepseekV32Config, {**INDEX, "rope_parameters": YARN, **GROUPS}),
    "glm-4.7-flash": (Glm4MoeLiteConfig, {"mlp_layer_types": ["dense", "sparse", "dense"]}),
    "glm-5": (GlmMoeDsaConfig, {**INDEX, "indexer_types": ["full", "shared", "full"]}),
}
# a kind's seed is its place; one that came later is at the end, so that the others keep their numbers
LATER = ("gpt-oss", "v3.2", "v3.2-yarn", "glm-4.7-flash", "glm-5")
SEEDS = [*sorted(CONFIGS.keys() - set(LATER)), *(kind for kind in LATENT_CONFIGS if kind not in LATER), *LATER]
VOCAB = 101  # not a multiple of 2 or 3: ranks hold padded slices
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
PROMPTS = [list(range(3, 26)), [7], [90, 4, 4, 61, 100, 0, 33, 12, 9]]  # 23, 1 and 9 tokens


def save(kind: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """Makes the model, saves it into ``folder``, and returns it. Biases and norms are random too: each counts."""
    make, special = (CONFIGS | LATENT_CONFIGS)[kind]
    special = {**LATENT, **special} if kind in LATENT_CONFIGS else special
    torch.manual_seed(SEEDS.index(kind))
    model = AutoModelForCausalLM.from_config(make(**{**SHAPE, **special, **changes}), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(0.0, 0.1)
    model.float().eval().save_pretrained(folder)
    return model


@torch.inference_mode()
def uncached(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Transformers' logits [L, V] of the whole text."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def assert_greedy(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Each id of ``answer`` is Transformers' most likely one, behind those before it."""
    logits = uncached(model, [*prompt, *answer])[len(prompt) - 1 : -1]
    assert list(answer) == logits.argmax(dim=-1).tolist()


@torch.inference_mode()
def reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> tuple[torch.Tensor, list[int]]:
    """What Transformers makes of it: logits [L, V] of the prompt, and the next greedy ids."""
    ids = torch.tensor([prompt])
    out = model(ids, use_cache=True)
    logits, new = out.logits[0].float(), []
    while len(new) < num_tokens:
        new.append(int(out.logits[0, -1].argmax()))
        out = model(torch.tensor([[new[-1]]]), past_key_values=out.past_key_values, use_cache=True)
    return logits, new
