"""All blocks of a model on a CPU in fp32 or int8, as programs: between two calls of attention the team never leaves,
and in a decode step not even for attention, where the backend has it as a stage.

Owns:      the programs (block_stages.py has what they are made of), and the memory of a step's activations: grown when
           a step has more rows than all before, never shrunk.
Never:     multiplies by a weight that our kernels do not serve, or works with other ranks: then the layers run.
Invariant: ``rows`` of a step are the first of every buffer; nothing in them outlives the step.
Thread:    the one that runs the model.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from replicas.kernels.program import Program, ReadingStage, Stage
from replicas.kernels.team import Team
from replicas.layers.block_stages import Activations, Block, program_rows, stages_of
from replicas.layers.norm import RMSNorm
from replicas.layers.rope import Rotation

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # an AttentionBackend's ``forward``
FIRST_ROWS = 64  # that the first buffers hold


@runtime_checkable
class StagedAttention(Protocol):
    """An attention backend that can be part of a program."""

    @property
    def num_threads(self) -> int:
        """Of the largest team that can run its stages."""
        ...

    def decode_stages(self, num_layers: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Sequence[Stage]:
        """Of each layer: stores k and v [T, K, D], and attends with q [T, H, D] into out [T, H * D]."""
        ...

    def set_stages(self) -> bool:
        """Make the stages that were made last ready for the step that has begun; False where they cannot run it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Programs:
    """All programs over one set of buffers."""

    at: Activations
    programs: tuple[Program, ...]  # [L + 1]: before each block's attention, and after the last one's
    projections: tuple[ReadingStage, ...]  # [L]: what reads the result of each block's attention
    decode: Program | None  # all of them, attention included


class FusedBlocks:
    """The blocks and the norm after the last."""

    def __init__(
        self,
        blocks: Sequence[Block],
        norm: RMSNorm,
        attend: Attend,
        num_threads: int,
        staged: StagedAttention | None = None,
    ) -> None:
        """``staged``: ``attend``'s backend, where it can be part of a program."""
        self._blocks, self._norm, self._attend = blocks, norm, attend
        self._staged = staged if staged is not None and num_threads <= staged.num_threads else None
        self.apart = False  # for who measures: attention is always called by itself
        self._team = Team(num_threads)  # its scratch is no other model's
        self.max_rows = program_rows(blocks, norm) - 1  # of a step; without any, the layers are called one by one
        self._made: _Programs | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        """Those of the last step, for who measures."""
        return self._made.programs if self._made is not None else ()

    def __call__(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """Embedded tokens [T, hidden], 1 <= T <= max_rows, -> normalised output of the last block [T, hidden], in a
        buffer that the next step overwrites."""
        rows = hidden.shape[0]
        if self._made is None or self._made.at.rows < rows:
            self._made = self._make(max(FIRST_ROWS, 1 << (rows - 1).bit_length()))
        at, programs = self._made.at, self._made.programs
        for buffer, value in ((at.hidden, hidden), (at.cos, rotation.cos), (at.sin, rotation.sin)):
            buffer[:rows].copy_(value)
        if self._made.decode is not None and not self.apart and self._staged is not None and self._staged.set_stages():
            self._made.decode.run(rows)
            return at.normed[:rows]
        q, k, v = self._blocks[0].attn.qkv.split(at.qkv[:rows])
        for i, projection in enumerate(self._made.projections):
            programs[i].run(rows)
            attended = self._attend(i, q, k, v)  # may be a fresh tensor: bound until the program that reads it has run
            assert attended.stride(1) == 1, f"rows must be whole, strides are {attended.stride()}"
            projection.read_from(attended)
        programs[-1].run(rows)
        return at.normed[:rows]

    def _make(self, rows: int) -> _Programs:
        at = Activations(rows, self._blocks[0])
        parts, projections = stages_of(self._blocks, self._norm, at, self._team)
        programs, decode = tuple(Program(part, self._team) for part in parts), None
        if self._staged is not None:
            q, k, v = self._blocks[0].attn.qkv.split(at.qkv)
            attention = self._staged.decode_stages(len(self._blocks), q, k, v, at.attended)
            # stages of their own: a stage knows the counter of its program
            (first, *others), _ = stages_of(self._blocks, self._norm, at, self._team)
            whole = itertools.chain(first, *((stage, *part) for stage, part in zip(attention, others, strict=True)))
            decode = Program(list(whole), self._team)
        return _Programs(at, programs, tuple(projections), decode)
