"""A reader that applies every delta has the observatory's state, whatever happens to routers and replicas."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.watch.observatory.deltas import applied
from deployments.watch.observatory.state import State
from tests.unit.deployments.observed import details, hand_off, listed, row, seen, view

NAMES = ["a", "b", "c"]
RULE = {"prefill": {"min_replicas": 1.0, "max_replicas": 4.0}}


@st.composite
def replica(draw: st.DrawFn, name: str) -> Any:
    age_s = draw(st.sampled_from([None, 0.0, 0.1, 1.25]))
    counters = {key: draw(st.integers(0, 5)) * 100 for key in ("prefill_tokens", "cached_tokens", "decode_tokens")}
    role = {"a": "prefill", "b": "decode", "c": "unified"}[name]
    return seen(name, role=role, age_s=age_s, used_pages=draw(st.integers(0, 10)),
                num_running=draw(st.integers(0, 2)), **counters)  # fmt: skip


@st.composite
def request(draw: st.DrawFn, now_s: float) -> dict[str, Any]:
    number = draw(st.integers(0, 80))
    ended = draw(st.booleans())
    return row(
        f"r{number}",
        time=draw(st.sampled_from([now_s, now_s - 0.5, now_s - 70.0])) if draw(st.booleans()) else float(number),
        router=draw(st.sampled_from(["one", "two"])),
        outcome="finished" if ended else "running",
        ttft_s=draw(st.sampled_from([None, 0.1, 2.0])),
        cached_tokens=draw(st.sampled_from([None, 0, 40])),
        hand_offs=[hand_off("a", "b", ok=draw(st.booleans()))] if draw(st.booleans()) else [],
    )


@st.composite
def poll(draw: st.DrawFn, now_s: float) -> tuple[list[Any], Any, bool]:
    views = []
    for name in draw(st.lists(st.sampled_from(["one", "two"]), unique=True)):
        replicas = [draw(replica(each)) for each in draw(st.lists(st.sampled_from(NAMES), unique=True))]
        rows = tuple(draw(st.lists(request(now_s), max_size=12)))
        mode = draw(st.sampled_from(["unified", "disaggregated"]))
        views.append(view(name, *replicas, rows=rows, mode=mode, autoscaling=draw(st.sampled_from([{}, RULE]))))
    known = [listed(name, "router") for name in draw(st.lists(st.sampled_from(["one", "two"]), unique=True))]
    known += [listed(name, state=draw(st.sampled_from(["STARTING", "RUNNING", "STOPPING"]))) for name in
              draw(st.lists(st.sampled_from([*NAMES, "d"]), unique=True))]  # fmt: skip
    wanted = {role: draw(st.integers(0, 3)) for role in draw(st.lists(st.sampled_from(["prefill", "decode"])))}
    return views, details(*known, **wanted), draw(st.booleans())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_delta_applied_to_the_state_before_it_gives_the_state_after_it(data: st.DataObject) -> None:
    state = State()
    mirror = json.loads(json.dumps(state.snapshot))
    now_s, set_back_s = 1000.0, 0.0
    for _ in range(data.draw(st.integers(1, 6))):
        now_s += data.draw(st.sampled_from([1.0, 1.3, 9.0, 31.0, 150.0]))
        set_back_s = data.draw(st.sampled_from([set_back_s, 400.0]))
        views, serve, new = data.draw(poll(now_s))
        delta = state.advance(views, serve, now_s, time_s=now_s - set_back_s, details_are_new=new)
        mirror = applied(mirror, json.loads(json.dumps(delta, allow_nan=False)))
        assert mirror == state.snapshot
        state.check()
