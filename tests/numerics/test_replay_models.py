"""Snapshots of real models go on in fresh processes with the tokens, texts and logprobs of the undisturbed request.

{greedy, seeded, penalties, stop strings, bias} x {page sizes that differ} x {ranks that differ} (SPEC H17, H18).
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtransfer.replay.snapshot import ReplaySnapshot
from replicas.engine.engine import Engine
from replicas.replay.__main__ import main as command_line
from replicas.replay.replay import extract, restore
from replicas.text.tokenizer import Tokenizer
from replicas.types import GenerateRequest, SamplingParams, TokenDelta
from tests.embedded import MODEL, short_model
from tests.engine_process import prepared
from tests.harness import small_engine
from tests.numerics import tiny

pytestmark = pytest.mark.model
NUM_NEW = 32  # those submitted first make some while the prompts of the others are computed
TEXT = (
    "The harbour had been quiet for most of the winter, and the men who mended nets along the quay had taken to "
    "telling the same stories twice. When the first ship came in through the ice, nobody believed the boy who saw it."
)
SAMPLINGS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=7, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=1.1, seed=2**62 + 1, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4
    ),
    "bias": SamplingParams(temperature=0.7, min_p=0.02, seed=3, logit_bias=((28, 4.0), (30, -2.5)), min_new_tokens=20),
    "stop": SamplingParams(temperature=1.0, seed=5, stop=("never to be said", "\n\n\n\n")),
    "masks": SamplingParams(
        temperature=0.8, seed=2**64 - 1, ignore_eos=True, allowed_token_ids=tuple(range(17, 90)),
        bad_words=((28,), (30, 31)),
    ),
}


def make_engine(folder: str, *, page_size: int, tp: int = 1, attention: str = "auto", **cache: Any) -> Engine:
    return small_engine(
        folder, page=page_size, chunk=32, tp=tp, attention=attention, cache=cache, scheduler={"policy": "fcfs"}
    )


Answers = dict[str, tuple[list[int], str, str | None, list[float | None]]]  # ids, text, reason, logprobs by rid


def answers(deltas: list[TokenDelta]) -> Answers:
    made: Answers = {}
    for delta in deltas:
        ids, text, _, logprobs = made.get(delta.rid, ([], "", None, []))
        reason = delta.finish.reason.value if delta.finish is not None else None
        ids, logprobs = [*ids, *delta.token_ids], [*logprobs, *(entry.logprob for entry in delta.logprobs)]
        made[delta.rid] = (ids, text + delta.text, reason, logprobs)
    return made


def finish(engine: Engine) -> list[TokenDelta]:
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    engine.scheduler.check()
    return deltas


@dataclass(frozen=True)
class Taken:
    """Snapshots in the middle of the answers, and what came after them where they were taken."""

    folder: Path
    before: Answers
    rest: Answers


def take(engine: Engine, folder: Path, prompt: np.ndarray, *, after: int) -> Taken:
    """All requests run together; each loses its first ``i`` prompt tokens, so that no two are equal."""
    folder.mkdir(exist_ok=True)
    deltas: list[TokenDelta] = []
    for i, (rid, sampling) in enumerate(SAMPLINGS.items()):
        request = GenerateRequest(
            rid=rid, token_ids=prompt[i:], sampling=replace(sampling, max_new_tokens=NUM_NEW), return_logprobs=True
        )
        deltas += engine.submit(request)
    while any(req is not None and req.num_output < after for req in map(engine.find, SAMPLINGS)):
        deltas += engine.step()
    before = answers(deltas)
    for rid in engine.open_rids:
        extract(engine, rid).save(folder / rid)
    return Taken(folder=folder, before=before, rest=answers(finish(engine)))


def go_on(folder: str, snapshots: Path, page_size: int, tp: int, pipe: Any) -> None:
    """In a process of its own."""
    engine = make_engine(folder, page_size=page_size, tp=tp)
    try:
        deltas: list[TokenDelta] = []
        for path in sorted(snapshots.iterdir()):
            deltas += restore(engine, ReplaySnapshot.load(path))
        deltas += finish(engine)
        pipe.send((answers(deltas), engine.stats().prefill_tokens))
    finally:
        engine.close()


def in_fresh_process(folder: str, snapshots: Path, *, page_size: int, tp: int = 1) -> tuple[Answers, int]:
    """What the snapshots go on with, and how many tokens of prompts were computed for it."""
    context = prepared()
    begin, end = context.Pipe(duplex=False)
    process = context.Process(target=go_on, args=(folder, snapshots, page_size, tp, end))
    process.start()
    end.close()
    try:
        found: tuple[Answers, int] = begin.recv()
        return found
    finally:
        process.join(timeout=30)
        process.kill()


def assert_same(found: Answers, taken: Taken) -> None:
    assert found.keys() == taken.rest.keys()
    for rid, (ids, text, reason, logprobs) in taken.rest.items():
        assert found[rid][:3] == (ids, text, reason), rid
        assert found[rid][3] == pytest.approx(logprobs, abs=1e-4), rid


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Taken:
    """Pages of 16. The stop string is one that its answer completes in the middle of the rest."""
    engine = make_engine(short_model(), page_size=16)
    prompt = Tokenizer(MODEL).encode(TEXT)
    probe = take(engine, tmp_path_factory.mktemp("probe"), prompt, after=1)
    text = probe.before["stop"][1] + probe.rest["stop"][1]
    at = len(text) * 2 // 3
    SAMPLINGS["stop"] = replace(SAMPLINGS["stop"], stop=("never to be said", text[at : at + 6]))
    assert engine.flush_cache()
    taken = take(engine, tmp_path_factory.mktemp("taken"), prompt, after=7)
    assert taken.rest["stop"][2] == "stop"
    assert len(taken.rest) == len(SAMPLINGS)
    return taken


def test_a_fresh_process_goes_on_with_pages_of_another_size(smollm2: Taken) -> None:
    found, num_prefilled = in_fresh_process(short_model(), smollm2.folder, page_size=5)
    assert_same(found, smollm2)
    assert num_prefilled == 0


def save_model(kind: str, folder: Path, **changes: Any) -> str:
    """A tiny model with a tokenizer: which one does not matter."""
    tiny.save(kind, folder, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL, name), folder / name)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)], ids=lambda tp: f"tp{tp}")
def test_other_ranks_go_on_with_what_was_made(tmp_path: Path, before: int, after: int) -> None:
    """A KV head for each of three ranks."""
    model = save_model("qwen3", tmp_path / "model", num_attention_heads=6, num_key_value_heads=3)
    engine = make_engine(model, page_size=4, tp=before)
    try:
        taken = take(engine, tmp_path / "taken", np.arange(3, 95, dtype=np.int32), after=5)
    finally:
        engine.close()
    found, num_prefilled = in_fresh_process(model, taken.folder, page_size=16, tp=after)
    assert_same(found, taken)
    assert num_prefilled == 0


@pytest.mark.parametrize(
    ("kind", "kv_dtype", "pages"),
    [("llama", "float32", (4, 1)), ("qwen3", "bfloat16", (1, 16)), ("mistral-one-kv-head", "float16", (16, 3)),
     ("llama", "int8", (4, 1)), ("qwen3", "fp8", (1, 16))],
)
def test_every_family_and_kv_dtype_goes_on_bit_for_bit(
    tmp_path: Path, kind: str, kv_dtype: str, pages: tuple[int, int]
) -> None:
    """In one process; also from the middle of the prompt. The K/V read back is that of the file."""
    folder = save_model(kind, tmp_path / "model")
    here, there, again = (
        make_engine(folder, page_size=size, kv_dtype=kv_dtype, attention="torch_native")
        for size in (*pages, pages[1])
    )
    prompt = np.arange(3, 95, dtype=np.int32)
    taken = take(here, tmp_path / "taken", prompt, after=9)
    deltas: list[TokenDelta] = []
    for path in sorted(taken.folder.iterdir()):
        snapshot = ReplaySnapshot.load(path)
        deltas += restore(there, snapshot)
        restored = extract(there, path.name)
        assert restored.kv.tobytes() == snapshot.kv.tobytes()
        assert snapshot.kv.any()
    assert_same(answers(deltas + finish(there)), taken)

    request = GenerateRequest(
        rid="a", token_ids=prompt[::-1].copy(), sampling=SamplingParams(temperature=0.0, max_new_tokens=8)
    )
    here.submit(request)
    here.step()
    middle = extract(here, "a")
    assert middle.meta.num_tokens == 32
    assert answers(restore(again, middle) + finish(again)) == answers(finish(here))


def test_the_command_line_takes_a_snapshot_and_goes_on_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def replay(*arguments: str) -> dict[str, Any]:
        assert command_line(arguments) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    path = str(tmp_path / "snapshot")
    engine = ["--model", short_model(), "--threads", "1", "--context-len", "256"]
    taken = replay("take", path, *engine, "--text", TEXT, "--after", "6", "--max-new-tokens", "12")
    shown = replay("show", path)
    assert shown["output_ids"] == taken["token_ids"][:6]
    assert shown["num_computed"] == shown["prompt_len"] + 5
    run = replay("run", path, *engine, "--page-size", "4")
    assert (run["continued_after"], run["token_ids"]) == (6, taken["token_ids"][6:])
    assert taken["text"].endswith(run["text"])
    assert run["finish_reason"] == taken["finish_reason"]


def test_the_command_line_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("hello")
    run = subprocess.run(
        [sys.executable, "-m", "replicas.replay", "show", str(tmp_path / "s")],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert run.stderr.startswith("BadSnapshot: ")
    assert run.stderr.count("\n") == 1
