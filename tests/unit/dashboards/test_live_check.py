"""Results of a Prometheus are judged by the needs of each panel."""

import http.server
import json
import threading
from typing import Any

import pytest

from dashboards.board import Needs
from dashboards.check import PrometheusError, QueryResult, Returned, prometheus, queries, survey, table


def series(*values: str) -> dict[str, Any]:
    return {"metric": {}, "values": [[1.0, value] for value in values]}


def answers_of(reply: list[Any]) -> set[Returned]:
    return {each.returned for each in survey(lambda query: reply)}


def test_numbers_are_data_and_nan_alone_is_quiet_and_nothing_is_empty() -> None:
    assert answers_of([series("NaN"), series("NaN", "0")]) == {Returned.DATA}
    assert answers_of([series("NaN", "NaN")]) == {Returned.QUIET}
    assert answers_of([]) == {Returned.EMPTY}


def test_a_refused_query_is_failed_with_the_servers_own_words() -> None:
    def refuse(query: str) -> list[Any]:
        raise PrometheusError("parse error: unexpected )")

    asked = survey(refuse)
    assert {each.detail for each in asked} == {"parse error: unexpected )"}
    assert all(each.problem(disaggregated=False, autoscaled=False) for each in asked)


@pytest.mark.parametrize(
    ("needs", "returned", "disaggregated", "autoscaled", "fine"),
    [
        (Needs.TRAFFIC, Returned.DATA, True, True, True),
        (Needs.TRAFFIC, Returned.QUIET, False, False, False),
        (Needs.TRAFFIC, Returned.EMPTY, False, False, False),
        (Needs.APART, Returned.EMPTY, False, True, True),
        (Needs.APART, Returned.EMPTY, True, False, False),
        (Needs.APART, Returned.FAILED, False, False, False),
        (Needs.AUTOSCALING, Returned.EMPTY, True, False, True),
        (Needs.AUTOSCALING, Returned.EMPTY, False, True, False),
        (Needs.EVENT, Returned.QUIET, False, False, True),
        (Needs.EVENT, Returned.EMPTY, False, False, False),
        (None, Returned.EMPTY, True, True, True),  # an alert is silent when all is well
        (None, Returned.FAILED, True, True, False),
    ],
)
def test_an_answer_is_fine_or_a_problem(
    needs: Needs | None, returned: Returned, disaggregated: bool, autoscaled: bool, fine: bool
) -> None:
    asked = QueryResult("board / panel [A]", "up", needs, returned, "0 series")
    assert (asked.problem(disaggregated=disaggregated, autoscaled=autoscaled) is None) == fine


def test_queries_are_asked_with_their_variables_filled_in() -> None:
    asked = [query for _, query, _ in queries("30s")]
    assert not [query for query in asked if "$" in query]
    assert 'sum(rate(manta_requests_total{model=~".*",instance=~".*",replica=~".*"}[30s]))' in asked


def test_the_table_has_one_line_per_query() -> None:
    found = [
        QueryResult("a", "up", None, Returned.DATA, "12 series"),
        QueryResult("b", "up", None, Returned.EMPTY, "0 series"),
    ]
    assert table(found).splitlines() == ["data       12 series  a", "no series   0 series  b"]


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers as Prometheus does to a query that it cannot parse."""

    def do_GET(self) -> None:
        self.send_response(400)
        self.end_headers()
        self.wfile.write(json.dumps({"status": "error", "error": f"bad: {self.path[:30]}"}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_an_error_is_prometheus_own_message() -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), Refusing)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    with pytest.raises(PrometheusError, match=r"bad: /api/v1/query_range\?query=up%2"):
        prometheus(f"http://127.0.0.1:{server.server_address[1]}/")("up+")
    thread.join(timeout=10)
    server.server_close()


def test_an_unreachable_server_is_named() -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), Refusing)
    port = server.server_address[1]
    server.server_close()
    with pytest.raises(PrometheusError, match=f"http://127.0.0.1:{port} gave no answer"):
        prometheus(f"http://127.0.0.1:{port}")("up")
