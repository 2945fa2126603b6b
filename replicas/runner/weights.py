"""Loads the safetensors of a checkpoint into a model.

Owns:      which weights must be there, and what is logged while they load.
Never:     slices or fuses (layers do), or decides where the KV pool goes.
Invariant: a model is loaded completely, or InvalidConfig says which weights are missing or unexpected.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from replicas.config import ModelConfig, Products
from replicas.errors import InvalidConfig
from replicas.kernels.int8_tiles import cpu_has_vnni
from replicas.kernels.panels import make
from replicas.layers.layer import Layer, full_name
from replicas.layers.tp_group import TpGroup
from replicas.memory.kv_scales import KV_SCALE
from replicas.models.llama import Llama
from replicas.runner.model_files import listing, model_identity
from replicas.runner.panel_file import Keep, panel_file

if TYPE_CHECKING:
    from replicas.models.transformers import TransformersModel

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (layers done, layers in all)
# in some checkpoints, but computed here
DERIVED = re.compile(r"rotary_emb\.inv_freq$")
BLOCK = re.compile(r"model\.layers\.(\d+)\.")


def load_weights(
    model: "Llama | TransformersModel",
    config: ModelConfig,
    tp: TpGroup,
    *,
    products: Products,
    progress: Progress | None = None,
) -> None:
    """Fill ``model`` from the safetensors of ``config.path``: this rank's slices, on its device, in ``config.dtype``.

    Args:    products: the kernels that multiply by them in fp32 on a CPU.
             progress: called after each layer; None shows a bar on a terminal and nothing elsewhere. Rank 0 also logs
             each tenth, with the bytes of the checkpoint.
    Raises:  InvalidConfig that lists the missing and unexpected weights.
    """
    if not isinstance(model, Layer):
        model.load(products)
        return
    folder = Path(config.path)
    wanted, stacked = model.weights(), model.stacked_weights()
    found: set[str] = set()
    num_bytes: dict[str, int] = {}  # by name, as it lies in the checkpoint
    for file in safetensors_files(folder):
        with safe_open(file, framework="pt") as tensors:
            names = set(tensors.keys())
            for name in names & wanted.keys():
                tensor = tensors.get_tensor(name)  # a view of the mapped file; nothing is read yet
                num_bytes[name] = tensor.nbytes
                wanted[name](tensor)
            for name in names & stacked.keys():
                tensor = tensors.get_tensor(name)
                num_bytes[name] = tensor.nbytes
                stacked[name].put(tensor)
                found.update(stacked[name].fills)
        found |= names - stacked.keys()
    found = {name for name in found if config.mla is None or _block(name) < config.num_layers}
    _check_names(folder, wanted.keys(), found, tied=config.tie_embeddings)
    layers = list(model.walk())
    for _, layer in layers:
        layer.multiply_by(products, config.weight_format)
    loaded = LoadLog(sum(num_bytes.values()), write=log.info if tp.rank == 0 else log.debug)
    bar = _bar(f"loading {folder.name}") if progress is None else nullcontext(progress)
    with bar as advance, _kept(config, tp) as keep:
        for done, (prefix, layer) in enumerate(layers, start=1):
            layer.finalize(tp.device, getattr(torch, config.dtype), keep(prefix))
            loaded.add(sum(num_bytes.get(full_name(prefix, name), 0) for name in (*layer.slots(), *layer.wholes())))
            advance(done, len(layers))


def _kept(config: ModelConfig, tp: TpGroup) -> AbstractContextManager[Keep]:
    """Return where the packed weights of a rank come from."""
    if tp.device.type != "cpu":
        return nullcontext(lambda name: make)
    format_ = config.weight_format
    meaning = {"identity": model_identity(config.path, config.quantization), "bytes": cpu_has_vnni()}
    what = f"{format_}-{tp.rank + 1}of{tp.size}"
    return panel_file(Path(config.path), what, {**meaning, "what": what})


MEASURED_S = 0.1  # over less a rate means nothing


class LoadLog:
    """Logs each tenth of a checkpoint that is loaded: "loading weights: 40 % (108 of 269 MB, 310 MB/s)"."""

    def __init__(
        self, total_bytes: int, *, write: Callable[..., None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total_bytes = total_bytes
        self._write = write
        self._clock = clock
        self._started_s = clock()
        self._done_bytes = 0
        self._tenths = 0  # logged

    def add(self, num_bytes: int) -> None:
        """Count loaded bytes, and log when they reach the next tenth."""
        self._done_bytes += num_bytes
        tenths = 10 * self._done_bytes // max(self._total_bytes, 1)
        if tenths <= self._tenths:
            return
        self._tenths = tenths
        since_s = self._clock() - self._started_s
        self._write(
            "loading weights: %.0f %% (%.0f of %.0f MB%s)",
            100 * self._done_bytes / self._total_bytes,
            self._done_bytes / 1e6,
            self._total_bytes / 1e6,
            f", {self._done_bytes / 1e6 / since_s:.0f} MB/s" if since_s >= MEASURED_S else "",
        )


def weight_bytes(model: "Llama | TransformersModel") -> int:
    """Count the bytes of the weights on this rank; a tied head counts once."""
    if not isinstance(model, Layer):
        return model.num_bytes
    return sum(layer.num_bytes for _, layer in model.walk())


def safetensors_files(folder: Path) -> list[Path]:
    """List a checkpoint's files: those of the index if there is one, else model.safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = [folder / "model.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise InvalidConfig(
            f"model: {folder} lacks {', '.join(missing)}; there is: {listing(folder)}. Only safetensors "
            f"are read: fetch the folder again, or save the model with Transformers' save_pretrained"
        )
    return files


def _block(name: str) -> int:
    """Return the number of the block that a weight belongs to; -1 if to none. DeepSeek-V3's checkpoints have one more
    than the model: it predicts a second token."""
    found = BLOCK.match(name)
    return -1 if found is None else int(found[1])


def _check_names(folder: Path, wanted: Iterable[str], found: set[str], *, tied: bool) -> None:
    missing = sorted(set(wanted) - found)
    ignored = {name for name in found if DERIVED.search(name) or KV_SCALE.search(name)}  # KV_SCALE: kv_scales.py reads
    extra = sorted(found - set(wanted) - ignored - ({"lm_head.weight"} if tied else set()))
    if missing or extra:
        raise InvalidConfig(
            f"model: the weights in {folder} do not fit its config.json: {len(missing)} missing{_some(missing)}, "
            f"{len(extra)} unexpected{_some(extra)}. The folder mixes two models, or the download is incomplete: fetch "
            f"it again"
        )


def _some(names: list[str]) -> str:
    return f" ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})" if names else ""


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    """Show a rich bar on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True)) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)
