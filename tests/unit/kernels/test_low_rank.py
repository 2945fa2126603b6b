"""What adapters add to a product: rows by adapter, in one order of sums whatever stands beside them."""

import pytest
import torch
from torch import Tensor

from replicas.kernels.adapters.low_rank import BLOCK_ROWS, HostLowRank, LowRankKernel, StepRows, is_bf16
from replicas.kernels.team import Team

Pairs = list[tuple[Tensor, Tensor] | None]
RUNS = [(0, 1, 0), (1, 5, 1), (10, BLOCK_ROWS + 52, 2), (BLOCK_ROWS + 62, 2, 0)]  # rows 6 to 9 have none
ROWS = BLOCK_ROWS + 80


def made(
    step: StepRows, inputs: int, outputs: tuple[int, ...], rank: int, threads: int = 1
) -> tuple[LowRankKernel, list[Pairs]]:
    """Make a kernel with three adapters, of rank, rank + 1 and rank + 2; the second leaves the last weight alone."""
    kernel = LowRankKernel(step, inputs, outputs, Team(threads), max_rank=rank + 2, max_held=3)
    draw, adapters = torch.Generator().manual_seed(rank), list[Pairs]()
    for number in range(3):
        r = rank + number
        pairs: Pairs = [
            (torch.randn(r, inputs, generator=draw) / inputs**0.5, torch.randn(n, r, generator=draw)) for n in outputs
        ]
        if number == 1:
            pairs[-1] = None
        if any(pairs):
            kernel.put(number, kernel.pack(pairs))
        adapters.append(pairs)
    return kernel, adapters


SHAPES = [(576, (576, 192, 192), 16), (1536, (576,), 5), (576, (1536, 1536), 8), (70, (50, 33), 3)]


@pytest.mark.parametrize(("inputs", "outputs", "rank"), SHAPES)
def test_each_row_gets_what_its_adapter_adds_and_others_stay_as_they_are(
    inputs: int, outputs: tuple[int, ...], rank: int
) -> None:
    step = StepRows()
    kernel, adapters = made(step, inputs, outputs, rank)
    x, before = torch.randn(ROWS, inputs), torch.randn(ROWS, sum(outputs))
    expected = before.double()
    for first, rows, number in RUNS:
        column, part = 0, x[first : first + rows].double()
        for pair, width in zip(adapters[number], outputs, strict=True):
            if pair is not None:
                a, b = pair[0].double(), pair[1].double()
                expected[first : first + rows, column : column + width] += part @ a.T @ b.T
            column += width
    step.set(RUNS, rank + 2)
    out = before.clone()
    kernel(x, out)
    assert (out - expected).abs().max() < 2e-5
    for untouched in (slice(6, 10), slice(BLOCK_ROWS + 64, None)):
        assert torch.equal(out[untouched], before[untouched])


@pytest.mark.parametrize(("inputs", "outputs", "rank"), SHAPES)
def test_a_rows_bits_depend_on_nothing_but_the_row_and_its_adapter(
    inputs: int, outputs: tuple[int, ...], rank: int
) -> None:
    step = StepRows()
    kernel, _ = made(step, inputs, outputs, rank)
    x, before = torch.randn(ROWS, inputs), torch.randn(ROWS, sum(outputs))
    step.set(RUNS, rank + 2)
    together = before.clone()
    kernel(x, together)
    two, _ = made(step, inputs, outputs, rank, threads=2)
    by_two = before.clone()
    two(x, by_two)
    assert torch.equal(by_two, together)
    for first, rows, number in RUNS:
        for row in (first, first + rows - 1):
            step.set([(0, 1, number)], rank + number)
            alone = before[row : row + 1].clone()
            kernel(x[row : row + 1], alone)
            assert torch.equal(alone[0], together[row])


def test_numbers_that_bfloat16_holds_take_half_the_memory_and_add_the_same_bits() -> None:
    """Also where another adapter of the step is in fp32."""
    inputs, outputs, rank = 576, (576, 192, 192), 16
    step = StepRows()
    wide, adapters = made(step, inputs, outputs, rank)
    host = HostLowRank({"qkv": (inputs, outputs)}, Team(1), max_rank=rank + 2, max_held=3)
    whole = host.pack({"qkv": adapters[1]})
    narrow = [(a.bfloat16().float(), b.bfloat16().float()) for a, b in filter(None, adapters[0])]
    packed = host.pack({"qkv": narrow}, narrow=True)
    num_floats = 16 * inputs * 3 + sum(outputs) * rank
    assert packed.num_bytes == 2 * num_floats
    almost = [(narrow[0][0].clone(), narrow[0][1]), *narrow[1:]]
    almost[0][0][0, 0] = 1 + 2.0**-20  # one number that bfloat16 does not hold
    assert not is_bf16(almost[0][0].numpy())
    with pytest.raises(AssertionError, match="bfloat16 does not hold"):
        host.pack({"qkv": almost}, narrow=True)
    host.put(0, packed)
    host.put(1, whole)
    wide.put(0, wide.pack(narrow))
    x, before = torch.randn(ROWS, inputs), torch.randn(ROWS, sum(outputs))
    found = []
    for kernel, of in ((host.added["qkv"], host.step), (wide, step)):
        of.set([(0, 1, 0), (1, 5, 1), (10, BLOCK_ROWS + 9, 0)], rank + 2)
        found.append(before.clone())
        kernel(x, found[-1])
    assert torch.equal(*found)
    assert not torch.equal(found[0][:1], before[:1])


def test_a_dropped_adapter_adds_nothing() -> None:
    step = StepRows()
    kernel, _ = made(step, 64, (32,), 4)
    kernel.drop(0)
    step.set([(0, 3, 0)], 4)
    x, before = torch.randn(3, 64), torch.randn(3, 32)
    out = before.clone()
    kernel(x, out)
    assert torch.equal(out, before)
