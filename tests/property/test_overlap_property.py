"""Steps made ahead, with everything that can end a request meanwhile: every answer is the oracle's, nothing leaks.

The fake device runs a step as late as it may, when its result is asked for, and asserts that every slot it reads still
holds the token and position that the request put there.
"""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.engine.engine import Engine
from replicas.types import FinishReason, GenerateRequest, TokenDelta
from tests.fakes import continuation
from tests.harness import Clock, ask, fake_engine

pytestmark = pytest.mark.model
PREFIXES = [list(range(24)), [*range(8), 99], [7] * 30, [1]]

arrivals = st.tuples(
    st.just("arrive"),
    st.integers(0, len(PREFIXES) - 1),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.integers(0, 20),  # max_new_tokens
    st.sampled_from(["", "token", "text", "penalty", "min"]),  # what may end it, or forbid to run ahead
    st.integers(1, 12),  # after so many tokens it would
    st.sampled_from([None, None, None, 0.05, 0.2]),  # deadline_s; a step takes 0.01
)
actions = st.lists(
    st.one_of(
        arrivals,
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 9)),
    ),
    max_size=30,
)


class Run:
    """An engine, its requests and their deltas."""

    def __init__(
        self, num_pages: int, page_size: int, *, overlap: str, mixed_steps: bool, window: int | None = None
    ) -> None:
        self.clock = Clock()
        self.engine, _ = fake_engine(
            num_pages=num_pages, page_size=page_size, max_running=4, clock=self.clock, overlap=overlap,
            mixed_steps=mixed_steps, new_token_ratio=0.3, window=window,
        )
        self.asked: dict[str, GenerateRequest] = {}
        self.told: dict[str, list[TokenDelta]] = defaultdict(list)
        self.num_ahead = 0

    def arrive(self, prompt: list[int], length: int, end: str, after: int, deadline_s: float | None) -> None:
        request = ask(
            f"r{len(self.asked)}", prompt, max_new_tokens=length, **ending(self.engine, prompt, length, end, after)
        )
        object.__setattr__(request, "deadline_s", deadline_s)
        self.asked[request.rid] = request
        self.take(self.engine.submit(request))

    def step(self) -> None:
        self.clock.now_s += 0.01
        self.take(self.engine.step())
        self.num_ahead += len(self.engine.scheduler.queues.under_way)
        self.engine.scheduler.check()

    def take(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            assert not any(before.finish for before in self.told[delta.rid]), f"{delta.rid} goes on after its end"
            self.told[delta.rid].append(delta)

    def finish(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("still busy")


def ending(engine: Engine, prompt: list[int], length: int, end: str, after: int) -> dict[str, object]:
    """Sampling parameters by which the answer to ``prompt`` ends at its token ``after``, if it does not before."""
    made = continuation(prompt, after, window=engine.kv.window)
    match end:
        case "token":
            return {"stop_token_ids": (made[-1],)}
        case "text":
            text = engine.tokenizer.decode(made, True)
            return {"stop": (text[-2:],)} if len(text) > 2 and "\ufffd" not in text[-2:] else {}  # half a character
        case "penalty":
            return {"presence_penalty": 0.5}  # the fake device does not heed it, the scheduler does
        case "min":
            return {"stop_token_ids": (made[-1],), "min_new_tokens": min(after + 1, length)}
    return {}


def expected(request: GenerateRequest, *, stop_id: int | None, window: int | None) -> list[int]:
    """The ids of its whole answer, if no stop string ends it."""
    sampling = request.sampling
    made = continuation(request.token_ids.tolist(), sampling.max_new_tokens, window=window)
    for count, token in enumerate(made, start=1):
        if token == stop_id and count >= sampling.min_new_tokens:
            return made[:count]
    return made


@settings(max_examples=120, deadline=None)
@given(
    actions=actions, page_size=st.sampled_from([1, 4, 16]), spare=st.integers(0, 60), mixed_steps=st.booleans(),
    window=st.sampled_from([None, None, 3, 9]),
)
def test_every_answer_is_the_oracles_with_steps_made_ahead(
    actions: list[tuple[object, ...]], page_size: int, spare: int, mixed_steps: bool,
    window: int | None,
) -> None:
    longest = max(len(prefix) for prefix in PREFIXES) + 8 + 20
    run = Run(-(-(longest + spare) // page_size), page_size, overlap="on", mixed_steps=mixed_steps, window=window)
    for action in actions:
        match action:
            case ("arrive", int(prefix), list(tail), int(length), str(end), int(after), float() | None as deadline_s):
                run.arrive([*PREFIXES[prefix], *tail], length, end, after, deadline_s)
            case ("abort", int(index)):
                run.take(run.engine.abort(f"r{index}"))
                run.engine.scheduler.check()
            case ("flush", _):
                run.engine.flush_cache()
                run.engine.scheduler.check()
            case ("step", int(count)):
                for _ in range(count):
                    run.step()
    run.finish()
    for rid, request in run.asked.items():
        check_answer(run.engine, request, run.told[rid])
    stats = run.engine.stats().pool
    assert stats.protected_pages == stats.reserved_pages == 0
    assert stats.free_pages + stats.evictable_pages == stats.num_pages


def check_answer(engine: Engine, request: GenerateRequest, told: list[TokenDelta]) -> None:
    assert [delta.finish is not None for delta in told].count(True) == 1
    finish, ids = told[-1].finish, [token for delta in told for token in delta.token_ids]
    assert finish is not None
    stops = request.sampling.stop_token_ids
    whole = expected(request, stop_id=next(iter(stops)) if stops else None, window=engine.kv.window)
    assert ids == whole[: len(ids)]
    assert told[-1].usage.completion_tokens == len(ids)
    text = "".join(delta.text for delta in told)
    match finish.reason:
        case FinishReason.LENGTH:
            assert len(ids) == len(whole) == request.sampling.max_new_tokens
            assert text == engine.tokenizer.decode(ids, True)
        case FinishReason.STOP if isinstance(finish.matched, str):
            assert text == (decoded := engine.tokenizer.decode(ids, True))[: decoded.index(finish.matched)]
            assert finish.matched not in engine.tokenizer.decode(ids[:-1], True)  # not one token later
        case FinishReason.STOP:
            assert ids == whole
            assert text == engine.tokenizer.decode(ids[:-1], True)
        case reason:
            assert reason is FinishReason.ABORT


def test_a_long_answer_is_made_ahead_but_for_its_first_and_last_token() -> None:
    """One prompt step and 19 decode steps; each of these but the last is applied with the next one launched."""
    run = Run(32, 4, overlap="on", mixed_steps=True)
    run.arrive([1, 2, 3], 20, "", 1, None)
    run.finish()
    assert run.num_ahead == 18
    check_answer(run.engine, run.asked["r0"], run.told["r0"])
