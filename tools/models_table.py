"""Writes the tables of docs/models.md and docs/architectures.md: what this code says of models that many ask for by
name, from their config.json (products.json), and of every causal architecture that Transformers has.

    python -m tools.models_table

Each type's tiny config is opened as a user's folder would be; what is refused says why in the words that a user gets.
That those which run give Transformers' answers is tested, all of them by `make test-all`
(tests/numerics/test_transformers_models.py).
"""

import contextlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from deployments.replica.feasible import most_pool_tokens
from replicas.config import CacheConfig, Hardware, ModelConfig
from replicas.errors import InvalidConfig, UnsupportedModel
from replicas.loading.model_files import load_model_config
from replicas.memory.sizing import kv_bytes, weight_bytes
from replicas.models.outline import ADVICE
from replicas.resolve import resolve

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
PRODUCTS_PAGE = PAGE.with_name("models.md")
VOCAB = 200
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "sliding_window": 9, "attention_chunk_size": 8, "num_local_experts": 4, "num_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_topk": 8, "index_n_heads": 32, "index_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "is_decoder": True, "decoder_layers": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
}  # fmt: skip
# what a type needs beside, or instead (None: the type's own default)
HALVES = ["sliding_attention", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 1e4}
LINEAR_THIRD = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
QWEN4 = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}  # fmt: skip
SLIDING = {  # of layers that differ in heads
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 16, "head_dim": 24,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
DOTS = {
    "layer_types": ["indexed_attention", "sliding_attention"] * 2, "per_layer_config": {1: SLIDING, 3: SLIDING},
    **SLIDING, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
    "shared_experts_intermediate_size": 32,
}  # fmt: skip
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {"layer_types": LINEAR_THIRD},
    "bamba": {**MAMBA2, "attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"layer_types": HALVES, "rope_parameters": dict.fromkeys(set(HALVES), ROPE)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": DOTS,
    "falcon": {"head_dim": None},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 128},
    "gemma3n_text": {"layer_types": HALVES, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB},
    "gemma4_text": {"layer_types": HALVES, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 9},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {**MAMBA2, "layer_types": LINEAR_THIRD},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": LINEAR_THIRD, "linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0] * 2},
    "longcat_flash": {
        "qk_rope_head_dim": 64,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 96,
    },
    "reformer": {"axial_pos_embds_dim": (32, 32), "axial_pos_shape": (16, 16)},
    "xmod": {"default_language": "en_XX"},
    "mamba2": {"num_heads": 8, "state_size": 16, "chunk_size": 8, "n_groups": 2},
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "chunk_size": 8, "n_groups": 2,
    },
    "xlstm": {"v_head_dim": None},
    "xlnet": {"max_position_embeddings": None, "d_head": 16},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "chunk_size": 8},
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp": QWEN4,
    "qwen4_exp_text": QWEN4,
    "plbart": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "prophetnet": {"num_hidden_layers": None, "num_decoder_layers": 2, "num_encoder_layers": 2},
    "whisper": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
}
OTHER_PART: dict[str, Any] = {  # of a model that sees or hears as well
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "vision_output_dim": 32, "num_global_layers": 1, "attention_heads": 2, "depth": 1, "embed_dim": 32,
    "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip
ROW = re.compile(r"^\| `([^`]+)` \| (\S+) \| (natively|through Transformers|refused) \| ?(.*?) \|$", re.M)
PRODUCTS = re.compile(r"(?<=<!-- products -->\n).*?(?=<!-- end products -->)", re.S)
PRODUCT_HEAD = "| model | runs | CPU, GiB | GPU, GiB | decode, tokens/s | command |\n|---|---|---|---|---|---|\n"
SERVED_TOKENS = 8192  # of K and V, in the memory that a row gives
COMFORTABLE_GIB, CARD_GIB = 8, 72  # up to which a row's command is for a CPU; of a GPU of 80 GB
COUNTED = re.compile(r"^The causal architectures of Transformers (.*?)\n\n", re.M | re.S)  # the sentences with numbers


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return a config of ``model_type`` that fits into a megabyte or two, where the type's config can say so."""
    known, names = AutoConfig.for_model(model_type), {**SHAPE, **SPECIAL.get(model_type, {}), **changes}
    parts: dict[str, Any] = {
        name: _sizes(getattr(known, name), names if name == "text_config" else OTHER_PART)
        for name in known.sub_configs
        if getattr(known, name, None) is not None
    }
    try:
        return AutoConfig.for_model(model_type, **{**parts, **_sizes(known, names)})
    except ValueError:  # a part whose sizes hang together
        return AutoConfig.for_model(model_type, **_sizes(known, names))


def _sizes(known: PreTrainedConfig, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``names`` that a config like ``known`` has."""
    by_layer = "per_layer_config" in names
    sizes = {key: value for key, value in names.items() if value is not None and _has(known, key, by_layer=by_layer)}
    if "kv_lora_rank" in sizes:  # latent attention: as many KV heads as heads, and the rotated part is what is turned
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes.pop("head_dim", None)
    return sizes


def _has(config: PreTrainedConfig, key: str, *, by_layer: bool) -> bool:
    """``by_layer``: whether that counts which the config has for each layer alone."""
    try:
        return hasattr(config, key)
    except Exception:  # noqa: BLE001 - it has the value for each layer alone
        return by_layer


@dataclass(frozen=True)
class ModelType:
    """What this code says of one model type."""

    model_type: str
    name: str  # of the class
    how: str  # natively, through Transformers, refused
    why: str = ""


def judge(model_type: str, folder: Path) -> ModelType:
    """Say what becomes of a model of ``model_type`` before its weights are looked for; writes its config.json."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    try:
        config = tiny_config(model_type)
    except StrictDataclassError as error:
        said = f"Transformers refuses the config that it makes for it: {' '.join(str(error).split())}"
        return ModelType(model_type, name, "refused", said)
    with contextlib.suppress(Exception), torch.device("meta"):  # as its model saves it: without its encoder
        config = AutoModelForCausalLM.from_config(config).config
    config.architectures = [name]
    config.save_pretrained(folder)
    try:
        found = load_model_config(str(folder))
    except UnsupportedModel as refused:
        why = str(refused).rpartition("through Transformers: ")[2].removesuffix(ADVICE)
        return ModelType(model_type, name, "refused", why)
    return ModelType(model_type, name, "natively" if found.implementation == "manta" else "through Transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A published checkpoint: the keys of its config.json that say something, and how many numbers its weights are."""

    hub_id: str
    name: str
    parameters: int
    measured: str  # tokens/s
    config: Mapping[str, Any]


def products() -> list[Product]:
    """Read products.json."""
    read = json.loads(Path(__file__).with_name("products.json").read_text())
    return [Product(hub_id=hub_id, **said) for hub_id, said in read.items()]


def product_row(product: Product, folder: Path) -> str:
    """Write the row of ``product``, by the formulas of `manta check`; writes its config.json into ``folder``."""
    (folder / "config.json").write_text(json.dumps(product.config))
    try:
        on_gpu = load_model_config(str(folder), device="cuda", dtype="bfloat16")
    except InvalidConfig as refused:
        why = str(refused).removeprefix(f"model: {folder} ").partition(";")[0]
        return f"| {product.name} | refused: its checkpoint {why} | - | - | - | - |\n"
    native = on_gpu.implementation == "manta"
    flag = "--quantization int4" if native else "--dtype bfloat16"  # Transformers' modules: more than check counts on
    on_cpu = load_model_config(
        str(folder), device="cpu", quantization="int4" if native else "none", dtype=None if native else "bfloat16"
    )
    cpu_gib = next(gib for gib in range(1, 1000) if _fits_a_cpu(on_cpu, gib))
    cell = on_gpu.kv_cell_bytes(tp=1, kv_dtype="bfloat16")
    gpu_gib = next(gib for gib in range(1, 1000) if _left(weight_bytes(on_gpu, 1), gib) >= cell * SERVED_TOKENS)
    tp = next((ranks for ranks in on_gpu.tp_sizes() if gpu_gib / ranks <= CARD_GIB), 1)
    if cpu_gib <= COMFORTABLE_GIB:
        flags = f"{flag} --ctx {SERVED_TOKENS} --memory {cpu_gib}GiB"
    else:
        flags = f"--gpus 1{f' --tp {tp}' if tp > 1 else ''}"
    how = "natively" if native else "through Transformers"
    cells = (product.name, how, f"{cpu_gib}", f"{gpu_gib}", product.measured, f"`manta serve {product.hub_id} {flags}`")
    return f"| {' | '.join(cells)} |\n"


def _fits_a_cpu(model: ModelConfig, gib: int) -> bool:
    """Tell whether a replica on a CPU that may take ``gib`` has a pool of SERVED_TOKENS."""
    hardware = Hardware(device="cpu", num_cpus=1, available_memory_bytes=1 << 62)
    engine = resolve(model, hardware, cache=CacheConfig(device_memory_bytes=gib << 30))
    with contextlib.suppress(InvalidConfig):
        return (most_pool_tokens(engine) or 0) >= SERVED_TOKENS
    return False


def _left(weights: int, gib: int) -> int:
    with contextlib.suppress(InvalidConfig):
        return kv_bytes(gib << 30, weights, CacheConfig().mem_fraction_static)
    return 0


def written() -> list[ModelType]:
    """Read the rows of docs/architectures.md."""
    return [ModelType(*found) for found in ROW.findall(PAGE.read_text())]


def page(rows: Sequence[ModelType]) -> str:
    """Return docs/architectures.md with these rows and their numbers."""
    counts = Counter(row.how for row in rows)
    native, through, refused = (counts[how] for how in ("natively", "through Transformers", "refused"))
    runs = native + through
    numbers = (
        f"The causal architectures of Transformers {transformers.__version__}: {len(rows)}. Of them {runs} run "
        f"({runs / len(rows):.0%}): {native} natively,\n{through} through Transformers; {refused} are refused.\n\n"
    )
    head, table, _ = PAGE.read_text().partition("| `model_type` | class | runs | why not |\n|---|---|---|---|\n")
    lines = (f"| `{row.model_type}` | {row.name} | {row.how} | {row.why.replace('|', '/')} |\n" for row in rows)
    return COUNTED.sub(lambda _: numbers, head) + table + "".join(lines)


def main() -> None:
    logging.set_verbosity(50)
    rows = []
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(judge(model_type, Path(folder)))
        print(f"{model_type:24s} {rows[-1].how:22s} {rows[-1].why}", flush=True)
    PAGE.write_text(page(rows))
    write_products()


def write_products() -> None:
    """Write the first table of docs/models.md anew."""
    with tempfile.TemporaryDirectory() as folder:
        rows = "".join(product_row(product, Path(folder)) for product in products())
    PRODUCTS_PAGE.write_text(PRODUCTS.sub(lambda _: PRODUCT_HEAD + rows, PRODUCTS_PAGE.read_text()))


if __name__ == "__main__":
    main()
