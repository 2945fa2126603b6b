"""Which adapters are read and when, and which requests keep theirs: those that run. The engine is real, the adapters
are of no numbers."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from replicas.config import AdapterLimits
from replicas.engine import adapters
from replicas.engine.adapters import HeldAdapters, ReadAdapter
from replicas.engine.engine import Engine
from replicas.errors import AdapterNotReadable, Fault, InvalidAdapter, Overloaded
from replicas.types import AdapterRef, Finish
from tests.harness import Clock, ask, fake_engine

WAIT_S = 60.0
HOST_BYTES = 4


class Weights:
    """Of no numbers."""


class Adapters:
    """Adapters of as many bytes as their name is long, read when a test lets them."""

    limits = AdapterLimits(host_bytes=HOST_BYTES)

    def __init__(self) -> None:
        self.began: list[str] = []
        self.ended: list[str] = []
        self.error: Exception | None = None
        self.gives = 0
        self.refusal: str | None = None  # of every rank, to hold what was read
        self.weights: weakref.ref[Weights] | None = None  # that were read last
        self.go = threading.Semaphore(0)
        self.opened = False

    def open(self) -> None:
        """Let all reads end from now on."""
        self.opened = True
        self.go.release(100)

    def read(self, ref: AdapterRef) -> ReadAdapter:
        self.began.append(ref.identity)
        assert self.go.acquire(timeout=WAIT_S)
        self.ended.append(ref.identity)
        if self.error is not None:
            raise self.error
        weights = Weights()
        self.weights = weakref.ref(weights)
        return ReadAdapter(ref.identity, len(ref.identity), lambda: self.give(weights))

    def give(self, weights: "Weights") -> None:
        self.gives += 1
        if self.refusal is not None:
            raise Overloaded(self.refusal)

    def drop(self, identity: str) -> None:
        """Nothing is held here."""


class Bench:
    """An engine whose requests are named as their adapters, with a number behind if there are several."""

    def __init__(self) -> None:
        self.port, self.clock = Adapters(), Clock()
        self.engine: Engine = fake_engine(clock=self.clock, priorities="on")[0]
        self.held = HeldAdapters(self.port, self.clock)
        self.engine.executor = replace(self.engine.executor, adapters=self.held)
        self.engine.scheduler.queues.adapters = self.held
        self.finished: dict[str, Finish] = {}

    def submit(self, *rids: str, max_new_tokens: int = 8, **fields: object) -> None:
        for rid in rids:
            ref = AdapterRef(identity=rid.rstrip("123"), path="/none")
            request = ask(rid, range(1, 9), max_new_tokens=max_new_tokens)
            self.engine.submit(replace(request, adapter=ref, **fields))  # type: ignore[arg-type]

    def until(self, over: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not over():
            assert time.monotonic() < deadline_s, (self.port.began, self.finished)
            self.run(1)

    def run(self, num_steps: int) -> None:
        """Step, and let what may be read be read between two steps."""
        for _ in range(num_steps):
            deltas = self.engine.step()
            self.finished |= {delta.rid: delta.finish for delta in deltas if delta.finish is not None}
            time.sleep(0.001)
            while self.port.opened and len(self.port.ended) < len(self.port.began):
                time.sleep(0.001)

    def read(self, identity: str) -> None:
        """Let the next read end, which is of this one, and step until it is held or has failed."""
        self.until(lambda: identity in self.port.began)
        assert self.port.began[-1] == identity
        self.port.go.release()
        finished = set(self.finished)
        self.until(lambda: identity in self.held.stats().held or set(self.finished) > finished)

    def settle(self, last: str) -> None:
        """Let all reads end from now on, until ``last`` was read, and 20 steps run after it."""
        self.port.open()
        self.until(lambda: last in self.port.ended)
        self.run(20)

    @property
    def running(self) -> list[str]:
        return [req.rid for req in self.engine.scheduler.queues.running]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.port.open()
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
    assert {finish.fault for finish in bench.finished.values()} == {None}


def test_a_request_whose_adapter_is_held_goes_on_beside_one_that_finds_no_room(bench: Bench) -> None:
    bench.submit("aaa1", max_new_tokens=100)
    bench.read("aaa")
    bench.submit("bb", "aaa2")
    bench.settle("bb")
    bench.until(lambda: "aaa2" in bench.finished)
    assert bench.engine.open_rids == ["aaa1", "bb"]


def test_rows_of_one_adapter_lie_side_by_side_in_a_step(bench: Bench) -> None:
    """Its weights are multiplied with them together."""
    bench.port.open()
    for number, rid in enumerate(("b1", "a1", "b2", "a2"), start=1):
        bench.submit(rid, max_new_tokens=50)
        bench.until(lambda number=number: len(bench.running) == number)  # type: ignore[misc]
    bench.run(1)
    assert bench.running == ["a1", "a2", "b1", "b2"]
    bench.until(lambda: len(bench.finished) == 4)
    assert {finish.reason.value for finish in bench.finished.values()} == {"length"}


def test_adapters_of_requests_that_ended_are_not_read(bench: Bench) -> None:
    bench.submit("a", "b", "c", "d1", "d2", "e")
    for rid in ("b", "d1", "e"):
        bench.engine.abort(rid)
    for identity in "acd":
        bench.read(identity)
    bench.settle("d")
    assert bench.port.began == ["a", "c", "d"]
    bench.until(lambda: set(bench.finished) >= {"a", "c", "d2"})


def test_what_was_read_for_a_request_that_left_is_held_for_another_that_wants_it(bench: Bench) -> None:
    bench.submit("a1", "a2", "b")
    bench.until(lambda: bench.port.began == ["a"])
    bench.engine.abort("a1")
    bench.port.go.release(2)
    bench.until(lambda: set(bench.finished) >= {"b", "a2"})
    assert bench.port.began == ["a", "b"]


def test_requests_that_wait_for_a_place_to_run_keep_no_adapter(bench: Bench) -> None:
    """Only the first of them has its adapter read ahead, beside what is held."""
    bench.engine.scheduler.max_running = 2
    bench.port.open()
    bench.submit("a", "b", max_new_tokens=60)
    bench.until(lambda: bench.running == ["a", "b"])
    bench.submit(*(chr(ord("c") + number) for number in range(20)), max_new_tokens=60)
    bench.run(20)
    assert set(bench.held.stats().held) == {"a", "b"}
    assert bench.port.began == ["a", "b", "c"]
    bench.engine.abort("b")
    bench.until(lambda: bench.running == ["a", "c"])
    bench.run(20)
    assert bench.port.began == ["a", "b", "c", "d"]


def test_adapters_are_loaded_in_the_order_in_which_requests_can_start(bench: Bench) -> None:
    bench.submit("a", "b", "c")
    bench.until(lambda: bench.port.began == ["a"])
    bench.submit("d", priority=1)
    bench.settle("c")
    assert bench.port.began[-3:] == ["d", "b", "c"]


def test_one_that_is_to_start_first_keeps_its_adapter_beside_those_behind_it(bench: Bench) -> None:
    """Both adapters fit only alone, and neither request can start: the pool is full. Nothing is read twice."""
    pages = bench.engine.kv._allocator
    taken = pages.alloc(pages.num_pages - 1, rid="others")
    bench.port.open()
    bench.submit("aaa", "bbb")
    bench.run(50)
    assert bench.port.began == ["aaa"]
    pages.free(taken)
    bench.until(lambda: set(bench.finished) == {"aaa", "bbb"})
    assert bench.port.began == ["aaa", "bbb"]


def test_one_that_finds_no_room_gives_way_when_it_has_waited_its_time(bench: Bench) -> None:
    bench.submit("aa", max_new_tokens=110)
    bench.read("aa")
    bench.submit("bbb1", "cc", "dd")  # cc and dd would fit
    bench.until(lambda: "bbb" in bench.port.began)
    bench.clock.now_s += adapters.WAIT_S / 2  # what a read takes does not count
    bench.settle("bbb")
    bench.clock.now_s += adapters.WAIT_S / 2 + 1.0
    bench.submit("bbb2")
    bench.run(20)
    assert bench.port.began == ["aa", "bbb"]
    assert not bench.finished
    bench.clock.now_s += adapters.WAIT_S / 2
    bench.until(lambda: {"cc", "dd"} <= set(bench.finished))
    finish = bench.finished["bbb1"]
    assert (finish.fault, finish.retry_as) == (Fault.UNAVAILABLE, "overloaded")
    assert "of 3 bytes had no room for 60 s beside 1 of running requests, 2 bytes" in str(finish.message)
    assert "raise adapters.host_bytes (4)" in str(finish.message)
    assert {bench.finished[rid].fault for rid in ("cc", "dd")} == {None}


def test_time_in_which_others_are_read_is_no_lack_of_room(bench: Bench) -> None:
    bench.submit("a", "b", "c")
    for identity in "abc":
        bench.until(lambda identity=identity: identity in bench.port.began)  # type: ignore[misc]
        bench.clock.now_s += adapters.WAIT_S - 1.0
        bench.run(2)
        bench.read(identity)
    bench.until(lambda: len(bench.finished) == 3)
    assert {finish.fault for finish in bench.finished.values()} == {None}


def test_time_in_which_all_places_to_run_are_taken_is_no_lack_of_room(bench: Bench) -> None:
    bench.engine.scheduler.max_running = 1
    bench.submit("a", "b")
    bench.until(lambda: bench.port.began == ["a"])
    bench.engine.submit(ask("model", range(1, 9), max_new_tokens=100))  # it passes them
    bench.until(lambda: bench.running == ["model"])
    bench.port.go.release()
    bench.run(5)
    bench.clock.now_s += adapters.WAIT_S + 1.0
    bench.engine.abort("model")
    bench.until(lambda: "a" in bench.finished)
    bench.until(lambda: bench.port.began == ["a", "b"])
    bench.run(5)
    bench.port.open()
    bench.until(lambda: "b" in bench.finished)
    assert {finish.fault for finish in bench.finished.values()} == {None}


def test_where_one_found_no_room_for_long_only_those_start_that_take_none(bench: Bench) -> None:
    """A stream of short requests would keep an adapter in use for ever; one that is in use as long anyway passes."""
    bench.port.open()
    bench.submit("aa1", max_new_tokens=60)
    bench.until(lambda: "aa1" in bench.running)
    bench.submit("c1")
    bench.until(lambda: "c1" in bench.finished)
    bench.submit("xxx")
    bench.settle("xxx")
    bench.clock.now_s += adapters.PATIENCE_S + 1.0
    bench.submit("c2", "aa2")
    bench.engine.submit(ask("model", range(1, 9), max_new_tokens=8))
    bench.until(lambda: {"aa2", "model"} <= set(bench.finished))
    assert "aa1" in bench.running
    bench.submit("aa3", max_new_tokens=20)
    bench.until(lambda: "aa3" in bench.running)
    bench.engine.abort("aa1")
    bench.submit("aa4")
    bench.until(lambda: {"xxx", "c2", "aa4"} <= set(bench.finished))
    order = list(bench.finished)
    assert order[-4] == "aa3", "one started that takes room, or keeps some in use"
    assert order.index("xxx") < order.index("aa4")
    assert {finish.fault for finish in bench.finished.values()} == {None}


def test_a_read_that_never_ends_is_told_to_all_that_need_another(bench: Bench) -> None:
    bench.submit("a1")
    bench.until(lambda: bench.port.began == ["a"])
    bench.clock.now_s += adapters.WAIT_S + 1.0
    bench.submit("b")
    bench.submit("c", offline=True)
    bench.until(lambda: set(bench.finished) == {"a1", "b", "c"})
    assert {finish.fault for finish in bench.finished.values()} == {Fault.UNAVAILABLE}
    assert "see whether its file system answers" in str(bench.finished["c"].message)


@pytest.mark.parametrize(
    ("error", "fault", "retry_as"),
    [
        (MemoryError(), Fault.UNAVAILABLE, "overloaded"),
        (AdapterNotReadable("gone"), Fault.UNAVAILABLE, "overloaded"),
        (InvalidAdapter("wrong"), Fault.INVALID, None),
    ],
)
def test_a_replicas_own_trouble_sends_the_request_elsewhere_and_what_is_wrong_with_the_adapter_ends_it(
    bench: Bench, error: Exception, fault: Fault, retry_as: str | None
) -> None:
    bench.port.error = error
    bench.submit("a1", "a2")
    bench.read("a")
    bench.until(lambda: set(bench.finished) == {"a1", "a2"})
    assert {(each.fault, each.retry_as) for each in bench.finished.values()} == {(fault, retry_as)}
    assert bench.port.began == ["a"]
    bench.port.error = None
    bench.port.go.release()
    bench.submit("a3")
    bench.until(lambda: "a3" in bench.finished)
    assert bench.finished["a3"].fault is None


def test_what_a_rank_refuses_is_given_once_for_all_that_wait_for_it_and_its_memory_is_free(bench: Bench) -> None:
    bench.port.refusal = "no rank has memory"
    waiting = [f"a{i}{j}{k}" for i in (1, 2) for j in (1, 2, 3) for k in (1, 2, 3)]
    bench.submit(*waiting)
    bench.port.open()
    bench.until(lambda: set(bench.finished) == set(waiting))
    ends = {(each.fault, each.message) for each in bench.finished.values()}
    assert ends == {(Fault.UNAVAILABLE, "no rank has memory")}
    assert (bench.port.gives, bench.port.began) == (1, ["a"])
    assert bench.port.weights is not None
    assert bench.port.weights() is None
    bench.port.refusal = None
    bench.clock.now_s += adapters.REFUSED_S
    bench.submit("a")
    bench.until(lambda: "a" in bench.finished)
    assert (bench.finished["a"].fault, bench.port.gives) == (None, 2)


def test_an_adapter_that_was_refused_costs_the_others_their_place_once_in_a_while(bench: Bench) -> None:
    bench.port.open()
    bench.submit("aa", "bb")
    bench.until(lambda: set(bench.finished) == {"aa", "bb"})
    bench.port.refusal = "no rank has memory"
    bench.submit("xxxx1")
    bench.until(lambda: "xxxx1" in bench.finished)
    assert bench.held.stats().num_dropped == 2
    bench.port.refusal = None
    bench.submit("aa", "bb")
    bench.until(lambda: bench.held.stats().num_loads == 4)
    bench.port.refusal = "no rank has memory"
    bench.clock.now_s += adapters.REFUSED_S - 1.0
    bench.submit("xxxx2")
    bench.until(lambda: "xxxx2" in bench.finished)
    bench.engine.scheduler.max_running = 1
    bench.engine.submit(ask("model", range(1, 9), max_new_tokens=60))
    bench.until(lambda: bench.running == ["model"])
    bench.submit("xxxx3")  # it waits for its turn
    bench.run(20)
    assert bench.running == ["model"]
    assert {(bench.finished[rid].fault, bench.finished[rid].message) for rid in ("xxxx1", "xxxx2")} == {
        (Fault.UNAVAILABLE, "no rank has memory")
    }
    assert (bench.port.began.count("xxxx"), bench.held.stats().num_dropped) == (1, 2)
    bench.port.refusal = None
    bench.clock.now_s += 1.0
    bench.until(lambda: "xxxx3" in bench.finished)
    assert bench.finished["xxxx3"].fault is None


def test_what_failed_when_it_was_read_ahead_is_read_again_in_its_turn(bench: Bench) -> None:
    bench.engine.scheduler.max_running = 1
    bench.port.open()
    bench.engine.submit(ask("model", range(1, 9), max_new_tokens=60))
    bench.until(lambda: bench.running == ["model"])
    bench.port.error = AdapterNotReadable("gone")
    bench.submit("a")
    bench.until(lambda: bench.port.ended == ["a"])
    bench.run(20)
    assert bench.port.began == ["a"], "it is not tried again and again"
    bench.port.error = None
    bench.until(lambda: "a" in bench.finished)
    assert bench.finished["a"].fault is None
    assert bench.port.began == ["a", "a"]


def test_adapters_of_batches_are_read_last_and_give_way_where_they_find_no_room(bench: Bench) -> None:
    bench.submit("aa", max_new_tokens=100)
    bench.read("aa")
    bench.submit("bbb", "cc", offline=True)
    bench.settle("bbb")
    bench.submit("dd")  # it fits
    bench.until(lambda: "dd" in bench.finished)
    assert bench.port.began[:3] == ["aa", "bbb", "dd"]


@pytest.mark.parametrize("num_needed", [1, 2, 3])
def test_lines_of_a_batch_that_run_give_up_as_many_adapters_as_a_chat_needs(bench: Bench, num_needed: int) -> None:
    bench.port.open()
    lines = ["a", "b", "c", "d"]
    bench.submit(*lines, max_new_tokens=40, offline=True)
    bench.until(lambda: set(bench.running) == set(lines))
    bench.submit("x" * num_needed, max_new_tokens=20)
    bench.until(lambda: "x" * num_needed in bench.running)
    assert set(bench.held.stats().held) == {*lines[num_needed:], "x" * num_needed}
    retracted = {req.rid for req in bench.engine.scheduler.queues.waiting if req.num_retractions}
    assert retracted == set(lines[:num_needed])
    bench.until(lambda: len(bench.finished) == 5)
    assert {finish.fault for finish in bench.finished.values()} == {None}


def test_lines_of_a_batch_go_on_while_a_chats_adapter_is_read(bench: Bench) -> None:
    bench.submit("a", max_new_tokens=100, offline=True)
    bench.read("a")
    bench.until(lambda: bench.running == ["a"])
    [line] = bench.engine.scheduler.queues.running
    bench.submit("x", max_new_tokens=20)
    bench.until(lambda: "x" in bench.port.began)
    before = line.num_output
    bench.run(20)
    assert line.num_output >= before + 20
    bench.read("x")
    bench.until(lambda: "x" in bench.running)
    assert bench.finished == {}
    bench.port.open()
    bench.until(lambda: len(bench.finished) == 2)
    assert {finish.fault for finish in bench.finished.values()} == {None}


def test_lines_of_a_batch_go_on_while_chats_leave_a_chats_adapter_no_room(bench: Bench) -> None:
    bench.port.open()
    bench.submit("b", max_new_tokens=100, offline=True)
    bench.until(lambda: bench.running == ["b"])
    [line] = bench.engine.scheduler.queues.running
    bench.submit("aa", max_new_tokens=100)
    bench.until(lambda: "aa" in bench.running)
    bench.submit("xxxx")
    bench.settle("xxxx")
    before = line.num_output
    bench.run(20)
    assert line.num_output > before + 10
    assert line.num_retractions == 0
    assert bench.engine.open_rids == ["b", "aa", "xxxx"]


def test_no_line_gives_its_place_up_to_one_whose_adapter_is_not_there(bench: Bench) -> None:
    bench.engine.scheduler.max_running = 2
    bench.port.open()
    bench.submit("a", "b", max_new_tokens=60, offline=True)
    bench.until(lambda: set(bench.running) == {"a", "b"})
    lines = list(bench.engine.scheduler.queues.running)
    bench.port.opened = False
    while bench.port.go.acquire(blocking=False):
        pass
    bench.engine.submit(ask("model", range(1, 9), max_new_tokens=20))
    bench.submit("x")
    bench.until(lambda: "x" in bench.port.began and "model" in bench.running)
    bench.run(5)
    assert sum(line.num_retractions for line in lines) == 1
    bench.port.open()
    bench.until(lambda: len(bench.finished) == 4)
    assert {finish.fault for finish in bench.finished.values()} == {None}


def test_no_line_gives_up_what_would_not_be_enough(bench: Bench) -> None:
    bench.port.open()
    bench.submit("b", max_new_tokens=100, offline=True)
    bench.until(lambda: bench.running == ["b"])
    bench.submit("aa", max_new_tokens=100)
    bench.until(lambda: "aa" in bench.running)
    bench.submit("xxxx")
    bench.settle("xxxx")
    holding = bench.engine.scheduler.queues.holding
    assert [req.num_retractions for req in holding if req.in_background] == [0]
