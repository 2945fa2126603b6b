"""Reading a model's folder: what is taken from it, and what is said when it is not right."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from replicas.checkpoints.weight_index import safetensors_files
from replicas.errors import InvalidConfig, UnsupportedModel
from replicas.kernels import bf16_tiles
from replicas.loading.model_files import load_model_config
from replicas.loading.weights import weight_bytes
from tests.numerics import quantised, tiny
from tests.numerics.paged import assert_close_in_range, open_model


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    tiny.save("llama", tmp_path)
    return tmp_path


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def test_a_sharded_checkpoint_gives_the_logits_of_a_whole_one(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text((llama / "config.json").read_text())
    weight_map = {}
    for i, name in enumerate(tensors):
        weight_map[name] = f"model-{i % 3 + 1:05}-of-00003.safetensors"
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n, f in weight_map.items() if f == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(safetensors_files(sharded)) == 3
    whole, parts = (open_model(f).prefill(tiny.PROMPTS, chunk=100)[0] for f in (llama, sharded))
    assert_close_in_range(parts, whole, 1e-6)


def test_loading_is_told_in_tenths_of_the_checkpoint(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every weight is counted once, under its own layer."""
    with caplog.at_level(logging.INFO, logger="replicas.loading.weights"):
        open_model(llama)
    said = [record.getMessage() for record in caplog.records if "loading weights" in record.getMessage()]
    assert 2 <= len(said) <= 10
    assert said[-1].startswith("loading weights: 100 % (")


def test_a_missing_shard_is_named(llama: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidConfig, match=r"lacks model-00001-of-00002.safetensors; there is: config.json"):
        open_model(llama)


def test_missing_and_unexpected_weights_are_listed(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.0.mlp.gate.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")
    save_file(tensors, llama / "model.safetensors")
    part = "model.layers.0.mlp"
    message = rf"1 missing \({part}.gate_proj.weight\), 1 unexpected \({part}.gate.weight\)"
    with pytest.raises(InvalidConfig, match=message):
        open_model(llama)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mixtral", "v3"])
def test_a_head_that_differs_from_the_embedding_is_used_though_config_json_says_tied(kind: str, tmp_path: Path) -> None:
    """As Transformers does: training that went on from a tied model leaves such folders."""
    wanted = [tiny.reference(tiny.save(kind, tmp_path), prompt, 12)[1] for prompt in tiny.PROMPTS]
    rewrite(tmp_path / "config.json", lambda c: c.update(tie_word_embeddings=True))
    transformers = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert tiny.reference(transformers, tiny.PROMPTS[0], 12)[1] == wanted[0]
    assert open_model(tmp_path).greedy(tiny.PROMPTS, 12) == wanted


def test_a_head_that_differs_in_one_number_is_its_own(tmp_path: Path) -> None:
    """It is compared in parts, in whichever of two files it lies."""
    tiny.save("qwen3-tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    before = open_model(tmp_path).run({0: [5]})[0][0]
    head = tensors["model.embed_tokens.weight"].clone()
    for change, tied in ((0.0, True), (1.0, False)):
        head[-1, -1] += change
        save_file({"lm_head.weight": head}, tmp_path / "head.safetensors")
        places = dict.fromkeys(tensors, "model.safetensors") | {"lm_head.weight": "head.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        assert load_model_config(str(tmp_path)).tie_embeddings is tied
        logits = open_model(tmp_path).run({0: [5]})[0][0]
        assert (logits[-1] - before[-1]).abs() > 0.01 if change else torch.equal(logits, before)


def test_a_quantised_checkpoints_own_head_is_used_though_config_json_says_tied(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}
    model = quantised.save(tmp_path, config, quantised.gptq(4, 32, sym=True, act_order=False, version="gptq"))
    rewrite(tmp_path / "config.json", lambda c: c.update(tie_word_embeddings=True))
    assert open_model(tmp_path).greedy(tiny.PROMPTS, 12) == [tiny.reference(model, p, 12)[1] for p in tiny.PROMPTS]


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "v3"])
def test_a_checkpoint_with_one_table_uses_it_as_embedding_and_as_head(kind: str, tmp_path: Path) -> None:
    """The embedding alone, whatever config.json says; or the head alone, where it says that both are tied."""
    for said in (True, False):
        folder = tmp_path / f"{said}"
        model = tiny.save(kind, folder, tie_word_embeddings=True)
        wanted = [tiny.reference(model, prompt, 12)[1] for prompt in tiny.PROMPTS]
        rewrite(folder / "config.json", lambda c, said=said: c.update(tie_word_embeddings=said))  # type: ignore[misc]
        assert open_model(folder).greedy(tiny.PROMPTS, 12) == wanted
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InvalidConfig, match=r"1 missing \(model.embed_tokens.weight\)"):
        open_model(folder)
    rewrite(folder / "config.json", lambda c: c.update(tie_word_embeddings=True))
    assert open_model(folder).greedy(tiny.PROMPTS, 12) == wanted


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("mixtral", False), ("v3", True)])
def test_a_checkpoint_of_the_base_model_is_that_of_the_causal_model(kind: str, tied: bool, tmp_path: Path) -> None:
    """As embedders are published: names without their first part, and mostly without a head."""
    model = tiny.save(kind, tmp_path, tie_word_embeddings=tied)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    wanted = [tiny.reference(model, prompt, 12)[1] for prompt in tiny.PROMPTS]
    assert open_model(tmp_path).greedy(tiny.PROMPTS, 12) == wanted


@pytest.mark.parametrize("kind", ["qwen2", "mixtral", "qwen3-moe"])
def test_a_number_of_heads_that_the_weights_do_not_have_is_named(kind: str, tmp_path: Path) -> None:
    tiny.save(kind, tmp_path)
    rewrite(tmp_path / "config.json", lambda c: c.update(num_key_value_heads=4))
    with pytest.raises(InvalidConfig, match=r"k_proj.weight has shape \[\d+, 48\], its config.json says \[\d+, 48\]"):
        open_model(tmp_path)


@pytest.mark.parametrize("kind", ["qwen2", "qwen2-tied"])
def test_an_embedding_is_read_from_the_file_and_the_head_has_panels(tmp_path: Path, kind: str) -> None:
    """101 of its outputs fill 4 panels of 32, 128 x 64 x 4 bytes; all others fill theirs."""
    tiny.save(kind, tmp_path, hidden_size=64, intermediate_size=96)
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    others = sum(t.nbytes for name, t in load_file(tmp_path / "model.safetensors").items() if name not in tables)
    assert weight_bytes(open_model(tmp_path).model) == others + 128 * 64 * 4


def test_a_tied_head_in_int4_is_the_embeddings_table_and_counts_once(tmp_path: Path) -> None:
    """Numbers of 8 bits, and a scale of two bytes for 32."""
    for kind in ("qwen2", "qwen2-tied"):
        tiny.save(kind, tmp_path / kind, hidden_size=64, intermediate_size=96)
    untied, tied = (
        weight_bytes(open_model(tmp_path / kind, quantization="int4").model) for kind in ("qwen2", "qwen2-tied")
    )
    assert untied - tied == 128 * 64 + 128 * 2 * 2


def test_an_unknown_architecture_lists_the_known_ones(llama: Path) -> None:
    rewrite(llama / "config.json", lambda c: c.update(architectures=["BertForMaskedLM"], model_type="bert"))
    known = "supported: DeepseekV2ForCausalLM, DeepseekV32ForCausalLM, DeepseekV3ForCausalLM, Glm4MoeLiteForCausalLM, G"
    with pytest.raises(UnsupportedModel, match=f"'BertForMaskedLM' is not supported; {known}"):
        load_model_config(str(llama))


def test_a_folder_that_is_not_there_says_what_to_give() -> None:
    with pytest.raises(InvalidConfig, match=r"no folder .*/models/nowhere\. Give a folder .* `make model`"):
        load_model_config("models/nowhere")


def test_a_folder_without_config_is_named_with_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(InvalidConfig, match=r"has no config.json; there is: pytorch_model.bin"):
        load_model_config(str(tmp_path))


def test_only_safetensors_are_read(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(InvalidConfig, match=r"lacks model.safetensors; .*save_pretrained"):
        open_model(llama)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; supported: 'silu'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "is quantized by 'hqq'; supported: gptq, awq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_what_the_models_here_cannot_do_is_refused(llama: Path, change: dict[str, Any], message: str) -> None:
    rewrite(llama / "config.json", lambda c: (c.pop("rope_parameters", None), c.update(change)))
    with pytest.raises(InvalidConfig, match=message):
        load_model_config(str(llama), implementation="manta")


def test_eos_ids_are_those_of_both_configs(llama: Path) -> None:
    rewrite(llama / "config.json", lambda c: c.update(eos_token_id=2))
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 4]}))
    assert load_model_config(str(llama)).eos_ids == (2, 4, 9)


def test_the_context_can_be_shortened_but_not_stretched(llama: Path) -> None:
    assert load_model_config(str(llama), context_len=100).context_len == 100
    with pytest.raises(InvalidConfig, match=r"context_len = 257; .* allows 1 to 256 tokens"):
        load_model_config(str(llama), context_len=257)


@pytest.mark.parametrize(("way", "on_cpu"), [(None, "float32"), ("amx", "bfloat16"), ("dots", "bfloat16")])
def test_the_default_dtype_is_the_checkpoints_on_cuda_and_on_a_cpu_that_multiplies_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch, way: str | None, on_cpu: str
) -> None:
    monkeypatch.setattr(bf16_tiles, "way", lambda: way)
    for dtype, found in (("bfloat16", on_cpu), ("float16", "float32"), ("float32", "float32")):
        rewrite(llama / "config.json", lambda c, dtype=dtype: c.update(dtype=dtype))  # type: ignore[misc]
        assert load_model_config(str(llama), device="cpu").dtype == found
        assert load_model_config(str(llama), device="cuda").dtype == dtype
    assert load_model_config(str(llama), device="cuda", dtype="bfloat16").dtype == "bfloat16"
    rewrite(llama / "config.json", lambda c: c.update(dtype="bfloat16"))
    assert load_model_config(str(llama), device="cpu", quantization="int8").dtype == "float32"
    for dtype in ("float32", "bfloat16"):
        assert load_model_config(str(llama), device="cpu", dtype=dtype).dtype == dtype  # type: ignore[arg-type]
    rewrite(llama / "config.json", lambda c: c.pop("dtype"))
    assert load_model_config(str(llama), device="cpu").dtype == "float32"
    assert load_model_config(str(llama), device="cuda").dtype == "bfloat16"
