"""Finds a model's folder, reads its config into a ModelConfig, and identifies the model by its files.

Owns:      when Transformers is asked for an architecture's defaults: importing its configuration classes takes 3 s of a
           start (they import its kernels and torch's compiler), and a checkpoint's config.json seldom needs them. The
           identity that KvLayout.model and snapshots carry.
Never:     interprets the values of config.json (replicas/hf_config.py does), or reads all weights for the identity: a
           large checkpoint would take minutes.
Invariant: the config means the same to `model_config_from_hf`, with or without Transformers. Equal files give equal
           identities, wherever they lie.
"""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import xxhash

from replicas.checkpoints.checkpoint import gguf_of, stored_as, tied_tables
from replicas.checkpoints.gguf_folder import folder_of, gguf_in
from replicas.checkpoints.weight_index import listing, weight_files
from replicas.config import Device, DType, Implementation, ModelConfig, Quantization
from replicas.errors import InvalidConfig, UnsupportedModel
from replicas.hf_config import (
    contexts,
    model_config_from_hf,
    model_config_from_outline,
    read_generation_config,
    rope_written,
)
from replicas.kernels.weight_formats import RULES
from replicas.models.registry import check_native

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
HUB_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]  # beside the weights


def model_folder(path_or_hub_id: str, *, revision: str | None = None) -> Path:
    """Return the local folder of a model; a hub id is fetched, or found in the hub's local cache: of its weights only
    what the index names, or model.safetensors, for some models have a second copy of them in another form.

    Args:   revision: of a hub id: branch, tag or commit.
    Raises: InvalidConfig if there is no such folder and the hub cannot give it.
    """
    path = Path(path_or_hub_id).expanduser()
    file = gguf_in(path)
    if file is not None:
        return folder_of(file)
    if path.is_dir():
        return path
    if not HUB_ID.match(path_or_hub_id) or path_or_hub_id.startswith("models/"):
        raise InvalidConfig(
            f"model: there is no folder {path.absolute()}. Give a folder with config.json and *.safetensors, a GGUF "
            "file, or a hub id such as Qwen/Qwen3-0.6B; `make model` makes the embedded one, "
            "models/SmolLM2-135M-Instruct"
        )
    from huggingface_hub import snapshot_download

    from replicas.checkpoints import hub

    with hub.asking(path_or_hub_id) as how:
        outline = snapshot_download(
            path_or_hub_id, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=["original/*"], **how
        )
    weights, commit = weight_files(Path(outline)), Path(outline).name  # a branch may have moved on meanwhile
    with hub.asking(path_or_hub_id) as how:
        return Path(snapshot_download(path_or_hub_id, revision=commit, allow_patterns=weights, **how))


def load_model_config(
    path_or_hub_id: str,
    *,
    revision: str | None = None,
    dtype: DType | None = None,
    context_len: int | None = None,
    device: Device | None = None,
    quantization: Quantization = "none",
    implementation: Implementation = "auto",
) -> ModelConfig:
    """Read the config of a model's folder or hub id.

    Args:    revision: of a hub id; None is its main branch.
             dtype: to compute in; None takes the checkpoint's on CUDA, and bfloat16 on a CPU that multiplies it
             if the checkpoint has it and nothing says how its weights are rounded; else float32.
             context_len: another context than the model's own, mostly shorter; None takes the model's.
             device: for the default dtype; None is CUDA where there is one.
             quantization: of the weights, as they are loaded.
             implementation: whose code runs the model; auto: ours where it can, else Transformers' module.
    Raises:  InvalidConfig (UnsupportedModel for architectures that replicas/models lacks), naming the file.
    """
    folder = model_folder(path_or_hub_id, revision=revision)
    device = device or _device_here()
    if not (folder / "config.json").is_file():
        raise InvalidConfig(f"model: {folder} has no config.json; there is: {listing(folder)}. Give a model's folder")
    if implementation not in get_args(Implementation):
        raise InvalidConfig(
            f"model.implementation = {implementation!r} is unknown; allowed: {', '.join(get_args(Implementation))}"
        )
    name = str(path_or_hub_id) if folder == Path(path_or_hub_id) else str(folder)
    if implementation == "transformers":
        config, longest = _outlined(name, folder, dtype, device)
    else:
        try:
            config, longest = _ours(name, folder, dtype, device)
        except UnsupportedModel as error:
            if implementation == "manta":
                raise
            try:
                config, longest = _outlined(name, folder, dtype, device)
            except UnsupportedModel as other:
                raise UnsupportedModel(f"{error}. {other}") from other
    config = replace(config, quantization=quantization, stored=stored_as(folder, _as_it_is(folder)))
    if config.implementation == "manta":
        config = replace(config, tie_embeddings=tied_tables(folder, said=config.tie_embeddings))
    all_stored = config.stored is not None and config.stored.experts is None
    if device == "cpu" and dtype is None and (quantization != "none" or all_stored):
        config = replace(config, dtype="float32")
    if config.stored is not None:
        if config.implementation == "transformers":
            raise UnsupportedModel(
                f"model: {folder} is quantized ({config.stored.about}), and {config.architecture} is run by "
                "Transformers' code, from plain weights alone. Serve the model's unquantized checkpoint"
            )
        fitting = device != "cpu" if config.stored.products == "fp8" else device == "cpu" and config.dtype == "float32"
        if not fitting or quantization != "none":
            kept = config.stored.experts if device == "cpu" else None
            config = replace(config, stored=replace(config.stored, products=None, tables=None, experts=kept))
    return config if context_len is None else _with_context(config, context_len, longest=longest)


def _device_here() -> Device:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _ours(name: str, folder: Path, dtype: DType | None, device: Device) -> tuple[ModelConfig, int]:
    """Read the config of a model that a file in replicas/models runs, and its longest context.

    Raises: UnsupportedModel for others.
    """
    check_native(architecture_of(folder))  # first: Transformers says less about an unknown architecture
    hf = read_config(folder)
    if hf.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"model: {folder}/config.json has hidden_act {hf['hidden_act']!r}; supported: 'silu'")
    dtype = dtype or _default_dtype(folder, hf, device)
    return model_config_from_hf(name, hf, eos_ids=_eos_ids(folder, hf), dtype=dtype), contexts(hf)[1]


def _outlined(name: str, folder: Path, dtype: DType | None, device: Device) -> tuple[ModelConfig, int]:
    """Read the config of a model that Transformers' own module runs, and its longest context.

    Raises: UnsupportedModel with the reason.
    """
    from replicas.models.outline import outline, read

    config, hf = read(folder), family_config(folder)
    architecture = architecture_of(folder)
    return model_config_from_outline(
        name,
        hf,
        outline(config, architecture),
        architecture=architecture,
        eos_ids=_eos_ids(folder, hf),
        dtype=dtype or _default_dtype(folder, hf, device),
    )


def family_config(folder: Path) -> dict[str, Any]:
    """Read config.json with its family's defaults; of a model that also sees or hears, the text part's numbers.

    Raises: UnsupportedModel where Transformers has no code of its own for it.
    """
    from replicas.models.outline import read

    config = read(folder)
    return {**config.to_dict(), **config.get_text_config(decoder=True).to_dict()}


def _eos_ids(folder: Path, hf: dict[str, Any]) -> tuple[int, ...]:
    """Collect the ids that end a text from config.json and from generation_config.json, which chat models extend."""
    generation = read_generation_config(folder / "generation_config.json")
    ids: set[int] = set()
    for value in (hf.get("eos_token_id"), generation.get("eos_token_id")):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))


def _default_dtype(folder: Path, hf: dict[str, Any], device: Device) -> DType:
    said = hf.get("dtype") or hf.get("torch_dtype")
    name = str(said or "bfloat16").removeprefix("torch.")
    if device == "cpu":
        if not said or name != "bfloat16":
            return "float32"
        from replicas.kernels import bf16_tiles

        return "bfloat16" if bf16_tiles.way() else "float32"  # by the kind of CPU alone: replicas must not differ
    for dtype in get_args(DType):
        if name == dtype:
            return dtype  # type: ignore[no-any-return]
    raise InvalidConfig(f"model: {folder} is stored in {name}; set dtype to one of {', '.join(get_args(DType))}")


def _with_context(config: ModelConfig, context_len: int, *, longest: int) -> ModelConfig:
    if not 1 <= context_len <= longest:
        raise InvalidConfig(f"model.context_len = {context_len}; {config.path} allows 1 to {longest} tokens")
    return replace(config, context_len=context_len)


NOT_MEANING = frozenset({"_name_or_path", "transformers_version"})  # keys of config.json that change no K/V
SAMPLES = 32  # blocks read of each weight file, evenly spaced, its header and its end among them
SAMPLE_BYTES = 1 << 16


def model_identity(path_or_hub_id: str, quantization: Quantization) -> str:
    """Hash the config and the weight files (names, sizes, headers and samples of their bytes) into 32 hex digits.

    How weights are rounded when they are loaded is part of it: K and V of one rounding are wrong for another. Two
    checkpoints of one architecture (a fine-tune and its base) differ nearly everywhere, so samples tell them apart; a
    checkpoint with only a few edited numbers may go unnoticed. Tokenizer and chat template are no part of it: K and V
    depend on ids alone, and a template that was corrected must not empty every cache. Snapshots, which hold an answer's
    text in the making, compare those too (replay/replay.py).
    """
    folder = model_folder(path_or_hub_id)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    meaning = {key: value for key, value in config.items() if key not in NOT_MEANING}
    digest = xxhash.xxh3_128(json.dumps(meaning, sort_keys=True).encode())
    file = gguf_of(folder)
    for path in sorted(folder.glob("*.safetensors")) if file is None else [file]:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        _add_samples(digest, path)
    if quantization != "none":
        digest.update(RULES[quantization].encode())
    return str(digest.hexdigest())


def _add_samples(digest: "xxhash.xxh3_128", path: Path) -> None:
    last = max(path.stat().st_size - SAMPLE_BYTES, 0)
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(last * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))


# keys with a default other than "absent" in some architecture that replicas/models runs
_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)
_QWEN_MOE = (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
)
_BY_FAMILY = {  # the longer of two names comes first
    "Mixtral": ("num_local_experts", "num_experts_per_tok", "sliding_window"),
    "Qwen2Moe": (*_QWEN_MOE, "num_experts", "shared_expert_intermediate_size", "use_sliding_window"),
    "Qwen3Moe": (*_QWEN_MOE, "head_dim", "use_sliding_window"),
    "GptOss": ("num_local_experts", "num_experts_per_tok", "head_dim", "sliding_window", "attention_bias"),
    "Llama": (),
    "Mistral": ("sliding_window",),
    "Qwen2": ("use_sliding_window",),
    "Qwen3": ("use_sliding_window", "head_dim"),
}


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``folder``'s config.json with its defaults. Raises: InvalidConfig, naming the file."""
    config = _as_it_is(folder)
    lost = rope_written({**config, "rope_scaling": None}).get("rope_theta")
    if lost is not None and not (config.get("rope_theta") or rope_written(config).get("rope_theta")):
        log.warning(
            "%s/config.json has rope_scaling, which replaces rope_parameters and with them rope_theta = %g, as in "
            "Transformers: put rope_theta into rope_scaling if the model was trained with it",
            folder,
            lost,
        )
    try:
        return config if _is_complete(config) else _with_defaults(folder)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidConfig(f"model.path: {folder}/config.json cannot be read: {error}") from error


def architecture_of(folder: Path) -> str:
    """Read the architecture from ``folder``'s config.json; "?" without one. Raises: InvalidConfig with the file."""
    return str((_as_it_is(folder).get("architectures") or ["?"])[0])


def _as_it_is(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"model.path: {folder}/config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidConfig(f"model.path: {folder}/config.json holds no settings of a model")
    return config


def _is_complete(config: dict[str, Any]) -> bool:
    """Tell whether no default is needed. A value that is no number goes to Transformers too: it names the fault."""
    architecture = str((config.get("architectures") or ["?"])[0])
    keys = next((keys for name, keys in _BY_FAMILY.items() if architecture.startswith(name)), None)
    rope_theta = config.get("rope_theta") or rope_written(config).get("rope_theta")
    numbers = [rope_theta, *(config.get(key) for key in _NUMBERS)]
    return (
        keys is not None
        and all(isinstance(number, int | float) for number in numbers)
        and all(key in config for key in (*keys, "eos_token_id"))
    )


def _with_defaults(folder: Path) -> dict[str, Any]:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(str(folder)).to_dict()
    except StrictDataclassError as error:
        raise ValueError(str(error)) from error
    return config
