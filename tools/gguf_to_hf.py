"""Converts a GGUF file of the Llama family for Transformers: tensors, config, tokenizer, chat template.

Owns:      the mapping of names and layouts between llama.cpp and Hugging Face.
Never:     downloads anything or knows where the result lies (tools/embedded_model.py).
Invariant: the tensors are exact dequantisations in fp32; query and key rows are in Hugging Face's rotate-half order.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FloatArray = npt.NDArray[np.float32]

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # GGUF token type of special tokens


def hf_name(name: str) -> str:
    """Map ``blk.7.attn_q.weight`` to ``model.layers.7.self_attn.q_proj.weight``."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def rotate_half_rows(weight: FloatArray, *, num_heads: int) -> FloatArray:
    """Undo llama.cpp's order of rotary rows: it interleaves the two halves of each head, Hugging Face keeps them apart.

    Args:    weight: [num_heads * D, hidden], row 2 i + j of a head is row j * D / 2 + i of ours.
    Source:  ``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py does the opposite.
    """
    rows, hidden = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


class GgufModel:
    """The tensors and metadata of one GGUF file."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(str(path))
        self.num_tensors = len(self._reader.tensors)

    def write(self, folder: Path, *, on_tensor: Callable[[], None]) -> None:
        """Write the whole Hugging Face folder; ``on_tensor`` is called after each tensor."""
        tensors = self._tensors(on_tensor)
        weights = folder / "model.safetensors"
        save_file(tensors, str(weights), metadata={"format": "pt"})
        weights.chmod(0o644)  # safetensors makes it readable by its owner only
        _write_json(folder / "config.json", self._config(tied="lm_head.weight" not in tensors))
        _write_json(folder / "generation_config.json", self._special_ids())
        self._tokenizer().save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", self._tokenizer_config())
        (folder / "chat_template.jinja").write_text(self._field("tokenizer.chat_template"), encoding="utf-8")

    def _field(self, name: str) -> Any:
        field = self._reader.get_field(name)
        if field is None:
            raise ValueError(f"the GGUF file has no field {name!r}; is it a file of the Llama family?")
        return field.contents()

    def _tensors(self, on_tensor: Callable[[], None]) -> dict[str, FloatArray]:
        num_heads = self._field("llama.attention.head_count")
        num_kv_heads = self._field("llama.attention.head_count_kv")
        heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
        tensors: dict[str, FloatArray] = {}
        for tensor in self._reader.tensors:
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            weight = weight.reshape([int(n) for n in reversed(tensor.shape)])  # GGUF lists the fastest dimension first
            part = tensor.name.split(".")[-2]
            if part in heads:
                weight = rotate_half_rows(weight, num_heads=heads[part])
            tensors[hf_name(tensor.name)] = np.ascontiguousarray(weight)
            on_tensor()
        return tensors

    def _special_ids(self) -> dict[str, int]:
        return {
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._field("tokenizer.ggml.padding_token_id"),
        }

    def _config(self, *, tied: bool) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self._field("llama.embedding_length"),
            "intermediate_size": self._field("llama.feed_forward_length"),
            "num_hidden_layers": self._field("llama.block_count"),
            "num_attention_heads": self._field("llama.attention.head_count"),
            "num_key_value_heads": self._field("llama.attention.head_count_kv"),
            "head_dim": self._field("llama.rope.dimension_count"),
            "max_position_embeddings": self._field("llama.context_length"),
            "vocab_size": self._field("llama.vocab_size"),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            # GGUF holds these two in fp32: 1e-5 reads back as 9.9999997e-06
            "rms_norm_eps": float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": float(f"{self._field('llama.rope.freq_base'):.6g}"),
            "tie_word_embeddings": tied,
            "torch_dtype": "float32",
            **self._special_ids(),
        }

    def _tokenizer(self) -> Tokenizer:
        """Make GPT-2's byte-level BPE, digits split singly (GGUF's pre-tokenizer ``smollm``)."""
        kind = (self._field("tokenizer.ggml.model"), self._field("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"tokenizer {kind} is not known here; only ('gpt2', 'smollm') is")
        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        vocab = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types: list[int] = self._field("tokenizer.ggml.token_type")
        special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
        return tokenizer

    def _tokenizer_config(self) -> dict[str, Any]:
        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        ids = {**self._special_ids(), "unk_token_id": self._field("tokenizer.ggml.unknown_token_id")}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._field("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            **{name.removesuffix("_id"): tokens[i] for name, i in ids.items()},
        }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
