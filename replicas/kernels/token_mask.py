"""Masks of allowed tokens, applied to rows of logits where they lie.

Owns:      the kernel, which walks the words of a mask: 32 tokens that are all allowed, or all forbidden, are not read.
Never:     touches a row without a mask.
Invariant: a token that the mask allows keeps its logit, bit by bit; every other one is -inf. Bits past the vocabulary
           are not read.
Thread:    any.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray
from torch import Tensor

from replicas.kernels.simd import W, load_i32, load_i64, load_where, splat, store, store1
from replicas.kernels.team import kernel, struct, team_for, team_size, thread_id

WORD = 32  # tokens
MASKED_BY_TEAM = 256 << 10  # floats; fewer are one thread's work
ROWS_AT_ONCE = 16  # on a device, where each takes three times the memory of its logits meanwhile
MaskArgs = struct("MaskArgs", "x x_stride masks rows size")
Words = npt.NDArray[np.int32]


@kernel(MaskArgs)
def mask_rows(pointer: Any) -> None:
    """x = -inf where the row's mask has no bit; masks [rows] int64 addresses, 0 for all tokens."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    none = np.float32(-np.inf)
    whole = a.size // WORD
    for r in range(a.rows * me // threads, a.rows * (me + 1) // threads):
        row, mask = a.x + r * a.x_stride, load_i64(a.masks + 8 * r)
        if mask:
            for w in range(whole):
                at, word = row + 4 * WORD * w, load_i32(mask + 4 * w)
                if word == 0:
                    store(at, splat(none))
                    store(at + 4 * W, splat(none))
                elif word != -1:
                    store(at, load_where(at, word, splat(none)))
                    store(at + 4 * W, load_where(at + 4 * W, word >> W, splat(none)))
            for t in range(a.size - whole * WORD):
                if not (load_i32(mask + 4 * whole) >> t) & 1:
                    store1(row + 4 * (WORD * whole + t), none)


def mask_tokens(logits: Tensor, masks: Sequence[Words | None]) -> None:
    """Set to -inf the ``logits`` [S, V] without a bit in their row's mask [>= ceil(V / 32)]; None allows all tokens."""
    rows, size = logits.shape
    if logits.device.type != "cpu":
        mask_on_device(logits, masks)
        return
    assert logits.dtype == torch.float32, f"logits are float32, not {logits.dtype}"
    assert logits.stride(1) == 1, "the tokens of a row of logits lie behind one another"
    kept = [None if mask is None else np.ascontiguousarray(mask, np.int32) for mask in masks]
    places = np.array([0 if mask is None else mask.ctypes.data for mask in kept], np.int64)
    arguments = MaskArgs(
        x=logits.data_ptr(), x_stride=4 * logits.stride(0), masks=places.ctypes.data, rows=rows, size=size
    )
    team_for(logits.numel() if rows > 1 else 0, MASKED_BY_TEAM).run(mask_rows, arguments)


def mask_on_device(logits: Tensor, masks: Sequence[Words | None]) -> None:
    """Do the same by PyTorch's operations, with one copy of all masks to the device, for which nothing waits."""
    size = logits.shape[1]
    num_words = -(-size // WORD)
    rows = [r for r, mask in enumerate(masks) if mask is not None]
    if not rows:
        return
    packed = torch.from_numpy(np.stack([mask[:num_words] for mask in masks if mask is not None]))
    index = torch.tensor(rows)
    if logits.device.type == "cuda":
        packed = packed.pin_memory().to(logits.device, non_blocking=True)
        index = index.pin_memory().to(logits.device, non_blocking=True)
    bits = torch.arange(WORD, device=logits.device, dtype=torch.int32)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some, those = packed[first : first + ROWS_AT_ONCE], index[first : first + ROWS_AT_ONCE]
        banned = ((some[:, :, None] >> bits) & 1 == 0).flatten(1)[:, :size]  # [r, V]
        logits[those] = logits[those].masked_fill_(banned, -torch.inf)
