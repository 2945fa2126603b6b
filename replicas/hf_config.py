"""From Hugging Face's config.json, as a dict, to a `ModelConfig`.

Owns:  which keys say what, their defaults by architecture, and which features are refused; what generation_config.json
       says of a text's ends and of sampling.
Never: reads config.json (`replicas/loading/model_files.py` does).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from replicas.config import AttentionKind, DType, IndexConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig, StateLayer
from replicas.errors import InvalidConfig, UnsupportedModel

ROPE_KINDS = get_args(get_type_hints(RopeConfig)["kind"])


def model_config_from_hf(path: str, hf: Mapping[str, Any], *, eos_ids: tuple[int, ...], dtype: DType) -> ModelConfig:
    """Build it from a Transformers config as a dict (``AutoConfig.to_dict()``, which has defaults filled in).

    Raises: UnsupportedModel for features that the dense models here do not have (other rope kinds).
    """
    architectures = hf.get("architectures") or ["?"]
    architecture = str(architectures[0])
    heads = int(hf["num_attention_heads"])
    qwen2 = architecture.startswith("Qwen2")
    config = ModelConfig(
        path=path,
        architecture=architecture,
        vocab_size=int(hf["vocab_size"]),
        hidden_size=int(hf["hidden_size"]),
        intermediate_size=int(hf["intermediate_size"]),
        num_layers=int(hf["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or heads),
        head_dim=int(hf.get("head_dim") or int(hf["hidden_size"]) // heads),
        rms_norm_eps=float(hf["rms_norm_eps"]),
        rope=_rope_from_hf(path, hf),
        context_len=contexts(hf)[0],
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        attention_bias=bool(hf.get("qkv_bias", True) if qwen2 else hf.get("attention_bias", False)),
        output_bias=not qwen2 and bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
        qk_norm=architecture.startswith("Qwen3"),
        eos_ids=eos_ids,
        dtype=dtype,
        attention_kinds=_kinds_from_hf(architecture, hf),
        moe=_moe_from_hf(path, architecture, hf),
    )
    return _with_latent_attention(config, hf) if "kv_lora_rank" in hf else config


def _kinds_from_hf(architecture: str, hf: Mapping[str, Any]) -> tuple[AttentionKind, ...]:
    """Return what each layer's attention does; none, if all of it is plain: a window as long as any text is no window.

    Llama's modelling knows no window, whatever its config.json says.
    """
    window, num_layers = int(hf.get("sliding_window") or 0), int(hf["num_hidden_layers"])
    if architecture.startswith("GptOss"):
        types = hf.get("layer_types") or (["sliding_attention", "full_attention"] * num_layers)[:num_layers]
        seen = window if 0 < window < contexts(hf)[1] else None
        return tuple(AttentionKind(sinks=True, window=seen if each == "sliding_attention" else None) for each in types)
    used = window and hf.get("use_sliding_window", True) and not architecture.startswith("Llama")
    if not used or window >= contexts(hf)[1]:
        return ()
    types = ["sliding_attention"] * num_layers
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM"):
        first = int(hf.get("max_window_layers", 28))  # Transformers' default
        if architecture == "Qwen2MoeForCausalLM":  # of the first so many layers every other one, here alone
            windowed = range(0, min(first, num_layers), 2)
        else:
            windowed = range(first, num_layers)
        types = hf.get("layer_types") or [types[i] if i in windowed else "full_attention" for i in range(num_layers)]
    kinds = tuple(AttentionKind(window=window if each == "sliding_attention" else None) for each in types)
    return kinds if any(kind.special for kind in kinds) else ()


def _within(kinds: tuple[AttentionKind, ...], longest: int) -> tuple[AttentionKind, ...]:
    """Return the kinds for texts of at most ``longest`` tokens: a window or chunk as long as any is none."""
    short = tuple(
        replace(
            kind,
            window=None if kind.window is not None and kind.window >= longest else kind.window,
            chunk=None if kind.chunk is not None and kind.chunk >= longest else kind.chunk,
        )
        for kind in kinds
    )
    return short if any(kind.special for kind in short) else ()


def _with_latent_attention(config: ModelConfig, hf: Mapping[str, Any]) -> ModelConfig:
    """Complete the config of a model with latent attention. Raises: UnsupportedModel for keys that change what is
    computed here."""
    v3 = config.architecture != "DeepseekV2ForCausalLM"
    served: dict[str, tuple[object, ...]] = {"moe_layer_freq": (None, 1), "mlp_bias": (None, False)}
    if not v3:  # no checkpoint normalises, and implementations differ in what that means beside routed_scaling_factor
        served |= {"topk_method": (None, "greedy", "group_limited_greedy"), "norm_topk_prob": (None, False)}
    for key, values in served.items():
        if hf.get(key) not in values:
            raise UnsupportedModel(f"{config.path}: {key} = {hf[key]!r} is not supported; supported: {values[1:]}")
    mla = MLAConfig(
        kv_lora_rank=int(hf["kv_lora_rank"]),
        q_lora_rank=None if hf.get("q_lora_rank") is None else int(hf["q_lora_rank"]),
        qk_nope_head_dim=int(hf["qk_nope_head_dim"]),
        qk_rope_head_dim=int(hf["qk_rope_head_dim"]),
        v_head_dim=int(hf["v_head_dim"]),
        interleaved=not v3 or hf.get("rope_interleave") is not False,
        index=_index_from_hf(config, hf) if "index_topk" in hf else None,
    )
    scale = (mla.qk_nope_head_dim + mla.qk_rope_head_dim) ** -0.5  # of a head as it would be if it were expanded
    factor, all_dim = (config.rope.scaling.get(key, 0.0) for key in ("factor", "mscale_all_dim"))
    if config.rope.kind != "default" and all_dim and factor > 1:
        scale *= (0.1 * all_dim * math.log(factor) + 1.0) ** 2  # YaRN's temperature, which V2 and V3 apply here too
    return replace(
        config,
        num_kv_heads=1,
        head_dim=mla.cached_dim,
        attention_kinds=(AttentionKind(scale=scale, indexed=mla.index is not None),) * config.num_layers,
        mla=mla,
    )


def _index_from_hf(config: ModelConfig, hf: Mapping[str, Any]) -> IndexConfig:
    types = hf.get("indexer_types") or ["full"] * config.num_layers
    if set(types) - {"full", "shared"} or len(types) != config.num_layers or types[0] != "full":
        raise UnsupportedModel(f"{config.path}: indexer_types = {types} is not supported; supported: full or shared of "
                               f"each of {config.num_layers} layers, the first of them full")  # fmt: skip
    return IndexConfig(
        num_heads=int(hf["index_n_heads"]),
        head_dim=int(hf["index_head_dim"]),
        top_k=int(hf["index_topk"]),
        shared=tuple(each == "shared" for each in types),
        interleaved=config.architecture.startswith("Glm"),
    )


def contexts(hf: Mapping[str, Any]) -> tuple[int, int]:
    """Return the context that a model is served with by default, and the longest that settings may ask for.

    YaRN's is ``factor`` times the original. Dynamic scaling is off up to the original context, the default, and made
    for the served context beyond it (replicas/layers/rope_scaling.py).
    Raises: KeyError, TypeError or ValueError where config.json has no number for it.
    """
    own = int(hf["max_position_embeddings"])
    raw = _rope_parameters(hf)
    kind, factor = raw.get("rope_type"), raw.get("factor")
    if kind == "yarn" and factor is not None:
        own = max(own, int(factor * _original_context(hf, raw)))
    return own, int(own * factor) if kind == "dynamic" and factor is not None else own


def rope_written(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of rotation that count. Where both names are there, ``rope_scaling`` was added to a file that
    Transformers 5 had saved, as model cards advise. It wins there too, whole: not even rope_theta is kept.

    Raises: InvalidConfig for what is no mapping.
    """
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    written = hf.get(key) or {}
    if not isinstance(written, Mapping):
        raise InvalidConfig(f"model.path: config.json has {key} = {written!r}, which is no object of settings")
    return written


def _rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_scaling``, else ``rope_parameters`` (Transformers 5); the kind's name is under ``rope_type``."""
    raw = dict(rope_written(hf))
    older = raw.pop("type", None)
    raw["rope_type"] = str(raw.get("rope_type") or older or "default")
    return raw


def _original_context(hf: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    """Return the context of the first training: beside the parameters (Phi-3), among them, or the model's own."""
    given = hf.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    return int(given or hf["max_position_embeddings"])


def _rope_from_hf(path: str, hf: Mapping[str, Any]) -> RopeConfig:
    raw = _rope_parameters(hf)
    kind, theta = raw.pop("rope_type"), float(raw.pop("rope_theta", None) or hf.get("rope_theta") or 10_000.0)
    if kind not in ROPE_KINDS or any(isinstance(value, Mapping) for value in raw.values()):
        found = f"type {kind!r}" if kind not in ROPE_KINDS else "parameters by kind of layer"
        raise UnsupportedModel(f"{path}: rope {found} is not supported; supported: {', '.join(ROPE_KINDS)}")
    partial = raw.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"{path}: partial_rotary_factor {partial} is not supported; supported: 1.0")
    scaling = {k: float(v) for k, v in raw.items() if isinstance(v, int | float)}
    if kind in ("llama3", "yarn", "dynamic", "longrope"):
        original = hf["max_position_embeddings"] if kind == "dynamic" else _original_context(hf, raw)
        scaling["original_max_position_embeddings"] = float(original)
        scaling.setdefault("factor", int(hf["max_position_embeddings"]) / original)
    short, long = (tuple(float(x) for x in raw.get(key) or ()) for key in ("short_factor", "long_factor"))
    return RopeConfig(theta=theta, kind=kind, scaling=scaling, short_factor=short, long_factor=long)


def _followed_rope(hf: Mapping[str, Any]) -> RopeConfig:
    """Return what tells pages of other contexts apart in a model whose rotation is Transformers' own: the kind and the
    original context of a scaling that follows the served one, of all layers or of some."""
    raw = _rope_parameters(hf)
    for each in (raw, *(value for value in raw.values() if isinstance(value, Mapping))):
        kind = each.get("rope_type")
        if kind in ("dynamic", "longrope"):
            original = int(hf["max_position_embeddings"]) if kind == "dynamic" else _original_context(hf, each)
            return RopeConfig(kind=kind, scaling={"original_max_position_embeddings": float(original)})
    return RopeConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A model's shape as the engine needs it. Heads are those of all ranks."""

    num_calls: int  # of attention in a forward pass: the pool's layers
    num_heads: int
    num_kv_heads: int
    head_dim: int  # the widest of keys and values; narrower ones are filled with zeros
    kinds: tuple[AttentionKind, ...]  # one per call
    vocab_size: int  # rows of logits
    first_position: int  # the position of a text's first token: RoBERTa's follow the padding's
    hidden_size: int
    num_weights: int  # numbers in the weights; tied ones count once
    tp_sizes: tuple[int, ...]  # numbers of ranks that it can be split over
    states: tuple[StateLayer, ...] = ()  # what its modules keep of a text beside K and V
    indexes: tuple[str, ...] = ()  # its modules that choose what a token attends to
    index_dim: int = 0  # numbers of the key that each of these keeps of a token


CONTEXTS = (
    "max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions", "n_ctx", "seq_length",
    "max_target_positions", "model_max_length",
)  # fmt: skip


NO_POSITIONS = frozenset({"mamba", "mamba2", "falcon_mamba"})  # without attention, and without a longest text
UNBOUNDED_CONTEXT = 131_072  # tokens that such a model is served with


def named_context(hf: Mapping[str, Any]) -> int | None:
    """Return the context's length under whichever name the family has for it; None if there is none."""
    named = next((hf[key] for key in CONTEXTS if isinstance(hf.get(key), int) and hf[key] > 0), None)
    return UNBOUNDED_CONTEXT if named is None and hf.get("model_type") in NO_POSITIONS else named


def model_config_from_outline(
    path: str,
    hf: Mapping[str, Any],
    outline: Outline,
    *,
    architecture: str,
    eos_ids: tuple[int, ...],
    dtype: DType,
) -> tuple[ModelConfig, int]:
    """Build it for a model that Transformers' own module runs: sizes are the outline's, which hold for any family.

    Args:    hf: the config of the model's text part, as a dict.
    Returns: it, and the longest context that settings may ask for.
    Raises:  UnsupportedModel if it has no context length.
    """
    own = named_context(hf)
    if own is None:
        raise UnsupportedModel(
            f"{architecture} cannot be served through Transformers: {path}/config.json has no context length, which is "
            f"one of {', '.join(CONTEXTS)}"
        )
    context_len, longest = contexts({**hf, "max_position_embeddings": own - outline.first_position})
    inner = hf.get("intermediate_size")  # a list of each layer's in some
    config = ModelConfig(
        path=path,
        architecture=architecture,
        vocab_size=outline.vocab_size,
        hidden_size=outline.hidden_size,
        intermediate_size=inner if isinstance(inner, int) else 4 * outline.hidden_size,
        num_layers=outline.num_calls,
        num_heads=outline.num_heads,
        num_kv_heads=outline.num_kv_heads,
        head_dim=outline.head_dim,
        rms_norm_eps=float(hf.get("rms_norm_eps") or 1e-6),
        rope=_followed_rope(hf),
        context_len=context_len,
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_ids=eos_ids,
        dtype=dtype,
        implementation="transformers",
        attention_kinds=_within(outline.kinds, longest),
        num_weights=outline.num_weights,
        outlined_tp_sizes=outline.tp_sizes,
        states=outline.states,
        indexes=outline.indexes,
        index_dim=outline.index_dim,
    )
    return config, longest


def _moe_from_hf(path: str, architecture: str, hf: Mapping[str, Any]) -> MoEConfig | None:
    """Read the experts of a family that has them. Raises: InvalidConfig for numbers that do not fit together."""
    if architecture.startswith("Mixtral"):
        moe = MoEConfig(
            num_experts=int(hf["num_local_experts"]),
            top_k=int(hf["num_experts_per_tok"]),
            intermediate_size=int(hf["intermediate_size"]),
            normalize=True,
        )
    elif architecture.startswith(("Qwen2Moe", "Qwen3Moe")):
        dense, step = hf.get("mlp_only_layers") or (), int(hf.get("decoder_sparse_step") or 1)
        second = architecture.startswith("Qwen2Moe")
        moe = MoEConfig(
            num_experts=int(hf.get("num_experts") or hf["num_local_experts"]),  # Transformers 5 writes the latter
            top_k=int(hf["num_experts_per_tok"]),
            intermediate_size=int(hf["moe_intermediate_size"]),
            normalize=bool(hf.get("norm_topk_prob", False)),
            shared_intermediate_size=int(hf["shared_expert_intermediate_size"]) if second else 0,
            shared_gate=second,
            dense_layers=tuple(i for i in range(int(hf["num_hidden_layers"])) if i in dense or (i + 1) % step),
        )
    elif "kv_lora_rank" in hf:
        third = not architecture.startswith("DeepseekV2")
        limited = third or hf.get("topk_method") == "group_limited_greedy"
        types = hf.get("mlp_layer_types") or ["dense"] * int(hf.get("first_k_dense_replace") or 0)
        moe = MoEConfig(
            num_experts=int(hf["n_routed_experts"]),
            top_k=int(hf["num_experts_per_tok"]),
            intermediate_size=int(hf["moe_intermediate_size"]),
            scoring="sigmoid" if third else "softmax",
            normalize=third and bool(hf.get("norm_topk_prob", True)),  # Transformers' V2 never does
            scaling=float(hf.get("routed_scaling_factor") or 1.0),
            num_groups=int(hf.get("n_group") or 1) if limited else 1,
            top_groups=int(hf.get("topk_group") or 1) if limited else 1,
            group_score="top2" if third else "max",
            score_bias=third,
            shared_intermediate_size=int(hf.get("n_shared_experts") or 0) * int(hf["moe_intermediate_size"]),
            dense_layers=tuple(i for i, each in enumerate(types) if each == "dense"),
        )
    elif architecture.startswith("GptOss"):
        moe = MoEConfig(
            num_experts=int(hf["num_local_experts"]),
            top_k=int(hf["num_experts_per_tok"]),
            intermediate_size=int(hf["intermediate_size"]),
            normalize=True,  # a softmax over the chosen is one over all, divided by the sum of the chosen
            biases=True,
            swiglu=(float(hf.get("swiglu_limit") or 7.0), float(hf.get("swiglu_alpha") or 1.702)),
        )
    else:
        return None
    per_group, left = divmod(moe.num_experts, moe.num_groups)
    if left or moe.top_groups > moe.num_groups or not 1 <= moe.top_k <= per_group * moe.top_groups:
        raise InvalidConfig(
            f"{path}: {moe.top_k} experts a token cannot be chosen from {moe.top_groups} of {moe.num_groups} groups of "
            f"{moe.num_experts} experts in all"
        )
    return moe


def read_generation_config(file: Path) -> dict[str, Any]:
    """Read a generation_config.json; empty without one. Raises: InvalidConfig, naming the file."""
    try:
        config = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"model.path: {file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidConfig(f"model.path: {file} holds no settings of a model")
    return config
