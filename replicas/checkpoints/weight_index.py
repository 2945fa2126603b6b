"""Which files of a folder hold a checkpoint in safetensors, and where its two tables lie: known without torch, before a
model is loaded.

Invariant: only files of the model's own folder are named, whatever an index says.
"""

import functools
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from replicas.errors import InvalidConfig

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPARED_BYTES = 1 << 22  # read of two tensors at a time


def causal_name(name: str) -> str:
    """Name a tensor as the causal model does: a checkpoint of the base model alone, as embedders have it, lacks its
    first part."""
    return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor's bytes lie in a file, and what they are."""

    file: Path
    kind: str  # its type and shape: equal bytes of one kind are equal numbers
    start: int
    stop: int

    def equals(self, other: "Span") -> bool:
        """Compare the bytes, up to the first part that differs, once in this process while the files stay."""
        if (self.kind, self.stop - self.start) != (other.kind, other.stop - other.start):
            return False
        return _same_bytes(self, other, tuple(each.file.stat().st_mtime_ns for each in (self, other)))


@functools.lru_cache(maxsize=16)  # a start asks for a model's config several times
def _same_bytes(one: Span, two: Span, _: tuple[int, ...]) -> bool:
    with one.file.open("rb") as first, two.file.open("rb") as second:
        first.seek(one.start)
        second.seek(two.start)
        for at in range(one.start, one.stop, COMPARED_BYTES):
            length = min(COMPARED_BYTES, one.stop - at)
            if first.read(length) != second.read(length):
                return False
    return True


def is_tied(spans: Mapping[str, Span], *, said: bool) -> bool:
    """Tell whether the head is the embedding, which the files know better than config.json.

    A head that differs from the embedding is its own; without one, or with one alone that is said to be tied, both are
    one table.
    Args: spans: of the tables' tensors; a quantised table has several. Empty where no file tells.
          said: what config.json says.
    """
    of_embedding, of_head = (
        {name.removeprefix(prefix): span for name, span in spans.items() if name.startswith(prefix)}
        for prefix in (EMBEDDING.removesuffix("weight"), HEAD.removesuffix("weight"))
    )
    if not of_embedding or not of_head:
        return said or bool(of_embedding)
    if not said or of_embedding.keys() != of_head.keys():
        return False
    return all(span.equals(of_head[part]) for part, span in of_embedding.items())


def table_spans(folder: Path) -> dict[str, Span]:
    """Find the tensors of the embedding and of the head. Files that are missing or damaged have none: loading them says
    what is wrong. Raises: InvalidConfig for an index that is none."""
    prefixes = EMBEDDING.removesuffix("weight"), HEAD.removesuffix("weight")
    placed = weight_map(folder)
    files = {file for name, file in placed.items() if causal_name(name).startswith(prefixes)} if placed else {WHOLE}
    return {
        causal_name(name): span
        for file in files
        for name, span in _spans(folder / file).items()
        if causal_name(name).startswith(prefixes) and placed.get(name, file) == file
    }


def _spans(path: Path) -> dict[str, Span]:
    """Read a file's header; {} where there is none."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > os.fstat(file.fileno()).st_size:
                return {}
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {
            name: Span(path, f"{each['dtype']} {each['shape']}", *(8 + length + int(at) for at in each["data_offsets"]))
            for name, each in header.items()
        }
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def float8_kind(folder: Path) -> str | None:
    """Return the type of the first 8-bit floats in a folder's files, as safetensors has it (F8_E4M3, F8_E5M2); None:
    there are none, or no files. Raises: InvalidConfig for an index that is none."""
    kinds = (span.kind.split()[0] for name in weight_files(folder) for span in _spans(folder / name).values())
    return next((kind for kind in kinds if kind.startswith("F8_E")), None)


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
