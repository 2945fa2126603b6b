"""A mixture of experts on a GPU: rows of one expert in tiles, one launch for all experts.
Compiled on a GPU, interpreted on a CPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replicas.config import MoEConfig
from replicas.errors import InvalidConfig
from replicas.kernels import gpu as fused
from replicas.kernels import triton_rows
from replicas.kernels.experts import on_gpu
from replicas.layers.moe import MoE, choose
from replicas.layers.tp_group import TpGroup
from tests.gpu import fake_cuda
from tests.gpu.device_steps import DEVICE
from tests.gpu.fake_cuda import Launches
from tests.gpu.rigs import engine_config, make_rig
from tests.gpu.triton_or_skip import triton_paged
from tests.numerics import tiny

assert triton_paged  # Triton is here, at least interpreted
TOP_K, EXPERTS, HIDDEN, INNER = 3, 6, 80, 48  # 80 inputs and 48 or 96 outputs fill no block of 64


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(fused, "kernels", lambda: triton_rows)


PLAIN = on_gpu.Between(fused.silu_mul)


def step(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, and their experts: never expert 4."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    scores[:, 4] = -1.0
    weights, ids = scores.topk(TOP_K)
    x, gate_up, down = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((tokens, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    )
    x, ids, weights, gate_up, down = (each.to(DEVICE) for each in (x, ids, weights, gate_up / 9, down / 7))
    return x, ids, weights, gate_up, down


def by_hand(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Token by token, in fp32."""
    x, gate_up, down = (each.float() for each in (x, gate_up, down))
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for expert, weight in zip(ids[t].tolist(), weights[t], strict=True):
            gate, up = (gate_up[expert] @ x[t]).chunk(2)
            out[t] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.float16, 4e-3)], ids=["fp32", "fp16"])
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_each_token_is_the_weighted_sum_of_its_experts(tokens: int, dtype: torch.dtype, allowed: float) -> None:
    """40 tokens by 3 experts go in tiles of 64 rows, fewer in tiles of 16."""
    given = step(tokens, dtype)
    wanted, made = by_hand(*given), on_gpu.gated_experts(*given, PLAIN)
    assert made.dtype == dtype
    assert float((made.float() - wanted).abs().max()) < allowed * float(wanted.abs().max())


@pytest.mark.usefixtures("interpreted")
def test_biases_and_a_gate_of_another_kind_are_those_of_the_sum_by_hand() -> None:
    """Its numbers lie side by side."""
    given = step(20, torch.float32)
    gate_up_bias, down_bias = (torch.randn(EXPERTS, size, device=DEVICE) for size in (2 * INNER, HIDDEN))
    between = on_gpu.Between(lambda made: made[:, ::2] * made[:, 1::2].tanh(), gate_up_bias, down_bias)
    made = on_gpu.gated_experts(*given, between)
    x, ids, weights, gate_up, down = given
    inner = torch.einsum("eih,h->ei", gate_up, x[7]) + gate_up_bias
    by_expert = torch.einsum("ehi,ei->eh", down, inner[:, ::2] * inner[:, 1::2].tanh()) + down_bias
    torch.testing.assert_close(made[7], weights[7] @ by_expert[ids[7]])


@pytest.mark.usefixtures("interpreted")
def test_no_tokens_are_no_work() -> None:
    x, ids, weights, gate_up, down = step(4, torch.float32)
    assert on_gpu.gated_experts(x[:0], ids[:0], weights[:0], gate_up, down, PLAIN).shape == (0, HIDDEN)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("tokens", [1, 7, 50])
def test_every_choice_is_in_one_tile_of_its_expert(tokens: int, rows: int) -> None:
    """In as many tiles as shapes alone can bound, so that nothing waits for the GPU."""
    ids = step(tokens, torch.float32)[1]
    tiles = on_gpu.tiles_of(ids, EXPERTS, rows)
    total = ids.numel()
    assert len(tiles.experts) == min(total, total // rows + EXPERTS)
    told: list[int] = []
    for expert, choices in zip(tiles.experts.tolist(), tiles.choices.tolist(), strict=True):
        there = [choice for choice in choices if choice < total]
        assert bool(there) == (expert >= 0)
        assert all(int(ids.flatten()[choice]) == expert for choice in there)
        told += there
    assert sorted(told) == list(range(total))


RULES = {
    "softmax": {}, "normalised": {"normalize": True, "scaling": 2.5},
    "groups": {"num_groups": 3, "top_groups": 2, "scaling": 16.0},
    "sigmoid": {"scoring": "sigmoid", "normalize": True, "group_score": "top2", "num_groups": 3, "top_groups": 2,
                "score_bias": True},
    "six of six": {"top_k": 6},
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_the_choice_is_the_hosts(rule: str, gpu: fake_cuda.FakeCuda | None) -> None:
    """50 tokens of 6 experts, equal ones among them: of those the first is chosen."""
    config = MoEConfig(**{"num_experts": EXPERTS, "top_k": TOP_K, "intermediate_size": INNER, **RULES[rule]})
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(50, EXPERTS, generator=generator).mul(4).round().div(2)
    assert (logits[:, 0] == logits[:, 1]).any()
    bias = torch.randn(EXPERTS, generator=generator) if config.score_bias else None
    ids, weights = choose(logits, bias, config)
    there = None if bias is None else bias.to("cuda")
    on_device = choose(logits.to("cuda"), there, config)
    assert torch.equal(on_device[0].cpu(), ids)
    torch.testing.assert_close(on_device[1].cpu(), weights, rtol=1e-6, atol=0)
    alone = [choose(row[None].to("cuda"), there, config)[1].cpu() for row in logits[:3]]
    assert torch.equal(torch.cat(alone), on_device[1][:3].cpu()), "by what other rows there are"


def test_a_broken_row_chooses_experts_that_exist(
    gpu: fake_cuda.FakeCuda | None,
) -> None:
    logits = torch.tensor([[torch.nan] * EXPERTS, [-torch.inf] * EXPERTS, [torch.inf] * EXPERTS]).to("cuda")
    ids = choose(logits, None, MoEConfig(num_experts=EXPERTS, top_k=TOP_K, intermediate_size=INNER))[0].cpu()
    assert ids.min() >= 0
    assert ids.max() < EXPERTS


@pytest.mark.parametrize(("kind", "launches"), [("mixtral", 8), ("deepseek-moe", 8)])
def test_the_experts_of_a_layer_are_eight_launches(
    kind: str, launches: int, gpu: fake_cuda.FakeCuda | None
) -> None:
    """The gate's input in fp32, its product, the choice, tiles, gate and up, SiLU x up, down, the sum."""
    if gpu is None:
        pytest.skip("a real device's launches are counted by nsys (docs/gpu.md)")
    rules = RULES["sigmoid" if kind == "deepseek-moe" else "normalised"]
    config = MoEConfig(num_experts=EXPERTS, top_k=TOP_K, intermediate_size=INNER, **rules)
    moe = MoE(config, TpGroup(device="cuda"))
    for name, put in moe.weights().items():
        shape = {"gate": (EXPERTS, HIDDEN), "down": (HIDDEN, INNER)}.get(
            next((part for part in ("down", "correction") if part in name), "gate"), (EXPERTS,)
        )
        put(torch.randn(INNER, HIDDEN) if "experts." in name and "down" not in name else torch.randn(shape))
    for _, layer in moe.walk():
        layer.finalize(torch.device("cuda"), torch.float16)
    x, before = torch.randn(4, HIDDEN).half().to("cuda"), gpu.kernels
    with Launches() as seen:
        moe(x)
    assert len(seen.names) + gpu.kernels - before == launches, seen.names


@pytest.mark.parametrize(
    ("kind", "special"), [("qwen2-moe", {"decoder_sparse_step": 1}), ("gpt-oss", {"layer_types": ["full_attention"]})]
)
def test_an_engine_with_experts_says_what_transformers_says_and_its_steps_are_captured(
    kind: str, special: dict[str, Any], tmp_path: Path, gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer with experts, beside a shared one or with biases. A captured step that waits for the GPU would fail."""
    model = tiny.save(kind, tmp_path, num_hidden_layers=1, **special)
    monkeypatch.setattr("tests.gpu.rigs.NUM_NEW", 3)
    config = replace(engine_config(tmp_path, "cuda"), cuda_graphs=True)
    config = replace(config, scheduler=replace(config.scheduler, max_running_requests=2))
    prompts = [[20, 31, 7, 7], [5, 9]]
    rig = make_rig(config)
    assert rig.answer(prompts) == [tiny.reference(model, prompt, 3)[1] for prompt in prompts]
    if gpu is not None:
        assert len(gpu.graphs) == 2  # of one row and of two


@pytest.mark.usefixtures("gpu")
def test_experts_without_triton_are_refused_and_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save("mixtral", tmp_path, num_hidden_layers=1)
    monkeypatch.setattr(fused, "kernels", lambda: None)
    with pytest.raises(InvalidConfig, match=r"on a GPU experts need Triton.*install a C compiler.*replicas\.gpus: 0"):
        make_rig(engine_config(tmp_path, "cuda"))
