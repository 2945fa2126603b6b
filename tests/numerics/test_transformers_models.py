"""Models that run through Transformers' own modules: the answers are Transformers', on every path.

Tiny random models; biases, norms and sinks are random too. The oracle is Transformers in fp32 with eager attention.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvtransfer.types import TransferSettings
from replicas.cache.kv import goes_on_at
from replicas.cache.parts import WindowAllocator
from replicas.config import AttentionKind, CacheConfig, ModelConfig, SchedulerConfig
from replicas.disagg.roles import PrefillRole
from replicas.engine.engine import Engine
from replicas.errors import InvalidConfig, UnsupportedModel
from replicas.kernels import bf16_tiles
from replicas.launch import EngineSettings, load_engine
from replicas.layers.tp_group import TpGroup
from replicas.loading.model_files import load_model_config
from replicas.memory.sizing import weight_bytes
from replicas.runner.kv_access import CarriedWindows, CarryWindows
from replicas.scheduler.tokens import NewToken
from replicas.types import GenerateRequest, PdTransferReport, SamplingParams, TokenDelta
from tests.engine_process import TOKEN
from tests.local_agents import LocalAgent, LocalFabric
from tests.numerics import tiny
from tests.numerics.handing_over import alone, fetching, legs, make_engine, run
from tests.numerics.paged import PagedModel, assert_as_transformers, assert_close_in_range, open_model
from tests.numerics.ranks import run_ranks
from tests.numerics.tiny import assert_greedy, uncached
from tests.pairwise import ALL
from tests.unit.tokenizer_folders import byte_level_folder
from tools.models_table import tiny_config, written

# windows are of 9 tokens and chunks of 8, so that 64 tokens leave them behind
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "cohere": {},
    "deepseek_v32": {},
    "gemma2": {},
    "gemma3_text": TWO_KINDS,
    "glm4": {},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "gpt_neox": {},
    "gpt_oss": {},
    "gptj": {},  # whose attention is a method of its own
    "granite": {},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    "mimo_v2_flash": {},  # whose layers with a window have twice as many KV heads
    "mixtral": {},
    "olmo2": {},
    "phi3": {},
    "qwen3_moe": {},
    "stablelm": {},
    "starcoder2": {},
}
PROMPTS = [list(range(3, 26)), [7], [90, 4, 4, 61, 100, 0, 33, 12, 9]]


MOST_NUMBERS = 20_000_000  # of weights
LARGE = {"gemma4", "dots3_note"}  # parts that see and hear are large in any config; text parts have types of their own


def make(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """A random model, biases and norms too, saved into ``folder``."""
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert size <= MOST_NUMBERS, f"{size / 1e6:.0f} million weights: its tiny config is not tiny"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and parameter.dim() == 1 else 0.0, 0.2)
    model = model.float().eval()
    model.save_pretrained(folder)
    return model


RUN = [row.model_type for row in written() if row.how != "refused" and row.model_type not in LARGE]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", RUN if ALL else RUN[::6])  # all take 7 minutes
def test_every_architecture_that_is_said_to_run_says_what_transformers_says(model_type: str, tmp_path: Path) -> None:
    """As docs/models.md has it: natively where it is native, packed and 5 tokens at a time."""
    made = type(make(tiny_config(model_type), tmp_path))
    model = made.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    prompts = [list(range(3, 26)), [7], [90, 4, 4, 61, 100, 5, 33, 12, 9]]
    first, second = open_model(tmp_path), open_model(tmp_path)
    for prompt, ours in zip(prompts, first.prefill(prompts, chunk=5), strict=True):
        assert_close_in_range(ours, uncached(model, prompt), 1e-3)
    texts = [list(prompt) for prompt in prompts]
    for _ in range(12):
        for text in texts:
            text.append(int(uncached(model, text)[-1].argmax()))
    assert second.greedy(prompts, 12) == [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def save(model_type: str, folder: Path, **changes: Any) -> PreTrainedModel:
    byte_level_folder(folder)
    config = tiny_config(model_type, num_hidden_layers=2, **{**MODELS.get(model_type, {}), **changes})
    config.eos_token_id = None
    return make(config, folder)


@pytest.fixture(scope="module", params=sorted(MODELS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save(request.param, folder)


Saved = tuple[Path, PreTrainedModel]


def test_logits_and_64_greedy_tokens_are_those_of_transformers(saved: Saved) -> None:
    """Three prompts packed into each step, whole and 5 tokens at a time."""
    folder, model = saved
    whole, parts = (open_model(folder, implementation="transformers", attention="auto") for _ in range(2))
    answers = parts.greedy(PROMPTS, 64, chunk=5)
    assert_as_transformers(model, PROMPTS, whole.prefill(PROMPTS, chunk=100), answers)


def test_linears_of_one_input_that_differ_in_bias_are_not_one_product(tmp_path: Path) -> None:
    """Whisper's decoder has biases in its queries and values, and none in its keys."""
    model = make(tiny_config("whisper"), tmp_path)
    logits, wanted = tiny.reference(model, PROMPTS[0], 16)
    served = open_model(tmp_path, implementation="transformers")
    assert_close_in_range(served.prefill([PROMPTS[0]], chunk=100)[0], logits, 1e-4)
    assert served.greedy([PROMPTS[0]], 16) == [wanted]


def test_a_hit_a_chunked_prompt_and_a_kv_transfer_say_the_same(saved: Saved) -> None:
    """With a host tier layers that have a window keep whole pages; other layers know no difference."""
    kinds = load_model_config(str(saved[0]), implementation="transformers").attention_kinds
    has_windows = any(kind.window or kind.chunk for kind in kinds)
    for host_bytes in (0, 8 << 20) if has_windows else (0,):
        check_two_replicas(*saved, host_bytes=host_bytes)


def check_two_replicas(folder: Path, model: PreTrainedModel, *, host_bytes: int) -> None:
    fabric = LocalFabric()
    sides = [
        make_engine(str(folder), 4, 7, fabric, implementation="transformers", host_bytes=host_bytes) for _ in range(2)
    ]
    prompt = np.array(PROMPTS[0], np.int32)  # 23 tokens: four chunks, five whole pages
    request = GenerateRequest(
        rid="asked", token_ids=prompt, sampling=SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    )
    try:
        prefill, decode = sides
        miss, hit = (alone(decode, request) for _ in range(2))
        assert [told[-1].usage.cached_tokens for told in (miss, hit)] == [0, 20]
        assert decode.flush_cache()
        assert prefill.transfer_address is not None
        for side, leg in zip(sides, legs(request, prefill.transfer_address), strict=True):
            side.submit(leg)
        _, handed = run(sides)
        report = handed[0].kv_transfer
        assert report is not None
        assert report.transferred, report.reason
        for told in (miss, hit, handed):
            answer = [id_ for delta in told for id_ in delta.token_ids]
            assert len(answer) == 24
            assert_greedy(model, PROMPTS[0], answer)
    finally:
        for side in sides:
            side.close()


def engines_of(folder: Path, number: int) -> list[Engine]:
    """One engine alone, or two that hand over or fetch."""
    names, fabric = itertools.count(), LocalFabric()
    return [
        load_engine(
            EngineSettings(
                model=str(folder),
                cache=CacheConfig(page_size=4, max_total_tokens=400),
                scheduler=SchedulerConfig(chunked_prefill_size=16, max_running_requests=8),
                num_threads=1,
                context_len=128,
                implementation="transformers",
                transfer=TransferSettings(host="127.0.0.1", token=TOKEN) if number > 1 else None,
                make_agent=lambda memory: LocalAgent(memory, fabric, str(next(names))),
            )
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss"])
def test_a_fetch_brings_the_last_window_or_ends_where_the_donor_has_one(model_type: str, tmp_path: Path) -> None:
    """Turns go to one engine and the other. What the donor has lost shortens the fetch, or the donor refuses it."""
    model, engines = save(model_type, tmp_path), engines_of(tmp_path, 2)
    draw, greedy = np.random.default_rng(1), SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True)
    texts = [draw.integers(3, 190, length).tolist() for length in (7, 19, 38, 50)]
    reports = list[PdTransferReport]()
    try:
        for turn, (number, text) in itertools.product(range(6), enumerate(texts)):
            engine, donor = engines[turn % 2], engines[1 - turn % 2]
            request = GenerateRequest(rid=f"{turn}-{number}", token_ids=np.array(text, np.int32), sampling=greedy)
            end_len = (len(text) - 1) // 4 * 4
            asked = request.token_ids[:end_len]
            windows, pages = donor.kv.store.parts, donor.kv.cache.match_prefix(asked, "").pages
            assert isinstance(windows, WindowAllocator)
            assert donor.transfer_address is not None
            if turn == 4:  # all windows but one within the prompt have gone
                windows._give_up(pages[len(pages) // 2 :])
            elif turn == 5 and number == 3:
                windows._give_up(pages)
            reach, here = (goes_on_at(asked, "", each.kv) for each in (donor, engine))
            is_sent = reach > 0 and reach >= engine.kv.cache.peek_len(asked, "")
            engine.submit(fetching(request, donor.transfer_address, end_len))
            told, _ = run([engine, donor])
            answer = [id_ for delta in told for id_ in delta.token_ids]
            assert answer == tiny.reference(model, text, 9)[1]
            report = next(delta.kv_transfer for delta in told if delta.kv_transfer is not None)
            assert report.transferred == (is_sent or here == end_len), report
            assert told[-1].usage.cached_tokens == (reach if is_sent else here)
            reports.append(report)
            text += [*answer, *draw.integers(3, 190, 3).tolist()]
            for each in engines:
                each.scheduler.check()
        assert sum(report.num_pages for report in reports) > 60
        assert any("not cached here" in (report.reason or "") for report in reports)
    finally:
        for each in engines:
            each.close()


@pytest.mark.parametrize("is_apart", [False, True], ids=["one replica", "prefill and decode apart"])
@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "llama4_text", "mimo_v2_flash"])
def test_conversations_say_the_same_while_window_layers_keep_a_part_of_their_tokens(
    model_type: str, is_apart: bool, tmp_path: Path
) -> None:
    """Six conversations at once, of which the pools hold a part; hits go on behind holes, and what is gone is computed
    anew. A prefill replica sends full layers whole and of the others the window at the prompt's end; for every
    other text it fetches the answers before likewise."""
    model, engines = save(model_type, tmp_path), engines_of(tmp_path, 1 + is_apart)
    draw, greedy = np.random.default_rng(1), SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True)
    texts = [draw.integers(3, 190, length).tolist() for length in (1, 7, 19, 26, 38, 50)]
    cached = 0
    try:
        for _ in range(5):
            for rid, text in enumerate(texts):
                request = GenerateRequest(rid=str(rid), token_ids=np.array(text, np.int32), sampling=greedy)
                peer = engines[0].transfer_address
                of_sides = [request] if peer is None else [*legs(request, peer)]
                if rid % 2 and len(engines) > 1 and (back := engines[1].transfer_address) is not None:
                    fetch = fetching(request, back, (len(text) - 1) // 4 * 4).kv_transfer
                    own = of_sides[0].kv_transfer
                    assert fetch is not None
                    assert own is not None
                    of_sides[0] = replace(request, kv_transfer=replace(own, fetch=fetch.ticket))
                for engine, leg in zip(engines, of_sides, strict=True):
                    engine.submit(leg)
            told: dict[str, list[TokenDelta]] = {str(rid): [] for rid in range(len(texts))}
            while any(engine.has_work for engine in engines):
                for delta in [engine.step() for engine in engines][-1]:
                    told[delta.rid].append(delta)
                for engine in engines:
                    engine.scheduler.check()
            for rid, text in enumerate(texts):
                answer = [id_ for delta in told[str(rid)] for id_ in delta.token_ids]
                assert len(answer) == 9
                assert_greedy(model, text, answer)
                report = told[str(rid)][0].kv_transfer
                assert is_apart == (report is not None and report.transferred), report
                cached += told[str(rid)][-1].usage.cached_tokens
                text += [*answer, *draw.integers(3, 190, 3).tolist()]
        for engine in engines:
            windows = engine.kv.store.parts
            assert isinstance(windows, WindowAllocator)
            assert windows.evicted > 0
            assert windows.num_holes > 0
        assert cached > 0
        assert not is_apart or engines[1].stats().prefill_tokens == 0
        transfer = engines[0].stats().transfer
        assert not is_apart or (transfer is not None and transfer.receives_done > 5)
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize(("to_pages", "why"), [(True, "cannot be sent"), (False, "cannot be taken over")])
def test_a_prompt_is_computed_where_its_windows_cannot_be_copied(
    to_pages: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode side has the prompt's pages, and no windows. The copy fails once, with some of it made. Whether or not
    it does, the prefill side needs no windows of a prompt behind it."""
    model, engines, text = save("gpt_oss", tmp_path), engines_of(tmp_path, 2), list(range(40, 80))
    greedy = SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True)
    copy, failed = CarriedWindows._copy, list[bool]()

    def short(carried: CarriedWindows, order: CarryWindows) -> None:
        if order.to_pages is to_pages and not failed:
            failed.append(True)
            if not to_pages:
                carried._pools[1].buffer[order.parts.astype(np.int64)] = 9.0
            raise RuntimeError("no memory")
        copy(carried, order)

    def sent(role: PrefillRole, token: NewToken) -> NewToken | None:
        end = send_last(role, token)
        assert isinstance(role._kv.store.parts, WindowAllocator)
        reserved.append(role._kv.store.parts.reserved)
        return end

    send_last, reserved = PrefillRole.send_last, list[int]()
    monkeypatch.setattr(CarriedWindows, "_copy", short)
    monkeypatch.setattr(PrefillRole, "send_last", sent)
    try:
        decode, peer = engines[1], engines[0].transfer_address
        parts = decode.kv.store.parts
        assert isinstance(parts, WindowAllocator)
        assert peer is not None
        alone(decode, GenerateRequest(rid="warm", token_ids=np.array(text, np.int32), sampling=greedy))
        parts._give_up(decode.kv.cache.match_prefix(np.array(text, np.int32), "").pages)
        for rid in ("a", "b"):
            request = GenerateRequest(rid=rid, token_ids=np.array(text, np.int32), sampling=greedy)
            for engine, leg in zip(engines, legs(request, peer), strict=True):
                engine.submit(leg)
            told = list[TokenDelta]()
            while decode.has_work:
                engines[0].step()
                told += decode.step()
            engines[0].abort(rid)
            run(engines)
            report = told[0].kv_transfer
            assert report is not None
            assert report.transferred == (rid == "b")
            assert rid == "b" or why in (report.reason or "")
            answer = [id_ for delta in told for id_ in delta.token_ids]
            assert len(answer) == 9
            assert_greedy(model, text, answer)
            for engine in engines:
                engine.scheduler.check()
        assert reserved == [0, 0]
    finally:
        for engine in engines:
            engine.close()


def test_the_outline_finds_what_each_layer_does(tmp_path: Path) -> None:
    for model_type in ("gemma2", "llama4_text", "gpt_oss", "gpt_neox"):
        save(model_type, tmp_path / model_type)
    gemma, llama, gpt_oss, neox = (
        load_model_config(str(tmp_path / name), implementation="transformers")
        for name in ("gemma2", "llama4_text", "gpt_oss", "gpt_neox")
    )
    assert gemma.attention_kinds == (
        AttentionKind(scale=0.0625, soft_cap=50.0, window=9),
        AttentionKind(scale=0.0625, soft_cap=50.0),
    )
    assert llama.attention_kinds == (AttentionKind(chunk=8), AttentionKind())
    assert gpt_oss.attention_kinds == (AttentionKind(sinks=True, window=9), AttentionKind(sinks=True))
    assert neox.attention_kinds == ()
    assert (neox.num_layers, neox.num_heads, neox.num_kv_heads, neox.head_dim) == (2, 4, 4, 16)
    assert (neox.vocab_size, neox.context_len, neox.implementation) == (200, 256, "transformers")


def test_the_weights_are_counted_before_they_are_read_and_lie_in_memory_once(tmp_path: Path) -> None:
    model = save("granite", tmp_path, tie_word_embeddings=True)
    config = load_model_config(str(tmp_path))
    counted = sum(parameter.numel() for parameter in model.parameters())  # a tied head is no second one
    assert weight_bytes(config, 1) == 4 * counted
    served = open_model(tmp_path).model
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert served.num_bytes == pytest.approx(4 * counted + buffers, rel=0.1)  # panels are padded to 16 rows


@pytest.mark.parametrize("model_type", ["gemma2", "qwen3_moe", "gpt_oss"])
def test_half_as_many_bytes_say_nearly_the_same(
    tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 weights under fp32 arithmetic, experts' too: what Transformers says of the rounded weights in fp32."""
    monkeypatch.setattr(bf16_tiles, "way", lambda: None)
    model = save(model_type, tmp_path)
    full = load_model_config(str(tmp_path), implementation="transformers")
    served = open_model(tmp_path, dtype="bfloat16", implementation="transformers")
    for parameter in model.parameters():  # the rotary frequencies stay as they are
        parameter.data = parameter.data.bfloat16().float()
    for prompt, ours in zip(PROMPTS, served.prefill(PROMPTS, chunk=9), strict=True):
        assert_close_in_range(ours, tiny.reference(model, prompt, 1)[0], 1e-3)
    assert served.model.num_bytes < 0.75 * 4 * full.num_weights


def test_two_ranks_agree_with_one(tmp_path: Path) -> None:
    """By each model's own plan: attention and MLP in halves, and experts by their inner size."""
    configs = []
    for model_type in ("gemma2", "mixtral"):
        save(model_type, tmp_path / model_type)
        configs.append(load_model_config(str(tmp_path / model_type), implementation="transformers"))
        assert configs[-1].tp_sizes()[:2] == [1, 2]
    wanted = answer(TpGroup(device="cpu"), configs)
    for ours in run_ranks(2, answer, configs, meet=tmp_path / "meet"):
        for (logits, ids), (logits_1, ids_1) in zip(ours, wanted, strict=True):
            assert_close_in_range(logits, logits_1, 1e-4)
            assert ids == ids_1


def answer(tp: TpGroup, configs: list[ModelConfig]) -> list[tuple[torch.Tensor, list[list[int]]]]:
    """What this rank makes of each model."""
    answers = []
    for config in configs:
        first, second = (PagedModel(config, tp, page_size=4, num_pages=256) for _ in range(2))
        answers.append((first.prefill(PROMPTS, chunk=16)[0], second.greedy(PROMPTS, 16)))
    return answers


def test_rope_that_follows_the_longest_text_does_not_follow_the_batch(tmp_path: Path) -> None:
    """Phi-3's longrope beyond its first context: long factors for all that is served so long, short ones below."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0,
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = save("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=32)
    long_text, short_text = list(range(3, 63)), [9, 8, 7]
    short_alone = tiny.reference(model, short_text, 1)[0]
    long_alone = tiny.reference(model, long_text, 1)[0]
    short, long = (open_model(tmp_path, implementation="transformers", context_len=n) for n in (32, 256))
    assert_close_in_range(short.prefill([short_text], chunk=8)[0], short_alone, 1e-4)
    assert_close_in_range(long.prefill([long_text, short_text], chunk=60)[0], long_alone, 1e-4)
    again, by_itself = (open_model(tmp_path, implementation="transformers", context_len=256) for _ in range(2))
    beside = again.prefill([long_text, short_text], chunk=60)[1]
    assert_close_in_range(beside, by_itself.prefill([short_text], chunk=8)[0], 1e-4)
    assert (beside - short_alone).abs().max() > 0.01 * (short_alone.max() - short_alone.min())  # other angles


REFUSED = [
    ("bart", {"architectures": ["BartForConditionalGeneration"], "is_encoder_decoder": True}, "is an encoder-decoder"),
    ("deepseek_v4", {}, "keep a state that is no K and V"),
    ("recurrent_gemma", {}, "keep their state in the module itself"),
    ("bert", {"is_decoder": False}, "its tokens see those that come after them"),
    ("bloom", {}, r"\(ALiBi\)"),
    ("mpt", {}, r"\(ALiBi\)"),
    ("falcon", {}, "attention is code of its own"),
]


@pytest.mark.parametrize(("model_type", "changes", "reason"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name_and_reason_before_weights_are_looked_for(
    tmp_path: Path, model_type: str, changes: dict[str, Any], reason: str
) -> None:
    config = tiny_config(model_type).to_dict()
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [name], **changes}))
    with pytest.raises(UnsupportedModel, match=f"cannot be served through Transformers: .*{reason}"):
        load_model_config(str(tmp_path), implementation="transformers")


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    given = {"architectures": ["OddForCausalLM"], "model_type": "odd", "auto_map": {"AutoConfig": "odd.OddConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    (tmp_path / "odd.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UnsupportedModel, match=r"comes with the checkpoint \(auto_map\), .* never run"):
        load_model_config(str(tmp_path))


def test_a_checkpoint_that_lacks_weights_is_named_with_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save("olmo2", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.q_norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidConfig, match=r"1 are missing or of another shape \(model.layers.1.self_attn.q_norm"):
        open_model(tmp_path)


def test_a_native_family_runs_through_transformers_where_it_is_asked_to_or_has_to(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path / "llama")
    tiny.save("llama", tmp_path / "gelu", hidden_act="gelu")
    assert load_model_config(str(tmp_path / "llama")).implementation == "manta"
    assert load_model_config(str(tmp_path / "llama"), implementation="transformers").implementation == "transformers"
    assert load_model_config(str(tmp_path / "gelu")).implementation == "transformers"
    with pytest.raises(UnsupportedModel, match="hidden_act 'gelu'"):
        load_model_config(str(tmp_path / "gelu"), implementation="manta")
