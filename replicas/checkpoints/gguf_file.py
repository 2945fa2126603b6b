"""A GGUF file: its metadata, and its tensors under Hugging Face's names.

Owns:      the layout of the file, and the mapping of names and of rotary rows between llama.cpp and Hugging Face.
Never:     loads torch until weights are read; makes a config or a tokenizer (gguf_folder.py does).
Invariant: offsets that the file does not have are refused, before a number is read.
Source:    https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; dequantisation is the `gguf` package's, whose own
           reader needs 20 s for a vocabulary of 49,152 tokens, for which this one needs 0.1.
"""

import functools
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
MOST_ITEMS = 1 << 26  # of metadata, names and dimensions: more is no file of a model
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
                self.metadata, self.tensors = _read(file, path)
        except (OSError, struct.error, UnicodeDecodeError, MemoryError, OverflowError) as error:
            raise InvalidConfig(f"model: {path} cannot be read as GGUF: {error}. It may be cut short") from error
        if int(self.metadata.get("split.count", 1)) > 1:
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

    def data(self) -> "np.memmap[tuple[int], np.dtype[np.uint8]]":
        """Map the file; writing would change this process's copy only."""
        return np.memmap(self.path, np.uint8, mode="c")


def _read(file: BinaryIO, path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if file.read(4) != MAGIC:
        raise InvalidConfig(f"model: {path} is no GGUF file: it begins otherwise")
    version, num_tensors, num_fields = _unpack(file, "<I"), _unpack(file, "<Q"), _unpack(file, "<Q")
    if version not in (2, 3):
        raise InvalidConfig(f"model: {path} is GGUF version {version}; supported: 2 and 3")
    _check_count(path, num_tensors + num_fields)
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        name = _text(file, path)
        fields[name] = _value(file, path, _unpack(file, "<I"))
    found = []
    for _ in range(num_tensors):
        name, num_dimensions = _text(file, path), _unpack(file, "<I")
        _check_count(path, num_dimensions)
        shape = tuple(_unpack(file, "<Q") for _ in range(num_dimensions))[::-1]
        found.append((name, shape, _unpack(file, "<I"), _unpack(file, "<Q")))
    alignment = int(fields.get("general.alignment", 32))
    start = file.tell() + -file.tell() % alignment
    return fields, {each[0]: _tensor(path, start, *each) for each in found}


def _tensor(path: Path, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    if kind not in TYPES:
        raise InvalidConfig(
            f"model: {path}: {name} is of ggml type {kind}; supported: {', '.join(each[0] for each in TYPES.values())}"
        )
    label, block, block_bytes = TYPES[kind]
    if not shape or len(shape) > 2 or shape[-1] % block:
        raise InvalidConfig(f"model: {path}: {name} has shape {list(shape)} in {label}: not one or two dimensions")
    row_bytes = shape[-1] // block * block_bytes
    return GgufTensor(name=name, kind=label, shape=shape, offset=start + offset, row_bytes=row_bytes)


def _unpack(file: BinaryIO, form: str) -> Any:
    (value,) = struct.unpack(form, file.read(struct.calcsize(form)))
    return value


def _text(file: BinaryIO, path: Path) -> str:
    length = _unpack(file, "<Q")
    _check_count(path, length)
    return file.read(length).decode("utf-8", errors="replace")


def _value(file: BinaryIO, path: Path, kind: int) -> Any:
    if kind in _SCALARS:
        return _unpack(file, _SCALARS[kind])
    if kind == _TEXT:
        return _text(file, path)
    if kind != _ARRAY:
        raise InvalidConfig(f"model: {path} has a field of unknown type {kind}: it is damaged")
    kind, count = _unpack(file, "<I"), _unpack(file, "<Q")
    _check_count(path, count)
    if kind not in _SCALARS:
        return [_value(file, path, kind) for _ in range(count)]
    form = np.dtype("?" if kind == 7 else _SCALARS[kind])
    return np.frombuffer(file.read(count * form.itemsize), form, count).tolist()


def _check_count(path: Path, count: int) -> None:
    if count > MOST_ITEMS:
        raise InvalidConfig(f"model: {path} says that it has {count} items: it is damaged")


class GgufCheckpoint:
    """The weights of a GGUF file of the Llama and Qwen families."""

    def __init__(self, file: GgufFile) -> None:
        self._file, self._data = file, file.data()
        self._by_name = {hf_name(name): each for name, each in file.tensors.items() if name not in DERIVED}
        self._heads: dict[str, int] = {}  # whose rotary rows are interleaved; other architectures keep halves apart
        if file.metadata.get("general.architecture") == "llama":
            count = int(file.field("{arch}.attention.head_count"))
            self._heads = {"q_proj": count, "k_proj": int(file.metadata.get("llama.attention.head_count_kv", count))}

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
