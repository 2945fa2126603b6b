"""An ordinary model folder for a GGUF file: config.json and tokenizer made of its metadata, weights a link to it.

Owns:      ``<file>.gguf.hf`` beside the file, or under ``~/.cache/manta/gguf`` (XDG_CACHE_HOME) where that cannot be
           written; it is made once, and anew when the file has changed. Everything else reads it as any folder.
Never:     copies or converts weights: ``model.gguf`` in the folder is a link.
Invariant: a folder with its final name is complete.
Thread:    any; of processes that make it at once one wins, and their folders are equal.
"""

import json
import os
import shutil
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from replicas.checkpoints.gguf_file import FITS, GgufFile, hf_name
from replicas.config import StoredAs
from replicas.errors import InvalidConfig

LINK = "model.gguf"
MADE_OF = "gguf.json"  # what the folder was made of, and how the file stores weights
VERSION = 2  # of what is made
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# How the text is split before its bytes are merged, by `tokenizer.ggml.pre`: what Transformers does not read. Each rule
# is a list of expressions, applied one after the other; the last is ByteLevel's own (GPT-2's) where it says GPT2.
GPT2 = "gpt2"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((
        "default", "gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert", "roberta-bpe", "mpt", "olmo",
        "jais", "trillion", "granite-docling", "exaone4",
    ), (GPT2,)),
    **dict.fromkeys((
        "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
    ), (r"\p{N}", GPT2)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), (_QWEN2,)),
    **dict.fromkeys(("chatglm-bpe", "glm4"), (_QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
}  # fmt: skip
# where a piece of text that is a token of its own is that token, whatever the merges would make of it
WHOLE_FIRST = frozenset({
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken",
})  # fmt: skip
SAMPLING = {  # in generation_config.json, and behind `general.sampling.`
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat"
}  # fmt: skip
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_in(path: Path) -> Path | None:
    """Return the GGUF file that ``path`` means: itself, or the only one in a folder without config.json; None if it
    means none. Raises: InvalidConfig where there are several."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise InvalidConfig(
            f"model: {path} has {len(files)} GGUF files; set model.path to one: {', '.join(f.name for f in files[:8])}"
        )
    return files[0] if files else None


def folder_of(file: Path) -> Path:
    """Return the folder that stands for GGUF ``file``; makes it if it is not there or was made of another file.

    Raises: InvalidConfig for a file that is no whole GGUF of a model that runs here.
    """
    file = file.absolute()
    made_of = {"version": VERSION, "size": file.stat().st_size, "head": _digest(file)}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "manta" / "gguf"
    of_path = xxhash.xxh3_64(str(file).encode()).hexdigest()
    places = [file.with_name(f"{file.name}.hf"), cache / f"{of_path}-{file.name}.hf"]
    for place in places:
        if _was_made_of(place, made_of):
            return place
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        except OSError:
            continue
        try:
            read = GgufFile(file)
            _write(read, partial)
            (partial / LINK).symlink_to(file)
            _write_json(partial / MADE_OF, {"made_of": made_of, "stored": asdict(stored(read))})
            partial.chmod(0o755)
            _put(partial, place, made_of)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return place
    raise InvalidConfig(f"model: neither {places[0].parent} nor {cache} can be written, for the config of {file}")


def _digest(file: Path) -> str:
    with file.open("rb") as data:
        return str(xxhash.xxh3_64(data.read(1 << 23)).hexdigest())  # the metadata, mostly


def _was_made_of(place: Path, made_of: dict[str, Any]) -> bool:
    try:
        written = json.loads((place / MADE_OF).read_text())
        return bool(written["made_of"] == made_of and (place / LINK).is_file())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _put(partial: Path, place: Path, made_of: dict[str, Any]) -> None:
    """Give the folder its final name, unless another process was quicker."""
    if place.exists() and not _was_made_of(place, made_of):
        shutil.rmtree(place, ignore_errors=True)  # of another file, or what an interrupted removal left
    try:
        partial.rename(place)
    except OSError:
        if not _was_made_of(place, made_of):
            raise


def stored_in_gguf(folder: Path, file: Path) -> StoredAs:
    """Describe how a GGUF file stores the weights of ``folder``, whose config.json may be another's than ours."""
    if file.name == LINK and (folder / MADE_OF).is_file():
        return StoredAs(**json.loads((folder / MADE_OF).read_text())["stored"])
    return stored(GgufFile(file))


def stored(file: GgufFile) -> StoredAs:
    """Describe how a GGUF file stores weights: its kinds of blocks, and the panels that hold them as they are."""
    weights = {hf_name(name): each.kind for name, each in file.tensors.items() if len(each.shape) == 2}
    tables = {name: kind for name, kind in weights.items() if name in ("model.embed_tokens.weight", "lm_head.weight")}
    blocks = [kind for name, kind in weights.items() if name not in tables]
    counts = ", ".join(f"{kind} ({count})" for kind, count in sorted(Counter(weights.values()).items()))
    found = [{FITS.get(kind) for kind in kinds} for kinds in (blocks, tables.values())]
    products, of_tables = (each.pop() if len(each) == 1 else None for each in found)
    return StoredAs(about=f"GGUF, weights in {counts}", products=products, tables=of_tables if products else None)


def _write(file: GgufFile, folder: Path) -> None:
    config = config_of(file)
    _write_json(folder / "config.json", config)
    eos = sorted({each for each in (config["eos_token_id"], _token(file, "eot")) if each is not None})
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": eos}
    found = {ours: f"general.sampling.{theirs}" for ours, theirs in SAMPLING.items()}
    # in fp32, as the epsilon
    said = {ours: float(f"{file.real(field):.6g}") for ours, field in found.items() if field in file.metadata}
    _write_json(folder / "generation_config.json", {**ends, **said})
    _write_tokenizer(file, folder)


def config_of(file: GgufFile) -> dict[str, Any]:
    """Make config.json's settings. Raises: InvalidConfig for an architecture that is not read, or a missing field."""
    name, names = str(file.field("general.architecture")), {hf_name(each) for each in file.tensors}
    if name not in ARCHITECTURES or file.metadata.get(f"{name}.expert_count", 0):
        experts = " with experts" if file.metadata.get(f"{name}.expert_count", 0) else ""
        raise InvalidConfig(
            f"model: {file.path} has architecture {name!r}{experts}; supported as GGUF: {', '.join(ARCHITECTURES)}, "
            "without experts. Serve the model's safetensors"
        )
    heads, hidden = (file.whole(f"{name}.{each}", least=1) for each in ("attention.head_count", "embedding_length"))
    rotated = file.whole(f"{name}.rope.dimension_count", hidden // heads)
    head_dim = file.whole(f"{name}.attention.key_length", rotated or hidden // heads, least=1)
    window = file.whole(f"{name}.attention.sliding_window", 0) or None
    return {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "hidden_size": hidden,
        "intermediate_size": file.whole(f"{name}.feed_forward_length", least=1),
        "num_hidden_layers": file.whole(f"{name}.block_count", least=1),
        "num_attention_heads": heads,
        "num_key_value_heads": file.whole(f"{name}.attention.head_count_kv", heads, least=1),
        "head_dim": head_dim,
        "max_position_embeddings": file.whole(f"{name}.context_length", least=1),
        "vocab_size": _vocab_size(file),
        "hidden_act": "silu",
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in names,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in names,
        # GGUF holds these two in fp32: 1e-5 reads back as 9.9999997e-06
        "rms_norm_eps": float(f"{file.real(f'{name}.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(f"{file.real(f'{name}.rope.freq_base', 10_000.0):.6g}"),
        "rope_scaling": _rope_scaling(file, name, head_dim),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "tie_word_embeddings": "lm_head.weight" not in names,
        **{f"{each}_token_id": _token(file, each) for each in ("bos", "eos")},
    }


def _token(file: GgufFile, name: str) -> int | None:
    field = f"tokenizer.ggml.{name}_token_id"
    return file.whole(field) if field in file.metadata else None


def _vocab_size(file: GgufFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise InvalidConfig(f"model: {file.path} has no token_embd.weight; is it a file of a language model?")
    return table.shape[0]


def _rope_scaling(file: GgufFile, name: str, head_dim: int) -> dict[str, Any] | None:
    """Read how positions are scaled; llama.cpp stores Llama 3's rule as a factor for each frequency."""
    kind = str(file.metadata.get(f"{name}.rope.scaling.type", "none"))
    if "rope_freqs.weight" in file.tensors:
        tensor = file.tensors["rope_freqs.weight"]
        if tensor.kind == "F32" and 2 * tensor.shape[-1] == head_dim:
            factors = np.frombuffer(file.data()[tensor.offset : tensor.offset + tensor.num_bytes], np.float32)
            scaling = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3}
            wanted = _llama3_factors(file.real(f"{name}.rope.freq_base"), head_dim, scaling)
            if factors.shape == wanted.shape and np.allclose(factors, wanted, rtol=1e-3):
                return scaling
        raise InvalidConfig(f"model: {file.path} scales frequencies otherwise than Llama 3; serve safetensors")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": file.real(f"{name}.rope.scaling.factor")}
    original = file.whole(f"{name}.rope.scaling.original_context_length", 0)
    return scaling if not original else {**scaling, "original_max_position_embeddings": original}


def _llama3_factors(theta: float, head_dim: int, scaling: dict[str, Any]) -> Any:
    """Compute what each frequency is divided by (as Transformers' ``llama3``): [D / 2]."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / (keep + (1.0 - keep) / scaling["factor"])


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write the tokenizer that Transformers makes of the metadata, with the split that the file names.

    Raises: InvalidConfig for a file without a tokenizer, or a split that neither Transformers nor `SPLITS` knows.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    except Exception as error:  # Transformers' and the Rust library's, which raises just that
        raise InvalidConfig(f"model: no tokenizer can be made of the metadata of {file.path}: {error}") from error
    if file.metadata.get("tokenizer.ggml.model") == "gpt2":
        _split_as(str(file.metadata.get("tokenizer.ggml.pre", "default")), tokenizer.backend_tokenizer, file.path)
    tokenizer.save_pretrained(str(folder))


def _split_as(name: str, tokenizer: Any, path: Path) -> None:
    """Make ``tokenizer``, as Transformers made it, split text as ``name`` says. Raises: InvalidConfig."""
    from tokenizers import Regex, pre_tokenizers

    rules = SPLITS.get(name)
    was_read = isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Sequence)  # else it is GPT-2's, which any name gets
    if rules is None and not was_read:
        raise InvalidConfig(
            f"model: {path} splits text by the rule tokenizer.ggml.pre = {name!r}, which is not known here: its tokens "
            f"would be wrong. Known: {', '.join(sorted(SPLITS))}, and those of Transformers. Serve the safetensors"
        )
    if rules is not None:
        steps = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in rules if rule != GPT2]
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=GPT2 in rules)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, by_bytes])
    if name in WHOLE_FIRST:
        tokenizer.model.ignore_merges = True


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
