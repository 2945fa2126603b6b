"""The ways in which libraries store a quantised weight in safetensors, by the names of its parts. To add one, give
`METHODS` an entry.

Owns:      which ``quant_method`` of config.json is read, and what is said of those that are not; the order in which
           each library packs numbers into words.
Never:     opens files (safetensors_files.py does).
Invariant: parts that do not fit each other, or are missing, are an InvalidConfig that names the weight.
Source:    GPTQ: Frantar et al. 2023 (arXiv:2210.17323), as AutoGPTQ packs it; AWQ: Lin et al. 2024 (arXiv:2306.00978),
           AutoAWQ's GEMM order; compressed-tensors' pack-quantized, int-quantized and float-quantized; fp8 as
           DeepSeek-V3 (arXiv:2412.19437, blocks of 128 x 128) and Transformers' FineGrainedFP8 store it; mxfp4 as
           gpt-oss is published: experts' weights in the numbers of OCP's Microscaling Formats (MX) v1.0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replicas.checkpoints.stored import Floats4, Floats8, Integers, WeightSource
from replicas.errors import InvalidConfig
from replicas.kernels.weight_formats import GROUP, WeightFormat

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of eight, that lies in each four bits of a word from the lowest on
Parts = Mapping[str, Tensor]  # what lies in the file for one weight, by the last part of its name


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How one checkpoint stores its quantised weights."""

    about: str  # for people: "GPTQ, 4 bits, groups of 128"
    main: tuple[str, ...]  # parts of which one is there for a quantised weight; "weight" only beside a scale
    beside: tuple[str, ...]  # parts that belong to it
    read: Callable[[str, Parts], WeightSource]  # weight's name, its parts
    fits: WeightFormat | None = None  # the panels that hold such weights as they are, unless a scale is too fine
    joint: str = "."  # between a weight's name and its part's; "_": the weight has no ".weight" at its end
    of_experts: bool = False  # only experts' weights are stored so; the others are plain

    def may_store(self, name: str, parts: Parts) -> bool:
        """Tell whether a tensor of this name, with these parts in the files, is a weight that may be quantised."""
        if self.joint == ".":
            return name.rpartition(".")[2] == "weight"
        return not parts.keys().isdisjoint((*self.main, *self.beside))


@dataclass(frozen=True, slots=True)
class QuantMethod:
    """What one ``quant_method`` of config.json means: which method reads its weights, and in which forms."""

    choose: Callable[[str, Mapping[str, Any]], Method]  # from the folder, for messages, and ``quantization_config``
    forms: str = ""  # those of it that are read, for people; "": all


def method_of(where: str, config: Mapping[str, Any]) -> Method:
    """Choose how to read weights by ``quantization_config`` of config.json. ``where``: the folder, for messages.

    Raises: InvalidConfig for every other method, with those that are read.
    """
    name = str(config.get("quant_method") or "?").replace("_", "-").lower()
    if name not in METHODS:
        supported = ", ".join(f"{each} ({has.forms})" if has.forms else each for each, has in METHODS.items())
        alone = " bitsandbytes' numbers are for its own kernels." if name in ("bitsandbytes", "bnb") else ""
        raise InvalidConfig(
            f"model: {where} is quantized by {name!r};{alone} supported: {supported}; and GGUF files. "
            "Serve the model's unquantized checkpoint (model.quantization: int8 or int4 rounds it when it is loaded), "
            "or one of these"
        )
    return METHODS[name].choose(where, config)


def _refuse(where: str, what: str, wanted: str) -> InvalidConfig:
    return InvalidConfig(f"model: {where}: its quantization_config has {what}; supported: {wanted}")


def _part(weight: str, parts: Parts, name: str) -> Tensor:
    if name not in parts:
        raise InvalidConfig(
            f"model: {weight} lacks its part {name!r}; there is: {', '.join(sorted(parts))}. The checkpoint is "
            "incomplete, or not of the method that its config.json says: fetch it again"
        )
    return parts[name]


def _fit(weight: str, name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if tuple(shape) != wanted:
        raise InvalidConfig(
            f"model: {weight}: part {name!r} has shape {list(shape)}, wanted {list(wanted)} beside its other parts. "
            "The checkpoint mixes two models, or its config.json is another one's"
        )


def _unpacked(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unpack int32 words [R, C], the lowest bits first: uint8 [R, C * 32 / bits]."""
    shifts = torch.tensor(range(0, 32, bits), dtype=torch.int32)
    numbers = (words.unsqueeze(2) >> shifts).bitwise_and_((1 << bits) - 1).to(torch.uint8)
    if order is not None:
        numbers = numbers[:, :, torch.tensor(order).argsort()]
    return numbers.flatten(1)


def _groups_of(group_size: int) -> str:
    return "a group a row" if group_size <= 0 else f"groups of {group_size}"


def _gptq(where: str, config: Mapping[str, Any]) -> Method:
    bits, size = int(config.get("bits", 0)), int(config.get("group_size", -1))
    if bits not in (4, 8):
        raise _refuse(where, f"bits {bits} of GPTQ", "4 and 8")
    form = str(config.get("checkpoint_format") or "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise _refuse(where, f"checkpoint_format {form!r}", "gptq, gptq_v2")
    offset, pack, symmetric = (1 if form == "gptq" else 0), 32 // bits, bool(config.get("sym", True))

    def read(weight: str, parts: Parts) -> WeightSource:
        words, scales, zeros = (_part(weight, parts, name) for name in ("qweight", "scales", "qzeros"))
        k, (num_groups, n) = words.shape[0] * pack, scales.shape
        _fit(weight, "qweight", words.shape, (k // pack, n))
        _fit(weight, "qzeros", zeros.shape, (num_groups, -(-n // pack)))
        less = _less(_unpacked(zeros, bits)[:, :n], bits, offset) if symmetric else offset

        def zeros_of(start: int, stop: int) -> Tensor:
            # v1 stores one less, so the largest stands for 0
            first, last = start // pack, -(-stop // pack)
            some = _unpacked(zeros[:, first:last], bits)[:, start - first * pack : stop - first * pack]
            return (some.int() + less).bitwise_and_((1 << bits) - 1).T

        return Integers(
            shape=(n, k),
            bits=bits,
            numbers=lambda start, stop: _unpacked(words[:, start:stop].T.contiguous(), bits),
            scales=scales.T,
            zeros=zeros_of,
            group_of=_order(weight, parts, "g_idx", (k, num_groups)),
        )

    plain = symmetric and not config.get("desc_act", False) and (size <= 0 or size % GROUP == 0)
    order = ", act-order" if config.get("desc_act") else ""
    return Method(
        about=f"GPTQ, {bits} bits, {_groups_of(size)}{order}",
        main=("qweight",),
        beside=("qzeros", "scales", "g_idx"),
        read=read,
        fits=_panels(bits) if plain else None,
    )


def _less(stored: Tensor, bits: int, said: int) -> int:
    """Tell how much less than its zeros a symmetric weight stores. These are the middle number, so the numbers tell,
    whichever version of GPTQ the file names; ``said``: by that name, for others."""
    middle = 1 << (bits - 1)
    return next((less for less in (0, 1) if bool((stored == middle - less).all())), said)


def _panels(bits: int) -> WeightFormat:
    return "q4_1" if bits == 4 else "q8_0"


def _checked_groups(weight: str, group_of: Tensor, num_groups: int) -> Tensor | None:
    """Return each input's group; None where they are one after the other, as without it."""
    least, most, k = int(group_of.min()), int(group_of.max()), len(group_of)
    if least < 0 or most >= num_groups:
        named = least if least < 0 else most
        raise InvalidConfig(f"model: {weight}: g_idx names group {named}, there are {num_groups}")
    regular = k % num_groups == 0 and torch.equal(group_of, torch.arange(k) // (k // num_groups))
    return None if regular else group_of


def _awq(where: str, config: Mapping[str, Any]) -> Method:
    bits, size = int(config.get("bits", config.get("w_bit", 0))), int(config.get("group_size", -1))
    version = str(config.get("version", "gemm")).lower()
    if (bits, version) != (4, "gemm"):
        raise _refuse(where, f"{bits} bits of AWQ in version {version!r}", "4 bits in version 'gemm'")

    def read(weight: str, parts: Parts) -> WeightSource:
        words, scales, zeros = (_part(weight, parts, name) for name in ("qweight", "scales", "qzeros"))
        k, (num_groups, n) = words.shape[0], scales.shape
        _fit(weight, "qweight", words.shape, (k, n // 8))
        _fit(weight, "qzeros", zeros.shape, (num_groups, n // 8))
        if k % num_groups:
            raise InvalidConfig(f"model: {weight}: {num_groups} groups do not divide {k} inputs")

        def transposed(words: Tensor) -> Callable[[int, int], Tensor]:
            """Read columns [start, stop) as rows."""

            def rows(start: int, stop: int) -> Tensor:
                first, last = start // 8, -(-stop // 8)
                some = _unpacked(words[:, first:last].contiguous(), 4, AWQ_ORDER)
                return some[:, start - first * 8 : stop - first * 8].T.contiguous()

            return rows

        return Integers(shape=(n, k), bits=4, numbers=transposed(words), scales=scales.T, zeros=transposed(zeros))

    return Method(about=f"AWQ, 4 bits, {_groups_of(size)}", main=("qweight",), beside=("qzeros", "scales"), read=read)


def _compressed(where: str, config: Mapping[str, Any]) -> Method:
    groups = list((config.get("config_groups") or {}).values())
    weights = [group.get("weights") or {} for group in groups]
    kinds = {(str(each.get("type", "int")), int(each.get("num_bits", 0))) for each in weights}
    formats = {str(group.get("format") or config.get("format")) for group in groups}
    known = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"}
    sparse = (config.get("sparsity_config") or {}).get("format", "dense") not in ("dense", None)
    if not groups or not formats <= known or sparse or not kinds <= {("int", 4), ("int", 8), ("float", 8)}:
        raise _refuse(
            where,
            f"compressed-tensors in format {', '.join(sorted(formats)) or '?'} of "
            f"{', '.join(f'{kind} {bits}' for kind, bits in sorted(kinds)) or 'no weights'}",
            f"{', '.join(sorted(known))} of int 4, int 8 and float 8, not sparse",
        )
    bits = min(bits for _, bits in kinds)

    def read(weight: str, parts: Parts) -> WeightSource:
        scales = _part(weight, parts, "weight_scale")
        if "weight_packed" in parts:
            return _packed(weight, parts, scales)
        numbers = _part(weight, parts, "weight")
        if numbers.dtype in FLOAT8:
            return _float8(weight, numbers, scales, weights[0].get("block_structure"))
        if numbers.dtype != torch.int8:
            raise InvalidConfig(f"model: {weight} has a scale and numbers of {numbers.dtype}; supported: int8, float8")
        zeros = parts.get("weight_zero_point")
        shape = (int(numbers.shape[0]), int(numbers.shape[1]))
        wide = _by_row(weight, scales, shape)
        return Integers(
            shape=shape,
            bits=8,
            numbers=lambda start, stop: numbers[start:stop].view(torch.uint8) ^ 128,
            scales=wide,
            zeros=None if zeros is None else _signed_zeros(_by_row(weight, zeros, shape), 128),
            group_of=_order(weight, parts, "weight_g_idx", (shape[1], wide.shape[1])),
        )

    (kind, _), symmetric = sorted(kinds)[0], all(each.get("symmetric", True) for each in weights)
    sizes = [int(each.get("group_size") or -1) for each in weights]
    plain = kind == "int" and len(kinds) == 1 and symmetric and all(size <= 0 or size % GROUP == 0 for size in sizes)
    unrounded = " (activations are not rounded)" if any(group.get("input_activations") for group in groups) else ""
    unrounded = unrounded if kind == "int" else ""
    return Method(
        about=f"compressed-tensors, {'fp8' if kind == 'float' else f'{bits} bits, {_groups_of(sizes[0])}'}{unrounded}",
        main=("weight_packed", "weight"),
        beside=("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale", "input_zero_point"),
        read=read,
        fits="fp8" if kinds == {("float", 8)} else _panels(bits) if plain else None,
    )


def _packed(weight: str, parts: Parts, scales: Tensor) -> WeightSource:
    """Read numbers that are packed along the inputs, the middle number added to each."""
    words = parts["weight_packed"]
    n, k = (int(each) for each in _part(weight, parts, "weight_shape").tolist())
    bits = 8 if words.shape[1] == -(-k // 4) else 4
    pack = 32 // bits
    _fit(weight, "weight_packed", words.shape, (n, -(-k // pack)))
    wide, zeros = _by_row(weight, scales, (n, k)), None
    if "weight_zero_point" in parts:
        stored = parts["weight_zero_point"]
        if stored.dtype == torch.int32:  # packed along the outputs
            _fit(weight, "weight_zero_point", stored.shape, (-(-n // pack), wide.shape[1]))
            stored = _unpacked(stored.T.contiguous(), bits).T[:n].int() - (1 << (bits - 1))
        zeros = _signed_zeros(_by_row(weight, stored, (n, k)), 1 << (bits - 1))
    return Integers(
        shape=(n, k),
        bits=bits,
        numbers=lambda start, stop: _unpacked(words[start:stop], bits)[:, :k].contiguous(),
        scales=wide,
        zeros=zeros,
        group_of=_order(weight, parts, "weight_g_idx", (k, wide.shape[1])),
    )


def _signed_zeros(zeros: Tensor, middle: int) -> Callable[[int, int], Tensor]:
    return lambda start, stop: zeros[start:stop].int() + middle


def _by_row(weight: str, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """View values of a tensor [] or [1], of rows [N] or [N, 1], or of groups [N, G] as [N, G]."""
    n, k = shape
    if values.numel() == 1:
        return values.reshape(1, 1).expand(n, 1)
    table = values.reshape(n, 1) if values.shape == (n,) else values
    if table.dim() != 2 or table.shape[0] != n or not 1 <= table.shape[1] <= k:
        _fit(weight, "weight_scale", values.shape, (n, 1))
    return table


def _order(weight: str, parts: Parts, name: str, counts: tuple[int, int]) -> Tensor | None:
    """Return each input's group, of ``counts`` inputs and groups; None where they are one after the other. An order of
    -1 throughout is one that was never set."""
    (k, num_groups), group_of = counts, parts.get(name)
    if group_of is not None:
        _fit(weight, name, group_of.shape, (k,))
        if not bool((group_of == -1).all()):
            return _checked_groups(weight, group_of.long(), num_groups)
    if k % num_groups:
        raise InvalidConfig(f"model: {weight}: {num_groups} groups do not divide {k} inputs, and {name} gives no order")
    return None


def _fp8(where: str, config: Mapping[str, Any]) -> Method:
    block = config.get("weight_block_size")

    def read(weight: str, parts: Parts) -> WeightSource:
        numbers = _part(weight, parts, "weight")
        if numbers.dtype not in FLOAT8:
            raise InvalidConfig(f"model: {weight} has a scale and numbers of {numbers.dtype}; wanted float8")
        name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
        return _float8(weight, numbers, _part(weight, parts, name), block if name == "weight_scale_inv" else None)

    scale = "a scale a tensor" if not block else f"a scale for {block[0]} x {block[1]}"
    return Method(
        about=f"fp8, {scale}",
        main=("weight",),
        beside=("weight_scale_inv", "weight_scale", "input_scale", "activation_scale"),
        read=read,
        fits="fp8",
    )


def _float8(weight: str, numbers: Tensor, scales: Tensor, block: Any) -> WeightSource:
    n, k = (int(each) for each in numbers.shape)
    if scales.numel() == 1:
        return Floats8(numbers, scales.reshape(1, 1), (n, k))
    if scales.shape in ((n,), (n, 1)):
        return Floats8(numbers, scales.reshape(n, 1), (1, k))
    high, wide = (int(each) for each in block or (128, 128))
    _fit(weight, "scale", scales.shape, (-(-n // high), -(-k // wide)))
    return Floats8(numbers, scales, (high, wide))


def _mxfp4(where: str, config: Mapping[str, Any]) -> Method:
    def read(weight: str, parts: Parts) -> WeightSource:
        """Read the weights [E, N, K] of all experts, one below the other."""
        blocks, scales = _part(weight, parts, "blocks"), _part(weight, parts, "scales")
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise InvalidConfig(
                f"model: {weight} has blocks of {blocks.dtype} and scales of {scales.dtype}; MXFP4 has uint8 in both"
            )
        if blocks.dim() != 4:
            raise InvalidConfig(
                f"model: {weight}: part 'blocks' has shape {list(blocks.shape)}, wanted [experts, outputs, inputs / "
                f"{GROUP}, {GROUP // 2}]"
            )
        _fit(weight, "blocks", blocks.shape, (*scales.shape, GROUP // 2))
        return Floats4(weight, blocks.flatten(0, 1), scales.flatten(0, 1))

    return Method(
        about=f"MXFP4 experts, blocks of {GROUP}",
        main=("blocks",),
        beside=("scales",),
        read=read,
        fits="mxfp4",
        joint="_",
        of_experts=True,
    )


METHODS: dict[str, QuantMethod] = {
    "gptq": QuantMethod(_gptq),
    "awq": QuantMethod(_awq),
    "compressed-tensors": QuantMethod(_compressed, forms="pack-quantized, int-quantized, float-quantized"),
    "fp8": QuantMethod(_fp8),
    "mxfp4": QuantMethod(_mxfp4),
}
