"""A model's name is what is in its folder."""

import json
from pathlib import Path

import pytest

from replicas.runner import identity
from replicas.runner.identity import model_identity

SIZE = 3 << 20  # of the weight file; samples are 32 of its 48 blocks of 64 KiB


def make(folder: Path, *, weights: bytes = bytes(SIZE), **config: object) -> str:
    folder.mkdir(exist_ok=True)
    fields = {"architectures": ["LlamaForCausalLM"], "rope_theta": 1e4, "transformers_version": "5.0", **config}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "model.safetensors").write_bytes(weights)
    return model_identity(str(folder), "none")


def test_the_same_files_have_the_same_name_wherever_they_lie(tmp_path: Path) -> None:
    one = make(tmp_path / "a")
    assert len(one) == 32
    assert make(tmp_path / "b", transformers_version="5.1", _name_or_path="elsewhere") == one
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    assert model_identity(str(tmp_path / "b"), "none") == one


@pytest.mark.parametrize(
    "weights",
    [bytes(SIZE + 1), b"\1" + bytes(SIZE - 1), bytes(SIZE - 1) + b"\1", bytes(SIZE // 2) + b"\1" * (SIZE // 2)],
    ids=["longer", "first byte", "last byte", "half"],
)
def test_other_weights_have_another_name(tmp_path: Path, weights: bytes) -> None:
    assert make(tmp_path / "a") != make(tmp_path / "b", weights=weights)


def test_rounded_weights_have_another_name_than_those_of_the_checkpoint(tmp_path: Path) -> None:
    one = make(tmp_path / "a")
    assert model_identity(str(tmp_path / "a"), "int8") != one


def test_weights_rounded_by_another_rule_have_another_name_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "a")
    one = model_identity(str(tmp_path / "a"), "int8")
    monkeypatch.setattr(identity, "RULE", "int8, one scale a row")
    assert model_identity(str(tmp_path / "a"), "int8") != one


def test_another_config_has_another_name(tmp_path: Path) -> None:
    assert make(tmp_path / "a") != make(tmp_path / "b", rope_theta=1e6)
