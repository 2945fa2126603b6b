"""Linear layers, split over the tensor-parallel ranks by output (column) or by input (row), and their product.

Owns:      which slice of a whole weight each rank keeps, and fusing of weights that see the same input; the kernel of
           the floating-point product ``x @ weight.T + bias``: on a CPU in fp32 ours (replicas/kernels/linear.py),
           or PyTorch's BLAS where the engine's `Products` say so.
Never:     measures or chooses `Products` (runner/product_choice.py does, when an engine starts); copies a weight that
           needs neither slicing nor fusing: on CPU it stays a view of the mapped file (except odd sizes with
           ``one_order``).
Invariant: column-parallel output and row-parallel input are the same slice; row-parallel output is equal on all ranks.
           Which product runs depends on shapes and `Products` alone. An output row does not depend on other rows,
           except that steps of more rows may sum in another order (fp32 rounding), which ``one_order`` excludes.
Source:    Shoeybi et al. 2019 (Megatron-LM, arXiv:1909.08053), section 3.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from replicas.config import Products
from replicas.kernels import elementwise
from replicas.kernels.linear import ANY_ROWS, LinearKernel, serves
from replicas.kernels.program import ReadingStage, Stage
from replicas.kernels.simd import W
from replicas.kernels.team import Team, team
from replicas.layers.int8 import Int8Matmul
from replicas.layers.layer import Layer, Put
from replicas.layers.tp_group import TpGroup

OWN = Products()


class Matmul:
    """The product ``x @ weight.T + bias`` by the kernels or by BLAS."""

    def __init__(self, products: Products = OWN) -> None:
        self.weight: Tensor | None = None  # [out, in]
        self.bias: Tensor | None = None  # [out]
        self._products = products
        self._kernel: LinearKernel | None = None
        self._blas_rows = 0  # steps of this many rows or more go to F.linear
        self._padded = False  # the kernel has a copy of the weight, with zeros up to sizes that it serves

    def prepare(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take the final weight [out, in] and bias [out], on their device and in their dtype. Called once."""
        self.weight, self.bias = weight, bias
        if self.one_order and weight.device.type == "cpu" and weight.dtype == torch.float32 and not serves(weight):
            rows, columns = (-size % W for size in weight.shape)
            weight, bias = F.pad(weight, (0, columns, 0, rows)), None if bias is None else F.pad(bias, (0, rows))
            self._padded = True
        if serves(weight):
            threads = team(torch.get_num_threads())
            self._kernel = LinearKernel(weight, threads, bias, one_order=self.one_order)
            self._blas_rows = ANY_ROWS if self.one_order else self._products.blas_rows.get(self.shape, ANY_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, in] into a fresh tensor [T, out]."""
        if self._padded and self._kernel is not None:
            return self._kernel(F.pad(x, (0, -x.shape[1] % W)))[:, : self.shape[0]].contiguous()
        if self._kernel is not None and x.shape[0] < self._blas_rows and x.dtype == torch.float32:
            return self._kernel(x)
        assert self.weight is not None, "finalize() comes before the first call"
        return F.linear(x, self.weight, self.bias)

    def stages(self, x: Tensor, out: Tensor, team: Team) -> tuple[ReadingStage, *tuple[Stage, ...]]:
        """Make the product stages of a program of ``team``: rows of x [.., in] into rows of ``out`` [.., out], both
        kept by the caller; the first reads x. Only where ``program_rows`` > 0, for steps of fewer rows than that."""
        assert self._kernel is not None, "program_rows is 0: this product cannot be part of a program"
        return (self._kernel.stage(x, out, team),)

    @property
    def one_order(self) -> bool:
        """Whether sums are taken in one order in steps of any number of rows."""
        return self._products.one_order

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's shape (out, in)."""
        assert self.weight is not None, "finalize() comes before the first step"
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def program_rows(self) -> int:
        """Rows below which a step may run as part of a program; 0 if none may."""
        return 0 if self._padded else self._blas_rows

    @property
    def num_bytes(self) -> int:
        held = sum(t.nbytes for t in (self.weight, self.bias) if t is not None)
        return held + (self._kernel.num_bytes if self._padded and self._kernel is not None else 0)


class _Linear(Layer):
    """A product by several named weights, one below the other."""

    def __init__(self, names: tuple[str, ...], *, bias: bool) -> None:
        self._names = names
        self._has_bias = bias
        self._pieces: dict[str, Tensor] = {}  # name -> this rank's slice, until finalize
        self.matmul: Matmul | Int8Matmul = Matmul()

    def multiply_by(self, products: Products) -> None:
        self.matmul = Matmul(products)

    def quantize(self) -> None:
        self.matmul = Int8Matmul()

    def _slice(self, name: str, tensor: Tensor) -> Tensor | None:
        """Cut this rank's share of a whole weight [out, in] or bias [out]; None if it has none."""
        raise NotImplementedError

    def slots(self) -> Mapping[str, Put]:
        kinds = ("weight", "bias") if self._has_bias else ("weight",)
        keys = [_key(name, kind) for name in self._names for kind in kinds]
        return {key: self._putter(key) for key in keys}

    def _putter(self, key: str) -> Put:
        def put(tensor: Tensor) -> None:
            piece = self._slice(key, tensor)
            if piece is not None:
                self._pieces[key] = piece

        return put

    def finalize(self, device: torch.device, dtype: torch.dtype) -> None:
        weight = self._fuse("weight", device, dtype)
        assert weight is not None, f"no weight was put for {self._names}"
        self.matmul.prepare(weight, self._fuse("bias", device, dtype) if self._has_bias else None)
        self._pieces.clear()

    def _fuse(self, kind: str, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        pieces = [self._pieces[key] for name in self._names if (key := _key(name, kind)) in self._pieces]
        moved = [piece.to(device=device, dtype=dtype) for piece in pieces]
        if len(moved) > 1:
            return torch.cat(moved)
        return moved[0].contiguous() if moved else None

    @property
    def num_bytes(self) -> int:
        return self.matmul.num_bytes


class ColumnParallelLinear(_Linear):
    """A product of which each rank makes a share of the outputs; its weights see the same input."""

    def __init__(self, names: tuple[str, ...], *, tp: TpGroup, bias: bool = False) -> None:
        super().__init__(names, bias=bias)
        self._tp = tp

    def _slice(self, name: str, tensor: Tensor) -> Tensor:
        rows = _share(tensor.shape[0], self._tp.size, name)
        return tensor.narrow(0, self._tp.rank * rows, rows)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, in] into [T, sum of out / tp], one name's share after the other's."""
        return self.matmul(x)


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections as one product. A rank holds whole heads: H of queries, K of keys and
    values.

    With more ranks than KV heads, each KV head lies on tp / num_kv_heads ranks: on those that hold its queries.
    """

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, tp: TpGroup, bias: bool) -> None:
        super().__init__(("q_proj", "k_proj", "v_proj"), tp=tp, bias=bias)
        self.num_heads = _share(num_heads, tp.size, "query heads")
        self.num_kv_heads = max(1, num_kv_heads // tp.size)
        self.head_dim = head_dim
        if tp.size > num_kv_heads:
            _share(tp.size, num_kv_heads, "ranks over KV heads")
        else:
            _share(num_kv_heads, tp.size, "KV heads")
        self._first_kv_head = tp.rank * num_kv_heads // tp.size

    def _slice(self, name: str, tensor: Tensor) -> Tensor:
        if name.startswith("q_proj"):
            return super()._slice(name, tensor)
        rows = self.num_kv_heads * self.head_dim
        return tensor.narrow(0, self._first_kv_head * self.head_dim, rows)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split [T, (H + 2 K) D] into views q [T, H, D], k [T, K, D], v [T, K, D]."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return q, k, v


class RowParallelLinear(_Linear):
    """A product of which each rank multiplies a share of the inputs; the sum over ranks is the output."""

    def __init__(self, *, tp: TpGroup, bias: bool = False) -> None:
        super().__init__(("",), bias=bias)
        self._tp = tp

    def _slice(self, name: str, tensor: Tensor) -> Tensor | None:
        if name == "bias":
            return tensor if self._tp.rank == 0 else None  # added once
        columns = _share(tensor.shape[1], self._tp.size, name)
        return tensor.narrow(1, self._tp.rank * columns, columns)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, in / tp] into [T, out]."""
        part = self.matmul(x)
        if self._tp.size == 1 or not self.matmul.one_order:
            return self._tp.all_reduce(part)
        # An all-reduce adds each piece of its buffer in an order of its own, so a row's bits hang on its place among
        # others; where numbers are rounded afterwards, the last bit may become a step, and change the answer
        total, *others = torch.split(self._tp.all_gather(part, dim=0), len(part))
        for other in others:
            total += other
        return total


def _key(name: str, kind: str) -> str:
    return f"{name}.{kind}" if name else kind


def _share(total: int, size: int, what: str) -> int:
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
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
