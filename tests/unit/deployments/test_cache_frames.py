"""Cache events and snapshots over the wire."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.channel.cache_frames import decode_events, decode_snapshot, encode_events, encode_snapshot
from deployments.channel.frames import BadFrame, FrameKind, FrameReader
from kvtransfer.pages import PageKeys
from replicas.cache.events import CacheSnapshot, EventLog, PagesStored
from routing.types import IndexEvent, KeysCleared, KeysRemoved, KeysStored

KEYS = st.lists(st.integers(0, 2**64 - 1), max_size=5).map(lambda keys: np.array(keys, dtype=np.uint64))


def payload(frame: bytes) -> tuple[FrameKind, bytes]:
    [found] = FrameReader().feed(frame)
    return found


def plain(event: IndexEvent) -> tuple[str, int, list[int]]:
    keys = [] if isinstance(event, KeysCleared) else [int(key) for key in event.keys]
    return type(event).__name__, event.seq, keys


@given(st.lists(st.tuples(st.sampled_from(["stored", "removed", "cleared"]), KEYS), max_size=6))
def test_events_come_back_with_their_numbers_kinds_and_keys(wanted: list[tuple[str, PageKeys]]) -> None:
    log = EventLog()
    for kind, keys in wanted:
        if kind == "stored":
            log.stored(keys, None, 16, np.empty(0, dtype=np.int32))
        elif kind == "removed":
            log.removed(keys)
        else:
            log.cleared()
    kind_, data = payload(encode_events(log.drain()))
    assert kind_ is FrameKind.EVENTS
    names = {"stored": KeysStored.__name__, "removed": KeysRemoved.__name__, "cleared": KeysCleared.__name__}
    expected = [
        (names[kind], seq, [] if kind == "cleared" else keys.tolist()) for seq, (kind, keys) in enumerate(wanted, 1)
    ]
    assert [plain(event) for event in decode_events(data)] == expected


def test_a_snapshot_is_eight_bytes_a_page_and_eight_more() -> None:
    tokens = np.empty(0, dtype=np.int32)
    runs = [np.array(run, dtype=np.uint64) for run in ([1, 2, 2**64 - 1], [9])]
    stored = tuple(PagesStored(seq=7, keys=run, parent_key=None, page_size=16, token_ids=tokens) for run in runs)
    kind, data = payload(encode_snapshot(CacheSnapshot(seq=7, stored=stored)))
    assert (kind, len(data)) == (FrameKind.SNAPSHOT, 8 + 4 * 8)
    snapshot = decode_snapshot(data)
    assert (snapshot.seq, snapshot.keys.tolist()) == (7, [1, 2, 2**64 - 1, 9])


@pytest.mark.parametrize("data", [b"", b"\x01\0\0\0", b"\x01\0\0\0" + bytes(13) + b"x", b"\0\0\0\0" + bytes(8)])
def test_events_whose_lengths_do_not_add_up_are_a_bad_frame(data: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_events(data)


def test_an_unknown_kind_of_event_is_a_bad_frame() -> None:
    with pytest.raises(BadFrame, match="event kind 0 is unknown"):
        decode_events(b"\x01\0\0\0" + bytes(13))


@pytest.mark.parametrize("data", [b"", bytes(7), bytes(12)])
def test_a_snapshot_of_broken_keys_is_a_bad_frame(data: bytes) -> None:
    with pytest.raises(BadFrame):
        decode_snapshot(data)
