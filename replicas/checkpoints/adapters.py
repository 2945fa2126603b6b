"""What an adapter's folder holds (LoRA, as PEFT writes it): adapter_config.json and adapter_model.safetensors.

Owns:      which adapters are read, their identity, and the bounds on them.
Never:     reads other files than those two; knows more of a model than the shapes of its weights.
Invariant: the identity is that of the very bytes that are checked and read. No message names more of a path than its
           last part: clients see them. What is wrong with them is an
           `InvalidAdapter` that says what; that they are not to be had here, an `AdapterNotReadable`.
Source:    Hu et al. 2021 (LoRA, arXiv:2106.09685); Kalajdzievski 2023 (rsLoRA, arXiv:2312.03732); names and settings
           are PEFT's.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from replicas.config import AdapterLimits
from replicas.errors import AdapterNotReadable, InvalidAdapter

Floats = npt.NDArray[np.float32]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
USUAL = AdapterLimits()
MAX_CONFIG_BYTES = 1 << 20
_NAME = re.compile(r"base_model\.model\.([\w.]{1,256})\.lora_([AB])\.weight")
_FLOATS: Mapping[str, Callable[[bytes], Floats]] = {
    "F32": lambda data: np.frombuffer(data, np.dtype("<f4")),
    "F16": lambda data: np.frombuffer(data, np.dtype("<f2")).astype(np.float32),
    "BF16": lambda data: (np.frombuffer(data, np.dtype("<u2")).astype(np.uint32) << 16).view(np.float32),
}
# settings with which an adapter computes something else, and their values that change nothing
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "use_qalora": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", "mica"),  # others change the base
    "arrow_config": (None,),
    "use_bdlora": (None,),
    "monteclora_config": (None,),
    "kasa_config": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """An adapter without its numbers."""

    identity: str  # SHA-256 over both files
    rank: int
    alpha: float
    scale: float  # of what its products add
    targets: tuple[str, ...]  # the last names of the layers that it adds to, as "q_proj"; sorted
    num_bytes: int  # of its weights in fp32; a replica takes half of that where bfloat16 holds them, and pads them
    base: str  # the model that it says it was made for; "" if it does not say


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterWeights:
    """An adapter's numbers, by the name of the layer that they add to: y += B (A x)."""

    info: AdapterInfo
    pairs: Mapping[str, tuple[Floats, Floats]]  # A [rank, in], B [out, rank] times the scale


Shapes = Mapping[str, tuple[int, int]]  # (out, in) of weights, by name


def identify(folder: Path, limits: AdapterLimits = USUAL, fits: Shapes | None = None) -> AdapterInfo:
    """Check an adapter's files, and say what they hold; without torch, in about a second for each GB.

    Args:   fits: the weights of a model that adapters can add to (`ModelConfig.adaptable`); None: any.
    Raises: InvalidAdapter, AdapterNotReadable.
    """
    info, tensors = _parse(folder, _files(folder, limits), limits)
    if fits is not None:
        _require_fits(folder, info, tensors, fits)
    for (layer, part), tensor in tensors.items():
        _values(folder, layer, part, tensor, info.scale)
    return info


def load(folder: Path, identity: str, limits: AdapterLimits = USUAL) -> AdapterWeights:
    """Read the adapter ``identity``. Raises: InvalidAdapter; AdapterNotReadable, also if it is gone or has changed."""
    try:
        files = _files(folder, limits)
    except InvalidAdapter as error:  # what a router has seen there was another one
        raise AdapterNotReadable(str(error)) from error
    if files.identity != identity:
        raise AdapterNotReadable(
            f"adapter: {folder.name} has changed: {identity[:12]} is wanted, it holds {files.identity[:12]}. Load it "
            "again under its name: new requests get what it holds now"
        )
    info, tensors = _parse(folder, files, limits)
    pairs: dict[str, list[Floats]] = {}
    for (layer, part), tensor in sorted(tensors.items()):  # A before B
        pairs.setdefault(layer, []).append(_values(folder, layer, part, tensor, info.scale))
    return AdapterWeights(info=info, pairs={layer: (a, b) for layer, (a, b) in pairs.items()})


_Tensor = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes
_Tensors = dict[tuple[str, str], _Tensor]  # by layer, and A or B


class _Files(NamedTuple):
    """The bytes of an adapter."""

    identity: str
    config: bytes
    weights: bytes


def _files(folder: Path, limits: AdapterLimits) -> _Files:
    config, weights = _read(folder / CONFIG, MAX_CONFIG_BYTES), _read(folder / WEIGHTS, limits.max_bytes)
    digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    digest.update(weights)
    return _Files(digest.hexdigest(), config, weights)


def _parse(folder: Path, files: _Files, limits: AdapterLimits) -> tuple[AdapterInfo, _Tensors]:
    config, tensors = _config(folder, files.config), _tensors(folder, files.weights)
    rank = _number(folder, config, "r")
    _require(
        folder, rank == int(rank) and 1 <= rank <= limits.max_rank, f"r is {rank:g}: 1 to {limits.max_rank} may be"
    )
    for layer in sorted({layer for layer, _ in tensors}):
        a, b = (tensors.get((layer, part), ("", (), b""))[1] for part in "AB")
        whole = len(a) == len(b) == 2 and a[0] == b[1] == rank and min(*a, *b) > 0
        _require(
            folder, whole, f"lora_A and lora_B of {layer} are {a} and {b}: ({rank:g}, in) and (out, {rank:g}) must be"
        )
    num_bytes = sum(4 * math.prod(shape) for _, shape, _ in tensors.values())
    most = limits.host_bytes
    _require(folder, num_bytes <= most, f"it takes {num_bytes:,} bytes in fp32, adapters.host_bytes is {most:,}")
    alpha = _number(folder, config, "lora_alpha")
    info = AdapterInfo(
        identity=files.identity,
        rank=int(rank),
        alpha=alpha,
        scale=alpha / (math.sqrt(rank) if config.get("use_rslora") is True else rank),
        targets=_last_names(layer for layer, _ in tensors),
        num_bytes=num_bytes,
        base=str(config.get("base_model_name_or_path") or ""),
    )
    return info, tensors


def _values(folder: Path, layer: str, part: str, tensor: _Tensor, scale: float) -> Floats:
    """Read the numbers of a tensor, of B times the scale. Raises: InvalidAdapter for those that are none."""
    dtype, shape, data = tensor
    values = _FLOATS[dtype](data).reshape(shape)
    if part == "B":
        with np.errstate(over="ignore"):
            values = values * np.float32(scale)
    what = f"the weights of {layer} hold NaN or inf, B when it is scaled by {scale:g}: train or fetch it anew"
    _require(folder, bool(np.isfinite(values).all()), what)
    return values


def _require_fits(folder: Path, info: AdapterInfo, tensors: _Tensors, fits: Shapes) -> None:
    made_for = f" (it says that it was made for {info.base[:100]!r})" if info.base else ""
    strange = sorted({layer for layer, _ in tensors} - fits.keys())
    if strange:
        can = f"of its blocks {', '.join(_last_names(fits))} can" if fits else "no layer of it can"
        problem = f"{strange[0]} ({len(strange)} in all) cannot be changed by an adapter in this model: {can}{made_for}"
        raise InvalidAdapter(f"adapter: {folder.name}: {problem}")
    for layer in sorted({layer for layer, _ in tensors}):
        shape = tensors[layer, "B"][1][0], tensors[layer, "A"][1][1]
        problem = f"it has {layer} as {shape} (out, in), this model as {fits[layer]}: it is another model's{made_for}"
        _require(folder, shape == fits[layer], problem)


def _read(file: Path, most: int) -> bytes:
    try:
        size = file.stat().st_size if file.is_file() else -1
        if size < 0:
            raise InvalidAdapter(
                f"adapter: {file.parent.name} has no {file.name}: save it with PEFT's save_pretrained, in safetensors"
            )
        if size > most:
            problem = f"{file.name} has {size:,} bytes: at most {most:,} are read"
            raise InvalidAdapter(f"adapter: {file.parent.name}: {problem}")
        with file.open("rb") as opened:
            return opened.read(most)
    except ValueError as error:  # a NUL in its name
        raise InvalidAdapter(f"adapter: {file.parent.name!r} cannot be read: {error}") from error
    except OSError as error:
        raise AdapterNotReadable(
            f"adapter: {file.parent.name}: {file.name} cannot be read: {error.strerror}"
        ) from error


def _config(folder: Path, raw: bytes) -> dict[str, Any]:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter(f"adapter: {folder.name}: {CONFIG} is no JSON: {error!s:.200}") from error
    _require(folder, isinstance(config, dict) and config.get("peft_type") == "LORA", "peft_type must be LORA")
    for name, plain in _PLAIN.items():
        value = config.get(name)
        _require(
            folder,
            value is None or value in plain,
            f"{name} is {value!r:.60}, which is not supported: train with {name}={plain[0]!r}",
        )
    assert isinstance(config, dict)
    return config


def _number(folder: Path, config: Mapping[str, Any], name: str) -> float:
    value = config.get(name)
    fine = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6
    _require(folder, fine, f"{name} is {value!r:.60}: a positive number is wanted")
    return float(value)  # type: ignore[arg-type]  # checked


def _tensors(folder: Path, raw: bytes) -> _Tensors:
    try:
        found = deserialize(raw)  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError, OverflowError) as error:
        problem = f"{WEIGHTS} is no safetensors file: {error}. Fetch it again"
        raise InvalidAdapter(f"adapter: {folder.name}: {problem}") from error
    tensors: _Tensors = {}
    for name, spec in found:
        match, dtype = _NAME.fullmatch(name), spec["dtype"]
        _require(folder, match is not None, f"{name!r:.120} is no weight of LoRA's: lora_A and lora_B of layers are")
        _require(folder, dtype in _FLOATS, f"{name} is in {dtype}: one of {', '.join(_FLOATS)} is wanted")
        assert match is not None
        tensors[match[1], match[2]] = dtype, tuple(spec["shape"]), spec["data"]
    _require(folder, bool(tensors), "it holds no weights")
    return tensors


def _last_names(layers: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({layer.rpartition(".")[2] for layer in layers}))


def _require(folder: Path, fine: bool, problem: str) -> None:
    if not fine:
        raise InvalidAdapter(f"adapter: {folder.name}: {problem}")
