"""Messages between transfer services: what goes in comes out, and nothing else comes in (SPEC H03, H12)."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import BadMessage
from kvtransfer.peers.wire import (
    Abort,
    Ack,
    Bye,
    Challenge,
    ChallengeReply,
    Drained,
    Fail,
    Frames,
    Message,
    Open,
    PeerHello,
    Ping,
    Posted,
    Welcome,
    decode,
    decode_meta,
    encode,
    encode_meta,
)
from kvtransfer.ports.rank_port import RankInfo
from kvtransfer.types import KVTransferMeta, PeerAddress
from tests.kv_pools import layout

HELLO = PeerHello(
    address=PeerAddress(host="10.0.0.1", port=5, incarnation="i"),
    purpose="rooms",
    layout=layout(2),
    ranks=(RankInfo(rank=0, agent="a", metadata=b"\x00\xff", base_address=2**47, num_pages=9, device=0),),
)
OPEN = Open(room=2**63 - 1, generation=1, num_tokens=9, first_page=1, pages=(4, 2), deadline_s=1.5)
MESSAGES: list[Message] = [
    Challenge(nonce="n", address=HELLO.address),
    ChallengeReply(nonce="n", address=HELLO.address, mac="m"),
    Welcome(mac="m"),
    HELLO,
    OPEN,
    replace(OPEN, pages=()),
    Abort(room=1, generation=0),
    Ack(room=1, generation=0),
    Fail(room=1, generation=0, reason="é", drained=True),
    Drained(room=1, generation=0),
    Posted(),
    Ping(),
    Bye(),
]
META = KVTransferMeta(
    rid="r",
    fingerprint="f",
    prompt_len=9,
    token_range=(4, 9),
    cached_prefix_len=4,
    first_token=3,
    first_logprob=(-0.25, ((3, -0.25), (8, -1.5))),
    cached_tokens={"device": 4},
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: Message) -> None:
    assert decode(encode(message)[4:]) == message


def test_a_stream_cut_anywhere_gives_the_same_messages() -> None:
    stream = b"".join(encode(message) for message in MESSAGES)
    for size in (1, 3, 7, len(stream)):
        frames = Frames(10_000)
        heard = []
        for at in range(0, len(stream), size):
            frames.feed(stream[at : at + size])
            heard += [decode(body) for body in frames]
        assert heard == MESSAGES


def test_a_frame_that_is_too_long_is_refused_by_its_first_four_bytes() -> None:
    frames = Frames(1024)
    frames.feed((1025).to_bytes(4, "big"))
    with pytest.raises(BadMessage, match="1025 bytes, at most 1024"):
        list(frames)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"v": 2}, "version 1 is wanted"),
        ({"t": "exec"}, "no known type"),
        ({"room": "1"}, "Open.room: .*int.* is wanted, there is str"),
        ({"room": True}, "Open.room"),
        ({"room": 2**63}, "Open.room"),
        ({"pages": [1, 2.0]}, "Open.pages"),
        ({"pages": {"0": 1}}, "Open.pages"),
        ({"deadline_s": None}, "Open.deadline_s"),
        ({"extra": 1}, "an object of"),
    ],
)
def test_what_is_not_a_message_is_refused_by_name(change: dict[str, object], says: str) -> None:
    body = json.loads(encode(OPEN)[4:]) | change
    with pytest.raises(BadMessage, match=says):
        decode(json.dumps(body).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"{", b'{"v":1,"t":"ping","x":NaN}', b"[" * 100_000])
def test_bytes_that_are_no_json_object_are_refused(data: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(data)


def test_a_hello_whose_heads_do_not_split_is_refused() -> None:
    body = json.loads(encode(HELLO)[4:])
    body["layout"]["tp"] = 4
    with pytest.raises(BadMessage, match="6 KV heads do not split by tp = 4"):
        decode(json.dumps(body).encode())
    body["layout"]["tp"] = 0
    with pytest.raises(BadMessage):
        decode(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("where", "field", "value"),
    [
        ("layout", "tp", -1),
        ("layout", "page_size", 0),
        ("layout", "num_layers", 2**31),
        ("ranks", "num_pages", 2**62),
        ("ranks", "num_pages", 0),
        ("ranks", "base_address", -1),
        ("ranks", "rank", 2**31),
        ("ranks", "device", -1),
    ],
)
def test_a_hello_with_numbers_that_cannot_be_is_refused(where: str, field: str, value: int) -> None:
    body = json.loads(encode(HELLO)[4:])
    (body["ranks"][0] if where == "ranks" else body["layout"])[field] = value
    with pytest.raises(BadMessage, match=str(value)):
        decode(json.dumps(body).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_bad_and_nothing_worse(data: bytes) -> None:
    try:
        decode(data)
    except BadMessage:
        return


def test_meta_comes_out_as_it_went_in_and_another_version_is_refused() -> None:
    assert decode_meta(encode_meta(META)) == META
    assert decode_meta(encode_meta(replace(META, first_logprob=None))) == replace(META, first_logprob=None)
    with pytest.raises(BadMessage, match="version 2, 1 is wanted"):
        decode_meta(encode_meta(replace(META, version=2)))
