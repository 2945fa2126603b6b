"""Writes quantised checkpoints of tiny models, each as its library documents it, beside one of what they stand for.

Packers are written the slow way round from the readers': number by number, in plain NumPy.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.numerics import tiny

Array = npt.NDArray[Any]
Made = tuple[dict[str, Tensor], Tensor]  # the parts of a weight, and the weight they stand for
SHAPE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128, "num_hidden_layers": 2}  # 128 inputs of o, down
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
IGNORED = "down_proj"  # stays as it is, where a method has a list of such


def save(folder: Path, config: Mapping[str, Any], quantise: Callable[[Tensor], Made], **shape: Any) -> PreTrainedModel:
    """Saves a quantised Llama into ``folder``. Returns: Transformers' model of what its weights stand for, in fp32."""
    model = tiny.save("llama", folder, **{**SHAPE, **shape})
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2 or "embed" in name or "lm_head" in name or IGNORED in name:
                parameter.copy_(parameter.half())
                tensors[name] = parameter.half()
                continue
            parts, stands_for = quantise(parameter.detach())
            parameter.copy_(stands_for)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": dict(config)}))
    return model


def words(numbers: Array, bits: int, axis: int, order: list[int] | None = None) -> Tensor:
    """Packs unsigned numbers into int32 along an axis, number by number."""
    moved, pack = np.moveaxis(numbers.astype(np.uint64), axis, 0), 32 // bits
    out = np.zeros((-(-len(moved) // pack), *moved.shape[1:]), np.uint64)
    for i in range(len(out)):
        for j in range(pack):
            at = i * pack + (j if order is None else order[j])
            if at < len(moved):
                out[i] |= moved[at] << np.uint64(j * bits)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(out, 0, axis)).astype(np.uint32).view(np.int32))


def rounded(weight: Array, group_of: Array, bits: int, sym: bool) -> tuple[Array, Array, Array]:
    """Rounds [N, K] by groups of inputs: unsigned numbers [N, K], scales [N, G] fp16, zeros [N, G]."""
    most, num_groups = (1 << bits) - 1, int(group_of.max()) + 1
    scales, zeros = (np.zeros((len(weight), num_groups), np.float32) for _ in range(2))
    for group in range(num_groups):
        part = weight[:, group_of == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if sym:
            high = np.maximum(-low, high)
            low = -high
        scales[:, group] = ((high - low) / most).astype(np.float16)
        zeros[:, group] = (most + 1) // 2 if sym else np.clip(np.rint(-low / scales[:, group]), 1, most)
    numbers = np.clip(np.rint(weight / scales[:, group_of] + zeros[:, group_of]), 0, most)
    return numbers, scales.astype(np.float16), zeros


def stands_for(numbers: Array, scales: Array, zeros: Array, group_of: Array) -> Tensor:
    """(number - zero) * scale, in fp32."""
    return torch.from_numpy((numbers - zeros[:, group_of]).astype(np.float32) * scales.astype(np.float32)[:, group_of])


def gptq(bits: int, group: int, *, sym: bool, act_order: bool, version: str) -> Callable[[Tensor], Made]:
    def quantise(weight: Tensor) -> Made:
        k = weight.shape[1]
        group_of = np.arange(k) // (k if group < 0 else group)
        if act_order:
            group_of = np.random.default_rng(1).permutation(group_of)
        numbers, scales, zeros = rounded(weight.numpy(), group_of, bits, sym)
        parts = {
            "qweight": words(numbers.T, bits, 0),
            "qzeros": words(zeros.T - (1 if version == "gptq" else 0), bits, 1),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
        return parts, stands_for(numbers, scales, zeros, group_of)

    return quantise


def awq(group: int) -> Callable[[Tensor], Made]:
    def quantise(weight: Tensor) -> Made:
        group_of = np.arange(weight.shape[1]) // group
        numbers, scales, zeros = rounded(weight.numpy(), group_of, 4, sym=False)
        parts = {
            "qweight": words(numbers.T, 4, 1, AWQ_ORDER),
            "qzeros": words(zeros.T, 4, 1, AWQ_ORDER),
            "scales": torch.from_numpy(scales.T.copy()),
        }
        return parts, stands_for(numbers, scales, zeros, group_of)

    return quantise


def packed(
    bits: int, group: int, *, sym: bool, act_order: bool = False, unset_order: bool = False
) -> Callable[[Tensor], Made]:
    """compressed-tensors' pack-quantized; its older files had an order of -1 where there was none."""

    def quantise(weight: Tensor) -> Made:
        k = weight.shape[1]
        group_of = np.arange(k) // (k if group < 0 else group)
        if act_order:
            group_of = np.random.default_rng(2).permutation(group_of)
        numbers, scales, zeros = rounded(weight.numpy(), group_of, bits, sym)
        scales = torch.from_numpy(scales).bfloat16().float().numpy()  # as such checkpoints mostly have them
        parts = {
            "weight_packed": words(numbers, bits, 1),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not sym:
            parts["weight_zero_point"] = words(zeros, bits, 0)
        if act_order:
            parts["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        if unset_order:
            parts["weight_g_idx"] = torch.full((k,), -1, dtype=torch.int32)
        return parts, stands_for(numbers, scales, zeros, group_of)

    return quantise


def int8_rows(weight: Tensor) -> Made:
    """compressed-tensors' int-quantized, a scale a row."""
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    numbers = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales.float()


def fp8_tensor(weight: Tensor) -> Made:
    scale = weight.abs().max() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    parts = {"weight": numbers, "weight_scale": scale.reshape(1), "input_scale": torch.ones(1)}
    return parts, numbers.float() * scale


def fp8_rows(weight: Tensor) -> Made:
    scale = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def fp8_blocks(high: int, wide: int) -> Callable[[Tensor], Made]:
    """As DeepSeek-V3 has it: ``weight_scale_inv`` is what a block's numbers are multiplied by."""

    def quantise(weight: Tensor) -> Made:
        n, k = weight.shape
        scales = torch.zeros(-(-n // high), -(-k // wide))
        spread = torch.zeros_like(weight)
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                block = (slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide))
                scales[i, j] = weight[block].abs().max() / 448
                spread[block] = scales[i, j]
        numbers = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale_inv": scales}, numbers.float() * spread

    return quantise


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # and the same below zero, from number 8 on
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds [E, N, K] by blocks of 32 inputs: blocks [E, N, K / 32, 16] and scales [E, N, K / 32], both uint8."""
    parts = weight.numpy().reshape(*weight.shape[:2], -1, 32)
    exponents = np.floor(np.log2(np.abs(parts).max(-1))) - 2
    steps = parts / np.exp2(exponents)[..., None]
    numbers = np.abs(np.abs(steps)[..., None] - np.array(E2M1)).argmin(-1) + 8 * (steps < 0)
    blocks = numbers[..., ::2] | numbers[..., 1::2] << 4
    made = (np.ascontiguousarray(each, np.uint8) for each in (blocks, exponents + 127))
    first, second = (torch.from_numpy(each) for each in made)
    return first, second


def save_gpt_oss(folder: Path, **shape: Any) -> PreTrainedModel:
    """Saves a gpt-oss as OpenAI published it: experts in MXFP4, others in bf16. Returns: Transformers' model of what
    its weights stand for by Transformers' own dequantisation, in fp32."""
    model = tiny.save("gpt-oss", folder, **{"hidden_size": 64, "intermediate_size": 128, **shape})
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("gate_up_proj", "down_proj")):
                parameter.copy_(parameter.bfloat16())
                tensors[name] = parameter.bfloat16()
                continue
            blocks, scales = mxfp4(parameter.detach().transpose(1, 2))
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    said = {**json.loads(file.read_text()), "dtype": "bfloat16", "quantization_config": MXFP4}
    file.write_text(json.dumps(said))
    return model
