"""A checkpoint in safetensors, plain or quantised.

Owns:      which tensors of its files (weight_index.py) make a weight.
Never:     reads numbers: tensors are views of mapped files, quantised weights read rows when they are asked for.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from replicas.checkpoints.methods import FLOAT8, Method, method_of
from replicas.checkpoints.stored import Window
from replicas.checkpoints.weight_index import EMBEDDING, HEAD, INDEX, causal_name, safetensors_files, weight_map
from replicas.errors import InvalidConfig


class SafetensorsCheckpoint:
    """The weights of a folder."""

    def __init__(self, folder: Path, quantization: Mapping[str, Any] | None, *, tied: bool = False) -> None:
        """``quantization``: config.json's quantization_config. ``tied``: a head without an embedding is the embedding.
        Raises: InvalidConfig for files that are not whole, or are of a method that is not read."""
        self.method: Method | None = method_of(str(folder), quantization) if quantization else None
        self._parts: dict[str, dict[str, Tensor]] = defaultdict(dict)  # weight -> its parts, by last name
        placed = weight_map(folder)
        for file in safetensors_files(folder):
            for name, tensor in _tensors(file):
                if placed.get(name, file.name) == file.name:
                    weight, part = self._place(name)
                    self._parts[weight][part] = tensor
            self._check_placed(file, placed)
        if tied and EMBEDDING not in self._parts and HEAD in self._parts:
            self._parts[EMBEDDING] = self._parts.pop(HEAD)

    def _place(self, name: str) -> tuple[str, str]:
        """Tell which weight a tensor belongs to, and as what."""
        name = causal_name(name)
        if self.method is not None:
            base, _, part = name.rpartition(self.method.joint)
            if base and part in (*self.method.main, *self.method.beside):
                return f"{base}.weight" if self.method.joint == "." else base, part
        return name, name.rpartition(".")[2]

    def _check_placed(self, file: Path, placed: Mapping[str, str]) -> None:
        wanted = [name for name, at in placed.items() if at == file.name]
        lost = [n for n in wanted if (place := self._place(n))[1] not in self._parts.get(place[0], {})]
        if lost:
            raise InvalidConfig(
                f"model: {file} lacks {lost[0]} ({len(lost)} in all), which {INDEX} says is there. The folder mixes "
                "two models, or the download is incomplete: fetch it again"
            )

    @functools.cached_property
    def names(self) -> set[str]:
        return {name for name, parts in self._parts.items() if self._is_weight(parts)}

    def _is_weight(self, parts: Mapping[str, Tensor]) -> bool:
        """Tell whether there are numbers; scales alone (of a KV cache, of activations) are none."""
        return self.method is None or not parts.keys() <= set(self.method.beside)

    def num_bytes(self, name: str) -> int:
        return sum(tensor.nbytes for tensor in self._parts[name].values())

    def mapped(self, name: str) -> Iterator[Tensor]:
        yield from self._parts[name].values()

    def weight(self, name: str) -> Tensor | Window:
        """Return a view of the file, or a weight that reads it. Raises: InvalidConfig when parts are missing."""
        parts, method = self._parts[name], self.method
        plain = next(iter(parts.values()))
        if method is None or not method.may_store(name, parts):
            self._refuse_float8(name, plain)
            return plain
        if parts.keys() == {"weight"} and plain.dtype not in FLOAT8:
            return plain  # a module that was not converted
        return Window.of(method.read(name, parts))

    def _refuse_float8(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype in FLOAT8:
            raise InvalidConfig(
                f"model: {name} is stored in {tensor.dtype}, and config.json has no quantization_config that says how "
                "it is scaled"
            )


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield a file's tensors as views of the mapped file. Raises: InvalidConfig for a file that is cut."""
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # no mapping
                yield str(name), tensors.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise InvalidConfig(f"model: {file} cannot be read: {error}. It may be cut short: fetch it again") from error
