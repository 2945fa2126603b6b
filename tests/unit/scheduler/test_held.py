"""`HeldSessions` by itself, over a real cache: which requests it holds, and when it lets which go."""

from collections.abc import Sequence

import pytest

from replicas.cache.kv import KvCache
from replicas.config import CacheConfig
from replicas.request import Req
from replicas.scheduler.held import HeldSessions
from replicas.types import Finish, FinishReason
from tests.harness import Clock, choice_of


class Agents:
    """Agents over a cache of 16 pages of 4 tokens: their turns are answered at once, or held."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.held = HeldSessions(30.0)
        self.kv = KvCache(
            num_pages=16,
            page_size=4,
            max_requests=4,
            context_len=128,
            cache=CacheConfig(sessions=True),
            clock=self.clock,
        )

    def answered(self, rid: str, prompt: Sequence[int], *, tools: Sequence[str] = ("bash",)) -> list[int]:
        """Have ``prompt`` answered with 4 tokens that call ``tools``. Returns: what the next prompt begins with."""
        req = choice_of(rid, prompt)
        self.kv.arrived(req)
        self.kv.admit(req)
        for num_tokens in (req.prompt_len, req.prompt_len + 4):
            while req.num_tokens < num_tokens:
                req.append(7)
            self.kv.extend(req, num_tokens)
            req.computed_len = num_tokens
            self.kv.commit(req)
        req.finish = Finish(reason=FinishReason.STOP)
        self.kv.release(req, keep=True)
        self.kv.told(rid, tools)
        return req.ids[: req.num_tokens].tolist()

    def come(self, rid: str, prompt: Sequence[int], *, waited_s: float = 0.0) -> Req:
        """Have a turn come that is held."""
        req = choice_of(rid, prompt, now_s=self.clock(), waited_s=waited_s)
        self.kv.arrived(req)
        assert self.kv.agent_of(req) is not None
        assert self.held.hold(req)
        return req

    def ready(self) -> list[Req]:
        self.clock.now_s += 1.0
        return self.held.take_ready(self.kv, self.clock)


def crowded() -> tuple[Agents, list[int], Req]:
    """Have an agent keep 7 of the 16 pages, and a younger one's turn of 10 held. Returns: the history of the first."""
    agents = Agents()
    old = agents.answered("old", range(28))
    young = agents.answered("young", range(100, 104))
    return agents, old, agents.come("large", [*young, *range(200, 232)])


def test_a_request_goes_when_an_older_session_has_ended() -> None:
    agents, old, large = crowded()
    assert (agents.ready(), list(agents.held)) == ([], [large])
    agents.answered("last", [*old, 1, 2, 3, 4], tools=())
    assert (agents.ready(), list(agents.held)) == ([large], [])
    assert large.stamps.held_s == 2.0


def test_a_small_request_goes_after_a_larger_one_of_an_older_session() -> None:
    agents, old, large = crowded()
    small = agents.come("small", [*agents.answered("youngest", range(300, 304)), 1])
    assert agents.ready() == []
    agents.answered("last", [*old, 1, 2, 3, 4], tools=())
    assert agents.ready() == [large, small]


def test_a_request_goes_when_it_has_been_held_for_long_here_and_elsewhere() -> None:
    agents, _, large = crowded()
    moved = agents.come("moved", [*agents.answered("youngest", range(300, 304)), 1], waited_s=20.0)
    agents.clock.now_s += 9.0
    assert agents.ready() == [moved]
    assert moved.stamps.held_s == 10.0  # here
    agents.clock.now_s += 19.0
    assert agents.ready() == [large]


def test_a_request_goes_when_its_session_is_forgotten() -> None:
    agents, _, large = crowded()
    agents.kv.flush()
    assert agents.ready() == [large]


@pytest.mark.parametrize("asked", [{"offline": True}, {"resumed_ids": (7,)}])
def test_neither_a_line_of_a_batch_nor_an_answer_that_goes_on_here_is_held(asked: dict[str, object]) -> None:
    held = HeldSessions(30.0)
    assert not held.hold(choice_of("a", [1], **asked))
    assert not len(held)


def test_none_is_held_where_that_is_switched_off() -> None:
    assert not HeldSessions(0.0).hold(choice_of("a", [1]))


def test_looks_take_a_twentieth_of_the_time_however_many_come() -> None:
    agents, _, _ = crowded()

    def looks(from_s: float, to_s: float) -> bool:
        times = iter([from_s, to_s])
        assert agents.held.take_ready(agents.kv, times.__next__) == []
        return next(times, None) is None  # the second is asked for after a look

    young = agents.answered("youngest", range(300, 304))
    assert looks(0.0, 0.01)
    agents.come("b", [*young, 1])
    assert [looks(at_s, at_s + 0.0001) for at_s in (0.02, 0.2, 0.22)] == [False, False, True]
    assert [looks(at_s, at_s + 0.0001) for at_s in (0.23, 0.28)] == [False, True]  # none has come since
    agents.come("c", [*young, 2])
    assert looks(0.29, 0.2901)
