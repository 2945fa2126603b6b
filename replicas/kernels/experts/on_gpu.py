"""A mixture of experts on a GPU: gate and up, SiLU, down, and the sum of a token's experts.

Owns:      the choice, and how a step's choices become tiles of rows, each of one expert; the sizes of tiles.
Never:     waits for the GPU: the number of tiles is a bound that the shapes give, so a step can be captured in a CUDA
           graph. Runs without Triton: a loop over experts would wait to hear which of them have rows.
Invariant: a token's sum runs in the order of its choices. On a GPU the bits of a product may depend on the number of
           rows, as those of the dense products do.
Thread:    the one that runs the model.
Source:    tiles of one expert, as in Gale et al. 2022 (MegaBlocks, arXiv:2211.15841).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replicas.kernels import gpu
from replicas.kernels.experts.routing import TINY

FEW_EXPERTS = 256  # that a warp holds in registers: 8 each thread
FEW_ROWS, MANY_ROWS = 16, 64  # of a tile: tensor cores take 16 at least
BLOCK_N, BLOCK_K, SUM_BLOCK, CUT_BLOCK, WARPS = 64, 64, 1024, 1024, 4


def programs() -> Any:
    """Return triton_grouped.py; only where ``gpu.kernels()`` says that Triton can be used."""
    from replicas.kernels.experts import triton_grouped

    return triton_grouped


def route(
    logits: Tensor, bias: Tensor | None, *, top_k: int, groups: int, scaling: float, **rules: int
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts as `replicas.kernels.experts.routing.route` does, in one launch. ``rules``: its other
    arguments."""
    (tokens, experts), device = logits.shape, logits.device
    ids = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=device)
    if tokens:
        block_g, block_s = (1 << (each - 1).bit_length() for each in (groups, experts // groups))
        programs().choose_experts[(tokens,)](
            logits.contiguous(), logits if bias is None else bias, ids, weights, float(scaling), EXPERTS=experts,
            TOP_K=top_k, GROUPS=groups, BIASED=bias is not None, TINY=TINY, BLOCK_G=block_g, BLOCK_S=block_s,
            BLOCK_K=1 << (top_k - 1).bit_length(), num_warps=1 if block_g * block_s <= FEW_EXPERTS else WARPS,
            **{name.upper(): rule for name, rule in rules.items()}, **gpu.FUSED,
        )  # fmt: skip
    return ids, weights


class Tiles(NamedTuple):
    """The choices of a step in tiles, each of rows of one expert."""

    choices: Tensor  # [tiles, rows] int32: t * top_k + j, or T * top_k where a tile has no more
    experts: Tensor  # [tiles] int32; -1 where a tile has no rows


def tiles_of(ids: Tensor, number: int, rows: int) -> Tiles:
    """Cut the choices ids [T, top_k] of ``number`` experts into tiles of ``rows``; without waiting for a GPU."""
    total, device = ids.numel(), ids.device
    bound = min(total, total // rows + number)  # experts that have rows may each have one tile that is not full
    choices = torch.empty(bound, rows, dtype=torch.int32, device=device)
    experts = torch.empty(bound, dtype=torch.int32, device=device)
    if total:
        programs().cut_tiles[(number + 1,)](
            ids.contiguous(), choices, experts, total, bound, EXPERTS=number, ROWS=rows, BINS=1 << number.bit_length(),
            BLOCK=CUT_BLOCK, num_warps=WARPS, **gpu.EXACT,
        )  # fmt: skip
    return Tiles(choices, experts)


class Between(NamedTuple):
    """What is done to the results of the two products."""

    gate: Callable[[Tensor], Tensor]  # [rows, 2 I] -> [rows, I]
    gate_up_bias: Tensor | None = None  # [E, 2 I]
    down_bias: Tensor | None = None  # [E, H]


def gated_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, between: Between) -> Tensor:
    """Sum what the experts ``ids`` [T, top_k] make of x [T, H], times ``weights`` [T, top_k] fp32.

    Args:    gate_up: [E, 2 I, H]; down: [E, H, I]; contiguous, of x's dtype.
    Returns: [T, H] of x's dtype; the sum is in fp32.
    """
    top_k, number = ids.shape[1], len(gate_up)
    tiles = tiles_of(ids, number, FEW_ROWS if ids.numel() <= FEW_ROWS * number else MANY_ROWS)
    made = _product(x, gate_up, tiles, x.dtype, rows=ids.numel(), shared=top_k)
    gated = between.gate(_biased(made, between.gate_up_bias, ids.flatten()))
    made = _product(gated, down, tiles, torch.float32, rows=ids.numel(), shared=1)
    return _summed(_biased(made, between.down_bias, ids.flatten()), weights, x.dtype)


def _biased(made: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
    """Add to each row [N] the bias of its expert, in place."""
    return made if bias is None else made.add_(bias[experts])


def _product(x: Tensor, weight: Tensor, tiles: Tiles, dtype: torch.dtype, *, rows: int, shared: int) -> Tensor:
    _, outputs, inputs = weight.shape
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if rows:
        programs().grouped_product[(len(tiles.experts), -(-outputs // BLOCK_N))](
            x, weight, out, tiles.choices, tiles.experts, rows, outputs, inputs, x.stride(0), SHARED=shared,
            BLOCK_M=tiles.choices.shape[1], BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=WARPS,
            **gpu.FUSED,
        )  # fmt: skip
    return out


def _summed(made: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    (tokens, top_k), size = weights.shape, made.shape[1]
    out = torch.empty(tokens, size, dtype=dtype, device=made.device)
    if tokens:
        programs().sum_choices[(tokens, -(-size // SUM_BLOCK))](
            made, weights.contiguous(), out, size, made.stride(0), TOP_K=top_k, BLOCK=SUM_BLOCK, num_warps=WARPS,
            **gpu.FUSED,
        )  # fmt: skip
    return out
