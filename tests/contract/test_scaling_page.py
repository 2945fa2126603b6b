"""What docs/scaling.md shows works: a real Prometheus scrapes with its settings and answers its queries."""

import pathlib
import re
import subprocess
from typing import Any

import yaml

from dashboards.check import prometheus
from tests.contract.test_boards_on_prometheus import running, wait_until
from tests.fake_exporter import FakeExporter
from tests.programs import program

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "scaling.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def documents() -> list[dict[str, Any]]:
    return [document for block in blocks("yaml") for document in yaml.safe_load_all(block)]


def by_kind(kind: str) -> dict[str, Any]:
    [found] = [each for each in documents() if each.get("kind") == kind]
    return found


def scrape_settings(*targets: str) -> str:
    """The page's, with ``targets`` in the place of Kubernetes' pods, which Debian's Prometheus cannot look for."""
    settings = documents()[0]
    [job] = settings["scrape_configs"]
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    return yaml.safe_dump(settings | {"scrape_configs": [job | {"static_configs": [{"targets": list(targets)}]}]})


def test_promtool_accepts_the_scrape_settings(tmp_path: pathlib.Path) -> None:
    settings = tmp_path / "prometheus.yml"
    settings.write_text(scrape_settings("localhost:8000"))
    check = [program("promtool", "prometheus"), "check", "config", "--syntax-only", str(settings)]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_query_of_the_page_has_one_answer(tmp_path: pathlib.Path) -> None:
    """From the series of a fake fleet: each gauge is 0.5, and each counter and bucket 1 more with each scrape."""
    exporter = FakeExporter()
    settings = yaml.safe_load(scrape_settings(f"127.0.0.1:{exporter.port}"))
    del settings["scrape_configs"][0]["relabel_configs"]  # of the labels of pods
    settings["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings))
    triggers = [each["metadata"] for each in by_kind("ScaledObject")["spec"]["triggers"]]
    try:
        with running(tmp_path) as url:
            wait_until(url, "count_over_time(manta_time_to_first_token_seconds_count[2m]) >= 3")
            ask = prometheus(url)
            answers = [ask(each["query"]) for each in triggers] + [ask(query) for query in blocks("promql")]
            picker = by_kind("EndpointPickerConfig")["plugins"][1]["parameters"]["engineConfigs"][0]
            specs = [name for key, name in picker.items() if key.endswith("Spec") and name]
            series = [ask(re.sub(r"=(\w+)", r'="\1"', spec)) for spec in specs]  # its values have no quotes
    finally:
        exporter.stop()
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
