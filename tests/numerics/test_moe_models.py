"""Models with experts as engines: the same answer on every path, in every format of weights; what a start says of them.

test_tiny_models.py compares them with Transformers step by step, test_tensor_parallel.py over ranks.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from replicas.config import CacheConfig, Hardware, MoEConfig, ParallelConfig, Quantization, SchedulerConfig
from replicas.engine.engine import Engine
from replicas.errors import InvalidConfig
from replicas.launch import EngineSettings, load_engine
from replicas.loading.model_files import load_model_config
from replicas.loading.weights import weight_bytes
from replicas.memory import sizing
from replicas.resolve import resolve
from replicas.types import GenerateRequest, SamplingParams
from tests.embedded import MODEL
from tests.local_agents import LocalFabric
from tests.numerics import tiny
from tests.numerics.handing_over import alone, legs, make_engine, run, tiny_prompt
from tests.numerics.paged import open_model

KINDS = ("mixtral", "qwen2-moe", "qwen3-moe")
ALL_KINDS = ("gpt-oss", *KINDS)
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)


def saved(kind: str, folder: Path, **changes: object) -> PreTrainedModel:
    """With a vocabulary: an engine wants one; which one does not matter."""
    model = tiny.save(kind, folder, **changes)
    for file in Path(MODEL).glob("*token*.json"):
        shutil.copy(file, folder)
    return model


def ask(engine: Engine, prompt: np.ndarray, rid: str) -> tuple[list[int], int]:
    """The new ids, and how many tokens of the prompt were cached."""
    deltas = alone(engine, GenerateRequest(rid=rid, token_ids=prompt, sampling=GREEDY))
    return [token for delta in deltas for token in delta.token_ids], deltas[-1].usage.cached_tokens


@pytest.mark.model
@pytest.mark.parametrize("kind", ["gpt-oss", "qwen2-moe"])
def test_a_miss_a_hit_chunks_and_a_kv_transfer_say_what_transformers_says(kind: str, tmp_path: Path) -> None:
    """A prompt of 37 tokens in chunks of 8; the engine that asks again holds nine pages of four of it. Kinds of routing
    differ within a layer alone: test_experts.py."""
    model, prompt = saved(kind, tmp_path), tiny_prompt(37, 3)
    fabric = LocalFabric()
    prefill, decode, whole = (make_engine(str(tmp_path), 4, chunk, fabric) for chunk in (8, 8, 64))
    wanted, num_cached = ask(whole, prompt, "whole")
    assert (len(wanted), num_cached) == (24, 0)
    tiny.assert_greedy(model, prompt.tolist(), wanted)
    assert ask(decode, prompt, "miss") == (wanted, 0)
    assert ask(decode, prompt, "hit") == (wanted, 36)
    assert decode.flush_cache()
    one, two = legs(GenerateRequest(rid="pd", token_ids=prompt, sampling=GREEDY), prefill.transfer_address)
    prefill.submit(one)
    decode.submit(two)
    told = run([prefill, decode])[1]
    assert told[0].kv_transfer is not None
    assert told[0].kv_transfer.transferred, told[0].kv_transfer.reason
    assert [token for delta in told for token in delta.token_ids] == wanted
    for engine in (prefill, decode, whole):
        engine.close()


@pytest.mark.model
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_experts_say_the_same_on_a_hit_as_on_a_miss(quantization: Quantization, tmp_path: Path) -> None:
    """Experts of 32 inputs: a group. The router is not rounded."""
    saved("qwen3-moe", tmp_path, hidden_size=64, moe_intermediate_size=32)
    prompt = tiny_prompt(37, 4)
    answers = []
    for chunk in (8, 64):
        engine = load_engine(
            EngineSettings(
                model=str(tmp_path),
                cache=CacheConfig(page_size=4, max_total_tokens=512),
                scheduler=SchedulerConfig(chunked_prefill_size=chunk, max_running_requests=4),
                quantization=quantization,
                num_threads=1,
                context_len=256,
            )
        )
        answers += [ask(engine, prompt, "miss"), ask(engine, prompt, "hit")]
        engine.close()
    assert [cached for _, cached in answers] == [0, 36, 0, 36]
    assert len({tuple(ids) for ids, _ in answers}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_stacked_tensors_is_that_of_single_ones(kind: str, tmp_path: Path) -> None:
    """As the module of Transformers 5 holds them, which save_pretrained takes apart."""
    model = tiny.save(kind, tmp_path)
    wanted = open_model(tmp_path).prefill(tiny.PROMPTS, chunk=100)[0]
    stacked = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    sparse = sum("experts.gate_up_proj" in name for name in stacked)
    assert sparse == {"mixtral": 3, "qwen2-moe": 1, "qwen3-moe": 2}[kind]
    save_file(stacked, tmp_path / "model.safetensors")
    assert torch.equal(open_model(tmp_path).prefill(tiny.PROMPTS, chunk=100)[0], wanted)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tiny.save("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidConfig, match=r"1 missing \(model.layers.1.block_sparse_moe.experts.2.w3.weight\)"):
        open_model(tmp_path)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_bytes_of_experts_are_known_before_they_are_loaded(
    kind: str, quantization: Quantization, tmp_path: Path
) -> None:
    """Sizes that fill panels but for the one row of a gate; in fp32 an untied embedding is a view of the file. Sinks
    are not counted."""
    changes: dict[str, Any] = {
        "gpt-oss": {"num_local_experts": 32},
        "mixtral": {"num_local_experts": 32},
        "qwen2-moe": {"shared_expert_intermediate_size": 64},
        "qwen3-moe": {},
    }[kind]
    experts = {"moe_intermediate_size": 32, "num_experts": 32} if kind.startswith("qwen") else {}
    tiny.save(kind, tmp_path, hidden_size=64, intermediate_size=64, vocab_size=128, **changes, **experts)
    config = load_model_config(str(tmp_path), quantization=quantization)
    told, held = sizing.weight_bytes(config, 1), weight_bytes(open_model(tmp_path, quantization=quantization).model)
    view = 128 * 64 * 4 if quantization == "none" else 0
    more = {"qwen2-moe": 31 * 64 * 4, "gpt-oss": 3 * 4 * 4}.get(kind, 0)
    assert told - view == pytest.approx(held - more)


def test_a_config_of_the_hub_and_one_of_transformers_mean_the_same(tmp_path: Path) -> None:
    tiny.save("qwen3-moe", tmp_path)
    config, file = load_model_config(str(tmp_path)), tmp_path / "config.json"
    assert config.moe == MoEConfig(num_experts=8, top_k=3, intermediate_size=24, normalize=True, dense_layers=(1,))
    raw = json.loads(file.read_text())
    raw["num_experts"] = raw.pop("num_local_experts")
    file.write_text(json.dumps(raw))
    assert load_model_config(str(tmp_path)) == config
    file.write_text(json.dumps(raw | {"num_experts_per_tok": 9}))
    with pytest.raises(InvalidConfig, match="9 experts a token cannot be chosen from 1 of 1 groups of 8 experts"):
        load_model_config(str(tmp_path))


def test_ranks_split_every_inner_size(tmp_path: Path) -> None:
    tiny.save("qwen2-moe", tmp_path)
    config = load_model_config(str(tmp_path))
    assert config.inner_sizes == (24, 40, 72)
    assert config.tp_sizes() == [1, 2, 4]
    assert config.moe is not None
    assert replace(config, moe=replace(config.moe, shared_intermediate_size=42)).tp_sizes() == [1, 2]


def test_ranks_that_would_cut_a_group_of_an_experts_inputs_are_refused(tmp_path: Path) -> None:
    """Experts of 96 on two ranks have 48 inputs each: groups of 16, not of 32; on three they have 32."""
    tiny.save("qwen3-moe", tmp_path, hidden_size=96, num_attention_heads=6, num_key_value_heads=6, head_dim=32,
              moe_intermediate_size=96, intermediate_size=192)  # fmt: skip
    config = load_model_config(str(tmp_path), quantization="int4")
    machine = Hardware(device="cpu", num_cpus=2, available_memory_bytes=1 << 34)
    with pytest.raises(InvalidConfig, match=r"48 and 96 of the MLP's last .* cut groups .* for this model: \[1, 3\]"):
        resolve(config, machine, parallel=ParallelConfig(tp=2))
    assert resolve(config, machine, parallel=ParallelConfig(tp=3)).parallel.tp == 3
