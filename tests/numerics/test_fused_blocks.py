"""A step of one program between two attention calls gives the bits of the layers called one by one."""

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.driver import request
from replicas.config import CacheConfig
from replicas.kernels import bf16_tiles
from replicas.kernels.team import Kernel, Program, Team
from replicas.launch import EngineSettings, load_engine
from replicas.models.llama import LlamaBlock
from tests.numerics import tiny
from tests.numerics.paged import SMOLLM2, assert_close_in_range, open_model

SERVED = {"head_dim": 32, "intermediate_size": 80}  # sizes that the kernels take
PROMPTS = [*tiny.PROMPTS, [(7 * i) % tiny.VOCAB for i in range(90)]]


@pytest.fixture(params=["llama-tied-biased", "mistral", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tiny.save(request.param, tmp_path, **SERVED)
    return tmp_path


@pytest.mark.parametrize("chunk", [63, 3])
def test_programs_and_layers_give_the_same_bits(folder: Path, chunk: int) -> None:
    """Steps of 3 to 10 tokens, and of 96 and 27, so that buffers grow."""
    fused, layers = (open_model(folder, attention="cpu") for _ in range(2))
    assert fused.model.fused is not None
    layers.model.fused = None
    for ours, theirs in zip(fused.prefill(PROMPTS, chunk=chunk), layers.prefill(PROMPTS, chunk=chunk), strict=True):
        assert torch.equal(ours, theirs)
    assert len(fused.model.fused.programs) == 3 + 1  # blocks, and what follows the last attention


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_decode_step_is_one_program_and_gives_the_same_bits(folder: Path, page_size: int) -> None:
    """Rows come and go, buffers grow after the first step, two have a prefix in common, contexts pass 128 tokens."""
    fused, layers, apart = (
        open_model(folder, attention="cpu", page_size=page_size, num_pages=512, num_rows=80)
        for _ in range(3)
    )
    layers.model.fused = None
    assert fused.model.fused is not None
    assert apart.model.fused is not None
    apart.model.fused.apart = True
    models = (fused, layers, apart)
    for model in models:
        model.prefill([PROMPTS[-1][:120], PROMPTS[-1][:121]], chunk=32)
    made, run = [], Program.run
    steps: list[dict[int, list[int]]] = [{row: [11 * row] for row in rows} for rows in [(0,), (0, 1), (1,), (0,)]]
    steps += [{row: [7, row] for row in range(2, 78)}]  # more rows than the first buffers hold
    steps += [{row: [row + i] for row in rows} for i, rows in enumerate([range(78), (5, 1, 0), *[(0, 1)] * 9])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "run", lambda self, rows, *, whole: (made.append(self), run(self, rows, whole=whole))[1])
        for step in steps:
            ours, theirs, called = (model.run(step) for model in models)
            for row in step:
                assert torch.equal(ours[row], theirs[row])
                assert torch.equal(ours[row], called[row])
    num_layers = len(fused.model.blocks)
    runs = Counter(Counter(map(id, made)).values())  # how many programs ran so often
    assert runs == {4: 1 + num_layers + 1, 11: 1, 1: num_layers + 1, 12: num_layers + 1}


in_bf16 = pytest.mark.skipif(bf16_tiles.way() is None, reason="this CPU does not multiply bfloat16 faster than floats")


# beside fp32: steps of 1 / 127 of a group cost some percent, of 1 / 15 more, and of bf16 hardly anything
@pytest.mark.parametrize(
    ("changes", "share", "widens"),
    [
        ({"quantization": "int8"}, 0.06, False), ({"quantization": "int4"}, 0.5, False),
        ({"dtype": "bfloat16"}, 0.02, True),
        pytest.param({"dtype": "bfloat16"}, 0.04, False, marks=in_bf16),  # activations cost as much as weights
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["llama-tied-biased", "qwen3"])
def test_in_other_formats_too_where_heads_are_wider_than_the_hidden_size(
    kind: str, changes: dict[str, Any], share: float, widens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The o product reads 4 x 32 numbers and makes 64."""
    if widens:
        monkeypatch.setattr(bf16_tiles, "way", lambda: None)
    tiny.save(kind, tmp_path, hidden_size=64, head_dim=32, intermediate_size=96)
    fused, layers = (open_model(tmp_path, attention="cpu", **changes) for _ in range(2))
    assert fused.model.fused is not None
    layers.model.fused = None
    exact = open_model(tmp_path, attention="cpu").prefill(PROMPTS, chunk=40)
    for ours, theirs, wanted in zip(
        fused.prefill(PROMPTS, chunk=40), layers.prefill(PROMPTS, chunk=40), exact, strict=True
    ):
        assert torch.equal(ours, theirs)
        assert_close_in_range(ours, wanted, share)


# rows' new tokens, and those of the packed tokens whose logits are wanted; what came before is read in each step
NARROWED: list[tuple[dict[int, list[int]], list[int]]] = [
    ({0: PROMPTS[3][:70], 1: PROMPTS[0]}, []),  # parts of prompts
    ({0: PROMPTS[3][70:], 1: PROMPTS[2], 2: PROMPTS[3][:40]}, [19, 28]),  # two end, one does not
    ({0: [5], 1: [7], 2: PROMPTS[3][40:], 3: PROMPTS[0]}, [0, 1, *range(12, 40), 51, 74]),  # and logprobs of a prompt
]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama-tied-biased", {}), ("qwen3", {"dtype": "bfloat16"}), ("qwen2", {"quantization": "int8"}),
        ("mixtral", {}), ("gpt-oss", {}), ("v3", {}),
    ],
)  # fmt: skip
def test_a_last_block_of_the_wanted_tokens_alone_gives_the_same_bits(
    kind: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its K and V are of all tokens: later steps read them."""
    tiny.save(kind, tmp_path, **({} if kind == "v3" else SERVED))
    narrow, whole = (open_model(tmp_path, attention="cpu", num_pages=64, **changes) for _ in range(2))
    fed, run, feed = list[int](), Program.run, LlamaBlock.feed
    monkeypatch.setattr(Program, "run", lambda self, rows, *, whole: (fed.append(rows), run(self, rows, whole=whole)))
    monkeypatch.setattr(LlamaBlock, "feed", lambda self, x, term: (fed.append(len(x)), feed(self, x, term))[1])
    for step, wanted in NARROWED:
        ids, meta = narrow.pack(step)
        ours = narrow.model.forward(ids, meta, torch.tensor(wanted, dtype=torch.int64))
        assert fed[-1] == (len(wanted) or len(ids))  # with none it is not run; what ran last is the one before
        assert torch.equal(ours, torch.cat(list(whole.run(step).values()))[wanted])


def test_what_attention_returns_lives_until_it_has_been_read(tmp_path: Path) -> None:
    """A backend may return a fresh tensor (torch_native does): here its memory turns to NaN when nobody holds it."""
    tiny.save("llama", tmp_path, **SERVED)
    fused, layers = open_model(tmp_path, attention="cpu"), open_model(tmp_path, attention="cpu")
    assert fused.model.fused is not None
    layers.model.fused = None
    attend = fused.model.fused._attend

    def fleeting(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        memory = attend(layer, q, k, v).numpy().copy()
        result = torch.from_numpy(memory)
        weakref.finalize(result, memory.fill, np.nan)
        return result

    fused.model.fused._attend = fleeting
    for ours, theirs in zip(fused.prefill(PROMPTS, chunk=7), layers.prefill(PROMPTS, chunk=7), strict=True):
        assert torch.equal(ours, theirs)


def test_sizes_that_the_kernels_do_not_serve_leave_the_layers(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)  # heads of 16: a half of one is no vector
    assert open_model(tmp_path, attention="cpu").model.fused is None


def test_a_decode_step_of_an_engine_is_one_program_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its attention comes after the model, behind a wrapper: only a whole engine shows that the model finds it."""
    tiny.save("llama", tmp_path, **SERVED)
    AutoTokenizer.from_pretrained(SMOLLM2).save_pretrained(tmp_path)
    engine = load_engine(
        EngineSettings(model=str(tmp_path), cache=CacheConfig(device_memory_bytes=64 << 20), num_threads=1)
    )
    engine.submit(request(PROMPTS[-1], 5))
    engine.step()
    calls, run = Counter[str](), Team.run

    def counted(team: Team, kernel: Kernel, arguments: Any) -> None:
        calls[kernel.function.__name__] += 1
        run(team, kernel, arguments)

    monkeypatch.setattr(Team, "run", counted)
    engine.step()
    engine.close()
    assert calls["_run_stages"] == 1
    assert calls["decode"] == 0
