"""DeepSeek-V2, V3, V3.2 and GLM-5 agree with Transformers in fp32 on every path: latent attention, its index, experts,
YaRN; whole and chunked, missed, hit and on the host, retracted, restored elsewhere, on one rank and two, handed over
between any of them."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from replicas.engine.engine import Engine
from replicas.errors import InvalidConfig, UnsupportedModel
from replicas.loading.model_files import load_model_config
from replicas.models.deepseek import Deepseek
from replicas.types import GenerateRequest, SamplingParams
from tests import harness
from tests.embedded import MODEL
from tests.numerics import tiny
from tests.numerics.handing_over import GREEDY, tiny_prompt
from tests.numerics.paged import assert_as_transformers, open_model
from tests.numerics.test_pd_transfer import check_pair, trio

NUM_NEW = 24
PROMPT = np.random.default_rng(3).integers(0, tiny.VOCAB, 90).astype(np.int32)


@pytest.mark.parametrize("kind", tiny.LATENT_CONFIGS)
def test_logits_and_64_greedy_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """Three prompts packed into each step, prefilled whole, or 5 tokens at a time by the kernels, and decoded together.
    By these where they serve the vectors' length: those of v2-lite are 24 numbers."""
    model = tiny.save(kind, tmp_path)
    for attention, chunk, num_new in (("torch_native", 100, 8), ("auto", 5, 64)):
        first, second = (open_model(tmp_path, attention=attention) for _ in range(2))
        logits, answers = first.prefill(tiny.PROMPTS, chunk=chunk), second.greedy(tiny.PROMPTS, num_new, chunk=chunk)
        assert_as_transformers(model, tiny.PROMPTS, logits, answers, 1e-5)


@pytest.mark.slow
def test_rounded_weights_give_one_answer_whole_and_in_chunks(tmp_path: Path) -> None:
    """Groups of 32 inputs share a scale, so the sizes are multiples of it."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    tiny.save("v3", tmp_path, **sizes, q_lora_rank=32)
    whole, chunked = (
        open_model(tmp_path, attention="auto", quantization="int4").greedy(tiny.PROMPTS, 24, chunk=chunk)
        for chunk in (100, 5)
    )
    assert whole == chunked


def test_the_blocks_that_only_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """V3's checkpoints hold them behind the others; a missing or unknown weight elsewhere is refused."""
    model = tiny.save("v3", tmp_path)
    wanted = tiny.reference(model, tiny.PROMPTS[0], 8)[1]
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    more = {name.replace("layers.2.", "layers.3."): tensor.clone() for name, tensor in weights.items()}
    save_file({**more, **weights, "model.layers.3.eh_proj.weight": torch.ones(2)}, file)
    assert open_model(tmp_path).greedy(tiny.PROMPTS[:1], 8) == [wanted]
    save_file({**weights, "model.layers.2.eh_proj.weight": torch.ones(2)}, file)
    with pytest.raises(InvalidConfig, match=r"1 unexpected \(model.layers.2.eh_proj.weight\)"):
        open_model(tmp_path)


def test_an_index_in_layers_that_share_a_choice_is_left_out(tmp_path: Path) -> None:
    """GLM-5's checkpoints have one in each layer, and a config may say that some share."""
    model = tiny.save("glm-5", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    own = {name: tensor for name, tensor in weights.items() if ".0.self_attn.indexer." in name}
    assert len(own) == 5
    save_file({**weights, **{name.replace(".0.", ".1."): tensor.clone() for name, tensor in own.items()}}, file)
    wanted = tiny.reference(model, tiny.PROMPTS[0], 8)[1]
    assert open_model(tmp_path).greedy(tiny.PROMPTS[:1], 8) == [wanted]


def test_what_an_index_weighs_its_heads_with_is_not_rounded(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    tiny.save("v3.2", tmp_path, **sizes, q_lora_rank=32)
    model = open_model(tmp_path, attention="auto", quantization="int4").model
    assert isinstance(model, Deepseek)
    index = model.blocks[0].attn.index  # type: ignore[attr-defined]
    saved = load_file(tmp_path / "model.safetensors")
    of_heads, of_keys = (saved[f"model.layers.0.self_attn.indexer.{name}.weight"] for name in ("weights_proj", "wk"))
    x = torch.randn(3, 64)
    torch.testing.assert_close(index.weights_of(x), x @ of_heads.T)
    assert (index.k(x) - x @ of_keys.T).abs().max() > 1e-3, "others are"


@pytest.fixture(scope="module", params=["v3", "glm-5"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel]:
    """A folder with a tokenizer, which one does not matter."""
    folder = tmp_path_factory.mktemp("saved")
    model = tiny.save(request.param, folder)
    for file in Path(MODEL).glob("*token*.json"):
        shutil.copy(file, folder)
    return str(folder), model


@pytest.fixture(scope="module")
def wanted(saved: tuple[str, PreTrainedModel]) -> list[int]:
    return tiny.reference(saved[1], PROMPT.tolist(), NUM_NEW)[1]


def engine_of(folder: str, *, page: int, chunk: int, tp: int = 1, **cache: Any) -> Engine:
    """Without speculation: with it an answer that was given before comes too soon to be retracted in its midst."""
    return harness.small_engine(
        folder, page=page, tokens=1024, chunk=chunk, running=4, tp=tp, cache=cache, scheduler={"speculation": "off"}
    )


def request(rid: str = "a") -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    return GenerateRequest(rid=rid, token_ids=PROMPT, sampling=sampling)


def finish(engine: Engine, *, retract: bool = False) -> list[int]:
    ids: list[int] = []
    while engine.has_work:
        ids += [token for delta in engine.step() for token in delta.token_ids]
        if retract and len(ids) == NUM_NEW // 2:
            harness.retract(engine.scheduler, engine.scheduler.queues.running[0])
            retract = False
    assert not retract, "the request was never in a state to be retracted"
    engine.scheduler.check()
    return ids


@pytest.mark.model
@pytest.mark.parametrize(("page", "chunk", "tp"), [(16, 512, 1), (4, 24, 2)])
def test_every_path_of_an_engine_gives_the_tokens_of_transformers(
    saved: tuple[str, PreTrainedModel], wanted: list[int], page: int, chunk: int, tp: int
) -> None:
    """Miss, hit, hit on the host, retracted and resumed; the host holds a page once, whatever tp is."""
    engine = engine_of(
        saved[0], page=page, chunk=chunk, tp=tp, host_memory_bytes=1 << 20, write_policy="write_back"
    )
    try:
        model = engine.config.model
        assert model.mla is not None
        page_bytes = page * 3 * (52 if model.mla.index else 32) * 4  # 3 layers x (16 + 16, and a key of 20) floats
        assert model.kv_cell_bytes(tp=tp, kv_dtype="float32") * page == page_bytes
        for to_host, retract in ((False, False), (False, True), (True, False), (True, True)):
            if to_host:
                harness.to_host(engine.kv)
            engine.submit(request())
            assert finish(engine, retract=retract) == wanted
        tiers = engine.kv.store.tiers
        assert tiers is not None
        assert tiers.copier.host.view.shape[1] == page_bytes  # type: ignore[attr-defined]
        assert tiers.counters.loaded_pages > 0
        assert engine.stats().tiers.host_wrong_pages == 0  # type: ignore[union-attr]
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.model
def test_two_replicas_answer_as_one(saved: tuple[str, PreTrainedModel]) -> None:
    """By memcpy in one process: missed, part of it on the decode side or on the prefill side, on device and host."""
    made = trio(saved[0], 16, 32)
    for at, cached in enumerate(("miss", "decode part", "prefill part on host")):
        check_pair(made, tiny_prompt((37, 64, 80)[at], at), cached, GREEDY)
    made.close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported; supported: (1,)"),
        ({"topk_method": "best"}, "topk_method = 'best' is not supported"),
        ({"index_topk": 8, "indexer_types": ["shared"]}, "indexer_types = ['shared'] is not supported"),
        ({"norm_topk_prob": True}, "norm_topk_prob = True is not supported; supported: (False,)"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    config, special = tiny.LATENT_CONFIGS["v2"]
    keys = {**tiny.SHAPE, **tiny.LATENT, **special, **changes, "architectures": ["DeepseekV2ForCausalLM"]}
    config(**keys).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=re.escape(says)):
        load_model_config(str(tmp_path), implementation="manta")


@pytest.mark.model
def test_a_latent_vector_of_8_bits_is_refused(saved: tuple[str, PreTrainedModel]) -> None:
    with pytest.raises(InvalidConfig, match=r"cache\.kv_dtype = 'int8' with latent attention"):
        engine_of(saved[0], page=16, chunk=32, kv_dtype="int8")
