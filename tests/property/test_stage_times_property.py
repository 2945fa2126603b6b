"""Whatever happens to requests, their stages are never negative and sum to their time on the engine's clock."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.types import TokenDelta
from tests.harness import Clock, ask, fake_engine
from tests.pair import Pair

MAX_TURNS = 200  # of a pair; a request that is open then waits for what does not come


class Ends:
    """Takes deltas as they come; checks the stages of each end against the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.arrived_s: dict[str, float] = {}
        self.num = 0

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.num += delta.finish is not None
            check([delta], self.clock.now_s - self.arrived_s[delta.rid])


def check(deltas: Sequence[TokenDelta], took_s: float) -> None:
    """``deltas`` of one choice; one that has ended took ``took_s``."""
    for delta in deltas:
        assert delta.stages is not None or delta.finish is None
    if deltas[-1].finish is not None and (stages := deltas[-1].stages) is not None:
        parts = (stages.queue_s, stages.prefill_s, stages.transfer_s, stages.decode_s)
        assert min(parts) >= 0.0, stages
        assert sum(parts) == pytest.approx(took_s), stages


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_of_one_engine_with_retractions_aborts_and_deadlines(data: st.DataObject) -> None:
    clock = Clock()
    engine, _ = fake_engine(num_pages=12, page_size=4, max_running=3, new_token_ratio=0.2, clock=clock)
    ends, num_made, num_choices = Ends(clock), 0, 0
    for _ in range(data.draw(st.integers(10, 40))):
        clock.now_s += data.draw(st.floats(0.0, 1.0))
        match data.draw(st.sampled_from(["submit", "step", "step", "step", "abort"])):
            case "submit" if num_made < 8:
                rid, n = f"r{num_made}", data.draw(st.sampled_from([1, 1, 2]))
                start = data.draw(st.sampled_from([0, 0, 40]))
                request = ask(rid, range(start, start + data.draw(st.integers(1, 24))), n=n, max_new_tokens=12)
                ends.arrived_s[rid] = clock.now_s
                ends.take(engine.submit(request))
                num_made, num_choices = num_made + 1, num_choices + n
            case "abort" if engine.open_rids:
                ends.take(engine.abort(data.draw(st.sampled_from(engine.open_rids))))
            case _ if engine.has_work:
                ends.take(engine.step())
    for _ in range(1000):  # 16 choices of 12 tokens, one after the other if need be
        if not engine.has_work:
            break
        clock.now_s += 0.1
        ends.take(engine.step())
    else:
        raise AssertionError(f"still busy: {engine.open_rids}")
    assert ends.num == num_choices


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_of_both_sides_of_kv_transfers_that_may_fail(data: st.DataObject) -> None:
    pair = Pair(num_pages=24, max_running=3)
    arrived_s: dict[str, float] = {}
    seen: set[tuple[int, str]] = set()

    def watch() -> None:
        """Those that have ended since the last call did so now."""
        for side in (pair.prefill, pair.decode):
            for (rid, _), deltas in side.deltas.items():
                if deltas[-1].finish is not None and (id(side), rid) not in seen:
                    seen.add((id(side), rid))
                    check(deltas, pair.clock.now_s - arrived_s[rid])

    for number in range(data.draw(st.integers(1, 4))):
        arrived_s[f"r{number}"] = pair.clock.now_s
        pair.ask(f"r{number}", range(number, number + data.draw(st.integers(1, 30))), max_new_tokens=5)
        for _ in range(data.draw(st.integers(0, 6))):
            pair.turn(pump=data.draw(st.sampled_from([0, 1, None])))
            watch()
        if data.draw(st.integers(0, 3)) == 0:
            pair.wire.fail(number + 1)
    open_rids = pair.decode.engine.open_rids
    if open_rids and data.draw(st.booleans()):
        pair.decode.abort(data.draw(st.sampled_from(open_rids)))
    watch()
    for num_turns in range(2 * MAX_TURNS):
        if num_turns == MAX_TURNS:  # what is left waits for a deadline, minutes away
            pair.clock.now_s += 600.0
            pair.wire.expire()
        if not pair.busy:
            break
        pair.turn()
        watch()
    pair.run(max_turns=1)  # it is idle by now, or names the open requests
    watch()
    assert seen == {(id(side), rid) for side in (pair.prefill, pair.decode) for rid in arrived_s}
