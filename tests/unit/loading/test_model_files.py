"""A complete config.json is read as it is, an incomplete one through Transformers, with the same meaning; and a model's
identity depends on the contents of its folder alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import transformers

from replicas.config import ModelConfig, Quantization
from replicas.errors import InvalidConfig
from replicas.loading import model_files
from replicas.loading.model_files import load_model_config, model_identity
from tests.numerics import tiny

SHAPE = {**tiny.SHAPE, "eos_token_id": 7}
SIZE = 3 << 20  # of the weight file; samples are 32 of its 48 blocks of 64 KiB
ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_theta": 500.0},
    "linear": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "both names": {
        "rope_theta": 500.0, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        "rope_parameters": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.0},
    },
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True},
    "Mistral": {"sliding_window": None},
    "Qwen2": {"use_sliding_window": False, "sliding_window": 64},
    "Qwen3": {"use_sliding_window": False, "sliding_window": 64, "tie_word_embeddings": True},
}


def write(folder: Path, family: str, **keys: Any) -> str:
    config = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), "rms_norm_eps": 1e-5, **SHAPE}
    (folder / "config.json").write_text(json.dumps(config | FAMILIES[family] | keys))
    return str(folder)


def without(folder: Path, key: str) -> str:
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_complete_file_means_what_transformers_makes_of_it(
    tmp_path: Path, family: str, rope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not(*args: object) -> None:
        raise AssertionError("Transformers was asked")

    folder = write(tmp_path, family, **ROPES[rope])
    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoConfig, "from_pretrained", must_not)
        direct = load_model_config(folder, dtype="float32")
    monkeypatch.setattr("replicas.loading.model_files._is_complete", lambda config: False)
    assert load_model_config(folder, dtype="float32") == direct
    assert isinstance(direct, ModelConfig)


def test_a_missing_key_has_its_architectures_default(tmp_path: Path) -> None:
    write(tmp_path, "Mistral", rope_theta=1e4)
    assert load_model_config(without(tmp_path, "num_key_value_heads")).num_kv_heads == 8


def test_a_size_that_is_no_number_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"config.json cannot be read: .*hidden_size"):
        load_model_config(write(tmp_path, "Llama", rope_theta=1e4, hidden_size="wide"))


def test_settings_of_rotation_that_are_no_object_are_an_error_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"config.json has rope_scaling = 'linear', which is no object"):
        load_model_config(write(tmp_path, "Llama", rope_theta=1e4, rope_scaling="linear"))


def test_reading_the_embedded_models_config_leaves_torchs_compiler_alone(tmp_path: Path) -> None:
    """3 s of a start: Transformers' configuration classes import it."""
    folder = write(tmp_path, "Llama", rope_theta=1e4)
    program = (
        "import sys\nfrom replicas.loading.model_files import load_model_config\n"
        f"load_model_config({folder!r})\nassert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def make(folder: Path, *, weights: bytes = bytes(SIZE), **config: object) -> str:
    folder.mkdir(exist_ok=True)
    fields = {"architectures": ["LlamaForCausalLM"], "rope_theta": 1e4, "transformers_version": "5.0", **config}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "model.safetensors").write_bytes(weights)
    return model_identity(str(folder), "none")


def test_the_same_files_have_the_same_identity_wherever_they_lie(tmp_path: Path) -> None:
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
def test_other_weights_have_another_identity(tmp_path: Path, weights: bytes) -> None:
    assert make(tmp_path / "a") != make(tmp_path / "b", weights=weights)


def test_rounded_weights_have_another_identity_than_the_checkpoint(tmp_path: Path) -> None:
    """K and V of one are not those of another."""
    make(tmp_path / "a")
    assert len({model_identity(str(tmp_path / "a"), quantization) for quantization in get_args(Quantization)}) == 4


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_rounded_by_another_rule_have_another_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: Quantization
) -> None:
    make(tmp_path / "a")
    one = model_identity(str(tmp_path / "a"), quantization)
    monkeypatch.setitem(model_files.RULES, quantization, "one scale a row")
    assert model_identity(str(tmp_path / "a"), quantization) != one


def test_another_config_has_another_identity(tmp_path: Path) -> None:
    assert make(tmp_path / "a") != make(tmp_path / "b", rope_theta=1e6)
