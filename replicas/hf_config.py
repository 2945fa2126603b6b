"""From Hugging Face's config.json, as a dict, to a `ModelConfig`.

Owns:  which keys say what, their defaults by architecture, and which features are refused.
Never: reads files (`replicas/runner/weights.py` does).
"""

from collections.abc import Mapping
from typing import Any

from replicas.config import DType, ModelConfig, RopeConfig
from replicas.errors import InvalidConfig


def model_config_from_hf(path: str, hf: Mapping[str, Any], *, eos_ids: tuple[int, ...], dtype: DType) -> ModelConfig:
    """Build it from a Transformers config as a dict (``AutoConfig.to_dict()``, which has defaults filled in).

    Raises: InvalidConfig for features that the dense models here do not have (sliding windows, other rope kinds).
    """
    architectures = hf.get("architectures") or ["?"]
    architecture = str(architectures[0])
    heads = int(hf["num_attention_heads"])
    if hf.get("sliding_window") is not None and hf.get("use_sliding_window", True):
        window, longest = int(hf["sliding_window"]), int(hf["max_position_embeddings"])
        if window < longest:
            raise InvalidConfig(
                f"{path}: attention with a sliding window of {window} tokens is not supported; set \"sliding_window\": "
                f'null and "max_position_embeddings": {window} in its config.json to serve it with a shorter context'
            )
    qwen2 = architecture.startswith("Qwen2")
    return ModelConfig(
        path=path,
        architecture=architecture,
        vocab_size=int(hf["vocab_size"]),
        hidden_size=int(hf["hidden_size"]),
        intermediate_size=int(hf["intermediate_size"]),
        num_layers=int(hf["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or heads),
        head_dim=int(hf.get("head_dim") or int(hf["hidden_size"]) // heads),
        rms_norm_eps=float(hf["rms_norm_eps"]),
        rope=_rope_from_hf(path, hf),
        context_len=int(hf["max_position_embeddings"]),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        attention_bias=qwen2 or bool(hf.get("attention_bias", False)),
        output_bias=not qwen2 and bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
        qk_norm=architecture.startswith("Qwen3"),
        eos_ids=eos_ids,
        dtype=dtype,
    )


def _rope_from_hf(path: str, hf: Mapping[str, Any]) -> RopeConfig:
    raw = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = float(raw.pop("rope_theta", None) or hf.get("rope_theta") or 10_000.0)
    kind = str(raw.pop("rope_type", None) or raw.pop("type", None) or "default")
    if kind not in ("default", "linear", "llama3"):
        raise InvalidConfig(f"{path}: rope type {kind!r} is not supported; supported: default, linear, llama3")
    scaling = {k: float(v) for k, v in raw.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return RopeConfig(theta=theta, kind=kind, scaling=scaling)  # type: ignore[arg-type]
