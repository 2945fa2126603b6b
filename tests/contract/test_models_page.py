"""docs/architectures.md says of every causal architecture of Transformers what this code says of it."""

import json
import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deployments.command import arguments
from deployments.http.service import read_face
from deployments.replica.feasible import examined
from deployments.settings.schema import ModelSettings
from deployments.settings.settings_file import CommandLine
from replicas.loading.model_files import load_model_config
from replicas.memory.sizing import weight_bytes
from replicas.models.registry import MODELS
from tests.unit.tokenizer_folders import byte_level_folder
from tools.models_table import (
    PAGE,
    PRODUCTS_PAGE,
    VOCAB,
    ModelType,
    Product,
    judge,
    page,
    product_row,
    products,
    written,
)

ROWS = written()
EVERY = 8  # how many rows one of this test's cases stands for
made_with = re.search(r"causal architectures of Transformers (\S+):", PAGE.read_text())
assert made_with is not None
same_version = pytest.mark.skipif(
    made_with[1] != transformers.__version__, reason="the page was made with another version of Transformers"
)


@same_version
def test_every_architecture_is_there() -> None:
    assert [(row.model_type, row.name) for row in ROWS] == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())


def test_the_numbers_above_the_table_are_those_of_its_rows() -> None:
    assert made_with is not None
    installed, then = (f"Transformers {version}:" for version in (transformers.__version__, made_with[1]))
    assert page(ROWS).replace(installed, then) == PAGE.read_text()
    counts = Counter(row.how for row in ROWS)
    assert counts["natively"] + counts["through Transformers"] >= 0.6 * len(ROWS)


def test_what_is_refused_has_a_reason_and_what_runs_needs_none() -> None:
    assert all(bool(row.why) == (row.how == "refused") for row in ROWS)


@same_version
@pytest.mark.parametrize("row", ROWS[::EVERY], ids=lambda row: row.model_type)
def test_a_row_is_what_the_code_says_of_a_config_like_it(row: ModelType, tmp_path: Path) -> None:
    """Its weights are not there: whether they give Transformers' answers is for test_transformers_models.py."""
    said = judge(row.model_type, tmp_path)
    assert (said.how, said.why.replace("|", "/")) == (row.how, row.why)


@pytest.mark.parametrize("model_type", ["gpt2", "gemma3"])
def test_the_router_reads_the_context_that_the_engine_reads_whatever_its_name_and_place(
    model_type: str, tmp_path: Path
) -> None:
    """GPT-2 calls it n_positions, Gemma 3 has it in text_config."""
    judge(model_type, tmp_path)
    assert "max_position_embeddings" not in json.loads((tmp_path / "config.json").read_text())
    face, engine = read_face(ModelSettings(path=str(tmp_path))), load_model_config(str(tmp_path), device="cpu")
    assert (face.context_len, face.vocab_size) == (engine.context_len, engine.vocab_size) == (256, VOCAB)


@pytest.mark.parametrize(
    "product",
    [
        pytest.param(each, id=each.name, marks=() if each.config["architectures"][0] in MODELS else pytest.mark.slow)
        for each in products()
    ],
)
def test_a_product_has_the_row_that_its_config_gives_and_the_command_passes_the_check(
    product: Product, tmp_path: Path
) -> None:
    """Its shape is that of the published weights, which have as many numbers."""
    row = product_row(product, tmp_path)
    assert row in PRODUCTS_PAGE.read_text(), "run `python -m tools.models_table`"
    if "refused" in row:
        return
    shape = load_model_config(str(tmp_path), device="cpu", dtype="float32")
    assert weight_bytes(replace(shape, stored=None), 1) == pytest.approx(4 * product.parameters, rel=1e-6)
    (tmp_path / "model.safetensors").touch()
    byte_level_folder(tmp_path)
    (command,) = re.findall(r"`manta (.*)`", row)
    given = arguments.parse(shlex.split(command.replace(product.hub_id, str(tmp_path)))).config
    assert isinstance(given, CommandLine)
    (served, _) = given.read().content["applications"]
    assert examined(served["args"], available_bytes=1 << 40)[1] == []
