"""The files that `python -m dashboards export` writes, and the other commands' exit codes."""

import json
import pathlib
from typing import Any

import pytest
import yaml

from dashboards import files
from dashboards.__main__ import main
from dashboards.alerts import ALERTS


def test_prometheus_asks_the_observatory_for_targets(tmp_path: pathlib.Path) -> None:
    assert main(["export", str(tmp_path), "--url", "http://serve:8000/manta/"]) == 0
    settings = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    assert settings["global"]["scrape_interval"] == "3s"
    assert settings["scrape_configs"] == [
        {"job_name": "manta", "http_sd_configs": [{"url": "http://serve:8000/manta/sd", "refresh_interval": "1s"}]}
    ]


def test_a_longer_interval_is_the_data_sources_too_and_a_scrape_stays_bounded(tmp_path: pathlib.Path) -> None:
    main(["export", str(tmp_path), "--interval", "15"])
    times = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["global"]
    assert (times["scrape_interval"], times["scrape_timeout"]) == ("15s", "10s")
    assert options(tmp_path) == {"timeInterval": "15s", "httpMethod": "POST"}
    assert "scrapes them every 15 s." in (tmp_path / "README.md").read_text()
    main(["export", str(tmp_path), "--interval", "2.5"])  # Prometheus refuses 2.5s
    assert yaml.safe_load((tmp_path / "prometheus.yml").read_text())["global"]["scrape_interval"] == "2500ms"


def test_exemplars_lead_to_their_traces_where_these_are_known(tmp_path: pathlib.Path) -> None:
    """Grafana's provisioning reads $$ as a $."""
    main(["export", str(tmp_path), "--traces-url", "http://jaeger/trace/${__value.raw}"])
    [leads] = options(tmp_path)["exemplarTraceIdDestinations"]
    assert (leads["name"], leads["url"]) == ("trace_id", "http://jaeger/trace/$${__value.raw}")


def options(folder: pathlib.Path) -> dict[str, Any]:
    """What the data source in an exported folder is told besides its address."""
    source = yaml.safe_load((folder / "grafana/provisioning/datasources/manta.yml").read_text())
    found: dict[str, Any] = source["datasources"][0]["jsonData"]
    return found


def test_the_key_is_named_by_its_file_and_never_copied(tmp_path: pathlib.Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("a-secret")
    main(["export", str(tmp_path / "watch"), "--key-file", str(key_file)])
    written = [path.read_text() for path in (tmp_path / "watch").rglob("*") if path.is_file()]
    assert not [text for text in written if "a-secret" in text]
    [job] = yaml.safe_load((tmp_path / "watch/prometheus.yml").read_text())["scrape_configs"]
    shown = {"type": "Bearer", "credentials_file": str(key_file)}
    assert job["http_sd_configs"][0]["authorization"] == job["authorization"] == shown  # the processes ask for it too


def test_grafana_finds_the_boards_and_prometheus(tmp_path: pathlib.Path) -> None:
    main(["export", str(tmp_path), "--prometheus", "http://prom:9090"])
    provisioning = tmp_path / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "manta.yml").read_text())["datasources"][0]
    assert (source["type"], source["url"]) == ("prometheus", "http://prom:9090")
    provider = yaml.safe_load((provisioning / "dashboards" / "manta.yml").read_text())["providers"][0]
    folder = pathlib.Path(provider["options"]["path"])
    uids = {json.loads(path.read_text())["uid"] for path in folder.iterdir()}
    assert uids == set(files.BOARD_FILES)


def test_boards_lead_to_the_live_view_at_the_address_that_was_given(tmp_path: pathlib.Path) -> None:
    main(["export", str(tmp_path), "--url", "http://serve:8000/manta/"])
    for uid in files.BOARD_FILES:
        board = json.loads((tmp_path / "grafana" / "boards" / f"{uid}.json").read_text())
        [live] = [each for each in board["templating"]["list"] if each["name"] == "live"]
        assert live["query"] == live["current"]["value"] == "http://serve:8000/manta"


def test_alerts_link_to_where_the_runbook_can_be_read(tmp_path: pathlib.Path) -> None:
    main(["export", str(tmp_path), "--docs-url", "https://example.org/manta/"])
    rules = yaml.safe_load((tmp_path / "rules.yml").read_text())["groups"][1]["rules"]
    sections = [rule["annotations"]["runbook_url"] for rule in rules]
    assert sections == [f"https://example.org/manta/docs/runbook.md#{rule['alert'].lower()}" for rule in rules]
    assert sections[0].endswith("#norouter")
    main(["export", str(tmp_path), "--url", "http://serve:8000/manta/"])
    rules = yaml.safe_load((tmp_path / "rules.yml").read_text())["groups"][1]["rules"]
    assert rules[0]["annotations"]["runbook_url"] == "http://serve:8000/manta/runbook#norouter"


def test_an_alert_leads_to_the_board_that_shows_most_of_what_it_reads(tmp_path: pathlib.Path) -> None:
    main(["export", str(tmp_path), "--grafana", "http://grafana:3000/"])
    groups = yaml.safe_load((tmp_path / "rules.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    boards = {rule["alert"]: rule["annotations"]["dashboard_url"] for rule in rules}
    assert boards["KvPoolNearlyFull"] == "http://grafana:3000/d/manta-kv"
    assert boards["KvTransferFailures"] == boards["RouterReportsOld"] == "http://grafana:3000/d/manta-routing"
    assert boards["ItlObjectiveBurn"] == boards["TargetDown"] == "http://grafana:3000/d/manta-fleet"


def test_an_alerts_name_as_the_boards_have_it_is_a_place_in_the_runbook() -> None:
    page = files.RUNBOOK_PAGE.read_text()
    assert all(f'id="{alert.name}"' in page for alert in ALERTS)


def test_build_says_that_there_is_nothing_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build"]) == 0
    assert capsys.readouterr().out == "nothing to write: all files are as the catalogue says\n"


def test_only_what_changed_is_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "same").write_text("1")
    texts = {tmp_path / "same": "1", tmp_path / "new" / "file": "2"}
    assert files.write(texts) == [tmp_path / "new" / "file"]
    assert (tmp_path / "new" / "file").read_text() == "2"


def test_check_fails_where_no_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--prometheus", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9 gave no answer" in capsys.readouterr().err
