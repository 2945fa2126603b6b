"""One room on the prefill side, in every order of things, and the states of a room (SPEC H02, H08, H15, H19)."""

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvtransfer.peers.wire import Drained, Fail, Open, ToReceiver
from kvtransfer.ports.rank_port import PeerRanks, RankInfo, WriteOrder, Written
from kvtransfer.rooms.sender import KVSender
from kvtransfer.rooms.sending import SendingRooms
from kvtransfer.rooms.transfer_service import LEGAL_MOVES, KVPoll, move
from kvtransfer.types import (
    Prefix,
    SendDone,
    SendDrained,
    SendFailed,
    SendOrder,
    SendReady,
    TransferEvent,
    TransferSettings,
    WriteTimes,
)
from tests.kv_pools import layout, page_ids

ORDER = SendOrder(room=1, generation=2, rid="r", num_tokens=20, deadline_s=10.0)
OPEN = Open(room=1, generation=2, num_tokens=20, first_page=1, pages=(8, 9, 6, 7), deadline_s=30.0)
DRAINED = Drained(room=1, generation=2)


class Case:
    """A room and all that it says; order ids are 1, 2, ..."""

    def __init__(self) -> None:
        self.events: list[TransferEvent] = []
        self.sent: list[ToReceiver] = []
        self.room = KVSender(1, 2, events=self.events, send=lambda _, message: self.sent.append(message))
        self.last_order = 0

    def ready(self) -> "Case":
        self.room.expect(ORDER, 0.0)
        self.open()
        return self

    def open(self, now: float = 0.0) -> None:
        self.room.opened("d", OPEN, now, wait_s=5.0, slack_s=1.0)

    def post(self, limit: int = 2) -> int:
        self.last_order += 1
        self.room.take_write(self.last_order, limit)
        self.room.check()
        return self.last_order

    def all_posted(self) -> "Case":
        """Both writes of two pages are on their way."""
        self.ready()
        self.room.send(1, page_ids(1, 2, 3, 4), b"meta")
        self.post()
        self.post()
        return self


FAILED = SendFailed(room=1, reason="x")


@pytest.mark.parametrize("leg_first", [True, False])
def test_it_is_ready_when_both_legs_are_there_in_any_order(leg_first: bool) -> None:
    case = Case()
    if leg_first:
        case.room.expect(ORDER, 0.0)
        assert case.events == []
        case.open()
    else:
        case.open()
        assert case.events == []
        case.room.expect(ORDER, 0.0)
    assert case.events == [SendReady(room=1, first_page=1)]
    assert case.room.state == KVPoll.WAITING_FOR_INPUT


def test_pages_go_in_writes_of_the_limit_and_the_meta_goes_with_the_last() -> None:
    case = Case().ready()
    case.room.send(1, page_ids(1, 2, 3))
    first = case.room.take_write(1, 2)
    second = case.room.take_write(2, 2)
    assert not case.room.has_write  # what is last is not known yet
    case.room.send(4, page_ids(4), b"meta")
    third = case.room.take_write(3, 2)
    writes = [
        (w.page_offset, w.src_pages.tolist(), w.dst_pages.tolist(), w.last, w.meta) for w in (first, second, third)
    ]
    assert writes == [
        (0, [1, 2], [8, 9], False, b""),
        (2, [3], [6], False, b""),
        (3, [4], [7], True, b"meta"),
    ]
    assert not case.room.has_write


def test_a_last_send_without_pages_is_a_write_of_its_own() -> None:
    """SPEC H09: zero pages included."""
    case = Case().ready()
    case.room.send(1, page_ids(1, 2, 3, 4))
    case.room.take_write(1, 9)
    case.room.send(5, page_ids(), b"meta")
    last = case.room.take_write(2, 9)
    assert (len(last.src_pages), last.page_offset, last.last, last.meta) == (0, 4, True, b"meta")


@pytest.mark.parametrize("ack_first", [True, False])
def test_it_is_done_when_the_receiver_has_verified_and_all_writes_have_ended(ack_first: bool) -> None:
    """SPEC H15. The acknowledgement may overtake the end of the last write."""
    case = Case().all_posted()
    case.room.written(1, 0.0)
    if ack_first:
        case.room.acked()
        assert SendDone(room=1) not in case.events
        case.room.written(2, 0.0)
    else:
        case.room.written(2, 0.0)
        assert SendDone(room=1) not in case.events
        case.room.acked()
    assert case.events[-1] == SendDone(room=1)
    assert case.room.over
    case.room.check()


def test_after_an_abort_the_source_stays_pinned_until_the_last_write_has_ended() -> None:
    """SPEC H19: no page is freed while a transfer reads it."""
    case = Case().all_posted()
    case.room.aborted()
    assert case.events[-1] == SendFailed(room=1, reason="the receiver gave up")
    case.room.written(1, 0.0)
    assert case.sent == []
    case.room.written(2, 0.0)
    assert case.sent == [DRAINED]
    assert case.events[-1] == SendDrained(room=1)


def test_an_abort_that_comes_twice_is_answered_once_and_fails_once() -> None:
    case = Case().all_posted()
    case.room.aborted()
    case.room.aborted()
    case.room.written(1, 0.0)
    case.room.written(2, 0.0)
    assert case.sent == [DRAINED]
    assert [type(event) for event in case.events] == [SendReady, SendFailed, SendDrained]


def test_what_was_given_but_not_posted_is_never_written_after_a_failure() -> None:
    case = Case().ready()
    case.room.send(1, page_ids(1, 2, 3, 4), b"meta")
    case.post()
    case.room.fail("x")
    assert not case.room.has_write
    assert case.sent == [Fail(room=1, generation=2, reason="x", drained=False)]
    case.room.send(5, page_ids(5))  # the engine does not know yet
    case.room.written(1, 0.0)
    assert case.sent[1:] == [DRAINED]
    assert case.events[1:] == [FAILED, SendDrained(room=1)]


def test_a_failure_with_nothing_on_its_way_is_drained_in_the_same_message() -> None:
    case = Case().ready()
    case.room.fail("x")
    assert case.sent == [Fail(room=1, generation=2, reason="x", drained=True)]
    assert case.events[1:] == [FAILED, SendDrained(room=1)]


def test_a_write_that_failed_and_may_still_be_read_keeps_the_room_draining() -> None:
    case = Case().all_posted()
    case.room.write_failed(1, "no route", drained=False)
    case.room.written(2, 0.0)
    assert not case.room.over
    case.room.write_failed(1, "no route", drained=True)
    assert case.room.over
    assert case.sent[-1] == DRAINED


def test_a_lost_receiver_asks_again_when_it_is_back() -> None:
    case = Case().all_posted()
    case.room.lost("connection reset")
    assert case.sent == []
    case.room.aborted()  # on the new connection
    case.room.written(1, 0.0)
    case.room.written(2, 0.0)
    assert case.sent == [DRAINED]


def test_a_dead_receiver_ends_all_its_writes() -> None:
    case = Case().all_posted()
    case.room.lost("silent")
    assert not case.room.over
    case.room.dead("refused")
    assert [type(event) for event in case.events] == [SendReady, SendFailed, SendDrained]


@pytest.mark.parametrize(
    ("leg", "opened", "at_s", "says"),
    [
        (True, False, 10.0, "the receiver did not open the room in time"),
        (False, True, 5.0, "the request did not reach the prefill replica in time"),
        (True, True, 31.0, "neither acknowledged nor aborted by its deadline"),
    ],
)
def test_every_wait_ends_at_its_deadline_and_not_before(leg: bool, opened: bool, at_s: float, says: str) -> None:
    case = Case()
    if leg:
        case.room.expect(ORDER, 0.0)
    if opened:
        case.open()
    case.room.expire(at_s - 0.01)
    assert not case.room.reason
    case.room.expire(at_s)
    assert says in case.room.reason
    assert case.room.over


def test_the_senders_deadline_stays_behind_the_receivers_which_every_page_moves_on() -> None:
    """The receiver that has a page at 25 s waits until 55 s; the sender 1 s longer."""
    case = Case().ready()
    case.room.send(1, page_ids(1, 2))
    case.post()
    case.room.written(1, 25.0)
    case.room.expire(55.99)
    assert not case.room.reason
    case.room.expire(56.0)
    assert "neither acknowledged nor aborted" in case.room.reason


def test_a_parked_open_that_expires_is_no_event_for_an_engine_without_its_leg() -> None:
    case = Case()
    case.open()
    case.room.expire(5.0)
    assert case.events == []
    assert case.sent == [
        Fail(room=1, generation=2, reason="the request did not reach the prefill replica in time", drained=True)
    ]


def test_legs_that_disagree_about_the_prompt_fail_at_once() -> None:
    case = Case()
    case.room.expect(SendOrder(room=1, generation=2, rid="r", num_tokens=21, deadline_s=10.0), 0.0)
    case.open()
    assert "21 tokens and the decode leg 20" in case.room.reason
    assert [type(event) for event in case.events] == [SendFailed, SendDrained]


@pytest.mark.parametrize(
    ("offset", "num", "last", "says"),
    [
        (0, 1, False, "pages from 0 on, 1 comes next"),
        (2, 1, False, "pages from 2 on, 1 comes next"),
        (1, 5, False, "5 pages, the receiver granted 4"),
        (1, 3, True, "3 pages, the receiver granted 4"),
    ],
)
def test_pages_with_holes_or_beyond_the_grant_fail_the_room(offset: int, num: int, last: bool, says: str) -> None:
    case = Case().ready()
    case.room.send(offset, np.arange(1, num + 1, dtype=np.int32), b"meta" if last else None)
    assert case.room.reason == f"the prefill engine gave {says}"


def test_an_acknowledgement_before_the_end_is_not_believed() -> None:
    case = Case().ready()
    case.room.send(1, page_ids(1))
    case.post()
    case.room.acked()
    assert "pages that were not sent" in case.room.reason


def test_the_numbers_are_those_of_the_specification() -> None:
    """SPEC H02."""
    assert [(state.name, state.value) for state in KVPoll] == [
        ("FAILED", 0),
        ("BOOTSTRAPPING", 1),
        ("WAITING_FOR_INPUT", 2),
        ("TRANSFERRING", 3),
        ("SUCCESS", 4),
    ]


def test_a_room_goes_up_one_state_or_fails_and_all_else_raises() -> None:
    """SPEC H02: monotone."""
    for state, to in itertools.product(KVPoll, KVPoll):
        if to in LEGAL_MOVES[state]:
            assert to in (state + 1, KVPoll.FAILED)
            assert move(state, to) == to
        else:
            with pytest.raises(AssertionError, match=f"from {state.name} to {to.name}"):
                move(state, to)
    assert not LEGAL_MOVES[KVPoll.FAILED]
    assert not LEGAL_MOVES[KVPoll.SUCCESS]


class Port:
    """Of a rank whose writes end when the test says so."""

    def __init__(self) -> None:
        self.posted: list[WriteOrder] = []

    def write(self, order: WriteOrder) -> None:
        self.posted.append(order)


def test_a_donor_whose_requests_decode_copies_for_fetches_in_a_quarter_of_its_time_and_hands_over_meanwhile() -> None:
    """Each write took 0.1 s to copy: no page of a fetch is copied in the 0.3 s after it, unless nobody decodes."""
    port, of = Port(), layout()
    settings = TransferSettings(host="here", token=b"secret", pages_per_write=1)
    rooms = SendingRooms(of, settings, [port], events=[], send=lambda *_: None)  # type: ignore[list-item]
    info = RankInfo(rank=0, agent="a", metadata=b"", base_address=0, num_pages=100, device=0)
    rooms.receiver_up(PeerRanks(incarnation="d", fingerprint=of.fingerprint, tp=1, ranks=(info,)), "")
    ids = np.arange(16, dtype="<i4").tobytes()
    fetch = Open(
        room=1, generation=0, num_tokens=16, first_page=0, pages=(1, 2, 3, 9), deadline_s=9.0,
        prefix=Prefix(salt="", token_ids=ids),
    )  # fmt: skip
    rooms.heard("d", fetch, 0.0)
    rooms.send(1, 0, page_ids(4, 5, 6, 7), b"meta", 0.0)
    rooms.post_writes(0.0, holds_back=True)
    assert [write.room for write in port.posted] == [1, 1]
    written = Written(order_id=0, num_bytes=1, times=(WriteTimes(post_s=0.1, wire_s=0.1),))
    for write in list(port.posted):
        rooms.wrote(0, replace(written, order_id=write.order_id), 1.0)
    assert not rooms.post_writes(1.59, holds_back=True)
    rooms.expect(replace(ORDER, room=2, generation=0, num_tokens=4), 1.0)
    rooms.heard("d", msgspec.structs.replace(OPEN, room=2, generation=0, num_tokens=4, first_page=0, pages=(7,)), 1.0)
    rooms.send(2, 0, page_ids(8), b"meta", 1.0)
    rooms.post_writes(1.59, holds_back=True)
    assert [write.room for write in port.posted[2:]] == [2]
    rooms.post_writes(1.61, holds_back=True)
    assert [write.room for write in port.posted[3:]] == [1]
    rooms.wrote(0, replace(written, order_id=port.posted[3].order_id), 1.61)
    assert not rooms.post_writes(1.62, holds_back=True)
    rooms.post_writes(1.62, holds_back=False)
    assert [write.room for write in port.posted[4:]] == [1]
    rooms.check()
