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
from replicas.kernels.experts.fp8 import Weight8, quantise
from replicas.kernels.experts.routing import TINY

FEW_EXPERTS = 256  # that a warp holds in registers: 8 each thread
FEW_ROWS, MANY_ROWS = 16, 64  # of a tile: tensor cores take 16 at least
BLOCK_N, BLOCK_K, SUM_BLOCK, CUT_BLOCK, WARPS = 64, 64, 1024, 1024, 4
WARPS_8_BITS = 8  # of a product that widens its weight: with 4 its registers do not suffice


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


Weights = Tensor | Weight8


def gated_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weights, down: Weights, between: Between) -> Tensor:
    """Sum what the experts ``ids`` [T, top_k] make of x [T, H], times ``weights`` [T, top_k] fp32.

    Args:    gate_up: [E, 2 I, H]; down: [E, H, I]; contiguous, of x's dtype or in 8 bits.
    Returns: [T, H] of x's dtype; the sum is in fp32.
    """
    top_k, number = ids.shape[1], len(_numbers(gate_up))
    tiles = tiles_of(ids, number, FEW_ROWS if ids.numel() <= FEW_ROWS * number else MANY_ROWS)
    made = _product(x, gate_up, tiles, x.dtype, rows=ids.numel(), shared=top_k)
    gated = between.gate(_biased(made, between.gate_up_bias, ids.flatten()))
    made = _product(gated, down, tiles, torch.float32, rows=ids.numel(), shared=1)
    return _summed(_biased(made, between.down_bias, ids.flatten()), weights, x.dtype)


def _biased(made: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
    """Add to each row [N] the bias of its expert, in place."""
    return made if bias is None else made.add_(bias[experts])


def multiply(x: Tensor, weight: Weight8, bias: Tensor | None) -> Tensor:
    """Multiply x [T, K] into [T, N] of its dtype, by one weight for all."""
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    if weight.by_torch:
        eights, scales = quantise(x)
        return torch._scaled_mm(
            eights, weight.numbers.t(), scale_a=scales, scale_b=weight.scales.t(), bias=bias, out_dtype=x.dtype
        )
    few = FEW_ROWS if len(x) <= FEW_ROWS else MANY_ROWS
    out = _product(x, weight, -(-len(x) // few), x.dtype, rows=len(x), shared=1, few=few)
    return out if bias is None else out.add_(bias)


def _product(
    x: Tensor, weight: Weights, tiles: Tiles | int, dtype: torch.dtype, *, rows: int, shared: int, few: int = 0
) -> Tensor:
    """``tiles``: of experts; or how many, of ``few`` rows, there are of one that has all."""
    numbers = _numbers(weight)
    outputs, inputs = numbers.shape[-2:]
    scales, wide = (weight.scales, weight.wide) if isinstance(weight, Weight8) else (numbers, inputs)
    made = (x, x, tiles, few) if isinstance(tiles, int) else (*tiles, len(tiles.experts), tiles.choices.shape[1])
    choices, experts, number, tile_rows = made
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if rows:
        programs().grouped_product[(number, -(-outputs // BLOCK_N))](
            x, numbers, scales, out, choices, experts, rows, outputs, inputs, x.stride(0), wide, SHARED=shared,
            BLOCK_M=tile_rows, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K if wide == inputs else min(BLOCK_K, wide),
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", SCALED=isinstance(weight, Weight8),
            DENSE=isinstance(tiles, int), num_warps=WARPS_8_BITS if isinstance(weight, Weight8) else WARPS, **gpu.FUSED,
        )  # fmt: skip
    return out


def _numbers(weight: Weights) -> Tensor:
    return weight.numbers if isinstance(weight, Weight8) else weight


def _summed(made: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    (tokens, top_k), size = weights.shape, made.shape[1]
    out = torch.empty(tokens, size, dtype=dtype, device=made.device)
    if tokens:
        programs().sum_choices[(tokens, -(-size // SUM_BLOCK))](
            made, weights.contiguous(), out, size, made.stride(0), TOP_K=top_k, BLOCK=SUM_BLOCK, num_warps=WARPS,
            **gpu.FUSED,
        )  # fmt: skip
    return out
