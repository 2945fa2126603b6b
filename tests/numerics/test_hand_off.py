"""Same answer from two replicas as from one: ids, text, logprobs, usage, the cut into deltas (SPEC H16; DESIGN.md
section 3).

{miss, D holds part, D holds all, P holds part} x {one chunk, many} x {page 1, 16} x {greedy, seeded}; tiny MHA and GQA
models and SmolLM2 by memcpy within one process: 256 + 16 prompts. Over NIXL between two processes: 48 prompts over CMA
and tcp, the matrix again with ranks 1:1, 2:1 and 1:2 (192), SmolLM2 1:1 (104) and 3:1 (8): 352.
"""

import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine_process import TOKEN, EngineProcess
from kvtransfer.local import LocalAgent, LocalFabric
from kvtransfer.types import PdTicket, PeerAddress, TransferSettings
from replicas.config import CacheConfig, SchedulerConfig
from replicas.engine import Engine
from replicas.launch import load_engine
from replicas.types import Finish, FinishReason, GenerateRequest, HandOff, PdLeg, SamplingParams, TokenDelta
from tests.embedded import MODEL
from tests.numerics import tiny

NUM_NEW = 6
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.9, top_p=0.95, top_k=50, seed=7, ignore_eos=True)
CACHED = ("miss", "decode part", "decode all", "prefill part")
LENGTHS = (1, 37, 64, 80)  # tokens; 64 and 80 are whole pages of 16
SHORT = replace(GREEDY, max_new_tokens=3)
SHORT_SEEDED = replace(SEEDED, max_new_tokens=3)
WAIT_TURNS = 200_000
rooms = itertools.count(1)


def make_engine(model: str, page: int, chunk: int, fabric: LocalFabric | None) -> Engine:
    names = itertools.count()
    settings = TransferSettings(host="127.0.0.1", token=TOKEN)
    return load_engine(
        model,
        cache=CacheConfig(page_size=page, max_total_tokens=2048),
        scheduler=SchedulerConfig(chunked_prefill_size=chunk, max_running_requests=4),
        num_threads=1,
        context_len=256,
        transfer=settings if fabric is not None else None,
        make_agent=lambda memory: LocalAgent(memory, fabric, f"{id(memory)}-{next(names)}"),  # type: ignore[arg-type]
    )


@dataclass
class Trio:
    """A prefill and a decode engine, and one that does all by itself."""

    prefill: Engine
    decode: Engine
    unified: Engine

    def forget(self) -> None:
        for engine in (self.prefill, self.decode, self.unified):
            assert engine.flush_cache()

    def close(self) -> None:
        for engine in (self.prefill, self.decode, self.unified):
            engine.close()


def trio(model: str, page: int, chunk: int) -> Trio:
    fabric = LocalFabric()
    return Trio(
        make_engine(model, page, chunk, fabric),
        make_engine(model, page, chunk, fabric),
        make_engine(model, page, chunk, None),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with as many KV heads as query heads, and one with half as many."""
    folder = tmp_path_factory.mktemp("models")
    tiny.save("llama", folder / "mha", num_key_value_heads=4)
    tiny.save("qwen3", folder / "gqa")
    for name in ("mha", "gqa"):  # a vocabulary is wanted; which one does not matter
        for file in Path(MODEL).glob("*token*.json"):
            shutil.copy(file, folder / name)
    return {"mha": folder / "mha", "gqa": folder / "gqa"}


@pytest.fixture(
    scope="module",
    params=list(itertools.product(("mha", "gqa"), (1, 16), (16, 512))),
    ids=lambda p: f"{p[0]}-page{p[1]}-{'chunked' if p[2] < 512 else 'whole'}",
)
def tiny_trio(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Trio]:
    model, page, chunk = request.param
    made = trio(str(folders[model]), page, chunk)
    yield made
    made.close()


def run(engines: Sequence[Engine]) -> list[list[TokenDelta]]:
    """Step all until none has work. Returns: the deltas of each."""
    told: list[list[TokenDelta]] = [[] for _ in engines]
    for _ in range(WAIT_TURNS):
        if not any(engine.has_work for engine in engines):
            return told
        for engine, deltas in zip(engines, told, strict=True):
            deltas += engine.step()
    raise AssertionError("the engines are still busy")


def alone(engine: Engine, request: GenerateRequest) -> list[TokenDelta]:
    engine.submit(request)
    return run([engine])[0]


def legs(request: GenerateRequest, peer: PeerAddress) -> tuple[GenerateRequest, GenerateRequest]:
    ticket = PdTicket(room=next(rooms), generation=0, prefill=peer)
    return (
        replace(request, hand_off=HandOff(leg=PdLeg.PREFILL, ticket=ticket)),
        replace(request, hand_off=HandOff(leg=PdLeg.DECODE, ticket=ticket)),
    )


def warm_part(prompt: np.ndarray, cached: str) -> tuple[list[str], np.ndarray]:
    """Who computes what before: the first half, or all of it."""
    half = prompt[: max(1, len(prompt) // 2)]
    return {
        "miss": ([], half),
        "decode part": (["decode"], half),
        "decode all": (["decode"], prompt),
        "prefill part": (["prefill", "unified"], half),
    }[cached]


def held_tokens(prompt: np.ndarray, cached: str, page: int) -> tuple[int, int]:
    """(of the prefill side, of the decode side): whole pages; the prefill side always runs one token at least."""
    half = max(1, len(prompt) // 2)
    sizes = {
        "miss": (0, 0),
        "decode part": (0, half),
        "decode all": (0, len(prompt)),
        "prefill part": (min(half, len(prompt) - 1), 0),
    }[cached]
    return sizes[0] // page * page, sizes[1] // page * page


def check_held(told: list[TokenDelta], prompt: np.ndarray, cached: str, page: int) -> None:
    """What was sent is what the decode side lacked, and the client is told what the prefill side had."""
    prefill, decode = held_tokens(prompt, cached, page)
    report = told[0].hand_off
    assert report is not None
    assert report.num_pages == -(-len(prompt) // page) - decode // page
    for delta in told:
        assert (delta.usage.prompt_tokens, delta.usage.cached_tokens) == (len(prompt), prefill)


def same(two: list[TokenDelta], one: list[TokenDelta]) -> None:
    """Delta by delta: what the client sees; how much was cached where is `check_held`'s."""
    report = two[0].hand_off
    assert report is not None
    assert report.transferred, report.reason
    for mine, theirs in zip(two, one, strict=True):
        assert (mine.token_ids, mine.text, mine.finish) == (theirs.token_ids, theirs.text, theirs.finish)
        assert mine.usage.prompt_tokens == theirs.usage.prompt_tokens
        assert mine.usage.completion_tokens == theirs.usage.completion_tokens
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert [i for i, _ in a.top] == [i for i, _ in b.top]
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=1e-4)


def check_pair(of: Trio, prompt: np.ndarray, cached: str, sampling: SamplingParams) -> None:
    of.forget()
    who, part = warm_part(prompt, cached)
    warm = GenerateRequest(rid="warm", token_ids=part, sampling=replace(GREEDY, max_new_tokens=1))
    for name in who:
        alone(getattr(of, name), warm)
    request = GenerateRequest(rid="asked", token_ids=prompt, sampling=sampling, return_logprobs=True, top_logprobs=3)
    assert of.prefill.transfer_address is not None
    prefill, decode = legs(request, of.prefill.transfer_address)
    computed = of.decode.stats().prefill_tokens
    of.prefill.submit(prefill)
    of.decode.submit(decode)
    handed, two = run([of.prefill, of.decode])
    assert [delta.finish.reason for delta in handed if delta.finish] == [FinishReason.HANDED_OFF]
    assert of.decode.stats().prefill_tokens == computed, "the decode side computed part of the prompt"
    same(two, alone(of.unified, request))
    check_held(two, prompt, cached, of.decode.kv.page_size)
    for engine in (of.prefill, of.decode):
        engine.scheduler.check()
        pool = engine.stats().pool
        assert pool.free_pages + pool.evictable_pages == pool.num_pages


def tiny_prompt(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, tiny.VOCAB, length).astype(np.int32)


@pytest.mark.model
@pytest.mark.parametrize("cached", CACHED)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_two_tiny_replicas_answer_as_one(tiny_trio: Trio, sampling: SamplingParams, cached: str) -> None:
    """Four prompts for each of 8 engines x 8 cases: 256."""
    for seed, length in enumerate(LENGTHS):
        check_pair(tiny_trio, tiny_prompt(length, seed), cached, sampling)


@pytest.fixture(
    scope="module", params=[(1, 512), (16, 32)], ids=lambda p: f"page{p[0]}-{'chunked' if p[1] < 512 else 'whole'}"
)
def smol_trio(request: pytest.FixtureRequest) -> Iterator[Trio]:
    made = trio(MODEL, *request.param)
    yield made
    made.close()


@pytest.mark.model
@pytest.mark.parametrize("cached", CACHED)
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_two_smollm2_replicas_answer_as_one(smol_trio: Trio, sampling: SamplingParams, cached: str) -> None:
    text = "The harbour had been quiet for most of the winter, and the men who mended nets along the quay had taken to "
    prompt = smol_trio.unified.tokenizer.encode(text * 2)[:48]
    check_pair(smol_trio, prompt, cached, sampling)


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
    params=list(itertools.product(("cma", "tcp"), (1, 16), ((1, 1), (2, 1), (1, 2)))),
    ids=lambda p: f"{p[0]}-page{p[1]}-{p[2][0]}to{p[2][1]}",
)
def cell(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Processes]:
    """Chunks of 32 tokens."""
    transport, page, (prefill_tp, decode_tp) = request.param
    model = str(folders["gqa"])
    yield from start_processes(model, transport, page=page, prefill_tp=prefill_tp, decode_tp=decode_tp)


@pytest.fixture(scope="module")
def smol_processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    prefill_tp, decode_tp = request.param
    yield from start_processes(MODEL, "cma", prefill_tp=prefill_tp, decode_tp=decode_tp)


def start_processes(
    model: str, transport: str, *, prefill_tp: int, decode_tp: int, page: int = 16
) -> Iterator[Processes]:
    ends = [EngineProcess(model, page=page, chunk=32, transport=transport, tp=tp) for tp in (prefill_tp, decode_tp)]
    unified = make_engine(model, page, 32, None)
    yield Processes(ends[0], ends[1], unified)
    unified.close()
    for end in ends:
        end.close()


def check_processes(
    of: Processes, prompt: np.ndarray, sampling: SamplingParams, *, salt: str = ""
) -> list[TokenDelta]:
    """Returns: what the client is told."""
    request = GenerateRequest(
        rid="asked", token_ids=prompt, sampling=sampling, return_logprobs=True, top_logprobs=3, cache_salt=salt
    )
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
        report = told[0].hand_off
        assert report is not None
        assert {delta.usage.prompt_tokens for delta in told} == {length}
        assert {delta.usage.cached_tokens for delta in told} == {told[-1].usage.cached_tokens}
        pages.append(-(-length // 16) - report.num_pages)
        cached.append(told[-1].usage.cached_tokens // 16)
    assert pages == [0, 0, 1, 2, 0, 1, 2, 6] * 3
    assert cached == [0, 0, 1, 2, 0, 0, 2, 6] * 3
    check_balance(processes)


@pytest.mark.model
@pytest.mark.slow
def test_the_matrix_over_nixl(cell: Processes) -> None:
    """16 prompts for each of 12 pairs of processes: 24 tokens are one chunk, 64 and 100 many; 64 are whole pages. With
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


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("smol_processes", "num_prompts"), [((1, 1), 104), ((3, 1), 8)], indirect=["smol_processes"], ids=["1to1", "3to1"]
)
def test_two_smollm2_processes_answer_as_one_over_nixl(smol_processes: Processes, num_prompts: int) -> None:
    """104 prompts from one rank to one, 8 from three to one: every window of a text that begins 3 tokens on."""
    text = "The harbour had been quiet for most of the winter, and the men who mended nets along the quay had taken to "
    ids = smol_processes.unified.tokenizer.encode(text * 20)
    for i in range(num_prompts):
        length = (1, 16, 33, 20)[i % 4]
        check_processes(smol_processes, ids[3 * i : 3 * i + length], (SHORT, SHORT_SEEDED)[i // 4 % 2])
    check_balance(smol_processes)
