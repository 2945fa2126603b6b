"""Two engines hand a request over, and what both saw of it fits together."""

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.replay import observe
from tests.fakes import continuation
from tests.harness import ask, fake_engine, finish_all
from tests.pair import Pair
from tests.told_speculation import Told

pytestmark = pytest.mark.model
PROMPT = list(range(100, 145))  # 45 tokens: 12 pages of 4


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    observe.enable()
    yield caplog
    observe.enable(False)


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, object]]:
    told = [json.loads(record.getMessage()) for record in caplog.records if record.name == observe.log.name]
    return [fields for fields in told if fields["event"] == event]


@pytest.mark.parametrize("known", [0, 20, 44])
def test_what_the_prefill_side_sent_is_what_the_decode_side_got(events: pytest.LogCaptureFixture, known: int) -> None:
    """SPEC J01 and J03: hashes, range and size are equal, slots are each side's own; what D holds is left out."""
    pair = Pair()
    pair.decode.engine.submit(ask("other", [7] * 9))  # so that the two pools differ
    if known:
        pair.decode.engine.submit(ask("prime", [*PROMPT[:known], 3], max_new_tokens=1))
    for _ in range(20):
        pair.decode.engine.step()
    pair.ask("a", PROMPT)
    pair.run()
    (sent,), (got,) = lines(events, "prefill_before_send"), lines(events, "decode_after_restore")
    for name in ("rid", "prompt_len", "token_range", "layout", "payload_total_bytes", "k_hash", "v_hash"):
        assert sent[name] == got[name], name
    assert (sent["rid"], sent["prompt_len"], sent["token_range"]) == ("a", 45, [known, 45])
    assert sent["kv_indices"] != got["kv_indices"]
    assert sent["kv_indices"]["shape"] == [45 - known]  # type: ignore[index]
    assert got["req_to_token"]["shape"] == [45]  # type: ignore[index]
    both = got["req_to_token"]["first"][known:]  # type: ignore[index]
    assert got["kv_indices"]["first"][: len(both)] == both  # type: ignore[index]


def test_an_answer_of_one_token_is_seen_before_its_pages_go(events: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    pair.ask("a", PROMPT, max_new_tokens=1)
    pair.run()
    (sent,), (got,) = lines(events, "prefill_before_send"), lines(events, "decode_after_restore")
    assert (sent["k_hash"], sent["v_hash"]) == (got["k_hash"], got["v_hash"])


def test_each_decode_step_says_what_it_read_and_made(events: pytest.LogCaptureFixture) -> None:
    """SPEC J04: token 0 comes from the prompt's step; later ones from the token before, whose slot is reported."""
    engine, device = fake_engine()
    engine.submit(ask("a", PROMPT))
    finish_all(engine)
    made = continuation(PROMPT, 8)
    told = lines(events, "decode_step")
    assert [(step["i"], step["last_token"], step["next_token"]) for step in told] == [
        (i, made[i - 1], made[i]) for i in range(1, 8)
    ]
    assert [step["finish_reason"] for step in told] == [None] * 6 + ["length"]
    slots = np.array([step["kv_indices_new"] for step in told]).reshape(-1)
    assert device.tokens[slots].tolist() == made[:7]
    assert device.positions[slots].tolist() == list(range(45, 52))


def test_a_token_made_beside_a_prompt_is_reported_like_any_other(events: pytest.LogCaptureFixture) -> None:
    """SPEC J04; the prompt's own first token is none of a decode step."""
    engine, device = fake_engine(chunked_prefill_size=64)
    engine.submit(ask("a", PROMPT, max_new_tokens=4))
    engine.step()
    engine.submit(ask("b", range(200, 220), max_new_tokens=2))
    finish_all(engine)
    assert engine.stats().num_mixed_steps == 1
    made = continuation(PROMPT, 4)
    told = [step for step in lines(events, "decode_step") if step["rid"] == "a"]
    assert [(step["i"], step["last_token"], step["next_token"]) for step in told] == [
        (i, made[i - 1], made[i]) for i in range(1, 4)
    ]
    assert device.tokens[np.array([step["kv_indices_new"] for step in told]).reshape(-1)].tolist() == made[:3]


def test_a_step_that_was_made_ahead_when_observers_are_turned_on_is_left_out(
    events: pytest.LogCaptureFixture,
) -> None:
    """Tokens 0 to 2 are out by then, 3 is under way with a row of a request that has ended; reports begin with 4."""
    observe.enable(False)
    engine, _ = fake_engine(overlap="on")
    for rid in ("a", "b"):
        engine.submit(ask(rid, PROMPT, max_new_tokens=7))
    while engine.find("b").num_output < 3:  # type: ignore[union-attr]
        engine.step()
    assert engine.steps.under_way
    engine.abort("a")
    observe.enable()
    finish_all(engine)
    made = continuation(PROMPT, 7)
    told = [(step["rid"], step["i"], step["last_token"], step["next_token"]) for step in lines(events, "decode_step")]
    assert told == [("b", i, made[i - 1], made[i]) for i in (4, 5, 6)]


@pytest.mark.parametrize("end", ["stop_string", "stop_id", "eos", "length"])
def test_the_step_that_ends_an_answer_says_what_ended_it(events: pytest.LogCaptureFixture, end: str) -> None:
    engine, _ = fake_engine()
    made = continuation(PROMPT, 8)
    whole = engine.tokenizer.decode(made, True)
    if end == "eos":
        engine.config = replace(engine.config, model=replace(engine.config.model, eos_ids=(made[5],)))
    stops = {"stop_string": {"stop": (whole[8:12],)}, "stop_id": {"stop_token_ids": (made[5],)}}
    engine.submit(ask("a", PROMPT, **stops.get(end, {})))
    finish_all(engine)
    ends = [step["finish_reason"] for step in lines(events, "decode_step")]
    assert ends == [None] * (len(ends) - 1) + [end]


def test_of_the_tokens_that_drafts_bring_in_one_step_the_last_has_the_end(events: pytest.LogCaptureFixture) -> None:
    engine, _ = fake_engine()
    made = continuation(PROMPT, 8)
    engine.scheduler.features["speculation"] = Told(engine, {("a", 0): made})
    engine.submit(ask("a", PROMPT))
    finish_all(engine)
    told = lines(events, "decode_step")
    assert [step["next_token"] for step in told] == made[1:]
    assert engine.scheduler.counters["accepted_tokens.text"] > 0
    assert [step["finish_reason"] for step in told] == [None] * 6 + ["length"]


def test_an_observation_that_fails_ends_no_step_and_is_said_once(events: pytest.LogCaptureFixture) -> None:
    """SPEC L10: the pools cannot be read on either side, nor what a step did; two requests get their whole answers."""
    pair = Pair()
    for side in (pair.prefill, pair.decode):
        side.engine.executor.kv_bytes.read = None  # type: ignore[method-assign, union-attr, assignment]
    events.clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(observe, "decode_step", None)
        for rid in "ab":
            pair.ask(rid, PROMPT)
        pair.run()
    assert [pair.decode.ids(rid) for rid in "ab"] == [continuation(PROMPT, 8)] * 2
    assert pair.decode.report("a").transferred
    told = [record.getMessage() for record in events.records if record.name == observe.log.name]
    assert sorted(line.split()[0] for line in told) == [
        "Observer.after_restore", "Observer.after_step", "Observer.before_send"
    ]  # fmt: skip


def test_nothing_is_read_unless_observers_are_on(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    for side in (pair.prefill, pair.decode):
        side.engine.executor.kv_bytes.read = None  # type: ignore[method-assign, union-attr, assignment]
    pair.ask("a", PROMPT)
    pair.run()
    assert lines(caplog, "decode_step") == []
