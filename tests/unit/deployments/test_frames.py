"""What travels between replica and router."""

import dataclasses
import math
import struct
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.channel.frames import (
    MAX_FRAME_BYTES,
    BadFrame,
    FrameKind,
    FrameReader,
    Hello,
    ReplicaReport,
    decode_deltas,
    decode_hello,
    decode_report,
    encode_deltas,
    encode_frame,
    encode_hello,
    encode_report,
)
from kvtransfer.types import TransferStats
from replicas.types import Finish, FinishReason, HandOffReport, StageTimes, TokenDelta, TokenLogprob, Usage
from tests.unit.deployments.sample_values import stats

DELTA = TokenDelta(
    rid="a1.0-é\ud7ff",
    index=2,
    token_ids=(5, 7),
    text="naïve 🙂\n",
    logprobs=(TokenLogprob(token_id=5, logprob=-0.5, top=((5, -0.5), (9, -math.inf))),),
    prompt_logprobs=(TokenLogprob(token_id=1, logprob=None), TokenLogprob(token_id=3, logprob=-2.0, rank=7)),
    usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1, num_retractions=4),
    finish=Finish(reason=FinishReason.STOP, matched="\n", message=None, http_status=200),
    stages=StageTimes(queue_s=0.5, prefill_s=0.25, transfer_s=0.125, decode_s=2.0),
)


def frames(data: bytes) -> list[tuple[FrameKind, bytes]]:
    return list(FrameReader().feed(data))


def test_deltas_come_back_as_they_were() -> None:
    [(kind, payload)] = frames(encode_deltas([DELTA, DELTA]))
    assert kind is FrameKind.DELTAS
    assert decode_deltas(payload) == [DELTA, DELTA]


def test_what_became_of_a_hand_off_travels_with_the_first_token() -> None:
    report = HandOffReport(
        transferred=False, reason="digest of page 3 is wrong", num_pages=7, num_bytes=1 << 33, grant_s=0.1, wait_s=0.25,
        transfer_s=0.125,
    )  # fmt: skip
    ended = dataclasses.replace(DELTA, hand_off=report, finish=Finish(reason=FinishReason.HANDED_OFF))
    [(_, payload)] = frames(encode_deltas([ended, DELTA]))
    assert decode_deltas(payload) == [ended, DELTA]


def test_a_report_tells_of_the_desk_where_there_is_one() -> None:
    desk = TransferStats(rooms_receiving=2, sent_bytes=1 << 40, oldest_drain_s=1.5)
    for transfer in (None, desk):
        report = ReplicaReport(
            stats=dataclasses.replace(stats(), num_receiving=2, transfer=transfer), error=None, num_open=3, age_s=0.5
        )
        [(_, payload)] = frames(encode_report(report))
        assert decode_report(payload) == report


@pytest.mark.parametrize("retry_as", ["overloaded", "engine_dead", None])
def test_a_finish_keeps_whether_another_replica_may_mend_it(
    retry_as: Literal["overloaded", "engine_dead"] | None,
) -> None:
    finish = Finish(reason=FinishReason.ERROR, message="no", http_status=503, retry_as=retry_as)
    [(_, payload)] = frames(encode_deltas([dataclasses.replace(DELTA, finish=finish)]))
    assert decode_deltas(payload)[0].finish == finish


def test_a_report_and_a_hello_come_back_as_they_were() -> None:
    report = ReplicaReport(stats=stats(), error="rank 1 died", num_open=3, age_s=0.25)
    hello = Hello(token="secret", replica_id="r0")
    [(_, first), (_, second)] = frames(encode_hello(hello) + encode_report(report))
    assert decode_hello(first) == hello
    assert decode_report(second) == report


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 7))
def test_frames_do_not_depend_on_how_the_stream_is_cut(payloads: list[bytes], size: int) -> None:
    data = b"".join(encode_frame(FrameKind.DELTAS, payload) for payload in payloads)
    reader = FrameReader()
    found = [frame for i in range(0, len(data), size) for frame in reader.feed(data[i : i + size])]
    assert [payload for _, payload in found] == payloads


def test_an_absurd_length_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(BadFrame, match="is announced; at most"):
        frames(struct.pack("<IB", MAX_FRAME_BYTES + 1, FrameKind.DELTAS))


@pytest.mark.parametrize("data", [struct.pack("<IB", 0, 99)])
def test_an_unknown_kind_is_refused(data: bytes) -> None:
    with pytest.raises(BadFrame, match="frame kind 99 is unknown"):
        frames(data)


UNKNOWN_REASON = b'[["a",0,[],"",[1,1,1,0],["what",null,null,1,null],[],[]]]'


@pytest.mark.parametrize("payload", [b"[[1]]", b"{", b"[1]", UNKNOWN_REASON])
def test_what_is_not_deltas_is_a_bad_frame(payload: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_deltas(payload)
