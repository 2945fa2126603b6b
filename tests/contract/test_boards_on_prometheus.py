"""A real Prometheus runs every query of boards and rules, over series that have the catalogue's names and labels.

The same check against a real Manta is part of tests/serve.
"""

import contextlib
import pathlib
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
import yaml

from dashboards.board import Needs
from dashboards.catalog import METRICS
from dashboards.check import PrometheusError, check_live, prometheus
from dashboards.files import BOARDS, Export, export
from tests.fake_exporter import FakeExporter
from tests.programs import program

APART = frozenset(metric.name for metric in METRICS if metric.disaggregated)
DEADLINE_S = 60.0


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[str]:
    """A Prometheus with the folder's prometheus.yml; yields its URL."""
    binary = program("prometheus", "prometheus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=30)


@contextlib.contextmanager
def running_prometheus(folder: pathlib.Path, exporter: FakeExporter) -> Iterator[str]:
    """Prometheus over what is exported, but scraping each second; yields its URL after four scrapes."""
    export(folder, Export(url=f"http://127.0.0.1:{exporter.port}/manta"))
    settings = yaml.safe_load((folder / "prometheus.yml").read_text())
    settings["global"].update(scrape_interval="1s", scrape_timeout="1s")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    with running(folder) as url:
        wait_until(url, "count_over_time(up[2m]) >= 4")
        yield url


def wait_until(url: str, query: str) -> None:
    ask = prometheus(url)
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        with contextlib.suppress(PrometheusError):  # it is starting
            if ask(query):
                return
        time.sleep(0.25)
    pytest.fail(f"{query}: nothing of it within {DEADLINE_S:g} s at {url}")


def test_every_query_returns_data_and_what_is_missing_is_missed(tmp_path: pathlib.Path) -> None:
    exporter = FakeExporter(without=APART)
    try:
        with running_prometheus(tmp_path, exporter) as url:
            assert check_live(url, disaggregated=False, autoscaled=True) == []
            missed = check_live(url, disaggregated=True, autoscaled=True)
            exporter.without = frozenset()
            wait_until(url, "count_over_time(manta_transfer_bytes_total[2m]) >= 3")
            assert check_live(url, disaggregated=True, autoscaled=True) == []
    finally:
        exporter.stop()
    panels = [panel for board in BOARDS for panel in board.panels if panel.needs is Needs.APART]
    wanted = sum(len(panel.queries) for panel in panels)
    assert len(missed) == wanted == 12
    assert all("no series, wanted data (prefill and decode apart)" in problem for problem in missed)
