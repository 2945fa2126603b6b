"""Random arrivals, aborts, retractions and tiny pools, with steps made ahead and drafts of every quality: every
invariant after every step, every answer the oracle's, stages that sum to a request's time, and nothing left behind.

The fake device runs a step as late as it may, when its result is asked for, and asserts that every slot it reads still
holds the token and position that the request put there. What a request may make next is told by an adversary in the
place of the text at hand: always right, always wrong, right but for the last, or right up to a random place.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.cache.node import path_to, walk
from replicas.engine.engine import Engine
from replicas.engine.stepping import StepClock
from replicas.request import Req
from replicas.scheduler.budget import prompt_tokens
from replicas.scheduler.orders import ORDERS
from replicas.scheduler.plan import DecodePlan, ExtendPlan, StepPlan
from replicas.scheduler.precedence import StepTimes
from replicas.scheduler.speculation import GuessKind, Proposal, Speculation
from replicas.types import FinishReason, GenerateRequest, TokenDelta
from tests.fakes import continuation
from tests.harness import Clock, ask, fake_engine, retract

pytestmark = pytest.mark.model
PREFIXES = [list(range(24)), [*range(8), 99], [7] * 30, []]
QUALITIES = ["right", "wrong", "but the last", "random"]
LONGEST = max(map(len, PREFIXES)) + 12 + 20  # one request alone always fits

arrivals = st.fixed_dictionaries({
    "prompt": st.tuples(st.sampled_from(PREFIXES), st.lists(st.integers(0, 3), min_size=1, max_size=12)),
    "most": st.integers(0, 20),
    "n": st.sampled_from([1, 1, 1, 2]),
    "end": st.sampled_from(["", "", "token", "text", "penalty", "min"]),  # may end it, or forbid to run ahead
    "after": st.integers(1, 12),  # so many tokens it would
    "fields": st.fixed_dictionaries({
        "cache_salt": st.sampled_from(["", "salt"]),
        "priority": st.integers(0, 1),
        "tenant": st.sampled_from(["", "one", "two"]),
        "deadline_s": st.sampled_from([None, None, None, 0.03, 0.5]),  # a step takes 0.01
        "objective_s": st.sampled_from([None, 0.001, 0.1, 1.0]),
    }),
})  # fmt: skip
actions = st.lists(
    arrivals | st.tuples(st.sampled_from(["abort", "retract", "flush"]), st.integers(0, 20))
    | st.tuples(st.just("step"), st.integers(1, 9)),
    max_size=40,
)  # fmt: skip


class Adversary(Speculation):
    """Drafts of a given quality: it knows what the fake device will say."""

    def __init__(self, engine: Engine, quality: str, length: int, seed: int) -> None:
        super().__init__(engine.kv, engine.scheduler.counters, step_s={}, clock=lambda: 0.0)
        self._quality, self._length, self._random = quality, length, np.random.default_rng(seed)
        self._window = engine.kv.window

    def _propose(self, req: Req) -> Proposal | None:
        most = min(self._length, req.max_remaining - 1)
        if most < 1:
            return None
        ids = np.array(continuation(req.ids[: req.num_tokens].tolist(), most, window=self._window), dtype=np.int32)
        match self._quality:
            case "wrong":
                ids = (ids + 1) % 1000
            case "but the last":
                ids[-1] = (ids[-1] + 1) % 1000
            case "random":
                at = int(self._random.integers(0, most + 1))
                ids[at:] = (ids[at:] + 1) % 1000
        return Proposal(GuessKind("text", 8), ids)

    def _chosen(self, reqs: Any, num_rows: int) -> list[np.ndarray]:
        """Try all of them: whether it pays is not the question."""
        none, left = np.empty(0, np.int32), num_rows
        chosen = []
        for req in reqs:
            proposal = self._proposed.get(req)
            ids = none if proposal is None else proposal.token_ids[:left]
            left -= len(ids)
            chosen.append(ids)
        return chosen


class TwoTokens(StepClock):
    """By this clock a bounded step has two tokens."""

    costs = (1.0, 2.0, 1.0, 1.0)


class Run:
    """An engine, its requests and their deltas."""

    def __init__(self, *, drafts: tuple[str, int, int] | None = None, **engine: Any) -> None:
        self.clock, self.plans = Clock(), list[StepPlan]()
        self.drafts = drafts is not None
        self.engine, _ = fake_engine(max_running=4, clock=self.clock, min_new_token_ratio=0.0, **engine)
        self.scheduler = self.engine.scheduler
        if drafts is not None:
            self.scheduler.features["speculation"] = Adversary(self.engine, *drafts)
        launch = self.engine.steps.launch
        self.engine.steps.launch = lambda plan: (self.plans.append(plan), launch(plan))[1]
        self.asked: dict[str, GenerateRequest] = {}
        self.arrived_s: dict[str, float] = {}
        self.told: dict[tuple[str, int], list[TokenDelta]] = defaultdict(list)
        self.left_out = Counter[str]()
        self.engine.steps.times = TwoTokens(chunk_size=self.engine.config.scheduler.chunked_prefill_size)
        self.num_left_out = 0  # times that a request was left out of a step beside a tenant below its share

    def arrive(
        self, prompt: list[int], most: int, *, n: int = 1, fields: dict[str, Any] | None = None, **end: Any
    ) -> None:
        rid, fields, ends = f"r{len(self.asked)}", fields or {}, ending(self.engine, prompt, most, **end) if end else {}
        request = ask(rid, prompt, max_new_tokens=most, n=n, **ends)
        weight = 2.0 if fields.get("tenant") == "two" else 1.0
        self.asked[rid], self.arrived_s[rid] = replace(request, weight=weight, **fields), self.clock.now_s
        self.take(self.engine.submit(self.asked[rid]))

    def step(self) -> None:
        """With mixing no request starves: each running one makes a token in every step, or is retracted, or takes turns
        with the others beside another tenant, whose prompts all of them wait out in every second step at most. What
        prompts have of a step goes by those that do make one."""
        scheduler = self.scheduler
        running = [(req, req.num_output, req.num_retractions) for req in scheduler.queues.decoding]
        num_plans = len(self.plans)
        self.clock.now_s += 0.01
        self.take(self.engine.step())
        scheduler.check()
        self.num_left_out += len(scheduler.queues.waiting.shares.throttle.left_out)
        if not self.engine.has_work:
            self.engine.kv.check_idle()
        config = self.engine.config.scheduler
        for plan in self.plans[num_plans:]:
            if isinstance(plan, ExtendPlan):
                most = prompt_tokens(config.chunked_prefill_size, plan.num_decode, page_size=self.engine.kv.page_size)
                assert plan.num_prompt_tokens <= most
        if config.overlap == "on" or not config.mixed_steps:
            return
        for req, num_output, num_retractions in running:
            made = req.num_output - num_output
            assert self.drafts or made <= 1
            if made > 0 or req.num_retractions > num_retractions or req.finish is not None:
                self.left_out[req.rid] = 0
                continue
            self.left_out[req.rid] += 1
            assert req.asked.tenant, f"{req.rid} made no token"
            assert self.left_out[req.rid] <= 6, f"{req.rid} made no token for so many steps"

    def take(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            before = self.told[delta.rid, delta.index]
            assert not any(each.finish for each in before), f"{delta.rid} goes on after its end"
            before.append(delta)
            if delta.finish is not None:
                stages = delta.stages
                assert stages is not None
                parts = (stages.queue_s, stages.prefill_s, stages.transfer_s, stages.decode_s)
                assert min(parts) >= 0.0, stages
                assert sum(parts) == pytest.approx(self.clock.now_s - self.arrived_s[delta.rid]), stages

    def finish(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.step()
        else:
            raise AssertionError(f"still busy: {self.engine.open_rids}")
        for rid, request in self.asked.items():
            for index in range(request.sampling.n):
                check_answer(self.engine, request, self.told[rid, index])
        pool = self.engine.stats().pool
        assert pool.protected_pages == pool.reserved_pages == 0
        assert pool.free_pages + pool.evictable_pages == pool.num_pages
        assert self.engine.kv.store.failed_checks == 0, "held pages were called lost"


def ending(engine: Engine, prompt: list[int], most: int, end: str, after: int) -> dict[str, object]:
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
            return {"stop_token_ids": (made[-1],), "min_new_tokens": min(after + 1, most)}
    return {}


def check_answer(engine: Engine, request: GenerateRequest, told: list[TokenDelta]) -> None:
    finish, ids, sampling = told[-1].finish, [token for delta in told for token in delta.token_ids], request.sampling
    assert finish is not None
    whole = continuation(request.token_ids.tolist(), sampling.max_new_tokens, window=engine.kv.window)
    stops = [at for at, token in enumerate(whole, start=1) if token in sampling.stop_token_ids]
    whole = whole[: next((at for at in stops if at >= sampling.min_new_tokens), None)]
    assert ids == whole[: len(ids)]
    assert told[-1].usage.completion_tokens == len(ids)
    text = "".join(delta.text for delta in told)
    match finish.reason:
        case FinishReason.LENGTH:
            assert len(ids) == len(whole) == sampling.max_new_tokens
            assert text == engine.tokenizer.decode(ids, True)
        case FinishReason.STOP if isinstance(finish.matched, str):
            assert text == (decoded := engine.tokenizer.decode(ids, True))[: decoded.index(finish.matched)]
            assert finish.matched not in engine.tokenizer.decode(ids[:-1], True)  # not one token later
        case FinishReason.STOP:
            assert ids == whole
            assert text == engine.tokenizer.decode(ids[:-1], True)
        case reason:
            assert reason is FinishReason.ABORT


def check_tree(run: Run) -> None:
    """The tree keeps no K/V of a token that was guessed wrong: each path is what the device makes after its prompt."""
    store, window = run.engine.kv.store, run.engine.kv.window
    texts = {
        (request.cache_salt, *prompt, *continuation(prompt, request.sampling.max_new_tokens, window=window))
        for request in run.asked.values()
        for prompt in [request.token_ids.tolist()]
    }
    for node in walk(store.radix._roots.values()) if store.radix is not None else ():
        ids = (node.salt, *np.concatenate([each.key for each in path_to(node)]).tolist())
        assert any(ids == text[: len(ids)] for text in texts), f"the tree keeps {ids}"


@settings(max_examples=250, deadline=None)
@given(
    actions=actions,
    page_size=st.sampled_from([1, 2, 4, 16]),
    chunk=st.sampled_from([3, 16, 64]),
    spare=st.integers(0, 60),
    ratio=st.sampled_from([0.0, 0.3, 1.0]),
    s_per_token=st.sampled_from([0.0, 0.005]),
    drafts=st.none() | st.tuples(st.sampled_from(QUALITIES), st.integers(1, 19), st.integers(0, 9)),
    kind=st.fixed_dictionaries({
        "overlap": st.sampled_from(["off", "on"]),
        "prefix_cache": st.sampled_from(["radix", "radix", "chunk"]),
        "policy": st.sampled_from([*sorted(ORDERS), "on_time", "on_time"]),
        "mixed_steps": st.booleans(),
        "priorities": st.sampled_from(["off", "on"]),
        "window": st.sampled_from([None, None, 3, 9]),
    }),
)  # fmt: skip
def test_every_request_ends_with_the_oracles_answer_and_nothing_leaks(
    actions: list[Any], page_size: int, chunk: int, spare: int, ratio: float, s_per_token: float,
    drafts: tuple[str, int, int] | None, kind: dict[str, Any],
) -> None:  # fmt: skip
    """Pool, Table, Radix, Same answer, Salt and Request, after every step."""
    run = Run(
        drafts=drafts, num_pages=-(-(LONGEST + spare) // page_size), page_size=page_size, chunked_prefill_size=chunk,
        new_token_ratio=ratio, **kind,
    )  # fmt: skip
    run.scheduler.queues.waiting.step_times = StepTimes(s_per_token=s_per_token)
    for action in actions:
        match action:
            case {"prompt": (prefix, tail), **more}:
                run.arrive([*prefix, *tail], **more)
            case ("abort", int(index)):
                run.take(run.engine.abort(f"r{index}"))
            case ("retract", int(index)) if index < len(run.scheduler.queues.running):
                run.take(run.engine.land())
                if index < len(run.scheduler.queues.running):
                    retract(run.scheduler, run.scheduler.queues.running[index])
            case ("flush", _):
                run.engine.flush_cache()
            case ("step", int(count)):
                for _ in range(count):
                    run.step()
        run.scheduler.check()
    run.finish()
    if drafts is not None:
        check_tree(run)
        assert not run.scheduler.features["speculation"]._of_reqs


@pytest.mark.parametrize(
    ("quality", "num_steps", "drafted", "accepted"),
    [
        ("right", 5, 27, 27),  # the first makes one, to tell what such a step costs; then 8, 8, 8 and the last 7
        ("wrong", 32, 189, 0),
        ("but the last", 7, 30, 25),  # 1, then 7, 7, 7, 7; of the last three tokens two, and one
    ],
)
def test_a_draft_of_seven_makes_as_many_tokens_a_step_as_are_right_and_one(
    quality: str, num_steps: int, drafted: int, accepted: int
) -> None:
    """Of an answer of 33 tokens 32 are made in decode steps."""
    run = Run(drafts=(quality, 7, 0), page_size=4)
    run.arrive([1, 2, 3], 33)
    run.finish()
    counters = run.scheduler.counters
    assert counters["decode_tokens"] == 32
    assert counters["drafted_tokens.tree"] == counters["accepted_tokens.tree"] == 0
    found = counters["drafted_tokens.text"], counters["accepted_tokens.text"]
    assert (sum(isinstance(plan, DecodePlan) for plan in run.plans), *found) == (num_steps, drafted, accepted)


def test_beside_a_tenant_below_its_share_others_are_left_out_of_steps() -> None:
    run = Run(num_pages=64, page_size=4, chunked_prefill_size=16, new_token_ratio=0.3)
    for number in range(3):
        run.arrive([number, 1, 2], 20, fields={"tenant": "two"})
    for _ in range(6):
        run.step()
    for number in range(12):
        run.arrive([number, *range(16)], 8, fields={"tenant": "two"})
    run.arrive([99, 1, 2], 6, fields={"tenant": "one"})
    run.finish()
    assert run.num_left_out > 0
