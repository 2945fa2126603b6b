"""Weights whose numbers share scales or have few bits: what they stand for, and a part of one.

Owns:      how numbers, zeros and scales make a weight, whatever library packed them; when panels of Q4_1,
           Q8_0 or MXFP4 numbers hold the same weight (Q4_1: number * scale + least, others: number * scale; groups of
           32).
Never:     knows names or files; reads more rows than it is asked for.
Invariant: `floats` and `groups` of the same rows stand for equal numbers.
Thread:    the one that loads the model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from replicas.errors import InvalidConfig
from replicas.kernels.weight_formats import E2M1_TWICE, E8M0_BIAS, E8M0_NAN, GROUP, WeightFormat

Groups = tuple[Tensor, Tensor, Tensor | None]  # numbers [R, K], scales [R, K / 32], least numbers [R, K / 32] fp16


class WeightSource(Protocol):
    """A whole weight [N, K] of a checkpoint, in numbers of its own kind."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def fits(self) -> WeightFormat | None: ...

    def floats(self, start: int, stop: int) -> Tensor: ...

    def groups(self, start: int, stop: int) -> Groups: ...


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a weight: rows and columns [start, stop). It is a `StoredWeight` of replicas/kernels/panels.py."""

    source: WeightSource
    rows: tuple[int, int]
    columns: tuple[int, int]

    @classmethod
    def of(cls, source: WeightSource) -> Self:
        """Return the whole weight."""
        return cls(source, (0, source.shape[0]), (0, source.shape[1]))

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def fits(self) -> WeightFormat | None:
        return self.source.fits if all(column % GROUP == 0 for column in self.columns) else None

    def narrow(self, dim: int, start: int, length: int) -> Self:
        first, stop = (self.rows, self.columns)[dim]
        assert 0 <= start <= start + length <= stop - first, f"{start} and {length} of {stop - first}"
        part = (first + start, first + start + length)
        return type(self)(self.source, *((part, self.columns) if dim == 0 else (self.rows, part)))

    def floats(self, start: int, stop: int) -> Tensor:
        return self.source.floats(self.rows[0] + start, self.rows[0] + stop)[:, slice(*self.columns)]

    def groups(self, start: int, stop: int) -> Groups:
        numbers, scales, least = self.source.groups(self.rows[0] + start, self.rows[0] + stop)
        some = slice(self.columns[0] // GROUP, self.columns[1] // GROUP)
        return numbers[:, slice(*self.columns)], scales[:, some], None if least is None else least[:, some]

    def eights(self) -> tuple[Tensor, Tensor, int] | None:
        if not isinstance(self.source, Floats8):
            return None
        return self.source.eights(self.rows, self.columns)


class Integers:
    """Unsigned integers of 4 or 8 bits, by groups of inputs: (number - zero) * scale."""

    def __init__(
        self,
        *,
        shape: tuple[int, int],
        bits: int,
        numbers: Callable[[int, int], Tensor],
        scales: Tensor,
        zeros: Callable[[int, int], Tensor] | None = None,
        group_of: Tensor | None = None,
    ) -> None:
        """
        numbers:  reads rows [start, stop): uint8 [R, K].
        scales:   [N, G], of any float dtype; a view of the file.
        zeros:    reads rows [start, stop): [R, G]; None: the middle number, 2 ** (bits - 1).
        group_of: [K] each input's group, where groups are not K / G inputs one after the other.
        """
        self.shape, self._bits, self._numbers, self._scales = shape, bits, numbers, scales
        self._zeros, self._group_of = zeros, group_of
        self._fits: list[WeightFormat | None] = []  # once it is known

    @property
    def fits(self) -> WeightFormat | None:
        if not self._fits:
            self._fits.append(self._found())
        return self._fits[0]

    def _found(self) -> WeightFormat | None:
        k, num_groups = self.shape[1], self._scales.shape[1]
        if self._group_of is not None or k % num_groups or k // num_groups % GROUP:
            return None
        scales, least = self._scales_of(0, self.shape[0])
        if not torch.equal(scales.half().float(), scales):
            return None
        if self._bits == 4:
            return "q4_1" if torch.equal(least.half().float(), least) else None
        return "q8_0" if torch.equal(least, -128.0 * scales) else None

    def _scales_of(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the scales of rows and what their number 0 stands for: fp32 [R, G]."""
        scales = self._scales[start:stop].float()
        if self._zeros is None:
            return scales, scales * -float(1 << (self._bits - 1))
        return scales, -self._zeros(start, stop).float() * scales

    def floats(self, start: int, stop: int) -> Tensor:
        scales = self._scales[start:stop].float()
        zeros = float(1 << (self._bits - 1)) if self._zeros is None else self._zeros(start, stop).float()
        numbers, k = self._numbers(start, stop).float(), self.shape[1]
        if self._group_of is not None:
            zeros = zeros if isinstance(zeros, float) else zeros[:, self._group_of]
            return numbers.sub_(zeros).mul_(scales[:, self._group_of])
        grouped = numbers.view(len(numbers), scales.shape[1], k // scales.shape[1])
        grouped.sub_(zeros if isinstance(zeros, float) else zeros.unsqueeze(2)).mul_(scales.unsqueeze(2))
        return numbers

    def groups(self, start: int, stop: int) -> Groups:
        scales, least = self._scales_of(start, stop)
        times = self.shape[1] // scales.shape[1] // GROUP
        numbers, repeated = self._numbers(start, stop), scales.half().repeat_interleave(times, dim=1)
        if self._bits == 8:
            return (numbers ^ 128).view(torch.int8), repeated, None
        return numbers, repeated, least.half().repeat_interleave(times, dim=1)


class Floats8:
    """Numbers of 8 bits (float8_e4m3fn, float8_e5m2) times a scale: of the tensor, of a row, or of a block."""

    fits: WeightFormat | None = None

    def __init__(self, numbers: Tensor, scales: Tensor, block: tuple[int, int]) -> None:
        """``scales``: [ceil(N / block[0]), ceil(K / block[1])]."""
        self.shape = (int(numbers.shape[0]), int(numbers.shape[1]))
        self._numbers, self._scales, self._block = numbers, scales.float(), block

    def floats(self, start: int, stop: int) -> Tensor:
        high, wide = self._block
        of_rows = self._scales[torch.arange(start, stop) // high]  # [R, ceil(K / wide)]
        scales = of_rows.repeat_interleave(min(wide, self.shape[1]), dim=1)[:, : self.shape[1]]
        return self._numbers[start:stop].float().mul_(scales)

    def groups(self, start: int, stop: int) -> Groups:
        raise AssertionError("no panels hold such numbers as they are")

    def eights(self, rows: tuple[int, int], columns: tuple[int, int]) -> tuple[Tensor, Tensor, int] | None:
        """Return a part as `StoredWeight.eights` has it. Where it begins within a block, what shares a scale is shorter
        there: whole parts of the block that fit in front of it too."""
        if self._numbers.dtype != torch.float8_e4m3fn:
            return None
        (high, wide), (first, stop) = self._block, columns
        scales = self._scales[torch.arange(*rows) // high]  # [R, ceil(K / wide)]
        numbers = self._numbers[rows[0] : rows[1], first:stop]
        if scales.shape[1] == 1:
            return numbers, scales, stop - first
        shorter = math.gcd(wide, first)
        scales = scales.repeat_interleave(wide // shorter, dim=1)[:, first // shorter : -(-stop // shorter)]
        return numbers, scales, shorter


class Floats4:
    """Numbers of 4 bits (e2m1), each 32 of a row times a power of two: MXFP4, which panels hold as they are."""

    fits: WeightFormat | None = "mxfp4"

    def __init__(self, name: str, blocks: Tensor, scales: Tensor) -> None:
        """``name``: of the weight, for messages; blocks: [N, G, 16] uint8, the lower four bits first; scales: [N, G]
        uint8, 127 more than their exponents."""
        self.shape = (len(blocks), GROUP * blocks.shape[1])
        self._name, self._blocks, self._scales = name, blocks, scales

    def floats(self, start: int, stop: int) -> Tensor:
        numbers, scales, _ = self.groups(start, stop)
        floats = torch.tensor(E2M1_TWICE, dtype=torch.float32)[numbers.int()].mul_(0.5)
        exponents = scales.int() - E8M0_BIAS
        return torch.ldexp(floats.view(*scales.shape, GROUP), exponents.unsqueeze(2)).flatten(1)

    def groups(self, start: int, stop: int) -> Groups:
        both, scales = self._blocks[start:stop], self._scales[start:stop]
        if int(scales.max()) == E8M0_NAN:
            raise InvalidConfig(
                f"model: {self._name} has a scale of {E8M0_NAN}, which is no number: fetch the checkpoint again"
            )
        return torch.stack((both & 15, both >> 4), dim=-1).flatten(1), scales, None
