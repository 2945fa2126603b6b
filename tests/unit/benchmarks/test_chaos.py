"""What a trial says of streams, and what fails a soak."""

from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from benchmarks.chaos import PROMPTS, Fault, Trial, rows_of, try_once, verdict
from benchmarks.soak import KILL_S, WARM_S, Look, Soak, faults_of
from tests.cluster.cluster import Answer

EXPECTED = [f"{prompt} It is large." for prompt in PROMPTS]


class FakePlace:
    """Its streams have ended before the fault comes."""

    num_replicas = 1
    prompts: Sequence[str] = PROMPTS

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = iter(answers)

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def begin(self, prompt: str, num_tokens: int) -> tuple[Answer, "Future[None]"]:
        done: Future[None] = Future()
        done.set_result(None)
        return told("") if num_tokens == 1 else next(self._answers), done

    def is_whole(self) -> bool:
        return True

    def processes(self) -> dict[int, str]:
        return {}

    def has_ended(self) -> bool:
        return True


def told(text: str, end: str = "DONE") -> Answer:
    return Answer(text=text, end=end, at_s=[0.0] * 400)


@pytest.mark.parametrize(
    ("text", "end", "came"),
    [
        ("A city.", "DONE", "same"),
        ("A ci", "RemoteProtocolError('...')", "cut"),
        ("A ci", "", "cut"),
        ("A ci", "ReadTimeout('...')", "hung"),
        ("A ci", "DONE", "wrong"),
        ("A town", "RemoteProtocolError('...')", "wrong"),
    ],
)
def test_a_stream_is_the_same_or_cut_or_hung_or_wrong(text: str, end: str, came: str) -> None:
    assert verdict(told(text, end), "A city.") == came


def test_a_cut_stream_fails_a_fault_that_cuts_none_and_no_other() -> None:
    answers = [*map(told, EXPECTED[1:]), told("", end="RemoteProtocolError('...')")]
    expected = [*EXPECTED[1:], EXPECTED[0]]
    for cuts, failed in ((False, 1), (True, 0)):
        fault = Fault(name="f", begin=lambda place: list, cuts=cuts)
        trial = try_once(FakePlace(answers), fault, expected)
        assert (dict(trial.streams), len(trial.wrong)) == ({"same": 3, "cut": 1}, failed)


def test_a_row_of_a_fault_says_how_often_and_that_it_failed() -> None:
    fault = Fault(name="f", begin=lambda place: list)
    good, bad = Trial(answers_s=1.0, whole_s=2.0), Trial(answers_s=3.0, whole_s=None, wrong=["never whole"])
    rows = {row.figure: row for row in rows_of("s", [(fault, good), (fault, bad)])}
    assert (rows["answers again"].value, rows["answers again"].runs, rows["whole again"].runs) == (2.0, 2, 1)
    assert rows["whole again"].note == "2 times; FAILED: never whole"


def soaked(minutes: int, *, rise: float = 0.0, more_files: int = 0, longest_queue: int = 0) -> Soak:
    """``rise``: MB an hour, of 100; ``more_files``: all at once in the last minute."""
    looks = [
        Look(
            at_s=60.0 * minute,
            longest_queue=longest_queue,
            memory={"router": 100 + rise * minute / 60},
            files={"router": 50 + more_files * (minute == minutes)},
        )
        for minute in range(minutes + 1)
    ]
    return Soak(rate=2.0, looks=looks, is_whole=True)


def test_a_soak_fails_for_what_rises_and_for_a_queue_without_bound() -> None:
    assert WARM_S > KILL_S
    assert list(faults_of(soaked(60, rise=1.0, more_files=10, longest_queue=48))) == []
    assert list(faults_of(soaked(60, rise=10.0))) == ["the memory of router rises by 10 MB an hour"]
    assert list(faults_of(soaked(19, rise=10.0))) == []
    assert list(faults_of(soaked(60, more_files=17))) == ["router has 17 open files more"]
    assert list(faults_of(soaked(60, longest_queue=49))) == ["a queue of 49, where 48 may be"]


def test_a_soak_fails_for_requests_without_an_answer_and_for_pages_that_stay() -> None:
    soak = soaked(1)
    soak.errors["HTTP 500: no"] = 3
    soak.is_whole = False
    failed, left = faults_of(soak)
    assert failed == "3 requests failed: HTTP 500: no"
    assert left.startswith("300 s after the load a replica is missing, or a page")
