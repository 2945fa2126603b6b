"""Layers with a sliding window, natively: the tokens of Transformers, far past the window, on every path."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicas.config import AttentionKind
from replicas.engine.engine import Engine
from replicas.loading.model_files import load_model_config
from replicas.types import GenerateRequest, SamplingParams
from tests.embedded import MODEL
from tests.local_agents import LocalFabric
from tests.numerics import tiny
from tests.numerics.handing_over import legs, make_engine, run
from tests.numerics.paged import assert_as_transformers, open_model

WINDOW = 24
PLAIN, WINDOWED = AttentionKind(), AttentionKind(window=WINDOW)
FAMILIES: dict[str, tuple[str, dict[str, Any], list[AttentionKind]]] = {
    "mistral": ("mistral", {"sliding_window": WINDOW}, [WINDOWED] * 3),
    "qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        [PLAIN, WINDOWED, WINDOWED],
    ),
    "qwen3": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        [WINDOWED, PLAIN, WINDOWED],
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_64_greedy_tokens_past_the_window_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, special, kinds = FAMILIES[name]
    model = tiny.save(family, tmp_path, **special)
    assert list(load_model_config(str(tmp_path)).attention_kinds) == kinds
    answers = open_model(tmp_path, attention="cpu").greedy(tiny.PROMPTS, 64, chunk=5)
    for attention, chunk in (("torch_native", 100), ("cpu", 100), ("cpu", 5)):
        logits = open_model(tmp_path, attention=attention).prefill(tiny.PROMPTS, chunk=chunk)
        assert_as_transformers(model, tiny.PROMPTS, logits, answers)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2-moe"])
def test_a_config_without_layer_types_has_its_familys_rule(family: str, tmp_path: Path) -> None:
    """As files from before Transformers 5 have it: Qwen2-MoE's rule is none of the others'."""
    special = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "num_hidden_layers": 4}
    tiny.save(family, tmp_path, **special)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    kinds = [WINDOWED if each == "sliding_attention" else PLAIN for each in config.pop("layer_types")]
    file.write_text(json.dumps({**config, "eos_token_id": 2, "rope_theta": 1e4}))
    assert list(load_model_config(str(tmp_path)).attention_kinds) == kinds
    assert kinds.index(WINDOWED) == (0 if family == "qwen2-moe" else 2)


def test_without_the_window_the_tokens_are_others(tmp_path: Path) -> None:
    """A guard of the test above. A window that no text reaches is none."""
    model = tiny.save("mistral", tmp_path, sliding_window=WINDOW)
    windowed = open_model(tmp_path).greedy([tiny.PROMPTS[0]], 64)
    for longest in (256, None):
        model.config.sliding_window = longest
        model.config.save_pretrained(tmp_path)
        assert load_model_config(str(tmp_path)).attention_kinds == ()
    assert open_model(tmp_path).greedy([tiny.PROMPTS[0]], 64) != windowed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windowed")
    tiny.save("mistral", folder, sliding_window=WINDOW)
    for file in Path(MODEL).glob("*token*.json"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Transformers' 64 ids after PROMPT."""
    return tiny.reference(tiny.save("mistral", tmp_path_factory.mktemp("same"), sliding_window=WINDOW), PROMPT, 64)[1]


PROMPT = np.random.default_rng(3).integers(0, tiny.VOCAB, 70).tolist()
SAMPLING = SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True)


def request(rid: str, ids: list[int]) -> GenerateRequest:
    return GenerateRequest(rid=rid, token_ids=np.array(ids, np.int32), sampling=SAMPLING)


def answers(engines: list[Engine], *requests: tuple[Engine, GenerateRequest]) -> dict[str, list[int]]:
    """The ids of each request by rid, however many engines took part in it."""
    for engine, one in requests:
        engine.submit(one)
    made: dict[str, list[int]] = {}
    for told in run(engines):
        for delta in told:
            made.setdefault(delta.rid, []).extend(delta.token_ids)
    for engine in engines:
        engine.scheduler.check()
    return made


@pytest.fixture(params=[(1, 16), (16, 512)], ids=lambda p: f"page{p[0]}-chunk{p[1]}")
def engines(request: pytest.FixtureRequest, folder: Path) -> Iterator[list[Engine]]:
    page, chunk = request.param
    fabric = LocalFabric()
    made = [make_engine(str(folder), page, chunk, fabric) for _ in range(2)]
    yield made
    for engine in made:
        engine.close()


@pytest.mark.model
def test_an_answer_is_that_of_transformers_missed_hit_and_handed_over(engines: list[Engine], answer: list[int]) -> None:
    """A miss, with another beside it; a hit of the whole prompt, and one of the prompt and half of the answer, which
    only the decode engine has; a KV transfer to an engine that has nothing."""
    prefill, decode = engines
    together = answers([prefill], (prefill, request("miss", PROMPT)), (prefill, request("other", PROMPT[20:40])))
    assert together["miss"] == answer
    assert answers([prefill], (prefill, request("hit", PROMPT))) == {"hit": answer}
    longer = request("longer", PROMPT + answer[:30])
    assert answers([prefill], (prefill, longer))["longer"][:34] == answer[30:]
    assert prefill.flush_cache()
    for rid in ("handed over", "once more"):
        address = prefill.transfer_address
        assert address is not None
        one, two = legs(request(rid, PROMPT), address)
        assert answers(engines, (decode, two), (prefill, one))[rid] == answer
    hit = replace(request("there", PROMPT + answer[:30]))
    assert answers([decode], (decode, hit))["there"][:34] == answer[30:]


@pytest.mark.model
def test_a_long_answer_holds_the_pages_of_its_window_alone(folder: Path, tmp_path: Path) -> None:
    """120 tokens after a prompt of 70, in pages of 8 and a window of 24 tokens: 3 pages, one where it is cut on either
    side, and two tokens for a step under way. The prompt is found by the next request all the same."""
    engine = make_engine(str(folder), 8, 32, None)
    long = SamplingParams(max_new_tokens=120, temperature=0.0, ignore_eos=True)
    engine.submit(GenerateRequest(rid="long", token_ids=np.array(PROMPT, np.int32), sampling=long))
    made, held = list[int](), list[int]()
    while engine.has_work:
        for delta in engine.step():
            made += delta.token_ids
        stats = engine.stats().pool
        held.append(stats.protected_pages + stats.reserved_pages)
        engine.scheduler.check()
    assert len(made) == 120
    tiny.assert_greedy(tiny.save("mistral", tmp_path, sliding_window=WINDOW), PROMPT, made)
    assert max(held[:5]) == 9, "the prompt is held while it is computed, and seen"
    assert max(held[60:-1]) == 5
    assert held[-1] == 0
    engine.submit(request("next", PROMPT))
    assert run([engine])[0][-1].usage.cached_tokens == 64
    engine.close()
