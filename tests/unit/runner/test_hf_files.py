"""A complete config.json is taken as it is, one that leans on defaults goes through Transformers; both mean as much."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from replicas.config import ModelConfig
from replicas.errors import InvalidConfig
from replicas.runner.weights import load_model_config
from tests.numerics import tiny

SHAPE = {**tiny.SHAPE, "eos_token_id": 7}
ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_theta": 500.0},
    "linear": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
}
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
    monkeypatch.setattr("replicas.runner.hf_files._is_complete", lambda config: False)
    assert load_model_config(folder, dtype="float32") == direct
    assert isinstance(direct, ModelConfig)


def test_what_a_file_leaves_out_is_its_architectures_default(tmp_path: Path) -> None:
    write(tmp_path, "Mistral", rope_theta=1e4)
    assert load_model_config(without(tmp_path, "num_key_value_heads")).num_kv_heads == 8


def test_a_size_that_is_no_number_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"config.json cannot be read: .*hidden_size"):
        load_model_config(write(tmp_path, "Llama", rope_theta=1e4, hidden_size="wide"))


def test_reading_the_embedded_models_config_leaves_torchs_compiler_alone(tmp_path: Path) -> None:
    """3 s of a start: Transformers' configuration classes import it."""
    folder = write(tmp_path, "Llama", rope_theta=1e4)
    program = (
        "import sys\nfrom replicas.runner.weights import load_model_config\n"
        f"load_model_config({folder!r})\nassert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
