"""The draw of sampler.py on a GPU: the host reads the tokens later, and nothing waits for it.

Owns:      which rows draw, their parameters on the device, and the launches of triton_rows.py, which draws.
Never:     reads a number from the device.
Invariant: the token of a row is that of sampler.py's `draw`, but where two tokens tie within the rounding of the
           device's logarithm, or one stands at the edge of top-p within the rounding of the sums: total and mass are
           added in another order.
Thread:    engine thread of rank 0.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from replicas.attention.page_lists import to_device
from replicas.kernels import gpu
from replicas.scheduler.plan import SampleRow

HEAD = 64  # tokens that leave the device; on a CPU, torch.topk of 256 takes 7 times as long
MIN_TEMPERATURE = 1e-6  # float32 stays exact enough; anything colder is greedy but for exact ties
ROWS_AT_ONCE = 128  # of a vocabulary of 128k, 64 MiB of scaled logits
BLOCK = 4096  # tokens that a program has in registers at a time
WARPS = 16


def sample_on_device(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Choose tokens [S] int64 of ``rows`` on the device of ``logits`` [S, V] float32; BROKEN if the largest logit is
    not finite."""
    kernels, (num_rows, vocab_size), device = gpu.kernels(), logits.shape, logits.device
    logits = logits.contiguous()
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    peaks = torch.empty(num_rows, dtype=torch.float32, device=device)
    kernels.greatest[(num_rows,)](logits, tokens, peaks, vocab_size, BLOCK=BLOCK, num_warps=WARPS, **gpu.EXACT)
    drawn = [i for i, row in enumerate(rows) if vocab_size > 1 and not row.params.greedy]
    for start in range(0, len(drawn), ROWS_AT_ONCE):
        chosen = drawn[start : start + ROWS_AT_ONCE]
        columns = np.vstack((draw_rules([rows[i] for i in chosen], vocab_size), np.array(chosen, np.int64)))
        packed = to_device(columns, device)  # [7, R]; one copy
        rules, index, num = packed[:6], packed[6], len(chosen)
        scaled = torch.empty(num, vocab_size, dtype=torch.float32, device=device)
        kernels.scale[(num, -(-vocab_size // BLOCK))](
            logits, peaks, index, rules, scaled, num, vocab_size, BLOCK=BLOCK, num_warps=4, **gpu.EXACT
        )
        num_head = min(HEAD, vocab_size - 1)
        head = scaled.topk(num_head + 1, dim=-1)
        kernels.draw[(num,)](
            scaled, head.values, head.indices, index, rules, tokens, num, vocab_size, num_head, HEAD=HEAD, BLOCK=BLOCK,
            num_warps=WARPS, **gpu.EXACT,
        )  # fmt: skip
    return tokens


def draw_rules(rows: Sequence[SampleRow], vocab_size: int) -> np.ndarray:
    """Return the parameters of R rows as int64 [6, R]: bits of top_p (inf where it cuts nothing), log min_p and
    temperature as float64, top_k, position, seed."""
    params = [row.params for row in rows]
    with np.errstate(divide="ignore"):  # min_p 0 becomes -inf: keeps all
        log_min_p = np.log(np.array([p.min_p for p in params]))
    top_p = [p.top_p if p.top_p < 1.0 else np.inf for p in params]
    floats = np.array([top_p, log_min_p, [max(p.temperature, MIN_TEMPERATURE) for p in params]])
    top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
    numbers = np.array([top_k, [row.position for row in rows]], np.int64)
    return np.vstack((floats.view(np.int64), numbers, np.array([p.seed for p in params], np.uint64).view(np.int64)))
