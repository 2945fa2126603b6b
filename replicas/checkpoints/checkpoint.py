"""What a model's folder holds for weights, whatever the kind of its files.

Owns:      which files those are, and in what words a quantised checkpoint is described.
Never:     loads a layer (loading/weights.py does); downloads.
Invariant: what `stored_as` promises to keep as it is, `Checkpoint.weight` has in that format, unless a tensor's own
           scales are too fine for it: that tensor is widened.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from replicas.checkpoints.gguf_folder import LINK, stored_in_gguf
from replicas.checkpoints.weight_index import Span, float8_kind, is_tied, safetensors_files, table_spans
from replicas.config import StoredAs
from replicas.errors import InvalidConfig

if TYPE_CHECKING:
    from torch import Tensor

    from replicas.checkpoints.stored import Window

log = logging.getLogger(__name__)


class Checkpoint(Protocol):
    """The weights on disk, under Hugging Face's names."""

    @property
    def names(self) -> set[str]: ...

    def num_bytes(self, name: str) -> int:
        """Count a weight's bytes on disk."""
        ...

    def mapped(self, name: str) -> Iterator["Tensor"]:
        """Yield the parts of mapped files that hold a weight."""
        ...

    def weight(self, name: str) -> "Tensor | Window":
        """Return a view of the mapped file, or a `StoredWeight` that reads it. Raises: InvalidConfig."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """A kind of files that weights lie in."""

    has: Callable[[Path], bool]  # whether a folder's weights lie in such files
    files: Callable[[Path], list[Path]]  # those of a folder. Raises: InvalidConfig when they are missing
    open: Callable[[Path], Checkpoint]  # Raises: InvalidConfig
    # describes a quantised checkpoint from its folder and config.json's settings; None for plain floats
    stored_as: Callable[[Path, Mapping[str, Any]], StoredAs | None]
    # where the tensors of the embedding and of the head lie, under Hugging Face's names; {} if no file tells
    table_spans: Callable[[Path], Mapping[str, Span]]


def gguf_of(folder: Path) -> Path | None:
    """Return the GGUF file that a folder with config.json takes its weights from; None where it has safetensors."""
    if (folder / LINK).is_file():
        return folder / LINK
    files = [] if any(folder.glob("*.safetensors*")) else sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise InvalidConfig(f"model: {folder} has {len(files)} GGUF files; set model.path to one of them")
    return files[0] if files else None


def _gguf_file(folder: Path) -> Path:
    file = gguf_of(folder)
    assert file is not None, f"{folder} has no GGUF file"
    return file


def _open_gguf(folder: Path) -> Checkpoint:
    from replicas.checkpoints.gguf_file import GgufCheckpoint, GgufFile

    return GgufCheckpoint(GgufFile(_gguf_file(folder)))


def _gguf_table_spans(folder: Path) -> dict[str, Span]:
    """Find the tables of a file whose config.json came with it: one that was made of the file is as the file is."""
    from replicas.checkpoints.gguf_file import GgufFile, hf_name

    path = _gguf_file(folder)
    if path.name == LINK:
        return {}
    return {
        hf_name(each.name): Span(path, f"{each.kind} {each.shape}", each.offset, each.offset + each.num_bytes)
        for each in GgufFile(path).tensors.values()
    }


def _open_safetensors(folder: Path) -> Checkpoint:
    from replicas.checkpoints.safetensors_files import SafetensorsCheckpoint

    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    tied = bool(config.get("tie_word_embeddings", False))
    return SafetensorsCheckpoint(folder, config.get("quantization_config"), tied=tied)


def _stored_by_method(folder: Path, config: Mapping[str, Any]) -> StoredAs | None:
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    from replicas.checkpoints.methods import method_of

    method = method_of(str(folder), quantization)
    if method.of_experts:
        return StoredAs(about=method.about, experts=method.fits)
    widened = method.fits == "fp8" and float8_kind(folder) == "F8_E5M2"  # no kernel multiplies these
    return StoredAs(about=method.about, products=None if widened else method.fits)


# the newest entry that a folder has is read; `safetensors`, the first, takes every folder. A way to quantise is an
# entry of methods.py's METHODS instead
FORMATS: dict[str, FileFormat] = {
    "safetensors": FileFormat(
        has=lambda folder: True,  # its errors say what is missing
        files=safetensors_files,
        open=_open_safetensors,
        stored_as=_stored_by_method,
        table_spans=table_spans,
    ),
    "gguf": FileFormat(
        has=lambda folder: gguf_of(folder) is not None,
        files=lambda folder: [_gguf_file(folder)],
        open=_open_gguf,
        stored_as=lambda folder, config: stored_in_gguf(folder, _gguf_file(folder)),
        table_spans=_gguf_table_spans,
    ),
}


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open the weights of a model's folder. Raises: InvalidConfig."""
    return _format_of(folder).open(folder)


def weight_files(folder: Path) -> list[Path]:
    """List the files that hold the weights. Raises: InvalidConfig when they are missing."""
    return _format_of(folder).files(folder)


def stored_as(folder: Path, config: Mapping[str, Any]) -> StoredAs | None:
    """Describe a quantised checkpoint; None for plain floats. ``config``: config.json's settings.

    Raises: InvalidConfig for a method that is not read.
    """
    return _format_of(folder).stored_as(folder, config)


def tied_tables(folder: Path, *, said: bool) -> bool:
    """Tell whether a folder's head is its embedding, as its files have it. ``said``: what config.json says."""
    tied = is_tied(_format_of(folder).table_spans(folder), said=said)
    if tied != said:
        log.info(
            "%s: config.json says tie_word_embeddings: %s, and the files hold %s: %s",
            folder,
            str(said).lower(),
            "no head" if tied else "a head that differs from the embedding",
            "the embedding is the head" if tied else "that head is used",
        )
    return tied


def _format_of(folder: Path) -> FileFormat:
    return next(each for each in reversed(FORMATS.values()) if each.has(folder))
