"""A real Prometheus over what `python -m dashboards export` writes, asked over its HTTP API.

Owns:      the process, and its folder's contents.
Never:     changes what was exported: intervals and rules are those that people get.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from deployments.places import ROOT
from tests.programs import program
from tests.serve.running import HTTP, free_port


class Prometheus:
    """One that runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        answer = HTTP.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10)
        assert answer.status_code != 400, answer.text  # the query is wrong; 503: it is starting
        answer.raise_for_status()
        return answer.json()["data"]

    def series(self, query: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each, as of now."""
        found = self.get("query", query=query)["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def value(self, query: str) -> float | None:
        """Of a query with one answer; None while there is none."""
        found = self.series(query)
        assert len(found) <= 1, f"{query} has {len(found)} answers"
        return found[0][1] if found else None

    def targets(self) -> dict[str, str]:
        """Address of each active target -> its health."""
        found = self.get("targets", state="active")["activeTargets"]
        return {each["labels"]["instance"]: each["health"] for each in found}

    def rules_ran_s(self) -> float:
        """When the group of rules that waits longest ran last, in seconds since 1970."""
        groups = self.get("rules")["groups"]
        return min(datetime.fromisoformat(each["lastEvaluation"]).timestamp() for each in groups)

    def fired(self) -> list[str]:
        """Alerts that have fired at any time."""
        return [labels["alertname"] for labels, _ in self.series('count_over_time(ALERTS{alertstate="firing"}[1h])')]


@contextmanager
def prometheus(folder: Path, observatory_url: str) -> Iterator[Prometheus]:
    """Started, and answering; it has scraped nothing yet."""
    binary = program("prometheus", "prometheus")
    exported = [sys.executable, "-m", "dashboards", "export", str(folder), "--url", observatory_url]
    subprocess.run(exported, cwd=ROOT, check=True, capture_output=True)
    address = f"127.0.0.1:{free_port()}"
    command = [binary, "--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(30)


def complaints(text: str) -> str:
    """What `promtool check metrics` says against an exposition; empty: it is clean."""
    promtool = program("promtool", "prometheus")
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr
