"""Asks a running Prometheus every query of boards and rules: does data come back?

Invariant: a query that shows data only under a condition (prefill and decode apart, an autoscaler, an event) may be
           empty without it, and must never fail.
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

from dashboards.board import Needs
from dashboards.boards.all import BOARDS
from dashboards.query import BOARD_WINDOW
from dashboards.rules import ALERTS, RECORDINGS

SPAN_S = 120.0  # of the range that is asked for, up to now
STEP_S = 5
TIMEOUT_S = 10
VARIABLES = {"$model": ".*", "$role": ".*", "$replica": ".*"}  # as All on the boards
Ask = Callable[[str], list[Any]]  # a query -> its series, each {"metric", "values": [[time, "number"], ...]}


class Answer(StrEnum):
    DATA = "data"
    QUIET = "only NaN"  # series are there, but nothing happened that they could tell
    EMPTY = "no series"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Asked:
    """One query and what came back."""

    where: str
    query: str
    needs: Needs | None  # None: an alert, which is silent when all is well
    answer: Answer
    detail: str  # how many series, or the error

    def problem(self, *, disaggregated: bool, autoscaled: bool) -> str | None:
        """Why this answer is not what a fleet of this kind under load gives; None: all is well."""
        if self.answer is Answer.FAILED:
            return f"{self.where}: {self.detail}\n    {self.query}"
        silent = {Needs.APART: not disaggregated, Needs.AUTOSCALING: not autoscaled}
        if self.answer is Answer.DATA or self.needs is None or silent.get(self.needs, False):
            return None
        if self.needs is Needs.EVENT and self.answer is Answer.QUIET:
            return None
        return f"{self.where}: {self.answer.value}, wanted data ({self.needs.value})\n    {self.query}"


class PrometheusError(Exception):
    """Prometheus refused a query or did not answer; the message is its own."""


def check_live(
    prometheus_url: str, *, disaggregated: bool, autoscaled: bool = False, window: str = "1m"
) -> list[str]:
    """Problems of boards and rules against a Prometheus that scrapes a fleet under load; none is what one wants."""
    found = survey(prometheus(prometheus_url), window=window)
    problems = (each.problem(disaggregated=disaggregated, autoscaled=autoscaled) for each in found)
    return [problem for problem in problems if problem]


def survey(ask: Ask, *, window: str = "1m") -> list[Asked]:
    """Every query of boards and rules, asked once; ``window`` stands for Grafana's $__rate_interval."""
    return [_asked(ask, where, query, needs) for where, query, needs in queries(window)]


def queries(window: str) -> Iterator[tuple[str, str, Needs | None]]:
    """Where it stands, the query with its variables filled in, and what it needs."""
    for board in BOARDS:
        for panel in board.panels:
            for number, line in enumerate(panel.lines):
                text = line.query.text.replace(BOARD_WINDOW, window)
                for variable, value in VARIABLES.items():
                    text = text.replace(f'"{variable}"', f'"{value}"')
                yield f"{board.title} / {panel.title} [{chr(ord('A') + number)}]", text, panel.needs
    for recording in RECORDINGS:
        yield recording.name, recording.query.text, Needs.APART if recording.query.disaggregated else Needs.TRAFFIC
    for alert in ALERTS:
        yield f"alert {alert.name}", alert.query.text, None


def prometheus(url: str, clock: Callable[[], float] = time.time) -> Ask:
    """Asks the server at ``url`` for the last two minutes."""

    def ask(query: str) -> list[Any]:
        now = clock()
        values = {"query": query, "start": f"{now - SPAN_S:.3f}", "end": f"{now:.3f}", "step": str(STEP_S)}
        address = f"{url.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(values)}"
        try:
            with urllib.request.urlopen(address, timeout=TIMEOUT_S) as reply:
                series: list[Any] = json.load(reply)["data"]["result"]
                return series
        except urllib.error.HTTPError as error:
            raise PrometheusError(json.loads(error.read() or b"{}").get("error", str(error))) from error
        except (OSError, ValueError) as error:
            raise PrometheusError(f"{url} gave no answer: {error}") from error

    return ask


def table(found: list[Asked]) -> str:
    """One line a query."""
    rows = [(each.answer.value, each.detail, each.where) for each in found]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{answer:{widths[0]}}  {detail:>{widths[1]}}  {where}" for answer, detail, where in rows)


def _asked(ask: Ask, where: str, query: str, needs: Needs | None) -> Asked:
    try:
        series = ask(query)
    except PrometheusError as error:
        return Asked(where, query, needs, Answer.FAILED, str(error))
    numbers = [float(value) for each in series for _, value in each["values"]]
    if any(not math.isnan(number) for number in numbers):
        answer = Answer.DATA
    else:
        answer = Answer.QUIET if numbers else Answer.EMPTY
    return Asked(where, query, needs, answer, f"{len(series)} series")
