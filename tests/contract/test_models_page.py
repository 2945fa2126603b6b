"""docs/models.md says of every causal architecture of Transformers what this code says of it."""

import re
from collections import Counter
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tools.models_table import PAGE, ModelType, judge, page, written

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
