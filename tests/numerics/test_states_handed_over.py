"""Models that keep a recurrent state, prefill and decode apart: Transformers' ids, as from one replica (SPEC H16).

Here by memcpy within one process; test_pd_transfer_nixl.py compares processes. States go with the last pages, in pages
of their own, and are verified as those are.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtransfer.types import TransferSettings
from replicas.cache.kv import goes_on_at
from replicas.cache.parts import SnapshotAllocator
from replicas.config import CacheConfig, SchedulerConfig
from replicas.engine.engine import Engine
from replicas.errors import InvalidConfig
from replicas.launch import EngineSettings, load_engine
from replicas.memory.state_pool import StatePool
from replicas.types import GenerateRequest, PdTransferReport, TokenDelta
from tests.engine_process import TOKEN
from tests.local_agents import LocalAgent, LocalFabric
from tests.numerics.handing_over import fetching, legs, run
from tests.numerics.test_states import (
    CONVOLUTION,
    DELTA_RULE,
    SCAN,
    STATE_SPACE,
    Saved,
    asked,
    engine_of,
    finished,
    ids_of,
    saved_models,
    snapshot_len,
)
from tests.numerics.tiny import assert_greedy


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    return saved_models(tmp_path_factory)


@dataclass
class Pair:
    """A prefill and a decode engine, and what they say between them."""

    prefill: Engine
    decode: Engine
    fabric: LocalFabric

    def answer(self, requests: Sequence[GenerateRequest]) -> list[TokenDelta]:
        """Hand all over at once. Returns: what their clients are told."""
        assert self.prefill.transfer_address is not None
        for request in requests:
            first, second = legs(request, self.prefill.transfer_address)
            self.prefill.submit(first)
            self.decode.submit(second)
        told = run([self.prefill, self.decode])[1]
        for engine in (self.prefill, self.decode):
            engine.scheduler.check()
            pool = engine.stats().pool
            assert pool.free_pages + pool.evictable_pages == pool.num_pages
        return told

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


def pair(
    folder: Path, *, chunk: int = 7, tokens: tuple[int, int] = (2048, 2048), overlap: str = "auto",
    page_size: int = 4, context_len: int = 256,
) -> Pair:  # fmt: skip
    fabric = LocalFabric()

    def side(name: str, num_tokens: int) -> Engine:
        return load_engine(
            EngineSettings(
                model=str(folder),
                cache=CacheConfig(page_size=page_size, max_total_tokens=num_tokens),
                scheduler=SchedulerConfig(
                    chunked_prefill_size=chunk, max_running_requests=4, new_token_ratio=0.1, overlap=overlap,  # type: ignore[arg-type]
                ),
                num_threads=1,
                context_len=context_len,
                transfer=TransferSettings(host="127.0.0.1", token=TOKEN),
                make_agent=lambda memory: LocalAgent(memory, fabric, name),
            )
        )  # fmt: skip

    return Pair(side("prefill", tokens[0]), side("decode", tokens[1]), fabric)


@pytest.fixture
def pairs(models: Callable[[str], Saved]) -> Iterator[Callable[..., Pair]]:
    made = list[Pair]()

    def of(model_type: str, **sizes: object) -> Pair:
        made.append(pair(models(model_type)[0], **sizes))  # type: ignore[arg-type]
        return made[-1]

    yield of
    for each in made:
        each.close()


def report_of(told: Sequence[TokenDelta], rid: str) -> PdTransferReport:
    (report,) = [each.kv_transfer for each in told if each.rid == rid and each.kv_transfer is not None]
    return report


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("model_type", [DELTA_RULE, STATE_SPACE, CONVOLUTION])
def test_two_replicas_answer_as_transformers_turn_after_turn(
    models: Callable[[str], Saved], pairs: Callable[..., Pair], model_type: str, chunk: int
) -> None:
    """Five chats at once, of which two begin alike and one ends with a page. From the second turn on both sides reuse
    what they have: the decode side is sent the pages that it lacks, and those of the states."""
    _, model = models(model_type)
    of, draw = pairs(model_type, chunk=chunk, tokens=(8192, 8192)), random.Random(2)
    texts = [[draw.randrange(3, 190) for _ in range(length)] for length in (1, 8, 23, 37)]
    texts.append([*texts[3][:30], *range(50, 57)])
    carried_len = of.decode.kv.carried.state_pages * 4
    assert carried_len > 0
    for turn in range(3):
        requests = [asked(f"{turn} {number}", text, 9) for number, text in enumerate(texts)]
        told = of.answer(requests)
        for number, text in enumerate(texts):
            rid = f"{turn} {number}"
            report, answer = report_of(told, rid), ids_of(told, rid)
            assert report.transferred, report.reason
            held = 0 if turn == 0 else (len(text) - 2) // 4  # its answer's last token and one more are new
            assert turn == 0 or report.num_pages == -(-len(text) // 4) - held
            assert report.num_bytes == (report.num_pages * 4 + carried_len) * of.decode.kv.store.size.cell_bytes
            assert len(answer) == 9
            assert_greedy(model, text, answer)
            text += [*answer, draw.randrange(3, 190)]
    assert of.decode.stats().prefill_tokens == 0
    assert of.prefill.stats().cached_tokens > 0


@pytest.mark.parametrize("length", [240, 241, 249])
def test_a_prompt_near_the_end_of_a_context_that_ends_within_a_page_is_handed_over(
    models: Callable[[str], Saved], pairs: Callable[..., Pair], length: int
) -> None:
    """Of 250 tokens, in pages of 16: from 241 on the prompt takes 16 pages, and those of its states follow."""
    of, prompt = pairs(DELTA_RULE, chunk=128, page_size=16, context_len=250), [3 + at % 180 for at in range(length)]
    told = of.answer([asked("a", prompt, 250 - length)])
    assert report_of(told, "a").transferred
    assert len(ids_of(told, "a")) == 250 - length
    assert_greedy(models(DELTA_RULE)[1], prompt, ids_of(told, "a"))


def test_a_fetch_brings_the_states_or_ends_where_the_donor_has_some(
    models: Callable[[str], Saved], pairs: Callable[..., Pair]
) -> None:
    """Turns go to one engine and the other. In the fourth the donor has lost the last states of each chat, in the fifth
    all: it refuses."""
    _, model = models(DELTA_RULE)
    of, draw, why = pairs(DELTA_RULE, tokens=(8192, 8192)), random.Random(2), list[str | None]()
    texts = [[draw.randrange(3, 190) for _ in range(length)] for length in (8, 23, 37)]
    for turn, number in itertools.product(range(5), range(len(texts))):
        text, receiver, donor = texts[number], *(of.decode, of.prefill)[:: 1 - turn % 2 * 2]
        request, end_len = asked(f"{turn} {number}", text, 9), (len(text) - 1) // 4 * 4
        parts, pages = donor.kv.store.parts, donor.kv.cache.match_prefix(request.token_ids[:end_len], "").pages
        assert isinstance(parts, SnapshotAllocator)
        assert donor.transfer_address is not None
        for page in pages[parts.has(pages)][{3: -1, 4: 0}.get(turn, len(pages)) :].tolist():
            parts.give_up(page)
        reach, here = (goes_on_at(request.token_ids[:end_len], "", each.kv) for each in (donor, receiver))
        receiver.submit(fetching(request, donor.transfer_address, end_len))
        told, _ = run([receiver, donor])
        report = report_of(told, request.rid)
        assert report.transferred == (turn not in (0, 4) and reach >= receiver.kv.page_size), report
        assert told[-1].usage.cached_tokens == max(reach, here)
        why.append(report.reason)
        assert_greedy(model, text, answer := ids_of(told, request.rid))
        text += [*answer, draw.randrange(3, 190)]
        for engine in (receiver, donor):
            engine.scheduler.check()
    assert sum(reason is None for reason in why) >= 6, why


def test_without_reuse_states_are_handed_over_too(models: Callable[[str], Saved], pairs: Callable[..., Pair]) -> None:
    """With overlap no state is kept behind a page."""
    of, prompts = pairs(DELTA_RULE, overlap="on"), {f"r{i}": list(range(3 + i, 20 + 3 * i)) for i in range(8)}
    told = of.answer([asked(rid, prompt, 9) for rid, prompt in prompts.items()])
    for rid, prompt in prompts.items():
        assert report_of(told, rid).transferred
        assert_greedy(models(DELTA_RULE)[1], prompt, ids_of(told, rid))


@pytest.mark.parametrize("flipped", [0, 1])
def test_a_state_that_is_not_what_was_sent_is_not_used(
    models: Callable[[str], Saved], pairs: Callable[..., Pair], flipped: int
) -> None:
    """The decode side has all pages of the prompt, so that its states alone are sent; one byte of them may change."""
    of, prompt = pairs(DELTA_RULE), list(range(9, 41))
    of.decode.submit(asked("warm", prompt, 1))
    finished(of.decode)
    of.fabric.faults.flip_bytes = flipped
    told = of.answer([asked("a", prompt, 9)])
    report, transfer = report_of(told, "a"), of.decode.stats().transfer
    assert transfer is not None
    assert (report.transferred, transfer.digest_mismatches) == (not flipped, flipped)
    assert flipped or (report.num_pages, report.num_bytes) == (
        0,
        of.decode.kv.carried.state_pages * 4 * of.decode.kv.store.size.cell_bytes,
    )
    assert len(ids_of(told, "a")) == 9
    assert_greedy(models(DELTA_RULE)[1], prompt, ids_of(told, "a"))


def test_the_decode_side_keeps_states_of_what_it_runs_itself(
    models: Callable[[str], Saved], pairs: Callable[..., Pair]
) -> None:
    """Of a prompt of 21 tokens and an answer of 12 that behind 32 of them, and none behind the prompt's five pages: a
    chat that goes on there reuses 32, one that leaves the answer out none, and both answer as Transformers does."""
    of, model, prompt = pairs(DELTA_RULE), models(DELTA_RULE)[1], list(range(60, 81))
    answer = ids_of(of.answer([asked("first", prompt, 12)]), "first")
    for rid, text, hit in (("on", [*prompt, *answer, 5, 6], 32), ("anew", [*prompt, 7, 8], 0)):
        of.decode.submit(asked(rid, text, 9))
        told = finished(of.decode)
        assert told[-1].usage.cached_tokens == hit
        assert_greedy(model, text, ids_of(told, rid))
    of.decode.scheduler.check()


def test_each_choice_of_a_request_that_is_handed_over_is_that_of_transformers(
    models: Callable[[str], Saved], pairs: Callable[..., Pair]
) -> None:
    """The states are those of the first one; the others compute the prompt."""
    of, prompt = pairs(DELTA_RULE), list(range(30, 67))
    request = asked("n", prompt, 9)
    told = of.answer([replace(request, sampling=replace(request.sampling, n=3))])
    for index in range(3):
        assert len(ids_of(told, "n", index)) == 9
        assert_greedy(models(DELTA_RULE)[1], prompt, ids_of(told, "n", index))


@pytest.mark.parametrize(
    ("is_small", "why"), [((True, False), "no pages carry"), ((False, True), "the pool has no room")]
)
def test_a_prompt_is_computed_where_no_pages_are_left_for_its_states(
    models: Callable[[str], Saved], pairs: Callable[..., Pair], is_small: tuple[bool, bool], why: str
) -> None:
    """A prompt of 40 tokens takes ten pages; its states want all but three."""
    tokens = tuple(snapshot_len(models(DELTA_RULE)[0]) + 12 if small else 2048 for small in is_small)
    of, prompt = pairs(DELTA_RULE, tokens=tokens), list(range(30, 70))
    assert of.decode.kv.carried.state_pages * 4 > 12
    assert of.prefill.transfer_address is not None
    first, second = legs(asked("a", prompt, 5), of.prefill.transfer_address)
    of.prefill.submit(first)
    of.decode.submit(second)
    told = list[TokenDelta]()
    while of.decode.has_work:
        of.prefill.step()
        told += of.decode.step()
    of.prefill.abort("a")  # as the router does when it hears that nothing is wanted of it
    run([of.prefill, of.decode])
    assert why in (report_of(told, "a").reason or "")
    assert len(ids_of(told, "a")) == 5
    assert_greedy(models(DELTA_RULE)[1], prompt, ids_of(told, "a"))
    for engine in (of.prefill, of.decode):
        engine.scheduler.check()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize(("method", "why"), [("read", "cannot be sent"), ("write", "cannot be taken over")])
def test_a_prompt_is_computed_where_its_states_cannot_be_copied(
    models: Callable[[str], Saved], pairs: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch,
    error: type[RuntimeError], method: str, why: str,
) -> None:  # fmt: skip
    """Once, in the first of two requests: both engines go on."""
    of, prompt, copy, failed = pairs(DELTA_RULE), list(range(30, 61)), getattr(StatePool, method), list[bool]()

    def short(*given: Any) -> Any:
        if not failed:
            failed.append(True)
            raise error("no room")
        return copy(*given)

    monkeypatch.setattr(StatePool, method, short)
    for rid in ("a", "b"):
        told = of.answer([asked(rid, prompt, 9)])
        report = report_of(told, rid)
        assert report.transferred == (rid == "b")
        assert rid == "b" or why in (report.reason or "")
        assert len(ids_of(told, rid)) == 9
        assert_greedy(models(DELTA_RULE)[1], prompt, ids_of(told, rid))


def test_a_model_that_keeps_states_alone_is_not_handed_over(pairs: Callable[..., Pair]) -> None:
    with pytest.raises(InvalidConfig, match="KV transfers of MambaForCausalLM: it keeps recurrent states alone"):
        pairs(SCAN)


@pytest.mark.parametrize("model_type", [DELTA_RULE, STATE_SPACE, CONVOLUTION, SCAN])
def test_a_request_goes_on_at_another_replica_when_its_own_is_killed(
    models: Callable[[str], Saved], model_type: str
) -> None:
    """It sends the prompt and what was delivered: in the middle of a page, at a page's end, behind one token. Where
    the other replica has the prompt's states it goes on there."""
    folder, model = models(model_type)
    first, second = engine_of(folder), engine_of(folder)
    try:
        for delivered in (1, 5, 9):
            rid, made, prompt = f"after {delivered}", list[int](), list(range(delivered, delivered + 39))
            second.submit(asked("warm", prompt, 1))
            finished(second)
            first.submit(asked(rid, prompt, 20))
            while len(made) < delivered:
                made += ids_of(first.step(), rid)
            first.abort(rid)  # nothing more is heard of it
            second.submit(asked(rid, prompt, 20, resumed_ids=tuple(made)))
            told = finished(second)
            assert told[-1].usage.cached_tokens == 36
            answer = [*made, *ids_of(told, rid)]
            assert len(answer) == 20
            assert_greedy(model, prompt, answer)
    finally:
        first.close()
        second.close()
