"""Same answer from two replicas as from one: ids, text, logprobs, usage, the cut into deltas (SPEC H16). Here
by memcpy within one process; test_pd_transfer_nixl.py compares processes.

{miss, D holds part, D holds all, P holds part, on the device or the host} x {one chunk, many} x {page 1, 16} x {greedy,
models: every two of these values meet (tests/pairwise.py), with prompts of four lengths; and SmolLM2's first blocks.
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from replicas.config import DType, KvDType
from replicas.engine.engine import Engine
from replicas.kernels import bf16_tiles
from replicas.types import Constraint, FinishReason, GenerateRequest, SamplingParams
from tests.embedded import short_model
from tests.harness import to_host
from tests.local_agents import LocalFabric
from tests.numerics.handing_over import (
    CACHED,
    GREEDY,
    ON_HOST,
    SEEDED,
    alone,
    check_held,
    held_tokens,
    legs,
    make_engine,
    run,
    same,
    save_models,
    tiny_prompt,
    warm_part,
)
from tests.pairwise import cases

pytestmark = pytest.mark.model

SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED}
LENGTHS = (1, 37, 64, 80)  # tokens; 64 and 80 are whole pages of 16


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


def trio(model: str, page: int, chunk: int, *, kv_dtype: KvDType | None = None, dtype: DType | None = None) -> Trio:
    fabric = LocalFabric()
    made = (make_engine(model, page, chunk, of, kv_dtype=kv_dtype, dtype=dtype) for of in (fabric, fabric, None))
    return Trio(*made)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def trios(folders: dict[str, Path]) -> Iterator[Callable[..., Trio]]:
    """Makes those that a test asks for, each once; model "mha", "gqa", or a folder."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def of(model: str, page: int, chunk: int, kv_dtype: KvDType | None = None, dtype: DType | None = None) -> Trio:
            made = trio(str(folders.get(model, model)), page, chunk, kv_dtype=kv_dtype, dtype=dtype)
            stack.callback(made.close)
            return made

        yield of


def check_pair(of: Trio, prompt: np.ndarray, cached: str, sampling: SamplingParams) -> None:
    of.forget()
    cached, on_host = cached.removesuffix(ON_HOST), cached.endswith(ON_HOST)
    who, part = warm_part(prompt, cached)
    warm = GenerateRequest(rid="warm", token_ids=part, sampling=replace(GREEDY, max_new_tokens=1))
    for name in who:
        alone(getattr(of, name), warm)
    request = GenerateRequest(rid="asked", token_ids=prompt, sampling=sampling, return_logprobs=True, top_logprobs=3)
    if on_host:
        for engine in (of.prefill, of.decode):
            to_host(engine.kv)
    assert of.prefill.transfer_address is not None
    prefill, decode = legs(request, of.prefill.transfer_address)
    computed = of.decode.stats().prefill_tokens
    of.prefill.submit(prefill)
    of.decode.submit(decode)
    handed, two = run([of.prefill, of.decode])
    assert [delta.finish.reason for delta in handed if delta.finish] == [FinishReason.HANDED_OFF]
    assert of.decode.stats().prefill_tokens == computed, "the decode side computed part of the prompt"
    same(two, alone(of.unified, request))
    check_held(two, prompt, cached, of.decode.kv.page_size, on_host=on_host)
    for engine, held in zip((of.prefill, of.decode), held_tokens(prompt, cached, of.decode.kv.page_size), strict=True):
        tiers = engine.kv.store.tiers
        assert tiers is not None
        assert tiers.counters.loaded_pages * engine.kv.page_size == (held if on_host else 0)
        tiers.counters.loaded_pages = 0
    for engine in (of.prefill, of.decode):
        engine.scheduler.check()
        pool = engine.stats().pool
        assert pool.free_pages + pool.evictable_pages == pool.num_pages


@cases(
    model=["mha", "gqa"],
    page=[1, 16],
    chunk={"chunked": 16, "whole": 512},
    sampling=SAMPLINGS,
    cached=[*CACHED, *(cached + ON_HOST for cached in CACHED[1:])],
)
def test_two_tiny_replicas_answer_as_one(
    trios: Callable[..., Trio], model: str, page: int, chunk: int, sampling: SamplingParams, cached: str
) -> None:
    for seed, length in enumerate(LENGTHS):
        check_pair(trios(model, page, chunk), tiny_prompt(length, seed), cached, sampling)


@pytest.mark.parametrize("way", ["this CPU's", None])
def test_two_replicas_in_bfloat16_answer_as_one(
    trios: Callable[..., Trio], way: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, activations of products where the CPU multiplies it, K and V: what is handed over was rounded once."""
    if way is None:
        monkeypatch.setattr(bf16_tiles, "way", lambda: None)
    made = trios("gqa", 1 if way is None else 16, 16, dtype="bfloat16")
    assert made.decode.config.kv_dtype == "bfloat16"
    for seed, (length, cached) in enumerate(itertools.product(LENGTHS, CACHED)):
        check_pair(made, tiny_prompt(length, seed), cached, SEEDED if seed % 2 else GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("page", [1, 16])
def test_two_replicas_with_narrow_pages_answer_as_one(trios: Callable[..., Trio], kv_dtype: KvDType, page: int) -> None:
    """Pages go over with the scales of their numbers."""
    for seed, (length, cached) in enumerate(itertools.product(LENGTHS, CACHED)):
        check_pair(trios("gqa", page, 16, kv_dtype), tiny_prompt(length, seed), cached, GREEDY)


@pytest.mark.parametrize("cached", CACHED)
def test_masked_tokens_are_made_on_neither_side(trios: Callable[..., Trio], cached: str) -> None:
    """The first token is the prefill side's, and begins a word that must not end."""
    of = trios("gqa", 16, 16)

    def made(prompt: np.ndarray, sampling: SamplingParams) -> list[int]:
        request = GenerateRequest(rid="alone", token_ids=prompt, sampling=sampling)
        return [token for delta in alone(of.unified, request) for token in delta.token_ids]

    for seed, length in enumerate(LENGTHS):
        prompt = tiny_prompt(length, seed)
        first, second = made(prompt, SEEDED)[:2]
        masked = replace(SEEDED, bad_words=((first, second),), allowed_token_ids=(*range(5, 90), first, second))
        check_pair(of, prompt, cached, masked)
        assert made(prompt, masked)[0] == first
        assert made(prompt, masked)[1] != second


@pytest.mark.parametrize("cached", CACHED[:2])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_constrained_answer_of_two_replicas_is_that_of_one(
    trios: Callable[..., Trio], sampling: SamplingParams, cached: str
) -> None:
    """Each side compiles the grammar: the prefill side's first token is held to it, and the decode side goes on."""
    of = trios(short_model(), 16, 32)
    prompt = of.unified.tokenizer.encode("The keeper of the lighthouse wrote down one word of three letters each day, ")
    for text in ("[a-z]{3} [a-z]{3}", "Monday: (rain|sun)"):  # the second begins with a forced run
        constraint = Constraint(kind="regex", text=text)
        held = replace(sampling, constraint=constraint, max_new_tokens=12)
        check_pair(of, prompt, cached, held)
        made = alone(of.unified, GenerateRequest(rid="again", token_ids=prompt, sampling=held))
        assert re.fullmatch(text, "".join(delta.text for delta in made))
