"""Small tokenizers of both families, made on the spot, as folders that Transformers loads."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}"
    "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if mood is defined %}({{ mood }}){% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<|start|>", "<|end|>"]


def byte_level_folder(path: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> str:
    """Byte-level BPE: specials 0 and 1, the 256 bytes, merges of a little text, and an added token with a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the theme of the thesis, then the end 你好你好 你好 🙂🙂"], trainer)
    tokenizer.add_tokens([AddedToken("über tool", special=False)])
    return _save(tokenizer, path, chat_template=chat_template)


def byte_fallback_folder(path: Path) -> str:
    """SentencePiece style, as Llama 2: U+2581 for a space, a byte token for what the vocabulary lacks."""
    words = ["<unk>", "<|start|>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = "abcdefghijklmnopqrstuvwxyz.,▁"
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("e", "n"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate([*words, *letters, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(tokenizer, path, chat_template=None)


def _save(tokenizer: Tokenizer, path: Path, *, chat_template: str | None) -> str:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "model_max_length": 512}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template)
    return str(path)
