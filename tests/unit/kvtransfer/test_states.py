"""The states of a room (SPEC H02)."""

import itertools

import pytest

from kvtransfer.rooms.transfer_service import LEGAL_MOVES, KVPoll, move


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
