"""What the router knows of the model without loading it: its config.json, its tokenizer.

Never: imports torch; the router process stays small.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from deployments.http.service import ModelFace
from deployments.settings.places import local_path, nearest_folder, shown_path
from deployments.settings.schema import ModelSettings
from replicas.errors import InvalidConfig

TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def read_face(model: ModelSettings) -> ModelFace:
    """Raises: InvalidConfig when there is no config.json, it lacks what a router needs, or the context asked for is
    longer than the model's."""
    config = _config_json(model)
    try:
        longest, vocab_size = int(config["max_position_embeddings"]), int(config["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidConfig(f"model.path = {model.path!r}: its config.json has no number for {error}") from error
    if model.context_len is not None and model.context_len > longest:
        raise InvalidConfig(f"model.context_len = {model.context_len}; {model.path} allows 1 to {longest}")
    shown = shown_path(model.path)
    return ModelFace(
        name=model.name,
        path=shown,
        tokenizer_path=shown,
        context_len=model.context_len or longest,
        vocab_size=vocab_size,
        architectures=tuple(config.get("architectures") or ()),
        model_type=str(config.get("model_type", "")),
    )


def config_folder(model: ModelSettings) -> Path:
    """The folder with the model's config.json: its own, or, of a hub id, one of the hub's local cache.

    Raises: InvalidConfig when the hub does not give it.
    """
    folder = Path(local_path(model.path))
    if folder.is_dir():
        return folder
    try:
        with _quiet_hub():
            return Path(hf_hub_download(model.path, "config.json", revision=model.revision)).parent
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        raise InvalidConfig(
            f"model.path = {model.path!r}: there is no such folder{nearest_folder(model.path)}, and the Hugging Face "
            f"hub did not give its config.json: {_first_line(error)}. Check the name, the network and HF_TOKEN, or "
            "give a folder"
        ) from error


def tokenizer_folder(model: ModelSettings) -> str:
    """The folder with the model's tokenizer; of a hub id it is fetched, without the weights."""
    folder = Path(local_path(model.path))
    if folder.is_dir():
        return str(folder)
    return str(snapshot_download(model.path, revision=model.revision, allow_patterns=TOKENIZER_FILES))


def _config_json(model: ModelSettings) -> dict[str, Any]:
    file = config_folder(model) / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"model.path = {model.path!r}: its config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidConfig(f"model.path = {model.path!r}: its config.json holds no settings")
    return config


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    """Without the hub's lines on each of its tries again: what comes of them is said once."""
    hub = logging.getLogger("huggingface_hub")
    before = hub.level
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub.setLevel(before)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
