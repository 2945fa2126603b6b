"""Every file of the boards and rules: those that are committed, and a folder for a Prometheus and a Grafana.

Owns:      what is written where; what Prometheus scrapes how often.
Never:     starts or changes a server.
Invariant: a committed file that is generated has the text that this module gives (a test compares them; `python -m
           dashboards build` mends them). `promtool check config` accepts the folder's prometheus.yml.
"""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dashboards import docs
from dashboards.alerts import ALERTS, RECORDINGS
from dashboards.board import LIVE_VIEW, Board
from dashboards.boards.fleet import FLEET
from dashboards.boards.pool import POOL
from dashboards.boards.routing import ROUTING

BOARDS = (FLEET, POOL, ROUTING)  # in the order of the links between them
HERE = Path(__file__).parent
METRICS_DOC = HERE.parent / "docs" / "metrics.md"
RULES = HERE / "prometheus" / "rules.yml"
RUNBOOK = HERE.parent / "docs" / "runbook.md"
RUNBOOK_PAGE = HERE / "ui" / "runbook.html"  # that the live view serves
BOARD_FILES = {board.uid: HERE / "grafana" / f"{board.uid}.json" for board in BOARDS}
JOB = "manta"  # of Prometheus; the alert TargetDown names it
# Prometheus takes up to two rounds of 5 s of its own to act on new targets: with 5 s for both of these a replica that
# joined was first scraped after 9 to 12 s (6 tries); like this after 1.3 to 8.9 s, median 4.9 (18 tries).
REFRESH = "1s"  # between questions for targets
SCRAPE_S = 3.0
LOOK = "5s"  # between looks at the rules about states that soon have another name
LONGEST_SCRAPE_S = 10.0
SOURCE_UID = "manta-prometheus"


def board_texts() -> dict[Path, str]:
    """Return the generated boards by path."""
    return {BOARD_FILES[board.uid]: board.to_json(BOARDS) for board in BOARDS}


RULES_HEAD = """\
# Written by `python -m dashboards build` from dashboards/alerts.py, which the live view evaluates: change it there.
# docs/runbook.md has a section for each alert. critical: requests fail or soon will; warning: look today.
"""
WORDS = {"share": "{{ $value | humanizePercentage }}", "duration": "{{ $value | humanizeDuration }}", "detail": ""}
LABELS = ("model", "role", "replica", "tier", "target", "target_role", "instance")


def rules_text(runbook: str = "docs/runbook.md", grafana: str = "") -> str:
    """Write the rules. ``runbook``: where it can be read, without the section; ``grafana``: its address, if any."""
    words = WORDS | {label: f"{{{{ $labels.{label} }}}}" for label in LABELS}
    recordings = [_rule({"record": name, "expr": _Lines(query)}) for name, query in RECORDINGS.items()]
    alerts, at_once = list[str](), list[str]()
    for alert in ALERTS:
        annotations = {
            "summary": alert.summary.format(**words),
            "runbook_url": f"{runbook}#{alert.name.lower()}",
        }
        if grafana:
            annotations["dashboard_url"] = f"{grafana}/d/{_board_of(alert.when.promql).uid}"
        rule = {
            "alert": alert.name,
            "expr": _Lines(alert.when.promql),
            "for": f"{alert.for_s // 60}m" if alert.for_s % 60 == 0 and alert.for_s else f"{alert.for_s}s",
            "labels": {"severity": alert.severity},
            "annotations": annotations,
        }
        comment = textwrap.wrap(alert.comment, 116, initial_indent="  # ", subsequent_indent="  # ")
        written = "".join(f"{line}\n" for line in comment) + _rule(rule)
        (at_once if alert.at_once else alerts).append(written)
    groups = {"manta-recordings": recordings, "manta-alerts": alerts, f"manta-states\n  interval: {LOOK}": at_once}
    return RULES_HEAD + "groups:\n" + "\n".join(
        f"- name: {name}\n  rules:\n{''.join(rules)}" for name, rules in groups.items()
    )  # fmt: skip


def _board_of(query: str) -> Board:
    """Return the board with most queries that read what ``query`` reads; the fleet's where all have as many."""
    names = set(re.findall(r"manta_\w+", query))

    def num_shown(board: Board) -> int:
        return sum(name in text for panel in board.panels for text in panel.queries.values() for name in names)

    return max(BOARDS, key=num_shown)


class _Lines(str):
    """A text of several lines, written as a YAML block."""


class _Dumper(yaml.SafeDumper):
    """Writes `_Lines` as blocks."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|" if "\n" in text else None)


_Dumper.add_representer(_Lines, _block)


def _rule(rule: dict[str, Any]) -> str:
    return textwrap.indent(yaml.dump([rule], Dumper=_Dumper, sort_keys=False, width=1000), "  ")


def page_texts() -> dict[Path, str]:
    """Return the generated files of Prometheus and of the live view by path."""
    return {RULES: rules_text(), RUNBOOK_PAGE: docs.runbook_page(RUNBOOK.read_text())}


def generated() -> dict[Path, str]:
    """Return every generated file of the repository by path."""
    return {**board_texts(), **page_texts(), METRICS_DOC: docs.markdown()}


def write(texts: dict[Path, str]) -> list[Path]:
    """Write each file whose text differs from what is on disk; returns those."""
    changed = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path])
    return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Settings of an exported folder."""

    url: str = LIVE_VIEW  # of the observatory, as Prometheus reaches it
    live_url: str = ""  # where people open it: boards and alerts lead there; "": at ``url``
    key_file: Path | None = None  # holds the admin key, where one is configured
    prometheus: str = "http://127.0.0.1:9090"  # where Grafana finds Prometheus
    grafana: str = ""  # where people open it: alerts lead to its boards; "": they do not
    interval_s: float = SCRAPE_S  # between scrapes
    traces_url: str = ""  # of one trace, with ${__value.raw} for its id; "": exemplars lead nowhere
    docs_url: str = ""  # put before docs/runbook.md in the alerts; "": they lead to the live view's runbook


def export(folder: Path, settings: Export) -> list[Path]:
    """Write the folder's files; returns them. Files of the same names are replaced, others stay."""
    folder = folder.resolve()
    url = (settings.live_url or settings.url).rstrip("/")
    runbook = f"{settings.docs_url}docs/runbook.md" if settings.docs_url else f"{url}/runbook"
    boards = {path: path.read_text().replace(LIVE_VIEW, url) for path in BOARD_FILES.values()}
    rules = rules_text(runbook, settings.grafana.rstrip("/"))
    texts = {
        "prometheus.yml": _yaml(prometheus_settings(settings)),
        "rules.yml": rules,
        "kubernetes_rules.yml": _yaml(_rules_object(rules)),
        "kustomization.yaml": _yaml(_kustomization()),
        "grafana/provisioning/datasources/manta.yml": _yaml(_datasource(settings)),
        "grafana/provisioning/dashboards/manta.yml": _yaml(_provider(folder / "grafana" / "boards")),
        "README.md": _readme(settings),
        **{f"grafana/boards/{path.name}": board for path, board in boards.items()},
    }
    paths = {folder / name: text for name, text in texts.items()}
    write(paths)
    return list(paths)


def prometheus_settings(settings: Export) -> dict[str, Any]:
    """Make prometheus.yml: one job whose targets the observatory lists; it and the targets get the admin key."""
    discovery: dict[str, Any] = {"url": f"{settings.url.rstrip('/')}/sd", "refresh_interval": REFRESH}
    key = {}
    if settings.key_file is not None:
        key = {"authorization": {"type": "Bearer", "credentials_file": str(settings.key_file.resolve())}}
    return {
        "global": {
            "scrape_interval": _duration(settings.interval_s),
            "scrape_timeout": _duration(min(settings.interval_s, LONGEST_SCRAPE_S)),
            "evaluation_interval": "15s",
        },
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": JOB, "http_sd_configs": [discovery | key], **key}],
    }


def _duration(time_s: float) -> str:
    """Write a duration as Prometheus reads it: whole numbers only."""
    time_ms = round(1e3 * time_s)
    return f"{time_ms}ms" if time_ms % 1000 else f"{time_ms // 1000}s"


def _datasource(settings: Export) -> dict[str, Any]:
    options: dict[str, Any] = {"timeInterval": _duration(settings.interval_s), "httpMethod": "POST"}
    if settings.traces_url:  # Grafana's provisioning would put a variable of its own in the place of a single $
        url = settings.traces_url.replace("$", "$$")
        options["exemplarTraceIdDestinations"] = [{"name": "trace_id", "url": url, "urlDisplayLabel": "Trace"}]
    return {
        "apiVersion": 1,
        "datasources": [
            {
                "name": "Manta",
                "uid": SOURCE_UID,
                "type": "prometheus",
                "access": "proxy",
                "url": settings.prometheus,
                "isDefault": True,
                "jsonData": options,
            }
        ],
    }


def _provider(boards: Path) -> dict[str, Any]:
    options = {"path": str(boards), "foldersFromFilesStructure": False}
    provider = {"name": "manta", "folder": "Manta", "type": "file", "updateIntervalSeconds": 30, "options": options}
    return {"apiVersion": 1, "providers": [provider]}


def _rules_object(rules: str) -> dict[str, Any]:
    """Make what the Prometheus operator reads rules from."""
    kind = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {"name": JOB}}
    return kind | {"spec": yaml.safe_load(rules)}


def _kustomization() -> dict[str, Any]:
    """Make what `kubectl apply -k` reads: the rules, and a ConfigMap of each board for Grafana's sidecar."""
    options = {"disableNameSuffixHash": True, "labels": {"grafana_dashboard": "1"}}
    maps = [{"name": uid, "files": [f"grafana/boards/{path.name}"]} for uid, path in BOARD_FILES.items()]
    return {"resources": ["kubernetes_rules.yml"], "configMapGenerator": maps, "generatorOptions": options}


def _yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, width=1000)


def _readme(settings: Export) -> str:
    return f"""\
# Watch Manta with Prometheus and Grafana

Written by `python -m dashboards export`; write it anew after an update of Manta, or when the folder has moved.

```
prometheus --config.file=prometheus.yml --storage.tsdb.path=data --enable-feature=exemplar-storage
```

asks {settings.url}/sd for the processes of Manta and scrapes them every {settings.interval_s:g} s. It must reach them
by their own addresses; `/targets` of its page shows whether it does, `/alerts` which alerts fire.

Copy or link `grafana/provisioning/*/manta.yml` into Grafana's provisioning folder (often /etc/grafana/provisioning),
or start Grafana with

```
GF_PATHS_PROVISIONING=$PWD/grafana/provisioning grafana server
```

It finds Prometheus at {settings.prometheus} and shows the boards in the folder Manta. In an existing Grafana, import
the files in `grafana/boards` by hand and choose the data source at the top of the board.

On Kubernetes `kubectl apply --server-side -k .` gives the rules to the Prometheus operator, and each board to Grafana's
sidecar as a ConfigMap with the label grafana_dashboard.

`python -m dashboards check --prometheus {settings.prometheus}` asks every query of boards and rules once.
"""
