"""Runs a tiny random model of every causal architecture that Transformers has; writes docs/models.md of what came out.

    python -m tools.models_table               all of them, 10 minutes on a core; writes docs/models.md
    python -m tools.models_table gemma2 phi3   these alone, to the terminal

A model runs if, packed with others and in chunks, its logits are Transformers' own within 1e-3 of their range and its
greedy ids are equal. What runs natively is run so. What is refused says why in the words that a user gets.
"""

import argparse
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from replicas.errors import InvalidConfig, UnsupportedModel
from replicas.runner.model_files import load_model_config

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
VOCAB = 200
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "sliding_window": 9, "attention_chunk_size": 8, "num_local_experts": 4, "num_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "is_decoder": True,
}  # fmt: skip
# what a type needs beside, or instead (None: the type's own default)
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "falcon": {"head_dim": None},
}
PROMPTS = ([*range(3, 26)], [7], [90, 4, 4, 61, 100, 5, 33, 12, 9])
NUM_NEW = 12
MOST_NUMBERS = 20_000_000  # of weights


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return a config of ``model_type`` that fits into a megabyte or two, where the type's config can say so."""
    names = {**SHAPE, **SPECIAL.get(model_type, {}), **changes}
    known = AutoConfig.for_model(model_type)
    sizes = {key: value for key, value in names.items() if value is not None and _has(known, key)}
    return AutoConfig.for_model(model_type, **sizes)


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
class Row:
    """What came out for one model type."""

    model_type: str
    name: str  # of the class
    how: str  # natively, through Transformers, refused, WRONG
    why: str = ""


def try_out(model_type: str) -> Row:
    """Make a tiny model of ``model_type`` and run it, or find out why it is refused."""
    from tests.numerics.paged import open_model

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            config = tiny_config(model_type)
            try:
                model = make(config, path)
            except Exception as error:  # noqa: BLE001 - of a model that cannot be made at all: its config may be judged
                config.architectures = [name]
                config.save_pretrained(path)
                load_model_config(str(path))
                return Row(model_type, name, "WRONG", f"not made: {type(error).__name__}: {error}")
            made = open_model(path), open_model(path)
        except UnsupportedModel as refused:
            return Row(model_type, name, "refused", str(refused).rpartition("through Transformers: ")[2])
        except InvalidConfig as refused:
            return Row(model_type, name, "WRONG", str(refused))
        wanted = [reference(model, prompt, NUM_NEW) for prompt in PROMPTS]
        ours = made[0].prefill(PROMPTS, chunk=5)
        errors = [
            ((a - b).abs().max() / (b.max() - b.min())).item() for a, (b, _) in zip(ours, wanted, strict=True)
        ]
        same = made[1].greedy(PROMPTS, NUM_NEW) == [ids for _, ids in wanted]
        how = "natively" if made[0].model.config.implementation == "manta" else "through Transformers"
        if max(errors) > 1e-3 or not same:
            return Row(model_type, name, "WRONG", f"{how}: logits differ by {max(errors):.1e} of their range")
        return Row(model_type, name, how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; none: all")
    options = parser.parse_args()
    logging.set_verbosity(50)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = []
    for model_type in options.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        started_s = time.monotonic()
        try:
            row = try_out(model_type)
        except Exception as error:  # noqa: BLE001 - the table says it; there should be none
            if options.types:
                traceback.print_exc()
            row = Row(model_type, "", "TRACEBACK", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        print(f"{row.model_type:24s} {row.how:22s} {time.monotonic() - started_s:5.1f} s  {row.why}", flush=True)
        rows.append(row)
    print(Counter(row.how for row in rows))


if __name__ == "__main__":
    main()
