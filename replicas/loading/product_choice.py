"""Says how an engine's products are computed on this CPU: for the log, `/get_server_info` and `manta doctor`.

Never:     chooses a format or a kernel: layers/linear.py does, by the kind of CPU alone.
Thread:    any.
"""

import torch

from replicas.config import DType, EngineConfig, ModelConfig
from replicas.kernels import bf16, bf16_tiles
from replicas.kernels.bf16_tiles import WAYS, Way
from replicas.kernels.int8_tiles import cpu_has_vnni
from replicas.kernels.simd import instruction_set
from replicas.kernels.weight_formats import NUMBER_BYTES, WeightFormat


def describe_products(config: EngineConfig) -> tuple[bool, str]:
    """Tell whether ranks add their parts of a product in one order, and how products are computed, in words."""
    model = config.model
    if config.device != "cpu":
        how = f"PyTorch's, in {model.dtype} on {config.device}"
        if model.weight_number_bytes[0] == NUMBER_BYTES["fp8"]:
            how += "; by fp8 weights: of activations rounded to fp8 too, but by Triton, which rounds none, where a row "
            how += "has several scales or a size is no multiple of 16, in experts and without bfloat16"
        return False, how
    if model.quantization == "int8":
        how = "multiplied as bytes" if cpu_has_vnni() else "widened for fp32 arithmetic: this CPU has no VNNI"
        return True, f"own, int8 weights and activations, {how}"
    how = _arithmetic(model)
    if model.moe is not None:
        return True, f"{how}; in one order, since a last bit may choose another expert"
    if model.stored is not None and model.stored.products is not None and not config.rounds:
        return False, f"own, {model.stored.products} weights of the checkpoint in fp32 arithmetic"
    if model.implementation == "transformers" and model.weight_format == "float32" and not config.rounds:
        return False, "own, in the place of Transformers' Linears"
    order = f"; in one order, for K and V rounded to {config.kv_dtype}" if config.rounds else ""
    return config.rounds or _bf16_way(model) is not None, f"{how}{order}"


def default_told(dtype: DType) -> str | None:
    """Say why a model has ``dtype`` on this CPU where none is set; None: that goes without saying."""
    return "the checkpoint's, which this CPU multiplies" if dtype == "bfloat16" else None


def instructions_told() -> dict[str, str]:
    """Say by what this CPU multiplies weights of each format: lines of `manta doctor`."""
    way, widened = bf16_tiles.way(), "widened for fp32 arithmetic"
    how: dict[WeightFormat, str] = {
        "bfloat16": widened if way is None else f"by {WAYS[way]}",
        "int8": "as bytes, by VNNI" if cpu_has_vnni() else widened,
        "q4_1": widened,
    }
    told = {"float32": f"multiply-adds of {instruction_set()}", **{str(name): text for name, text in how.items()}}
    if way is not None and bf16.serves("q4_1", torch.bfloat16):
        told["q4_1 in bfloat16"] = f"by {WAYS[way]}"
    return told


def _bf16_way(model: ModelConfig) -> Way | None:
    """Tell how products multiply bf16, if activations are rounded to it."""
    return bf16_tiles.way() if bf16.serves(model.weight_format, getattr(torch, model.dtype)) else None


def _arithmetic(model: ModelConfig) -> str:
    """Say what our products by weights in the model's format compute."""
    by, stored = _bf16_way(model), model.stored
    kept = "" if stored is None or stored.experts is None else f", experts' {stored.experts} weights in fp32 arithmetic"
    if by is None:
        return f"own, {model.weight_format} weights in fp32 arithmetic{kept}"
    of = "bfloat16 weights and" if model.weight_format == "bfloat16" else f"{model.weight_format} weights and bfloat16"
    how = f"own, {of} activations by {WAYS[by]}, summed in fp32"
    if kept:
        return how + kept
    widened = model.moe is not None and not bf16.serves(model.weight_format, torch.bfloat16, grouped=True)
    return f"{how}, experts' widened" if widened else how
