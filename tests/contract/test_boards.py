"""The committed boards and docs/metrics.md are what the catalogue says; Grafana's own SDK reads the boards."""

import itertools
import json
import pathlib
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.board import Board, Needs, Panel, Row, Unit, quantile, rate
from dashboards.catalog import OUTCOMES
from dashboards.files import BOARD_FILES, BOARDS, generated
from tests.scraped import committed_board, panels

TEXTS = generated()


def lost(before: Any, after: Any, place: str = "") -> list[str]:
    """Where ``after`` lacks or changes something of ``before``; what it adds besides does not count."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [each for key in before for each in lost(before[key], after.get(key), f"{place}/{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [each for at, (old, new) in pairs for each in lost(old, new, f"{place}/{at}")]
    return [] if before == after else [place]


def through_the_sdk(document: Any) -> Any:
    """A board once through the models of Grafana's SDK: it adds its defaults, and what it does not know is lost."""
    return json.loads(json.dumps(Dashboard.from_json(document), cls=JSONEncoder))


def laid_out(*rows: Row) -> dict[str, dict[str, Any]]:
    """The panels of a board with these rows, and the rows, by title."""
    document = json.loads(Board(uid="b", title="B", description="d", rows=rows).to_json(()))
    return {each["title"]: each for each in (*document["panels"], *panels(document))}


def panel(title: str, width: int = 8, height: int = 8) -> Panel:
    return Panel(title, {"all": "up"}, Unit.COUNT, "It shows.", "Do this.", width=width, height=height)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_the_file_is_as_the_catalogue_says(path: pathlib.Path) -> None:
    assert path.read_text() == TEXTS[path], "run `make dashboards` and commit what it writes"


def test_no_other_board_lies_beside_them() -> None:
    files = list(BOARD_FILES.values())
    assert sorted(files[0].parent.iterdir()) == sorted(files)


@pytest.mark.parametrize("uid", BOARD_FILES)
def test_no_panels_overlap_or_stick_out_and_each_has_its_own_id(uid: str) -> None:
    document = committed_board(uid)
    rows = [each for each in document["panels"] if each["type"] == "row"]
    every = [*rows, *panels(document)]
    assert len({each["id"] for each in every}) == len({each["title"] for each in every}) == len(every)
    for together in (document["panels"], *(row["panels"] for row in rows)):  # a closed row's panels are drawn alone
        taken: set[tuple[int, int]] = set()
        for place in (each["gridPos"] for each in together):
            x, y, w, h = (place[key] for key in "xywh")
            cells = set(itertools.product(range(x, x + w), range(y, y + h)))
            assert not taken & cells, place
            assert x + w <= 24, place
            taken |= cells


def places(*rows: Row) -> dict[str, tuple[int, ...]]:
    return {title: tuple(each["gridPos"][key] for key in "xywh") for title, each in laid_out(*rows).items()}


def test_a_panel_is_placed_as_far_up_as_it_fits_and_then_as_far_left() -> None:
    first = (panel("a", width=12, height=5), panel("b"), panel("c", width=6))
    assert places(Row("first", first, is_open=True), Row("second", (panel("d"),), is_open=True)) == {
        "first": (0, 0, 24, 1),
        "a": (0, 1, 12, 5),
        "b": (12, 1, 8, 8),
        "c": (0, 6, 6, 8),
        "second": (0, 14, 24, 1),
        "d": (0, 15, 8, 8),
    }


def test_the_panels_of_a_closed_row_lie_in_it_and_take_no_room() -> None:
    rows = (Row("first", (panel("a"),)), Row("second", (panel("b"),), is_open=True))
    assert places(*rows) == {
        "first": (0, 0, 24, 1),
        "a": (0, 1, 8, 8),
        "second": (0, 1, 24, 1),
        "b": (0, 2, 8, 8),
    }
    laid = laid_out(*rows)
    assert [(laid[each]["collapsed"], len(laid[each]["panels"])) for each in ("first", "second")] == [
        (True, 1),
        (False, 0),
    ]


def test_a_panels_id_stays_when_others_are_added_before_it() -> None:
    later = laid_out(Row("zero", (panel("z"),)), Row("first", (panel("b"), panel("a"))))
    assert laid_out(Row("first", (panel("a"),)))["a"]["id"] == later["a"]["id"]


def test_a_series_that_names_a_replica_leads_to_it_in_the_live_view() -> None:
    by_replica = Panel("a", rate("replica_deaths_total", "role", "replica"), Unit.PER_S, "It shows.", "Do this.")
    [link] = laid_out(Row("first", (by_replica,)))["a"]["fieldConfig"]["defaults"]["links"]
    assert link["url"] == "${live}/#replica=${__field.labels.replica}"
    assert laid_out(Row("first", (panel("b"),)))["b"]["fieldConfig"]["defaults"]["links"] == []


def test_the_legend_of_a_query_alone_is_the_labels_that_it_keeps_apart() -> None:
    steps = quantile(0.9, "scheduler_step_duration_seconds", "role", "phase")
    alone = Panel("a", steps, Unit.SECONDS, "It shows.", "Do this.")
    assert alone.queries == {"{{role}} {{phase}}": steps}
    assert Panel("a", {"all": steps}, Unit.SECONDS, "It shows.", "Do this.").queries == {"all": steps}


def test_an_objective_is_a_dashed_line_and_outcomes_have_their_colours() -> None:
    drawn = {each["title"]: each for each in panels(committed_board("manta-fleet"))}
    [objective] = drawn["Time to first token (TTFT)"]["fieldConfig"]["overrides"]
    assert objective["matcher"] == {"id": "byName", "options": "objective"}
    assert {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}} in objective["properties"]
    outcomes = drawn["Requests by outcome"]["fieldConfig"]["overrides"]
    assert {each["matcher"]["options"] for each in outcomes} == set(OUTCOMES)


def test_a_board_narrows_a_routers_metrics_by_its_own_variable_and_a_replicas_by_two() -> None:
    assert rate("requests_total") == (
        'sum(rate(manta_requests_total{model=~"$model",instance=~"$instance",replica=~"$router"}[$__rate_interval]))'
    )
    assert '{model=~"$model",instance=~"$instance",role=~"$role",replica=~"$replica"}' in rate("cache_hit_tokens_total")
    assert rate("cache_hit_tokens_total", replica="r1").count("replica=") == 1  # a query that chooses for itself


def test_the_first_screen_is_open_and_all_else_is_closed() -> None:
    open_rows = [row.title for board in BOARDS for row in board.rows if row.is_open]
    assert open_rows == ["Now", "Latency and outcomes", "Pool use", "Decisions"]


@pytest.mark.parametrize("uid", BOARD_FILES)
def test_grafanas_sdk_knows_everything_in_a_board(uid: str) -> None:
    document = committed_board(uid)
    assert lost(document, through_the_sdk(document)) == []


def test_what_the_sdk_does_not_know_is_found() -> None:
    document = committed_board("manta-kv")
    document["panels"][1]["titel"] = "a key that Grafana does not have"
    document["templating"]["list"][1]["allVal"] = ".*"
    assert lost(document, through_the_sdk(document)) == ["/panels/1/titel", "/templating/list/1/allVal"]


def test_what_needs_prefill_and_decode_apart_has_a_row_of_its_own() -> None:
    rows = {row.title for board in BOARDS for row in board.rows for panel in row.panels if panel.needs is Needs.APART}
    assert rows == {"Prefill and decode apart"}


@pytest.mark.parametrize("uid", BOARD_FILES)
def test_a_board_has_what_its_readers_expect(uid: str) -> None:
    document = committed_board(uid)
    assert document["graphTooltip"] == 1  # a shared crosshair
    variables = [each["name"] for each in document["templating"]["list"]]
    assert variables == ["datasource", "model", "instance", "role", "replica", "router", "live"]
    others = {f"/d/{other}" for other in BOARD_FILES if other != uid}
    *boards, live = document["links"]
    assert {link["url"] for link in boards} == others
    assert all(link["includeVars"] and link["keepTime"] for link in boards)
    assert live["url"] == "${live}/"
    assert all(len(panel["description"]) > 60 for panel in panels(document))
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels(document))
    marks = [each["name"] for each in document["annotations"]["list"]]
    assert marks == ["Alerts", "Starts", "Ends", "Deaths", "Versions"]
