"""A mixture of experts in place of a block's MLP: each token is computed by the few experts that a router chooses.

Owns:      the choice (softmax or sigmoid scores, groups, a bias on the choice, normalising, scaling); which part of
           each expert's weights a rank keeps; the expert that computes every token, where there is one.
Never:     multiplies: kernels/experts does, on a CPU by packed weights, and on a GPU; nor drops a token: an expert
           takes all rows that come.
Invariant: a token's result does not depend on the other tokens of a step. Routing is a step function, so the router's
           product is in fp32 by a weight that is never rounded, and ranks add their parts in one order.
Source:    Shazeer et al. 2017 (arXiv:1701.06538); DeepSeek-V2, section 2.2.2 (arXiv:2405.04434); DeepSeek-V3, section
           2.1.2 (arXiv:2412.19437); Jiang et al. 2024 (arXiv:2401.04088); OpenAI 2025 (arXiv:2508.10925).

    x [T, H] -> router -> ids, weights [T, top_k] -> rows sorted by expert [T top_k, H] -> gate and up -> SiLU -> down
    -> sum of a token's rows, times their weights, + shared expert -> sum over ranks
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from replicas.config import MoEConfig
from replicas.errors import InvalidConfig
from replicas.kernels import elementwise
from replicas.kernels.experts.grouped import GroupedKernel, SortedRows, weighted_sum
from replicas.kernels.experts.routing import route
from replicas.kernels.panels import Packs, Rows, make
from replicas.kernels.weight_formats import WeightFormat
from replicas.layers.layer import Layer, Piece, Put, Whole
from replicas.layers.linear import GatedMLP, Matmul, add_over_ranks, grouped_kernel, share, silu_mul
from replicas.layers.tp_group import TpGroup

if TYPE_CHECKING:
    from replicas.kernels.experts.fp8 import Weight8

NAMES = ("gate_proj", "up_proj", "down_proj")
ALWAYS = MoEConfig(num_experts=1, top_k=1, intermediate_size=0, scoring="sigmoid")  # the choice of one, with its weight


def choose(logits: Tensor, bias: Tensor | None, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """Choose each token's experts, by descending score.

    Args:    logits: [T, E] fp32; bias: [E] fp32, added to the scores for the choice alone.
    Returns: ids [T, top_k] int64, and their weights [T, top_k] fp32.
    """
    chosen_by = route
    if logits.device.type != "cpu":
        from replicas.kernels.experts import on_gpu

        chosen_by = on_gpu.route
    return chosen_by(
        logits,
        bias,
        top_k=config.top_k,
        groups=config.num_groups,
        top_groups=config.top_groups,
        two=config.group_score == "top2",
        sigmoid=config.scoring == "sigmoid",
        normalize=config.normalize,
        scaling=config.scaling,
    )


class ExactLinear(Layer):
    """A small product in fp32 by a weight [out, in] that is not rounded, whatever the format of others; whole on every
    rank."""

    def __init__(self, *, bias: bool = False) -> None:
        self._names = ("weight", "bias") if bias else ("weight",)
        self._loaded: dict[str, Tensor] = {}  # until finalize
        self._matmul = Matmul()

    def slots(self) -> Mapping[str, Put]:
        return {name: functools.partial(self._loaded.__setitem__, name) for name in self._names}

    def finalize(self, device: torch.device, dtype: torch.dtype, packs: Packs = make) -> None:
        assert len(self._loaded) == len(self._names), "no weight was put"
        weight, *biases = (self._loaded[name].to(device, dtype).float() for name in self._names)
        bias = biases[0] if biases else None
        if device.type == "cpu":
            self._matmul.prepare(lambda: weight, bias, packs)
        else:
            self._matmul.keep(weight, bias)
        self._loaded.clear()

    @property
    def num_bytes(self) -> int:
        return self._matmul.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, in] into [T, out] fp32."""
        return self._matmul(x.float())


class Gate(ExactLinear):
    """The scores of the experts, and the choice by them."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(bias=config.biases)
        self._config = config
        self._bias: Tensor | None = None  # [E] fp32

    def slots(self) -> Mapping[str, Put]:
        return {**super().slots(), **({"e_score_correction_bias": self._put_bias} if self._config.score_bias else {})}

    def _put_bias(self, tensor: Tensor) -> None:
        self._bias = tensor

    def finalize(self, device: torch.device, dtype: torch.dtype, packs: Packs = make) -> None:
        super().finalize(device, dtype, packs)
        if self._bias is not None:
            self._bias = self._bias.to(device, torch.float32)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (0 if self._bias is None else self._bias.nbytes)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of x [T, H]: ids [T, top_k] int64, and their weights [T, top_k] fp32."""
        return choose(self(x), self._bias, self._config)


class ExpertsLinear(Layer):
    """A product by a weight of each of E experts, one below the other where several names see the same input. A rank
    has a share of every expert's inner size: of the outputs of gate and up, of the inputs of down.

    Checkpoints hold a tensor for each expert and name (``0.gate_proj.weight``), or one for all experts
    (``gate_up_proj`` [E, 2 I, H], ``down_proj`` [E, H, I]).
    """

    takes_stored = True

    def __init__(
        self, prefix: str, names: tuple[str, ...], stacked: str, *, dim: int, number: int, tp: TpGroup
    ) -> None:
        """``prefix``: of the names in the checkpoint; dim: of a weight [out, in], that ranks share."""
        self._prefix, self._names, self._stacked = prefix, names, stacked
        self._dim, self._number, self._tp = dim, number, tp
        self._pieces: dict[tuple[int, str], Piece] = {}  # (expert, name) -> this rank's slice, until finalize
        self._format: WeightFormat = "float32"
        self._kernel: GroupedKernel | None = None  # on a CPU
        self._weight: Tensor | Weight8 | None = None  # [E, out, in] on a GPU
        self.bias: Tensor | None = None  # [E, out] fp32 of this rank's share, where there is one (models/gpt_oss.py)

    def multiply_by(self, format_: WeightFormat, *, one_order: bool) -> None:
        fits = Rows(list(self._pieces.values())).fits if self._pieces else None
        # of 4 bits each, and exact in any dtype: to round them again would cost numbers, and save nothing
        self._format = fits if fits is not None and (fits == "mxfp4" or format_ == "float32") else format_

    def slots(self) -> Mapping[str, Put]:
        put = self._put_piece
        return {self._key(e, n): functools.partial(put, e, n) for e in range(self._number) for n in self._names}

    def wholes(self) -> Mapping[str, Whole]:
        return {self._prefix + self._stacked: Whole(self._put_stacked, tuple(self.slots()))}

    def _key(self, expert: int, name: str) -> str:
        return f"{self._prefix}{expert}.{name}.weight"

    def _put_piece(self, expert: int, name: str, tensor: Piece) -> None:
        length = share(tensor.shape[self._dim], self._tp.size, f"an expert's {name}")
        self._pieces[expert, name] = tensor.narrow(self._dim, self._tp.rank * length, length)

    def _put_stacked(self, tensor: Tensor) -> None:
        for expert, whole in enumerate(tensor):
            for name, part in zip(self._names, whole.chunk(len(self._names)), strict=True):
                self._put_piece(expert, name, part)

    def finalize(self, device: torch.device, dtype: torch.dtype, packs: Packs = make) -> None:
        missing = self._number * len(self._names) - len(self._pieces)
        assert not missing, f"{missing} weights of experts were not put"
        if device.type == "cpu":
            self._kernel = grouped_kernel(self._weights(), self._format, self._number, packs, dtype)
        else:
            self._weight = self._on_gpu(list(self._weights()), device, dtype)
        self._pieces.clear()

    def _on_gpu(self, weights: list[Rows], device: torch.device, dtype: torch.dtype) -> "Tensor | Weight8":
        """Bring the experts' weights to a GPU, one after the other: no second copy of them all."""
        from replicas.kernels.experts import fp8

        if all(fp8.keeps(each, device, rounds=self._format == "fp8") for each in weights):
            first = fp8.pack(weights[0], device, dtype)
            parts = [x.new_empty(self._number, *x.shape) for x in (first.numbers, first.scales)]
            for expert, each in enumerate(weights):
                one = fp8.pack(each, device, dtype)
                assert one.wide == first.wide, "experts are stored in one way"
                parts[0][expert], parts[1][expert] = one.numbers, one.scales
            return replace(first, numbers=parts[0], scales=parts[1])
        whole = torch.empty(self._number, *weights[0].shape, dtype=dtype, device=device)
        for expert, each in enumerate(weights):
            whole[expert].copy_(each[:])
        return whole

    def _weights(self) -> Iterator[Rows]:
        """Yield each expert's weight [out, in] on this rank."""
        for expert in range(self._number):
            yield Rows([self._pieces[expert, name] for name in self._names])

    @property
    def num_bytes(self) -> int:
        held = 0 if self._weight is None else self._weight.nbytes
        return held + (0 if self._kernel is None else self._kernel.num_bytes)

    def __call__(self, x: Tensor, rows: SortedRows) -> Tensor:
        """Multiply x [R, in], sorted as ``rows`` says, into [R, out], on a CPU."""
        assert self._kernel is not None, "finalize() comes before the first call"
        return self._kernel(x, rows)

    @property
    def weight(self) -> "Tensor | Weight8":
        """The weights [E, out, in] on a GPU."""
        assert self._weight is not None, "finalize() comes before the first call"
        return self._weight


class MoE(Layer):
    """The experts of one block. Names in checkpoints: ``gate`` (the router), ``experts``, ``shared_experts`` of
    DeepSeek's, ``shared_expert`` and ``shared_expert_gate`` of Qwen2-MoE's."""

    def __init__(self, config: MoEConfig, tp: TpGroup, *, names: tuple[str, str, str] = NAMES) -> None:
        """``names``: of an expert's gate, up and down in checkpoints."""
        number = config.num_experts
        self.gate = Gate(config)
        self.gate_up = ExpertsLinear("", names[:2], "gate_up_proj", dim=0, number=number, tp=tp)
        self.down = ExpertsLinear("experts.", names[2:], "down_proj", dim=1, number=number, tp=tp)
        self.shared = GatedMLP(tp=tp, bias=False) if config.shared_intermediate_size else None
        self.shared_gate = Gate(ALWAYS) if config.shared_gate else None
        self._tp = tp
        self._one_order = False

    def parts(self) -> Mapping[str, Layer]:
        shared: dict[str, Layer] = {}
        if self.shared is not None:
            shared["shared_experts" if self.shared_gate is None else "shared_expert"] = self.shared
        if self.shared_gate is not None:
            shared["shared_expert_gate"] = self.shared_gate
        return {"gate": self.gate, "experts": self.gate_up, "": self.down, **shared}

    def multiply_by(self, format_: WeightFormat, *, one_order: bool) -> None:
        self._one_order = one_order

    def __call__(self, x: Tensor) -> Tensor:
        """Run the experts on [T, hidden]."""
        part = self._routed(x, *self.gate.route(x))
        if self.shared is not None:
            of_all = self.shared.down.matmul(silu_mul(self.shared.gate_up(x)))
            if self.shared_gate is not None:
                of_all = of_all * self.shared_gate.route(x)[1].to(of_all.dtype)
            part += of_all
        return add_over_ranks(part, self._tp, one_order=self._one_order)

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum what a token's experts make of it, times their weights; of this rank's share of inner sizes."""
        if x.device.type != "cpu":
            from replicas.kernels.experts import on_gpu

            between = on_gpu.Between(self._gated, self.gate_up.bias, self.down.bias)
            return on_gpu.gated_experts(x, ids, weights, self.gate_up.weight, self.down.weight, between)
        rows = SortedRows.of(ids)
        gated = self._gated(self.gate_up(x.index_select(0, rows.tokens), rows))
        return weighted_sum(self.down(gated, rows), rows.places, weights)

    def _gated(self, gate_up: Tensor) -> Tensor:
        """Make the inner numbers [R, I] of [R, 2 I]."""
        return silu_mul(gate_up)


class BiasedExperts(ExpertsLinear):
    """A product by a weight of each of E experts, plus a bias. Checkpoints have one tensor for all: MXFP4's numbers
    [E, out, in], or floats [E, in, out]; and ``.._bias`` [E, out]."""

    def __init__(self, prefix: str, name: str, shape: tuple[int, int], *, dim: int, number: int, tp: TpGroup) -> None:
        """``shape``: of an expert's whole weight (out, in); others as of `ExpertsLinear`."""
        super().__init__(prefix, (name,), name, dim=dim, number=number, tp=tp)
        self._shape = shape

    def slots(self) -> Mapping[str, Put]:
        return {**super().slots(), f"{self._prefix}{self._stacked}_bias": self._put_bias}

    def wholes(self) -> Mapping[str, Whole]:
        return {self._prefix + self._stacked: Whole(self._put_stacked, tuple(super().slots()))}

    def _put_stacked(self, tensor: Piece) -> None:
        if isinstance(tensor, Tensor):
            pieces: list[Piece] = [each.T for each in tensor]
        else:
            rows = tensor.shape[0] // self._number
            pieces = [tensor.narrow(0, expert * rows, rows) for expert in range(self._number)]
        found = (len(pieces), *pieces[0].shape)
        if found != (wanted := (self._number, *self._shape)):
            raise InvalidConfig(
                f"model: {self._stacked} holds {found[0]} weights of {list(found[1:])}, config.json says {wanted[0]} "
                f"of {list(wanted[1:])}. The folder mixes two models: fetch it again"
            )
        for expert, piece in enumerate(pieces):
            self._put_piece(expert, self._stacked, piece)

    def _put_bias(self, tensor: Tensor) -> None:
        if self._dim == 0:
            length = self._shape[0] // self._tp.size
            self.bias = tensor.narrow(1, self._tp.rank * length, length)
        elif self._tp.rank == 0:
            self.bias = tensor  # added once

    def finalize(self, device: torch.device, dtype: torch.dtype, packs: Packs = make) -> None:
        super().finalize(device, dtype, packs)
        if self.bias is not None:
            self.bias = self.bias.to(device, dtype).float().contiguous()

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor, rows: SortedRows) -> Tensor:
        out = super().__call__(x, rows)
        if self.bias is not None:
            out += self.bias[torch.from_numpy(np.repeat(rows.experts, np.diff(rows.starts)))]
        return out


class ClampedMoE(MoE):
    """The experts of one block of gpt-oss, with biases and a clamped gate. Gate and up alternate in the rows of
    ``gate_up_proj``, so a rank's share has pairs."""

    def __init__(self, config: MoEConfig, hidden: int, tp: TpGroup) -> None:
        super().__init__(config, tp)
        assert config.swiglu is not None, "its gate is clamped"
        inner, number = config.intermediate_size, config.num_experts
        self._limit, self._alpha = config.swiglu
        self.gate_up = BiasedExperts("", "gate_up_proj", (2 * inner, hidden), dim=0, number=number, tp=tp)
        self.down = BiasedExperts("experts.", "down_proj", (hidden, inner), dim=1, number=number, tp=tp)

    def parts(self) -> Mapping[str, Layer]:
        return {"router": self.gate, "experts": self.gate_up, "": self.down}

    def _gated(self, gate_up: Tensor) -> Tensor:
        if elementwise.serves(gate_up, halves=True):
            return elementwise.clamped_swiglu(gate_up, self._limit, self._alpha)
        gate, up = gate_up[:, ::2].clamp(max=self._limit), gate_up[:, 1::2].clamp(-self._limit, self._limit)
        return (up + 1).mul_(gate * torch.sigmoid(gate * self._alpha))
