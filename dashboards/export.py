"""A folder with all that Prometheus and Grafana need to watch a running Manta.

Owns:      the settings of both: what is scraped how often, where the boards come from.
Never:     starts or changes a server; needs Grafana's SDK (the boards come from dashboards/grafana, as committed).
Invariant: `promtool check config` accepts the folder's prometheus.yml.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dashboards.generated import BOARD_FILES, rules_text
from dashboards.rules import JOB

# Prometheus takes up to two rounds of 5 s of its own to act on what it was told: with 5 s for both of these a replica
# that joined was first scraped after 9 to 12 s (6 tries); like this after 1.3 to 8.9 s, median 4.9 (18 tries).
REFRESH = "1s"  # between questions for targets
SCRAPE = "3s"
SOURCE_UID = "manta-prometheus"


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What the files depend on."""

    url: str = "http://127.0.0.1:8000/manta"  # of the observatory
    key_file: Path | None = None  # holds the admin key, where one is configured
    prometheus: str = "http://127.0.0.1:9090"  # where Grafana finds Prometheus
    docs_url: str = ""  # put before docs/runbook.md in the alerts


def export(folder: Path, settings: Export) -> list[Path]:
    """Write the files; returns them. Files of the same names are replaced, others stay."""
    folder = folder.resolve()
    texts = {
        "prometheus.yml": _yaml(prometheus_settings(settings)),
        "rules.yml": rules_text(settings.docs_url),
        "grafana/provisioning/datasources/manta.yml": _yaml(_datasource(settings.prometheus)),
        "grafana/provisioning/dashboards/manta.yml": _yaml(_provider(folder / "grafana" / "boards")),
        "README.md": _readme(settings),
        **{f"grafana/boards/{path.name}": path.read_text() for path in BOARD_FILES.values()},
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [folder / name for name in texts]


def prometheus_settings(settings: Export) -> dict[str, Any]:
    """prometheus.yml: one job, its targets asked from the observatory; the key is shown to it and to the targets."""
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
