"""Converts a GGUF file of the Llama family for Transformers: tensors, config, tokenizer, chat template.

Owns:      the folder's files. Names and layouts are replicas/checkpoints/gguf_file.py's, which engines read files with.
Never:     downloads anything or knows where the result lies (tools/embedded_model.py).
Invariant: the tensors are exact dequantisations in fp32; query and key rows are in Hugging Face's rotate-half order.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from replicas.checkpoints.gguf_file import GgufCheckpoint, GgufFile

FloatArray = npt.NDArray[np.float32]

CONTROL_TOKEN = 3  # GGUF token type of special tokens


class GgufModel:
    """The tensors and metadata of one GGUF file."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self.num_tensors = len(self._file.tensors)

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
        return self._file.field(name)

    def _tensors(self, on_tensor: Callable[[], None]) -> dict[str, FloatArray]:
        checkpoint = GgufCheckpoint(self._file)
        tensors: dict[str, FloatArray] = {}
        for name in checkpoint.names:
            weight = checkpoint.weight(name)
            floats = weight.float() if isinstance(weight, Tensor) else weight.floats(0, weight.shape[0])
            tensors[name] = np.ascontiguousarray(floats.numpy())
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
