"""The class that runs each architecture of Hugging Face's config.json."""

from replicas.errors import UnsupportedModel
from replicas.models.llama import Llama
from replicas.models.qwen import Qwen2, Qwen3

MODELS: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
}


def model_class(architecture: str) -> type[Llama]:
    """Return the class that runs ``architecture``. Raises UnsupportedModel, listing those that can be run."""
    if architecture not in MODELS:
        raise UnsupportedModel(
            f"architecture {architecture!r} is not supported; supported: {', '.join(sorted(MODELS))}. Serve a model of "
            f"one of these, or add a file to replicas/models and its name to replicas/models/registry.py"
        )
    return MODELS[architecture]
