"""Linear layers, split over the tensor-parallel ranks by output (column) or by input (row), and their product.

Owns:      which slice of a whole weight each rank keeps, and fusing of weights that see the same input; the kernel of
           the product ``x @ weight.T + bias``: on a CPU ours, from a weight in panels (replicas/kernels/linear.py, or
           int8.py and bf16.py, which round activations, where the CPU multiplies bytes or bf16); on a GPU PyTorch's.
Never:     keeps a weight as it was loaded beside its panels.
Invariant: column-parallel output and row-parallel input are the same slice; row-parallel output is equal on all ranks.
           On a CPU an output row depends on its own x row alone.
Source:    Shoeybi et al. 2019 (Megatron-LM, arXiv:1909.08053), section 3.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.kernels import bf16, elementwise, gpu, int8
from replicas.kernels.bf16 import Bf16Kernel
from replicas.kernels.experts.grouped import GroupedKernel, stack
from replicas.kernels.int8 import Int8Kernel
from replicas.kernels.linear import LinearKernel
from replicas.kernels.panels import Packs, Panels, Rows, by_chunks, make, pack, round_int8
from replicas.kernels.team import ReadingStage, Stage, Team, team
from replicas.kernels.weight_formats import WeightFormat, group_length
from replicas.layers.layer import Layer, Piece, Put, loaded
from replicas.layers.tp_group import TpGroup

if TYPE_CHECKING:
    from replicas.kernels.experts.fp8 import Weight8


def pack_as(weight: Tensor | Rows, format_: WeightFormat, *, grouped: bool = False) -> Panels:
    """Pack a weight [out, in] for the kernel that multiplies by ``format_`` on this CPU. ``grouped``: it is one of
    several, of experts or heads."""
    if format_ == "bfloat16" and bf16.serves(format_, torch.bfloat16, grouped=grouped):
        return bf16.pack(weight)
    if format_ == "int8" and int8.serves(weight.shape[1]):
        group = group_length(weight.shape[1])
        return by_chunks(weight, "int8", group, lambda rows: int8.pack(*round_int8(weight[rows])).data)
    return pack(weight, format_)


def kernel_of(
    panels: Panels, bias: Tensor | None, team: Team, dtype: torch.dtype, *, grouped: bool = False
) -> LinearKernel | Int8Kernel:
    """Choose the kernel for what `pack_as` made, in a model of ``dtype``."""
    if bf16.serves(panels.format, dtype, grouped=grouped):
        return Bf16Kernel(panels, team, bias)
    if panels.format == "int8" and int8.serves(panels.k):
        return Int8Kernel(panels, bias, team)
    return LinearKernel(panels, team, bias, rounds=panels.format == "int8")


def grouped_kernel(
    weights: Iterable[Tensor | Rows], format_: WeightFormat, number: int, packs: Packs, dtype: torch.dtype
) -> GroupedKernel:
    """Pack ``number`` weights [out, in], and choose the kernel of their products."""
    panels = packs(lambda: stack((pack_as(each, format_, grouped=True) for each in weights), number))
    threads = team(torch.get_num_threads())
    return GroupedKernel(panels, number, threads, lambda one: kernel_of(one, None, threads, dtype, grouped=True))


class Matmul:
    """The product ``x @ weight.T + bias``. Its input and output are fp32 on a CPU, whatever the weight's format."""

    def __init__(self, format_: WeightFormat = "float32") -> None:
        """``format_``: of the weight on a CPU; a GPU's is the model's dtype, or fp8."""
        self.weight: Tensor | Weight8 | None = None  # [out, in]; on a GPU
        self.bias: Tensor | None = None  # [out]; beside ``weight``
        self._format = format_
        self._kernel: LinearKernel | Int8Kernel | None = None
        self._shape = (0, 0)

    def prepare(
        self, weight: Callable[[], Tensor | Rows], bias: Tensor | None, packs: Packs = make,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        """Take the final weight [out, in] and bias [out] fp32 on a CPU; called once, or `keep` is.

        ``weight``: gives it, of any float dtype; it is not read where ``packs`` has its panels. ``dtype``: of the
        model; in bf16 activations may be rounded to it.
        """
        panels = packs(lambda: pack_as(weight(), self._format))
        self._shape = panels.n, panels.k
        self._kernel = kernel_of(panels, bias, team(torch.get_num_threads()), dtype)

    def keep(self, weight: "Tensor | Weight8", bias: Tensor | None) -> None:
        """Take the final weight and bias as a GPU multiplies by them."""
        self.weight, self.bias, self._shape = weight, bias, (weight.shape[0], weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, in] into a fresh tensor [T, out]."""
        if self._kernel is not None:
            return self._kernel(x)
        assert self.weight is not None, "finalize() comes before the first call"
        if isinstance(self.weight, Tensor):
            return F.linear(x, self.weight, self.bias)
        from replicas.kernels.experts import on_gpu

        return on_gpu.multiply(x, self.weight, self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [T] of the packed weight as a fresh fp32 tensor [T, in]."""
        assert self._kernel is not None, "finalize() comes before the first call"
        return self._kernel.rows(ids)

    def stages(self, x: Tensor, out: Tensor, team: Team) -> tuple[ReadingStage, *tuple[Stage, ...]]:
        """Make the product stages of a program of ``team``: rows of x [.., in] into rows of ``out`` [.., out], both
        kept by the caller; the first reads x. Only where ``in_program``."""
        assert self._kernel is not None, "this product cannot be part of a program"
        return (self._kernel.stage(x, out, team),)

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's shape (out, in)."""
        assert self._shape[0], "finalize() comes before the first step"
        return self._shape

    @property
    def in_program(self) -> bool:
        """Whether it may run as part of a program."""
        return self._kernel is not None and (not isinstance(self._kernel, Int8Kernel) or self._kernel.dense)

    @property
    def num_bytes(self) -> int:
        """Of the weight and of the bias."""
        if self._kernel is not None:
            return self._kernel.num_bytes
        return sum(each.nbytes for each in (self.weight, self.bias) if each is not None)


def loaded_on_gpu(rows: Rows, device: torch.device, dtype: torch.dtype, *, rounds: bool) -> "Tensor | Weight8":
    """Bring weights [N, K] to a GPU: in 8 bits where they are stored so, or ``rounds``; else in ``dtype``."""
    from replicas.kernels.experts import fp8

    if fp8.keeps(rows, device, rounds=rounds):
        return fp8.pack(rows, device, dtype)
    return loaded(rows.pieces, device, dtype)


Pair = tuple[Tensor, Tensor]  # of an adapter: A [rank, in], and B [out, rank] times its scale


class Added(Protocol):
    """What adapters add to a product (layers/adapters.py)."""

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Add to ``out`` [T, out] what the adapters of this step's rows make of x [T, in]."""
        ...


class Linear(Layer):
    """A product by several named weights, one below the other."""

    takes_stored = True

    def __init__(self, names: tuple[str, ...], *, bias: bool) -> None:
        self._names = names
        self._has_bias = bias
        self._one_order = False  # ranks add their parts of a row in one order, whatever the row's place among others
        self._rounds = False  # to 8 bits on a GPU
        self._pieces: dict[str, Piece] = {}  # name -> this rank's slice, until finalize
        self._shapes: dict[str, tuple[int, int]] = {}  # name -> (out, in) of its whole weight
        self.matmul = Matmul()
        self.added: Added | None = None  # None while no adapter was loaded

    def multiply_by(self, format_: WeightFormat, *, one_order: bool) -> None:
        weights = self._put_pieces("weight")
        fits = Rows(weights).fits if weights and format_ == "float32" else None
        self.matmul = Matmul(fits or format_)
        self._one_order, self._rounds = one_order, format_ == "fp8"

    def _slice(self, name: str, tensor: Piece) -> Piece | None:
        """Cut this rank's share of a whole weight [out, in] or bias [out]; None if it has none."""
        raise NotImplementedError

    def slots(self) -> Mapping[str, Put]:
        kinds = ("weight", "bias") if self._has_bias else ("weight",)
        keys = [_key(name, kind) for name in self._names for kind in kinds]
        return {key: self._putter(key) for key in keys}

    def _putter(self, key: str) -> Put:
        def put(tensor: Piece) -> None:
            if len(tensor.shape) == 2:
                self._shapes[key] = tensor.shape[0], tensor.shape[1]
            piece = self._slice(key, tensor)
            if piece is not None:
                self._pieces[key] = piece

        return put

    def finalize(self, device: torch.device, dtype: torch.dtype, packs: Packs = make) -> None:
        weights, biases = self._put_pieces("weight"), self._put_pieces("bias")
        assert weights, f"no weight was put for {self._names}"
        if device.type == "cpu":
            bias = loaded(biases, device, dtype).float() if biases else None
            self.matmul.prepare(lambda: Rows(weights), bias, packs, dtype)
        else:
            whole = loaded_on_gpu(Rows(weights), device, dtype, rounds=self._rounds)
            self.matmul.keep(whole, loaded(biases, device, dtype) if biases else None)
        self._pieces.clear()

    def _put_pieces(self, kind: str) -> list[Piece]:
        return [self._pieces[key] for name in self._names if (key := _key(name, kind)) in self._pieces]

    @property
    def num_bytes(self) -> int:
        return self.matmul.num_bytes

    @property
    def weights_here(self) -> dict[str, int]:
        """The outputs on this rank of each of its weights, by name, in their order."""
        here = {}
        for name in self._names:
            piece = self._slice(key := _key(name, "weight"), torch.empty(self._shapes[key], device="meta"))
            assert piece is not None
            here[name] = piece.shape[0]
        return here

    def share_of(self, name: str, pair: Pair) -> Pair:
        """Cut this rank's share of what an adapter adds to weight ``name``. Raises: ValueError for another shape."""
        (a, b), key = pair, _key(name, "weight")
        if (b.shape[0], a.shape[1]) != self._shapes[key]:
            raise ValueError(f"{(b.shape[0], a.shape[1])} (out, in) is no weight of {self._shapes[key]}")
        return self._cut(key, a, b)

    def _cut(self, key: str, a: Tensor, b: Tensor) -> Pair:
        raise NotImplementedError

    def _multiply(self, x: Tensor) -> Tensor:
        out = self.matmul(x)
        if self.added is not None:
            self.added(x, out)
        return out


class ColumnParallelLinear(Linear):
    """A product of which each rank makes a share of the outputs; its weights see the same input."""

    def __init__(self, names: tuple[str, ...], *, tp: TpGroup, bias: bool = False) -> None:
        super().__init__(names, bias=bias)
        self._tp = tp

    def _slice(self, name: str, tensor: Piece) -> Piece:
        rows = share(tensor.shape[0], self._tp.size, name)
        return tensor.narrow(0, self._tp.rank * rows, rows)

    def _cut(self, key: str, a: Tensor, b: Tensor) -> Pair:
        return a, cast(Tensor, self._slice(key, b))

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, in] into [T, sum of out / tp], one name's share after the other's."""
        return self._multiply(x)


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections as one product. A rank holds whole heads: H of queries, K of keys and
    values.

    With more ranks than KV heads, each KV head lies on tp / num_kv_heads ranks: on those that hold its queries.
    """

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, tp: TpGroup, bias: bool) -> None:
        super().__init__(("q_proj", "k_proj", "v_proj"), tp=tp, bias=bias)
        self.num_heads = share(num_heads, tp.size, "query heads")
        self.num_kv_heads = max(1, num_kv_heads // tp.size)
        self.head_dim = head_dim
        if tp.size > num_kv_heads:
            share(tp.size, num_kv_heads, "ranks over KV heads")
        else:
            share(num_kv_heads, tp.size, "KV heads")
        self._first_kv_head = tp.rank * num_kv_heads // tp.size

    def _slice(self, name: str, tensor: Piece) -> Piece:
        if name.startswith("q_proj"):
            return super()._slice(name, tensor)
        rows = self.num_kv_heads * self.head_dim
        return tensor.narrow(0, self._first_kv_head * self.head_dim, rows)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [T, (H + 2 K) D] into views q [T, H, D], k [T, K, D], v [T, K, D]."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return q, k, v


class HeadSinks(Layer):
    """The scores of no token, one for each query head, which attention adds to its softmax."""

    def __init__(self, num_heads: int, tp: TpGroup) -> None:
        """``num_heads``: of this rank."""
        self._first, self._num_heads = tp.rank * num_heads, num_heads
        self._scores: Tensor | None = None  # [H] of this rank, fp32

    def slots(self) -> Mapping[str, Put]:
        return {"": self._put}

    def _put(self, tensor: Tensor) -> None:
        self._scores = tensor.narrow(0, self._first, self._num_heads)

    def finalize(self, device: torch.device, dtype: torch.dtype, packs: Packs = make) -> None:
        self._scores = self.scores.to(device, dtype).float()

    @property
    def num_bytes(self) -> int:
        return self.scores.nbytes

    @property
    def scores(self) -> Tensor:
        """The scores [H] of this rank's heads."""
        assert self._scores is not None, "no sinks were put"
        return self._scores


class RowParallelLinear(Linear):
    """A product of which each rank multiplies a share of the inputs; the sum over ranks is the output."""

    def __init__(self, *, tp: TpGroup, bias: bool = False) -> None:
        super().__init__(("",), bias=bias)
        self._tp = tp

    def _slice(self, name: str, tensor: Piece) -> Piece | None:
        if name == "bias":
            return tensor if self._tp.rank == 0 else None  # added once
        columns = share(tensor.shape[1], self._tp.size, name)
        return tensor.narrow(1, self._tp.rank * columns, columns)

    def _cut(self, key: str, a: Tensor, b: Tensor) -> Pair:
        return cast(Tensor, self._slice(key, a)), b  # the ranks' parts are added up with those of the product

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, in / tp] into [T, out]."""
        return add_over_ranks(self._multiply(x), self._tp, one_order=self._one_order)


def add_over_ranks(part: Tensor, tp: TpGroup, *, one_order: bool) -> Tensor:
    """Sum the ranks' parts [T, out], in place or afresh; in ``one_order``: of ranks, whatever a row's place."""
    if tp.size == 1 or not one_order:
        return tp.all_reduce(part)
    # An all-reduce adds each piece of its buffer in an order of its own, so a row's bits hang on its place among
    # others; where numbers are rounded afterwards, or experts chosen, the last bit may change the answer
    total, *others = torch.split(tp.all_gather(part, dim=0), len(part))
    for other in others:
        total += other
    return total


def _key(name: str, kind: str) -> str:
    return f"{name}.{kind}" if name else kind


def share(total: int, size: int, what: str) -> int:
    """Split ``total`` evenly. Raises: ValueError that names ``what`` cannot be split."""
    if total % size:
        raise ValueError(f"{total} ({what}) cannot be split evenly over {size}")
    return total // size


class GatedMLP(Layer):
    """The feed-forward network of the Llama family: ``down(silu(gate(x)) * up(x))``; gate and up are one product."""

    def __init__(self, *, tp: TpGroup, bias: bool) -> None:
        self.gate_up = ColumnParallelLinear(("gate_proj", "up_proj"), tp=tp, bias=bias)
        self.down = RowParallelLinear(tp=tp, bias=bias)

    def parts(self) -> Mapping[str, Layer]:
        return {"": self.gate_up, "down_proj": self.down}

    def __call__(self, x: Tensor) -> Tensor:
        """Run the network on [T, hidden]."""
        return self.down(silu_mul(self.gate_up(x)))


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(first half) * second half of [T, 2 size]: a fresh tensor [T, size]."""
    if elementwise.serves(gate_up, halves=True):
        return elementwise.silu_mul(gate_up)
    if gpu.serves(gate_up[:1]):
        return gpu.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
