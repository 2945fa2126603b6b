"""Checks that a running Prometheus returns data for every query of boards and rules.

Never:     parses a query; tests/contract/test_promql.py does.
Invariant: a query that has data only under a condition (prefill and decode apart, an autoscaler, an event) may be empty
           without it, and must never fail.
"""

import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml

from dashboards.board import NARROWING, WINDOW, Needs
from dashboards.files import BOARDS, rules_text

SPAN_S = 120.0  # of the range that is asked for, up to now
STEP_S = 5
TIMEOUT_S = 10
VARIABLES = {f"${name}": ".*" for name in NARROWING}  # as All on the boards
Ask = Callable[[str], list[Any]]  # a query -> its series, each {"metric", "values": [[time, "number"], ...]}


class Returned(StrEnum):
    """Kinds of results of a query."""

    DATA = "data"
    QUIET = "only NaN"  # there are series, but nothing happened that they count
    EMPTY = "no series"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class QueryResult:
    """One query and what Prometheus returned for it."""

    where: str
    query: str
    needs: Needs | None  # None: an alert or an annotation, which is silent when nothing happens
    returned: Returned
    detail: str  # how many series, or the error

    def problem(self, *, disaggregated: bool, autoscaled: bool) -> str | None:
        """Explain why a fleet of this kind under load should return something else; None: all is well."""
        if self.returned is Returned.FAILED:
            return f"{self.where}: {self.detail}\n    {self.query}"
        silent = {Needs.APART: not disaggregated, Needs.AUTOSCALING: not autoscaled} | {
            Needs.GPU: True, Needs.FETCH: True, Needs.TROUBLE: True,
        }  # fmt: skip
        if self.returned is Returned.DATA or self.needs is None or silent.get(self.needs, False):
            return None
        if self.needs is Needs.EVENT and self.returned is Returned.QUIET:
            return None
        return f"{self.where}: {self.returned.value}, wanted data ({self.needs.value})\n    {self.query}"


class PrometheusError(Exception):
    """Prometheus refused a query or did not answer; the message is its own."""


def check_live(
    prometheus_url: str, *, disaggregated: bool, autoscaled: bool = False, window: str = "1m"
) -> list[str]:
    """Return the problems of boards and rules on a Prometheus that scrapes a fleet under load."""
    return problems(survey(prometheus(prometheus_url), window=window), disaggregated, autoscaled)


def problems(results: list[QueryResult], disaggregated: bool, autoscaled: bool) -> list[str]:
    """Return what is wrong with the results of a fleet of this kind under load."""
    found = (each.problem(disaggregated=disaggregated, autoscaled=autoscaled) for each in results)
    return [problem for problem in found if problem]


def survey(ask: Ask, *, window: str = "1m") -> list[QueryResult]:
    """Ask every query of boards and rules once, with ``window`` for Grafana's $__rate_interval."""
    return [_result(ask, where, query, needs) for where, query, needs in queries(window)]


def queries(window: str) -> Iterator[tuple[str, str, Needs | None]]:
    """Yield each query's place, its text with the variables filled in, and what it needs."""
    for board in BOARDS:
        for panel in board.panels:
            for number, query in enumerate(panel.queries.values()):
                text = query.replace(WINDOW, window)
                for variable, value in VARIABLES.items():
                    text = text.replace(f'"{variable}"', f'"{value}"')
                yield f"{board.title} / {panel.title} [{chr(ord('A') + number)}]", text, panel.needs
        for events in board.annotations:
            yield f"{board.title} / annotation {events.name}", events.query, None
    for group in yaml.safe_load(rules_text())["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                yield rule["record"], rule["expr"], Needs.TRAFFIC
            else:
                yield f"alert {rule['alert']}", rule["expr"], None


def prometheus(url: str, clock: Callable[[], float] = time.time) -> Ask:
    """Make a function that asks the server at ``url`` for the last two minutes."""

    def ask(query: str) -> list[Any]:
        now = clock()
        values = {"query": query, "start": f"{now - SPAN_S:.3f}", "end": f"{now:.3f}", "step": str(STEP_S)}
        address = f"{url.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(values)}"
        try:
            with urllib.request.urlopen(address, timeout=TIMEOUT_S) as reply:
                series: list[Any] = json.load(reply)["data"]["result"]
                return series
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")  # JSON about a bad query; plain text while it starts
            said = json.loads(text)["error"] if text.startswith("{") else f"{url} answers {error.code}: {text.strip()}"
            raise PrometheusError(said) from error
        except (OSError, ValueError) as error:
            raise PrometheusError(f"{url} gave no answer: {error}") from error

    return ask


def table(found: list[QueryResult]) -> str:
    """Format one line per query."""
    rows = [(each.returned.value, each.detail, each.where) for each in found]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{answer:{widths[0]}}  {detail:>{widths[1]}}  {where}" for answer, detail, where in rows)


def _result(ask: Ask, where: str, query: str, needs: Needs | None) -> QueryResult:
    try:
        series = ask(query)
    except PrometheusError as error:
        return QueryResult(where, query, needs, Returned.FAILED, str(error))
    numbers = [float(value) for each in series for _, value in each["values"]]
    if any(not math.isnan(number) for number in numbers):
        answer = Returned.DATA
    else:
        answer = Returned.QUIET if numbers else Returned.EMPTY
    return QueryResult(where, query, needs, answer, f"{len(series)} series")
