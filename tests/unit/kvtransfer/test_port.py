"""A rank's port over memcpy: what arrives, what is reported, what happens when a peer fails (SPEC H09, H13, H19);
and digests of pages (SPEC J01, J03)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtransfer.errors import IncompatibleLayout
from kvtransfer.ports.memory import KvMemory, page_digests
from kvtransfer.ports.rank_port import Arrived, ExpectOrder, WriteFailed, WriteOrder, Written
from kvtransfer.types import PageIds, Verify
from tests.kv_pools import (
    LocalEngine,
    arrivals,
    connect,
    join_heads,
    layout,
    local_engine,
    page_ids,
    peer_of,
    poll_all,
    random_pools,
    write_order,
)
from tests.local_agents import LocalFabric

ROOM = 2**63 - 1


def order(to: LocalEngine, src: PageIds, dst: PageIds, *, room: int = ROOM, **more: Any) -> WriteOrder:
    return write_order(to.incarnation, src, dst, room=room, **more)


def expect(receiver: LocalEngine, sender: LocalEngine, pages: PageIds, *, room: int = ROOM) -> None:
    for port in receiver.ports:
        port.expect(ExpectOrder(room=room, generation=0, incarnation=sender.incarnation, pages=pages))


def pair(
    *, p_tp: int = 1, d_tp: int = 1, verify: Verify = Verify.ALL
) -> tuple[LocalFabric, LocalEngine, LocalEngine]:
    fabric = LocalFabric()
    p = local_engine(fabric, tp=p_tp, seed=1, verify=verify)
    d = local_engine(fabric, tp=d_tp, seed=2, verify=verify)
    connect(p, d)
    return fabric, p, d


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 2), (2, 1), (1, 2), (3, 1), (1, 3), (6, 2)])
def test_pages_arrive_bit_for_bit_whatever_the_ranks_and_no_other_page_changes(p_tp: int, d_tp: int) -> None:
    """SPEC H11, H12."""
    _, p, d = pair(p_tp=p_tp, d_tp=d_tp)
    before = join_heads(d.pools)
    src, dst = page_ids(5, 6, 2), page_ids(3, 8, 1)
    expect(d, p, dst)
    for port in p.ports:
        port.write(order(d, src, dst, meta=b"m"))
    events = poll_all([*p.ports, *d.ports])
    wanted = before.copy()
    wanted[dst] = join_heads(p.pools)[src]
    np.testing.assert_array_equal(join_heads(d.pools), wanted)
    assert sum(isinstance(event, Written) for event in events) == p_tp
    arrived = arrivals(events)
    assert len(arrived) == max(p_tp, d_tp)  # each rank of the finer side has one partner
    assert sum(event.num_bytes for event in arrived) == 3 * 3072
    assert all(event.bad_pages == () for event in arrived)
    assert {event.meta for event in arrived if event.src_rank == 0} == {b"m"}
    assert {event.meta for event in arrived if event.src_rank > 0} <= {b""}


def test_an_order_that_begins_inside_the_room_lands_behind_what_came_before() -> None:
    _, p, d = pair()
    expect(d, p, page_ids(1, 2, 3))
    p.ports[0].write(order(d, page_ids(4), page_ids(3), page_offset=2))
    (arrived,) = arrivals(poll_all([*p.ports, *d.ports]))
    assert (arrived.page_offset, arrived.num_pages, arrived.bad_pages) == (2, 1, ())


def test_no_page_and_not_the_last_is_written_without_a_note_to_the_peer() -> None:
    _, p, d = pair()
    expect(d, p, page_ids(1))
    p.ports[0].write(order(d, page_ids(), page_ids(), last=False))
    assert poll_all([*p.ports, *d.ports]) == [Written(order_id=1, num_bytes=0)]


@pytest.mark.parametrize(
    ("sender", "receiver", "flips", "expected", "bad"),
    [
        (Verify.ALL, Verify.ALL, 0, (3, 8), ()),
        (Verify.ALL, Verify.ALL, 1, (3, 8), (3,)),  # in the first page of the write; the receiver's number of it
        (Verify.LAST, Verify.LAST, 1, (3, 8), ()),  # looks at the last page alone
        (Verify.OFF, Verify.OFF, 1, (3, 8), ()),
        (Verify.OFF, Verify.ALL, 0, (3, 8), (3, 8)),  # no digests do not pass where they are wanted
        (Verify.ALL, Verify.ALL, 0, (8, 3), (8, 3)),  # pages that changed places are both wrong
    ],
)
def test_pages_whose_bytes_or_digests_are_wrong_are_reported_as_far_as_verification_looks(
    sender: Verify, receiver: Verify, flips: int, expected: tuple[int, ...], bad: tuple[int, ...]
) -> None:
    fabric = LocalFabric()
    p, d = local_engine(fabric, seed=1, verify=sender), local_engine(fabric, seed=2, verify=receiver)
    connect(p, d)
    fabric.faults.flip_bytes = flips
    expect(d, p, page_ids(*expected))
    p.ports[0].write(order(d, page_ids(5, 6), page_ids(3, 8)))
    (arrived,) = arrivals(poll_all([*p.ports, *d.ports]))
    assert arrived.bad_pages == bad


def test_verify_last_finds_a_flipped_byte_in_the_last_page() -> None:
    fabric, p, d = pair(verify=Verify.LAST)
    expect(d, p, page_ids(3, 8))
    p.ports[0].write(order(d, page_ids(5), page_ids(3), last=False))
    poll_all(p.ports)
    fabric.faults.flip_bytes = 1
    p.ports[0].write(order(d, page_ids(6), page_ids(8), order_id=2, page_offset=1))
    arrived = arrivals(poll_all([*p.ports, *d.ports]))
    assert [event.bad_pages for event in arrived] == [(), (8,)]


def test_notes_of_a_forgotten_room_another_generation_or_another_sender_are_counted_and_dropped() -> None:
    fabric, p, d = pair()
    other = local_engine(fabric, seed=3)
    connect(other, d)
    expect(d, p, page_ids(1), room=1)
    d.ports[0].forget(1, 0)
    expect(d, p, page_ids(2), room=2)
    expect(d, p, page_ids(3), room=3)
    d.ports[0].forget(3, 0)
    d.ports[0].expect(ExpectOrder(room=3, generation=7, incarnation=p.incarnation, pages=page_ids(3)))
    p.ports[0].write(order(d, page_ids(5), page_ids(1), order_id=1, room=1))
    other.ports[0].write(order(d, page_ids(5), page_ids(2), order_id=2, room=2))
    p.ports[0].write(order(d, page_ids(5), page_ids(3), order_id=3, room=3))
    events = poll_all([*p.ports, *other.ports, *d.ports])
    assert not arrivals(events)
    assert d.ports[0].note_counts.late == 3


def test_a_note_that_is_read_before_the_order_that_expects_it_is_not_lost() -> None:
    """SPEC H13. On a rank after the first the two come over different connections: dropped as late, the note's room
    would wait for its deadline, 180 s. What it says is reported once, and only of the room, sender and pages expected.
    """
    _, p, d = pair(d_tp=2)
    p.ports[0].write(order(d, page_ids(5, 6), page_ids(3, 8), meta=b"m"))
    assert poll_all([*p.ports, *d.ports]) == [Written(order_id=1, num_bytes=2 * 3072)]
    expect(d, p, page_ids(1), room=7)
    assert poll_all(d.ports) == []
    expect(d, p, page_ids(3, 8))
    first, second = poll_all(d.ports)
    assert isinstance(first, Arrived)
    assert (first.room, first.num_pages, first.bad_pages, first.last, first.meta) == (ROOM, 2, (), True, b"m")
    assert first == second
    assert poll_all(d.ports) == []
    assert [port.note_counts.late for port in d.ports] == [0, 0]


def test_an_early_note_is_verified_against_the_pages_that_are_expected() -> None:
    _, p, d = pair()
    p.ports[0].write(order(d, page_ids(5, 6), page_ids(3, 8)))
    poll_all([*p.ports, *d.ports])
    expect(d, p, page_ids(8, 3))
    (arrived,) = poll_all(d.ports)
    assert isinstance(arrived, Arrived)
    assert arrived.bad_pages == (8, 3)


def test_an_early_note_of_another_sender_or_of_one_that_is_dead_is_dropped() -> None:
    fabric, p, d = pair()
    other = local_engine(fabric, seed=3)
    connect(other, d)
    other.ports[0].write(order(d, page_ids(5), page_ids(1)))
    p.ports[0].write(order(d, page_ids(5), page_ids(2), room=2))
    poll_all([*p.ports, *other.ports, *d.ports])
    d.ports[0].disconnect(p.incarnation)
    assert d.ports[0].note_counts.late == 1
    d.ports[0].connect(peer_of(p))
    expect(d, p, page_ids(1))
    expect(d, p, page_ids(2), room=2)
    assert poll_all(d.ports) == []
    assert d.ports[0].note_counts.late == 2


def test_of_too_many_early_notes_and_rooms_that_are_over_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtransfer.ports.notifications.MAX_EARLY", 2)
    monkeypatch.setattr("kvtransfer.ports.notifications.MAX_OVER", 2)
    _, p, d = pair()
    for room in (1, 2, 3):
        p.ports[0].write(order(d, page_ids(5), page_ids(room), order_id=room, room=room))
    poll_all([*p.ports, *d.ports])
    assert d.ports[0].note_counts.late == 1
    for room in (1, 2, 3):
        expect(d, p, page_ids(room), room=room)
    assert [event.room for event in poll_all(d.ports) if isinstance(event, Arrived)] == [2, 3]
    for room in (1, 2, 3):
        d.ports[0].forget(room, 0)
    d.ports[0].check()


def test_a_note_that_comes_twice_counts_once() -> None:
    _, p, d = pair()
    expect(d, p, page_ids(1))
    for order_id in (1, 2):
        p.ports[0].write(order(d, page_ids(5), page_ids(1), order_id=order_id))
    arrived = arrivals(poll_all([*p.ports, *d.ports]))
    assert len(arrived) == 1
    assert d.ports[0].note_counts.late == 1


def test_a_note_that_speaks_of_more_pages_than_the_room_has_is_dropped() -> None:
    _, p, d = pair()
    expect(d, p, page_ids(1))
    p.ports[0].write(order(d, page_ids(5, 6), page_ids(1, 2)))
    assert not arrivals(poll_all([*p.ports, *d.ports]))
    assert d.ports[0].note_counts.malformed == 1


def test_a_dead_peer_fails_all_its_orders_and_no_other() -> None:
    fabric, p, d = pair()
    other = local_engine(fabric, seed=3)
    connect(p, other)
    fabric.hang(d.agents[0])
    p.ports[0].write(order(d, page_ids(1), page_ids(1), order_id=1, room=1))
    poll_all(p.ports)
    fabric.kill(d.agents[0])
    p.ports[0].write(order(d, page_ids(2), page_ids(2), order_id=2, room=2))
    p.ports[0].write(order(other, page_ids(3), page_ids(3), order_id=3, room=3))
    events = poll_all(p.ports)
    assert Written(order_id=3, num_bytes=3072) in events
    failed = [event for event in events if isinstance(event, WriteFailed)]
    assert {event.order_id for event in failed if event.drained} == {1, 2}
    p.ports[0].write(order(d, page_ids(2), page_ids(2), order_id=4, room=4))  # not before a disconnect
    (refused,) = poll_all(p.ports)
    assert isinstance(refused, WriteFailed)
    assert refused.drained


def test_a_write_to_a_stranger_or_beyond_the_peers_pool_is_refused() -> None:
    _, p, d = pair()
    stranger = local_engine(LocalFabric(), seed=3)
    p.ports[0].write(order(stranger, page_ids(1), page_ids(1), order_id=1))
    p.ports[0].write(order(d, page_ids(1), page_ids(9), order_id=2))
    first, second = poll_all(p.ports)
    assert isinstance(first, WriteFailed)
    assert "is not connected" in first.reason
    assert isinstance(second, WriteFailed)
    assert "pool of 9 does not have" in second.reason
    with pytest.raises(ValueError, match="pages 9 to 9 are wanted of a pool of 9"):
        p.ports[0].write(order(d, page_ids(9), page_ids(1), order_id=3))


def test_a_peer_of_another_layout_or_of_ranks_that_do_not_map_is_refused() -> None:
    _, p, d = pair(p_tp=2)
    with pytest.raises(IncompatibleLayout, match="fingerprint"):
        p.ports[0].connect(replace(peer_of(d), incarnation="x", fingerprint="0" * 16))
    with pytest.raises(IncompatibleLayout, match="tp = 2 here and 3 there"):
        p.ports[0].connect(replace(peer_of(d), incarnation="y", tp=3))


def test_states_are_carried_by_whole_pages_of_the_layout_and_a_layout_without_them_keeps_its_name() -> None:
    plain = layout()
    for num_bytes, num_pages in ((0, 0), (1, 1), (plain.page_bytes, 1), (plain.page_bytes + 1, 2)):
        assert replace(plain, state_bytes=num_bytes).carried.num_pages(9, 16) == num_pages
    windows = replace(plain, window_layers=3, window_pages=4)  # three parts of a page in each of two layers
    for num_tokens, num_pages in ((1, 2), (16, 2), (17, 3), (64, 6), (1000, 6)):
        assert windows.carried.num_pages(num_tokens, 16) == num_pages
    assert plain.fingerprint == "5c6af9a2006cae69"  # a release that changes it finds no page of its stores
    assert replace(plain, state_bytes=8).fingerprint != plain.fingerprint
    with pytest.raises(IncompatibleLayout, match="state_bytes: 0 here, 8 there"):
        plain.require_compatible(replace(plain, state_bytes=8))
    with pytest.raises(IncompatibleLayout, match=r"window_layers: 3 here, 0 there.*cache\.host_memory_bytes"):
        windows.require_compatible(replace(plain, num_layers=5))
    with pytest.raises(IncompatibleLayout, match="Serve the same model"):
        windows.require_compatible(replace(plain, model="another"))
    with pytest.raises(ValueError, match="state_bytes = -1"):
        replace(plain, state_bytes=-1)


WHOLE = ((0, 3072),)


def memory_of(tp: int = 1, seed: int = 0) -> tuple[KvMemory, np.ndarray]:
    pool = random_pools(layout(tp), 5, seed)[0]
    return KvMemory.of_array(layout(tp), pool), pool


def test_every_byte_of_a_page_counts() -> None:
    memory, _ = memory_of()
    assert memory.view is not None
    (before,) = page_digests(memory, page_ids(2), WHOLE)
    for position in range(0, 3072, 61):
        memory.view[2, position] ^= 1
        assert page_digests(memory, page_ids(2), WHOLE)[0] != before, position
        memory.view[2, position] ^= 1
    assert page_digests(memory, page_ids(2), WHOLE)[0] == before


def test_pages_of_a_device_are_read_through_the_reader() -> None:
    memory, pool = memory_of()
    device = KvMemory.of_device(
        layout(), base_address=1 << 40, num_pages=5, device=0, owner=pool, reader=lambda pages: memory.view[pages]
    )
    np.testing.assert_array_equal(
        page_digests(device, page_ids(3, 1), WHOLE), page_digests(memory, page_ids(3, 1), WHOLE)
    )


def test_a_pool_of_another_shape_is_refused_as_the_memory_of_a_layout() -> None:
    with pytest.raises(ValueError, match="a page of this array has 1536 bytes, of the layout 3072"):
        KvMemory.of_array(layout(1), random_pools(layout(2), 5, 0)[0])
    with pytest.raises(ValueError, match="contiguous"):
        KvMemory.of_array(layout(1), random_pools(layout(1), 5, 0)[0][:, :, ::-1])
