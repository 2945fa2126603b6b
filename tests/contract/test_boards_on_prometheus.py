"""A real Prometheus runs every query of boards, rules and docs/scaling.md, over series that have the catalogue's names
and labels, and accepts the settings of that page.

The check of boards and rules against a real Manta is part of tests/serve.
"""

import contextlib
import pathlib
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

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
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "scaling.md"


@pytest.fixture(scope="module")
def exporter() -> Iterator[FakeExporter]:
    exporter = FakeExporter(without=APART)
    yield exporter
    exporter.stop()


@pytest.fixture(scope="module")
def url(exporter: FakeExporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus over what is exported, but scraping each second; after four scrapes."""
    folder = tmp_path_factory.mktemp("prometheus")
    export(folder, Export(url=f"http://127.0.0.1:{exporter.port}/manta"))
    settings = yaml.safe_load((folder / "prometheus.yml").read_text())
    settings["global"].update(scrape_interval="1s", scrape_timeout="1s")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    binary = program("prometheus", "prometheus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        wait_until(f"http://{address}", "count_over_time(up[2m]) >= 4")
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_until(url: str, query: str) -> None:
    ask = prometheus(url)
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        with contextlib.suppress(PrometheusError):  # it is starting
            if ask(query):
                return
        time.sleep(0.25)
    pytest.fail(f"{query}: nothing of it within {DEADLINE_S:g} s at {url}")


def test_every_query_returns_data_and_what_is_missing_is_missed(url: str, exporter: FakeExporter) -> None:
    assert check_live(url, disaggregated=False, autoscaled=True) == []
    missed = check_live(url, disaggregated=True, autoscaled=True)
    exporter.without = frozenset()
    try:
        wait_until(url, "count_over_time(manta_transfer_bytes_total[2m]) >= 3")
        assert check_live(url, disaggregated=True, autoscaled=True) == []
    finally:
        exporter.without = APART
    panels = [panel for board in BOARDS for panel in board.panels if panel.needs is Needs.APART]
    wanted = sum(len(panel.queries) for panel in panels)
    assert len(missed) == wanted == 12
    assert all("no series, wanted data (prefill and decode apart)" in problem for problem in missed)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def documents() -> list[dict[str, Any]]:
    return [document for block in blocks("yaml") for document in yaml.safe_load_all(block)]


def by_kind(kind: str) -> dict[str, Any]:
    [found] = [each for each in documents() if each.get("kind") == kind]
    return found


def test_promtool_accepts_the_scrape_settings_of_the_page(tmp_path: pathlib.Path) -> None:
    """With a target in the place of Kubernetes' pods, which Debian's Prometheus cannot look for."""
    settings, file = documents()[0], tmp_path / "prometheus.yml"
    [job] = settings["scrape_configs"]
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    job["static_configs"] = [{"targets": ["localhost:8000"]}]
    file.write_text(yaml.safe_dump(settings))
    check = [program("promtool", "prometheus"), "check", "config", "--syntax-only", str(file)]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_query_of_the_page_has_one_answer(url: str) -> None:
    """From the series of a fake fleet: each gauge is 0.5, and each counter and bucket 1 more with each scrape."""
    ask = prometheus(url)
    triggers = [each["metadata"]["query"] for each in by_kind("ScaledObject")["spec"]["triggers"]]
    answers = [ask(query) for query in (*triggers, *blocks("promql"))]
    picker = by_kind("EndpointPickerConfig")["plugins"][1]["parameters"]["engineConfigs"][0]
    specs = [name for key, name in picker.items() if key.endswith("Spec") and name]
    series = [ask(re.sub(r"=(\w+)", r'="\1"', spec)) for spec in specs]  # its values have no quotes
    assert [len(each) for each in answers] == [1, 1, 1]
    assert [float(each[0]["values"][-1][1]) for each in answers] == [2.5, 0.5, 0.0]  # five states
    assert [len(each) for each in series] == [1, 1, 1], "the endpoint picker reads one series of each"


def test_the_gateway_leads_to_the_pool_and_its_picker_scores_with_plugins_that_are_there() -> None:
    pool, picker = by_kind("InferencePool"), by_kind("EndpointPickerConfig")
    [rule] = by_kind("HTTPRoute")["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": pool["apiVersion"].partition("/")[0], "kind": "InferencePool", "name": pool["metadata"]["name"]}
    ]
    declared = {each["type"] for each in picker["plugins"]}
    assert {each["pluginRef"] for each in picker["schedulingProfiles"][0]["plugins"]} <= declared
