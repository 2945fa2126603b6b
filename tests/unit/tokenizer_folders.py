"""Small tokenizers of both families, made on the spot, as folders that Transformers loads."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}"
    "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if mood is defined %}({{ mood }}){% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<|start|>", "<|end|>"]
TEXT = [
    "the theme of the thesis, then the end 你好你好 你好 🙂🙂 a user's reply: I'll see; tokens and turns, 3.14 > 2"
] * 2

# what a turn of Qwen's chats looks like: trimmed questions, thoughts of earlier answers left out, tools in the history
QWEN_TEMPLATE = """
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}{% if not thinking %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
LLAMA_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim }}
    {%- if mood is defined %}{{- ' (' ~ mood ~ ')' }}{% endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
# a role between the halves of a token, turns that are not special tokens, and a token that takes the white space after
PHI_TEMPLATE = """{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{% endif %}"""


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


def qwen_folder(path: Path) -> str:
    """As Qwen: NFC, its splits, control tokens beyond the vocabulary; thoughts and calls are added, not special."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    text = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    return _chat_folder(path, control, text, normalizer=normalizers.NFC(), chat_template=QWEN_TEMPLATE)


def llama3_folder(path: Path) -> str:
    """As Llama 3: whole words before merges, a token that begins the text, and hundreds of reserved tokens."""
    control = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    control += [f"<|reserved_special_token_{i}|>" for i in range(250)]
    return _chat_folder(path, control, [], ignore_merges=True, bos=control[0], chat_template=LLAMA_TEMPLATE)


def phi_folder(path: Path) -> str:
    """As Phi: a template that makes its tokens of roles; they are added tokens and not special, but for the end's."""
    turns = [AddedToken(f"<|{role}|>", rstrip=True, special=False) for role in ("system", "user", "assistant")]
    return _chat_folder(path, ["<|end|>"], turns, chat_template=PHI_TEMPLATE)


def _chat_folder(
    path: Path,
    control: list[str],
    text: Sequence[str | AddedToken],
    *,
    chat_template: str,
    normalizer: normalizers.Normalizer | None = None,
    ignore_merges: bool = False,
    bos: str | None = None,
) -> str:
    """Byte-level BPE with added tokens: ``control`` are special, ``text`` are not."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    words = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([AddedToken(each, special=False) if isinstance(each, str) else each for each in text])
    return _save(
        tokenizer, path, chat_template=chat_template, eos_token=control[-1], **({"bos_token": bos} if bos else {})
    )


def byte_fallback_folder(path: Path, *, chat_template: str | None = None) -> str:
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
    return _save(tokenizer, path, chat_template=chat_template)


def _save(
    tokenizer: Tokenizer, path: Path, *, chat_template: str | None, eos_token: str = "<|end|>", **names: str
) -> str:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token, "model_max_length": 512}
    (path / "tokenizer_config.json").write_text(json.dumps({**config, **names}))
    if chat_template is not None:
        (path / "chat_template.jinja").write_text(chat_template)
    return str(path)
