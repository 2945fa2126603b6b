"""A model folder's config.json, with the defaults of its architecture where it leaves something out.

Owns:      when Transformers is asked for those defaults: importing its configuration classes takes 3 s of a start
           (they import its kernels and torch's compiler), and the config.json of a checkpoint seldom needs them.
Never:     interprets the values (replicas/hf_config.py does).
Invariant: the result means the same to `model_config_from_hf` whichever way it was made.
"""

import json
from pathlib import Path
from typing import Any

from replicas.errors import InvalidConfig

# what has a default other than "absent" in some architecture that replicas/models runs
_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)
_BY_FAMILY = {
    "Llama": (),
    "Mistral": ("sliding_window",),
    "Qwen2": ("use_sliding_window",),
    "Qwen3": ("use_sliding_window", "head_dim"),
}


def read_config(folder: Path) -> dict[str, Any]:
    """The keys of ``folder``'s config.json, complete. Raises: InvalidConfig, naming the file."""
    config = _as_it_is(folder)
    try:
        return config if _is_complete(config) else _with_defaults(folder)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidConfig(f"model.path: {folder}/config.json cannot be read: {error}") from error


def architecture_of(folder: Path) -> str:
    """As ``folder``'s config.json says, "?" where it does not. Raises: InvalidConfig, naming the file."""
    return str((_as_it_is(folder).get("architectures") or ["?"])[0])


def _as_it_is(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"model.path: {folder}/config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidConfig(f"model.path: {folder}/config.json holds no settings of a model")
    return config


def _is_complete(config: dict[str, Any]) -> bool:
    """Whether no default is needed. What is no number is left to Transformers too: it says what is wrong."""
    architecture = str((config.get("architectures") or ["?"])[0])
    keys = next((keys for name, keys in _BY_FAMILY.items() if architecture.startswith(name)), None)
    rope_theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    numbers = [rope_theta, *(config.get(key) for key in _NUMBERS)]
    return (
        keys is not None
        and all(isinstance(number, int | float) for number in numbers)
        and all(key in config for key in (*keys, "eos_token_id"))
    )


def _with_defaults(folder: Path) -> dict[str, Any]:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(str(folder)).to_dict()
    except StrictDataclassError as error:
        raise ValueError(str(error)) from error
    return config
