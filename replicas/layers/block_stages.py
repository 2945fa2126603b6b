"""The blocks of a model on a CPU as stages of programs.

Owns:      which buffers stages work on, and the order of the kernels of a block.
Never:     runs a stage or keeps a buffer; fused.py does.
Invariant: the arithmetic is that of the layers (models/llama.py), bit for bit: in int8 a product rounds what it reads,
           and all between two products is fp32.
Thread:    the one that runs the model.

    norm, qkv, rotate | attention | o, add and norm, gate and up, SiLU, down, add and norm, next qkv, rotate | ...
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from replicas.kernels import elementwise
from replicas.kernels.elementwise import VectorStage
from replicas.kernels.program import ReadingStage, Stage
from replicas.kernels.simd import W
from replicas.kernels.team import Team
from replicas.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from replicas.layers.mlp import GatedMLP
from replicas.layers.norm import RMSNorm


class Attention(Protocol):
    """What is used of a block's attention."""

    @property
    def qkv(self) -> QKVParallelLinear: ...
    @property
    def o_proj(self) -> RowParallelLinear: ...

    def head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """Norms of each query head and each key head before the rotation, where the model has them."""
        ...


class Block(Protocol):
    """What is used of a block."""

    @property
    def input_norm(self) -> RMSNorm: ...
    @property
    def attn(self) -> Attention: ...
    @property
    def post_norm(self) -> RMSNorm: ...
    @property
    def mlp(self) -> GatedMLP: ...


class Activations:
    """The buffers of up to ``rows`` tokens."""

    def __init__(self, rows: int, block: Block) -> None:
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


def stages_of(
    blocks: Sequence[Block], norm: RMSNorm, at: Activations, team: Team
) -> tuple[list[list[Stage]], list[ReadingStage]]:
    """Stages before each block's attention and after the last one's [L + 1], and those that read its result [L].

    ``norm``: the one after the last block. Each call makes new stages: a stage knows the counter of its one program.
    """
    parts, projections = [], []
    stages: list[Stage] = [_norm(blocks[0].input_norm, at.hidden, at.normed)]
    for block, following in zip(blocks, [*[b.input_norm for b in blocks[1:]], norm], strict=True):
        parts.append([*stages, *_before_attention(block, at, team)])
        projection = block.attn.o_proj.matmul.stages(at.attended, at.term, team)
        projections.append(projection[0])
        stages = [*projection, *_after_attention(block, at, team), _add_and_norm(following, at)]
    return [*parts, stages], projections


def program_rows(blocks: Sequence[Block], norm: RMSNorm) -> int:
    """Steps of fewer rows can run as programs; 0 when weights or sizes are not for the kernels."""
    for block in blocks:
        norms = (block.input_norm, block.post_norm, norm, *(block.attn.head_norms() or ()))
        odd = block.attn.qkv.head_dim % (2 * W)
        if odd or any(n.weight is None or n.weight.dtype != torch.float32 for n in norms):
            return 0
    products = [p for b in blocks for p in (b.attn.qkv, b.attn.o_proj, b.mlp.gate_up, b.mlp.down)]
    return min((product.matmul.program_rows for product in products), default=0)


def _before_attention(block: Block, at: Activations, team: Team) -> list[Stage]:
    """normed -> qkv, rotated in place."""
    layer = block.attn.qkv
    q, k, _ = layer.split(at.qkv)  # [rows, H, D], [rows, K, D]
    norms = [
        _norm(norm, x, x, heads=x.shape[1]) for norm, x in zip(block.attn.head_norms() or (), (q, k), strict=False)
    ]
    heads, cos, sin = layer.num_heads + layer.num_kv_heads, at.cos.data_ptr(), at.sin.data_ptr()
    rotate = VectorStage(elementwise.rotate_rows, q, q, heads=heads, size=layer.head_dim, cos=cos, sin=sin)
    return [*layer.matmul.stages(at.normed, at.qkv, team), *norms, rotate]


def _after_attention(block: Block, at: Activations, team: Team) -> list[Stage]:
    """The o product's term -> the MLP's term."""
    gate_up, down = block.mlp.gate_up.matmul, block.mlp.down.matmul
    return [
        _add_and_norm(block.post_norm, at),
        *gate_up.stages(at.normed, at.gate_up, team),
        VectorStage(elementwise.silu_mul_rows, at.gate_up, at.gated, size=at.gated.shape[1]),
        *down.stages(at.gated, at.term, team),
    ]


def _add_and_norm(norm: RMSNorm, at: Activations) -> Stage:
    """hidden += term; normed = norm(hidden)."""
    return _norm(norm, at.hidden, at.normed, term=at.term.data_ptr())


def _norm(norm: RMSNorm, x: Tensor, out: Tensor, *, heads: int = 1, term: int = 0) -> Stage:
    assert norm.weight is not None, "finalize() comes before the first step"
    size, weight = norm.weight.shape[0], norm.weight.data_ptr()
    return VectorStage(
        elementwise.rms_norm_rows, x, out, heads=heads, size=size, weight=weight, eps=norm.eps, term=term
    )


def _columns(product: RowParallelLinear | ColumnParallelLinear) -> tuple[int, int]:
    """Length of a product's input and output rows on this rank."""
    outputs, inputs = product.matmul.shape
    return inputs, outputs
