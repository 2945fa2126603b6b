"""Tokenizer: ids, chat template, bytes of tokens."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_folders import byte_fallback_folder, byte_level_folder
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models
from transformers import AutoTokenizer

from replicas.errors import InvalidConfig, InvalidRequest
from replicas.text.tokenizer import Tokenizer

SMOL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
TEXTS = ["the theme, then", "  two\n\tspaces ", "naïve café", "你好, 世界", "🙂👩‍👩‍👧 é", "über tool", ""]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_level_folder(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_fallback_folder(tmp_path_factory.mktemp("byte_fallback")))


@pytest.fixture(scope="module")
def smol() -> Tokenizer:
    assert (SMOL / "tokenizer.json").is_file(), f"{SMOL} is missing: run `make model`"
    return Tokenizer(str(SMOL))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_text_survives_encode_and_decode(family: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(family)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_decode_agrees_with_transformers(family: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(family)
    reference = AutoTokenizer.from_pretrained(tokenizer.path)
    ids = [*tokenizer.encode(f"<|start|>{text}<|end|>"), *tokenizer.encode(text)]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_bytes_of_tokens_concatenate_to_the_bytes_of_the_text(byte_level: Tokenizer) -> None:
    text = "你好 🙂 über tool"
    ids = byte_level.encode(text)
    assert b"".join(byte_level.token_bytes(int(i)) for i in ids) == text.encode()
    assert len(ids) < len(text.encode())


def test_byte_level_bytes_are_exact_even_inside_a_character(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ß")  # no merge holds it: two tokens of one byte
    assert [byte_level.token_bytes(int(i)) for i in ids] == [b"\xc3", b"\x9f"]
    assert [byte_level.token_text(int(i)) for i in ids] == ["�", "�"]


def test_sentencepiece_bytes_spell_spaces_and_byte_tokens(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("the ß")
    assert [byte_fallback.token_bytes(int(i)) for i in ids] == [b" the", b" ", b"\xc3", b"\x9f"]
    assert byte_fallback.decode(ids) == "the ß"  # the first space is the tokenizer's, not the text's


def test_special_tokens_are_skipped_only_when_asked(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|start|>the<|end|>")
    assert byte_level.special_ids == {0, 1}
    assert byte_level.decode(ids) == "the"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|start|>the<|end|>"
    assert byte_level.token_bytes(0) == b"<|start|>"


def test_ids_of_a_padded_vocabulary_have_no_text(byte_level: Tokenizer) -> None:
    padded = byte_level.vocab_size + 5
    assert byte_level.token_bytes(padded) == b""
    assert byte_level.decode([padded, *byte_level.encode("the"), -1]) == "the"


def test_a_digest_tells_tokenizers_apart_and_another_chat_templates(tmp_path: Path, byte_level: Tokenizer) -> None:
    """SPEC L02. Another template over the same ids; then two ids change places."""
    same = Tokenizer(byte_level_folder(tmp_path / "same"))
    assert (same.digest, same.template_digest) == (byte_level.digest, byte_level.template_digest)
    other = Tokenizer(byte_level_folder(tmp_path / "other", chat_template="{{ messages[0].content }}"))
    assert other.digest == same.digest
    assert other.template_digest != same.template_digest
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    assert Tokenizer(str(tmp_path / "other")).digest != same.digest


def test_eos_ids_join_the_tokenizers_and_the_generation_configs(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    assert Tokenizer(folder).eos_ids == {1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 7}))
    assert Tokenizer(folder).eos_ids == {1, 7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert Tokenizer(folder).eos_ids == {1, 5, 6}


def test_context_len_is_none_when_the_tokenizer_does_not_say(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    assert Tokenizer(folder).context_len == 512
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert Tokenizer(folder).context_len is None


def test_a_chat_has_the_templates_control_tokens_and_no_others(tmp_path: Path) -> None:
    """Here the tokenizer itself begins each text with one, as Llama's does; a message may spell it."""
    folder = byte_level_folder(tmp_path)
    file = tmp_path / "tokenizer.json"
    begin = [{"SpecialToken": {"id": "<|start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    post = {"type": "TemplateProcessing", "single": begin, "pair": [*begin, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|start|>": {"id": "<|start|>", "ids": [0], "tokens": ["<|start|>"]}}}  # fmt: skip
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": post}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("the")[0] == 0
    for content in ("the end", "the <|start|> of it"):
        ids = tokenizer.chat([{"role": "user", "content": content}], add_generation_prompt=False).tolist()
        assert (ids.count(0), ids.count(1)) == (1, 1)


def test_chat_reads_a_refusal_as_the_text_that_it_is(byte_level: Tokenizer) -> None:
    def text(message: dict[str, object]) -> str:
        return byte_level.chat_text([{"role": "assistant", **message}], add_generation_prompt=False)

    parts = [{"type": "text", "text": "Well:"}, {"type": "refusal", "refusal": "no."}]
    assert text({"content": parts}) == "<|start|>assistant\nWell:\nno.<|end|>\n"
    assert text({"content": None, "refusal": "no."}) == "<|start|>assistant\nno.<|end|>\n"


def test_chat_takes_openais_roles_and_those_that_the_template_names(byte_level: Tokenizer) -> None:
    """This one names 'alien', to refuse it in its own words; it does not know what a developer is."""
    with pytest.raises(InvalidRequest, match=r"messages\[1\].role: 'wizard' is not one of system, developer, user"):
        byte_level.chat([{"role": "user", "content": "hi"}, {"role": "wizard", "content": "hi"}])
    with pytest.raises(InvalidRequest, match="no aliens"):
        byte_level.chat([{"role": "alien", "content": "hi"}])
    told = byte_level.chat_text([{"role": "developer", "content": "hi"}], add_generation_prompt=False)
    assert told == "<|start|>system\nhi<|end|>\n"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "messages: is empty"),
        ([{"content": "no role"}], {}, r"messages\[0\]: must be an object with a role"),
        ([3], {}, r"messages\[0\]: must be an object"),
        ([{"role": "user", "content": 3}], {}, r"messages\[0\].content: must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "only text parts"),
        ([{"role": "alien", "content": "hi"}], {}, "the chat template refuses these messages: no aliens"),
        ([{"role": "user", "content": "\ud800"}], {}, "lone surrogate"),
        ([{"role": "user", "content": "hi"}], {"chat_template": "{{ 1 }}"}, r"may not set \['chat_template'\]"),
        ([{"role": "user", "content": "hi"}], {"continue_final_message": True}, "exclude each other"),
    ],
)
def test_chat_refuses_what_the_template_cannot_take(
    byte_level: Tokenizer, messages: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        byte_level.chat(messages, **options)


def test_chat_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_level_folder(tmp_path, chat_template=None))
    with pytest.raises(InvalidRequest, match="has no chat template; use /v1/completions"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


def test_encode_refuses_a_lone_surrogate(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate at character 3"):
        byte_level.encode("abc\ud800")


def test_a_folder_without_a_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no tokenizer can be loaded"):
        Tokenizer(str(tmp_path))


def test_an_unknown_decoder_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    rust = RustTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    rust.decoder = decoders.WordPiece()
    rust.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(InvalidConfig, match=r"\['WordPiece'\] is not known; known: ByteLevel"):
        Tokenizer(str(tmp_path))


def test_threads_may_encode_and_decode_at_once(byte_level: Tokenizer) -> None:
    text = "the theme 你好 " * 50
    wanted, wrong = byte_level.encode(text).tolist(), []

    def work() -> None:
        for _ in range(20):
            ids = byte_level.encode(text)
            if ids.tolist() != wanted or byte_level.decode(ids) != text:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_plain_tokenizer_folder_loads_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from replicas.text.tokenizer import Tokenizer; t = Tokenizer(sys.argv[1]); "
        "t.chat([{'role': 'user', 'content': 'hi'}]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, byte_level_folder(tmp_path)], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.model
def test_smollm2_tokens_are_those_measured_elsewhere(smol: Tokenizer) -> None:
    """Ids from llama.cpp's /tokenize on the same vocabulary (notes/peers.md)."""
    assert smol.encode("Hello world").tolist() == [19556, 905]
    assert smol.encode("  two spaces\n\tTab 12345 3.14").tolist() == [
        216, 827, 5600, 198, 197, 30064, 216, 33, 34, 35, 36, 37, 216, 35, 30, 33, 36,
    ]  # fmt: skip
    assert (smol.vocab_size, smol.eos_ids, smol.context_len) == (49_152, {2}, 8192)
