"""What the router knows of the model without loading it: its config.json, its tokenizer.

Never: imports torch; the router process stays small.
"""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from deployments.places import local_path, shown_path
from deployments.schema import ModelSettings
from deployments.service import ModelFace
from replicas.errors import InvalidConfig


def read_face(model: ModelSettings) -> ModelFace:
    """Raises: InvalidConfig when there is no config.json, or the context asked for is longer than the model's."""
    config = _config_json(model.path)
    longest = int(config["max_position_embeddings"])
    if model.context_len is not None and model.context_len > longest:
        raise InvalidConfig(f"model.context_len = {model.context_len}; {model.path} allows 1 to {longest}")
    shown = shown_path(model.path)
    return ModelFace(
        name=model.name,
        path=shown,
        tokenizer_path=shown,
        context_len=model.context_len or longest,
        vocab_size=int(config["vocab_size"]),
        architectures=tuple(config.get("architectures") or ()),
        model_type=str(config.get("model_type", "")),
    )


def _config_json(path: str) -> dict[str, Any]:
    folder = Path(local_path(path))
    try:
        file = folder / "config.json" if folder.is_dir() else Path(hf_hub_download(path, "config.json"))
        config: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        raise InvalidConfig(f"model.path = {path!r}: its config.json cannot be read: {error}") from error
    return config
