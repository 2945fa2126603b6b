"""What counts as a decode step, what a stopwatch sums, and that all that is submitted is run to its end."""

from types import SimpleNamespace
from typing import cast

from benchmarks import driver
from benchmarks.workloads import random_lengths
from replicas.engine.engine import Engine
from replicas.types import Finish, FinishReason, GenerateRequest, TokenDelta, Usage


class FakeEngine:
    """Prefills one request a step, then decodes all; the output of a prompt is its first id, counted up."""

    def __init__(self) -> None:
        self.waiting: list[GenerateRequest] = []
        self.running: dict[str, tuple[GenerateRequest, int]] = {}
        self.most_open = 0
        self.scheduler = SimpleNamespace(schedule=lambda: None, apply=lambda: None)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, request: GenerateRequest) -> list[TokenDelta]:
        self.waiting.append(request)
        self.most_open = max(self.most_open, len(self.waiting) + len(self.running))
        return []

    def step(self) -> list[TokenDelta]:
        self.scheduler.schedule()
        self.scheduler.apply()
        if self.waiting:
            request = self.waiting.pop(0)
            return [self._token(request, 1)]
        return [self._token(request, done + 1) for request, done in list(self.running.values())]

    def _token(self, request: GenerateRequest, num_done: int) -> TokenDelta:
        ended = num_done == request.sampling.max_new_tokens
        self.running[request.rid] = (request, num_done)
        if ended:
            del self.running[request.rid]
        return TokenDelta(
            rid=request.rid,
            token_ids=(int(request.token_ids[0]) + num_done,),
            usage=Usage(prompt_tokens=len(request.token_ids), completion_tokens=num_done, cached_tokens=3),
            finish=Finish(reason=FinishReason.LENGTH) if ended else None,
        )


def engine() -> tuple[FakeEngine, Engine]:
    fake = FakeEngine()
    return fake, cast(Engine, fake)


def test_only_steps_that_give_every_request_a_token_after_its_first_count_as_decode() -> None:
    _, under_test = engine()
    decoded = driver.decode(under_test, [(10, 11), (20, 21), (30, 31)], 5)
    assert len(decoded.step_s) == 4  # 3 prefill steps, then 4 decode steps of 3 tokens
    assert decoded.token_ids == ((11, 12, 13, 14, 15), (21, 22, 23, 24, 25), (31, 32, 33, 34, 35))
    assert abs(decoded.tokens_per_s - 3 * 4 / sum(decoded.step_s)) < 1e-6


def test_serve_keeps_the_asked_number_open_and_answers_all() -> None:
    fake, under_test = engine()
    workload = random_lengths(num_requests=5, input_len=4, output_len=2, vocab_size=32_000, seed=0)
    served = driver.serve(under_test, workload, concurrency=2)
    assert fake.most_open == 2
    assert [len(ids) for ids in served.outputs] == [2] * 5
    assert (served.prompt_tokens, served.cached_tokens) == (20, 15)
    assert 0 <= served.scheduling_s < served.wall_s
    assert not fake.has_work


def test_a_prefill_ends_with_its_only_token() -> None:
    fake, under_test = engine()
    assert driver.prefill_s(under_test, (1, 2, 3)) > 0
    assert not fake.has_work


class Watched:
    """One method of its class, one callable of its own."""

    def __init__(self) -> None:
        self.own = self.double

    def double(self, x: int) -> int:
        return 2 * x


def test_a_stopwatch_passes_calls_through_and_leaves_no_trace() -> None:
    thing = Watched()
    own_before = vars(thing)["own"]
    with driver.watched((thing, "double"), (thing, "own")) as stopwatch:
        assert (thing.double(3), thing.own(4)) == (6, 8)
        once = stopwatch.total_s
        assert once > 0
        thing.double(1)
        assert stopwatch.total_s > once
    assert vars(thing) == {"own": own_before}
    thing.double(1)
    assert thing.double.__func__ is Watched.double
