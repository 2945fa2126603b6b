"""A GGUF file: its metadata, and its tensors under Hugging Face's names.

Owns:      the layout of the file, and the mapping of names and of rotary rows between llama.cpp and Hugging Face.
Never:     loads torch until weights are read; makes a config or a tokenizer (gguf_folder.py does).
Invariant: offsets that the file does not have are refused, before a number is read; a count is held against the bytes
           that are left before anything is allocated for it; whatever a header says, the error is InvalidConfig.
Source:    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; dequantisation is the `gguf` package's, whose own
           reader needs 20 s for a vocabulary of 49,152 tokens, for which this one needs 0.1.
"""

import functools
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from replicas.errors import InvalidConfig
from replicas.kernels.weight_formats import WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

    from replicas.checkpoints.stored import Groups, Window

Bytes = npt.NDArray[np.uint8]
MAGIC = b"GGUF"
MOST_ITEMS = 1 << 23  # of all arrays, fields and tensors together: a large vocabulary and its merges have a million
MOST_DIMENSIONS = 4
MOST_NESTED = 4  # arrays of arrays
LEAST_ALIGNMENT = 8
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9
# ggml type -> its name, numbers of a block, bytes of a block
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
}  # fmt: skip
FITS: dict[str, WeightFormat] = {"Q4_0": "q4_1", "Q4_1": "q4_1", "Q8_0": "q8_0"}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
DERIVED = frozenset({"rope_freqs.weight"})  # computed here; gguf_folder.py reads them for the config


def hf_name(name: str) -> str:
    """Map ``blk.7.attn_q.weight`` to ``model.layers.7.self_attn.q_proj.weight``; others stay as they are."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    block, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    part, _, kind = part.partition(".")
    if block != "blk" or part not in LAYER_NAMES:
        return name
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def rotate_half_order(rows: int, *, num_heads: int) -> npt.NDArray[np.int64]:
    """Undo llama.cpp's order of rotary rows: it interleaves the two halves of each head, Hugging Face keeps them apart.

    Returns: [rows] where each row of ours lies: our row j * D / 2 + i of a head is its row 2 i + j.
    Source:  ``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py does the opposite.
    """
    return np.arange(rows).reshape(num_heads, rows // num_heads // 2, 2).swapaxes(1, 2).reshape(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies in the file."""

    name: str
    kind: str  # of TYPES
    shape: tuple[int, ...]  # as PyTorch lists it, the fastest dimension last
    offset: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * (self.shape[0] if len(self.shape) > 1 else 1)


class GgufFile:
    """The metadata and the table of tensors of one file."""

    def __init__(self, path: Path) -> None:
        """Raises: InvalidConfig for a file that is no GGUF, is cut, is a part of one, or has a type unknown here."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.metadata, self.tensors = _Header(file, path).read()
        except (OSError, struct.error, MemoryError, ArithmeticError, ValueError, TypeError, RecursionError) as error:
            raise InvalidConfig(f"model: {path} cannot be read as GGUF: {error}. It may be cut short") from error
        if self.whole("split.count", 1) > 1:
            raise InvalidConfig(f"model: {path} is one of several parts: join them with llama-gguf-split --merge")
        size = path.stat().st_size
        cut = [each.name for each in self.tensors.values() if each.offset + each.num_bytes > size]
        if cut:
            raise InvalidConfig(f"model: {path} is cut short: {len(cut)} tensors ({cut[0]}, ...) end behind it")

    def field(self, name: str) -> Any:
        """Return a field of the metadata; ``{arch}`` is its architecture. Raises: InvalidConfig without it."""
        name = name.format(arch=self.metadata.get("general.architecture"))
        if name not in self.metadata:
            raise InvalidConfig(f"model: {self.path} has no field {name!r}; is it a file of a language model?")
        return self.metadata[name]

    def whole(self, name: str, default: int | None = None, *, least: int = 0) -> int:
        """Return a field that is a whole number. Raises: InvalidConfig for another, one below ``least``, or without a
        ``default`` for none."""
        value = self.field(name) if default is None else self.metadata.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 48:
            wanted = f"a whole number from {least} on is wanted"
            raise InvalidConfig(f"model: {self.path}: {name} = {_short(value)}; {wanted}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """Return a field that is a number. Raises: InvalidConfig, as `whole` does."""
        value = self.field(name) if default is None else self.metadata.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidConfig(f"model: {self.path}: {name} = {_short(value)}; a number is wanted")
        return float(value)

    def data(self) -> "np.memmap[tuple[int], np.dtype[np.uint8]]":
        """Map the file; writing would change this process's copy only."""
        return np.memmap(self.path, np.uint8, mode="c")


class _Header:
    """A file's header, read from the front, and never more than the file has."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._size = self._left = os.fstat(file.fileno()).st_size
        self._num_items = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Return the metadata and the tensors. Raises: InvalidConfig."""
        if self._bytes(4) != MAGIC:
            raise InvalidConfig(f"model: {self._path} is no GGUF file: it begins otherwise")
        version, num_tensors, num_fields = self._number("<I"), self._number("<Q"), self._number("<Q")
        if version not in (2, 3):
            raise InvalidConfig(f"model: {self._path} is GGUF version {version}; supported: 2 and 3")
        self._expect(num_fields, each_bytes=8 + 4 + 1)
        self._expect(num_tensors, each_bytes=8 + 4 + 4 + 8)
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._text()
            if name in fields:
                raise self._damaged(f"has the field {_short(name)} twice")
            fields[name] = self._value(self._number("<I"))
        found = {}
        for _ in range(num_tensors):
            name, num_dimensions = self._text(), self._number("<I")
            if name in found:
                raise self._damaged(f"has the tensor {_short(name)} twice")
            if num_dimensions > MOST_DIMENSIONS:
                raise self._damaged(f"has a tensor {_short(name)} of {num_dimensions} dimensions")
            shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
            found[name] = (shape, self._number("<I"), self._number("<Q"))
        alignment = fields.get("general.alignment", 32)
        is_power = isinstance(alignment, int) and alignment >= LEAST_ALIGNMENT and not alignment & (alignment - 1)
        if not is_power:
            raise self._damaged(f"aligns tensors to {_short(alignment)}, no power of two from {LEAST_ALIGNMENT} on")
        at = self._size - self._left
        at += -at % alignment
        return fields, {name: self._tensor(at, alignment, name, *each) for name, each in found.items()}

    def _tensor(
        self, start: int, alignment: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> GgufTensor:
        if kind not in TYPES:
            known = ", ".join(each[0] for each in TYPES.values())
            raise InvalidConfig(f"model: {self._path}: {name} is of ggml type {kind}; supported: {known}")
        label, block, block_bytes = TYPES[kind]
        if not shape or len(shape) > 2 or shape[-1] % block or 0 in shape:
            what = f"{name} has shape {list(shape)} in {label}"
            raise InvalidConfig(f"model: {self._path}: {what}: not one or two dimensions")
        if offset % alignment:
            raise self._damaged(f"has {_short(name)} at {offset}, which is no multiple of its alignment, {alignment}")
        row_bytes = shape[-1] // block * block_bytes
        return GgufTensor(name=name, kind=label, shape=shape, offset=start + offset, row_bytes=row_bytes)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            raise self._damaged(f"has a field of unknown type {kind}")
        if depth == MOST_NESTED:
            raise self._damaged(f"nests arrays more than {MOST_NESTED} deep")
        kind, count = self._number("<I"), self._number("<Q")
        if kind not in _SCALARS:
            self._expect(count, each_bytes=8)
            return [self._value(kind, depth + 1) for _ in range(count)]
        form = np.dtype("?" if kind == 7 else _SCALARS[kind])
        self._expect(count, each_bytes=form.itemsize)
        return np.frombuffer(self._bytes(count * form.itemsize), form, count).tolist()

    def _text(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8", errors="replace")

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack(form, self._bytes(struct.calcsize(form)))
        return value

    def _bytes(self, count: int) -> bytes:
        if count > self._left:
            raise InvalidConfig(
                f"model: {self._path} cannot be read as GGUF: {count} bytes should follow byte "
                f"{self._size - self._left}, and {self._left} do. It may be cut short"
            )
        self._left -= count
        return self._file.read(count)

    def _expect(self, count: int, *, each_bytes: int) -> None:
        """Check that so many items can follow, before anything is made for them."""
        self._num_items += count
        if count * each_bytes > self._left or self._num_items > MOST_ITEMS:
            raise InvalidConfig(
                f"model: {self._path} cannot be read as GGUF: it says that it has {count} items where {self._left} "
                "bytes are left: it is damaged, or cut short"
            )

    def _damaged(self, what: str) -> InvalidConfig:
        return InvalidConfig(f"model: {self._path} {what}: it is damaged")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


class GgufCheckpoint:
    """The weights of a GGUF file of the Llama and Qwen families."""

    def __init__(self, file: GgufFile) -> None:
        """Raises: InvalidConfig where two tensors are one weight, or the number of heads is none."""
        self._file, self._data = file, file.data()
        self._by_name = {hf_name(name): each for name, each in file.tensors.items() if name not in DERIVED}
        if len(self._by_name) < len(file.tensors.keys() - DERIVED):
            raise InvalidConfig(f"model: {file.path} has two tensors for one weight: it is damaged")
        self._heads: dict[str, int] = {}  # whose rotary rows are interleaved; other architectures keep halves apart
        if file.metadata.get("general.architecture") == "llama":
            count = file.whole("llama.attention.head_count", least=1)
            kv_count = file.whole("llama.attention.head_count_kv", count, least=1)
            self._heads = {"q_proj": count, "k_proj": kv_count}

    @functools.cached_property
    def names(self) -> set[str]:
        return set(self._by_name)

    def num_bytes(self, name: str) -> int:
        return self._by_name[name].num_bytes

    def mapped(self, name: str) -> Iterator["Tensor"]:
        import torch

        each = self._by_name[name]
        yield torch.from_numpy(self._data[each.offset : each.offset + each.num_bytes])

    def weight(self, name: str) -> "Tensor | Window":
        """Return a view of the file, or a weight that reads it."""
        import torch

        from replicas.checkpoints.stored import Window

        each = self._by_name[name]
        (data,) = self.mapped(name)
        heads = self._heads.get(name.split(".")[-2])
        if heads is not None and each.shape[0] % (2 * heads):
            raise InvalidConfig(f"model: {self._file.path}: {each.name} has {each.shape[0]} rows for {heads} heads")
        order = None if heads is None else torch.from_numpy(rotate_half_order(each.shape[0], num_heads=heads))
        plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        if each.kind in plain and (order is None or len(each.shape) == 1):
            tensor = data.view(plain[each.kind]).view(each.shape)
            return tensor if order is None else tensor[order]
        if len(each.shape) == 1:
            raise InvalidConfig(f"model: {self._file.path}: {each.name} is a vector in {each.kind}; wanted: floats")
        return Window.of(_Blocks(each, data.view(each.shape[0], -1), order))


class _Blocks:
    """A weight in ggml's blocks of 32 or 256 numbers."""

    def __init__(self, tensor: GgufTensor, data: "Tensor", order: "Tensor | None") -> None:
        """``data``: [N, bytes of a row]; ``order``: [N] which of them each row is; None: as they lie."""
        self.shape = (tensor.shape[0], tensor.shape[1])
        self.fits = FITS.get(tensor.kind)
        self._kind, self._data, self._order = tensor.kind, data, order

    def _rows(self, start: int, stop: int) -> "Tensor":
        return self._data[start:stop] if self._order is None else self._data[self._order[start:stop]]

    def floats(self, start: int, stop: int) -> "Tensor":
        import torch
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        widened = dequantize(self._rows(start, stop).contiguous().numpy(), GGMLQuantizationType[self._kind])
        return torch.from_numpy(np.ascontiguousarray(widened, dtype=np.float32)).view(-1, self.shape[1])

    def groups(self, start: int, stop: int) -> "Groups":
        import torch

        blocks = self._rows(start, stop).view(stop - start, -1, TYPES_BY_NAME[self._kind][1])
        scales = blocks[:, :, :2].contiguous().view(torch.float16).squeeze(2)
        if self._kind == "Q8_0":
            return blocks[:, :, 2:].reshape(stop - start, -1).view(torch.int8), scales, None
        head = 2 if self._kind == "Q4_0" else 4
        least = scales * -8.0 if head == 2 else blocks[:, :, 2:4].contiguous().view(torch.float16).squeeze(2)
        both = blocks[:, :, head:]
        numbers = torch.cat([both & 15, both >> 4], dim=2)
        return numbers.flatten(1), scales, least


TYPES_BY_NAME: Mapping[str, tuple[int, int]] = {name: (block, size) for name, block, size in TYPES.values()}
