"""What counts as a decode step, and that all that is submitted is run to its end."""

from itertools import count
from typing import cast

import pytest

from benchmarks import driver
from replicas.engine.engine import Engine
from replicas.types import Finish, FinishReason, GenerateRequest, TokenDelta, Usage


class FakeEngine:
    """Prefills one request a step, then decodes all; the output of a prompt is its first id, counted up."""

    def __init__(self) -> None:
        self.waiting: list[GenerateRequest] = []
        self.running: dict[str, tuple[GenerateRequest, int]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, request: GenerateRequest) -> list[TokenDelta]:
        self.waiting.append(request)
        return []

    def step(self) -> list[TokenDelta]:
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


def test_only_steps_that_give_every_request_a_token_after_its_first_count_as_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver.time, "perf_counter", count().__next__)  # a second between two looks
    _, under_test = engine()
    rate, token_ids = driver.decode(under_test, [(10, 11), (20, 21), (30, 31)], 5)
    assert token_ids == ((11, 12, 13, 14, 15), (21, 22, 23, 24, 25), (31, 32, 33, 34, 35))
    assert rate == pytest.approx(3 * 4 / 4)  # 3 prefill steps, then 4 decode steps of 3 tokens, a second each


def test_a_prefill_ends_with_its_only_token() -> None:
    fake, under_test = engine()
    assert driver.prefill_s(under_test, (1, 2, 3)) > 0
    assert not fake.has_work
