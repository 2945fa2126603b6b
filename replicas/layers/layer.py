"""The base of every layer: it takes its weights under their Hugging Face names, and is then called.

Owns:      the walk over a tree of layers: names of weights, finishing after loading, bytes.
Never:     reads files (loading/weights.py does).
Invariant: weights are put once, as whole tensors; each layer keeps its rank's slice; ``finalize`` comes before a call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replicas.kernels.panels import CHUNK_ROWS, Packs, Rows, StoredWeight, make
from replicas.kernels.weight_formats import WeightFormat

Put = Callable[[Tensor], None]  # takes a whole weight as it lies in the checkpoint
Piece = Tensor | StoredWeight  # a rank's slice of a weight


class Whole(NamedTuple):
    """One tensor of a checkpoint that holds several weights of a layer."""

    put: Put
    fills: tuple[str, ...]  # their names among the layer's slots


class Layer:
    """A node of the tree. Leaves have ``slots``; nodes above have ``parts``. Inference only: no gradients anywhere."""

    takes_stored = False  # its weights may be put as `StoredWeight`, before ``multiply_by``; else widened, as tensors

    def parts(self) -> Mapping[str, "Layer"]:
        """Return the layers below this one, by the name that precedes theirs ("" if there is no such level)."""
        return {}

    def slots(self) -> Mapping[str, Put]:
        """Return this layer's own weights: name in the checkpoint -> the function that takes the tensor."""
        return {}

    def wholes(self) -> Mapping[str, Whole]:
        """Return the tensors that a checkpoint may have instead of some of ``slots``: name -> what takes it."""
        return {}

    def multiply_by(self, format_: WeightFormat, *, one_order: bool) -> None:
        """Use these products, by weights that lie so on a CPU, if this layer has one; comes before ``finalize``."""

    def finalize(self, device: torch.device, dtype: torch.dtype, packs: Packs = make) -> None:
        """Bring the weights into the form in which they are used. ``packs``: keeps, or makes, a product's panels."""

    @property
    def num_bytes(self) -> int:
        """Bytes of this layer's own weights on this rank."""
        return 0

    def walk(self, prefix: str = "") -> Iterator[tuple[str, "Layer"]]:
        """Yield this layer and all below it, with their names."""
        yield prefix, self
        for name, part in self.parts().items():
            yield from part.walk(full_name(prefix, name))

    def weights(self) -> dict[str, Put]:
        """Return every weight of the tree under its full name in the checkpoint."""
        return {full_name(prefix, name): put for prefix, layer in self.walk() for name, put in layer.slots().items()}

    def stacked_weights(self) -> dict[str, Whole]:
        """Return every tensor that may stand for several of ``weights``, under its full name, with their full names."""
        return {
            full_name(prefix, name): Whole(whole.put, tuple(full_name(prefix, each) for each in whole.fills))
            for prefix, layer in self.walk()
            for name, whole in layer.wholes().items()
        }


def loaded(pieces: Sequence[Piece], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Bring weights [.., K], one below the other, to a device in ``dtype``; stored ones some rows at a time."""
    if all(isinstance(piece, Tensor) for piece in pieces):
        return torch.cat([piece.to(device, dtype) for piece in pieces if isinstance(piece, Tensor)])
    rows = Rows(pieces)
    out = torch.empty(rows.shape, dtype=dtype, device=device)
    for start in range(0, rows.shape[0], CHUNK_ROWS):
        out[start : start + CHUNK_ROWS].copy_(rows[start : start + CHUNK_ROWS])
    return out


def computes_in(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of activations of a model in ``dtype``: on a CPU fp32, whatever the weights are."""
    return torch.float32 if device.type == "cpu" else dtype


def full_name(prefix: str, name: str) -> str:
    """Return the full name of weight or part ``name`` of the layer called ``prefix``."""
    return f"{prefix}.{name}" if prefix and name else prefix or name
