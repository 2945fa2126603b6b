"""The adapters of one rank: in what form it holds its share, and what it says when it cannot."""

import numpy as np
import pytest
import torch

from replicas.config import AdapterLimits
from replicas.errors import Overloaded
from replicas.layers.adapters import AdapterBank, RankAdapter
from replicas.layers.linear import RowParallelLinear
from replicas.layers.tp_group import TpGroup

INPUTS, OUTPUTS, RANK = 64, 32, 16


def bank(tp: TpGroup) -> AdapterBank:
    """A rank's share of one product, whose inputs are split over the ranks."""
    product = RowParallelLinear(tp=tp)
    for put in product.slots().values():
        put(torch.zeros(OUTPUTS, INPUTS))
    product.finalize(tp.device, torch.float32)
    return AdapterBank({"down_proj": product}, tp.device, AdapterLimits(), lambda arrays, out: [])


@pytest.mark.parametrize(("odd", "num_bytes"), [(None, 2), (0, 4), (INPUTS - 1, 4)])
def test_all_ranks_keep_an_adapter_in_one_form_whichever_share_needs_it(odd: int | None, num_bytes: int) -> None:
    """Bytes are counted for all ranks from those of rank 0."""
    a, b = np.ones((RANK, INPUTS), np.float32), np.ones((OUTPUTS, RANK), np.float32)
    if odd is not None:
        a[0, odd] = 1 + 2.0**-20  # bfloat16 does not hold it; one rank alone has this column
    pairs = {"down_proj": (a, b)}
    shares = [bank(TpGroup(rank, 2, device="cpu")).prepare(RANK, pairs) for rank in (0, 1)]
    whole = RANK * INPUTS // 2 + OUTPUTS * RANK
    assert [share.packed.num_bytes for share in shares] == [num_bytes * whole] * 2


def test_a_share_is_held_under_the_name_that_it_is_given() -> None:
    tp = TpGroup(device="cpu")
    made = bank(tp)
    pair = np.ones((RANK, INPUTS), np.float32), np.ones((OUTPUTS, RANK), np.float32)
    share = made.prepare(RANK, {"down_proj": pair})
    for name in ("first", "second"):
        made.put(name, lambda: share, tp)
    made.drop("first")
    made.begin(["second"], [1])


def test_a_rank_that_cannot_hold_an_adapter_says_which(caplog: pytest.LogCaptureFixture) -> None:
    tp = TpGroup(device="cpu")

    def share() -> RankAdapter:
        raise MemoryError("none is left")

    with pytest.raises(Overloaded, match="could not hold it"):
        bank(tp).put("sha256-of-one", share, tp)
    assert "rank 0 cannot hold adapter sha256-of-one" in caplog.text
