"""What a request's time was spent on: by an eye's arithmetic, on a clock that moves when told."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.record.timeline import Arrival, LegTimes, Stages, Timeline
from replicas.types import Finish, FinishReason, StageTimes, TokenDelta, Usage

LENGTH = Finish(reason=FinishReason.LENGTH)
USAGE = Usage(prompt_tokens=4, completion_tokens=1, cached_tokens=0)


def delta(num_tokens: int, finish: Finish | None = None, *, index: int = 0) -> TokenDelta:
    return TokenDelta(rid="a", index=index, token_ids=(7,) * num_tokens, usage=USAGE, finish=finish)


def line(num_choices: int = 1) -> Timeline:
    return Timeline(Arrival(endpoint="chat", arrived_s=100.0), num_choices=num_choices)


def stages(timeline: Timeline) -> Stages:
    timeline.check()
    assert timeline.stages is not None
    return timeline.stages


def rounded(found: Stages) -> tuple[float, ...]:
    return tuple(round(each, 6) for each in dataclasses.astuple(found))


def test_one_replica_tells_prefill_and_the_rest_of_the_wait_is_queue() -> None:
    """Arrived 100.0, sent 100.1, first token 100.6 (the engine computed for 0.3 s), end 101.0."""
    timeline, leg = line(), LegTimes()
    timeline.sent(leg, 100.1)
    assert timeline.saw(delta(1), 100.6)
    assert not timeline.saw(delta(1, LENGTH), 101.0)
    leg.tell(StageTimes(queue_s=0.15, prefill_s=0.3, decode_s=0.39))
    timeline.end(101.0)
    assert rounded(stages(timeline)) == (0.1, 0.2, 0.3, 0.0, 0.4)  # 0.05 of the queue are the way there and back
    assert (timeline.ttft_s, timeline.total_s) == (pytest.approx(0.6), pytest.approx(1.0))


@pytest.mark.parametrize(
    ("ended_s", "prefill", "own", "came_s", "wanted"),
    [
        # what prefill did not take is transfer; decode had granted pages after 0.1 s
        (101.5, StageTimes(queue_s=0.2, prefill_s=0.5, transfer_s=0.25),
         StageTimes(queue_s=0.1, transfer_s=0.85, decode_s=0.5), 0.05, (0.0, 0.2, 0.5, 0.3, 0.5)),
        # the prefill leg has not told yet: all pages had come 0.8 s after they were granted, on their way for 0.2 s
        (101.0, None, StageTimes(queue_s=0.1, transfer_s=0.8), 0.2, (0.0, 0.2, 0.6, 0.2, 0.0)),
        # the KV transfer failed: the decode replica tells what it waited and computed
        (101.5, StageTimes(queue_s=0.2, prefill_s=0.5),
         StageTimes(queue_s=0.1, prefill_s=0.4, transfer_s=0.3, decode_s=0.5), None, (0.0, 0.3, 0.4, 0.3, 0.5)),
    ],
)  # fmt: skip
def test_of_a_kv_transfer_both_legs_tell(
    ended_s: float, prefill: StageTimes | None, own: StageTimes, came_s: float | None, wanted: tuple[float, ...]
) -> None:
    """Sent 100.0, first token 101.0."""
    timeline, leg = line(), LegTimes()
    timeline.sent(leg, 100.0)
    timeline.saw(delta(1), 101.0)
    timeline.saw(delta(1, LENGTH), ended_s)
    leg.prefill, leg.came_s = prefill, came_s
    leg.tell(own)
    timeline.end(ended_s)
    assert rounded(stages(timeline)) == wanted


def test_stages_of_a_request_that_runs_end_with_what_is_known() -> None:
    """Sent 100.1; first token 100.6 with the engine's times; while it waits the queue grows, then decode does."""
    timeline, leg = line(), LegTimes()
    timeline.sent(leg, 100.1)
    assert rounded(timeline.stages_so_far) == (0.1, 0.0, 0.0, 0.0, 0.0)
    leg.tell(StageTimes(queue_s=0.15, prefill_s=0.3))
    timeline.saw(delta(1), 100.6)
    assert rounded(timeline.stages_so_far) == (0.1, 0.2, 0.3, 0.0, 0.0)
    timeline.end(101.0)  # the client has left
    assert timeline.stages is None
    assert rounded(timeline.stages_so_far) == (0.1, 0.2, 0.3, 0.0, 0.4)


def test_tries_that_brought_no_token_are_route_and_what_follows_the_first_token_is_decode() -> None:
    """The first try dies at 101, the second brings a token at 103 and dies, the third ends it at 106."""
    timeline, lost, second, third = line(), LegTimes(), LegTimes(), LegTimes()
    timeline.sent(lost, 100.0)
    timeline.sent(second, 101.0)
    timeline.saw(delta(1), 103.0)
    timeline.sent(third, 105.0)
    timeline.saw(delta(2, LENGTH), 106.0)
    third.tell(StageTimes(queue_s=0.1, prefill_s=0.9))
    timeline.end(106.0)
    assert rounded(stages(timeline)) == (1.0, 2.0, 0.0, 0.0, 3.0)  # nobody told of the second's prefill


def test_what_a_request_waited_for_others_while_it_ran_is_told_at_its_end() -> None:
    leg = LegTimes()
    for passed_s, decode_s in ((0.1, 0.0), (0.4, 9.0)):  # with its first token, and its last
        leg.tell(StageTimes(queue_s=0.15, prefill_s=0.3, decode_s=decode_s, passed_s=passed_s))
    assert leg.own is not None
    assert leg.own.passed_s == 0.4


def test_of_several_choices_the_one_that_came_first_counts() -> None:
    timeline, leg = line(2), LegTimes()
    timeline.sent(leg, 100.0)
    for stage in (StageTimes(queue_s=2.0, prefill_s=0.5), StageTimes(queue_s=0.0, prefill_s=1.0)):
        leg.tell(stage)
    timeline.saw(delta(1, LENGTH, index=1), 101.0)
    assert timeline.stages is None
    timeline.saw(delta(1, LENGTH, index=0), 103.0)
    assert timeline.stages is None  # it has not ended
    timeline.end(103.0)
    assert rounded(stages(timeline)) == (0.0, 0.0, 1.0, 0.0, 2.0)


def test_a_request_that_never_came_to_its_end_has_a_total_and_no_stages() -> None:
    timeline = line()
    timeline.sent(LegTimes(), 100.0)
    timeline.saw(delta(1), 100.5)
    timeline.end(102.0)
    assert (timeline.total_s, timeline.stages, timeline.is_whole) == (2.0, None, False)


def test_gaps_are_told_per_token_and_the_first_delta_has_none() -> None:
    """Three tokens at once after 0.3 s are three gaps of 0.1 s; the mean over the answer counts four tokens after
    the first delta's first."""
    gaps: list[tuple[float, int]] = []
    arrival = Arrival(endpoint="chat", arrived_s=0.0)
    timeline = Timeline(arrival, num_choices=1, on_gap=lambda gap_s, times: gaps.append((round(gap_s, 6), times)))
    for num_tokens, now_s in ((2, 1.0), (3, 1.3), (0, 1.4), (1, 1.5)):
        timeline.saw(delta(num_tokens), now_s)
    assert gaps == [(0.1, 3), (0.2, 1)]
    assert timeline.num_output == 6
    assert timeline.mean_itl_s == pytest.approx(0.5 / 5)


seconds = st.floats(0.0, 1e4)
stage_times = st.builds(StageTimes, queue_s=seconds, prefill_s=seconds, transfer_s=seconds, decode_s=seconds)


@given(
    moments=st.lists(seconds, min_size=4, max_size=4).map(sorted),
    own=st.none() | stage_times,
    before=st.none() | stage_times,
    came_s=st.none() | seconds,
)
def test_stages_sum_to_the_total_whatever_the_engines_say(
    moments: list[float], own: StageTimes | None, before: StageTimes | None, came_s: float | None
) -> None:
    """Their clocks are not the router's, and a word can be missing."""
    arrived_s, sent_s, first_s, ended_s = moments
    timeline = Timeline(Arrival(endpoint="chat", arrived_s=arrived_s), num_choices=1)
    timeline.sent(LegTimes(own=own, prefill=before, came_s=came_s), sent_s)
    timeline.saw(delta(1, LENGTH), first_s)
    timeline.end(ended_s)
    timeline.check()
    assert timeline.stages is not None
