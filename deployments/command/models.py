"""``manta list``: the models at hand, and whether each can be served; ``manta pull MODEL``: one more from the hub.

Owns:      where models are looked for: models/ of this folder and of the checkout, and the Hugging Face hub's cache.
Never:     judges a model otherwise than `manta check` does; asks the hub for the list.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from deployments.places import MODEL_ADVICE, local_model, local_path, may_be_hub_id, roots, weights_bytes
from deployments.replica.feasible import ANY_MEMORY, examined
from deployments.watch.terminal.table import NOTHING, Cell, Table, count, plain
from replicas.errors import InvalidConfig
from replicas.loading.model_files import load_model_config, model_folder
from replicas.memory.ram import available_ram


def at_hand() -> dict[str, Path]:
    """Find the models of this machine: the name that `manta serve` takes, and the folder or GGUF file."""
    folders = [path for root in roots() for path in sorted((root / "models").glob("*"))]
    found = {f"models/{path.name}": path for path in reversed(folders) if path.suffix == ".gguf" or _is_model(path)}
    return dict(sorted(found.items())) | dict(_of_hub())


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))


def _of_hub() -> Iterator[tuple[str, Path]]:
    """Yield what the hub's cache has: of each model the main branch, or what was fetched last."""
    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda each: each.repo_id):
        if repo.repo_type == "model" and repo.revisions:
            newest = max(repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
            yield repo.repo_id, newest.snapshot_path


def show() -> int:
    """Print the models at hand. Return the exit status: 0."""
    rows, reasons = list[dict[str, Cell]](), list[str]()
    for name, path in at_hand().items():
        problems = _problems(path, available_bytes=available_ram())
        rows.append({"model": name, **_form(path), "can be served": "no" if problems else "yes"})
        reasons += [f"{name}: {each}" for each in problems]
    print(plain(Table(rows)) if rows else f"there is no model here: `manta pull MODEL` fetches one; {MODEL_ADVICE}")
    if reasons:
        print("\n" + "\n".join(reasons))
    return 0


def _form(path: Path) -> dict[str, Cell]:
    """Say how large the weights are and in what format, and how long the context is, as far as it can be read."""
    form: dict[str, Cell] = dict.fromkeys((">size", "weights", ">context"), NOTHING)
    with contextlib.suppress(InvalidConfig, OSError, ValueError):
        folder = Path(local_path(str(path)))
        form[">size"] = f"{count(weights_bytes(str(folder)))}B"
        config = load_model_config(str(folder), device="cpu")
        hf = json.loads((folder / "config.json").read_text())
        plain_dtype = str(hf.get("dtype") or hf.get("torch_dtype") or NOTHING)
        form["weights"] = plain_dtype if config.stored is None else config.stored.about
        form[">context"] = f"{config.context_len:,}"
    return form


def pull(name: str, revision: str | None) -> int:
    """Fetch a model of the hub if Manta can serve it. Return the exit status: 0, or 1 with the reason."""
    if may_be_hub_id(name) and local_model(name) is None:
        print(f"asking the Hugging Face hub for {name}", file=sys.stderr, flush=True)
    try:
        problems = _problems(name, revision)  # of its config.json, before the weights are fetched
        if not problems:
            folder = model_folder(name, revision=revision)
            problems = _problems(folder)
    except InvalidConfig as error:
        problems = list(error.problems)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    print(f"{name}: {count(weights_bytes(str(folder)))}B of weights in {folder}")
    return 0


def _problems(path: Path | str, revision: str | None = None, *, available_bytes: int = ANY_MEMORY) -> list[str]:
    """Return a sentence for each reason why a model cannot be served with the defaults of all settings."""
    model = {"path": str(path)} | ({} if revision is None else {"revision": revision})
    return examined({"model": model}, available_bytes=available_bytes)[1]
