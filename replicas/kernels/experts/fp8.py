"""Products on a GPU by weights in 8-bit floats (e4m3), each number times a scale of a row, or of a part of a row.

Owns:      what a weight becomes as it is loaded, and which of two products multiplies by it (on_gpu.py): PyTorch's, of
           activations that one launch rounds to e4m3 with a scale a token, where a row has one scale and the sizes suit
           it; else Triton's, which widens the weight a tile at a time and rounds no activation.
Invariant: a part of a stored weight has the scales that the whole has there: ranks that share its inputs may have
           scales of fewer inputs, but of the same numbers.
Thread:    any.
Source:    e4m3 and its largest number: Micikevicius et al. 2022 (arXiv:2209.05433); a scale a token and output: as in
           LLM.int8() (arXiv:2208.07339), section 2.1.
"""

import functools
import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.kernels import gpu
from replicas.kernels.panels import CHUNK_ROWS, Rows

log = logging.getLogger(__name__)

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
STEP = 16  # that both sizes of a weight are multiples of, for PyTorch's product
LEAST = 16  # inputs that share a scale: what a tensor core takes at once
BLOCK = 1024  # numbers of a row that are rounded at a time
WITH_E4M3 = (8, 9)  # compute capability of the first GPUs that convert it
Eights = tuple[Tensor, Tensor, int]


@dataclass(frozen=True, slots=True, eq=False)
class Weight8:
    """A weight [.., N, K]: numbers, and fp32 scales [.., N, ceil(K / wide)], each of ``wide`` inputs of a row."""

    numbers: Tensor
    scales: Tensor
    wide: int
    dtype: torch.dtype  # of the activations that it is for

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    @property
    def by_torch(self) -> bool:
        """Whether PyTorch multiplies by it, and activations are rounded."""
        odd = any(size % STEP for size in self.shape)
        return self.scales.shape[-1] == 1 and self.dtype == torch.bfloat16 and not odd


def why_not(device: torch.device) -> str | None:
    """Say what keeps ``device`` from such products, in words that follow "need"; None: nothing."""
    if torch.cuda.get_device_capability(device) < WITH_E4M3:
        return f"a GPU that has e4m3 (Ada, Hopper or newer), unlike {torch.cuda.get_device_name(device)}"
    return "Triton, which cannot be used here (the log says why)" if gpu.kernels() is None else None


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round [N, K] to e4m3 with a scale a row [N, 1] fp32, which brings its largest number to e4m3's."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1, keepdim=True).div_(LARGEST)
    return weight.div(scales.masked_fill(scales == 0, 1.0)).to(E4M3), scales


def keeps(rows: Rows, device: torch.device, *, rounds: bool) -> bool:
    """Tell whether weights are multiplied in 8 bits: stored e4m3 numbers are, where ``device`` can, and others if
    ``rounds``. What is widened instead is logged."""
    parts = _stored(rows)
    if not rounds and None in parts:
        return False
    reason, wide = why_not(device), _wide(rows, parts)
    if reason is None and wide < LEAST:
        reason = f"ranks that cut the inputs of a scale less finely than {wide}: another parallel.tp"
    if reason is not None:
        _tell(f"weights: some are widened from fp8, which need {reason}")
    return reason is None


@functools.cache
def _tell(what: str) -> None:
    log.warning(what)


def _stored(rows: Rows) -> list[Eights | None]:
    """Return each piece's e4m3 numbers, as `StoredWeight.eights` has them; None for one that is stored otherwise."""
    return [None if isinstance(piece, Tensor) else piece.eights() for piece in rows.pieces]


def _wide(rows: Rows, parts: list[Eights | None]) -> int:
    """Compute of how many inputs each scale is where ``parts``, the pieces of ``rows``, lie one below the other."""
    cut = [part[2] for part in parts if part is not None and part[1].shape[1] > 1]
    return math.gcd(*cut) if cut else rows.shape[1]


def pack(rows: Rows, device: torch.device, dtype: torch.dtype) -> Weight8:
    """Bring weights [N, K] that `keeps` allows to ``device``: stored e4m3 numbers as they are, others rounded."""
    (n, k), parts, first = rows.shape, _stored(rows), 0
    wide = _wide(rows, parts)
    numbers = torch.empty(n, k, dtype=E4M3, device=device)
    scales = torch.empty(n, -(-k // wide), dtype=torch.float32, device=device)
    for piece, stored in zip(rows.pieces, parts, strict=True):
        for start in range(0, piece.shape[0], CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, piece.shape[0])
            if stored is None:
                made, own = round_rows(Rows([piece])[start:stop].to(device))
            else:
                made, own = stored[0][start:stop].to(device), stored[1][start:stop].to(device)
                if own.shape[1] > 1:
                    own = own.repeat_interleave(stored[2] // wide, dim=1)[:, : scales.shape[1]]
            numbers[first + start : first + stop], scales[first + start : first + stop] = made, own
        first += piece.shape[0]
    return Weight8(numbers, scales, wide, dtype)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [T, K] to e4m3 with a scale a row: [T, K] and [T, 1] fp32, in one launch."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=E4M3, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    gpu.kernels().quantise[(rows,)](x, out, scales, size, x.stride(0), LARGEST=LARGEST, BLOCK=BLOCK, **gpu.FUSED)
    return out, scales
