"""Rows sorted by expert, multiplied by their experts' packed weights on a CPU; and the sum of a token's experts.

Owns:      the packed weights of all experts of a product, one behind the other, and the arguments of their kernels.
Method:    the team runs the kernel of the dense product (linear.py, int8.py or bf16.py) for one expert after the
           other, in one launch. A thread that finds no task left at one expert goes on with the next without waiting,
           so that a few rows by each of many experts keep all threads busy. Only experts that have rows are read.
Invariant: an output row depends on its own x row and its expert alone, as that of the dense product does: not on the
           other rows, their number, or the threads. A token's sum runs in the order of its choices.
Thread:    all of the team.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from replicas.kernels.int8 import Int8Kernel
from replicas.kernels.linear import LinearKernel
from replicas.kernels.panel_tiles import COLUMNS
from replicas.kernels.panels import Panels
from replicas.kernels.simd import W, call_kernel, fma, load, load1, load_i64, mul, splat, store, store1
from replicas.kernels.team import Team, kernel, struct, team_for, team_size, thread_id

COUNTER_BYTES = 64  # of an expert's tasks: a cache line each
Dense = LinearKernel | Int8Kernel
FLOATS_OF_TEAM = 32 << 10  # fewer are summed by one thread
GroupArgs = struct("GroupArgs", "function arguments argument_bytes number")
SumArgs = struct("SumArgs", "x x_stride places weights out size tokens top_k")


@kernel(GroupArgs)
def run_groups(pointer: Any) -> None:
    """Run ``function`` on each of ``number`` arguments, which lie one behind the other."""
    a = carray(pointer, 1)[0]
    for i in range(a.number):
        call_kernel(a.function, a.arguments + i * a.argument_bytes)


@kernel(SumArgs)
def sum_rows(pointer: Any) -> None:
    """out [tokens, size] = the sum over j of weights [tokens, top_k] times rows places [tokens, top_k] of x."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    whole = a.size // W * W
    for t in range(a.tokens * me // threads, a.tokens * (me + 1) // threads):
        out, first = a.out + 4 * t * a.size, t * a.top_k
        weight, row = load1(a.weights + 4 * first), a.x + load_i64(a.places + 8 * first) * a.x_stride
        for i in range(0, 4 * whole, 4 * W):
            total = mul(splat(weight), load(row + i))
            for j in range(first + 1, first + a.top_k):
                other = a.x + load_i64(a.places + 8 * j) * a.x_stride
                total = fma(splat(load1(a.weights + 4 * j)), load(other + i), total)
            store(out + i, total)
        for i in range(4 * whole, 4 * a.size, 4):
            rest = weight * load1(row + i)
            for j in range(first + 1, first + a.top_k):
                rest += load1(a.weights + 4 * j) * load1(a.x + load_i64(a.places + 8 * j) * a.x_stride + i)
            store1(out + i, rest)


@dataclass(frozen=True, slots=True, eq=False)
class SortedRows:
    """A step's tokens, a row for each expert that a token goes to, sorted by expert."""

    tokens: Tensor  # [R] int64, the token of each row; R = T * top_k
    experts: "np.ndarray[Any, np.dtype[np.int64]]"  # [A] those that have rows, ascending
    starts: "np.ndarray[Any, np.dtype[np.int64]]"  # [A + 1] their first rows, and R
    places: Tensor  # [T, top_k] int64, the row of each choice of a token

    @staticmethod
    def of(ids: Tensor) -> "SortedRows":
        """Sort the choices ids [T, top_k] int64, on the CPU; an expert's rows are in the order of tokens."""
        flat = ids.numpy().ravel()
        order = np.argsort(flat, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        counts = np.bincount(flat)
        experts = counts.nonzero()[0]
        starts = np.zeros(len(experts) + 1, np.int64)
        np.cumsum(counts[experts], out=starts[1:])
        tokens = torch.from_numpy(order // ids.shape[1])
        return SortedRows(tokens, experts, starts, torch.from_numpy(places).view(ids.shape))


def stack(panels: Iterable[Panels], number: int) -> Panels:
    """Lay the panels of ``number`` equal weights [N, K], made one by one, behind each other, as one of n = all N."""
    made = iter(panels)
    first = next(made)
    data = torch.empty(number, *first.data.shape, dtype=torch.uint8)
    data[0] = first.data
    for i, following in enumerate(made, start=1):
        data[i] = following.data
    return replace(first, n=number * first.n, data=data.flatten(0, 1))


class GroupedKernel:
    """The products by the weights [N, K] of E experts."""

    def __init__(self, panels: Panels, number: int, team: Team, kernel_of: Callable[[Panels], Dense]) -> None:
        """``panels``: of `stack`; kernel_of: makes the dense product by one of them."""
        self._panels, self._team = panels, team
        self.n, self.k, count = panels.n // number, panels.k, len(panels.data) // number
        self._columns = count * COLUMNS  # of what the kernel writes
        one = replace(panels, n=self._columns, data=panels.data[:count])
        self._first = kernel_of(one)
        self._expert_bytes = one.data.nbytes

    @property
    def num_bytes(self) -> int:
        return self._panels.nbytes

    def __call__(self, x: Tensor, rows: SortedRows) -> Tensor:
        """Multiply x [R, K] fp32, sorted as ``rows`` says, into [R, N], whose rows may lie apart."""
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(len(x), self._columns)
        stage = self._first.stage(x, out, self._team)  # its scratch is for all rows; kept until the run has ended
        sizes, which = np.unique(np.diff(rows.starts), return_inverse=True)
        made = [np.frombuffer(bytes(stage.prepare(int(size), 0)[1]), np.int64) for size in sizes]
        arguments = np.stack(made)[which]
        function, one = stage.prepare(1, 0)
        place = {field[0]: i for i, field in enumerate(one._fields_)}  # all are int64
        counters = np.zeros((len(rows.experts), COUNTER_BYTES // 8), np.int64)
        first = rows.starts[:-1]
        for name, row_bytes in _row_bytes(one).items():
            arguments[:, place[name]] += first * row_bytes
        arguments[:, place["weight"]] += rows.experts * self._expert_bytes
        arguments[:, place["counter"]] = counters.ctypes.data + COUNTER_BYTES * np.arange(len(counters))
        self._team.run(
            run_groups,
            GroupArgs(
                function=function.address,
                arguments=arguments.ctypes.data,
                argument_bytes=arguments.strides[0],
                number=len(arguments),
            ),
        )
        return out[:, : self.n]


def _row_bytes(one: Any) -> dict[str, int]:
    """Return the addresses in a kernel's arguments that follow its rows, and how far one row moves them: what a product
    makes of its rows must not lie where another expert's lie, since threads may be at several experts."""
    moved = {"x": one.x_stride, "out": one.out_stride}
    if hasattr(one, "bytes"):
        return moved | {"bytes": one.k, "parts": 8 * one.groups}
    return moved | {"rounded": getattr(one, "row_bytes", 4 * one.k)}


def weighted_sum(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Sum the rows ``places`` [T, top_k] of x [R, H], times weights [T, top_k]: a fresh tensor [T, H]; all fp32 on the
    CPU."""
    (tokens, top_k), size = places.shape, x.shape[1]
    out, weights = torch.empty(tokens, size), weights.contiguous()
    arguments = SumArgs(
        x=x.data_ptr(), x_stride=4 * x.stride(0), places=places.data_ptr(), weights=weights.data_ptr(),
        out=out.data_ptr(), size=size, tokens=tokens, top_k=top_k,
    )  # fmt: skip
    team_for(out.numel() * top_k, FLOATS_OF_TEAM).run(sum_rows, arguments)
    return out
