"""Which adapters are read and when: one at a time, for requests that are open, in the order in which they came. The
engine is real, the adapters are of no numbers."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from replicas.config import AdapterLimits
from replicas.engine import adapters
from replicas.engine.adapters import HeldAdapters, ReadAdapter
from replicas.engine.engine import Engine
from replicas.errors import AdapterNotReadable, InvalidAdapter
from replicas.types import AdapterRef, Finish, TokenDelta
from tests.harness import Clock, ask, fake_engine

WAIT_S = 60.0
HOST_BYTES = 4


class Adapters:
    """Adapters of as many bytes as their name is long, read when a test lets them."""

    limits = AdapterLimits(host_bytes=HOST_BYTES)

    def __init__(self) -> None:
        self.began: list[str] = []
        self.ended: list[str] = []
        self.error: Exception | None = None
        self.go = threading.Semaphore(0)

    def read(self, ref: AdapterRef) -> ReadAdapter:
        self.began.append(ref.identity)
        assert self.go.acquire(timeout=WAIT_S)
        self.ended.append(ref.identity)
        if self.error is not None:
            raise self.error
        return ReadAdapter(ref.identity, len(ref.identity), lambda: None)

    def drop(self, identity: str) -> None:
        """Nothing is held here."""


class Bench:
    """An engine whose requests are named as their adapters, with a number behind if there are several."""

    def __init__(self) -> None:
        self.port, self.clock = Adapters(), Clock()
        self.engine: Engine = fake_engine(clock=self.clock)[0]
        self.held = HeldAdapters(self.port, self.clock)
        self.engine.executor = replace(self.engine.executor, adapters=self.held)
        self.finished: dict[str, Finish] = {}

    def submit(self, *rids: str, max_new_tokens: int = 8, offline: bool = False) -> None:
        for rid in rids:
            ref = AdapterRef(identity=rid.rstrip("123"), path="/none")
            request = ask(rid, range(1, 9), max_new_tokens=max_new_tokens)
            self.engine.submit(replace(request, adapter=ref, offline=offline))

    def until(self, over: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not over():
            assert time.monotonic() < deadline_s, (self.port.began, self.finished)
            self._take(self.engine.step())
            time.sleep(0.001)

    def _take(self, deltas: list[TokenDelta]) -> None:
        self.finished |= {delta.rid: delta.finish for delta in deltas if delta.finish is not None}

    def read(self, identity: str) -> None:
        """Let the next read end, which is of this one."""
        before = len(self.held.waiting)
        self.until(lambda: identity in self.port.began)
        assert self.port.began[-1] == identity
        self.port.go.release()
        self.until(lambda: len(self.held.waiting) < before)

    def settle(self, last: str) -> None:
        """Let all reads end that begin, until ``last`` and those after it were read. No step runs."""
        self.port.go.release(100)
        deadline_s = time.monotonic() + WAIT_S
        while last not in self.port.ended:
            assert time.monotonic() < deadline_s, self.port.began
            self._poll()
        for _ in range(20):
            self._poll()

    def _poll(self) -> None:
        self._take(self.engine.poll())
        time.sleep(0.001)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.port.go.release(100)
    bench.held.close()


def test_one_adapter_is_read_at_a_time_and_no_other_until_it_has_room(bench: Bench) -> None:
    bench.submit("aaa", max_new_tokens=100)
    bench.read("aaa")
    bench.submit("bb", "cc", "dd", "ee")
    bench.settle("bb")
    assert bench.port.began == ["aaa", "bb"]  # bb has no room beside aaa
    bench.engine.abort("aaa")
    bench.until(lambda: len(bench.finished) == 4)
    assert bench.port.began == ["aaa", "bb", "cc", "dd", "ee"]
    assert {finish.http_status for finish in bench.finished.values()} == {200}


def test_a_request_whose_adapter_is_held_goes_on_beside_one_that_finds_no_room(bench: Bench) -> None:
    bench.submit("aaa1", max_new_tokens=100)
    bench.read("aaa")
    bench.submit("bb", "aaa2")
    bench.settle("bb")
    bench.until(lambda: "aaa2" in bench.finished)
    assert [task.request.rid for task in bench.held.waiting] == ["bb"]


def test_adapters_of_requests_that_ended_are_not_read(bench: Bench) -> None:
    bench.submit("a", "b", "c", "d1", "d2", "e")
    for rid in ("b", "d1", "e"):
        bench.engine.abort(rid)
    for identity in "acd":
        bench.read(identity)
    bench.settle("d")
    assert bench.port.began == ["a", "c", "d"]
    bench.until(lambda: set(bench.finished) == {"a", "c", "d2"})


def test_what_was_read_for_a_request_that_left_is_held_for_another_that_wants_it(bench: Bench) -> None:
    bench.submit("a1", "b", "a2")
    bench.engine.abort("a1")
    bench.port.go.release(2)
    bench.until(lambda: set(bench.finished) == {"b", "a2"})
    assert bench.port.began == ["a", "b"]


def test_one_that_finds_no_room_gives_way_when_it_has_waited_its_time(bench: Bench) -> None:
    bench.submit("aa", max_new_tokens=100)
    bench.read("aa")
    bench.submit("bbb1")
    bench.clock.now_s = adapters.WAIT_S / 2
    bench.submit("cc", "bbb2")  # cc would fit
    bench.settle("bbb")
    assert bench.port.began == ["aa", "bbb"]
    bench.clock.now_s = adapters.WAIT_S + 1.0
    bench.until(lambda: "cc" in bench.finished)
    assert (bench.finished["bbb1"].http_status, bench.finished["bbb1"].retry_as) == (503, "overloaded")
    assert bench.finished["cc"].http_status == 200


@pytest.mark.parametrize(
    ("error", "status", "retry_as"),
    [
        (MemoryError(), 503, "overloaded"),
        (AdapterNotReadable("gone"), 503, "overloaded"),
        (InvalidAdapter("wrong"), 400, None),
    ],
)
def test_a_replicas_own_trouble_sends_the_request_elsewhere_and_what_is_wrong_with_the_adapter_ends_it(
    bench: Bench, error: Exception, status: int, retry_as: str | None
) -> None:
    bench.port.error = error
    bench.submit("a")
    bench.read("a")
    finish = bench.finished["a"]
    assert (finish.http_status, finish.retry_as) == (status, retry_as)


def test_adapters_of_batches_are_read_last_and_give_way_where_they_find_no_room(bench: Bench) -> None:
    bench.submit("aa", max_new_tokens=100)
    bench.read("aa")
    bench.submit("bbb", "cc", offline=True)
    bench.settle("bbb")
    bench.submit("dd")  # it fits
    bench.until(lambda: "dd" in bench.finished)
    assert bench.port.began[:3] == ["aa", "bbb", "dd"]


def test_open_requests_are_looked_through_once_however_many_wait(bench: Bench) -> None:
    bench.submit("aaa", max_new_tokens=100)
    bench.read("aaa")
    bench.submit(*(f"bb{number}" for number in "123"))
    bench.settle("bb")
    looked = []

    def in_use() -> set[str]:
        looked.append(1)
        return {"aaa", "bb"}

    assert bench.held.poll(in_use) == []
    assert len(looked) == 1
