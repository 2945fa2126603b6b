"""Pages of latent attention (MLA): all ranks have the same, and engines of any two sizes exchange them (SPEC H12)."""

import uuid
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.errors import IncompatibleLayout
from kvtransfer.layout import KvLayout, head_slices
from kvtransfer.ports.memory import KvMemory
from kvtransfer.ports.port import AgentPort
from kvtransfer.ports.rank_port import ExpectOrder, Written
from kvtransfer.replay.payload import payload_shape
from tests.kv_pools import LocalEngine, arrivals, connect, page_ids, poll_all, write_order
from tests.local_agents import LocalAgent, LocalFabric


def layout(tp: int) -> KvLayout:
    """A page is [2 layers, 4 tokens, 24 floats]: 768 bytes, whatever tp is."""
    return KvLayout(
        model="tiny", architecture="MLA", num_layers=2, num_kv_heads=1, head_dim=24, dtype="float32", item_bytes=4,
        page_size=4, tp=tp,
    )  # fmt: skip


def engine_of(fabric: LocalFabric, tp: int, seed: int) -> LocalEngine:
    whole = np.random.default_rng(seed).standard_normal((9, 2, 4, 24), dtype=np.float32)
    pools, incarnation, ports = [whole.copy() for _ in range(tp)], uuid.uuid4().hex, []
    for rank, pool in enumerate(pools):
        memory = KvMemory.of_array(layout(tp), pool)
        ports.append(AgentPort(memory, rank, LocalAgent(memory, fabric, f"{rank}-{incarnation}")))
    return LocalEngine(incarnation=incarnation, layout=layout(tp), pools=pools, ports=ports)


def test_a_page_is_as_large_on_every_rank_and_a_token_has_one_vector() -> None:
    for tp in (1, 2, 5):
        of = layout(tp)
        assert (of.page_bytes, of.num_parts, of.heads_per_rank) == (2 * 4 * 24 * 4, 1, 1)
        assert of.fingerprint == layout(1).fingerprint
        assert payload_shape(of, 7) == (2, 1, 7, 1, 96)
    with pytest.raises(ValueError, match="MLA of 2 KV heads"):
        replace(layout(1), num_kv_heads=2)


def test_every_rank_gets_the_whole_page_from_exactly_one_writer() -> None:
    for p_tp in range(1, 6):
        for d_tp in range(1, 6):
            here, there = layout(p_tp), layout(d_tp)
            here.require_compatible(there)
            for rank in range(d_tp):
                (cut,) = (cut for writer in range(p_tp) for cut in head_slices(here, writer, there, rank))
                assert (cut.src_offset, cut.dst_offset, cut.num_bytes) == (0, 0, 768)
    with pytest.raises(IncompatibleLayout, match="architecture: 'MLA' here, 'MHA' there"):
        layout(1).require_compatible(replace(layout(1), architecture="MHA"))


@pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (5, 2)])
def test_pages_arrive_on_every_rank_and_no_other_page_changes(p_tp: int, d_tp: int) -> None:
    """Sizes need not divide each other; a rank whose page is nobody's to write reports that it has written nothing."""
    fabric = LocalFabric()
    p, d = engine_of(fabric, p_tp, 1), engine_of(fabric, d_tp, 2)
    connect(p, d)
    src, dst, wanted = page_ids(5, 6, 2), page_ids(3, 8, 1), d.pools[0].copy()
    wanted[dst] = p.pools[0][src]
    for port in d.ports:
        port.expect(ExpectOrder(room=7, generation=0, incarnation=p.incarnation, pages=dst))
    for port in p.ports:
        port.write(write_order(d.incarnation, src, dst, room=7, meta=b"m"))
    events = poll_all([*p.ports, *d.ports])
    for pool in d.pools:
        np.testing.assert_array_equal(pool, wanted)
    written = [event for event in events if isinstance(event, Written)]
    assert len(written) == p_tp
    assert sorted(event.num_bytes > 0 for event in written) == [False] * max(0, p_tp - d_tp) + [True] * min(p_tp, d_tp)
    arrived = arrivals(events)
    assert len(arrived) == d_tp
    assert all((event.num_bytes, event.bad_pages) == (3 * 768, ()) for event in arrived)
    assert {event.meta for event in arrived if event.src_rank == 0} == {b"m"}
