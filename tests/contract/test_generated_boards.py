"""What is committed of boards, rules and docs/metrics.md is what the catalogue says, and names nothing else."""

import json
import pathlib
from typing import Any

import pytest
import yaml

from dashboards import generated
from dashboards.board import Needs
from dashboards.boards.all import BOARDS
from dashboards.catalog import CATALOG
from dashboards.lint import Known, check_board, check_rules
from dashboards.render import round_trip

TEXTS = generated.texts()


def board(uid: str) -> Any:
    return generated.committed_board(uid)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_the_file_is_as_the_catalogue_says(path: pathlib.Path) -> None:
    assert path.read_text() == TEXTS[path], "run `make dashboards` and commit what it writes"


def test_no_other_board_lies_beside_them() -> None:
    folder = generated.RULES.parent.parent / "grafana"
    assert sorted(folder.iterdir()) == sorted(generated.BOARD_FILES.values())


@pytest.mark.parametrize("uid", generated.BOARD_FILES)
def test_every_query_names_only_the_catalogue_and_no_panels_overlap(uid: str) -> None:
    assert check_board(board(uid), Known.of_catalog()) == []


def test_every_rule_names_only_the_catalogue() -> None:
    assert check_rules(yaml.safe_load(generated.RULES.read_text()), Known.of_catalog()) == []


@pytest.mark.parametrize("uid", generated.BOARD_FILES)
def test_a_board_is_the_same_after_going_through_the_sdk(uid: str) -> None:
    text = generated.BOARD_FILES[uid].read_text()
    assert round_trip(text) == text


def test_the_round_trip_loses_what_the_sdk_does_not_know() -> None:
    document = board("manta-kv")
    document["panels"][1]["titel"] = "a key that Grafana does not have"
    assert "titel" not in round_trip(json.dumps(document))


def test_every_metric_is_on_a_board() -> None:
    """What nobody can look at need not be emitted."""
    shown = {name for board in BOARDS for panel in board.panels for line in panel.lines for name in line.query.metrics}
    assert shown == set(CATALOG)


def test_what_needs_prefill_and_decode_apart_has_a_row_of_its_own() -> None:
    rows = {row.title for board in BOARDS for row in board.rows for panel in row.panels if panel.needs is Needs.APART}
    assert rows == {"Prefill and decode apart"}


@pytest.mark.parametrize("uid", generated.BOARD_FILES)
def test_a_board_has_what_its_readers_expect(uid: str) -> None:
    document = board(uid)
    assert document["graphTooltip"] == 1  # a shared crosshair
    assert [each["name"] for each in document["templating"]["list"]] == ["datasource", "model", "role", "replica"]
    others = {f"/d/{other}" for other in generated.BOARD_FILES if other != uid}
    assert {link["url"] for link in document["links"]} == others
    assert all(link["includeVars"] and link["keepTime"] for link in document["links"])
    panels = [panel for panel in document["panels"] if panel["type"] != "row"]
    assert all(len(panel["description"]) > 60 for panel in panels)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
