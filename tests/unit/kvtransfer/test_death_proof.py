"""When a peer counts as dead: two proofs of each of its processes, the grace apart (SPEC H19)."""

from kvtransfer.peers.liveness import GRACE_S, DeathProof
from kvtransfer.types import PeerAddress

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
