"""Splits a model of Transformers over tensor-parallel ranks, as the plan in its config says.

Owns:      which of a plan's styles are followed, and each rank's slice of a weight.
Never:     uses Transformers' own parallel loading: that needs torch.distributed's default group, and our ranks meet in
           groups of their own.
Invariant: what a plan gathers again at once stays whole on every rank, as do embeddings and the head: the same numbers,
           at the price of memory. Row-parallel outputs are summed over ranks; a bias is added on rank 0 alone.
Source:    Shoeybi et al. 2019 (arXiv:1909.08053), section 3; `base_model_tp_plan` of Transformers' configs.
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from replicas.layers.tp_group import TpGroup

WHOLE = frozenset({"colwise_gather_output", "rowwise_split_input", "replicated_with_grad_allreduce", "replicate"})
CUT = frozenset({"colwise", "rowwise", "packed_colwise", "moe_tp_experts"})


class NoPlan(ValueError):
    """Why a model cannot be split, in words that follow its name."""


def widths(model: PreTrainedModel) -> list[int]:
    """Return the sizes that the plan cuts: each has to be a multiple of the number of ranks. Raises: NoPlan."""
    return [width for _, _, width in _cuts(model)]


def shard(model: PreTrainedModel, tp: TpGroup) -> None:
    """Keep this rank's slices of whole weights, and sum where the plan does. Raises: NoPlan."""
    for part, style, _ in list(_cuts(model)):
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, _slice(name, parameter, style, tp))
        if style != "colwise":
            part.register_forward_hook(lambda _, __, out: tp.all_reduce(out.contiguous()))


def _slice(name: str, whole: Tensor, style: str, tp: TpGroup) -> nn.Parameter | None:
    """Cut this rank's share of a Linear's parameter, or of experts': gate_up_proj [E, 2 I, H], down_proj [E, H, I]."""
    if style == "rowwise" and name == "bias":
        return nn.Parameter(whole, requires_grad=False) if tp.rank == 0 else None
    if name == "gate_up_proj":
        kept = torch.cat([_kept(half, 1, tp) for half in whole.chunk(2, dim=1)], dim=1)
    else:
        kept = _kept(whole, {"colwise": 0, "rowwise": 1}.get(style, 2), tp)
    return nn.Parameter(kept, requires_grad=False)


def _kept(whole: Tensor, dim: int, tp: TpGroup) -> Tensor:
    size = whole.shape[dim] // tp.size
    return whole.narrow(dim, tp.rank * size, size).clone()


def _cuts(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, int]]:
    """Yield what is cut: a Linear with its style and the size that is cut, or a module of experts. Raises: NoPlan."""
    plan = getattr(model.base_model.config, "base_model_tp_plan", None)
    if not plan:
        raise NoPlan("it has no tensor-parallel plan")
    unknown = sorted(set(plan.values()) - WHOLE - CUT)
    if unknown:
        raise NoPlan(f"its tensor-parallel plan has steps that are not known here: {', '.join(unknown)}")
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+") + "$"): style for name, style in plan.items()}
    for name, part in model.base_model.named_modules():
        style = next((style for pattern, style in patterns.items() if pattern.match(name)), None)
        if style is None or style in WHOLE:
            continue
        if style == "moe_tp_experts":
            order = [getattr(part, key, None) for key in ("has_gate", "is_concatenated", "is_transposed", "has_bias")]
            if order != [True, True, False, False] or getattr(part, "has_post_expert_norm", False):
                raise NoPlan(f"its experts ({type(part).__name__}) are not [experts, 2 inner, hidden]")
            yield part, style, part.get_parameter("down_proj").shape[2]
        elif isinstance(part, nn.Linear):
            yield part, style, part.weight.shape[0 if style == "colwise" else 1]
        else:
            raise NoPlan(f"its plan splits {type(part).__name__}, which is not known here")
