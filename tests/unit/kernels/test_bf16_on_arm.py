"""The product in bf16 by NEON's bfmmla, compiled for an ARM and run in QEMU: bit for bit what Arm's manual says."""

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from replicas.kernels.bf16 import BLOCK_ROWS, FEW_ROWS, PART, Bf16Args, Bf16Kernel, pack
from replicas.kernels.bf16_tiles import MMLA_ROWS
from replicas.kernels.experts.grouped import GroupedKernel, SortedRows, stack
from replicas.kernels.team import Kernel, Team
from tests.programs import program
from tests.rounding import add_to_odd

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
# outputs: half a panel, and one and three of them, of which a part; inputs: less than a step, and more than at once
SHAPES = [(16, 16), (33, 1), (101, 77), (70, 3 * PART + 16)]
ROWS = [*range(1, 21), FEW_ROWS, FEW_ROWS + 1, BLOCK_ROWS + MMLA_ROWS + 1]
BASE, ARGUMENTS, MOST_BYTES = 1 << 32, 64, 1 << 28
# Has standard input at BASE: first how many bytes of it are written back in the end, at ARGUMENTS the kernel's. Linux's
# calls are 222 mmap (to be read and written, private, at that address), 64 write and 94 exit. One thread runs it
PROGRAM = f"""
.globl _start, omp_get_thread_num, omp_get_num_threads, GOMP_barrier
_start:              ldr x0, ={BASE}
                     ldr x1, ={MOST_BYTES}
                     mov x2, 3
                     mov x3, 18
                     mov x4, 0
                     mov x5, 0
                     mov x8, 222
                     svc 0
                     ldr x0, ={BASE + ARGUMENTS}
                     bl kernel
                     mov x0, 1
                     ldr x1, ={BASE}
                     ldr x2, [x1]
                     mov x8, 64
                     svc 0
                     mov x0, 0
                     mov x8, 94
                     svc 0
omp_get_thread_num:  mov w0, 0
                     ret
omp_get_num_threads: mov w0, 1
GOMP_barrier:        ret
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of the kernel and nothing else: what numba's wrapper would call of Python when it fails is missing."""
    assemble, link = (program(f"aarch64-linux-gnu-{name}", "binutils-aarch64-linux-gnu") for name in ("as", "ld"))
    made = tmp_path_factory.mktemp("arm") / "kernel"
    module, name = "tests.unit.kernels.cross_compiled", "replicas.kernels.bf16.product_mmla"
    for command, text in (
        ([sys.executable, "-m", module, name, f"{made}.o"], ""),
        ([assemble, "-o", f"{made}.start.o"], PROGRAM),
        ([link, "--unresolved-symbols=ignore-all", "-o", str(made), f"{made}.start.o", f"{made}.o"], ""),
    ):
        done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    return made


def run(kernel: Path, arguments: ctypes.Structure, memory: Sequence[Tensor]) -> None:
    """Run the kernel over a copy of ``memory``, to which all addresses in ``arguments`` belong, and take it back."""
    moved, parts, size = type(arguments).from_buffer_copy(arguments), [], 4096
    for each in memory:
        start, num_bytes = each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()
        for name, _ in arguments._fields_:
            if start <= (address := getattr(arguments, name)) < start + num_bytes:
                setattr(moved, name, BASE + size + address - start)
        parts.append((start, num_bytes, size))
        size += -(-num_bytes // 64) * 64
    assert size < MOST_BYTES
    image = bytearray(size)
    image[:8], image[ARGUMENTS : ARGUMENTS + ctypes.sizeof(moved)] = size.to_bytes(8, "little"), bytes(moved)
    for start, num_bytes, place in parts:
        image[place : place + num_bytes] = ctypes.string_at(start, num_bytes)
    given, got = kernel.with_suffix(".in"), kernel.with_suffix(".out")
    given.write_bytes(image)
    with given.open() as stdin, got.open("w") as stdout:
        command = [program("qemu-aarch64", "qemu-user"), "-cpu", "max", str(kernel)]
        subprocess.run(command, check=True, stdin=stdin, stdout=stdout, timeout=120)
    result = got.read_bytes()
    for start, num_bytes, place in parts:
        ctypes.memmove(start, result[place : place + num_bytes], num_bytes)


def product(kernel: Path, weight: Tensor, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Multiply by bfmmla, whatever this machine is, into ``out`` or a fresh tensor."""
    panels, team, counter = pack(weight, "mmla"), Team(1), torch.zeros(8, dtype=torch.int64)
    if out is None:
        out = torch.empty(len(x), len(weight))
    scratch = team.memory(1 << 19).fill_(float("nan"))  # what is not written is no number
    stage = Bf16Kernel(panels, team, bias, by="mmla").stage(x, out, team)
    _, arguments = stage.prepare(len(x), counter.data_ptr())
    assert scratch.data_ptr() == team.memory(1).data_ptr()
    run(kernel, arguments, [x, panels.data, out, counter, scratch, *([] if bias is None else [bias])])
    return out


def as_the_manual_says(weight: Tensor, x: Tensor) -> Tensor:
    """Sum four products at a time, the first two and then the last two, to odd."""
    x, weight = (torch.nn.functional.pad(each.bfloat16().float(), (0, -each.shape[1] % 4)) for each in (x, weight))
    sums = torch.zeros(len(x), len(weight))
    for i in range(0, x.shape[1], 2):
        first, second = (x[:, i + j, None] * weight[None, :, i + j] for j in range(2))
        sums = add_to_odd(sums, add_to_odd(first, second))
    return sums


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_sums_are_bit_for_bit_as_the_manual_says_and_a_row_has_the_same_bits_among_any_others(
    kernel: Path, shape: tuple[int, int]
) -> None:
    weight, x, bias, first = torch.randn(shape), torch.randn(300, shape[1]), torch.randn(shape[0]), 0
    wanted = as_the_manual_says(weight, x) + bias
    for rows in ROWS:
        first = (first + 37) % (301 - rows)
        assert torch.equal(product(kernel, weight, x[first : first + rows], bias), wanted[first : first + rows])


def test_to_odd_is_near_what_is_exact_and_not_what_nearest_gives(kernel: Path) -> None:
    """Additions are off by up to 2 ** -23 of what is summed, with random signs: sqrt(k) of them in a sum."""
    weight, x = torch.randn(64, 1024), torch.randn(24, 1024)
    exact = x.bfloat16().double() @ weight.bfloat16().double().T
    made, nearest = product(kernel, weight, x), exact.float()
    assert (made - exact).abs().max() <= 2**-23 * 1024**0.5 * 4 * 1024**0.5
    assert (made != nearest).float().mean() > 0.5


def test_what_is_multiplied_is_rounded_to_nearest_ties_to_even(kernel: Path) -> None:
    x = torch.randn(40, 96) * 10.0 ** torch.randint(-30, 30, (40, 96))
    x[0, :4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-8 + 2**-20])  # ties, and beside one
    assert torch.equal(product(kernel, torch.eye(96), x), x.bfloat16().float())


def test_what_is_no_number_in_a_row_stays_there(kernel: Path) -> None:
    """Two rows share an instruction."""
    x = torch.randn(19, 90)
    x[2, 40], x[16, 89] = float("nan"), float("-inf")
    x.view(torch.int32)[5, 1] = 0x7FFFFFFF  # NaN that rounding its bits would make a number
    made = product(kernel, torch.randn(40, 90), x)
    assert (~made.isfinite().all(dim=1)).nonzero().flatten().tolist() == [2, 5, 16]


@pytest.mark.parametrize("rows", [1, 13, 33])
def test_rows_that_lie_apart_are_read_in_place_and_nothing_else_is_written(kernel: Path, rows: int) -> None:
    weight, wide, out = torch.randn(96, 64), torch.randn(70, 200), torch.zeros(70, 100)
    product(kernel, weight, wide[:rows, 9:73], out=out[:rows, :96])
    assert torch.equal(out[:rows, :96], as_the_manual_says(weight, wide[:rows, 9:73]))
    assert not out[rows:].any()
    assert not out[:, 96:].any()


class ExpertsInQemu(Team):
    """Runs a `GroupedKernel`'s product in QEMU, expert by expert, and keeps what each wrote into the scratch."""

    def __init__(self, kernel: Path, x: Tensor, panels: Tensor) -> None:
        super().__init__(1)
        self._kernel, self._read, self.written = kernel, [x, panels], list[Tensor]()
        self._scratch = self.memory(1 << 19)

    def run(self, function: Kernel, arguments: ctypes.Structure) -> None:
        for i in range(arguments.number):
            one = Bf16Args.from_address(arguments.arguments + i * arguments.argument_bytes)
            written = [at_address(one.out, one.m * one.out_stride), at_address(one.counter, 8)]
            run(self._kernel, one, [*self._read, self._scratch.fill_(float("nan")), *written])
            self.written.append(~self._scratch.isnan())


def at_address(address: int, num_bytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_byte * num_bytes).from_address(address), dtype=torch.uint8)


def test_an_expert_may_begin_with_any_row_and_what_is_rounded_for_it_lies_apart(
    kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the second row of a pair too: here with rows 0, 1, 3 and 36 of 41, by four of six experts."""
    monkeypatch.setattr(Kernel, "address", 0)  # not compiled for this machine
    weights, x, sizes = torch.randn(6, 64, 77), torch.randn(41, 77), [1, 2, 33, 5]
    rows = SortedRows.of(torch.tensor([0, 2, 3, 5]).repeat_interleave(torch.tensor(sizes)).unsqueeze(1))
    assert rows.starts.tolist() == [0, 1, 3, 36, 41]
    panels = stack((pack(each, "mmla") for each in weights), 6)
    team = ExpertsInQemu(kernel, x, panels.data)
    made = GroupedKernel(panels, 6, team, lambda one: Bf16Kernel(one, team, by="mmla"))(x, rows)
    parts = zip(rows.experts, x.split(sizes), strict=True)
    assert torch.equal(made, torch.cat([as_the_manual_says(weights[expert], part) for expert, part in parts]))
    assert torch.stack(team.written).sum(dim=0).max() == 1
