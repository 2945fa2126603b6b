"""The class that runs a model: ours, by the architecture of Hugging Face's config.json, or Transformers' own module."""

import importlib
from typing import TYPE_CHECKING, cast

from replicas.config import ModelConfig
from replicas.errors import UnsupportedModel

if TYPE_CHECKING:
    from replicas.models.llama import Llama
    from replicas.models.transformers import TransformersModel

# the class, or its module and name, where it is imported for a model that needs it only: that one can be run is known
# without torch
MODELS: "dict[str, type[Llama] | tuple[str, str]]" = {
    "DeepseekV2ForCausalLM": ("replicas.models.deepseek", "Deepseek"),
    "DeepseekV3ForCausalLM": ("replicas.models.deepseek", "Deepseek"),
    "DeepseekV32ForCausalLM": ("replicas.models.deepseek", "Deepseek"),
    "Glm4MoeLiteForCausalLM": ("replicas.models.deepseek", "Deepseek"),
    "GlmMoeDsaForCausalLM": ("replicas.models.deepseek", "Deepseek"),
    "GptOssForCausalLM": ("replicas.models.gpt_oss", "GptOss"),
    "LlamaForCausalLM": ("replicas.models.llama", "Llama"),
    "MistralForCausalLM": ("replicas.models.llama", "Llama"),
    "MixtralForCausalLM": ("replicas.models.moe", "Mixtral"),
    "Qwen2ForCausalLM": ("replicas.models.qwen", "Qwen2"),
    "Qwen2MoeForCausalLM": ("replicas.models.moe", "Qwen2Moe"),
    "Qwen3ForCausalLM": ("replicas.models.qwen", "Qwen3"),
    "Qwen3MoeForCausalLM": ("replicas.models.moe", "Qwen3Moe"),
}


def model_class(config: ModelConfig) -> "type[Llama] | type[TransformersModel]":
    """Return the class that runs ``config``. Raises UnsupportedModel, listing those that can be run."""
    if config.implementation == "transformers":
        from replicas.models.transformers import TransformersModel

        return TransformersModel
    check_native(config.architecture)
    found = MODELS[config.architecture]
    if isinstance(found, tuple):
        module, name = found
        return cast("type[Llama]", getattr(importlib.import_module(module), name))
    return found


def check_native(architecture: str) -> None:
    """Check that a class of ours runs ``architecture``. Raises UnsupportedModel, listing those that there are."""
    if architecture not in MODELS:
        raise UnsupportedModel(
            f"architecture {architecture!r} is not supported; supported: {', '.join(sorted(MODELS))}. Serve a model of "
            f"one of these, or add a file to replicas/models and its name to replicas/models/registry.py"
        )
