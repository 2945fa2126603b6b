"""Which files of a folder hold a checkpoint in safetensors: known without torch, before a model is loaded.

Invariant: only files of the model's own folder are named, whatever an index says.
"""

import json
import os
from pathlib import Path

from replicas.errors import InvalidConfig

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"


def listing(folder: Path) -> str:
    """Name what a folder holds, for messages."""
    return ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"


def safetensors_files(folder: Path) -> list[Path]:
    """List a checkpoint's files: those of the index if there is one, else model.safetensors. Raises: InvalidConfig."""
    names = weight_files(folder)
    missing = [name for name in names if not os.path.isfile(folder / name)]  # Path.is_file raises for a long name
    if missing:
        raise InvalidConfig(
            f"model: {folder} lacks {', '.join(missing[:8])}; there is: {listing(folder)}. Only safetensors and GGUF "
            f"are read: fetch the folder again, or save the model with Transformers' save_pretrained"
        )
    return [folder / name for name in names]


def weight_files(folder: Path) -> list[str]:
    """Name a checkpoint's files, there or not. Raises: InvalidConfig."""
    return sorted(set(weight_map(folder).values())) or [WHOLE]


def weight_map(folder: Path) -> dict[str, str]:
    """Read the index: tensor -> file. {} without one."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    try:
        found = json.loads(index.read_text())["weight_map"]
        names = {str(name): str(file) for name, file in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidConfig(f"model: {index} is no index of weights: {error!r:.200}. Fetch the folder again") from error
    outside = [file for file in names.values() if Path(file).name != file or not file.endswith(".safetensors")]
    if outside:
        raise InvalidConfig(f"model: {index} names {outside[0]!r}; allowed: safetensors files of the same folder")
    return names
