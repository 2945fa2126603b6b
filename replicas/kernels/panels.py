"""Weights in panels of 32 output channels, as the product reads them: one input after the other, 32 numbers each.

Owns:      the packed forms, what rounds to them, and which numbers each stands for. Numbers of a group of inputs of an
           output channel share a scale (int8, Q8_0, MXFP4), or a scale and a least number (Q4_1): a group of a panel
           is 32 scales, 32 least numbers where there are any, then the numbers.
Never:     multiplies (linear.py does) or reads files.
Invariant: what a packed number stands for is exact in fp32 but for one rounding, where the least number is added. So a
           checkpoint that was made of Q4_1 and Q8_0 numbers has the same weights packed as widened, bit for bit.
Source:    block_q4_1 and block_q8_0 of ggml (https://github.com/ggml-org/ggml, ggml-common.h); MXFP4 of the OCP
           Microscaling Formats (MX) Specification v1.0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.kernels.panel_tiles import COLUMNS
from replicas.kernels.simd import W
from replicas.kernels.weight_formats import (
    E2M1_TWICE,
    E8M0_BIAS,
    E8M0_LEAST,
    E8M0_NAN,
    GROUP,
    WeightFormat,
    group_length,
)

PLAIN: dict[WeightFormat, torch.dtype] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip
_SCALES = {"int8": torch.bfloat16, "q8_0": torch.float16, "q4_1": torch.float16, "mxfp4": torch.uint8}
_PAIRED = ("q4_1", "mxfp4")  # two numbers of four bits lie in a byte
CHUNK_ROWS = 1024  # of a weight, that are read and packed at a time; whole panels


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """A packed weight [n, k]; ``group`` inputs share a scale, 0 where there are none."""

    format: WeightFormat
    n: int
    k: int
    group: int
    data: Tensor  # uint8 [panels, bytes of a panel], on CPU

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows ``ids`` [T] of the weight, widened: a fresh fp32 tensor [T, k]."""
        panel, column = ids // COLUMNS, ids % COLUMNS
        if not self.group:
            numbers = self.data.view(PLAIN[self.format]).view(len(self.data), self.k, COLUMNS)
            return numbers[panel, :, column].float()
        numbers, scales, least = _parts(self.data, self.format, self.group)
        scale = scales[panel, :, column].unsqueeze(2)  # [T, G, 1]
        if self.format not in _PAIRED:
            return (numbers[panel, :, :, column].float() * scale.float()).flatten(1)[:, : self.k]
        both = numbers[panel, :, :, column % W].int()  # [T, G, group]
        chosen = torch.where((column < W)[:, None, None], both & 15, both >> 4)
        if self.format == "mxfp4":
            powers = (scale.int() << 23).clamp_(min=E8M0_LEAST).view(torch.float32)
            out = torch.tensor(E2M1_TWICE, dtype=torch.float32)[chosen] * (powers * 0.5)
        else:  # a number of 4 bits by a scale of 11 is exact: two operations, one rounding
            out = chosen.float() * scale.float() + least[panel, :, column].float().unsqueeze(2)
        return out.flatten(1)[:, : self.k]


class StoredWeight(Protocol):
    """A weight [N, K] in a checkpoint whose numbers are of another kind than a tensor's: read when it is packed."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def fits(self) -> WeightFormat | None:
        """The format of panels that holds its numbers as they are; None: they are widened."""
        ...

    def narrow(self, dim: int, start: int, length: int) -> Self:
        """Cut as a tensor is cut; reads nothing."""
        ...

    def floats(self, start: int, stop: int) -> Tensor:
        """Read rows [start, stop), widened: a fresh fp32 tensor [rows, K]."""
        ...

    def groups(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Read rows as `fits` has them: numbers [rows, K], scales [rows, G], least numbers [rows, G]."""
        ...

    def eights(self) -> tuple[Tensor, Tensor, int] | None:
        """Return numbers [N, K] in e4m3, the scales [N, G] fp32 of each row's, and of how many inputs one is; None if
        its numbers are of another kind. Numbers are a view of the file."""
        ...


class Rows:
    """Weights one below the other [N, K], of which a packer reads some rows at a time."""

    def __init__(self, pieces: Sequence[Tensor | StoredWeight]) -> None:
        self.pieces = pieces
        self.shape = (sum(piece.shape[0] for piece in pieces), int(pieces[0].shape[1]))

    @property
    def fits(self) -> WeightFormat | None:
        """The format that holds the numbers of all of them as they are."""
        formats = {None if isinstance(piece, Tensor) else piece.fits for piece in self.pieces}
        return formats.pop() if len(formats) == 1 else None

    def __getitem__(self, rows: slice) -> Tensor:
        """Read rows, widened where they are stored in another kind; a view where one tensor has all of them."""
        parts = [piece[a:b] if isinstance(piece, Tensor) else piece.floats(a, b) for piece, a, b in self._cut(rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def groups(self, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Read rows of weights that fit a format, as `StoredWeight.groups`."""
        parts = [piece.groups(a, b) for piece, a, b in self._cut(rows) if not isinstance(piece, Tensor)]
        numbers, scales, least = zip(*parts, strict=True)
        return torch.cat(numbers), torch.cat(scales), None if least[0] is None else torch.cat(least)

    def _cut(self, rows: slice) -> list[tuple[Tensor | StoredWeight, int, int]]:
        """List the pieces that have some of ``rows``, with their own first row and the one behind their last."""
        start, stop, _ = rows.indices(self.shape[0])
        found, first = [], 0
        for piece in self.pieces:
            a, b = max(start - first, 0), min(stop - first, piece.shape[0])
            if a < b:
                found.append((piece, a, b))
            first += piece.shape[0]
        return found


Packs = Callable[[Callable[[], Panels]], Panels]  # gives a weight's panels: those that are kept, or what is made now


def make(panels: Callable[[], Panels]) -> Panels:
    """Keep nothing: the `Packs` of a weight that no other engine shares."""
    return panels()


def pack(weight: Tensor | Rows, format_: WeightFormat) -> Panels:
    """Pack ``weight`` [N, K] of any float dtype, rounded to the nearest numbers of ``format_``; of stored weights that
    fit it the numbers as they are. Beside the panels it needs memory for `CHUNK_ROWS` rows."""
    if format_ in PLAIN:
        return by_chunks(weight, format_, 0, lambda rows: _pack_plain(weight[rows], PLAIN[format_]))
    if isinstance(weight, Rows) and weight.fits == format_:
        return by_chunks(weight, format_, GROUP, lambda rows: _pack_groups(format_, *weight.groups(rows)))
    if format_ == "int8":
        group = group_length(weight.shape[1])
        return by_chunks(weight, format_, group, lambda rows: pack_int8(*round_int8(weight[rows])).data)
    return by_chunks(
        weight, format_, GROUP, lambda rows: _pack_groups(format_, *_round(weight[rows].float(), format_, GROUP))
    )


def by_chunks(weight: Tensor | Rows, format_: WeightFormat, group: int, packed: Callable[[slice], Tensor]) -> Panels:
    """Pack some rows at a time: ``packed`` makes panels [p, bytes of a panel] of a slice of rows."""
    n, k = weight.shape
    first = packed(slice(0, CHUNK_ROWS))
    if n <= CHUNK_ROWS:
        return Panels(format_, n, k, group, first)
    data = torch.empty(-(-n // COLUMNS), first.shape[1], dtype=torch.uint8)
    data[: len(first)] = first
    for start in range(CHUNK_ROWS, n, CHUNK_ROWS):
        part = packed(slice(start, start + CHUNK_ROWS))
        data[start // COLUMNS : start // COLUMNS + len(part)] = part
    return Panels(format_, n, k, group, data)


def round_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round [N, K] to (int8 [N, K], scales [N, G] bf16): the numbers of a group in steps of its largest magnitude /
    127."""
    return _round(weight.float(), "int8", group_length(weight.shape[1]))[:2]


def pack_int8(numbers: Tensor, scales: Tensor) -> Panels:
    """Pack what `round_int8` made."""
    n, k = numbers.shape
    return Panels("int8", n, k, k // scales.shape[1], _pack_groups("int8", numbers, scales, None))


def group_bytes(format_: WeightFormat, group: int) -> int:
    """Count the bytes of a group of a panel, of a format with scales."""
    head = _SCALES[format_].itemsize * COLUMNS * (2 if format_ == "q4_1" else 1)
    return head + group * (W if format_ in _PAIRED else COLUMNS)


def _pack_plain(weight: Tensor, dtype: torch.dtype) -> Tensor:
    n, k = weight.shape
    whole = F.pad(weight.to(dtype), (0, 0, 0, -n % COLUMNS))
    return whole.view(-1, COLUMNS, k).transpose(1, 2).contiguous().view(torch.uint8).flatten(1)


def _round(weight: Tensor, format_: WeightFormat, group: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round [N, K] fp32 to numbers [N, K'], scales [N, G] and least numbers [N, G]; K' is K up to whole groups."""
    n, k = weight.shape
    if k % group:  # repeats the last number, which changes no group's largest or least
        weight = torch.cat([weight, weight[:, -1:].expand(n, -k % group)], dim=1)
    parts = weight.view(n, -1, group)  # [N, G, group]
    if format_ == "q4_1":
        least = parts.amin(dim=2).half()
        scales = ((parts.amax(dim=2) - least.float()) / 15.0).half()
        steps = scales.float().unsqueeze(2)
        numbers = torch.where(steps > 0, (parts - least.float().unsqueeze(2)) / steps, 0.0)
        return numbers.round_().clamp_(0, 15).to(torch.uint8).flatten(1), scales, least
    if format_ == "mxfp4":
        return *_round_floats4(parts), None
    largest = parts.abs().amax(dim=2) / 127.0
    if format_ == "int8":  # the next bf16 number: nothing goes beyond 127
        bits = largest.view(torch.int32)
        scales = ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).bfloat16()
    else:
        scales = largest.half()
    steps = scales.float().unsqueeze(2)
    numbers = torch.where(steps > 0, parts / steps, 0.0).round_().clamp_(-127, 127)
    return numbers.to(torch.int8).flatten(1), scales, None


def _round_floats4(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Round [N, G, group] to the nearest numbers [N, K], by scales [N, G] that bring the largest between 4 and 8."""
    exponents = parts.abs().amax(dim=2).frexp().exponent - 3 + E8M0_BIAS
    scales = exponents.clamp_(0, E8M0_NAN - 1)
    steps = torch.ldexp(parts, E8M0_BIAS - scales.unsqueeze(2))
    half = torch.tensor(E2M1_TWICE[:8]) / 2.0
    numbers = torch.bucketize(steps.abs(), (half[1:] + half[:-1]) / 2)
    return (numbers + 8 * (steps < 0)).to(torch.uint8).flatten(1), scales.to(torch.uint8)


def _pack_groups(format_: WeightFormat, numbers: Tensor, scales: Tensor, least: Tensor | None) -> Tensor:
    group, below = numbers.shape[1] // scales.shape[1], (0, 0, 0, -len(numbers) % COLUMNS)
    numbers, scales = F.pad(numbers, below), F.pad(scales, below)
    panels, groups = len(numbers) // COLUMNS, scales.shape[1]
    data = torch.zeros(panels, groups * group_bytes(format_, group), dtype=torch.uint8)
    to_numbers, to_scales, to_least = _parts(data, format_, group)
    to_scales.copy_(scales.view(panels, COLUMNS, groups).transpose(1, 2))
    split = numbers.view(panels, COLUMNS, groups, group).permute(0, 2, 3, 1)  # [panels, G, group, 32]
    if least is not None:
        to_least.copy_(F.pad(least, below).view(panels, COLUMNS, groups).transpose(1, 2))
    if format_ in _PAIRED:
        split = split[..., :W] | split[..., W:] << 4
    to_numbers.copy_(split)
    return data


def _parts(data: Tensor, format_: WeightFormat, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """View numbers [panels, G, group, 32 int8, or 16 uint8 of two], scales and least numbers [panels, G, 32 or 0]."""
    groups = data.view(len(data), -1, group_bytes(format_, group))
    head = _SCALES[format_].itemsize * COLUMNS
    scales = groups[:, :, :head].view(_SCALES[format_])
    if format_ == "q4_1":
        least = groups[:, :, head : 2 * head].view(torch.float16)
        return groups[:, :, 2 * head :].view(*groups.shape[:2], group, W), scales, least
    numbers, kind, wide = groups[:, :, head:], torch.int8, COLUMNS
    if format_ in _PAIRED:
        kind, wide = torch.uint8, W
    return numbers.view(kind).view(*groups.shape[:2], group, wide), scales, scales[:, :, :0]
