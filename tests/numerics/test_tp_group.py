"""TpGroup: what each rank gets, and what it says when the others are gone. Ranks are threads of one process here."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replicas.errors import EngineDead
from replicas.layers.tp_group import TpGroup

R = TypeVar("R")


def on_ranks(size: int, meet: Path, work: Callable[[TpGroup], R]) -> list[R]:
    def rank(number: int) -> R:
        return work(TpGroup.create(number, size, init_method=f"file://{meet}", device="cpu", timeout_s=20))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def test_all_reduce_sums_in_place_on_every_rank(tmp_path: Path) -> None:
    def work(tp: TpGroup) -> list[float]:
        mine = torch.tensor([1.0, 10.0]) * (tp.rank + 1)
        assert tp.all_reduce(mine) is mine
        return mine.tolist()

    assert on_ranks(3, tmp_path / "meet", work) == [[6.0, 60.0]] * 3


def test_all_gather_joins_in_rank_order_along_the_dimension(tmp_path: Path) -> None:
    def work(tp: TpGroup) -> tuple[list[list[int]], list[list[int]]]:
        mine = torch.full((2, 1), tp.rank)
        return tp.all_gather(mine).tolist(), tp.all_gather(mine, dim=0).tolist()

    assert on_ranks(2, tmp_path / "meet", work) == [([[0, 1], [0, 1]], [[0], [0], [1], [1]])] * 2


def test_gather_joins_on_rank_0_alone(tmp_path: Path) -> None:
    """Of a part that does not lie in one piece too, and in the dtype that it has."""

    def work(tp: TpGroup) -> tuple[torch.dtype, list[list[float]]] | None:
        joined = tp.gather(torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16).T + 10 * tp.rank)
        return None if joined is None else (joined.dtype, joined.tolist())

    wanted = torch.bfloat16, [[1, 3, 11, 13, 21, 23], [2, 4, 12, 14, 22, 24]]
    assert on_ranks(3, tmp_path / "meet", work) == [wanted, None, None]


def test_broadcast_gives_every_rank_what_rank_0_has(tmp_path: Path) -> None:
    def work(tp: TpGroup) -> list[int]:
        mine = torch.tensor([tp.rank + 5, tp.rank + 9])
        assert tp.broadcast(mine) is mine
        return mine.tolist()

    assert on_ranks(3, tmp_path / "meet", work) == [[5, 9]] * 3


def test_min_int_is_the_smallest_of_the_ranks(tmp_path: Path) -> None:
    """SPEC A04; the values are larger than fp32 and int32 can hold."""
    assert on_ranks(3, tmp_path / "meet", lambda tp: tp.min_int(2**40 + 5 - tp.rank)) == [2**40 + 3] * 3


class Operators(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_ranks_vote_without_making_a_tensor(tmp_path: Path) -> None:
    """They vote where one of them has no memory left."""

    def work(tp: TpGroup) -> tuple[int, set[str]]:
        with Operators() as operators:
            return tp.min_int(tp.rank), operators.names

    for least, names in on_ranks(2, tmp_path / "meet", work):
        assert least == 0
        assert names == {"fill_", "_local_scalar_dense"}


def test_a_rank_that_never_comes_is_an_error_that_says_which_rank_waited(tmp_path: Path) -> None:
    with pytest.raises(EngineDead, match="rank 0 of 2: meeting the other ranks failed"):
        TpGroup.create(0, 2, init_method=f"file://{tmp_path}/meet", device="cpu", timeout_s=0.2)


def test_a_rank_that_left_is_an_error_on_the_others(tmp_path: Path) -> None:
    both_met = threading.Barrier(2)  # `create` of one can return before that of the other

    def work(tp: TpGroup) -> str:
        both_met.wait(20)
        if tp.rank == 1:
            tp.close()
            return "left"
        with pytest.raises(EngineDead) as error:
            tp.all_reduce(torch.ones(1))
        return str(error.value)

    said, _ = on_ranks(2, tmp_path / "meet", work)
    assert said.startswith("tensor-parallel rank 0 of 2: all_reduce failed")
    assert "look at the other ranks' logs" in said


def test_one_rank_needs_no_process_group() -> None:
    tp, tensor = TpGroup(device="cpu"), torch.ones(2)
    assert tp.all_reduce(tensor) is tensor
    assert tp.all_gather(tensor) is tensor
    assert tp.gather(tensor) is tensor
    assert tp.broadcast(tensor) is tensor
    assert tp.min_int(7) == 7
    tp.barrier()


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is not in a group of 2; wanted 0 to 1"):
        TpGroup(2, 2, device="cpu")
