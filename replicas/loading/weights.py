"""Loads a checkpoint into a model, one layer after the other.

Owns:      which weights must be there, and what is logged while they load.
Never:     slices or fuses (layers do), or decides where the KV pool goes.
Invariant: a model is loaded completely, or InvalidConfig says which weights are missing or unexpected.
"""

import ctypes
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replicas.checkpoints.checkpoint import Checkpoint, open_checkpoint, weight_files
from replicas.checkpoints.stored import Window
from replicas.checkpoints.weight_index import HEAD
from replicas.config import MLAConfig, ModelConfig
from replicas.errors import InvalidConfig
from replicas.kernels import bf16_tiles
from replicas.kernels.int8_tiles import cpu_has_vnni
from replicas.kernels.panels import make
from replicas.layers.layer import Layer, Put, full_name
from replicas.layers.tp_group import TpGroup
from replicas.loading.model_files import model_folder, model_identity
from replicas.loading.panel_file import Keep, panel_file
from replicas.memory.kv_scales import KV_SCALE
from replicas.memory.pool import ALIGNMENT, give_back
from replicas.models.llama import Llama

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
    one_order: bool,
    progress: Progress | None = None,
) -> None:
    """Fill ``model`` from the files of ``config.path``: this rank's slices, on its device, in ``config.dtype``. Weights
    of a quantised checkpoint stay as they are on a CPU where they fit its products, else they are widened, a layer at a
    time. What was read of mapped files is given back to the system, so that a process holds little beside its own.

    Args:    one_order: ranks add their parts of a product in one order.
             progress: called after each layer; None shows a bar on a terminal and nothing elsewhere. Rank 0 also logs
             each tenth, with the bytes of the checkpoint.
    Raises:  InvalidConfig that lists the missing and unexpected weights.
    """
    if not isinstance(model, Layer):
        model.load()
        return
    folder = model_folder(config.path)
    checkpoint = open_checkpoint(folder)
    wanted, stacked, there = model.weights(), model.stacked_weights(), checkpoint.names
    filled = {fills for name in there & stacked.keys() for fills in stacked[name].fills}
    found = (there - stacked.keys()) | filled
    found = {name for name in found if config.mla is None or _computes(config.mla, config.num_layers, name)}
    _check_names(folder, wanted.keys(), found, tied=config.tie_embeddings)
    if tp.rank == 0 and config.stored is not None:
        log.info("weights: %s", config.describe_weights())
    layers = list(model.walk())
    late: list[list[tuple[Put, Window]]] = []  # by layer
    for prefix, layer in layers:
        late.append(_put(layer, prefix, checkpoint, config))
        layer.multiply_by(config.weight_format, one_order=one_order)
    mappings = _mappings(weight_files(folder))
    total = sum(map(checkpoint.num_bytes, there & (wanted.keys() | stacked.keys())))
    loaded = LoadLog(total, write=log.info if tp.rank == 0 else log.debug)
    bar = _bar(f"loading {folder.name}") if progress is None else nullcontext(progress)
    with bar as advance, _kept(config, tp) as keep:
        for done, (prefix, layer) in enumerate(layers, start=1):
            for put, stored in late[done - 1]:
                put(stored.floats(0, stored.shape[0]))
            layer.finalize(tp.device, getattr(torch, config.dtype), keep(prefix))
            names = there.intersection(full_name(prefix, name) for name in (*layer.slots(), *layer.wholes()))
            give_back_mapped((part for name in names for part in checkpoint.mapped(name)), mappings)
            if names:
                _trim_heap()
            loaded.add(sum(map(checkpoint.num_bytes, names)))
            advance(done, len(layers))
    give_back_mapped((part for name in there for part in checkpoint.mapped(name)), mappings)  # a tied table, read last


def _put(layer: Layer, prefix: str, checkpoint: Checkpoint, config: ModelConfig) -> list[tuple[Put, Window]]:
    """Put a layer's weights. Returns: those that it takes as tensors only, which are to be widened just before their
    use."""
    late, there = [], checkpoint.names
    puts = {**layer.slots(), **{name: whole.put for name, whole in layer.wholes().items()}}
    for name, put in puts.items():
        if full_name(prefix, name) not in there:
            continue  # a tensor for each expert, or one for all: the checkpoint has either
        weight = checkpoint.weight(full_name(prefix, name))
        _check_shape(config, full_name(prefix, name), weight.shape)
        if isinstance(weight, Tensor) or layer.takes_stored:
            put(weight)  # type: ignore[arg-type]  # such a layer's `Put` takes both
        else:
            late.append((put, weight))
    return late


def _mappings(files: Sequence[Path]) -> list[tuple[int, int]]:
    """List the addresses at which ``files`` are mapped, if the system tells."""
    paths = {str(file.resolve()) for file in files}
    try:
        lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    except OSError:
        return []
    spans = [line[0].split("-") for line in lines if len(line) == 6 and line[5] in paths]
    return [(int(start, 16), int(end, 16)) for start, end in spans]


def give_back_mapped(parts: Iterable[Tensor], mappings: Sequence[tuple[int, int]]) -> None:
    """Give the memory of tensors that are views of mapped files back to the system: if they are read again, they come
    from the file again. Others, which would be lost, stay."""
    for part in parts:
        start, end = part.data_ptr(), part.data_ptr() + part.nbytes
        if any(first <= start and end <= last for first, last in mappings):
            start += -start % ALIGNMENT
            give_back(start, max(end - start, 0))


def _trim_heap() -> None:
    """Give the holes that packing has left between kept weights back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _kept(config: ModelConfig, tp: TpGroup) -> AbstractContextManager[Keep]:
    """Return where the packed weights of a rank come from."""
    if tp.device.type != "cpu":
        return nullcontext(lambda name: make)
    format_ = config.weight_format
    meaning = {"identity": model_identity(config.path, config.quantization), "bytes": cpu_has_vnni()}
    if format_ == "bfloat16" and bf16_tiles.way() is not None:
        meaning["pairs"] = bf16_tiles.way()
    if config.stored is not None:
        meaning["reader"] = 2  # of stored zeros and orders
    if not config.tie_embeddings:
        meaning["head"] = "its own"  # whatever config.json, a part of the identity, says
    if config.moe is not None:
        meaning["dtype"] = config.dtype  # of what chooses experts
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


def _computes(mla: MLAConfig, num_layers: int, name: str) -> bool:
    """Say whether the model uses a weight. DeepSeek-V3's checkpoints have a block more than the model, which predicts a
    second token, and GLM-5's an index in layers that share another's choice."""
    found = BLOCK.match(name)
    if found is None:
        return True
    block = int(found[1])
    shares = mla.index is not None and block < num_layers and mla.index.shared[block]
    return block < num_layers and not (shares and ".self_attn.indexer." in name)


def _check_names(folder: Path, wanted: Iterable[str], found: set[str], *, tied: bool) -> None:
    missing = sorted(set(wanted) - found)
    ignored = {name for name in found if DERIVED.search(name) or KV_SCALE.search(name)}  # KV_SCALE: kv_scales.py reads
    extra = sorted(found - set(wanted) - ignored - ({HEAD} if tied else set()))
    if missing or extra:
        raise InvalidConfig(
            f"model: the weights in {folder} do not fit its config.json: {len(missing)} missing{_some(missing)}, "
            f"{len(extra)} unexpected{_some(extra)}. The folder mixes two models, or the download is incomplete: fetch "
            f"it again"
        )


def _check_shape(config: ModelConfig, name: str, shape: Sequence[int]) -> None:
    """Raise InvalidConfig for a matrix that has another shape than its config says: not of experts or latents."""
    hidden, inner, mlp = config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size
    kv = config.num_kv_heads * config.head_dim
    shapes = {"embed_tokens": (config.vocab_size, hidden), "lm_head": (config.vocab_size, hidden)}
    if config.mla is None:
        shapes |= {"q_proj": (inner, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, inner)}
    if config.moe is None:
        shapes |= {"gate_proj": (mlp, hidden), "up_proj": (mlp, hidden), "down_proj": (hidden, mlp)}
    wanted = shapes.get(name.removesuffix(".weight").rpartition(".")[2])
    if wanted is None or not name.endswith(".weight"):
        return
    if tuple(shape) != wanted:
        raise InvalidConfig(
            f"model: {name} has shape {list(shape)}, its config.json says {list(wanted)}. The folder mixes two models: "
            f"fetch it again"
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
