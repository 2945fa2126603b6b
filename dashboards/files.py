"""Every file of the boards and rules: those that are committed, and a folder for a Prometheus and a Grafana.

Owns:      what is written where; what Prometheus scrapes how often.
Never:     starts or changes a server.
Invariant: a committed file that is generated has the text that this module gives (a test compares them; `python -m
           dashboards build` mends them). `promtool check config` accepts the folder's prometheus.yml.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dashboards import docs
from dashboards.boards.fleet import FLEET
from dashboards.boards.pool import POOL
from dashboards.boards.routing import ROUTING

BOARDS = (FLEET, POOL, ROUTING)  # in the order of the links between them
HERE = Path(__file__).parent
METRICS_DOC = HERE.parent / "docs" / "metrics.md"
RULES = HERE / "prometheus" / "rules.yml"  # written by hand
BOARD_FILES = {board.uid: HERE / "grafana" / f"{board.uid}.json" for board in BOARDS}
JOB = "manta"  # of Prometheus; the alert TargetDown names it
# Prometheus takes up to two rounds of 5 s of its own to act on new targets: with 5 s for both of these a replica that
# joined was first scraped after 9 to 12 s (6 tries); like this after 1.3 to 8.9 s, median 4.9 (18 tries).
REFRESH = "1s"  # between questions for targets
SCRAPE = "3s"
SOURCE_UID = "manta-prometheus"


def board_texts() -> dict[Path, str]:
    """Return the generated boards by path."""
    return {BOARD_FILES[board.uid]: board.to_json(BOARDS) for board in BOARDS}


def rules_text(docs_url: str = "") -> str:
    """Read the rules; each alert's runbook_url begins with ``docs_url``, where docs/ can be read."""
    return RULES.read_text().replace("runbook_url: docs/", f"runbook_url: {docs_url}docs/")


def generated() -> dict[Path, str]:
    """Return every generated file of the repository by path."""
    return {**board_texts(), METRICS_DOC: docs.markdown()}


def committed_board(uid: str) -> Any:
    """Read a board as it is on disk."""
    return json.loads(BOARD_FILES[uid].read_text())


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

    url: str = "http://127.0.0.1:8000/manta"  # of the observatory
    key_file: Path | None = None  # holds the admin key, where one is configured
    prometheus: str = "http://127.0.0.1:9090"  # where Grafana finds Prometheus
    docs_url: str = ""  # put before docs/runbook.md in the alerts


def export(folder: Path, settings: Export) -> list[Path]:
    """Write the folder's files; returns them. Files of the same names are replaced, others stay."""
    folder = folder.resolve()
    texts = {
        "prometheus.yml": _yaml(prometheus_settings(settings)),
        "rules.yml": rules_text(settings.docs_url),
        "grafana/provisioning/datasources/manta.yml": _yaml(_datasource(settings.prometheus)),
        "grafana/provisioning/dashboards/manta.yml": _yaml(_provider(folder / "grafana" / "boards")),
        "README.md": _readme(settings),
        **{f"grafana/boards/{path.name}": path.read_text() for path in BOARD_FILES.values()},
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
        "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": "15s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": JOB, "http_sd_configs": [discovery | key], **key}],
    }


def _datasource(url: str) -> dict[str, Any]:
    return {
        "apiVersion": 1,
        "datasources": [
            {
                "name": "Manta",
                "uid": SOURCE_UID,
                "type": "prometheus",
                "access": "proxy",
                "url": url,
                "isDefault": True,
                "jsonData": {"timeInterval": SCRAPE, "httpMethod": "POST"},
            }
        ],
    }


def _provider(boards: Path) -> dict[str, Any]:
    options = {"path": str(boards), "foldersFromFilesStructure": False}
    provider = {"name": "manta", "folder": "Manta", "type": "file", "updateIntervalSeconds": 30, "options": options}
    return {"apiVersion": 1, "providers": [provider]}


def _yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, width=1000)


def _readme(settings: Export) -> str:
    return f"""\
# Watch Manta with Prometheus and Grafana

Written by `python -m dashboards export`; write it anew after an update of Manta, or when the folder has moved.

```
prometheus --config.file=prometheus.yml --storage.tsdb.path=data
```

asks {settings.url}/sd for the processes of Manta and scrapes them every {SCRAPE}. It must reach them by
their own addresses; `/targets` of its page shows whether it does, `/alerts` which alerts fire.

Copy or link `grafana/provisioning/*/manta.yml` into Grafana's provisioning folder (often /etc/grafana/provisioning),
or start Grafana with

```
GF_PATHS_PROVISIONING=$PWD/grafana/provisioning grafana server
```

It finds Prometheus at {settings.prometheus} and shows the boards in the folder Manta. In an existing Grafana, import
the files in `grafana/boards` by hand and choose the data source at the top of the board.

`python -m dashboards check --prometheus {settings.prometheus}` asks every query of boards and rules once.
"""
