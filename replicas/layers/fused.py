"""Runs all blocks of a model on a CPU, in fp32 or int8, as programs that the team of threads does not leave.

A program reaches from one attention call to the next; in a decode step, if attention has stages too, to the end.

Owns:      the stages of a block and their order, the programs, and the memory of a step's activations: grown when a
           step has more rows than all before, never shrunk.
Never:     multiplies by a weight that our kernels do not serve, or works with other ranks: then the layers run.
Invariant: the arithmetic is that of the layers (models/llama.py), bit for bit: in int8 a product rounds what it reads,
           and everything between two products is fp32. ``rows`` of a step are the first of every buffer; nothing in
           them outlives the step. Behind the last attention they are those of the tokens whose output is read.
Thread:    the one that runs the model.

    norm, qkv, rotate | attention | o, add and norm, gate and up, SiLU, down, add and norm, next qkv, rotate | ...
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from replicas.kernels import elementwise
from replicas.kernels.adapters.low_rank import LowRankKernel, LowRankStage
from replicas.kernels.elementwise import VectorStage
from replicas.kernels.simd import W
from replicas.kernels.team import Program, ReadingStage, Stage, Team
from replicas.layers.embedding import Rotation
from replicas.layers.linear import ColumnParallelLinear, GatedMLP, Linear, QKVParallelLinear, RowParallelLinear
from replicas.layers.norm import RMSNorm


class Attention(Protocol):
    """The part of a block's attention that stages use."""

    @property
    def qkv(self) -> QKVParallelLinear: ...
    @property
    def o_proj(self) -> RowParallelLinear: ...

    def head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """Return the norms of query heads and key heads before the rotation, if the model has them."""
        ...


class Block(Protocol):
    """The part of a block that stages use."""

    @property
    def input_norm(self) -> RMSNorm: ...
    @property
    def attn(self) -> Attention: ...
    @property
    def post_norm(self) -> RMSNorm: ...
    @property
    def mlp(self) -> GatedMLP: ...


class Activations:
    """The buffers of a step of up to ``rows`` tokens."""

    def __init__(self, rows: int, block: Block) -> None:
        """With memory for what adapters add, if any was loaded."""
        hidden, qkv = _columns(block.attn.qkv)
        gated, _ = _columns(block.mlp.down)
        head_dim = block.attn.qkv.head_dim
        self.rows = rows
        self.hidden = torch.empty(rows, hidden)  # the residual stream
        self.normed = torch.empty(rows, hidden)  # what the next product reads
        self.term = torch.empty(rows, hidden)  # what is added to hidden next
        self.qkv = torch.empty(rows, qkv)
        self.attended = torch.empty(rows, _columns(block.attn.o_proj)[0])  # by stages
        self.cos, self.sin = torch.empty(rows, 1, head_dim), torch.empty(rows, 1, head_dim)
        self.gate_up = torch.empty(rows, 2 * gated)
        self.gated = torch.empty(rows, gated)
        added = [product.added for product in (block.attn.qkv, block.attn.o_proj, block.mlp.gate_up, block.mlp.down)]
        low = max((each.low_floats for each in added if isinstance(each, LowRankKernel)), default=0)
        self.low = torch.empty(rows, low) if low else None


def stages_of(
    blocks: Sequence[Block], norm: RMSNorm, at: Activations, team: Team
) -> tuple[list[list[Stage]], list[list[ReadingStage]]]:
    """Make the stages before each block's attention and after the last one's [L + 1], and those that read its result
    [L, ..].

    ``norm``: the one after the last block. Each call makes new stages: a stage knows the counter of its one program.
    """
    parts, projections = [], []
    stages: list[Stage] = [_norm(blocks[0].input_norm, at.hidden, at.normed)]
    for block, following in zip(blocks, [*[b.input_norm for b in blocks[1:]], norm], strict=True):
        parts.append([*stages, *_before_attention(block, at, team)])
        projection = _product(block.attn.o_proj, at.attended, at.term, at, team)
        projections.append([stage for stage in projection if isinstance(stage, ReadingStage)])
        stages = [*projection, *_after_attention(block, at, team), _add_and_norm(following, at)]
    return [*parts, stages], projections


def fits_programs(blocks: Sequence[Block], norm: RMSNorm) -> bool:
    """Whether steps can run as programs: weights and sizes suit the kernels."""
    for block in blocks:
        norms = (block.input_norm, block.post_norm, norm, *(block.attn.head_norms() or ()))
        odd = block.attn.qkv.head_dim % (2 * W)
        if odd or any(n.weight is None or n.weight.dtype != torch.float32 for n in norms):
            return False
    products = [p for b in blocks for p in (b.attn.qkv, b.attn.o_proj, b.mlp.gate_up, b.mlp.down)]
    return all(product.matmul.in_program for product in products)


def adds(product: Linear) -> bool:
    """Whether an adapter adds to rows of this step, on a CPU: to those of one product, if to any of the model."""
    return isinstance(product.added, LowRankKernel) and product.added.in_step


def _product(layer: Linear, x: Tensor, out: Tensor, at: Activations, team: Team) -> list[Stage]:
    """Make the stages of a product, and of what adapters add to it."""
    stages: list[Stage] = [*layer.matmul.stages(x, out, team)]
    if at.low is not None:
        assert isinstance(layer.added, LowRankKernel)
        stages += layer.added.stages(x, out, at.low, team)
    return stages


def _before_attention(block: Block, at: Activations, team: Team) -> list[Stage]:
    """Make the stages from normed to qkv, rotated in place."""
    layer = block.attn.qkv
    q, k, _ = layer.split(at.qkv)  # [rows, H, D], [rows, K, D]
    norms = [
        _norm(norm, x, x, heads=x.shape[1]) for norm, x in zip(block.attn.head_norms() or (), (q, k), strict=False)
    ]
    heads, cos, sin = layer.num_heads + layer.num_kv_heads, at.cos.data_ptr(), at.sin.data_ptr()
    rotate = VectorStage(elementwise.rotate_rows, q, q, heads=heads, size=layer.head_dim, cos=cos, sin=sin)
    return [*_product(layer, at.normed, at.qkv, at, team), *norms, rotate]


def _after_attention(block: Block, at: Activations, team: Team) -> list[Stage]:
    """Make the stages from the o product's term to the MLP's term."""
    return [
        _add_and_norm(block.post_norm, at),
        *_product(block.mlp.gate_up, at.normed, at.gate_up, at, team),
        VectorStage(elementwise.silu_mul_rows, at.gate_up, at.gated, size=at.gated.shape[1]),
        *_product(block.mlp.down, at.gated, at.term, at, team),
    ]


def _add_and_norm(norm: RMSNorm, at: Activations) -> Stage:
    """Make the stage hidden += term; normed = norm(hidden)."""
    return _norm(norm, at.hidden, at.normed, term=at.term.data_ptr())


def _norm(norm: RMSNorm, x: Tensor, out: Tensor, *, heads: int = 1, term: int = 0) -> Stage:
    assert norm.weight is not None, "finalize() comes before the first step"
    size, weight = norm.weight.shape[0], norm.weight.data_ptr()
    return VectorStage(
        elementwise.rms_norm_rows, x, out, heads=heads, size=size, weight=weight, eps=norm.eps, term=term
    )


def _columns(product: RowParallelLinear | ColumnParallelLinear) -> tuple[int, int]:
    """Return the length of a product's input and output rows on this rank."""
    outputs, inputs = product.matmul.shape
    return inputs, outputs


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # an AttentionBackend's ``forward``
FIRST_ROWS = 64  # that the first buffers hold


@runtime_checkable
class StagedAttention(Protocol):
    """An attention backend that can be part of a program."""

    @property
    def num_threads(self) -> int:
        """Threads of the largest team that can run its stages."""
        ...

    def decode_stages(self, num_layers: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Sequence[Stage]:
        """Make a stage per layer that stores k and v [T, K, D] and attends with q [T, H, D] into out [T, H * D]."""
        ...

    def set_stages(self) -> bool:
        """Prepare the last stages for the step that has begun; False if they cannot run it."""
        ...

    def narrow(self, tokens: Tensor) -> None:
        """Prepare the last layer's `forward` for ``tokens`` [S] of the step, ascending: K and V of all are stored, and
        results of other tokens may be left out."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Programs:
    """The programs of a step over one set of buffers."""

    at: Activations
    programs: tuple[Program, ...]  # [L + 1]: before each block's attention, and after the last one's
    projections: tuple[Sequence[ReadingStage], ...]  # [L]: what reads the result of each block's attention
    decode: Program | None  # all of them, attention included


class FusedBlocks:
    """The blocks of a model and the norm after the last, run as programs."""

    def __init__(
        self,
        blocks: Sequence[Block],
        norm: RMSNorm,
        attend: Attend,
        num_threads: int,
        staged: StagedAttention | None = None,
    ) -> None:
        """``staged``: the backend of ``attend``, if it can be part of a program."""
        self._blocks, self._norm, self._attend = blocks, norm, attend
        self._staged = staged if staged is not None and num_threads <= staged.num_threads else None
        self.apart = False  # for measurements: attention is always called by itself
        self._team = Team(num_threads)  # its scratch is no other model's
        self._made: _Programs | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the last step, for measurements."""
        return self._made.programs if self._made is not None else ()

    def __call__(self, hidden: Tensor, rotation: Rotation, wanted: Tensor | None = None) -> Tensor:
        """Embedded tokens [T, hidden], T >= 1, -> normalised output of the last block [T, hidden], in a
        buffer that the next step overwrites. ``wanted``: tokens [S], ascending, whose output [S, hidden] is read."""
        rows = hidden.shape[0]
        added = self._blocks[0].attn.qkv.added
        if self._made is None or self._made.at.rows < rows or (added is not None and self._made.at.low is None):
            self._made = self._make(max(FIRST_ROWS, 1 << (rows - 1).bit_length()))
        whole = adds(self._blocks[0].attn.qkv)
        at, programs = self._made.at, self._made.programs
        for buffer, value in ((at.hidden, hidden), (at.cos, rotation.cos), (at.sin, rotation.sin)):
            buffer[:rows].copy_(value)
        if self._made.decode is not None and not self.apart and self._staged is not None and self._staged.set_stages():
            self._made.decode.run(rows, whole=whole)
            return at.normed[:rows] if wanted is None else at.normed[wanted]
        q, k, v = self._blocks[0].attn.qkv.split(at.qkv[:rows])
        for i, projection in enumerate(self._made.projections):
            programs[i].run(rows, whole=whole)
            is_last = i + 1 == len(self._blocks)
            if is_last and wanted is not None and self._staged is not None:
                self._staged.narrow(wanted)
            attended = self._attend(i, q, k, v)  # may be a fresh tensor: bound until the program that reads it has run
            if is_last and wanted is not None:
                attended, residual, rows = attended[wanted], at.hidden[wanted], len(wanted)
                at.hidden[:rows].copy_(residual)
            assert attended.stride(1) == 1, f"rows must be whole, strides are {attended.stride()}"
            for stage in projection:
                stage.read_from(attended)
        if rows:
            programs[-1].run(rows, whole=whole)
        return at.normed[:rows]

    def _make(self, rows: int) -> _Programs:
        at = Activations(rows, self._blocks[0])
        parts, projections = stages_of(self._blocks, self._norm, at, self._team)
        programs, decode = tuple(self._program(part) for part in parts), None
        if self._staged is not None:
            q, k, v = self._blocks[0].attn.qkv.split(at.qkv)
            attention = self._staged.decode_stages(len(self._blocks), q, k, v, at.attended)
            # stages of their own: a stage knows the counter of its program
            (first, *others), _ = stages_of(self._blocks, self._norm, at, self._team)
            whole = itertools.chain(first, *((stage, *part) for stage, part in zip(attention, others, strict=True)))
            decode = self._program(list(whole))
        return _Programs(at, programs, tuple(projections), decode)

    def _program(self, stages: Sequence[Stage]) -> Program:
        """Make a program that leaves what adapters add out of steps without any."""
        return Program(stages, self._team, [not isinstance(stage, LowRankStage) for stage in stages])
