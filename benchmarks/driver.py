"""Drives an engine without HTTP, and times what its steps consist of.

Owns:      how an offline run is timed: what counts as a decode step, where a prefill ends.
Never:     starts a thread: the caller's thread steps the engine.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from benchmarks.workloads import Workload
from replicas.engine.engine import Engine
from replicas.engine.ranks import Ranks
from replicas.runner.model_runner import ModelRunner
from replicas.types import GenerateRequest, SamplingParams, TokenDelta

_numbers = count()


def request(token_ids: Sequence[int], max_new_tokens: int) -> GenerateRequest:
    """A greedy request that makes exactly ``max_new_tokens`` tokens."""
    return GenerateRequest(
        rid=f"bench-{next(_numbers)}",
        token_ids=np.array(token_ids, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True),
    )


def prefill_s(engine: Engine, token_ids: Sequence[int]) -> float:
    """Seconds from submitting an uncached prompt to its first token."""
    engine.submit(request(token_ids, 1))
    started_s = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started_s


@dataclass(frozen=True, slots=True)
class Decoded:
    """The decode steps of one batch, and what they made."""

    step_s: tuple[float, ...]  # of steps in which every request of the batch got a token
    batch: int
    token_ids: tuple[tuple[int, ...], ...]  # [B] each request's output

    @property
    def tokens_per_s(self) -> float:
        return self.batch * len(self.step_s) / sum(self.step_s)


def decode(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Decoded:
    """Generate for all prompts at once; only steps after everyone's first token count."""
    requests = [request(prompt, max_new_tokens) for prompt in prompts]
    outputs: dict[str, list[int]] = {r.rid: [] for r in requests}
    for r in requests:
        engine.submit(r)
    times: list[float] = []
    while engine.has_work:
        all_decode = all(outputs.values())
        started_s = time.perf_counter()
        deltas = engine.step()
        step_s = time.perf_counter() - started_s
        if all_decode and len(deltas) == len(requests):
            times.append(step_s)
        _collect(outputs, deltas)
    return Decoded(tuple(times), len(requests), tuple(tuple(ids) for ids in outputs.values()))


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the wall time of some steps went."""

    total_s: float
    products_s: float
    attention_s: float

    @property
    def outside_share(self) -> float:
        """Share of the time outside matrix products and attention."""
        return 1 - (self.products_s + self.attention_s) / self.total_s


def step_parts(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[Parts, Parts]:
    """Generate for all prompts at once, attention called by itself as a decode step of programs does not do. Returns:
    the parts up to everyone's first token, and from there to the end."""
    requests = [request(prompt, max_new_tokens) for prompt in prompts]
    outputs: dict[str, list[int]] = {r.rid: [] for r in requests}
    for r in requests:
        engine.submit(r)
    if (fused := _runner(engine)._model.fused) is not None:
        fused.apart = True

    def run(until_first: bool) -> Parts:
        with watched(*_matrix_products(engine)) as products, watched(*_attention(engine)) as attends:
            started_s = time.perf_counter()
            while engine.has_work and not (until_first and all(outputs.values())):
                _collect(outputs, engine.step())
            return Parts(time.perf_counter() - started_s, products.total_s, attends.total_s)

    parts = run(until_first=True), run(until_first=False)
    if fused is not None:
        fused.apart = False
    return parts


@dataclass(frozen=True, slots=True)
class Served:
    """A workload run to its end."""

    wall_s: float
    scheduling_s: float  # of it, in the scheduler and the prefix cache
    prompt_tokens: int
    cached_tokens: int
    outputs: tuple[tuple[int, ...], ...]  # in the workload's order


def serve(engine: Engine, workload: Workload, concurrency: int) -> Served:
    """Run single-turn conversations with at most ``concurrency`` open; the next is submitted as one ends."""
    turns = [conversation.turns[0] for conversation in workload.conversations]
    requests = [request(turn.token_ids, turn.max_new_tokens) for turn in turns]
    outputs: dict[str, list[int]] = {r.rid: [] for r in requests}
    cached = 0
    unsent = iter(requests)
    num_open = 0
    with watched((engine.scheduler, "schedule"), (engine.scheduler, "apply")) as scheduling:
        started_s = time.perf_counter()
        while True:
            while num_open < concurrency and (following := next(unsent, None)) is not None:
                engine.submit(following)
                num_open += 1
            if not num_open:
                break
            deltas = engine.step()
            _collect(outputs, deltas)
            ended = [delta for delta in deltas if delta.finish is not None]
            num_open -= len(ended)
            cached += sum(delta.usage.cached_tokens for delta in ended)
        wall_s = time.perf_counter() - started_s
    return Served(
        wall_s=wall_s,
        scheduling_s=scheduling.total_s,
        prompt_tokens=workload.prompt_tokens,
        cached_tokens=cached,
        outputs=tuple(tuple(ids) for ids in outputs.values()),
    )


def _collect(outputs: dict[str, list[int]], deltas: Sequence[TokenDelta]) -> None:
    for delta in deltas:
        outputs[delta.rid] += delta.token_ids


class Stopwatch:
    """Sums the time spent inside the calls it was put around. CPU only: a call there returns when its work is done."""

    def __init__(self) -> None:
        self.total_s = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.total_s += time.perf_counter() - started_s

        return timed


@contextmanager
def watched(*calls: tuple[object, str]) -> Iterator[Stopwatch]:
    """A stopwatch around ``(object, name of something it calls)`` pairs while the block runs."""
    stopwatch = Stopwatch()
    before = [vars(owner).get(name) for owner, name in calls]
    for owner, name in calls:
        setattr(owner, name, stopwatch.around(getattr(owner, name)))
    try:
        yield stopwatch
    finally:
        for (owner, name), original in zip(calls, before, strict=True):
            if original is None:  # a method: its class still has it
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _matrix_products(engine: Engine) -> list[tuple[object, str]]:
    """Every matrix product of the model on this rank, for `watched`; in programs together with what stands between."""
    model = _runner(engine)._model
    programs = [(program, "run") for program in model.fused.programs] if model.fused is not None else []
    return [(layer, "matmul") for _, layer in model.walk() if hasattr(layer, "matmul")] + programs


def _attention(engine: Engine) -> list[tuple[object, str]]:
    """The attention backend's calls (storing K and V included), for `watched`."""
    backend = _runner(engine).attention
    return [(backend, "begin"), (backend, "forward")]


def _runner(engine: Engine) -> ModelRunner:
    """Rank 0's runner: the engine itself knows only how to launch a plan."""
    ranks = getattr(engine.steps.launch, "__self__", None)
    assert isinstance(ranks, Ranks), "this engine was not built by load_engine; its steps cannot be taken apart"
    return ranks.runner
