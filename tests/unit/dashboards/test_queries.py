"""Queries come from the catalogue: what it does not have cannot be written."""

from collections.abc import Callable

import pytest

from dashboards.board import Line
from dashboards.query import Kit, Query, QueryError, both, compare, none_of, one_of, ratio

BOARD = Kit()
RULE = Kit(window="5m", scoped=False)


def test_a_rate_of_a_replicas_counter_is_narrowed_by_the_boards_variables() -> None:
    assert BOARD.rate("scheduler_tokens_total", by=["kind"]).text == (
        "sum by (kind) (rate(manta_scheduler_tokens_total"
        '{model=~"$model",role=~"$role",replica=~"$replica"}[$__rate_interval]))'
    )


def test_a_routers_metric_is_not_narrowed_by_the_replica_that_is_looked_at() -> None:
    assert BOARD.gauge("requests_in_flight").text == 'sum(manta_requests_in_flight{model=~"$model"})'


def test_a_rule_sees_everything() -> None:
    assert RULE.rate("cache_lookup_tokens_total").text == "sum(rate(manta_cache_lookup_tokens_total[5m]))"


def test_a_quantile_keeps_le_and_drops_it_from_the_result() -> None:
    query = RULE.quantile(0.9, "scheduler_step_duration_seconds", by=["phase"])
    assert query.text == (
        "histogram_quantile(0.9, sum by (phase, le) (rate(manta_scheduler_step_duration_seconds_bucket[5m])))"
    )
    assert query.labels == {"phase"}


def test_a_mean_is_of_sums_and_has_no_value_while_nothing_happens() -> None:
    assert RULE.mean("request_prompt_tokens").text == (
        "(sum(rate(manta_request_prompt_tokens_sum[5m])) / (sum(rate(manta_request_prompt_tokens_count[5m])) > 0))"
    )


def test_a_part_with_more_labels_is_divided_by_the_whole_that_it_belongs_to() -> None:
    share = ratio(RULE.rate("cache_hit_tokens_total", by=["tier"]), RULE.rate("cache_lookup_tokens_total"))
    assert " / on () group_left () (sum(" in share.text
    assert share.labels == {"tier"}


def test_values_are_matched_or_left_out() -> None:
    where = {"outcome": none_of("ok", "cancelled"), "endpoint": one_of("chat")}
    query = RULE.rate("requests_total", where=where)
    assert query.text == 'sum(rate(manta_requests_total{outcome!~"ok|cancelled",endpoint="chat"}[5m]))'


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda: RULE.rate("scheduler_token_total"), "scheduler_token_total is not in the catalogue"),
        (lambda: RULE.rate("cache_nodes"), "cache_nodes is a gauge; this function takes a counter"),
        (lambda: RULE.gauge("cache_nodes", by=["replic"]), r"no labels \['replic'\]; it has .*'replica'"),
        (lambda: RULE.gauge("cache_nodes", by=["le"]), "no labels"),
        (lambda: RULE.gauge("cache_nodes", where={"teir": "L1"}), "no label teir"),
        (lambda: RULE.gauge("cache_nodes", where={"tier": "L9"}), r"tier is never \['L9'\]; it is one of \['L1'\]"),
        (lambda: RULE.gauge("cache_nodes", over="mean"), "wanted sum, max, min or count"),
        (lambda: RULE.quantile(90, "request_prompt_tokens"), "wanted a number between 0 and 1"),
        (lambda: Kit(window="five minutes"), "wanted .* or a duration"),
        (lambda: compare(RULE.gauge("cache_nodes"), "=>", 1), "is no comparison"),
        (
            lambda: ratio(RULE.rate("cache_lookup_tokens_total"), RULE.rate("cache_hit_tokens_total", by=["tier"])),
            r"\['tier'\] are missing",
        ),
        (
            lambda: both(RULE.gauge("cache_nodes"), RULE.gauge("cache_nodes", by=["model"]), on=["model"]),
            r"no labels \['model'\] to join on",
        ),
        (lambda: Line(RULE.gauge("cache_nodes", by=["role"]), "{{role}} {{replica}}"), r"names \['replica'\]"),
    ],
)
def test_what_the_catalogue_does_not_have_is_refused(write: Callable[[], Query], said: str) -> None:
    with pytest.raises(QueryError, match=said):
        write()


def test_a_query_knows_whether_it_needs_prefill_and_decode_apart() -> None:
    assert RULE.gauge("transfer_peers").disaggregated
    assert not RULE.gauge("cache_nodes").disaggregated
