"""A request taken out of one engine and continued in another, over fake devices that notice every wrong slot."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from kvtransfer.errors import BadSnapshot, IncompatibleLayout
from kvtransfer.replay.snapshot import ReplaySnapshot
from replicas.engine.engine import Engine
from replicas.errors import InvalidRequest, Overloaded
from replicas.replay.replay import extract, extract_from_kvpool, restore, restore_to_kvpool
from replicas.request import ReqState
from replicas.types import Finish, FinishReason, GenerateRequest, PoolingParams, TokenDelta
from tests.fake_kv_bytes import FakeKvBytes
from tests.fakes import continuation
from tests.harness import ask, fake_engine, finish_all, retract

pytestmark = pytest.mark.model
PROMPT = list(range(10, 33))  # 23 tokens: two chunks of at most 16


def make(page_size: int = 4, *, num_pages: int = 64, model: str = "fake", **scheduler: object) -> Engine:
    engine, device = fake_engine(page_size=page_size, num_pages=num_pages, **scheduler)  # type: ignore[arg-type]
    engine.executor = replace(engine.executor, kv_bytes=FakeKvBytes(device, page_size=page_size, model=model))
    return engine


def after(engine: Engine, request: GenerateRequest, steps: int) -> tuple[ReplaySnapshot, list[TokenDelta]]:
    """Take a snapshot after ``steps`` steps. Returns: it, and the deltas until then."""
    deltas = engine.submit(request)
    for _ in range(steps):
        deltas += engine.step()
    return extract(engine, request.rid), deltas


def ids(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text(deltas: list[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize(("here", "there"), [(4, 4), (4, 1), (1, 4), (4, 16), (16, 3)])
@pytest.mark.parametrize("steps", range(9))
def test_a_request_goes_on_from_any_step_with_any_page_size(
    tmp_path: Path, steps: int, here: int, there: int
) -> None:
    """SPEC H17, H18. After 0 steps it waits, after 1 it has 16 of its 23 prompt tokens, after 2 its first token."""
    engine = make(here)
    snapshot, before = after(engine, ask("a", PROMPT), steps)
    assert snapshot.meta.num_tokens == (0, 16, 23, 24, 25, 26, 27, 28, 29)[steps]
    assert ids(before) == snapshot.output_ids.tolist() == continuation(PROMPT, max(steps - 1, 0))
    snapshot.save(tmp_path / "s")
    rest = finish_all(engine)  # the request itself goes on

    other = make(there)
    continued = restore(other, ReplaySnapshot.load(tmp_path / "s"))
    other.scheduler.check()
    while other.has_work:
        continued += other.step()
        other.scheduler.check()
    assert ids(continued) == ids(rest) == continuation(PROMPT, 8)[len(ids(before)) :]
    assert text(before) + text(continued) == text(before) + text(rest)
    assert continued[-1].finish == rest[-1].finish == Finish(reason=FinishReason.LENGTH)
    assert replace(continued[-1].usage, kept_tokens=0) == replace(rest[-1].usage, kept_tokens=0)  # of whole pages
    assert other.stats().prefill_tokens == (23, 7, 0)[min(steps, 2)]  # nothing that was there is computed again
    pool = other.stats().pool
    assert pool.free_pages + pool.evictable_pages == pool.num_pages


def test_what_a_stop_string_holds_back_is_not_lost() -> None:
    """The text ends with the beginning of a stop string where the snapshot is taken."""
    whole = make().tokenizer.decode(continuation(PROMPT, 8), True)
    for start in range(1, len(whole) - 4):
        stop = whole[start : start + 4]
        request = ask("a", PROMPT, stop=(stop,))
        for steps in range(2, 6):
            engine, other = make(), make(1)
            before = engine.submit(request)
            for _ in range(steps):
                before += engine.step()
            if not engine.has_work:
                break
            continued = restore(other, extract(engine, "a")) + finish_all(other)
            assert text(before + continued) == whole[: whole.index(stop)]
            assert continued[-1].finish == Finish(reason=FinishReason.STOP, matched=stop)


def test_a_choice_of_many_goes_on_alone() -> None:
    """Its seed is its own already."""
    engine = make()
    engine.submit(ask("a", PROMPT, n=3, max_new_tokens=6))
    for _ in range(4):
        engine.step()
    snapshot = extract(engine, "a", 2)
    rest = [delta for delta in finish_all(engine) if delta.index == 2]
    other = make()
    assert ids(restore(other, snapshot, rid="b") + finish_all(other)) == ids(rest)
    assert len(snapshot.output_ids) > 0
    assert snapshot.sampling["seed"] == ask("a", PROMPT).sampling.for_choice(2).seed != 0


def test_a_restored_request_does_not_use_what_is_cached_here() -> None:
    """Its pages are its own: 24 tokens with K/V and the one of the next step are 7 pages, none of them shared."""
    snapshot, _ = after(make(), ask("a", PROMPT), 3)
    other = make()
    other.submit(ask("same", PROMPT))
    finish_all(other)
    assert other.kv.cache.peek_len(np.array(PROMPT, dtype=np.int32), "") == 20
    restore(other, snapshot)
    other.step()
    pool = other.stats().pool
    assert (pool.reserved_pages, pool.protected_pages) == (7, 0)
    finish_all(other)
    other.scheduler.check()


def test_a_restored_request_says_what_was_cached_where_it_was_taken() -> None:
    """By tier: all of it counted as the device's."""
    snapshot, _ = after(make(), ask("a", PROMPT), 3)
    other = make()
    restore(other, replace(snapshot, cached={"device": 4, "host": 8, "store": 4}))
    req = other.find("a")
    assert req is not None
    assert req.cached.by_tier == {"device": 4, "host": 8, "store": 4}


def test_a_restored_request_can_be_retracted_and_aborted() -> None:
    snapshot, _ = after(make(), ask("a", PROMPT), 3)
    other = make()
    restore(other, snapshot)
    req = other.find("a")
    assert req is not None
    assert req.state is ReqState.RUNNING
    retract(other.scheduler, req)
    assert ids(finish_all(other)) == continuation(PROMPT, 8)[2:]
    restore(other, snapshot)
    assert other.abort("a")[-1].finish is not None
    other.scheduler.check()
    assert other.stats().pool.reserved_pages == 0


def test_an_engine_without_pages_takes_nothing() -> None:
    """24 tokens need 6 of 6 pages, and another request has one."""
    snapshot, _ = after(make(), ask("a", PROMPT), 3)
    other = make(num_pages=6)
    other.submit(ask("b", [1, 2, 3]))
    other.step()
    before = other.stats().pool
    with pytest.raises(Overloaded, match=r"no room for a snapshot of 24 tokens: .* needs 6 pages"):
        restore(other, snapshot)
    assert other.open_rids == ["b"]
    assert other.stats().pool == before
    other.scheduler.check()


def test_all_rows_taken_is_said_and_restored_later() -> None:
    snapshot, _ = after(make(), ask("a", PROMPT), 3)
    other = make()
    for i in range(8):
        other.submit(ask(f"b{i}", [i, 1]))
    other.step()
    with pytest.raises(Overloaded, match="8 requests run, and no more may"):
        restore(other, snapshot)
    finish_all(other)
    assert ids(restore(other, snapshot) + finish_all(other)) == continuation(PROMPT, 8)[2:]


def test_two_prompts_are_not_computed_at_a_time() -> None:
    """SPEC F06: one request is in the middle of its prompt."""
    snapshot, _ = after(make(), ask("a", PROMPT), 1)
    other = make()
    other.submit(ask("b", list(range(50, 80))))
    other.step()
    with pytest.raises(Overloaded, match="another prompt is being computed"):
        restore(other, snapshot)
    other.step()
    deltas = restore(other, snapshot) + finish_all(other)
    assert ids([delta for delta in deltas if delta.rid == "a"]) == continuation(PROMPT, 8)


def test_what_does_not_fit_together_is_refused() -> None:
    snapshot, _ = after(make(), ask("a", PROMPT), 3)
    with pytest.raises(IncompatibleLayout, match="model: 'other' here, 'fake' there"):
        restore(make(model="other"), snapshot)
    with pytest.raises(BadSnapshot, match=r"ended at ids \(2,\) where it was taken, and end at \(\) here"):
        restore(make(), replace(snapshot, eos_ids=(2,)))
    for field, what in (("tokenizer", "tokenizer"), ("chat_template", "chat template")):
        with pytest.raises(BadSnapshot, match=f"another {what} was used where it was taken: 0f, .* here"):
            restore(make(), replace(snapshot, **{field: "0f"}))  # type: ignore[arg-type]
    with pytest.raises(BadSnapshot, match="taken on a device of kind cuda, and this engine runs on cpu"):
        restore(make(), replace(snapshot, device="cuda"))
    fewer = {name: value for name, value in snapshot.sampling.items() if name != "top_p"}
    with pytest.raises(BadSnapshot, match=r"\['luck'\] are not known here, and \['top_p'\] are missing"):
        restore(make(), replace(snapshot, sampling={**fewer, "luck": 1}))
    blind = make()
    blind.executor = replace(blind.executor, kv_bytes=None)
    with pytest.raises(InvalidRequest, match="without access to its K/V bytes"):
        restore(blind, snapshot)


def test_a_request_that_is_not_open_has_no_snapshot() -> None:
    engine = make()
    engine.submit(ask("a", PROMPT))
    with pytest.raises(InvalidRequest, match=r"choice 0 of request 'b' is not open; open: \['a'\]"):
        extract(engine, "b")
    with pytest.raises(InvalidRequest, match="choice 1 of request 'a' is not open"):
        extract(engine, "a", 1)


def test_prompt_logprobs_are_made_anew() -> None:
    """They come with the first token, so a snapshot in the middle of the prompt starts from its beginning."""
    request = replace(ask("a", PROMPT), prompt_logprobs_from=1)
    snapshot, _ = after(make(), request, 1)
    assert (snapshot.meta.num_tokens, snapshot.prompt_logprobs_from) == (0, 1)
    snapshot, _ = after(make(), request, 2)
    assert (snapshot.meta.num_tokens, snapshot.prompt_logprobs_from) == (23, None)


@pytest.mark.parametrize(("pooling", "num_tokens"), [("mean", 0), ("last", 16)])
def test_the_mean_of_hidden_states_is_made_anew(pooling: Literal["mean", "last"], num_tokens: int) -> None:
    """The sum over the chunks so far is not in a snapshot: one in mid-prompt starts from its beginning."""
    request = ask("a", PROMPT, pooling=PoolingParams(method=pooling))
    snapshot, _ = after(make(), request, 1)
    assert snapshot.meta.num_tokens == num_tokens


@pytest.mark.parametrize("cut", range(24))
def test_a_range_is_put_back_bit_for_bit(cut: int) -> None:
    """SPEC H14, H17: [0, cut) and [cut, 23) from pages of 4 into pages of 3, in two parts."""
    engine, other = make(4), make(3)
    engine.submit(ask("a", PROMPT))
    for _ in range(2):
        engine.step()
    req = engine.find("a")
    other.submit(ask("a", PROMPT))
    blank = other.find("a")
    assert req is not None
    assert blank is not None
    assert engine.executor.kv_bytes is not None
    assert other.executor.kv_bytes is not None
    other.kv.admit(blank, reuse=False)
    for part in ((0, cut), (cut, 23)):
        meta, payload = extract_from_kvpool(engine, req, part)
        slots = restore_to_kvpool(other, blank, meta, payload)
        assert other.kv.slots_of(blank, *part).tolist() == slots.tolist()
        assert other.executor.kv_bytes.read(slots).tobytes() == payload.tobytes()
    whole = other.executor.kv_bytes.read(other.kv.slots_of(blank, 0, 23))
    assert whole.tobytes() == engine.executor.kv_bytes.read(engine.kv.slots_of(req, 0, 23)).tobytes()
    assert np.frombuffer(whole.tobytes(), np.int64).tolist() == PROMPT + list(range(23))


def test_a_range_with_a_hole_or_into_shared_pages_is_refused() -> None:
    engine = make()
    engine.submit(ask("a", PROMPT))
    for _ in range(2):
        engine.step()
    req = engine.find("a")
    assert req is not None
    with pytest.raises(ValueError, match=r"K/V of \[0, 24\) is wanted, of \[0, 23\) is there"):
        extract_from_kvpool(engine, req, (0, 24))
    meta, payload = extract_from_kvpool(engine, req, (4, 8))
    with pytest.raises(ValueError, match="tokens below 20 lie in shared pages"):
        restore_to_kvpool(engine, req, meta, payload)
    other = make()
    other.submit(ask("a", PROMPT))
    blank = other.find("a")
    assert blank is not None
    other.kv.admit(blank)
    with pytest.raises(ValueError, match="must start within the 0 tokens that have slots"):
        restore_to_kvpool(other, blank, meta, payload)


def test_a_restored_request_says_what_was_cached_for_it_where_it_began() -> None:
    """20 of its 23 prompt tokens had been computed for another; here nothing is cached."""
    engine = make()
    engine.submit(ask("before", PROMPT))
    finish_all(engine)
    snapshot, _ = after(engine, ask("a", PROMPT), 3)
    other = make()
    restore(other, snapshot)
    last = finish_all(other)[-1]
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.cached_tokens) == (23, 20)
