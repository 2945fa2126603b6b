"""Which peers live, and what follows for the rooms: silence, death, another life, redialling (SPEC H19).

The proof of a death by itself, and transfer services over a simulated network; see tests/transfer_net.py.
"""

import numpy as np
import pytest

from kvtransfer.peers.liveness import GRACE_S, DeathProof, Heartbeat, Silence
from kvtransfer.peers.wire import Abort, Open
from kvtransfer.ports.rank_port import ExpectOrder, WriteOrder, Written
from kvtransfer.types import PeerAddress, TransferStats
from tests.kv_pools import page_ids, write_order
from tests.transfer_net import SETTINGS, Net, Room, SimEngine

SILENT_S = SETTINGS.heartbeat_s * SETTINGS.heartbeat_misses


def pair() -> tuple[Net, SimEngine, SimEngine]:
    net = Net()
    return net, net.add(), net.add()


def begun(net: Net, p: SimEngine, d: SimEngine) -> Room:
    """A room of 3 pages that is ready, over a link that is up."""
    room = net.kv_transfer(p, d, num_pages=3)
    assert room is not None
    net.run(0.2)
    assert room.sends == ["SendReady"]
    return room


def started() -> tuple[Net, SimEngine, SimEngine, Room]:
    net, p, d = pair()
    return net, p, d, begun(net, p, d)


def test_a_heartbeat_is_due_every_period_and_silence_is_three_of_them() -> None:
    beat = Heartbeat(period_s=1.0, misses=3, now=10.0)
    assert [beat.take_due(10.9), beat.take_due(11.0), beat.take_due(11.0)] == [False, True, False]
    assert beat.next_s == 12.0
    looks = [beat.silence.looked(now, heard=now == 12.5) for now in np.arange(10.5, 16.0, 0.5)]
    assert looks == [False] * 10 + [True]  # three periods after 12.5
    assert beat.next_s == 12.0


def test_a_pause_of_the_listener_or_of_the_machine_is_no_silence_of_a_peer() -> None:
    silence = Silence(period_s=1.0, limit_s=3.0, now=10.0)
    assert [silence.looked(now, heard=False) for now in (40.0, 80.0)] == [False, False]
    assert silence.next_s == 81.0
    assert silence.looked(81.0, heard=False)


def test_idle_peers_stay_connected_by_their_heartbeats() -> None:
    net, p, d, room = started()
    p.send(room, 3, last=True)
    net.run(10 * SILENT_S)
    assert room.receives == ["Received"]
    assert (p.core.stats().peers, d.core.stats().peers) == (1, 1)
    assert d.core.stats().late_messages == 0


def test_a_silent_peer_fails_its_rooms_after_three_heartbeats_long_before_their_deadline() -> None:
    net, p, _, room = started()
    net.hang(p)
    net.run(SILENT_S - 0.3)
    assert room.receives == []
    net.run(0.6)
    assert room.receives == ["ReceiveFailed"]
    assert room.reasons == ["the peer has been silent for 3 s"]


def test_a_pause_of_the_whole_machine_fails_no_room() -> None:
    net, p, _, room = started()
    net.now += SILENT_S
    net.run(0.2)
    p.send(room, 3, last=True)
    net.run(0.2)
    assert (room.sends, room.receives) == (["SendReady", "SendDone"], ["Received"])


def test_a_suspect_gets_no_new_room_until_it_has_said_hello() -> None:
    net, p, d = pair()
    begun(net, p, d)
    net.hang(p)
    net.run(SILENT_S + 0.5)
    refused = net.kv_transfer(p, d, num_pages=2, leg=False)
    assert refused is not None
    net.turn()
    assert refused.receives == ["ReceiveFailed", "ReceiveDrained"]  # at once, nothing was sent
    net.resume(p)
    net.run(7.0)  # the backoff is at most 5 s
    begun(net, p, d)


def test_pages_of_a_hung_peer_stay_in_quarantine_for_ever_and_go_back_when_it_says_drained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, p, d, room = started()
    net.hang(p)
    net.run(100.0, step_s=0.2)
    assert room.receives == ["ReceiveFailed"]
    assert d.core.stats().rooms_draining == 1
    assert d.core.stats().oldest_drain_s == pytest.approx(97.0, abs=1.0)
    warnings = [record.getMessage() for record in caplog.records if "in quarantine" in record.getMessage()]
    assert len(warnings) == 3  # after 30, 60 and 90 s
    assert warnings[0].startswith("3 pages of 1 rooms are in quarantine, the oldest for 30 s")
    net.resume(p)
    net.run(7.0)
    assert room.receives == ["ReceiveFailed", "ReceiveDrained"]


def test_a_process_that_refuses_is_dead_and_its_pages_come_back_after_the_grace() -> None:
    net, p, d, room = started()
    net.kill(p)
    net.run(0.2)
    assert room.receives == ["ReceiveFailed"]
    net.run(0.7)
    assert room.receives == ["ReceiveFailed"]
    net.run(0.4)
    assert room.receives == ["ReceiveFailed", "ReceiveDrained"]
    assert all(not port._peers for port in d.pools.ports)  # the ports have forgotten it


def test_the_death_of_rank_0_frees_no_page_while_another_rank_of_it_can_write() -> None:
    net = Net()
    p, d = net.add(tp=2), net.add(tp=2)
    net.fabric.faults.hold_checks = 100
    room = begun(net, p, d)
    p.send(room, 3, last=True)
    net.run(0.1)
    net.kill_rank(p, 0)
    net.run(10.0)  # rank 1 writes meanwhile; the network checks that no page of another has changed
    assert room.receives == ["ReceiveFailed"]
    assert d.core.stats().rooms_draining == 1
    net.bury(p)
    net.run(7.0)  # it is asked every 5 s
    assert room.receives == ["ReceiveFailed", "ReceiveDrained"]


def test_the_pages_of_a_peer_declared_dead_are_freed_after_the_grace() -> None:
    """No answer at all would be no proof for ever."""
    net, p, d, room = started()
    net.unreachable.add(p.address.port)
    net.hang(p)
    net.run(60.0, step_s=0.2)
    assert room.receives == ["ReceiveFailed"]
    d.core.peer_is_dead(p.address.incarnation)
    d.core.peer_is_dead("unknown")
    net.run(0.9)
    assert room.receives == ["ReceiveFailed"]
    net.run(0.2)
    assert room.receives == ["ReceiveFailed", "ReceiveDrained"]


def test_what_a_peer_declared_dead_has_posted_never_lands_after_its_pages_are_free() -> None:
    """A machine may only have been cut off: its write is sent again when the link is back."""
    net, p, d = pair()
    net.fabric.faults.hold_checks = 10
    room = begun(net, p, d)
    p.send(room, 3, last=True)
    net.turn()  # the write is posted, and on its way
    net.unreachable.add(p.address.port)
    p.hung = True
    net.run(5.0)
    assert d.core.peers.out_of_reach() == (p.address,)
    d.core.peer_is_dead(p.address.incarnation)
    net.run(1.1)
    assert room.receives == ["ReceiveFailed", "ReceiveDrained"]
    assert d.core.peers.out_of_reach() == ()
    net.unreachable.clear()
    p.hung = False
    net.run(10.0)  # the network checks that no page of another has changed
    assert d.core.stats().received_pages == 0


def test_a_peer_that_was_declared_dead_by_mistake_is_asked_and_answers() -> None:
    net, p, d, room = started()
    d.core.peer_is_dead(p.address.incarnation)
    net.run(0.5)
    assert room.receives == ["ReceiveFailed", "ReceiveDrained"]  # it was asked, and has answered
    assert room.sends == ["SendReady", "SendFailed", "SendDrained"]
    assert d.core.stats().peers == 1
    again = begun(net, p, d)
    p.send(again, 3, last=True)
    net.run(2.0)
    assert again.receives == ["Received"]


def test_another_life_on_the_old_address_is_the_death_of_the_first() -> None:
    net, p, _, room = started()
    net.kill(p)
    net.add(port=p.address.port)
    net.run(2.0)
    assert room.receives == ["ReceiveFailed", "ReceiveDrained"]
    assert "another process listens" in room.reasons[0] or "closed the connection" in room.reasons[0]


@pytest.mark.parametrize("away_s", [0.15, 0.6])
@pytest.mark.parametrize("holds", [10, 45])
def test_one_refusal_is_no_death_and_a_peer_that_is_back_within_the_grace_is_asked(away_s: float, holds: int) -> None:
    """Its writes end after ``holds`` turns; a page that was reused too early would fail the network's check."""
    net, p, d = pair()
    net.fabric.faults.hold_checks = holds
    room = begun(net, p, d)
    p.send(room, 3, last=True)
    net.run(0.1)
    net.cut()
    listener = net.listeners.pop(p.address.port)
    net.run(away_s)
    net.listeners[p.address.port] = listener
    net.run(1.0)
    assert room.receives[0] == "ReceiveFailed"
    net.run(8.0)
    assert room.receives == ["ReceiveFailed", "ReceiveDrained"]
    assert room.sends == ["SendReady", "SendFailed", "SendDrained"]
    assert d.core.stats().peers == 1
    begun(net, p, d)


def test_a_peer_that_says_hello_is_not_dead_although_it_cannot_be_dialled() -> None:
    """Its transfer service cannot be dialled; it dials us."""
    net, p, d, room = started()
    net.cut()
    del net.listeners[p.address.port]
    net.run(0.3)
    assert room.receives == ["ReceiveFailed"]
    net.kv_transfer(d, p, num_pages=2)
    net.run(0.3)
    net.listeners[p.address.port] = p
    net.run(0.1)
    assert room.receives == ["ReceiveFailed"]
    net.run(8.0)
    assert room.receives == ["ReceiveFailed", "ReceiveDrained"]
    assert d.core.stats().peers == 1


def test_an_address_that_cannot_be_reached_proves_nothing() -> None:
    net, p, _, room = started()
    net.unreachable.add(p.address.port)
    net.cut()
    net.run(60.0, step_s=0.2)
    assert room.receives == ["ReceiveFailed"]
    net.unreachable.clear()
    net.run(7.0)
    assert room.receives == ["ReceiveFailed", "ReceiveDrained"]


def test_a_peer_that_cannot_be_reached_is_forgotten_after_ten_minutes() -> None:
    net, p, d, room = started()
    p.send(room, 3, last=True)
    net.run(0.3)
    assert room.receives == ["Received"]
    net.unreachable |= {p.address.port, d.address.port}
    net.cut()
    net.run(590.0, step_s=1.0)
    assert (len(p.core.peers._peers), len(d.core.peers._peers)) == (1, 1)
    net.run(30.0, step_s=1.0)
    assert (len(p.core.peers._peers), len(d.core.peers._peers)) == (0, 0)


def test_a_lost_connection_fails_the_rooms_and_is_made_again_at_once() -> None:
    net, p, d, room = started()
    net.cut()
    net.run(0.3)
    assert room.receives == ["ReceiveFailed", "ReceiveDrained"]  # asked and answered over the new connection
    assert room.sends == ["SendReady", "SendFailed", "SendDrained"]
    begun(net, p, d)


def test_a_connection_that_breaks_as_soon_as_it_is_up_is_made_again_later_and_later() -> None:
    net, p, d, _ = started()
    net.run(1.0)
    before = next(net.numbers)  # of all dials and connections
    for _ in range(200):
        net.cut()
        net.run(0.05)
    assert next(net.numbers) < before + 60
    net.run(10.0)
    net.cut()  # after a while: made again at once, and 0.2 s later where that one breaks as soon
    for wait_s in (0.05, 0.4):
        net.run(wait_s)
        assert (p.core.stats().peers, d.core.stats().peers) == (1, 1)
        net.cut()


def test_an_acknowledgement_that_was_lost_with_the_connection_comes_again() -> None:
    net, p, _, room = started()
    p.send(room, 3, last=True)
    for _ in range(20):
        net.now += 0.01
        net.turn()
        if room.receives:
            break
    assert room.receives == ["Received"]
    for end in net.ends.values():  # what it has said is not heard
        end.inbox.clear()
    net.cut()
    if room.sends == ["SendReady"]:
        net.run(0.5)
    assert room.sends == ["SendReady", "SendDone"]


def test_a_receiver_that_does_not_come_back_to_acknowledge_fails_the_room() -> None:
    net, p, d, room = started()
    d.core.receiving.arrived = lambda *_: None  # type: ignore[method-assign]  # it never acknowledges
    p.send(room, 3, last=True)
    net.run(0.3)
    net.unreachable |= {p.address.port, d.address.port}
    net.cut()
    net.run(SETTINGS.call_timeout_s - 0.2)
    assert room.sends == ["SendReady"]
    net.run(0.4)
    assert room.sends == ["SendReady", "SendFailed", "SendDrained"]


def test_a_prefill_engine_finds_out_that_its_receiver_is_dead() -> None:
    net, p, d, room = started()
    net.fabric.faults.hold_checks = 1_000_000  # a write that does not end
    p.send(room, 3, last=True)
    net.run(0.1)
    net.hang(d)
    net.run(SILENT_S + 0.5)
    assert room.sends == ["SendReady", "SendFailed"]  # its source may still be read
    net.kill(d)
    net.run(8.0)
    assert room.sends == ["SendReady", "SendFailed", "SendDrained"]
    assert not p.core.sending.has_business(d.address.incarnation)
    assert p.core.sending.wrote(0, Written(order_id=1, num_bytes=1), net.now) is None
    assert p.core.stats().late_messages == 1


def test_one_peer_that_hangs_holds_up_no_room_of_another() -> None:
    net, p, d = pair()
    other = net.add()
    fine = begun(net, p, other)
    stuck = net.kv_transfer(p, d, num_pages=8)  # 4 writes
    assert stuck is not None
    net.run(0.2)
    net.hang(d)
    p.send(stuck, 8, last=True)
    p.send(fine, 3, last=True)
    net.run(0.3)
    assert fine.receives == ["Received"]
    assert stuck.sends == ["SendReady"]
    assert p.pools.ports[0].num_in_flight == 2  # the rest waits here, where it can still be dropped


def test_many_rooms_of_one_peer_take_turns() -> None:
    net, p, d = pair()
    long = net.kv_transfer(p, d, num_pages=8)
    short = net.kv_transfer(p, d, num_pages=2)
    assert long is not None
    assert short is not None
    net.run(0.2)
    p.send(long, 8, last=True)
    p.send(short, 2, last=True)
    for _ in range(12):
        net.turn()
        if short.receives:
            break
    assert short.receives == ["Received"]
    assert long.receives == []  # 4 writes of 2 pages; the short one did not wait for them


def test_an_open_that_comes_twice_or_late_changes_nothing() -> None:
    net, p, d, room = started()
    opened = Open(
        room=room.number,
        generation=1,
        num_tokens=room.num_tokens,
        first_page=0,
        pages=tuple(room.dst.tolist()),
        deadline_s=4.0,
    )
    p.core.sending.heard(d.address.incarnation, opened, net.now)
    p.send(room, 3, last=True)
    net.run(0.3)
    assert room.sends == ["SendReady", "SendDone"]
    p.core.sending.heard(d.address.incarnation, opened, net.now)
    net.run(0.3)
    assert p.core.stats().late_messages == 2
    assert p.core.stats().rooms_sending == 0


def test_a_message_of_another_generation_or_receiver_is_dropped_and_counted() -> None:
    net, p, d = pair()
    other = net.add()
    room, fine = begun(net, p, d), begun(net, p, other)
    p.core.sending.heard(d.address.incarnation, Abort(room=room.number, generation=0), net.now)
    p.core.sending.heard(other.address.incarnation, Abort(room=room.number, generation=1), net.now)
    assert p.core.stats().late_messages == 2
    for each in (room, fine):
        p.send(each, 3, last=True)
    net.run(0.3)
    assert room.receives == fine.receives == ["Received"]


def test_a_leg_that_comes_after_its_receiver_gave_up_fails_at_once() -> None:
    net, p, d = pair()
    room = net.kv_transfer(p, d, num_pages=3, leg=False)
    assert room is not None
    net.run(0.2)
    d.core.abort_receive(room.number)
    net.run(0.2)
    assert room.receives == ["ReceiveFailed", "ReceiveDrained"]
    failed = p.core.stats().sends_failed
    p.expect(room)
    net.turn()
    assert room.sends == ["SendFailed", "SendDrained"]
    assert p.core.stats().sends_failed == failed + 1


@pytest.mark.parametrize("pages", [(0,), (13,), (3, 3), (1, 2, 3, 4), (2**40,)])
def test_an_open_with_pages_that_cannot_be_is_refused(pages: tuple[int, ...]) -> None:
    """Page 0 is the sink; the pool has 13; a page is granted once; 12 tokens are 3 pages."""
    net, p, d = pair()
    begun(net, p, d)
    p.core.sending.heard(
        d.address.incarnation,
        Open(room=99, generation=1, num_tokens=12, first_page=0, pages=pages, deadline_s=4.0),
        net.now,
    )
    assert p.core.stats().rooms_sending == 1  # the first one alone
    refused = net.kv_transfer(p, d, num_pages=3, leg=False)
    assert refused is not None
    refused.number = 99
    p.expect(refused)
    net.turn()
    assert refused.sends == ["SendFailed", "SendDrained"]  # the leg that comes later is told at once


def note(to: SimEngine, *, room: int) -> WriteOrder:
    none = page_ids()
    return write_order(to.address.incarnation, none, none, order_id=100 + room, room=room, generation=1)


def counted(engine: SimEngine) -> tuple[int, int]:
    stats: TransferStats = engine.core.stats()
    return stats.late_messages, stats.early_notes


def test_a_lost_note_fails_its_room_at_the_deadline_and_the_pages_come_back() -> None:
    """The write has ended for its sender, which waits for the receiver; the receiver waits for the pages."""
    net, p, d, room = started()
    free = len(d.free)
    net.fabric.faults.lose_notes = 1
    p.send(room, 2, last=False)
    net.run(SETTINGS.room_timeout_s - 1)
    assert (room.receives, net.fabric.faults.lose_notes) == ([], 0)
    net.run(2.0)
    assert room.receives == ["ReceiveFailed", "ReceiveDrained"]
    assert room.sends == ["SendReady", "SendFailed", "SendDrained"]
    assert len(d.free) == free + len(room.dst)


def test_late_and_malformed_notes_of_every_rank_are_late_messages_and_early_ones_are_counted_apart() -> None:
    """Each of the two ranks gets two notes of rooms that it does not expect: they wait. One is expected then, the other
    forgotten: late, on both ranks. What rank 1 cannot read is counted too."""
    net = Net()
    p, d = net.add(tp=1), net.add(tp=2)
    assert net.kv_transfer(p, d, num_pages=1) is not None
    net.run(0.3)
    assert counted(d) == (0, 0)
    for room in (7, 8):
        p.pools.ports[0].write(note(d, room=room))
    net.run(0.3)
    assert counted(d) == (0, 4)
    for port in d.pools.ports:
        port.expect(ExpectOrder(room=7, generation=1, incarnation=p.address.incarnation, pages=page_ids()))
        port.forget(8, 1)
    assert counted(d) == (2, 0)
    d.pools.ports[1]._agent.inbox.append(("a peer", b"no note"))  # type: ignore[attr-defined]
    net.run(0.3)
    assert counted(d) == (5, 0)  # and room 7 is one that the transfer service itself does not know: late there, twice


SERVICE = PeerAddress(host="h", port=1, incarnation="service")
FOLLOWER = PeerAddress(host="h", port=2, incarnation="follower")


def ask(death_proof: DeathProof, address: PeerAddress, link: int, now: float) -> None:
    assert address in death_proof.due(now)
    death_proof.asked(address, link)
    assert address not in death_proof.due(now)
    death_proof.check()


def refuse(death_proof: DeathProof, address: PeerAddress, link: int, now: float) -> None:
    ask(death_proof, address, link, now)
    death_proof.not_answered(link, now, refused=True)


def test_one_refusal_is_not_enough_and_two_the_grace_apart_are() -> None:
    death_proof = DeathProof(SERVICE, (), "refused", now=10.0)
    death_proof.service_gone(10.0)
    refuse(death_proof, SERVICE, 1, 10.25)
    assert not death_proof.proven(10.99)
    ask(death_proof, SERVICE, 2, 11.0)
    assert not death_proof.proven(11.0)
    death_proof.not_answered(2, 11.0, refused=True)
    assert death_proof.proven(11.0)


def test_no_answer_at_all_at_the_end_of_the_grace_leaves_it_open() -> None:
    death_proof = DeathProof(SERVICE, (), "refused", now=10.0)
    death_proof.service_gone(10.0)
    ask(death_proof, SERVICE, 1, 11.0)
    death_proof.not_answered(1, 16.0, refused=False)
    assert not death_proof.proven(1000.0)
    refuse(death_proof, SERVICE, 2, 17.0)
    assert death_proof.proven(17.0)


def test_every_process_is_to_be_proven_and_another_life_is_a_proof() -> None:
    death_proof = DeathProof(SERVICE, (FOLLOWER,), "refused", now=10.0)
    death_proof.service_gone(10.0)
    ask(death_proof, FOLLOWER, 1, 10.0)
    assert not death_proof.answered(1, "follower", 10.0)  # it lives
    ask(death_proof, SERVICE, 2, 11.0)
    assert not death_proof.answered(2, "a new service", 11.0)
    assert not death_proof.proven(1000.0)
    refuse(death_proof, FOLLOWER, 3, 12.0)
    refuse(death_proof, FOLLOWER, 4, 12.0 + GRACE_S)
    assert death_proof.proven(12.0 + GRACE_S)


def test_an_answer_between_two_refusals_begins_anew_and_the_transfer_service_own_ends_it() -> None:
    death_proof = DeathProof(SERVICE, (FOLLOWER,), "refused", now=10.0)
    refuse(death_proof, FOLLOWER, 1, 10.0)
    ask(death_proof, FOLLOWER, 2, 10.5)
    death_proof.answered(2, "follower", 10.5)
    refuse(death_proof, FOLLOWER, 3, 11.0)
    death_proof.service_gone(10.0)
    death_proof.service_gone(11.0)
    assert not death_proof.proven(11.0)
    another = DeathProof(SERVICE, (), "refused", now=10.0)
    ask(another, SERVICE, 1, 10.0)
    assert another.answered(1, "service", 10.0)


def test_a_declared_death_waits_for_the_grace_alone() -> None:
    death_proof = DeathProof(SERVICE, (FOLLOWER,), "told", now=10.0)
    death_proof.declared(10.0)
    assert not death_proof.proven(10.99)
    assert death_proof.proven(11.0)
