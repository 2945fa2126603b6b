"""What an engine counts by bucket beside its sums."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.types import WriteTimes
from replicas.types import Tally, TallyCounts
from tests.harness import Clock, ask, fake_engine, finish_all
from tests.pair import Pair


def num(counts: TallyCounts) -> int:
    return sum(counts.counts)


def test_a_value_on_a_bound_belongs_below_it_and_one_above_all_to_the_last() -> None:
    tally = Tally((1, 2.5))
    for value in (0.0, 1.0, 1.1, 2.5, 2.6, 100.0):
        tally.add(value)
    tally.add_many(2.0, 3)
    counts = tally.read()
    assert counts.counts == (2, 5, 2)
    assert counts.total == pytest.approx(113.2)


@given(st.lists(st.floats(0, 1e4)), st.lists(st.floats(0.001, 1e3), unique=True, min_size=1))
def test_counts_sum_to_the_number_of_values(values: list[float], bounds: list[float]) -> None:
    tally = Tally(sorted(bounds))
    for value in values:
        tally.add(value)
    counts = tally.read()
    assert num(counts) == len(values)
    for bound, upto in zip(counts.bounds, range(1, len(counts.counts)), strict=True):
        assert sum(counts.counts[:upto]) == sum(value <= bound for value in values)


def test_steps_are_counted_by_phase_with_their_requests_and_tokens() -> None:
    engine, _ = fake_engine()
    for rid, length in (("a", 6), ("b", 7)):
        engine.submit(ask(rid, range(length), max_new_tokens=4))
    finish_all(engine)
    tallies, stats = engine.tallies(), engine.stats()
    assert (stats.num_extend_steps, stats.num_decode_steps) == (1, 3)
    for name in ("step_s", "batch_requests", "batch_tokens"):
        assert num(getattr(tallies, f"prefill_{name}")) == 1, name
        assert num(getattr(tallies, f"decode_{name}")) == 3, name
    assert (tallies.prefill_batch_requests.total, tallies.prefill_batch_tokens.total) == (2, 13)
    assert (tallies.decode_batch_requests.total, tallies.decode_batch_tokens.total) == (6, 6)
    assert tallies.prefill_step_s.total == pytest.approx(stats.extend_s)
    assert tallies.decode_step_s.total == pytest.approx(stats.decode_s)


def test_what_is_evicted_for_room_tells_how_long_it_was_idle_and_what_is_flushed_does_not() -> None:
    clock = Clock()
    engine, _ = fake_engine(num_pages=8, page_size=4, clock=clock)
    engine.submit(ask("old", range(16), max_new_tokens=1))  # 4 of 8 pages stay cached
    finish_all(engine)
    clock.now_s = 20.0
    engine.submit(ask("new", range(100, 120), max_new_tokens=1))  # 5 pages, 4 are free: 1 must go
    finish_all(engine)
    idle = engine.tallies().evicted_idle_s
    assert num(idle) == 1  # of one node, which lost its tail
    assert idle.counts[idle.bounds.index(30)] == 1
    assert idle.total == pytest.approx(20.0)
    stats = engine.stats()
    assert (stats.evicted_tokens, stats.flushed_tokens) == (4, 0)
    cached = stats.pool.evictable_pages * 4
    assert engine.flush_cache()
    stats = engine.stats()
    assert (stats.evicted_tokens, stats.flushed_tokens) == (4, cached)
    assert num(engine.tallies().evicted_idle_s) == 1


def test_a_match_makes_a_node_young_again() -> None:
    clock = Clock()
    engine, _ = fake_engine(num_pages=8, page_size=4, clock=clock)
    engine.submit(ask("a", range(16), max_new_tokens=1))
    finish_all(engine)
    clock.now_s = 50.0
    engine.submit(ask("again", range(16), max_new_tokens=1))
    finish_all(engine)
    clock.now_s = 57.0
    engine.submit(ask("b", range(100, 120), max_new_tokens=1))
    finish_all(engine)
    assert engine.tallies().evicted_idle_s.total == pytest.approx(7.0 * num(engine.tallies().evicted_idle_s))


def test_the_decode_side_counts_how_long_grant_and_pages_took_and_a_transfer_service_its_writes() -> None:
    pair = Pair()
    pair.ask("a", range(10), max_new_tokens=3)
    pair.run()
    tallies = pair.decode.engine.tallies()
    report = next(delta.kv_transfer for delta in pair.decode.deltas["a", 0] if delta.kv_transfer is not None)
    assert (num(tallies.grant_s), num(tallies.wait_s)) == (1, 1)
    assert (tallies.grant_s.total, tallies.wait_s.total) == (report.grant_s, report.wait_s)
    assert num(pair.prefill.engine.tallies().grant_s) == 0
    pair.prefill.service.write_times.append(WriteTimes(post_s=0.002, wire_s=0.02))
    pair.prefill.engine.stats()
    tallies = pair.prefill.engine.tallies()
    assert (tallies.post_s.total, tallies.wire_s.total) == (0.002, 0.02)
    assert tallies.wire_s.counts[tallies.wire_s.bounds.index(0.025)] == 1
