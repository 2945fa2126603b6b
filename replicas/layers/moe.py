"""A mixture of experts in place of a block's MLP: each token is computed by the few experts that a router chooses.

Owns:      the choice (softmax or sigmoid scores, groups, a bias on the choice, normalising, scaling); which part of
           each expert's weights a rank keeps; the expert that computes every token, where there is one.
Never:     multiplies: kernels/experts does, on a CPU by packed weights, and on a GPU; nor drops a token: an expert
           takes all rows that come.
Invariant: a token's result does not depend on the other tokens of a step. Routing is a step function, so the router's
           product is in fp32 by a weight that is never rounded, and ranks add their parts in one order.
Source:    Shazeer et al. 2017 (arXiv:1701.06538); DeepSeek-V2, section 2.2.2 (arXiv:2405.04434); DeepSeek-V3, section
           2.1.2 (arXiv:2412.19437); Jiang et al. 2024 (arXiv:2401.04088).

    x [T, H] -> router -> ids, weights [T, top_k] -> rows sorted by expert [T top_k, H] -> gate and up -> SiLU -> down
    -> sum of a token's rows, times their weights, + shared expert -> sum over ranks
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from replicas.config import MoEConfig
from replicas.kernels.experts.grouped import GroupedKernel, SortedRows, weighted_sum
from replicas.kernels.experts.routing import TINY, route
from replicas.kernels.panels import Packs, Rows, make
from replicas.kernels.weight_formats import WeightFormat
from replicas.layers.layer import Layer, Piece, Put, Whole
from replicas.layers.linear import GatedMLP, Matmul, add_over_ranks, grouped_kernel, share, silu_mul
from replicas.layers.tp_group import TpGroup

NAMES = ("gate_proj", "up_proj", "down_proj")
ALWAYS = MoEConfig(num_experts=1, top_k=1, intermediate_size=0, scoring="sigmoid")  # the choice of one, with its weight


def choose(logits: Tensor, bias: Tensor | None, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """Choose each token's experts, by descending score.

    Args:    logits: [T, E] fp32; bias: [E] fp32, added to the scores for the choice alone.
    Returns: ids [T, top_k] int64, and their weights [T, top_k] fp32.
    """
    if logits.device.type != "cpu":
        return choose_by_pytorch(logits, bias, config)
    return route(
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


def choose_by_pytorch(logits: Tensor, bias: Tensor | None, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """Choose as `choose` does, on any device; the last bit of a score may depend on the number of rows."""
    scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(dim=-1)
    ranked = scores if bias is None else scores + bias
    if config.top_groups < config.num_groups:
        groups = ranked.view(len(ranked), config.num_groups, -1)  # [T, G, E / G]
        best = groups.amax(dim=-1) if config.group_score == "max" else groups.topk(2, dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(config.top_groups, dim=-1).indices, True)
        ranked = groups.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)
    ids = ranked.topk(config.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if config.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
    return ids, weights * config.scaling


class ExactLinear(Layer):
    """A small product in fp32 by a weight [out, in] that is not rounded, whatever the format of others; whole on every
    rank."""

    def __init__(self) -> None:
        self._loaded: Tensor | None = None  # until finalize
        self._matmul = Matmul()

    def slots(self) -> Mapping[str, Put]:
        return {"weight": self.put}

    def put(self, tensor: Tensor) -> None:
        self._loaded = tensor

    def finalize(self, device: torch.device, dtype: torch.dtype, packs: Packs = make) -> None:
        assert self._loaded is not None, "no weight was put"
        weight = self._loaded.to(device, dtype).float()
        if device.type == "cpu":
            self._matmul.prepare(lambda: weight, None, packs)
        else:
            self._matmul.keep(weight, None)
        self._loaded = None

    @property
    def num_bytes(self) -> int:
        return self._matmul.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, in] into [T, out] fp32."""
        return self._matmul(x.float())


class Gate(ExactLinear):
    """The scores of the experts, and the choice by them."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
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
        self._weight: Tensor | None = None  # [E, out, in] on a GPU

    def multiply_by(self, format_: WeightFormat, *, one_order: bool) -> None:
        fits = Rows(list(self._pieces.values())).fits if self._pieces and format_ == "float32" else None
        self._format = fits or format_

    def slots(self) -> Mapping[str, Put]:
        return {self._key(e, name): self._putter(e, name) for e in range(self._number) for name in self._names}

    def wholes(self) -> Mapping[str, Whole]:
        return {self._prefix + self._stacked: Whole(self._put_stacked, tuple(self.slots()))}

    def _key(self, expert: int, name: str) -> str:
        return f"{self._prefix}{expert}.{name}.weight"

    def _putter(self, expert: int, name: str) -> Put:
        def put(tensor: Piece) -> None:
            length = share(tensor.shape[self._dim], self._tp.size, f"an expert's {name}")
            self._pieces[expert, name] = tensor.narrow(self._dim, self._tp.rank * length, length)

        return put

    def _put_stacked(self, tensor: Tensor) -> None:
        for expert, whole in enumerate(tensor):
            for name, part in zip(self._names, whole.chunk(len(self._names)), strict=True):
                self._putter(expert, name)(part)

    def finalize(self, device: torch.device, dtype: torch.dtype, packs: Packs = make) -> None:
        missing = self._number * len(self._names) - len(self._pieces)
        assert not missing, f"{missing} weights of experts were not put"
        if device.type == "cpu":
            self._kernel = grouped_kernel(self._weights(), self._format, self._number, packs, dtype)
        else:
            for expert, weight in enumerate(self._weights()):
                if self._weight is None:
                    self._weight = torch.empty(self._number, *weight.shape, dtype=dtype, device=device)
                self._weight[expert].copy_(weight[:])  # one after the other: no second copy of them all
        self._pieces.clear()

    def _weights(self) -> Iterator[Rows]:
        """Yield each expert's weight [out, in] on this rank."""
        for expert in range(self._number):
            yield Rows([self._pieces[expert, name] for name in self._names])

    @property
    def num_bytes(self) -> int:
        held = 0 if self._weight is None else self._weight.nbytes
        return held + (0 if self._kernel is None else self._kernel.num_bytes)

    @property
    def kernel(self) -> GroupedKernel:
        """The product on a CPU."""
        assert self._kernel is not None, "finalize() comes before the first call"
        return self._kernel

    @property
    def weight(self) -> Tensor:
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

            return on_gpu.gated_experts(x, ids, weights, self.gate_up.weight, self.down.weight)
        rows = SortedRows.of(ids)
        gated = silu_mul(self.gate_up.kernel(x.index_select(0, rows.tokens), rows))
        return weighted_sum(self.down.kernel(gated, rows), rows.places, weights)
