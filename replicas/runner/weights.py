"""Reads a model's folder: its config into a ModelConfig, its safetensors into a model.

Owns:      how files are found and named; which weights must be there.
Never:     slices or fuses (layers do), or decides where the KV pool goes.
Invariant: a model is loaded completely or InvalidConfig says which weights are missing or unexpected.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import safe_open

from replicas.config import Device, DType, ModelConfig, Products, Quantization
from replicas.errors import InvalidConfig
from replicas.hf_config import model_config_from_hf
from replicas.layers import int8
from replicas.layers.layer import full_name
from replicas.layers.tp_group import TpGroup
from replicas.models.llama import Llama
from replicas.models.registry import model_class
from replicas.runner.hf_files import architecture_of, read_config

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (layers done, layers in all)
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
# in some checkpoints, but computed here
DERIVED = re.compile(r"rotary_emb\.inv_freq$")


def model_folder(path_or_hub_id: str, *, revision: str | None = None, files: Sequence[str] = HUB_FILES) -> Path:
    """The local folder of a model; a hub id is fetched (or found in the hub's local cache).

    Args:   revision: of a hub id: branch, tag or commit; files: patterns of what is needed of it.
    Raises: InvalidConfig if there is no such folder and the hub cannot give it.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    if not HUB_ID.match(path_or_hub_id) or path_or_hub_id.startswith("models/"):
        raise InvalidConfig(
            f"model: there is no folder {path.absolute()}. Give a folder with config.json and *.safetensors, or a hub "
            f"id such as Qwen/Qwen3-0.6B; `make model` makes the embedded one, models/SmolLM2-135M-Instruct"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path_or_hub_id, revision=revision, allow_patterns=list(files)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise InvalidConfig(
            f"model: there is no folder {path.absolute()}, and the hub did not give {path_or_hub_id!r}: {error}. Check "
            f"the name, the network and HF_TOKEN, or give a local folder"
        ) from error


def load_model_config(
    path_or_hub_id: str,
    *,
    revision: str | None = None,
    dtype: DType | None = None,
    context_len: int | None = None,
    device: Device | None = None,
    quantization: Quantization = "none",
) -> ModelConfig:
    """The config of a model's folder or hub id.

    Args:    revision: of a hub id; None is its main branch.
             dtype: to compute in; None takes float32 on CPU (bfloat16 is slower there) and the checkpoint's on CUDA.
             context_len: a shorter context than the model's own; None takes the model's.
             device: for the default dtype; None is CUDA where there is one.
             quantization: of the weights, as they are loaded.
    Raises:  InvalidConfig (UnsupportedModel for architectures that replicas/models lacks), naming the file.
    """
    folder = model_folder(path_or_hub_id, revision=revision)
    if not (folder / "config.json").is_file():
        raise InvalidConfig(f"model: {folder} has no config.json; there is: {_listing(folder)}. Give a model's folder")
    model_class(architecture_of(folder))  # before Transformers, which says less about what it does not know
    hf = read_config(folder)
    if hf.get("hidden_act", "silu") != "silu":
        raise InvalidConfig(f"model: {folder}/config.json has hidden_act {hf['hidden_act']!r}; supported: 'silu'")
    if hf.get("quantization_config"):
        raise InvalidConfig(f"model: {folder} is quantized; supported: weights in float32, bfloat16 or float16")
    config = model_config_from_hf(
        str(path_or_hub_id) if folder == Path(path_or_hub_id) else str(folder),
        hf,
        eos_ids=_eos_ids(folder, hf),
        dtype=dtype or _default_dtype(folder, hf, device or ("cuda" if torch.cuda.is_available() else "cpu")),
    )
    config = replace(config, quantization=quantization)
    return config if context_len is None else _shorten(config, context_len)


def load_weights(
    model: Llama, config: ModelConfig, tp: TpGroup, *, products: Products, progress: Progress | None = None
) -> None:
    """Fill ``model`` from the safetensors of ``config.path``: this rank's slices, on its device, in ``config.dtype``.

    Args:    products: that multiply by them in fp32 on a CPU.
             progress: told after each layer; None shows a bar on a terminal and nothing elsewhere. Rank 0 also logs
             each tenth, with the bytes of the checkpoint.
    Raises:  InvalidConfig that lists what is missing or unexpected.
    """
    folder = Path(config.path)
    wanted = model.weights()
    found: set[str] = set()
    num_bytes: dict[str, int] = {}  # by name, as it lies in the checkpoint
    for file in safetensors_files(folder):
        with safe_open(file, framework="pt") as tensors:
            names = set(tensors.keys())
            for name in names & wanted.keys():
                tensor = tensors.get_tensor(name)  # a view of the mapped file; nothing is read yet
                num_bytes[name] = tensor.nbytes
                wanted[name](tensor)
        found |= names
    _check_names(folder, wanted.keys(), found, tied=config.tie_embeddings)
    layers = list(model.walk())
    for _, layer in layers:
        layer.multiply_by(products)
    if config.quantization == "int8":
        for _, layer in layers:
            layer.quantize()
        (log.info if tp.rank == 0 else log.debug)("int8 products: %s", int8.describe())
    loaded = LoadLog(sum(num_bytes.values()), tell=log.info if tp.rank == 0 else log.debug)
    with _bar(f"loading {folder.name}") if progress is None else _as_is(progress) as advance:
        for done, (prefix, layer) in enumerate(layers, start=1):
            layer.finalize(tp.device, getattr(torch, config.dtype))
            loaded.add(sum(num_bytes.get(full_name(prefix, name), 0) for name in layer.slots()))
            advance(done, len(layers))


MEASURED_S = 0.1  # a rate over less says nothing


class LoadLog:
    """Says after each tenth how much of a checkpoint is loaded: "loading weights: 40 % (108 of 269 MB, 310 MB/s)"."""

    def __init__(
        self, total_bytes: int, *, tell: Callable[..., None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total_bytes = total_bytes
        self._tell = tell
        self._clock = clock
        self._started_s = clock()
        self._done_bytes = 0
        self._tenths = 0  # told

    def add(self, num_bytes: int) -> None:
        """So many more are loaded."""
        self._done_bytes += num_bytes
        tenths = 10 * self._done_bytes // max(self._total_bytes, 1)
        if tenths <= self._tenths:
            return
        self._tenths = tenths
        since_s = self._clock() - self._started_s
        self._tell(
            "loading weights: %.0f %% (%.0f of %.0f MB%s)",
            100 * self._done_bytes / self._total_bytes,
            self._done_bytes / 1e6,
            self._total_bytes / 1e6,
            f", {self._done_bytes / 1e6 / since_s:.0f} MB/s" if since_s >= MEASURED_S else "",
        )


def weight_bytes(model: Llama) -> int:
    """Bytes of the weights on this rank; a tied head counts once."""
    return sum(layer.num_bytes for _, layer in model.walk())


def safetensors_files(folder: Path) -> list[Path]:
    """The files of a checkpoint: those of the index where there is one, else model.safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = [folder / "model.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise InvalidConfig(
            f"model: {folder} lacks {', '.join(missing)}; there is: {_listing(folder)}. Only safetensors "
            f"are read: fetch the folder again, or save the model with Transformers' save_pretrained"
        )
    return files


def _check_names(folder: Path, wanted: Iterable[str], found: set[str], *, tied: bool) -> None:
    missing = sorted(set(wanted) - found)
    extra = sorted(n for n in found - set(wanted) if not DERIVED.search(n) and not (tied and n == "lm_head.weight"))
    if missing or extra:
        raise InvalidConfig(
            f"model: the weights in {folder} do not fit its config.json: {len(missing)} missing{_some(missing)}, "
            f"{len(extra)} unexpected{_some(extra)}. The folder mixes two models, or the download is incomplete: fetch "
            f"it again"
        )


def _some(names: list[str]) -> str:
    return f" ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else ""


def _eos_ids(folder: Path, hf: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end a text: those of config.json and of generation_config.json, which chat models extend."""
    file = folder / "generation_config.json"
    generation = json.loads(file.read_text()) if file.is_file() else {}
    ids: set[int] = set()
    for value in (hf.get("eos_token_id"), generation.get("eos_token_id")):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))


def _default_dtype(folder: Path, hf: dict[str, Any], device: Device) -> DType:
    if device == "cpu":
        return "float32"
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    for dtype in get_args(DType):
        if name == dtype:
            return dtype  # type: ignore[no-any-return]
    raise InvalidConfig(f"model: {folder} is stored in {name}; set dtype to one of {', '.join(get_args(DType))}")


def _shorten(config: ModelConfig, context_len: int) -> ModelConfig:
    if not 1 <= context_len <= config.context_len:
        raise InvalidConfig(f"model.context_len = {context_len}; {config.path} allows 1 to {config.context_len} tokens")
    return replace(config, context_len=context_len)


def _listing(folder: Path) -> str:
    return ", ".join(sorted(p.name for p in folder.iterdir())[:12]) or "nothing"


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    """A rich bar on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True)) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _as_is(progress: Progress) -> Iterator[Progress]:
    yield progress
