"""Runs a tiny random model of every causal architecture that Transformers has; writes docs/models.md of what came out.

    python -m tools.models_table               all of them, 10 minutes on a core; writes docs/models.md
    python -m tools.models_table gemma2 phi3   these alone; their rows are written anew

A model runs if, packed with others and in chunks, its logits are Transformers' own within 1e-3 of their range and its
greedy ids are equal. What runs natively is run so. What is refused says why in the words that a user gets.
"""

import argparse
import contextlib
import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from replicas.errors import UnsupportedModel
from replicas.runner.model_files import load_model_config

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
VOCAB = 200
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "sliding_window": 9, "attention_chunk_size": 8, "num_local_experts": 4, "num_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "is_decoder": True, "decoder_layers": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
}  # fmt: skip
# what a type needs beside, or instead (None: the type's own default)
HALVES = ["sliding_attention", "full_attention"] * 2
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"layer_types": HALVES},
    "dots1": {"n_shared_experts": 1},
    "falcon": {"head_dim": None},
    "gemma3n_text": {"layer_types": HALVES, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB},
    "gemma4_text": {"layer_types": HALVES, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 9},
    "gptj": {"rotary_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0] * 2},
    "mamba2": {"num_heads": 8},
    "xlstm": {"v_head_dim": None},
    "xlnet": {"max_position_embeddings": None, "d_head": 16},
    "zamba2": {"num_hidden_layers": None},
    "zaya": {"num_experts_per_tok": 1},
    "plbart": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "prophetnet": {"num_hidden_layers": None, "num_decoder_layers": 2, "num_encoder_layers": 2},
    "whisper": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
}
HEADER = """# Models

`model.path` takes a folder or hub id of any of these. `model.implementation` says whose code runs it: `manta` is a
file of `replicas/models/`, fused and the fastest here; `transformers` is the module of the Transformers library, with
this engine's attention, paged pool and packed batch, so that caching, chunking, hand-offs and tiers are the same;
`auto`, the default, takes the first where there is one. A model that cannot be served is refused with its reason
before its weights are read.

What a layer's attention does (scale, sliding window, chunks, soft cap, sinks) and the heads are not looked up by
family: the module is made without weights, run once, and tells it (`replicas/models/outline.py`). Of a wrapper that
also sees or hears, its text part is served. Code that comes with a checkpoint (`auto_map`) never runs. Over ranks
(`parallel.tp`) a model is split by its own plan in Transformers, where it has one that leaves no attention whole;
else one rank. Rotary frequencies that Transformers changes with the longest text of a batch are set for
`model.context_len`. On a CPU, weights of Linears lie in our panels and their products are ours; on a GPU this path
has not been run.

The causal architectures of Transformers {version}: {total}. Of them {runs} run ({share:.0%}): {native} natively,
{through} through Transformers; {refused} are refused. Each row was made by running a tiny random model of the type,
packed and in chunks: logits within 1e-3 of their range of Transformers' own, and equal greedy ids (`python -m
tools.models_table`). Encoders such as BERT run where config.json says `is_decoder: true`, as the rows here do.
"""
OTHER_PART: dict[str, Any] = {  # of a model that sees or hears as well
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "vision_output_dim": 32, "num_global_layers": 1, "attention_heads": 2, "depth": 1, "embed_dim": 32,
    "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip
PROMPTS = ([*range(3, 26)], [7], [90, 4, 4, 61, 100, 5, 33, 12, 9])
NUM_NEW = 12
WRONG = "WRONG"
ROW = re.compile(r"^\| `([^`]+)` \| (\S+) \| (natively|through Transformers|refused|WRONG) \| ?(.*?) \|$", re.M)
MOST_NUMBERS = 20_000_000  # of weights


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return a config of ``model_type`` that fits into a megabyte or two, where the type's config can say so."""
    known, names = AutoConfig.for_model(model_type), {**SHAPE, **SPECIAL.get(model_type, {}), **changes}
    parts: dict[str, Any] = {
        name: _sizes(getattr(known, name), names if name == "text_config" else OTHER_PART)
        for name in known.sub_configs
        if getattr(known, name, None) is not None
    }
    try:
        return AutoConfig.for_model(model_type, **parts, **_sizes(known, names))
    except ValueError:  # a part whose sizes hang together
        return AutoConfig.for_model(model_type, **_sizes(known, names))


def _sizes(known: PreTrainedConfig, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``names`` that a config like ``known`` has."""
    sizes = {key: value for key, value in names.items() if value is not None and _has(known, key)}
    if "kv_lora_rank" in sizes:  # latent attention: as many KV heads as heads, and the rotated part is what is turned
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes.pop("head_dim", None)
    return sizes


def _has(config: PreTrainedConfig, key: str) -> bool:
    try:
        return hasattr(config, key)
    except Exception:  # noqa: BLE001 - a config that has the value for each layer alone
        return False


def make(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """Make a random model, biases and norms too, and save it into ``folder``."""
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_NUMBERS:
        raise ValueError(f"{size / 1e6:.0f} million weights: its tiny config is not tiny")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name and parameter.dim() == 1 else 0.0, 0.2)
    model = model.float().eval()
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> tuple[torch.Tensor, list[int]]:
    """Return Transformers' logits [L, V] of the prompt and its next greedy ids, each from the whole text, uncached."""
    ids, first = list(prompt), None
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
        first = logits if first is None else first
        ids.append(int(logits[-1].argmax()))
    assert first is not None
    return first, ids[len(prompt) :]


@dataclass(frozen=True)
class ModelType:
    """What came out for one model type."""

    model_type: str
    name: str  # of the class
    how: str  # natively, through Transformers, refused, WRONG
    why: str = ""


def judge(model_type: str, folder: Path, config: PreTrainedConfig | None = None) -> ModelType:
    """Say what becomes of a model of ``model_type`` before its weights are looked for; writes its config.json."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    if config is None:
        config = tiny_config(model_type)
        with contextlib.suppress(Exception), torch.device("meta"):  # as its model saves it: without its encoder
            config = AutoModelForCausalLM.from_config(config).config
        config.architectures = [name]
        config.save_pretrained(folder)
    try:
        found = load_model_config(str(folder))
    except UnsupportedModel as refused:
        return ModelType(model_type, name, "refused", str(refused).rpartition("through Transformers: ")[2])
    return ModelType(model_type, name, "natively" if found.implementation == "manta" else "through Transformers")


def try_out(model_type: str) -> ModelType:
    """Make a tiny model of ``model_type`` and run it, or find out why it is refused."""
    from tests.numerics.paged import open_model

    try:
        AutoConfig.for_model(model_type)
    except StrictDataclassError as error:
        said = f"Transformers refuses its own default config: {' '.join(str(error).split())}"
        return ModelType(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type], "refused", said)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            config = tiny_config(model_type)
            model = make(config, path)
        except (ImportError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):
            return judge(model_type, path)  # what cannot be made is refused too, or the row is wrong
        row = judge(model_type, path, config)
        if row.how == "refused":
            return row
        model = type(model).from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
        wanted = [reference(model, prompt, NUM_NEW) for prompt in PROMPTS]
        first, second = open_model(path), open_model(path)
        errors = [
            ((a - b).abs().max() / (b.max() - b.min())).item()
            for a, (b, _) in zip(first.prefill(PROMPTS, chunk=5), wanted, strict=True)
        ]
        if max(errors) > 1e-3 or second.greedy(PROMPTS, NUM_NEW) != [ids for _, ids in wanted]:
            return ModelType(model_type, row.name, WRONG, f"{row.how}: {max(errors):.1e} of the logits' range off")
        return row


def written() -> list[ModelType]:
    """Read the rows of docs/models.md."""
    return [ModelType(*found) for found in ROW.findall(PAGE.read_text())]


def page(rows: Sequence[ModelType]) -> str:
    """Write docs/models.md."""
    counts = Counter(row.how for row in rows)
    runs = counts["natively"] + counts["through Transformers"]
    lines = [
        HEADER.format(
            version=transformers.__version__, total=len(rows), runs=runs, share=runs / len(rows),
            native=counts["natively"], through=counts["through Transformers"], refused=counts["refused"],
        ),
        "| `model_type` | class | runs | why not |",
        "|---|---|---|---|",
        *(f"| `{row.model_type}` | {row.name} | {row.how} | {row.why.replace('|', '/')} |" for row in rows),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types whose rows are written anew; none: all")
    options = parser.parse_args()
    logging.set_verbosity(50)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = {} if not options.types else {row.model_type: row for row in written()}
    for model_type in options.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        started_s = time.monotonic()
        try:
            row = try_out(model_type)
        except Exception as error:  # noqa: BLE001 - the table says it; there should be none
            if options.types:
                traceback.print_exc()
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            row = ModelType(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type], WRONG, said)
        print(f"{row.model_type:24s} {row.how:22s} {time.monotonic() - started_s:5.1f} s  {row.why}", flush=True)
        rows[model_type] = row
    print(Counter(row.how for row in rows.values()))
    PAGE.write_text(page([row for _, row in sorted(rows.items())]))


if __name__ == "__main__":
    main()
