"""What the router knows of the model without loading it: its config.json, its tokenizer.

Never: imports torch; the router process stays small.
"""

import json
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

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
    try:
        file = cached_file(local_path(path), "config.json")
    except OSError as error:
        raise InvalidConfig(f"model.path = {path!r} has no config.json: {error}") from error
    assert file is not None
    config: dict[str, Any] = json.loads(Path(file).read_text())
    return config
