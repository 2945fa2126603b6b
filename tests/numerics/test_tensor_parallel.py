"""A model split over ranks, each a process, says what one rank says. Three ranks of SmolLM2: test_same_answer.py."""

from pathlib import Path

import pytest
from torch import Tensor

from replicas.config import ModelConfig
from replicas.layers.linear import QKVParallelLinear
from replicas.layers.tp_group import TpGroup
from replicas.loading.model_files import load_model_config
from replicas.loading.weights import weight_bytes
from tests.numerics import quantised, tiny
from tests.numerics.paged import PagedModel, assert_close_in_range
from tests.numerics.ranks import run_ranks

Answer = tuple[list[Tensor], list[list[int]], int]  # prompt logits, greedy ids, bytes of weights


def answer(tp: TpGroup, configs: list[ModelConfig], prompts: list[list[int]], num_tokens: int) -> list[Answer]:
    """What this rank makes of each model."""
    answers = []
    for config in configs:
        first, second = (PagedModel(config, tp, page_size=4, num_pages=256) for _ in range(2))
        logits = first.prefill(prompts, chunk=16)
        answers.append((logits, second.greedy(prompts, num_tokens, chunk=16), weight_bytes(second.model)))
    return answers


@pytest.mark.slow
def test_two_ranks_agree_with_one_for_every_family(tmp_path: Path) -> None:
    """KV heads split in two, or one head on both ranks; vocabulary of 101 padded to 2 x 51. Of gpt-oss as published
    too, whose experts have two blocks of 32 inputs on each rank. Of DeepSeek the latent vector is on both ranks."""
    quantised.save_gpt_oss(tmp_path / "published")
    configs = [load_model_config(str(tmp_path / "published"))]
    for kind in (*sorted(tiny.CONFIGS), "v2", "v3-halves"):
        tiny.save(kind, tmp_path / kind)
        configs.append(load_model_config(str(tmp_path / kind)))
    wanted = answer(TpGroup(device="cpu"), configs, tiny.PROMPTS, 24)
    for ours in run_ranks(2, answer, configs, tiny.PROMPTS, 24, meet=tmp_path / "meet"):
        assert_same(ours, wanted)


def test_a_size_that_does_not_split_the_heads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"9 \(query heads\) cannot be split evenly over 2"):
        QKVParallelLinear(num_heads=9, num_kv_heads=3, head_dim=64, tp=TpGroup(0, 2, device="cpu"), bias=False)


def assert_same(ours: list[Answer], wanted: list[Answer]) -> None:
    for (logits, ids, num_bytes), (logits_1, ids_1, num_bytes_1) in zip(ours, wanted, strict=True):
        assert num_bytes < 0.6 * num_bytes_1  # norms lie on every rank, and what makes a latent vector
        for mine, its in zip(logits, logits_1, strict=True):
            assert_close_in_range(mine, its, 1e-4)
        assert ids == ids_1
