"""The messages between a replica and a router, and their bytes."""

import dataclasses
import math
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.channel.frames import (
    LENGTH,
    MAX_FRAME_BYTES,
    BadFrame,
    CacheChanges,
    CacheKeys,
    ChannelHello,
    Deltas,
    EndRequest,
    FrameReader,
    Message,
    ReplicaReport,
    RunRequest,
    decode,
    decode_asked,
    encode,
)
from kvtransfer.pages import PageKeys, Tier
from kvtransfer.types import PdTicket, PeerAddress, TransferStats
from replicas.cache.events import CacheSnapshot, EventLog, PagesStored
from replicas.errors import Fault
from replicas.types import (
    Finish,
    FinishReason,
    GenerateRequest,
    PdLeg,
    PdTransfer,
    PdTransferReport,
    SamplingParams,
    StageTimes,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from routing.types import IndexEvent, KeysCleared
from tests.unit.deployments.sample_values import stats

DELTA = TokenDelta(
    rid="a1.0-é\ud7ff",
    index=2,
    token_ids=(5, 7),
    text="naïve 🙂\n",
    logprobs=(TokenLogprob(token_id=5, logprob=-0.5, top=((5, -0.5), (9, -math.inf))),),
    prompt_logprobs=(TokenLogprob(token_id=1, logprob=None), TokenLogprob(token_id=3, logprob=-2.0, rank=7)),
    usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1, num_retractions=4),
    finish=Finish(reason=FinishReason.STOP, matched="\n", message=None, fault=None),
    stages=StageTimes(queue_s=0.5, prefill_s=0.25, transfer_s=0.125, decode_s=2.0),
)
FAILED = PdTransferReport(
    transferred=False, reason="digest of page 3 is wrong", num_pages=7, num_bytes=1 << 33, grant_s=0.1, wait_s=0.25,
    transfer_s=0.125,
)  # fmt: skip
FINISHES = [
    Finish(reason=FinishReason.STOP, matched=7),
    Finish(reason=FinishReason.HANDED_OFF),
    Finish(reason=FinishReason.ERROR, message="no", fault=Fault.UNAVAILABLE, retry_as="overloaded"),
    Finish(reason=FinishReason.ERROR, message="no", fault=Fault.UNAVAILABLE, retry_as="engine_dead"),
    Finish(reason=FinishReason.ERROR, message="no", fault=Fault.INTERNAL, retry_as="step_failed"),
    Finish(reason=FinishReason.ERROR, message="no", fault=Fault.UNAVAILABLE, retry_as="died_in_step"),
    Finish(reason=FinishReason.ABORT, message="aborted", fault=Fault.CANCELLED),
]
TRANSFER = TransferStats(rooms_receiving=2, sent_bytes=1 << 40, oldest_drain_s=1.5)
REPORT = ReplicaReport(stats=stats(), error="rank 1 died", num_open=3, age_s=0.25, step_age_s=1.5)


def received(message: Message) -> Message:
    [body] = FrameReader().feed(encode(message))
    return decode(body)


@pytest.mark.parametrize(
    "message",
    [
        ChannelHello(token="secret", replica_id="r0"),
        Deltas([]),
        Deltas([DELTA, dataclasses.replace(DELTA, kv_transfer=FAILED), *(dataclasses.replace(DELTA, finish=each)
                for each in FINISHES)]),
        REPORT,
        ReplicaReport(stats=dataclasses.replace(stats(), num_receiving=2, transfer=TRANSFER), error=None, num_open=0),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    assert received(message) == message


def test_a_request_comes_back_as_it_was_and_token_ids_of_another_size_are_refused() -> None:
    """Every kind of value that it can hold; arrays make requests incomparable as they are."""
    sampling = SamplingParams(
        seed=2**64 - 1, n=3, stop=("é", "\0"), stop_token_ids=(7,), logit_bias=((3, -1.5),), bad_words=((1, 2), (3,)),
        allowed_token_ids=(1, 2), top_k=5,
    )  # fmt: skip
    ticket = PdTicket(room=2**63 - 1, generation=1, prefill=PeerAddress(host="h", port=1, incarnation="i"))
    request = GenerateRequest(
        rid="a.0-b", token_ids=np.array([0, 1, 2**31 - 1], dtype=np.int32), sampling=sampling, cache_salt="\0k\0",
        deadline_s=1.5, waited_s=2.5, resumed_ids=(4, 5), prompt_logprobs_from=0,
        kv_transfer=PdTransfer(leg=PdLeg.DECODE, ticket=ticket),
    )  # fmt: skip
    [body] = FrameReader().feed(encode(RunRequest(request)))
    found = decode_asked(body)
    assert isinstance(found, RunRequest)
    assert found.request.token_ids.tolist() == [0, 1, 2**31 - 1]
    assert found.request.token_ids.dtype == np.int32
    assert dataclasses.asdict(found.request) | {"token_ids": 0} == dataclasses.asdict(request) | {"token_ids": 0}
    sent = msgspec.msgpack.decode(body)
    for ids in (b"\1\0\0", [1, 2]):
        sent["request"]["token_ids"] = ids
        with pytest.raises(BadFrame, match="whole numbers of 4 bytes"):
            decode_asked(msgspec.msgpack.encode(sent))


def test_what_goes_one_way_is_refused_the_other_way() -> None:
    [body] = FrameReader().feed(encode(EndRequest("a.0-b")))
    assert decode_asked(body) == EndRequest("a.0-b")
    with pytest.raises(BadFrame, match="Invalid value 'end'"):
        decode(body)
    with pytest.raises(BadFrame, match="Invalid value 'report'"):
        decode_asked(encode(REPORT)[LENGTH.size :])


def test_a_report_can_be_the_answer_of_a_ray_call() -> None:
    assert pickle.loads(pickle.dumps(REPORT)) == REPORT


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 7))
def test_frames_do_not_depend_on_how_the_stream_is_cut(bodies: list[bytes], size: int) -> None:
    data = b"".join(LENGTH.pack(len(body)) + body for body in bodies)
    reader = FrameReader()
    assert [body for i in range(0, len(data), size) for body in reader.feed(data[i : i + size])] == bodies


def test_an_absurd_length_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(BadFrame, match="is announced; at most"):
        list(FrameReader().feed(LENGTH.pack(MAX_FRAME_BYTES + 1)))


def plain(message: Message, **changes: Any) -> dict[str, Any]:
    """``message`` as a map, with fields changed."""
    return {**msgspec.msgpack.decode(encode(message)[LENGTH.size :]), **changes}


ONE = plain(Deltas([DELTA]))["deltas"][0]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"type": "goodbye"}, r"Invalid value 'goodbye' - at `\$.type`"),
        ({"type": "hello", "token": "t"}, "missing required field `replica_id`"),
        ({"type": "deltas", "deltas": [{**ONE, "finish": {"reason": "what"}}]}, r"at `\$.deltas\[0\].finish.reason`"),
        (plain(REPORT, num_open=-1), r"Expected `int` >= 0 - at `\$.num_open`"),
        (plain(REPORT, num_open=2**63), r"at `\$.num_open`"),
        (plain(REPORT, age_s=-0.5), r"at `\$.age_s`"),
        (plain(REPORT, mood="good"), "unknown field `mood`"),
        ({"type": "changes", "changes": [["stored", 2**63, b""]]}, r"at `\$.changes\[0\]\[1\]`"),
        ({"type": "keys", "seq": -1, "keys": b""}, r"at `\$.seq`"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_path_and_type(body: object, says: str) -> None:
    with pytest.raises(BadFrame, match=says):
        decode(msgspec.msgpack.encode(body))


@pytest.mark.parametrize("body", [b"", b"{", b"GET / HTTP/1.1\r\n", encode(REPORT)[LENGTH.size : -1]])
def test_what_is_no_message_is_a_bad_frame(body: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(body)


KEYS = st.lists(st.integers(0, 2**64 - 1), max_size=5).map(lambda keys: np.array(keys, dtype=np.uint64))
KINDS = st.sampled_from(["KeysStored", "KeysRemoved", "KeysCleared"])


@given(st.lists(st.tuples(KINDS, KEYS, st.sampled_from(list(Tier))), max_size=6))
def test_cache_events_come_back_with_their_numbers_kinds_keys_and_tiers(
    wanted: list[tuple[str, PageKeys, Tier]],
) -> None:
    log = EventLog()
    for kind, keys, tier in wanted:
        if kind == "KeysStored":
            log.stored(keys, None, 16, np.empty(0, dtype=np.int32), tier)
        elif kind == "KeysRemoved":
            log.removed(keys, tier)
        else:
            log.cleared()
    message = received(CacheChanges.of(log.drain()))
    assert isinstance(message, CacheChanges)
    assert [described(event) for event in message.events()] == [
        (kind, seq, *((keys.tolist(), tier) if kind != "KeysCleared" else ()))
        for seq, (kind, keys, tier) in enumerate(wanted, 1)
    ]


def described(event: IndexEvent) -> tuple[Any, ...]:
    told = () if isinstance(event, KeysCleared) else (event.keys.tolist(), event.tier)
    return type(event).__name__, event.seq, *told


def run_of(keys: list[int], tier: Tier = Tier.DEVICE) -> PagesStored:
    none = np.empty(0, np.int32)
    return PagesStored(
        seq=7, keys=np.array(keys, np.uint64), parent_key=None, page_size=16, token_ids=none, tier=tier
    )


@pytest.mark.parametrize("runs", [[[1, 2, 2**64 - 1], [9]], [[]], []])
def test_a_snapshot_is_eight_bytes_a_page_and_less_than_32_more(runs: list[list[int]]) -> None:
    message = CacheKeys.of(CacheSnapshot(seq=7, stored=tuple(map(run_of, runs))))
    flat = [key for run in runs for key in run]
    assert len(encode(message)) < 8 * len(flat) + 32
    back = received(message)
    assert isinstance(back, CacheKeys)
    assert (back.snapshot().seq, back.snapshot().keys.tolist()) == (7, flat)


def test_a_snapshot_tells_the_keys_of_each_tier() -> None:
    tiers = [Tier.HOST, Tier.DEVICE, Tier.STORE, Tier.HOST, Tier.DEVICE]
    stored = [run_of([key], tier) for key, tier in enumerate(tiers)]
    back = received(CacheKeys.of(CacheSnapshot(seq=7, stored=tuple(stored))))
    assert isinstance(back, CacheKeys)
    snapshot = back.snapshot()
    assert [each.tolist() for each in (snapshot.keys, snapshot.host_keys, snapshot.store_keys)] == [[1, 4], [0, 3], [2]]


@pytest.mark.parametrize("num_bytes", [1, 7, 12])
def test_page_keys_that_are_not_whole_are_a_bad_frame(num_bytes: int) -> None:
    keys = memoryview(bytes(num_bytes))
    with pytest.raises(BadFrame, match=f"{num_bytes} bytes of page keys; each has 8"):
        CacheKeys(seq=1, keys=keys).snapshot()
    body = decode(msgspec.msgpack.encode({"type": "changes", "changes": [["stored", 1, bytes(num_bytes)]]}))
    assert isinstance(body, CacheChanges)
    with pytest.raises(BadFrame, match="page keys"):
        body.events()
