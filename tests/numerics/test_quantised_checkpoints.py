"""Quantised checkpoints: Transformers says the same of what they stand for, in fp32, whatever library packed them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

from replicas.checkpoints.methods import method_of
from replicas.config import Hardware, ParallelConfig
from replicas.errors import InvalidConfig
from replicas.layers.linear import ColumnParallelLinear
from replicas.loading.model_files import load_model_config, model_identity
from replicas.loading.weights import weight_bytes
from replicas.memory import sizing
from replicas.resolve import resolve
from tests.numerics import quantised, tiny
from tests.numerics.paged import assert_as_transformers, open_model
from tests.numerics.quantised import Made

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["lm_head", "down_proj"]}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "type": "int", **weights}, "input_activations": None}
    groups = {"config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*down_proj"]}
    return {"quant_method": "compressed-tensors", "format": form, **groups}


def gptq_case(
    bits: int, group: int, *, sym: bool = True, act_order: bool = False, version: str = "gptq", said: str | None = None
) -> tuple[dict[str, Any], Callable[[Tensor], Made]]:
    """``said``: the version that config.json names, if it is not the one of the numbers."""
    form = said or version
    config = {"bits": bits, "group_size": group, "sym": sym, "desc_act": act_order, "checkpoint_format": form}
    return GPTQ | config, quantised.gptq(bits, group, sym=sym, act_order=act_order, version=version)


CASES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Made], str | None]] = {
    "gptq-4-32": (*gptq_case(4, 32), "q4_1"),
    "gptq-4-64-v2": (*gptq_case(4, 64, version="gptq_v2"), "q4_1"),
    "gptq-4-row": (*gptq_case(4, -1), "q4_1"),
    "gptq-4-16": (*gptq_case(4, 16), None),
    "gptq-4-asym": (*gptq_case(4, 32, sym=False), None),
    "gptq-4-asym-v2": (*gptq_case(4, 32, sym=False, version="gptq_v2"), None),
    "gptq-4-act-order": (*gptq_case(4, 32, act_order=True), None),
    "gptq-4-v2-said-v1": (*gptq_case(4, 32, version="gptq_v2", said="gptq"), "q4_1"),
    "gptq-4-v1-said-v2": (*gptq_case(4, 32, version="gptq", said="gptq_v2"), "q4_1"),
    "gptq-8-v2-said-v1-act-order": (*gptq_case(8, 32, act_order=True, version="gptq_v2", said="gptq"), None),
    "gptq-8-32": (*gptq_case(8, 32), "q8_0"),
    "gptq-8-asym-act-order": (*gptq_case(8, 32, sym=False, act_order=True), None),
    "awq": (AWQ, quantised.awq(32), None),
    "packed-4": (compressed("pack-quantized", num_bits=4, group_size=32), quantised.packed(4, 32, sym=True), "q4_1"),
    "packed-4-asym": (
        compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False),
        quantised.packed(4, 32, sym=False),
        None,
    ),
    "packed-4-act-order": (
        compressed("pack-quantized", num_bits=4, group_size=32, actorder="group"),
        quantised.packed(4, 32, sym=True, act_order=True),
        None,
    ),
    "packed-4-unset-order": (
        compressed("pack-quantized", num_bits=4, group_size=32),
        quantised.packed(4, 32, sym=True, unset_order=True),
        "q4_1",
    ),
    "packed-8-row": (
        compressed("pack-quantized", num_bits=8, strategy="channel"),
        quantised.packed(8, -1, sym=True),
        "q8_0",
    ),
    "int8-row": (compressed("int-quantized", num_bits=8, strategy="channel"), quantised.int8_rows, "q8_0"),
    "float8-row": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        quantised.fp8_rows,
        None,
    ),
    "fp8-tensor": (FP8, quantised.fp8_tensor, None),
    "fp8-blocks": (FP8 | {"weight_block_size": [48, 32]}, quantised.fp8_blocks(48, 32), None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_quantised_checkpoint_is_the_model_that_its_numbers_stand_for(case: str, tmp_path: Path) -> None:
    """Logits of a prompt, in chunks and with company, and 16 greedy ids. A format that panels hold is kept in it, and
    then not even a bit differs from the same numbers in fp32."""
    config, quantise, panels = CASES[case]
    model = quantised.save(tmp_path / "stored", config, quantise)
    ours = open_model(tmp_path / "stored", attention="cpu")
    qkv = ours.model.blocks[0].attn.qkv.matmul._kernel
    assert qkv is not None
    assert qkv.weight.format == (panels or "float32")
    got = ours.prefill(tiny.PROMPTS, chunk=7)
    model.save_pretrained(tmp_path / "floats")
    floats = open_model(tmp_path / "floats", attention="cpu").prefill(tiny.PROMPTS, chunk=7)
    assert all(torch.equal(mine, same) for mine, same in zip(got, floats, strict=True))
    answers = open_model(tmp_path / "stored", attention="torch_native").greedy(tiny.PROMPTS, 16)
    assert_as_transformers(model, tiny.PROMPTS, got, answers)


@pytest.mark.parametrize("attention", ["cpu", "torch_native"])
def test_gpt_oss_as_published_is_the_model_that_transformers_makes_of_it(attention: str, tmp_path: Path) -> None:
    """Logits of a prompt, in chunks and with company, and 24 greedy ids, past the window of 9 tokens. Experts keep
    their 4 bits, and then not even a bit differs from the same numbers in fp32."""
    model = quantised.save_gpt_oss(tmp_path / "stored")
    its = AutoModelForCausalLM.from_pretrained(
        tmp_path / "stored", dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    assert torch.equal(its.model.layers[1].mlp.experts.down_proj, model.model.layers[1].mlp.experts.down_proj)
    ours = open_model(tmp_path / "stored", attention=attention)
    experts = ours.model.blocks[0].mlp
    for product, (rows, inputs) in ((experts.gate_up, (256, 64)), (experts.down, (64, 128))):
        panels = product._kernel._panels
        assert (panels.format, panels.nbytes) == ("mxfp4", 4 * rows * inputs * 17 // 32)
    got = ours.prefill(tiny.PROMPTS, chunk=7)
    model.save_pretrained(tmp_path / "floats")
    floats = open_model(tmp_path / "floats", attention=attention).prefill(tiny.PROMPTS, chunk=7)
    assert all(torch.equal(mine, same) for mine, same in zip(got, floats, strict=True))
    answers = open_model(tmp_path / "stored", attention=attention).greedy(tiny.PROMPTS, 24)
    assert_as_transformers(model, tiny.PROMPTS, got, answers)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": "bfloat16"}, "multiplied as they are (mxfp4)"),
        ({"dtype": "float16"}, "multiplied as they are (mxfp4)"),
        ({"quantization": "int4"}, "multiplied as they are (mxfp4); others rounded to int4"),
        ({"quantization": "int8"}, "multiplied as they are (mxfp4); others rounded to int8"),
    ],
)
def test_experts_of_4_bits_stay_so_whatever_the_others_are_rounded_to(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    """And a start counts their bytes before it reads them: an embedding that is not rounded is a view of the file, and
    biases of attention, and sinks, are a hundredth more."""
    quantised.save_gpt_oss(tmp_path, vocab_size=128, num_local_experts=32)
    config = load_model_config(str(tmp_path), device="cpu", **changes)
    assert config.describe_weights() == f"MXFP4 experts, blocks of 32; {told}"
    model = open_model(tmp_path, **changes).model
    assert model.blocks[2].mlp.gate_up._kernel._panels.format == "mxfp4"
    view = 0 if "quantization" in changes else 128 * 64 * 2
    assert weight_bytes(model) == pytest.approx(sizing.weight_bytes(config, 1) - view, rel=0.01)


def test_gpt_oss_goes_to_a_gpu_widened(tmp_path: Path) -> None:
    quantised.save_gpt_oss(tmp_path)
    config = load_model_config(str(tmp_path), device="cuda")
    assert config.describe_weights() == "MXFP4 experts, blocks of 32; dequantised to bfloat16 when they are loaded"
    on_cpu = load_model_config(str(tmp_path), device="cpu", dtype="bfloat16")
    experts, inner = 3 * 3 * 4 * 64 * 128, config.inner_sizes
    assert inner == (128,)
    assert sizing.weight_bytes(config, 1) - sizing.weight_bytes(on_cpu, 1) == experts * (2 - 17 / 32)


def test_ranks_that_would_cut_a_block_of_an_expert_are_refused(tmp_path: Path) -> None:
    """96 inputs of an expert's last product are three blocks: not two halves."""
    quantised.save_gpt_oss(tmp_path, intermediate_size=96)
    config = load_model_config(str(tmp_path), device="cpu")
    machine = Hardware(device="cpu", num_cpus=2, available_memory_bytes=1 << 34)
    with pytest.raises(InvalidConfig, match=r"tp = 2: 48 inputs of an expert's last product .* this model: \[1\]"):
        resolve(config, machine, parallel=ParallelConfig(tp=2))
    assert resolve(config, machine).parallel.tp == 1


def test_a_checkpoint_says_how_it_is_stored_and_served(tmp_path: Path) -> None:
    config, quantise, _ = CASES["gptq-4-32"]
    quantised.save(tmp_path, config, quantise)
    kept, halves, rounded, gpu = (
        load_model_config(str(tmp_path), **changes).describe_weights()
        for changes in ({"device": "cpu"}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"device": "cuda"})
    )
    about = "GPTQ, 4 bits, groups of 32"
    assert kept == f"{about}; multiplied as they are (q4_1)"
    assert halves == f"{about}; dequantised to bfloat16 when they are loaded"
    assert rounded == f"{about}; rounded to int8 when they are loaded"
    assert gpu == f"{about}; dequantised to float32 when they are loaded"


def test_weights_that_are_kept_as_they_are_take_a_sixth_of_their_floats(tmp_path: Path) -> None:
    """20 bytes for 32 numbers, against 128."""
    config, quantise, _ = CASES["gptq-4-32"]
    model = quantised.save(tmp_path / "stored", config, quantise)
    model.save_pretrained(tmp_path / "floats")
    kept, floats = (open_model(tmp_path / each).model.blocks[0].attn.qkv.num_bytes for each in ("stored", "floats"))
    assert kept * 128 == floats * 20


def test_ranks_that_would_cut_a_group_widen_what_they_have(tmp_path: Path) -> None:
    """The product after attention has 128 inputs: halves are groups of 32, eighths are not."""
    config, quantise, _ = CASES["gptq-4-32"]
    quantised.save(tmp_path, config, quantise)
    from replicas.checkpoints.checkpoint import open_checkpoint

    weight = open_checkpoint(tmp_path).weight("model.layers.0.self_attn.o_proj.weight")
    assert not isinstance(weight, Tensor)
    whole = weight.floats(0, 64)
    for ranks, panels in ((2, "q4_1"), (8, None)):
        parts = [weight.narrow(1, rank * 128 // ranks, 128 // ranks) for rank in range(ranks)]
        assert {part.fits for part in parts} == {panels}
        assert torch.equal(torch.cat([part.floats(0, 64) for part in parts], 1), whole)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"by 'bitsandbytes'; .* supported: gptq, awq,"),
        ({"quant_method": "hqq"}, r"is quantized by 'hqq'; supported: gptq, awq, compressed-tensors .* GGUF files"),
        (GPTQ | {"bits": 3}, "bits 3 of GPTQ; supported: 4 and 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'; supported: gptq, gptq_v2"),
        (AWQ | {"version": "gemv"}, "AWQ in version 'gemv'; supported: 4 bits in version 'gemm'"),
        (compressed("marlin-24", num_bits=4), "compressed-tensors in format marlin-24 of int 4; supported: "),
        (compressed("pack-quantized", num_bits=2), "of int 2; supported: "),
    ],
)
def test_what_is_not_read_is_refused_by_name_with_what_is(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        method_of("folder", config)


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(f"model.layers.1.self_attn.k_proj.{name}")


def ungroup(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.k_proj.g_idx"][3] = -1


def cut(name: str) -> Callable[[dict[str, Tensor]], object]:
    def change(tensors: dict[str, Tensor]) -> None:
        key = f"model.layers.1.self_attn.k_proj.{name}"
        tensors[key] = tensors[key][:-1].contiguous()

    return change


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gptq-4-32", drop("scales"), r"layers.1.self_attn.k_proj.weight lacks its part 'scales'; there is: g_idx, qw"),
        ("gptq-4-32", drop("qweight"), r"1 missing \(model.layers.1.self_attn.k_proj.weight\)"),
        ("gptq-4-32", cut("qzeros"), r"part 'qzeros' has shape \[1, 8\], wanted \[2, 8\]"),
        ("gptq-4-32", ungroup, r"k_proj.weight: g_idx names group -1, there are 2"),
        ("awq", cut("scales"), r"part 'qzeros' has shape \[2, 8\], wanted \[1, 8\]"),
        ("packed-4", drop("weight_scale"), "k_proj.weight lacks its part 'weight_scale'"),
        ("fp8-blocks", drop("weight_scale_inv"), "k_proj.weight lacks its part 'weight_scale'"),
        ("fp8-blocks", cut("weight_scale_inv"), r"part 'scale' has shape \[1, 2\], wanted \[2, 2\]"),
    ],
)
def test_parts_that_are_missing_or_do_not_fit_are_named(
    case: str, change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    config, quantise, _ = CASES[case]
    quantised.save(tmp_path, config, quantise)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidConfig, match=message):
        open_model(tmp_path)


OF_GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{OF_GATE_UP}_scales"), "experts.gate_up_proj lacks its part 'scales'; there is: blocks"),
        (lambda t: t.pop(f"{OF_GATE_UP}_blocks"), r"missing \(model.layers.1.mlp.experts.0.gate_up_proj.weight"),
        (lambda t: t.pop(f"{OF_GATE_UP}_bias"), r"1 missing \(model.layers.1.mlp.experts.gate_up_proj_bias\)"),
        (
            lambda t: t.update({f"{OF_GATE_UP}_scales": t[f"{OF_GATE_UP}_scales"][:, :-1].contiguous()}),
            r"gate_up_proj: part 'blocks' has shape \[4, 256, 2, 16\], wanted \[4, 255, 2, 16\] beside its other parts",
        ),
        (
            lambda t: t.update({f"{OF_GATE_UP}_blocks": t[f"{OF_GATE_UP}_blocks"].flatten(2)}),
            r"part 'blocks' has shape \[4, 256, 32\], wanted \[experts, outputs, inputs / 32, 16\]",
        ),
        (
            lambda t: t.update({f"{OF_GATE_UP}_scales": t[f"{OF_GATE_UP}_scales"].float()}),
            "has blocks of torch.uint8 and scales of torch.float32; MXFP4 has uint8 in both",
        ),
        (lambda t: t[f"{OF_GATE_UP}_scales"][3, 200].fill_(255), "gate_up_proj has a scale of 255, which is no number"),
        (
            lambda t: t.update({n: p[..., :1, :].contiguous() for n, p in t.items() if n == f"{OF_GATE_UP}_blocks"})
            or t.update({f"{OF_GATE_UP}_scales": t[f"{OF_GATE_UP}_scales"][..., :1].contiguous()}),
            r"gate_up_proj holds 4 weights of \[256, 32\], config.json says 4 of \[256, 64\]",
        ),
    ],
)  # fmt: skip
def test_parts_of_mxfp4_that_are_missing_or_do_not_fit_are_named(
    change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    quantised.save_gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidConfig, match=message):
        open_model(tmp_path)


def test_fp8_without_a_quantization_config_is_refused(tmp_path: Path) -> None:
    config, quantise, _ = CASES["fp8-tensor"]
    quantised.save(tmp_path, config, quantise)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": None}))
    with pytest.raises(InvalidConfig, match=r"0 missing, \d+ unexpected \(model.layers.0.mlp.gate_proj.input_scale"):
        open_model(tmp_path)


def test_files_that_are_cut_or_mixed_are_named(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(InvalidConfig, match=r"model.safetensors cannot be read: .* cut short"):
        open_model(tmp_path)
    file.write_bytes(whole)
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "model.mine.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidConfig, match=r"lacks model.mine.weight \(1 in all\), which .* says is there"):
        open_model(tmp_path)


def test_weights_of_another_shape_than_the_config_says_are_refused(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 96}))
    with pytest.raises(InvalidConfig, match=r"mlp.gate_proj.weight has shape \[72, 48\], its conf.* \[96, 48\]"):
        open_model(tmp_path)


def test_scales_are_part_of_a_models_identity(tmp_path: Path) -> None:
    config, quantise, _ = CASES["gptq-4-32"]
    quantised.save(tmp_path, config, quantise)
    before = model_identity(str(tmp_path), "none")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.scales"] *= 2
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert model_identity(str(tmp_path), "none") != before


def test_a_stored_weight_goes_to_a_device_some_rows_at_a_time(tmp_path: Path) -> None:
    """As on a GPU, whose products are PyTorch's."""
    config, quantise, _ = CASES["awq"]
    model = quantised.save(tmp_path, config, quantise)
    from replicas.checkpoints.checkpoint import open_checkpoint
    from replicas.layers.layer import loaded

    name = "model.layers.0.self_attn.{}_proj.weight"
    pieces = [open_checkpoint(tmp_path).weight(name.format(each)) for each in "qk"]
    wanted = torch.cat([model.get_parameter(name.format(each)) for each in "qk"]).bfloat16()
    assert torch.equal(loaded(pieces, torch.device("cpu"), torch.bfloat16), wanted)
    assert ColumnParallelLinear.takes_stored
