"""Notes that get lost on any rank are in the statistics of the transfer service (SPEC H19)."""

from kvtransfer.ports.rank_port import ExpectOrder, WriteOrder
from kvtransfer.types import TransferStats
from tests.kv_pools import page_ids, write_order
from tests.transfer_net import Net, SimEngine


def note(to: SimEngine, *, room: int) -> WriteOrder:
    none = page_ids()
    return write_order(to.address.incarnation, none, none, order_id=100 + room, room=room, generation=1)


def counted(engine: SimEngine) -> tuple[int, int]:
    stats: TransferStats = engine.core.stats()
    return stats.late_messages, stats.early_notes


def test_late_and_malformed_notes_of_every_rank_are_late_messages_and_early_ones_are_counted_apart() -> None:
    """Each of the two ranks gets two notes of rooms that it does not expect: they wait. One is expected then, the other
    forgotten: late, on both ranks. What rank 1 cannot read is counted too."""
    net = Net()
    p, d = net.add(tp=1), net.add(tp=2)
    assert net.kv_transfer(p, d, num_pages=1) is not None
    net.run(0.3)
    assert counted(d) == (0, 0)
    for room in (7, 8):
        p.pools.ports[0].write(note(d, room=room))
    net.run(0.3)
    assert counted(d) == (0, 4)
    for port in d.pools.ports:
        port.expect(ExpectOrder(room=7, generation=1, incarnation=p.address.incarnation, pages=page_ids()))
        port.forget(8, 1)
    assert counted(d) == (2, 0)
    d.pools.ports[1]._agent.inbox.append(("a peer", b"no note"))  # type: ignore[attr-defined]
    net.run(0.3)
    assert counted(d) == (5, 0)  # and room 7 is one that the transfer service itself does not know: late there, twice
