"""What a model of Transformers asks of the engine, told by the model itself: its module is made on the meta device and
run once, without weights, and what its attention is called with is written down.

Owns:      which of Transformers' causal models can be served, and the words that refuse the others.
Never:     loads a weight, or runs code that comes with a checkpoint (``auto_map``).
Invariant: each call of attention in a forward pass has K and V of its own in the pool, in order of the calls; a model
           that gives a token's K and V more than once (shared layers, two halves of a head) is thus served as it is.
           What a module keeps of a text beside K and V is told too (models/states.py), with the module's name.
           What the outline cannot tell for certain is refused: a mask that is not one of AttentionKind's, an argument
           of attention that is not known here, a state that no module asks Transformers' cache for.
"""

import functools
import inspect
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.fx.experimental import _config as tracing
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    DynamicIndexedLayer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from replicas.config import AttentionKind, StateLayer
from replicas.errors import UnsupportedModel
from replicas.hf_config import Outline
from replicas.layers.tp_group import TpGroup
from replicas.models.sharding import NoPlan, shard, widths
from replicas.models.states import asking, cache_argument, layers_with_states, told_states

log = logging.getLogger(__name__)

OUTLINED = "manta_outlined"  # the attention function, and the mask function, of a model that is being outlined
TOKENS = 5  # of the forward pass
# arguments of attention functions that change nothing at inference
IGNORED = frozenset({
    "dropout", "use_cache", "position_ids", "cache_position", "output_attentions", "output_hidden_states", "layer_idx",
    "output_router_logits", "logits_to_keep", "return_dict", "deterministic", "num_items_in_batch", "is_training",
})  # fmt: skip
KEPT = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}  # in Transformers' cache: K and V, or nothing
ADVICE = "; no setting changes that: docs/architectures.md lists what is served"
COUNTS = "it counts the positions of its tokens itself, so a step cannot have those of several requests"
OWN_CODE = "its attention is code of its own in Transformers, whose K and V cannot be kept in pages"
KNOWN = IGNORED | {"scaling", "softcap", "s_aux", "sliding_window", "is_causal", "indices"}
UNTRACED = "Transformers' code for it does not run on this config.json with tokens alone"
BLOCKS = "blockwise_overlay"
MASKS = {"causal_mask_function", "sliding_window_overlay", "chunked_overlay"}


# families whose attention is a method ``_attn`` of its module: what an attention function would be called with
METHODS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "codegen": lambda part: {"scaling": 1 / part.scale_attn},
    "gpt_neo": lambda part: {
        "scaling": 1.0,
        "sliding_window": part.config.window_size if part.attention_type == "local" else None,
    },
    "gpt_neox_japanese": lambda part: {"scaling": 1 / part.norm_factor},
    "gptj": lambda part: {"scaling": 1 / part.scale_attn},
}


class _Refused(Exception):
    """Why the model is not served, in words that follow its name."""


@dataclass(slots=True, eq=False)
class _Calls:
    """What attention was called with, in order; every module of the outlined model points to it."""

    shapes: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)  # of q, k, v
    callers: list[nn.Module] = field(default_factory=list)
    kinds: list[AttentionKind] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Mask:
    """What a mask lets a token see, beside that it is causal."""

    window: int | None = None
    chunk: int | None = None
    causal: bool = True


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of a config that describes its language model."""
    return config.get_text_config(decoder=True)


def read(folder: Path) -> PreTrainedConfig:
    """Read the config of ``folder``. Raises: UnsupportedModel where Transformers has no code of its own for it."""
    try:
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        given = json.loads((folder / "config.json").read_text())
        if given.get("auto_map"):
            reason = "its code comes with the checkpoint (auto_map), and such code is never run here"
        else:
            kind = f"its config.json lacks {error}" if isinstance(error, KeyError) else str(error)
            both = given.get("rope_scaling") and given.get("rope_parameters")
            advice = "; it has both rope_scaling and rope_parameters: keep the one that is meant" if both else ""
            reason = f"{' '.join(kind.split())[:200]}{advice}"
        raise UnsupportedModel(f"{folder} cannot be served through Transformers: {reason}") from error


_told: dict[str, Outline] = {}  # of this process, by config: a start asks more than once


def outline(config: PreTrainedConfig, name: str) -> Outline:
    """Run the model of ``config`` on the meta device and tell its shape. ``name``: of its architecture, for errors.

    Raises: UnsupportedModel with the reason, for what cannot be served through Transformers.
    """
    key = f"{type(config).__name__} {config.to_json_string(use_diff=False)}"
    if key in _told:
        return _told[key]
    try:
        reason = _refused_by_config(config)
        if reason is None:
            return _told.setdefault(key, _outlined(config))
    except _Refused as refused:
        reason = str(refused)
    except ImportError as error:
        wanted = re.search(r"pip install [\w.\[\]-]+", str(error))
        what = f"is not installed: {wanted[0]}" if wanted else f"cannot be imported: {error}"
        raise UnsupportedModel(f"{name} cannot be served through Transformers: a package of its code {what}") from error
    except KeyError as error:
        reason = OWN_CODE if error.args == (OUTLINED,) else f"{UNTRACED}: KeyError: {error}"
    except Exception as error:  # noqa: BLE001 - of any model's code, which may fail in any way when it has no weights
        said = " ".join(str(error).split())[:200]
        reason = f"{UNTRACED}: {type(error).__name__}: {said}"
        if "meta tensor" in said:
            reason = (
                "its code branches on numbers that are there only while it runs, so what its attention asks for cannot "
                "be told before its weights are read"
            )
    raise UnsupportedModel(f"{name} cannot be served through Transformers: {reason}{ADVICE}")


def _refused_by_config(config: PreTrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder, and prompts here go to a decoder alone"
    if biased := _position_bias(config):
        return f"{OWN_CODE}{biased}"
    if causal_class(config) is None:
        return "Transformers has no causal language model for it"
    return None


def causal_class(config: PreTrainedConfig) -> Any:
    """Return Transformers' causal class for a config: by its type, or by the name that it gives; None without one."""
    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM._model_mapping[type(config)]
    name = (config.architectures or ["?"])[0]
    return getattr(transformers, name) if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else None


def _outlined(config: PreTrainedConfig) -> Outline:
    model, calls = _made(config), _Calls()
    states, index_dims = tuple[StateLayer, ...](), dict[str, int]()
    cache = DynamicCache(config=model.config)
    if layers_with_states(cache) or any(isinstance(layer, DynamicIndexedLayer) for layer in cache.layers):
        logits, states, index_dims = _run_asked(model, cache, calls)
    else:
        logits = _run(model, calls)
    heads = _heads(calls)
    differ = len({(q[1], k[1]) for q, k, _ in calls.shapes}) > 1
    plain = heads["head_dim"] ** -0.5
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    return Outline(
        **heads,
        num_calls=len(calls.shapes),
        kinds=tuple(replace(kind, scale=None) if kind.scale == plain else kind for kind in calls.kinds),
        vocab_size=logits.shape[-1],
        first_position=first_position(model),
        hidden_size=text_config(config).hidden_size,
        num_weights=num_weights,
        tp_sizes=(1,) if index_dims or differ else _tp_sizes(model, heads, states),
        states=states,
        indexes=tuple(index_dims),
        index_dim=max(index_dims.values(), default=0),
    )


def made_with(config: PreTrainedConfig, attention: str) -> str:
    """Return the name of the attention function that a model is made with, which `attend_by` replaces if need be."""
    return "eager" if config.model_type in METHODS else attention


def attend_by(model: PreTrainedModel, attention: str) -> None:
    """Have ``model`` call the function of this name, as others do, where its attention is a method of its modules."""
    arguments = METHODS.get(model.config.model_type)
    if arguments is None:
        return
    for part in model.modules():
        if hasattr(part, "_attn"):
            part._attn = functools.partial(_by_function, part, AttentionInterface()[attention], arguments(part))
    model.config._attn_implementation = attention  # of masks


def _by_function(
    part: nn.Module, function: Callable[..., Any], arguments: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, _: object
) -> tuple[Tensor, None]:
    """Attend in the place of a method, which takes a mask that is causal, and returns [1, H, T, D]."""
    out, _ = function(part, q, k, v, None, **arguments)
    return out.transpose(1, 2), None


def _made(config: PreTrainedConfig) -> PreTrainedModel:
    """Make the module of a config on the meta device; of a wrapper whose causal class is its text part's, that part."""
    kind, name = causal_class(config), made_with(config, OUTLINED)
    if kind.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    with torch.device("meta"):
        model = kind._from_config(config, attn_implementation=name, dtype=torch.bfloat16).eval()
    attend_by(model, OUTLINED)
    silence_padding(model)
    for rope in changing_ropes(model):
        rope.settle()  # it looks at its tokens' positions, which have no values here
    return model


@dataclass(frozen=True, slots=True)
class ChangingRope:
    """Rotary frequencies, of one type of layers or of all, that Transformers makes anew for a longer batch."""

    part: nn.Module
    layer_type: str | None

    def settle(self) -> None:
        """Keep the frequencies as they are now, for every batch."""
        if self.layer_type is None:
            self.part.__dict__["rope_type"] = "default"
        else:
            self.part.__dict__["rope_type"][self.layer_type] = "default"


def changing_ropes(model: nn.Module) -> list[ChangingRope]:
    """List those of ``model`` that are not settled."""
    found = []
    for part in model.modules():
        kinds: Any = getattr(part, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                found.append(ChangingRope(part, layer_type))
    return found


def _run(model: PreTrainedModel, calls: _Calls) -> Tensor:
    """Run a prompt of TOKENS; fills ``calls``. Returns: logits. Raises: _Refused."""
    for module in model.modules():
        module._manta = calls
    state = DynamicCache(config=model.config)
    _require_kv(state)
    if not takes_positions(model) and not counting(model):
        raise _Refused(COUNTS)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    # a loop over the experts that tokens have chosen goes over all of them: which they are, nobody knows here
    with torch.inference_mode(), tracing.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
        out = model(ids, position_ids=ids, past_key_values=state, use_cache=True)
    if not calls.shapes:
        raise _Refused(f"{OWN_CODE}{_position_bias(model.config)}")
    _require_kv(state)
    logits: Tensor = out.logits
    return logits


def _run_asked(
    model: PreTrainedModel, cache: DynamicCache, calls: _Calls
) -> tuple[Tensor, tuple[StateLayer, ...], dict[str, int]]:
    """Run a prompt of TOKENS through a model whose layers keep more than K and V. Returns: logits, states, and the
    modules that keep keys of an index, with the numbers of a key."""
    for module in model.modules():
        module._manta = calls
    model.requires_grad_(requires_grad=False)
    states = {type(cache.layers[number]).__name__ for number in layers_with_states(cache)}
    if states and any(isinstance(layer, DynamicIndexedLayer) for layer in cache.layers):
        raise _Refused("it keeps keys of an index beside recurrent states, and both together are not served")
    _require_kv(cache, KEPT | states | {DynamicIndexedLayer.__name__})
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    # a loop over the experts that tokens have chosen goes over all of them: which they are, nobody knows here
    with torch.no_grad(), asking(model) as asked, tracing.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
        named: dict[str, Any] = {"position_ids": ids} if takes_positions(model) else {}
        if argument := cache_argument(model.forward):
            named[argument] = asked
        out = model(ids, use_cache=False, **named)
    if missing := layers_with_states(cache) - set().union(*asked.layers_of.values()):
        raise _Refused(
            f"{len(missing)} of its layers keep their state in the module itself, where requests cannot be told apart"
        )
    if calls.shapes and not takes_positions(model):
        raise _Refused(COUNTS)
    if asked.index_dims and not any(kind.indexed for kind in calls.kinds):
        raise _Refused("its index makes a mask of its own, and does not tell attention which tokens it chose")
    if any(caller in list(model.get_submodule(name).modules()) for name in asked.told for caller in calls.callers):
        raise _Refused("its attention runs inside a module that keeps a state")
    logits: Tensor = out.logits
    return logits, told_states(model, asked), asked.index_dims


def _require_kv(state: DynamicCache, kept: Set[str] = KEPT) -> None:
    """Raise _Refused if a layer's state is more than K and V."""
    other = sorted({type(layer).__name__ for layer in state.layers} - kept)
    if other:
        raise _Refused(f"its layers keep a state that is no K and V ({', '.join(other)}), which pages cannot hold")


def _tp_sizes(model: PreTrainedModel, heads: dict[str, int], states: tuple[StateLayer, ...]) -> tuple[int, ...]:
    """Return the numbers of ranks that ``model``, which is left in parts, can be split over: the least of them is tried
    out. Attention has to see the rank's share of the heads, and modules keep the same ``states``: all of them."""
    try:
        cut = math.gcd(heads["num_heads"], heads["num_kv_heads"], *widths(model))
        sizes = [size for size in range(1, cut + 1) if cut % size == 0]
        if len(sizes) > 1:
            ranks, calls = TpGroup(0, sizes[1], device="meta"), _Calls()
            shard(model, ranks)
            if states and _run_asked(model, DynamicCache(config=model.config), calls)[1] != states:
                raise NoPlan("its plan cuts what a module keeps of a text")
            if not states:
                _run(model, calls)
            if _heads(calls)["num_kv_heads"] * ranks.size != heads["num_kv_heads"]:
                raise NoPlan("its plan leaves attention whole")
    except (NoPlan, _Refused, RuntimeError, ValueError, TypeError) as error:
        log.debug("%s: one rank, %s", type(model).__name__, error)
        return (1,)
    return tuple(sizes)


def first_position(model: PreTrainedModel) -> int:
    """Return the position of a text's first token: 0, but in RoBERTa's kin, where it is the one after the padding's."""
    counting = [part for part in model.modules() if hasattr(part, "create_position_ids_from_input_ids")]
    return int(counting[0].padding_idx) + 1 if counting else 0


def takes_positions(model: PreTrainedModel) -> bool:
    """Tell whether the forward pass takes the positions of its tokens."""
    return any("position_ids" in inspect.signature(part.forward).parameters for part in (model, model.base_model))


def counting(model: PreTrainedModel) -> list[nn.Module]:
    """List the embeddings of positions that count from the length of a cache, unless they are told (BART's decoder)."""
    told = {"past_key_values_length", "position_ids"}
    return [part for part in model.modules() if told <= set(inspect.signature(part.forward).parameters)]


def silence_padding(model: PreTrainedModel) -> None:
    """Keep a model from looking for padding in its input, which waits for the device: a packed batch has none."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _no_warning


def _no_warning(*_: object) -> None:
    """Say nothing."""


def _position_bias(config: PreTrainedConfig) -> str:
    text = text_config(config)
    biased = config.model_type in ("bloom", "mpt") or getattr(text, "alibi", False)
    return ", and has a bias for each position (ALiBi)" if biased else ""


def _heads(calls: _Calls) -> dict[str, int]:
    """Return the heads of a pool for all calls: where these differ, KV heads are repeated until as many query heads
    share one in each, and missing ones are zero (models/transformers.py brings a call's into this shape)."""
    if not calls.shapes:
        return {"num_heads": 1, "num_kv_heads": 1, "head_dim": 1}  # of no attention
    heads = {(q[1], k[1]) for q, k, _ in calls.shapes}
    for num_heads, num_kv_heads in heads:
        if num_heads % num_kv_heads:
            raise _Refused(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    group = math.gcd(*(num_heads // num_kv_heads for num_heads, num_kv_heads in heads))
    num_heads = max(num_heads for num_heads, _ in heads)
    head_dim = max(size for shapes in calls.shapes for size in (shapes[0][3], shapes[2][3]))
    return {"num_heads": num_heads, "num_kv_heads": num_heads // group, "head_dim": head_dim}


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Write down a call. Returns: what has the shape of attention's result, [1, T, H, D of values]."""
    calls: _Calls = module._manta  # type: ignore[assignment]
    shapes = tuple(tuple(x.shape) for x in (query, key, value))
    if any(len(shape) != 4 or shape[0] != 1 or shape[2] != TOKENS for shape in shapes) or shapes[0][3] != shapes[1][3]:
        raise _Refused(f"its attention is over something else than the tokens' own K and V: shapes {shapes}")
    calls.shapes.append(shapes)
    calls.callers.append(module)
    calls.kinds.append(_kind(module, attention_mask, query.shape[3], arguments))
    return query.new_empty(1, TOKENS, query.shape[1], value.shape[3]), None


def _kind(module: nn.Module, mask: Tensor | None, head_dim: int, arguments: dict[str, Any]) -> AttentionKind:
    unknown = sorted(
        name for name, value in arguments.items() if name not in KNOWN and value is not None and value is not False
    )
    if unknown:
        raise _Refused(f"its attention takes {', '.join(unknown)}, which no attention backend here has")
    if mask is None:
        causal = arguments.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise _Refused("its tokens see those that come after them")
        seen = _Mask(window=arguments.get("sliding_window"))
    else:
        marked: _Mask | None = getattr(mask, "_manta", None)
        if marked is None:
            raise _Refused("it makes the mask of its attention itself, and masks here are causal, windowed or chunked")
        if not marked.causal:
            raise _Refused("its tokens see those that come after them")
        seen = marked
    scale, soft_cap = arguments.get("scaling"), arguments.get("softcap")
    if isinstance(scale, Tensor) or isinstance(soft_cap, Tensor):
        raise _Refused("the scale of its attention is computed in each step")
    return AttentionKind(
        scale=head_dim**-0.5 if scale is None else float(scale),
        window=seen.window,
        chunk=seen.chunk,
        soft_cap=soft_cap,
        sinks=arguments.get("s_aux") is not None,
        indexed=arguments.get("indices") is not None,
    )


def _mask(*_: object, mask_function: Callable[..., Any], q_length: int, kv_length: int, **__: Any) -> Tensor:
    """Make a mask without numbers that says what the one of ``mask_function`` would let a token see."""
    window = chunk = None
    causal = True
    for name, values in _conditions(mask_function):
        causal = causal and name != "bidirectional_mask_function"  # refused where it is used: it may be an encoder's
        if causal and name not in MASKS:
            raise _Refused(f"its mask has a condition of its own ({name}), beyond causal, windowed or chunked")
        window, chunk = values.get("sliding_window", window), values.get("chunk_size", chunk)
    mask = torch.empty(1, 1, q_length, kv_length, device="meta", dtype=torch.bool)
    mask._manta = _Mask(window, chunk, causal)  # type: ignore[attr-defined]
    return mask


def _conditions(function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the conditions that a mask joins by "and", for a text: each function's name and the values it holds."""
    name, values = function.__qualname__.split(".")[0], dict(inspect.getclosurevars(function).nonlocals)
    if name not in ("and_masks", "or_masks"):
        yield name, values
        return
    parts = list(values["mask_functions"])
    if name == "or_masks":  # of a model that sees: an image's tokens see each other, and no text has any
        parts = [part for part in parts if part.__qualname__.split(".")[0] != BLOCKS]
        if len(parts) != 1:
            yield name, values
            return
    for part in parts:
        yield from _conditions(part)


AttentionInterface.register(OUTLINED, _attention)
AttentionMaskInterface.register(OUTLINED, _mask)
