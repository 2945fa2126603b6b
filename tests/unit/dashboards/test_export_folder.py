"""What `python -m dashboards export` writes, and the other commands' exit codes."""

import json
import pathlib
import sys

import pytest
import yaml

from dashboards import generated
from dashboards.__main__ import main
from dashboards.rules import ALERTS


def test_prometheus_asks_the_observatory_for_targets(tmp_path: pathlib.Path) -> None:
    assert main(["export", str(tmp_path), "--url", "http://serve:8000/manta/"]) == 0
    settings = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    assert settings["global"]["scrape_interval"] == "3s"
    assert settings["scrape_configs"] == [
        {"job_name": "manta", "http_sd_configs": [{"url": "http://serve:8000/manta/sd", "refresh_interval": "1s"}]}
    ]


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
    assert uids == set(generated.BOARD_FILES)


def test_alerts_link_to_where_the_runbook_can_be_read(tmp_path: pathlib.Path) -> None:
    main(["export", str(tmp_path), "--docs-url", "https://example.org/manta/"])
    rules = yaml.safe_load((tmp_path / "rules.yml").read_text())["groups"][1]["rules"]
    assert len(rules) == len(ALERTS)
    assert rules[0]["annotations"]["runbook_url"] == "https://example.org/manta/docs/runbook.md#norouter"


def test_build_says_that_there_is_nothing_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build"]) == 0
    assert capsys.readouterr().out == "nothing to write: all files are as the catalogue says\n"


def test_only_what_changed_is_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "same").write_text("1")
    texts = {tmp_path / "same": "1", tmp_path / "new" / "file": "2"}
    assert generated.write(texts) == [tmp_path / "new" / "file"]
    assert (tmp_path / "new" / "file").read_text() == "2"


def test_check_passes_on_what_is_committed_and_fails_where_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    assert main(["check", "--prometheus", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "0 problems"
    assert "http://127.0.0.1:9 gave no answer" in said.err


def test_check_finds_what_somebody_edited_by_hand(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt = tmp_path / "rules.yml"
    spoilt.write_text(generated.RULES.read_text().replace("by (model, target)", "by (model, targt)"))
    monkeypatch.setattr(generated, "RULES", spoilt)
    assert main(["check"]) == 1
    assert "rule RouterReportsOld: by or without: no series inside has labels ['targt']" in capsys.readouterr().err


def test_a_command_whose_packages_are_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "dashboards.lint", raising=False)
    monkeypatch.setitem(sys.modules, "promql_parser", None)
    assert main(["check"]) == 2
    assert capsys.readouterr().err == "check needs promql_parser: pip install 'manta[test]'\n"
