"""A rank's port over memcpy: what arrives, what is reported, and what happens when a peer fails."""

import numpy as np
import pytest

from kvtransfer.errors import IncompatibleLayout
from kvtransfer.local import LocalFabric
from kvtransfer.ports import Arrived, ExpectOrder, PeerRanks, WriteFailed, WriteOrder, Written
from kvtransfer.types import PageIds, Verify
from tests.kv_pools import LocalEngine, connect, join_heads, local_engine, page_ids, peer_of, poll_all

ROOM = 2**63 - 1


def order(to: LocalEngine, src: PageIds, dst: PageIds, *, order_id: int = 1, room: int = ROOM, **changed: object) -> WriteOrder:
    fields: dict[str, object] = {
        "order_id": order_id,
        "incarnation": to.incarnation,
        "room": room,
        "generation": 0,
        "page_offset": 0,
        "src_pages": src,
        "dst_pages": dst,
        "last": True,
    }
    return WriteOrder(**(fields | changed))  # type: ignore[arg-type]


def expect(receiver: LocalEngine, sender: LocalEngine, pages: PageIds, *, room: int = ROOM) -> None:
    for port in receiver.ports:
        port.expect(ExpectOrder(room=room, generation=0, incarnation=sender.incarnation, pages=pages))


def pair(*, p_tp: int = 1, d_tp: int = 1, verify: Verify = Verify.ALL, pages_per_write: int = 16) -> tuple[LocalFabric, LocalEngine, LocalEngine]:
    fabric = LocalFabric()
    p = local_engine(fabric, tp=p_tp, seed=1, verify=verify, pages_per_write=pages_per_write)
    d = local_engine(fabric, tp=d_tp, seed=2, verify=verify, pages_per_write=pages_per_write)
    connect(p, d)
    return fabric, p, d


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 2), (2, 1), (1, 2), (3, 1), (1, 3), (6, 2)])
def test_pages_arrive_bit_for_bit_whatever_the_ranks_and_no_other_page_changes(p_tp: int, d_tp: int) -> None:
    _, p, d = pair(p_tp=p_tp, d_tp=d_tp)
    before = join_heads(d.pools)
    src, dst = page_ids(5, 6, 2), page_ids(3, 8, 1)
    expect(d, p, dst)
    for port in p.ports:
        port.write(order(d, src, dst, meta=b"m" if port.info.rank == 0 else b""))
    events = poll_all([*p.ports, *d.ports])
    wanted = before.copy()
    wanted[dst] = join_heads(p.pools)[src]
    np.testing.assert_array_equal(join_heads(d.pools), wanted)
    assert sum(isinstance(event, Written) for event in events) == p_tp
    arrived = [event for event in events if isinstance(event, Arrived)]
    assert len(arrived) == max(p_tp, d_tp)  # each rank of the finer side has one partner
    assert sum(event.num_bytes for event in arrived) == 3 * 3072
    assert all(event.bad_pages == () for event in arrived)
    assert {event.meta for event in arrived if event.src_rank == 0} == {b"m"}
