"""Decode attention of every layer as stages of a program, so that a whole decode step is one.

Owns:      one `DecodeArgs` for each layer, in one array: what a step has in common is entered for all of them at once.
Never:     computes; the kernel is that of cpu_decode.py, with the same arguments and so the same bits.
Invariant: between `set` and the program's end the memory of the step (its tasks, partial results) stays.
Thread:    the one that runs the model.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from replicas.attention import cpu_decode
from replicas.kernels.team import Kernel

_SIZE = ctypes.sizeof(cpu_decode.DecodeArgs)


class DecodeStage:
    """One layer's; a `replicas.kernels.program.Stage`."""

    def __init__(self, arguments: ctypes.Structure) -> None:
        self._arguments = arguments

    def prepare(self, num_rows: int, counter: int) -> tuple[Kernel, ctypes.Structure]:
        self._arguments.counter, self._arguments.merge_counter = counter, counter + 8
        return cpu_decode.decode, self._arguments


class DecodeStages:
    """Of all layers, over one set of activations."""

    def __init__(self, layers: Sequence[tuple[int, int]], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """``layers``: addresses of their first keys and values. q [T, H, D], k, v [T, K, D] and out [T, H * D] are the
        same memory for all of them."""
        self._array = np.zeros(len(layers), np.dtype(cpu_decode.DecodeArgs))
        memory = self._array.view(np.uint8).data
        self.stages = tuple(
            DecodeStage(cpu_decode.DecodeArgs.from_buffer(memory, i * _SIZE)) for i in range(len(layers))
        )
        self._layers = np.array(layers, np.int64).reshape(-1, 2)
        self._shared = {"out": out.data_ptr(), "out_stride": 4 * out.stride(0)}
        for name, x in (("q", q), ("k", k), ("v", v)):
            self._shared |= {name: x.data_ptr(), f"{name}_stride": 4 * x.stride(0)}

    def set(self, step: ctypes.Structure) -> None:
        """Enter a step's arguments; the counters stay those of the program."""
        array = self._array
        counters = array["counter"].copy()
        array[:] = np.frombuffer(bytes(step), array.dtype)
        for name, value in self._shared.items():
            array[name] = value
        array["keys"], array["values"] = self._layers.T
        array["counter"], array["merge_counter"] = counters, counters + 8
