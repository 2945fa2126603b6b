"""Windows in pages that carry them: what is copied, in how much memory, and what ranks do of which one cannot, also
where K and V are read and written for snapshots."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replicas.errors import Overloaded
from replicas.layers.tp_group import TpGroup
from replicas.memory.pool import MHATokenToKVPool
from replicas.runner import kv_access
from replicas.runner.kv_access import CarriedWindows, ReadKv, WriteKv, run_order

LAYER_BYTES = 2 * 2 * 4 * 8 * 4  # K and V of two heads in a page of 4


class Other(TpGroup):
    """With another rank; it notes what this one says."""

    def __init__(self, others: int) -> None:
        super().__init__(device="cpu")
        self.others, self.told = others, list[int]()

    def min_int(self, value: int) -> int:
        self.told.append(value)
        return min(value, self.others)


def pools() -> list[MHATokenToKVPool]:
    """Pages of two layers, and of five with a window; each number is another."""
    made = [
        MHATokenToKVPool(
            num_pages=12, page_size=4, num_layers=num_layers, num_kv_heads=2, head_dim=8, dtype=torch.float32,
            device="cpu",
        )
        for num_layers in (2, 5)
    ]  # fmt: skip
    for start, pool in enumerate(made):
        pool.buffer.copy_(torch.arange(start, 2 * pool.buffer.numel() + start, 2).view_as(pool.buffer))
    return made


def ids(pages: Sequence[int]) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


def test_windows_come_back_from_pages_of_fewer_layers_and_few_are_copied_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """15 layers of three parts, in eight pages of two: the last half of the eighth is as it was."""

    class Watched(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            for each in made if isinstance(made, list | tuple) else [made]:
                if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in shared:
                    self.most = max(self.most, each.untyped_storage().nbytes())
            return made

    monkeypatch.setattr(kv_access, "COPIED_BYTES", 2 * LAYER_BYTES)
    full, windows = made = pools()
    before, shared = [pool.buffer.clone() for pool in made], [pool.buffer.untyped_storage().data_ptr() for pool in made]
    carried, pages, parts = CarriedWindows(made, Other(1)), ids([7, 2, 3, 11, 4, 9, 1, 5]), ids([6, 2, 8])
    with Watched() as watched:
        carried.put(0, 12, parts, pages)
        layers = before[1][parts].flatten(0, 1)
        assert torch.equal(full.buffer[pages].flatten(0, 1), torch.cat([layers, before[0][5, 1:]]))
        untouched = ids([6, 8, 10, 12])
        assert torch.equal(full.buffer[untouched], before[0][untouched])
        watched.most = 0
        windows.buffer.zero_()
        carried.take(0, 12, ids([1, 0, 3]), pages)
    assert torch.equal(windows.buffer[[1, 3]], before[1][[6, 8]])
    assert not windows.buffer[ids([2, *range(4, 13)])].any()
    assert 0 < watched.most <= 2 * LAYER_BYTES


@pytest.mark.parametrize("fails_here", [False, True])
def test_a_rank_that_cannot_copy_windows_leaves_none_waiting(fails_here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a follower end by it."""

    def short(*given: object) -> None:
        raise RuntimeError("no memory")

    if fails_here:
        monkeypatch.setattr(MHATokenToKVPool, "bytes_of_pages", short)
    tp, sent = Other(fails_here), list[Any]()
    carried, follower = CarriedWindows(pools(), tp, sent.append), CarriedWindows(pools(), tp)
    for work in (carried.put, carried.take):
        with pytest.raises(Overloaded, match="windows in 3 pages were not copied"):
            work(0, 4, ids([3]), ids([1, 2, 4]))
    assert [follower.run(order) for order in sent] == [False, False]
    assert tp.told == [not fails_here] * 4


@pytest.mark.parametrize("fails_here", [False, True])
def test_a_rank_that_cannot_read_or_write_slots_leaves_none_waiting(
    fails_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read is joined only where all have read theirs."""

    def short(*given: object) -> None:
        raise RuntimeError("no memory")

    pool, slots = pools()[0], ids([4, 9])
    payload = run_order(ReadKv(slots), pool, Other(1), 2)
    assert payload is not None
    if fails_here:
        for name in ("read_slots", "write_slots"):
            monkeypatch.setattr(MHATokenToKVPool, name, short)
    tp = Other(fails_here)
    monkeypatch.setattr(tp, "all_gather", short)
    for order in (ReadKv(slots), WriteKv(slots, payload)):
        with pytest.raises(Overloaded, match="K/V in 2 slots was not read or written"):
            run_order(order, pool, tp, 2)
    assert tp.told == [not fails_here] * 2
