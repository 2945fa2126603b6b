"""Masks of allowed tokens, applied to rows of logits in one pass.

Owns:      the kernel, which walks the words of a mask: of 32 tokens that are all forbidden it reads nothing.
Never:     changes the logits that it is given, unless they are also where the result goes.
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

from replicas.kernels.simd import W, load1, load_i32, load_i64, load_where, splat, store, store1
from replicas.kernels.team import kernel, struct, team_for, team_size, thread_id

WORD = 32  # tokens
MASKED_BY_TEAM = 256 << 10  # floats; fewer are one thread's work
MaskArgs = struct("MaskArgs", "x x_stride out out_stride masks rows size")
Words = npt.NDArray[np.int32]


@kernel(MaskArgs)
def mask_rows(pointer: Any) -> None:
    """out = x where the row's mask has a bit, else -inf; masks [rows] int64 addresses, 0 for all tokens."""
    a = carray(pointer, 1)[0]
    me, threads = thread_id(), team_size()
    none = np.float32(-np.inf)
    whole = a.size // WORD
    for r in range(a.rows * me // threads, a.rows * (me + 1) // threads):
        x, out = a.x + r * a.x_stride, a.out + r * a.out_stride
        mask = load_i64(a.masks + 8 * r)
        for w in range(whole):
            at = 4 * WORD * w
            word = load_i32(mask + 4 * w) if mask else -1
            if word == 0:
                store(out + at, splat(none))
                store(out + at + 4 * W, splat(none))
            else:
                store(out + at, load_where(x + at, word, splat(none)))
                store(out + at + 4 * W, load_where(x + at + 4 * W, word >> W, splat(none)))
        word = load_i32(mask + 4 * whole) if mask and whole * WORD < a.size else -1
        for t in range(a.size - whole * WORD):
            at = 4 * (WORD * whole + t)
            store1(out + at, load1(x + at) if (word >> t) & 1 else none)


def masked(logits: Tensor, masks: Sequence[Words | None], *, in_place: bool = False) -> Tensor:
    """Return ``logits`` [S, V] with -inf where the row's mask [>= ceil(V / 32)] has no bit; None allows all tokens.

    Args: in_place: write into ``logits`` itself.
    """
    rows, size = logits.shape
    if logits.device.type != "cpu":
        return _masked_on_device(logits, masks, in_place=in_place)
    assert logits.dtype == torch.float32, f"logits are float32, not {logits.dtype}"
    assert logits.stride(1) == 1, "the tokens of a row of logits lie behind one another"
    out = logits if in_place else torch.empty(rows, size)
    kept = [None if mask is None else np.ascontiguousarray(mask, np.int32) for mask in masks]
    places = np.array([0 if mask is None else mask.ctypes.data for mask in kept], np.int64)
    arguments = MaskArgs(
        x=logits.data_ptr(),
        x_stride=4 * logits.stride(0),
        out=out.data_ptr(),
        out_stride=4 * out.stride(0),
        masks=places.ctypes.data,
        rows=rows,
        size=size,
    )
    team_for(logits.numel() if rows > 1 else 0, MASKED_BY_TEAM).run(mask_rows, arguments)
    return out


def _masked_on_device(logits: Tensor, masks: Sequence[Words | None], *, in_place: bool) -> Tensor:
    """Do the same by PyTorch's operations, with one copy of all masks to the device, for which nothing waits."""
    size = logits.shape[1]
    num_words = -(-size // WORD)
    rows = [r for r, mask in enumerate(masks) if mask is not None]
    words = np.stack([mask[:num_words] for mask in masks if mask is not None])
    packed = torch.from_numpy(words)
    if logits.device.type == "cuda":
        packed = packed.pin_memory().to(logits.device, non_blocking=True)
    bits = torch.arange(WORD, device=logits.device, dtype=torch.int32)
    banned = ((packed[:, :, None] >> bits) & 1 == 0).flatten(1)[:, :size]  # [R, V]
    out = logits if in_place else logits.clone()
    if len(rows) == len(masks):
        return out.masked_fill_(banned, -torch.inf)
    index = torch.tensor(rows, device=logits.device)
    out[index] = out[index].masked_fill_(banned, -torch.inf)
    return out
