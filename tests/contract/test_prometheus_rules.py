"""Prometheus itself reads what is exported, and every rule does what it is for, by promtool."""

import pathlib
import re
import subprocess
from typing import Any

import pytest
import yaml

from dashboards.files import RULES, Export, export
from tests.programs import program
from tests.rule_cases import CASES, RECORDED, Case

RUNBOOK = "docs/runbook.md"
RECORDINGS, *_ALERTS = ([*group["rules"]] for group in yaml.safe_load(RULES.read_text())["groups"])
ALERTS = [rule for rules in _ALERTS for rule in rules]


@pytest.fixture(scope="module")
def promtool() -> str:
    return program("promtool", "prometheus")


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=120)


def alert_tests(case: Case) -> list[dict[str, Any]]:
    alert = next(alert for alert in ALERTS if alert["alert"] == case.alert)
    found = [{"eval_time": case.quiet_at, "alertname": case.alert, "exp_alerts": []}]
    if case.fires_at is not None:
        expected = {
            "exp_labels": {**case.labels, "severity": alert["labels"]["severity"]},
            "exp_annotations": {"summary": case.summary, "runbook_url": f"{RUNBOOK}#{case.alert.lower()}"},
        }
        found.append({"eval_time": case.fires_at, "alertname": case.alert, "exp_alerts": [expected]})
    return found


def series(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": each} for name, each in values.items()]


def record_test(name: str) -> dict[str, Any]:
    given, minute, labels, value = RECORDED[name]
    shown = ", ".join(f'{label}="{each}"' for label, each in labels.items())
    sample = {"labels": f"{name}{{{shown}}}", "value": value}
    return {
        "interval": "1m",
        "input_series": series(given),
        "promql_expr_test": [{"expr": name, "eval_time": minute, "exp_samples": [sample]}],
    }


def unit_tests() -> dict[str, Any]:
    """promtool's file of tests."""
    alerts = [
        {"interval": "1m", "input_series": series(case.series), "alert_rule_test": alert_tests(case)} for case in CASES
    ]
    return {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": alerts + [record_test(name) for name in RECORDED],
    }


def test_every_rule_has_a_test_in_which_it_fires_or_records() -> None:
    assert {case.alert for case in CASES if case.fires_at} == {alert["alert"] for alert in ALERTS}
    assert set(RECORDED) == {recording["record"] for recording in RECORDINGS}


def test_every_rule_does_what_it_is_for(promtool: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(unit_tests()))
    done = run(promtool, "test", "rules", tmp_path / "tests.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_a_threshold_that_was_changed(promtool: str, tmp_path: pathlib.Path) -> None:
    spoilt = RULES.read_text().replace("> 0.95", "> 0.99")
    assert spoilt != RULES.read_text()
    (tmp_path / "rules.yml").write_text(spoilt)
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({**unit_tests(), "rule_files": ["rules.yml"]}))
    done = run(promtool, "test", "rules", tmp_path / "tests.yml")
    assert done.returncode == 1
    assert set(re.findall(r"alertname: ?(\w+)", done.stdout + done.stderr)) == {"KvPoolNearlyFull"}


@pytest.mark.parametrize("with_key", [False, True])
def test_promtool_accepts_what_is_exported(promtool: str, tmp_path: pathlib.Path, with_key: bool) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("secret")
    export(tmp_path / "watch", Export(key_file=key_file if with_key else None))
    settings = run(promtool, "check", "config", tmp_path / "watch" / "prometheus.yml")
    assert settings.returncode == 0, settings.stdout + settings.stderr
    rules = run(promtool, "check", "rules", "--lint=all", "--lint-fatal", tmp_path / "watch" / "rules.yml")
    assert rules.returncode == 0, rules.stdout + rules.stderr
    assert f"{len(ALERTS) + len(RECORDINGS)} rules found" in rules.stdout


def test_every_alert_has_a_section_in_the_runbook_and_every_section_an_alert() -> None:
    headings = re.findall(r"^## (\w+)$", pathlib.Path(RUNBOOK).read_text(), flags=re.MULTILINE)
    assert sorted(headings) == sorted(alert["alert"] for alert in ALERTS)
