"""Same answer from two processes as from one engine, over NIXL (SPEC H16).

48 prompts over CMA and tcp; {miss, D holds part, D holds all, P holds part} x {one chunk, many} x {page 1, 16} x ranks
{1:1, 2:1, 1:2} x {CMA, tcp}, half of the last three's pairs: 96; SmolLM2 1:1 and 3:1.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from replicas.engine.engine import Engine
from replicas.types import AdapterRef, Finish, FinishReason, GenerateRequest, SamplingParams, TokenDelta
from tests.adapters import make_adapter
from tests.engine_process import EngineProcess, ProcessSettings
from tests.numerics.handing_over import (
    CACHED,
    GREEDY,
    SEEDED,
    alone,
    check_held,
    legs,
    make_engine,
    same,
    save_models,
    tiny_prompt,
    warm_part,
)
from tests.numerics.test_states import saved_model
from tests.numerics.test_transformers_models import save
from tests.numerics.tiny import assert_greedy


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@dataclass
class Processes:
    prefill: EngineProcess
    decode: EngineProcess
    unified: Engine


@pytest.fixture(scope="module", params=["cma", "tcp"])
def processes(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Processes]:
    yield from start_processes(str(folders["gqa"]), request.param, prefill_tp=1, decode_tp=1)


@pytest.fixture(
    scope="module",
    params=[  # every two of transport, page size and ranks meet
        ("cma", 1, (1, 1)), ("cma", 16, (2, 1)), ("cma", 16, (1, 2)),
        ("tcp", 16, (1, 1)), ("tcp", 1, (2, 1)), ("tcp", 1, (1, 2)),
    ],
    ids=lambda p: f"{p[0]}-page{p[1]}-{p[2][0]}to{p[2][1]}",
)
def cell(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Processes]:
    """Chunks of 32 tokens."""
    transport, page, (prefill_tp, decode_tp) = request.param
    model = str(folders["gqa"])
    yield from start_processes(model, transport, page=page, prefill_tp=prefill_tp, decode_tp=decode_tp)


def start_processes(
    model: str, transport: str, *, prefill_tp: int, decode_tp: int, page: int = 16
) -> Iterator[Processes]:
    settings = ProcessSettings(model=model, page=page, chunk=32, transport=transport, heartbeat_misses=20)  # none dies
    ends = [EngineProcess(replace(settings, tp=tp)) for tp in (prefill_tp, decode_tp)]
    unified = make_engine(model, page, 32, None)
    yield Processes(ends[0], ends[1], unified)
    unified.close()
    for end in ends:
        end.close()


def check_processes(
    of: Processes, prompt: np.ndarray, sampling: SamplingParams, *, salt: str = "", adapter: AdapterRef | None = None
) -> list[TokenDelta]:
    """Returns: what the client is told."""
    request = GenerateRequest(
        rid="asked", token_ids=prompt, sampling=sampling, return_logprobs=True, top_logprobs=3, cache_salt=salt,
        adapter=adapter,
    )  # fmt: skip
    prefill, decode = legs(request, of.prefill.address)
    of.prefill.submit(prefill)
    of.decode.submit(decode)
    two = of.decode.finish("asked")
    assert of.prefill.finish("asked")[-1].finish == Finish(reason=FinishReason.HANDED_OFF)
    assert of.unified.flush_cache()
    same(two, alone(of.unified, request))
    return two


def check_balance(of: Processes) -> None:
    for end in (of.prefill, of.decode):
        pool = end.pool()
        assert pool.free_pages + pool.evictable_pages == pool.num_pages


@pytest.mark.model
def test_two_processes_answer_as_one_over_nixl(processes: Processes) -> None:
    """24 prompts: three families of eight that begin alike, of 1, 16, 33, 100, 1, 16, 33 and 100 tokens, so that both
    sides hold parts: the decode side 0, 0, 1, 2, 0, 1, 2 and 6 pages, of which the prefill side can use 0, 0, 1, 2, 0,
    0, 2 and 6, since it runs one token at least. None of them was seen before."""
    pages, cached = [], []
    for seed in range(24):
        length = (1, 16, 33, 100)[seed % 4]
        prompt = tiny_prompt(length, seed // 8)
        told = check_processes(processes, prompt, (GREEDY, SEEDED)[seed % 2])
        report = told[0].kv_transfer
        assert report is not None
        assert {delta.usage.prompt_tokens for delta in told} == {length}
        assert {delta.usage.cached_tokens for delta in told} == {told[-1].usage.cached_tokens}
        pages.append(-(-length // 16) - report.num_pages)
        cached.append(told[-1].usage.cached_tokens // 16)
    assert pages == [0, 0, 1, 2, 0, 1, 2, 6] * 3
    assert cached == [0, 0, 1, 2, 0, 0, 2, 6] * 3
    check_balance(processes)


@pytest.mark.model
def test_a_kv_transfer_of_a_request_with_an_adapter(processes: Processes, tmp_path: Path) -> None:
    """Both sides load it; the answer is that of one engine, and not the model's own. The pages of the same prompt that
    the decode side has from the model alone are not the request's."""
    model = Path(processes.unified.config.model.path)
    ref, prompt = make_adapter(tmp_path / "a", model, size=0.5), tiny_prompt(100, 50)
    base = GenerateRequest(rid="base", token_ids=prompt, sampling=GREEDY)
    processes.decode.submit(base)
    own = processes.decode.finish("base")
    assert processes.unified.executor.adapters is not None
    processes.unified.executor.adapters.load(ref, ())
    told = check_processes(processes, prompt, GREEDY, adapter=ref)
    assert told[0].kv_transfer is not None
    assert told[0].kv_transfer.num_pages == 7  # all of the prompt's
    assert [token for delta in told for token in delta.token_ids] != [i for delta in own for i in delta.token_ids]
    check_balance(processes)


@pytest.mark.model
@pytest.mark.parametrize(
    ("family", "ranks"), [("qwen3_next", (1, 1)), ("gpt_oss", (1, 1)), ("gpt_oss", (2, 1)), ("gpt_oss", (1, 2))]
)
def test_two_processes_hand_states_and_windows_over_with_the_ids_of_transformers(
    family: str, ranks: tuple[int, int], tmp_path: Path
) -> None:
    """Prompts of whole pages and others, in one chunk and several, a beginning that the decode side has."""
    model = saved_model(family, tmp_path) if family == "qwen3_next" else save(family, tmp_path)
    settings = ProcessSettings(model=str(tmp_path), page=16, chunk=32, transport="cma", heartbeat_misses=20)
    prefill, decode = (EngineProcess(replace(settings, tp=tp)) for tp in ranks)
    try:
        for length in (1, 32, 50, 100):
            prompt = tiny_prompt(length, 1) % 190 + 3
            first, second = legs(GenerateRequest(rid="asked", token_ids=prompt, sampling=GREEDY), prefill.address)
            prefill.submit(first)
            decode.submit(second)
            told = decode.finish("asked")
            assert prefill.finish("asked")[-1].finish == Finish(reason=FinishReason.HANDED_OFF)
            assert told[0].kv_transfer is not None
            assert told[0].kv_transfer.transferred, told[0].kv_transfer.reason
            assert_greedy(model, prompt.tolist(), [token for delta in told for token in delta.token_ids])
        assert decode.stats().prefill_tokens == 0
        kept = {"qwen3_next": "state", "gpt_oss": "window"}[family]
        assert {each.group for each in decode.stats().groups} == {"full", kept}
        for end in (prefill, decode):
            pool = end.pool()
            assert pool.free_pages + pool.evictable_pages == pool.num_pages
    finally:
        prefill.close()
        decode.close()


@pytest.mark.model
@pytest.mark.slow
def test_the_matrix_over_nixl(cell: Processes) -> None:
    """16 prompts for each of 6 pairs of processes: 24 tokens are one chunk, 64 and 100 many; 64 are whole pages. With
    unequal ranks heads are sliced."""
    page = cell.unified.kv.page_size
    for i, (cached, length) in enumerate(itertools.product(CACHED, (1, 24, 64, 100))):
        sampling, prompt, salt = (GREEDY, SEEDED)[i % 2], tiny_prompt(length, i), f"{cached} {length}"
        who, part = warm_part(prompt, cached)
        warm = GenerateRequest(
            rid="warm", token_ids=part, sampling=replace(GREEDY, max_new_tokens=1), cache_salt=salt
        )
        for end in [getattr(cell, name) for name in who if name != "unified"]:
            end.submit(warm)
            end.finish("warm")
        check_held(check_processes(cell, prompt, sampling, salt=salt), prompt, cached, page)
    check_balance(cell)
