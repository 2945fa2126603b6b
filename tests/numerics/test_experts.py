"""A mixture of experts is what Transformers' module makes of the same weights, for every family's routing."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from replicas.config import MoEConfig
from replicas.kernels.experts.routing import TINY
from replicas.kernels.weight_formats import WeightFormat
from replicas.layers.moe import MoE, choose
from replicas.layers.tp_group import TpGroup

HIDDEN, INNER, EXPERTS = 64, 32, 8
QWEN = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS, "num_experts_per_tok": 3}
DEEPSEEK = QWEN | {
    "n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
BASE = MoEConfig(num_experts=EXPERTS, top_k=3, intermediate_size=INNER)
GROUPS = {"num_groups": 4, "top_groups": 2, "scaling": 2.5, "shared_intermediate_size": 2 * INNER}


def config(**changes: Any) -> MoEConfig:
    return MoEConfig(num_experts=EXPERTS, top_k=3, intermediate_size=INNER, **changes)


# family -> its config's settings, its module, and what that is here
FAMILIES: dict[str, tuple[dict[str, Any], str, MoEConfig]] = {
    "qwen3_moe": (QWEN | {"norm_topk_prob": True}, "Qwen3MoeSparseMoeBlock", config(normalize=True)),
    "qwen2_moe": (
        QWEN | {"shared_expert_intermediate_size": 96},
        "Qwen2MoeSparseMoeBlock",
        config(shared_intermediate_size=96, shared_gate=True),
    ),
    "mixtral": (
        {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS, "num_experts_per_tok": 3},
        "MixtralSparseMoeBlock",
        config(normalize=True),
    ),
    "deepseek_v2": (DEEPSEEK | {"topk_method": "group_limited_greedy"}, "DeepseekV2Moe", config(**GROUPS)),
    "deepseek_v3": (
        DEEPSEEK | {"norm_topk_prob": True},
        "DeepseekV3MoE",
        config(scoring="sigmoid", normalize=True, group_score="top2", score_bias=True, **GROUPS),
    ),
}


def module(family: str) -> torch.nn.Module:
    """Transformers' module with random weights."""
    import importlib

    settings, name, _ = FAMILIES[family]
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = importlib.import_module("transformers").AutoConfig.for_model(family, **settings)
    config._experts_implementation = "eager"
    made = getattr(modeling, name)(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for each in (*made.parameters(), *made.buffers()):
            each.normal_(0.0, 0.3, generator=generator)
    return made.eval()  # type: ignore[no-any-return]


def one_by_one(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights as they lie in checkpoints: a tensor for each expert."""
    for name, tensor in weights.items():
        if name == "experts.gate_up_proj":
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                yield f"experts.{e}.gate_proj.weight", gate
                yield f"experts.{e}.up_proj.weight", up
        elif name == "experts.down_proj":
            yield from ((f"experts.{e}.down_proj.weight", each) for e, each in enumerate(tensor))
        else:
            yield name, tensor


def load(
    settings: MoEConfig, weights: Mapping[str, Tensor], tp: TpGroup, format_: WeightFormat = "float32",
    dtype: torch.dtype = torch.float32,
) -> MoE:
    """Put whatever ``weights`` have: stacked tensors, or one for each expert."""
    moe = MoE(settings, tp)
    puts = moe.weights() | {name: whole.put for name, whole in moe.stacked_weights().items()}
    for name, tensor in weights.items():
        puts[name](tensor)
    for _, layer in moe.walk():
        layer.multiply_by(format_, one_order=True)
    for _, layer in moe.walk():
        layer.finalize(tp.device, dtype)
    return moe


def rows(count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.inference_mode()
def test_it_is_transformers_module_whichever_way_the_weights_lie(family: str) -> None:
    """20 tokens by 3 of 8 experts. What fills what is named: nothing is missing, nothing left."""
    oracle, settings = module(family), FAMILIES[family][2]
    stacked = {name: tensor.detach() for name, tensor in oracle.state_dict().items()}
    single = dict(one_by_one(stacked))
    moe = load(settings, single, TpGroup(device="cpu"))
    assert set(moe.weights()) == set(single)
    assert {name for whole in moe.stacked_weights().values() for name in whole.fills} == set(single) - set(stacked)
    x = rows(20)
    wanted, made = oracle(x[None])[0], moe(x)
    assert (made - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert torch.equal(load(settings, stacked, TpGroup(device="cpu"))(x), made)


@pytest.mark.parametrize(
    ("format_", "dtype", "near"),
    [
        ("float32", torch.float32, 1e-6), ("bfloat16", torch.bfloat16, 6e-3), ("int8", torch.float32, 0.03),
        ("q4_1", torch.float32, 0.25), ("q4_1", torch.bfloat16, 0.25),
    ],
)  # fmt: skip
@torch.inference_mode()
def test_a_tokens_result_has_the_same_bits_whatever_other_tokens_are_there(
    format_: WeightFormat, dtype: torch.dtype, near: float
) -> None:
    """100 tokens at once, so that most experts have 30 rows and more, in steps of 7, and each alone. In bf16 weights
    are rounded by up to 4e-3 of each, and so are activations where the CPU multiplies it."""
    oracle = module("deepseek_v3")
    moe = load(FAMILIES["deepseek_v3"][2], oracle.state_dict(), TpGroup(device="cpu"), format_, dtype)
    x = rows(100)
    whole = moe(x)
    for size in (1, 7):
        assert torch.equal(torch.cat([moe(part) for part in x.split(size)]), whole)
    assert (whole - oracle(x[None])[0]).norm() < near * whole.norm()


@torch.inference_mode()
def test_two_ranks_have_half_of_every_expert_and_their_parts_add_up() -> None:
    """Ranks that have not met give their parts; test_tensor_parallel.py has ranks that meet."""
    settings, weights, x = FAMILIES["deepseek_v3"][2], module("deepseek_v3").state_dict(), rows(9)
    one, *two = (load(settings, weights, TpGroup(*of, device="cpu")) for of in ((0, 1), (0, 2), (1, 2)))
    wanted, made = one(x), sum(moe(x) for moe in two)
    assert (made - wanted).abs().max() < 1e-5 * wanted.abs().max()
    held, whole = ([sum(layer.num_bytes for _, layer in moe.walk()) for moe in which] for which in (two, [one]))
    assert max(held) < 0.52 * whole[0]  # the router is whole on both


def choose_by_pytorch(logits: Tensor, bias: Tensor | None, config: MoEConfig) -> tuple[Tensor, Tensor]:
    """Choose as `choose` does, by PyTorch's operations: the reference."""
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


BOTH = pytest.mark.parametrize("chosen", [choose, choose_by_pytorch])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_cpus_kernel_chooses_as_pytorchs_operations_do(family: str) -> None:
    settings, generator = FAMILIES[family][2], torch.Generator().manual_seed(2)
    logits = torch.randn(300, EXPERTS, generator=generator)
    bias = torch.randn(EXPERTS, generator=generator) if settings.score_bias else None
    (ids, weights), (wanted_ids, wanted) = (
        chosen(logits, bias, settings) for chosen in (choose, choose_by_pytorch)
    )
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted)


@BOTH
def test_groups_are_scored_by_their_best_or_their_best_two(chosen: Any) -> None:
    """Of four groups of two experts one is taken: {3, -6} has the best expert, {2, 1.5} the best two."""
    logits = torch.tensor([[3.0, -6.0, 2.0, 1.5, 1.0, -1.0, -3.0, -2.0]])
    settings: dict[str, Any] = {"num_experts": 8, "top_k": 2, "intermediate_size": 1, "num_groups": 4}
    by_one, by_two = (
        chosen(logits, None, MoEConfig(**settings, group_score=score, scoring="sigmoid"))[0].tolist()
        for score in ("max", "top2")
    )
    assert (by_one, by_two) == ([[0, 1]], [[2, 3]])


@BOTH
def test_a_bias_changes_the_choice_and_not_the_weights(chosen: Any) -> None:
    logits, bias = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([5.0, 0.0, 0.0])
    settings = MoEConfig(num_experts=3, top_k=2, intermediate_size=1, scoring="sigmoid", scaling=2.0)
    ids, weights = chosen(logits, bias, settings)
    assert ids.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, 2 * logits[:, [0, 2]].sigmoid())


def test_of_equal_experts_the_first_are_taken() -> None:
    ids, weights = choose(torch.zeros(2, 6), None, MoEConfig(num_experts=6, top_k=2, intermediate_size=1))
    assert (ids.tolist(), weights.tolist()) == ([[0, 1]] * 2, [[pytest.approx(1 / 6)] * 2] * 2)
