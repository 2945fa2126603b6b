"""Where things are: the project's root, and a model's path as settings, processes and clients name it.

Never: downloads anything.
"""

import difflib
import ipaddress
from pathlib import Path

from replicas.errors import InvalidConfig

ROOT = Path(__file__).resolve().parents[2]  # of the checkout, where models/ lies


def local_path(path: str) -> str:
    """``path`` of the settings as the loaders need it: a folder's full path, or a hub id as it is."""
    for folder in (root / Path(path).expanduser() for root in _roots()):
        if folder.is_dir():
            return str(folder.resolve())
    return path


def shown_path(path: str) -> str:
    """``path`` as clients see it: relative to the project's root where it lies inside."""
    found = Path(local_path(path))
    return str(found.relative_to(ROOT)) if found.is_relative_to(ROOT) else str(found) if found.is_dir() else path


def check_model_path(path: str) -> None:
    """Raises: InvalidConfig for a folder that is not there. A hub id (owner/name) is left to the loader."""
    if Path(local_path(path)).is_dir():
        return
    looks_like_folder = path.startswith((".", "/", "~", "models/")) or path.count("/") != 1
    if looks_like_folder:
        places = "" if Path(path).expanduser().is_absolute() else f" in {' or '.join(map(str, _roots()))}"
        raise InvalidConfig(
            f"model.path = {path!r}: there is no such folder{places}{nearest_folder(path)}; `make model` makes the "
            "embedded model, and a hub id has the form owner/name"
        )


def nearest_folder(path: str) -> str:
    """In words that follow ``path``: a folder there that may have been meant, or ""."""
    given = Path(path).expanduser()
    for root in _roots():
        beside = (root / given).parent  # an absolute path stays what it is
        names = [each.name for each in beside.iterdir() if each.is_dir()] if beside.is_dir() else []
        near = difflib.get_close_matches(given.name, names, n=1)
        if near:
            return f" (did you mean {str(given.parent / near[0])!r}?)"
    return ""


def _roots() -> list[Path]:
    """Where a relative path is looked for, each once."""
    return list(dict.fromkeys([Path.cwd(), ROOT]))


def weights_bytes(path: str) -> int:
    """Size of the weights in a local folder; 0 when it is not here yet."""
    folder = Path(local_path(path))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
