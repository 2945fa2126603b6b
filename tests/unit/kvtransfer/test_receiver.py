"""One room on the decode side, in every order of things (SPEC H02, H12, H14, H19)."""

import re
from dataclasses import replace

import pytest

from kvtransfer.peers.wire import Abort, Ack, Open, ToSender, encode_meta
from kvtransfer.ports.rank_port import Arrived
from kvtransfer.rooms.receiver import KVReceiver
from kvtransfer.rooms.transfer_service import KVPoll
from kvtransfer.types import (
    KVTransferMeta,
    PeerAddress,
    Received,
    ReceiveDrained,
    ReceiveFailed,
    ReceiveOrder,
    TransferEvent,
)
from tests.kv_pools import layout, page_ids

META = KVTransferMeta(
    rid="r",
    fingerprint=layout().fingerprint,
    prompt_len=20,
    token_range=(4, 20),
    cached_prefix_len=4,
    first_token=3,
)
ORDER = ReceiveOrder(
    room=1,
    generation=2,
    rid="r",
    peer=PeerAddress(host="h", port=1, incarnation="p"),
    num_tokens=20,
    first_page=1,
    pages=page_ids(8, 9, 6, 7),
    deadline_s=10.0,
)
ABORT = Abort(room=1, generation=2)
ACK = Ack(room=1, generation=2)


class Case:
    def __init__(self, *, tp: int = 1, order: ReceiveOrder = ORDER) -> None:
        self.events: list[TransferEvent] = []
        self.sent: list[ToSender] = []
        self.room = KVReceiver(
            order, layout(tp), 0.0, events=self.events, send=lambda _, message: self.sent.append(message)
        )

    def open(self, tp: int = 1) -> "Case":
        self.room.open(layout(tp), 1.0)
        return self

    def arrive(
        self,
        offset: int,
        num: int,
        *,
        last: bool = False,
        rank: int = 0,
        src: int = 0,
        bad: tuple[int, ...] = (),
        meta: KVTransferMeta | None = META,
        now: float = 2.0,
    ) -> None:
        event = Arrived(
            room=1,
            generation=2,
            incarnation="p",
            src_rank=src,
            page_offset=offset,
            num_pages=num,
            num_bytes=100 * num,
            last=last,
            bad_pages=bad,
            meta=encode_meta(meta) if last and src == 0 and meta is not None else b"",
        )
        self.room.arrived(rank, event, now)
        self.room.check()

    @property
    def kinds(self) -> list[type]:
        return [type(event) for event in self.events]


def test_the_open_says_where_the_pages_go_and_what_is_left_of_the_deadline() -> None:
    case = Case().open()
    assert case.sent == [Open(room=1, generation=2, num_tokens=20, first_page=1, pages=(8, 9, 6, 7), deadline_s=9.0)]
    assert case.room.state == KVPoll.WAITING_FOR_INPUT


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_it_is_received_when_all_pages_and_the_last_are_there_in_any_order(order: list[int]) -> None:
    case = Case().open()
    writes = [(0, 2, False), (2, 1, False), (3, 1, True)]
    for step, at in enumerate(order):
        assert case.events == []
        offset, num, last = writes[at]
        case.arrive(offset, num, last=last, now=2.0 + step)
    assert case.events == [Received(room=1, meta=META, transfer_s=2.0, num_bytes=400)]
    assert case.sent[1:] == [ACK]


def test_all_pages_without_the_last_note_are_not_enough() -> None:
    case = Case().open()
    case.arrive(0, 4)
    assert case.events == []
    case.arrive(4, 0, last=True)
    assert case.kinds == [Received]


def test_a_room_of_no_pages_waits_for_the_last_note_alone() -> None:
    """SPEC H09: zero pages included; forgetting it is a known way to hang."""
    order = replace(ORDER, first_page=5, pages=page_ids())
    case = Case(order=order).open()
    case.arrive(0, 0, last=True, meta=replace(META, token_range=(20, 20), cached_prefix_len=20))
    assert case.kinds == [Received]


def test_every_rank_of_the_peer_that_has_a_part_must_have_written_it() -> None:
    """tp 2 there, 1 here: both halves of each page."""
    case = Case().open(tp=2)
    case.arrive(0, 4, last=True, src=0)
    assert case.events == []
    case.arrive(0, 4, last=True, src=1)
    assert case.kinds == [Received]


def test_every_rank_here_must_have_got_its_part() -> None:
    """tp 1 there, 3 here."""
    case = Case(tp=3).open(tp=1)
    for rank in (0, 2):
        case.arrive(0, 4, last=True, rank=rank)
    assert case.events == []
    case.arrive(0, 4, last=True, rank=1)
    assert case.kinds == [Received]


def test_a_rank_that_has_no_part_is_not_waited_for_and_must_not_write() -> None:
    case = Case(tp=2).open(tp=2)
    case.arrive(0, 4, last=True, rank=0, src=0)
    case.arrive(0, 4, last=True, rank=0, src=1)
    assert case.kinds == [ReceiveFailed]


def test_a_wrong_digest_fails_the_room_with_its_pages_and_quarantines_it() -> None:
    case = Case().open()
    case.arrive(0, 4, last=True, bad=(9,))
    assert case.events == [
        ReceiveFailed(room=1, reason="the digests of 1 pages are wrong", bad_pages=(9,)),
    ]
    assert case.sent[1:] == [ABORT]
    assert case.room.draining
    case.room.drained()
    assert case.kinds == [ReceiveFailed, ReceiveDrained]


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (replace(META, fingerprint="other"), "the layout other"),
        (replace(META, prompt_len=21), r"tokens \[4, 21\) came, \[4, 20\)"),
        (replace(META, token_range=(0, 20)), r"tokens \[0, 20\) came"),
        (None, "the meta cannot be read"),
    ],
)
def test_meta_that_does_not_fit_is_refused_not_reinterpreted(meta: KVTransferMeta | None, says: str) -> None:
    """SPEC H12."""
    case = Case().open()
    case.arrive(0, 4, last=True, meta=meta)
    assert case.kinds == [ReceiveFailed]
    assert re.search(says, str(case.events))


@pytest.mark.parametrize(("offset", "num"), [(3, 2), (-1, 1), (1, 1)])
def test_pages_outside_of_the_room_or_twice_fail_it(offset: int, num: int) -> None:
    case = Case().open()
    case.arrive(0, 2)
    case.arrive(offset, num)
    assert case.kinds == [ReceiveFailed]
    assert case.room.draining


def test_a_room_whose_open_was_never_sent_is_drained_at_once() -> None:
    case = Case()
    case.room.fail("no hello within 5 s")
    assert case.kinds == [ReceiveFailed, ReceiveDrained]
    assert case.sent == []


def test_a_failed_room_is_drained_only_by_the_peers_message() -> None:
    case = Case().open()
    case.room.expire(9.99)
    assert case.events == []
    case.room.expire(10.0)
    assert case.events == [
        ReceiveFailed(room=1, reason="the pages did not come within 10 s (it was waiting for input)")
    ]
    case.room.expire(1e9)
    assert case.room.draining  # never by time alone
    case.room.ask()
    assert case.sent[1:] == [ABORT, ABORT]
    case.room.drained()
    assert case.kinds == [ReceiveFailed, ReceiveDrained]


def test_every_page_that_comes_starts_the_wait_anew() -> None:
    """The open of 1 s granted 9 s: pages at 9.5 s and 18 s extend it to 27 s. A note without pages does not."""
    case = Case().open()
    case.arrive(0, 2, now=9.5)
    case.room.expire(10.0)
    case.arrive(2, 1, now=18.0)
    case.arrive(3, 0, now=20.0)
    case.room.expire(26.9)
    assert case.events == []
    case.room.expire(27.0)
    assert case.events == [ReceiveFailed(room=1, reason="no page came for 9 s (it was transferring)", num_bytes=300)]


def test_a_peer_that_gives_up_with_nothing_on_its_way_drains_in_the_same_message() -> None:
    case = Case().open()
    case.room.fail("prefill aborted", drained=True)
    assert case.kinds == [ReceiveFailed, ReceiveDrained]
    assert case.sent[1:] == []


def test_a_room_that_is_received_fails_no_more() -> None:
    case = Case().open()
    case.arrive(0, 4, last=True)
    case.room.fail("the request is gone")
    case.room.expire(1e9)
    assert case.kinds == [Received]
