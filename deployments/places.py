"""The project's version and place, a model's path as settings, processes and clients name it, and HTTP proxies.

Never: downloads anything.
"""

import difflib
import ipaddress
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from replicas.errors import InvalidConfig

VERSION = "0.1.0"  # pyproject.toml takes it from here
ROOT = Path(__file__).resolve().parents[1]  # the checkout, where models/ lies, or the folder of the installed packages
IS_CHECKOUT = (ROOT / "pyproject.toml").is_file()
MODEL_ADVICE = f"{'`make model` makes the embedded model, and ' * IS_CHECKOUT}a hub id has the form owner/name"


def local_path(path: str) -> str:
    """Resolve ``path`` of the settings for the loaders: a folder's full path, which of a GGUF file is the one that
    stands for it, or a hub id unchanged. Raises: InvalidConfig for a GGUF file that cannot be served."""
    found = local_model(path)
    if found is None:
        return path
    if (found / "config.json").exists():
        return str(found)
    from replicas.checkpoints.gguf_folder import folder_of, gguf_in

    file = gguf_in(found)
    return str(found if file is None else folder_of(file))


def local_model(path: str) -> Path | None:
    """Find a folder or a GGUF file; None for a hub id."""
    for each in (root / Path(path).expanduser() for root in roots()):
        if each.is_dir() or (each.suffix == ".gguf" and each.is_file()):
            return each.resolve()
    return None


def shown_path(path: str) -> str:
    """Shorten ``path`` for clients: relative to the project's root if it lies inside."""
    found = local_model(path) or Path(path)
    return str(found.relative_to(ROOT)) if found.is_relative_to(ROOT) else str(found) if found.exists() else path


def may_be_hub_id(path: str) -> bool:
    """Whether ``path`` has the form owner/name, and no folder here has the owner's name."""
    owner, slash, name = path.partition("/")
    is_path = path.startswith((".", "/", "~", "models/")) or any((root / owner).is_dir() for root in roots())
    return bool(owner and slash and name) and "/" not in name and not is_path


def check_model_path(path: str) -> None:
    """Check that a folder or a GGUF file exists; a hub id (owner/name) is left to the loader. Raises: InvalidConfig."""
    if local_model(path) is not None:
        local_path(path)
        return
    if any((root / Path(path).expanduser()).is_file() for root in roots()):
        raise InvalidConfig(f"model.path = {path!r}: is a file, and no GGUF; {MODEL_ADVICE}")
    if not may_be_hub_id(path):
        places = "" if Path(path).expanduser().is_absolute() else f" in {' or '.join(map(str, roots()))}"
        raise InvalidConfig(
            f"model.path = {path!r}: there is no such folder{places}{nearest_folder(path)}; {MODEL_ADVICE}"
        )


def nearest_folder(path: str) -> str:
    """Suggest a folder with a similar name, in words that follow ``path``; "" if there is none."""
    given = Path(path).expanduser()
    for root in roots():
        beside = (root / given).parent  # an absolute path stays what it is
        names = [each.name for each in beside.iterdir() if each.is_dir()] if beside.is_dir() else []
        near = difflib.get_close_matches(given.name, names, n=1)
        if near:
            return f" (did you mean {str(given.parent / near[0])!r}?)"
    return ""


def roots() -> list[Path]:
    """List the folders in which a relative path is searched, without repeats."""
    return list(dict.fromkeys([Path.cwd(), *([ROOT] if IS_CHECKOUT else [])]))


def weights_bytes(path: str) -> int:
    """Sum the size of the weights in a local folder; 0 if there is no such folder."""
    folder = Path(local_path(path))
    files = [*folder.glob("*.safetensors"), *folder.glob("*.gguf")] if folder.is_dir() else []
    return sum(file.stat().st_size for file in files)


def proxies_of(environ: Mapping[str, str] = os.environ) -> list[str]:
    """List the variables by which libraries send what they ask through an HTTP proxy."""
    return [name for name in environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")]


def ask_nodes_directly(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have gRPC, by which Serve's processes call each other, ask no HTTP proxy for an address. What asks other hosts,
    such as the hub, goes on through the proxy."""
    environ.setdefault("no_grpc_proxy", "0.0.0.0/0,::/0,localhost")


def is_loopback(host: str) -> bool:
    """Whether ``host`` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
