"""What tests of KV transfers compare: small engines, the legs of a request, what one replica says and what two say."""

import itertools
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.types import PdTicket, PeerAddress, TransferSettings
from replicas.config import AdapterLimits, CacheConfig, DType, Implementation, KvDType, SchedulerConfig
from replicas.engine.engine import Engine
from replicas.launch import EngineSettings, load_engine
from replicas.types import GenerateRequest, PdLeg, PdTransfer, SamplingParams, TokenDelta
from tests.embedded import MODEL
from tests.engine_process import TOKEN
from tests.local_agents import LocalAgent, LocalFabric
from tests.numerics import tiny

NUM_NEW = 6
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.9, top_p=0.95, top_k=50, seed=7, ignore_eos=True)
CACHED = ("miss", "decode part", "decode all", "prefill part")
ON_HOST = " on host"  # what is cached has left the device
WAIT_TURNS = 200_000
rooms = itertools.count(1)


def make_engine(
    model: str,
    page: int,
    chunk: int,
    fabric: LocalFabric | None,
    *,
    kv_dtype: KvDType | None = None,
    dtype: DType | None = None,
    implementation: Implementation = "auto",
    host_bytes: int = 8 << 20,
) -> Engine:
    names = itertools.count()
    settings = TransferSettings(host="127.0.0.1", token=TOKEN)
    return load_engine(
        EngineSettings(
            dtype=dtype,
            model=model,
            cache=CacheConfig(
                page_size=page,
                max_total_tokens=2048,
                kv_dtype=kv_dtype,
                host_memory_bytes=host_bytes,
                write_policy="write_back",
            ),
            scheduler=SchedulerConfig(chunked_prefill_size=chunk, max_running_requests=4),
            adapters=AdapterLimits(),
            num_threads=1,
            context_len=256,
            implementation=implementation,
            transfer=settings if fabric is not None else None,
            make_agent=lambda memory: LocalAgent(memory, fabric, f"{id(memory)}-{next(names)}"),  # type: ignore[arg-type]
        )
    )


def save_models(folder: Path) -> dict[str, Path]:
    """A model with as many KV heads as query heads, and one with half as many."""
    tiny.save("llama", folder / "mha", num_key_value_heads=4)
    tiny.save("qwen3", folder / "gqa")
    for name in ("mha", "gqa"):  # a vocabulary is wanted; which one does not matter
        for file in Path(MODEL).glob("*token*.json"):
            shutil.copy(file, folder / name)
    return {"mha": folder / "mha", "gqa": folder / "gqa"}


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
        replace(request, kv_transfer=PdTransfer(leg=PdLeg.PREFILL, ticket=ticket)),
        replace(request, kv_transfer=PdTransfer(leg=PdLeg.DECODE, ticket=ticket)),
    )


def fetching(request: GenerateRequest, donor: PeerAddress, end_len: int) -> GenerateRequest:
    ticket = PdTicket(room=next(rooms), generation=0, prefill=donor, end_len=end_len, within_s=20.0)
    return replace(request, kv_transfer=PdTransfer(leg=PdLeg.FETCH, ticket=ticket))


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


def check_held(told: list[TokenDelta], prompt: np.ndarray, cached: str, page: int, *, on_host: bool = False) -> None:
    """What was sent is what the decode side lacked, and the client is told what the prefill side had, and where."""
    prefill, decode = held_tokens(prompt, cached, page)
    report = told[0].kv_transfer
    assert report is not None
    assert report.num_pages == -(-len(prompt) // page) - decode // page
    for delta in told:
        assert (delta.usage.prompt_tokens, delta.usage.cached_tokens) == (len(prompt), prefill)
        assert delta.usage.host_tokens == (prefill if on_host else 0)


def same(two: list[TokenDelta], one: list[TokenDelta]) -> None:
    """Delta by delta: what the client sees; how much was cached where is `check_held`'s."""
    report = two[0].kv_transfer
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


def tiny_prompt(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, tiny.VOCAB, length).astype(np.int32)
