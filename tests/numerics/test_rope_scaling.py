"""Rotary scalings for long contexts: the frequencies are those of Transformers, and so are the tokens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deployments.http.service import read_face
from deployments.settings.schema import ModelSettings
from replicas.config import Hardware, Implementation, RopeConfig, kv_layout
from replicas.errors import InvalidConfig
from replicas.hf_config import model_config_from_hf
from replicas.layers.rope_scaling import frequencies
from replicas.loading.model_files import load_model_config
from replicas.resolve import resolve
from tests.numerics import tiny
from tests.numerics.paged import assert_close_in_range, open_model

SHORT, LONG = [1.0 + i / 16 for i in range(8)], [2.0 + i for i in range(8)]
ROPES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn of DeepSeek": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707,
    },
    "yarn of GPT-OSS": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False, "rope_theta": 150_000.0,
    },
    "yarn, its factor given": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "attention_factor": 0.9,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "longrope": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 16,
    },
    "longrope, its factor given": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 16,
        "attention_factor": 1.3, "factor": 9.0,
    },
}  # fmt: skip


def rope_of(**parameters: Any) -> tuple[LlamaConfig, RopeConfig]:
    hf = LlamaConfig(**{**tiny.SHAPE, "rope_parameters": {"rope_theta": 10_000.0, **parameters}})
    return hf, model_config_from_hf("a model", hf.to_dict(), eos_ids=(), dtype="float32").rope


@pytest.mark.parametrize("name", sorted(ROPES))
@pytest.mark.parametrize("context_len", [8, 256, 700])
def test_frequencies_are_those_of_transformers_for_a_text_as_long_as_the_context(name: str, context_len: int) -> None:
    hf, rope = rope_of(**ROPES[name])
    wanted, factor = ROPE_INIT_FUNCTIONS[rope.kind](hf, torch.device("cpu"), seq_len=context_len)
    ours, ours_too = frequencies(rope, hf.head_dim, context_len)
    assert (ours - wanted).abs().max() <= 1e-6
    assert ours_too == pytest.approx(factor, abs=1e-6)
    plain, _ = frequencies(replace(rope, kind="linear", scaling={"factor": 1.0}), hf.head_dim, context_len)
    assert torch.equal(ours, plain) == (name == "dynamic" and context_len <= 256), "a scaling scales"


@pytest.mark.parametrize(("family", "name"), [("llama", "yarn"), ("qwen2", "longrope"), ("mistral", "dynamic")])
def test_logits_and_64_greedy_tokens_are_those_of_transformers(family: str, name: str, tmp_path: Path) -> None:
    """Of longrope: of a prompt longer than the original context, 16 tokens, where Transformers has the long factors."""
    model = tiny.save(family, tmp_path, rope_parameters={"rope_theta": 1000.0, **ROPES[name]})
    prompts = [prompt for prompt in tiny.PROMPTS if len(prompt) > 16 or name != "longrope"]
    wanted = [tiny.reference(model, prompt, 64) for prompt in prompts]
    for chunk in (100, 5):
        paged = open_model(tmp_path, attention="cpu")
        for ours, (logits, _) in zip(paged.prefill(prompts, chunk=chunk), wanted, strict=True):
            assert_close_in_range(ours, logits, 1e-4)
    assert open_model(tmp_path, attention="cpu").greedy(prompts, 64, chunk=5) == [ids for _, ids in wanted]


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "v3"])
@pytest.mark.parametrize(
    "added",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"type": "linear", "factor": 2.0, "rope_theta": 300.0},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=lambda added: str(added.get("rope_type") or added.get("type")),
)
def test_rope_scaling_that_was_added_to_a_file_of_transformers_5_wins(
    family: str, added: dict[str, Any], tmp_path: Path
) -> None:
    """It takes the place of rope_parameters, their rope_theta included; the context follows it."""
    tiny.save(family, tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config["rope_parameters"]["rope_theta"] == 700.0
    file.write_text(json.dumps({**config, "rope_scaling": added}))
    wanted = [tiny.reference(AutoModelForCausalLM.from_pretrained(tmp_path), p, 24)[1] for p in tiny.PROMPTS[:1]]
    ours = open_model(tmp_path, attention="cpu")
    assert ours.greedy(tiny.PROMPTS[:1], 24) == wanted
    assert ours.model.config.context_len == (512 if added.get("rope_type") == "yarn" else 256)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_an_original_context_beside_the_scaling_wins_over_the_one_in_it(kind: str, tmp_path: Path) -> None:
    tiny.save("llama", tmp_path, head_dim=64)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    config |= {"rope_parameters": {"rope_type": kind, **scaling}, "original_max_position_embeddings": 64}
    file.write_text(json.dumps({**config, "rope_theta": 100.0, "eos_token_id": 2}))
    wanted = [tiny.reference(AutoModelForCausalLM.from_pretrained(tmp_path), p, 24)[1] for p in tiny.PROMPTS]
    assert open_model(tmp_path).greedy(tiny.PROMPTS, 24) == wanted


def test_a_rope_theta_that_rope_scaling_drops_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.save("qwen3", tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 700.0})
    file = tmp_path / "config.json"
    for theta, told in ((None, True), (700.0, False)):
        scaling = {"rope_type": "linear", "factor": 2.0} | ({} if theta is None else {"rope_theta": theta})
        file.write_text(json.dumps({**json.loads(file.read_text()), "rope_scaling": scaling}))
        caplog.clear()
        assert load_model_config(str(tmp_path)).rope.theta == (theta or 10_000.0)
        assert ("with them rope_theta = 700" in caplog.text) is told


def test_longrope_within_the_original_context_has_the_short_factors(tmp_path: Path) -> None:
    model = tiny.save("llama", tmp_path, rope_parameters={"rope_theta": 1000.0, **ROPES["longrope"]})
    paged, prompt = open_model(tmp_path, context_len=16), tiny.PROMPTS[2]
    assert paged.greedy([prompt], 7) == [tiny.reference(model, prompt, 7)[1]]
    assert open_model(tmp_path).greedy([prompt], 7) != paged.greedy([prompt], 7), "long factors are others"


@pytest.mark.parametrize("implementation", ["manta", "transformers"])
def test_dynamic_scaling_beyond_the_original_context_is_that_of_a_text_as_long_as_the_context(
    implementation: Implementation, tmp_path: Path
) -> None:
    """Chunks, hits and batches cannot change it, since it is made once, for the context that is served."""
    model = tiny.save("llama", tmp_path, rope_parameters={"rope_theta": 1000.0, **ROPES["dynamic"]})
    text = torch.randint(tiny.VOCAB, (400,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.inference_mode():
        wanted = model(torch.tensor([text])).logits[0]
    whole, chunked = (
        open_model(tmp_path, context_len=400, implementation=implementation).prefill([text], chunk=size)[0]
        for size in (400, 37)
    )
    assert_close_in_range(whole, wanted, 1e-4)
    assert_close_in_range(chunked, wanted, 1e-4)


@pytest.mark.parametrize("implementation", ["manta", "transformers"])
def test_pages_of_other_frequencies_are_not_the_same_pages(implementation: Implementation, tmp_path: Path) -> None:
    """A KV transfer, a store or a move between engines whose contexts make other angles is refused by its layout."""
    hardware = Hardware(device="cpu", num_cpus=1, available_memory_bytes=1 << 30)

    def page_of(name: str, context_len: int) -> str:
        tiny.save("llama", tmp_path, rope_parameters={"rope_theta": 1000.0, **ROPES[name]})
        model = load_model_config(str(tmp_path), context_len=context_len, implementation=implementation)
        return kv_layout(resolve(model, hardware), "one model").fingerprint

    assert page_of("longrope", 8) == page_of("longrope", 16) != page_of("longrope", 17) == page_of("longrope", 256)
    assert page_of("yarn", 8) == page_of("yarn", 256)
    assert page_of("dynamic", 8) == page_of("dynamic", 256)
    assert len({page_of("dynamic", context_len) for context_len in (256, 257, 258)}) == 3


def test_a_scaled_context_is_served_and_one_beyond_it_is_refused_by_engine_and_ingress(tmp_path: Path) -> None:
    """YaRN's context is its factor times the original; dynamic scaling serves the original unless more is asked for."""
    for name, own, longest in (("yarn", 1024, 1024), ("dynamic", 256, 768), ("longrope", 256, 256)):
        parameters = {**ROPES[name], "rope_theta": 1000.0}
        if name == "yarn":
            parameters |= {"factor": 16.0}  # as Qwen2.5 says it: max_position_embeddings are those of before
        tiny.save("llama", tmp_path, rope_parameters=parameters)
        assert load_model_config(str(tmp_path)).context_len == own
        assert load_model_config(str(tmp_path), context_len=longest).context_len == longest
        with pytest.raises(InvalidConfig, match=f"allows 1 to {longest}"):
            load_model_config(str(tmp_path), context_len=longest + 1)
        assert read_face(ModelSettings(path=str(tmp_path))).context_len == own
        with pytest.raises(InvalidConfig, match=f"allows 1 to {longest}"):
            read_face(ModelSettings(path=str(tmp_path), context_len=longest + 1))


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        ({"rope_type": "proportional"}, "rope type 'proportional' is not supported; supported: default, linear"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"full_attention": {"rope_type": "default"}}, "rope parameters by kind of layer is not supported"),
    ],
)
def test_what_these_models_do_not_turn_is_refused_by_name(parameters: dict[str, Any], wanted: str) -> None:
    hf = {**LlamaConfig(**tiny.SHAPE).to_dict(), "rope_parameters": {"rope_theta": 1.0, **parameters}}
    with pytest.raises(InvalidConfig, match=wanted):
        model_config_from_hf("a model", hf, eos_ids=(), dtype="float32")


def test_older_checkpoints_say_the_same_with_rope_scaling() -> None:
    hf = LlamaConfig(**{**tiny.SHAPE, "rope_parameters": {"rope_theta": 500.0, **ROPES["yarn"]}})
    older = {k: v for k, v in hf.to_dict().items() if k != "rope_parameters"}
    older |= {"rope_theta": 500.0, "rope_scaling": {**ROPES["yarn"], "type": "yarn"}}
    del older["rope_scaling"]["rope_type"]
    newer, same = (
        model_config_from_hf("a model", each, eos_ids=(), dtype="float32").rope for each in (hf.to_dict(), older)
    )
    assert newer == same
    assert same.kind == "yarn"
