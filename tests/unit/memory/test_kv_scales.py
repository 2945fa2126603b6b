"""Scales of K and V that a checkpoint has (SPEC C06)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from replicas.errors import InvalidConfig
from replicas.memory.kv_scales import checkpoint_scales


def saved(folder: Path, **scales: float | list[float]) -> Path:
    save_file({name: torch.tensor(value) for name, value in scales.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_every_spelling_is_found_and_layers_without_have_one(tmp_path: Path, k_name: str, v_name: str) -> None:
    made = {f"model.layers.1.{k_name}": 0.5, f"model.layers.1.{v_name}": 0.25, "model.layers.0.self_attn.q_scale": 9.0}
    assert checkpoint_scales(saved(tmp_path, **made), 3) == ((1.0, 1.0), (0.5, 0.25), (1.0, 1.0))


def test_one_scale_for_both_one_by_head_and_one_that_says_none(tmp_path: Path) -> None:
    both, of_heads, none = (f"model.layers.{i}.self_attn.{kind}_scale" for i, kind in enumerate(("kv", "k", "v")))
    saved(tmp_path, **{both: 0.5, of_heads: [0.25, 2.0, 1.5], none: -1.0})
    assert checkpoint_scales(tmp_path, 3) == ((0.5, 0.5), (2.0, 1.0), (1.0, 1.0))


def test_a_checkpoint_without_scales_has_none(tmp_path: Path) -> None:
    assert checkpoint_scales(saved(tmp_path, **{"model.layers.0.self_attn.k_proj.weight_scale": 0.5}), 1) == ()


@pytest.mark.parametrize(("layer", "scale"), [(0, float("nan")), (0, float("inf")), (3, 0.5)])
def test_a_scale_that_scales_nothing_is_refused_by_name(tmp_path: Path, layer: int, scale: float) -> None:
    name = f"model.layers.{layer}.self_attn.k_scale"
    with pytest.raises(InvalidConfig, match=f"{name} = .* of 3 layers"):
        checkpoint_scales(saved(tmp_path, **{name: scale}), 3)
