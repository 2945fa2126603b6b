"""The bytes of a notification."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import BadMessage
from kvtransfer.ports.notifications import VERSION, Note, pack, unpack


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
    data[3] = VERSION + 1
    with pytest.raises(BadMessage, match="run the same release everywhere"):
        unpack(bytes(data))


@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(BadMessage):
        unpack(data)
