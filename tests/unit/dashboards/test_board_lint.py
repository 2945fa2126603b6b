"""Faults of hand-written boards and rules are found: each test seeds one."""

from typing import Any

import pytest

from dashboards.lint import Known, check_board, check_places, check_query, check_rules

KNOWN = Known.of_catalog(recorded={"model:manta_x:ratio": frozenset({"model"})})


def faults(text: str) -> list[str]:
    return [problem.what for problem in check_query("here", text, KNOWN)]


@pytest.mark.parametrize(
    "text",
    [
        'sum by (role) (rate(manta_scheduler_tokens_total{kind="decode",replica=~"$replica"}[$__rate_interval]))',
        "histogram_quantile(0.9, sum by (le, stage) (rate(manta_request_stage_duration_seconds_bucket[5m])))",
        'up{job="manta"} == 0',
        "model:manta_x:ratio > 1",
        "sum by (replica) (manta_cache_nodes) / on (replica) group_left (node) manta_replica_info",
        "sum without (tier) (manta_cache_nodes)",
    ],
)
def test_a_right_query_has_no_faults(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sum(rate(manta_scheduler_token_total[5m]))", "there is no series manta_scheduler_token_total"),
        ("sum(rate(manta_scheduler_tokens_total[5m])", "does not parse"),
        ("rate(manta_cache_nodes)", "does not parse"),
        ("manta_request_prompt_tokens", "there is no series manta_request_prompt_tokens"),  # a histogram has parts
        ('manta_cache_nodes{teir="L1"}', "has no label teir"),
        ('manta_kv_pool_tokens{state=~"free|fre"}', "state is never ['fre']"),
        ("sum by (replic) (manta_cache_nodes)", "by or without: no series inside has labels ['replic']"),
        ("sum without (replic) (manta_cache_nodes)", "by or without: no series inside has labels ['replic']"),
        ("sum by (le) (manta_request_prompt_tokens_sum)", "by or without: no series inside has labels ['le']"),
        ("manta_cache_nodes / on (replic) manta_transfer_peers", "on or ignoring: no series"),
        ("manta_cache_nodes * on (replica) group_left (nod) manta_replica_info", "group_left: no series"),
        ('label_replace(manta_cache_node, "a", "$1", "replica", "(.*)")', "there is no series manta_cache_node"),
        ("max_over_time(sum by (replic) (manta_cache_nodes)[5m:])", "no series inside has labels ['replic']"),
        ("1 - manta_cache_node", "there is no series manta_cache_node"),
    ],
)
def test_a_fault_is_found_and_named(text: str, said: str) -> None:
    assert any(said in fault for fault in faults(text)), faults(text)


def panel(number: int, x: int, y: int, w: int = 8) -> dict[str, Any]:
    place = {"x": x, "y": y, "w": w, "h": 8}
    return {"id": number, "title": f"panel {number}", "gridPos": place, "targets": []}


def board(*panels: dict[str, Any], variables: tuple[dict[str, str], ...] = ()) -> dict[str, Any]:
    return {"title": "board", "panels": list(panels), "templating": {"list": list(variables)}}


def test_panels_beside_and_below_each_other_are_fine() -> None:
    assert check_places(board(panel(1, 0, 0), panel(2, 8, 0), panel(3, 0, 8))) == []


@pytest.mark.parametrize(
    ("panels", "said"),
    [
        ((panel(1, 0, 0), panel(2, 7, 7)), "'panel 1' and 'panel 2' lie over each other"),
        ((panel(1, 0, 0), panel(1, 8, 0)), "have the same id 1"),
        ((panel(1, 18, 0),), "'panel 1' sticks out of the 24 columns"),
    ],
)
def test_misplaced_panels_are_found(panels: tuple[dict[str, Any], ...], said: str) -> None:
    assert [said in str(problem) for problem in check_places(board(*panels))] == [True]


def test_a_boards_panels_and_variables_are_checked_where_they_stand() -> None:
    spoilt = panel(1, 0, 0)
    spoilt["targets"] = [{"refId": "B", "expr": "manta_cache_node"}]
    variable = {"type": "query", "name": "role", "query": 'label_values(manta_replica_info{modl=~"$model"}, rol)'}
    found = check_board(board(spoilt, variables=(variable,)), KNOWN)
    assert [problem.where for problem in found] == ["board / panel 1 [B]", *["board / variable role"] * 2]


def test_a_rules_fault_names_the_rule() -> None:
    found = check_rules({"groups": [{"rules": [{"alert": "TooFull", "expr": "manta_pool > 1"}]}]}, KNOWN)
    assert [str(problem).split("\n")[0] for problem in found] == [
        "rule TooFull: there is no series manta_pool; the catalogue is dashboards/catalog.py"
    ]
