"""Messages and notes between transfer services: what goes in comes out, and nothing else comes in (SPEC H03, H12)."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import BadMessage
from kvtransfer.peers.wire import (
    VERSION,
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
from kvtransfer.ports import notifications
from kvtransfer.ports.notifications import Note, pack, unpack
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
    msgspec.structs.replace(OPEN, pages=()),
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


def body_of(message: Message) -> dict[str, Any]:
    return json.loads(encode(message)[5:])  # type: ignore[no-any-return]


def refused(body: object) -> str:
    """What `decode` says of a message with this body."""
    with pytest.raises(BadMessage) as error:
        decode(bytes([VERSION]) + json.dumps(body).encode())
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"t": "exec"}, "exec"),
        ({"room": "1"}, "Expected `int`, got `str` - at `$.room`"),
        ({"room": True}, "$.room"),
        ({"room": 2**63}, "$.room"),
        ({"room": -1}, "$.room"),
        ({"generation": 2**32}, "$.generation"),
        ({"generation": -1}, "$.generation"),
        ({"first_page": -1}, "$.first_page"),
        ({"num_tokens": 2**31}, "$.num_tokens"),
        ({"pages": [1, 2.5]}, "$.pages[1]"),
        ({"pages": [1, -1]}, "$.pages[1]"),
        ({"pages": {"0": 1}}, "$.pages"),
        ({"deadline_s": None}, "$.deadline_s"),
        ({"deadline_s": -1.0}, "$.deadline_s"),
        ({"extra": 1}, "unknown field `extra`"),
    ],
)
def test_what_is_not_a_message_is_refused_by_name(change: dict[str, object], says: str) -> None:
    assert says in refused(body_of(OPEN) | change)


@pytest.mark.parametrize("body", [body_of(OPEN) | {"reason": "\ud800"}, body_of(MESSAGES[8]) | {"reason": "\ud800"}])
def test_half_a_character_is_refused(body: object) -> None:
    refused(body)


def test_a_message_of_another_version_is_refused_and_the_error_says_what_to_do() -> None:
    for data in (b"\x01{}", b'{"v":1,"t":"ping"}'):
        with pytest.raises(BadMessage, match=f"version {data[0]}, {VERSION} is wanted: run the same release"):
            decode(data)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"{", b'{"t":"ping","x":NaN}', b'{"t":"ping"}{}', b"[" * 99_999])
def test_bytes_that_are_no_json_object_are_refused(data: bytes) -> None:
    for whole in (data, bytes([VERSION]) + data):
        with pytest.raises(BadMessage):
            decode(whole)


@pytest.mark.parametrize(
    ("where", "field", "value", "says"),
    [
        ("layout", "tp", 4, "6 KV heads do not split by tp = 4"),
        ("layout", "tp", 0, "tp = 0"),
        ("layout", "tp", -1, "-1"),
        ("layout", "page_size", 0, "page_size = 0"),
        ("layout", "num_layers", 2**31, str(2**31)),
        ("ranks", "num_pages", 2**62, str(2**62)),
        ("ranks", "num_pages", 0, "0 pages"),
        ("ranks", "base_address", -1, "-1"),
        ("ranks", "base_address", 2**63, str(2**63)),
        ("ranks", "rank", 2**31, str(2**31)),
        ("ranks", "device", -1, "-1"),
        ("ranks", "metadata", "no base64!", "$.ranks[0].metadata"),
        ("address", "port", 2**16, "$.address.port"),
        ("address", "port", -1, "$.address.port"),
    ],
)
def test_a_hello_with_values_that_cannot_be_is_refused(where: str, field: str, value: object, says: str) -> None:
    body = body_of(HELLO)
    (body["ranks"][0] if where == "ranks" else body[where])[field] = value
    assert says in refused(body)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_bad_and_nothing_worse(data: bytes) -> None:
    try:
        decode(data)
    except BadMessage:
        return


def test_meta_comes_out_as_it_went_in_and_another_version_is_refused() -> None:
    assert decode_meta(encode_meta(META)) == META
    assert decode_meta(encode_meta(replace(META, first_logprob=None))) == replace(META, first_logprob=None)
    with pytest.raises(BadMessage, match=f"version 9, {VERSION} is wanted"):
        decode_meta(b"\x09" + encode_meta(META)[1:])


@pytest.mark.parametrize("change", [{"prompt_len": -1}, {"token_range": [1]}, {"first_token": "3"}, {"rid": None}])
def test_meta_with_a_value_that_cannot_be_is_refused_by_name(change: dict[str, object]) -> None:
    body = json.loads(encode_meta(META)[1:]) | change
    with pytest.raises(BadMessage, match=next(iter(change))):
        decode_meta(bytes([VERSION]) + json.dumps(body).encode())


def note_of(num_pages: int, meta: bytes = b"") -> Note:
    return Note(
        room=2**63 - 1,
        generation=3,
        src_rank=2,
        page_offset=16,
        num_pages=num_pages,
        last=True,
        digests=np.arange(num_pages, dtype=np.uint64) + np.uint64(2**63),
        meta=meta,
    )


@pytest.mark.parametrize("num_pages", [0, 1, 32])
def test_a_note_comes_back_as_it_was(num_pages: int) -> None:
    note = note_of(num_pages, b'{"rid": "a"}')
    got = unpack(pack(note))
    assert (got.room, got.generation, got.src_rank, got.page_offset) == (2**63 - 1, 3, 2, 16)
    assert (got.num_pages, got.last, got.meta) == (num_pages, True, b'{"rid": "a"}')
    np.testing.assert_array_equal(got.digests, note.digests)


def test_every_changed_byte_is_refused() -> None:
    data = pack(note_of(2, b"meta"))
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1
        with pytest.raises(BadMessage):
            unpack(bytes(changed))


def test_every_shortened_note_is_refused() -> None:
    data = pack(note_of(2, b"meta"))
    for length in range(len(data)):
        with pytest.raises(BadMessage):
            unpack(data[:length])


def test_another_version_says_what_to_do() -> None:
    data = bytearray(pack(note_of(1)))
    data[3] = notifications.VERSION + 1
    with pytest.raises(BadMessage, match="run the same release everywhere"):
        unpack(bytes(data))


@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(BadMessage):
        unpack(data)
