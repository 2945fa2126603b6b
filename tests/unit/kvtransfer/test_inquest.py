"""When a peer counts as dead: two proofs of each of its processes, the grace apart (SPEC H19)."""

from kvtransfer.peers.inquest import GRACE_S, Inquest
from kvtransfer.types import PeerAddress

DESK = PeerAddress(host="h", port=1, incarnation="desk")
FOLLOWER = PeerAddress(host="h", port=2, incarnation="follower")


def ask(inquest: Inquest, address: PeerAddress, link: int, now: float) -> None:
    assert address in inquest.due(now)
    inquest.asked(address, link)
    assert address not in inquest.due(now)
    inquest.check()


def test_one_refusal_is_not_enough_and_two_the_grace_apart_are() -> None:
    inquest = Inquest(DESK, (), "refused", now=10.0)
    inquest.desk_gone(10.0)
    ask(inquest, DESK, 1, 10.25)
    inquest.not_answered(1, 10.25, refused=True)
    assert not inquest.proven(10.99)
    ask(inquest, DESK, 2, 11.0)
    assert not inquest.proven(11.0)
    inquest.not_answered(2, 11.0, refused=True)
    assert inquest.proven(11.0)


def test_no_answer_at_all_at_the_end_of_the_grace_leaves_it_open() -> None:
    inquest = Inquest(DESK, (), "refused", now=10.0)
    inquest.desk_gone(10.0)
    ask(inquest, DESK, 1, 11.0)
    inquest.not_answered(1, 16.0, refused=False)
    assert not inquest.proven(1000.0)
    ask(inquest, DESK, 2, 17.0)
    inquest.not_answered(2, 17.0, refused=True)
    assert inquest.proven(17.0)


def test_every_process_is_to_be_proven_and_another_life_is_a_proof() -> None:
    inquest = Inquest(DESK, (FOLLOWER,), "refused", now=10.0)
    inquest.desk_gone(10.0)
    ask(inquest, FOLLOWER, 1, 10.0)
    assert not inquest.answered(1, "follower", 10.0)  # it lives
    ask(inquest, DESK, 2, 11.0)
    assert not inquest.answered(2, "a new desk", 11.0)
    assert not inquest.proven(1000.0)
    ask(inquest, FOLLOWER, 3, 12.0)
    inquest.not_answered(3, 12.0, refused=True)
    ask(inquest, FOLLOWER, 4, 12.0 + GRACE_S)
    inquest.not_answered(4, 12.0 + GRACE_S, refused=True)
    assert inquest.proven(12.0 + GRACE_S)


def test_an_answer_between_two_refusals_begins_anew_and_the_desks_own_ends_it() -> None:
    inquest = Inquest(DESK, (FOLLOWER,), "refused", now=10.0)
    ask(inquest, FOLLOWER, 1, 10.0)
    inquest.not_answered(1, 10.0, refused=True)
    ask(inquest, FOLLOWER, 2, 10.5)
    inquest.answered(2, "follower", 10.5)
    ask(inquest, FOLLOWER, 3, 11.0)
    inquest.not_answered(3, 11.0, refused=True)
    inquest.desk_gone(10.0)
    inquest.desk_gone(11.0)
    assert not inquest.proven(11.0)
    another = Inquest(DESK, (), "refused", now=10.0)
    ask(another, DESK, 1, 10.0)
    assert another.answered(1, "desk", 10.0)


def test_who_is_told_waits_for_the_grace_alone() -> None:
    inquest = Inquest(DESK, (FOLLOWER,), "told", now=10.0)
    inquest.told(10.0)
    assert not inquest.proven(10.99)
    assert inquest.proven(11.0)
