"""A transfer's life: no call reaches the library after the end, and nothing in flight is let go."""

import pytest

from kvtransfer.ports.transfer_agent import Transfer, TransferState
from kvtransfer.types import WriteTimes

TIMES = WriteTimes(post_s=0.001, wire_s=0.003)


class ScriptedWrite:
    """The library's handle, with scripted answers."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)
        self.released = 0

    def post(self) -> bool:
        return self.check()

    def check(self) -> bool:
        assert not self.released, "the library crashes here"
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def times(self) -> WriteTimes | None:
        assert not self.released, "the library crashes here"
        return TIMES

    def release(self) -> None:
        self.released += 1


def test_a_transfer_is_posted_polled_to_the_end_and_released() -> None:
    native = ScriptedWrite(False, False, True)
    transfer = Transfer("d", native)
    assert transfer.post() is TransferState.POSTED
    assert transfer.poll() is TransferState.POSTED
    assert transfer.poll() is TransferState.DONE
    assert transfer.poll() is TransferState.DONE  # and the library is not asked again
    transfer.release()
    assert (transfer.state, native.released) == (TransferState.RELEASED, 1)
    assert transfer.times == TIMES  # asked for before the release


@pytest.mark.parametrize("answers", [(OSError("gone"),), (False, OSError("gone"))])
def test_any_exception_of_the_library_is_a_failure_with_its_reason(answers: tuple[bool | Exception, ...]) -> None:
    transfer = Transfer("d", ScriptedWrite(*answers))
    state = transfer.post()
    if state is TransferState.POSTED:
        state = transfer.poll()
    assert state is TransferState.FAILED
    assert transfer.reason == "OSError: gone"


def test_what_is_in_flight_cannot_be_released() -> None:
    native = ScriptedWrite(False)
    transfer = Transfer("d", native)
    transfer.post()
    with pytest.raises(AssertionError, match="cannot go from posted to released"):
        transfer.release()
    assert native.released == 0


def test_a_released_transfer_never_reaches_the_library() -> None:
    native = ScriptedWrite(True)
    transfer = Transfer("d", native)
    transfer.post()
    transfer.release()
    for call in (transfer.post, transfer.poll, transfer.release):
        with pytest.raises(AssertionError):
            call()
    assert native.released == 1
