"""Every file that is written from the catalogue, and its text.

Invariant: what is committed is what this module says; a test compares them, `python -m dashboards build` mends them.
"""

import json
from pathlib import Path

import yaml

from dashboards import docs, rules
from dashboards.boards.all import BOARDS

HERE = Path(__file__).parent
METRICS_DOC = HERE.parent / "docs" / "metrics.md"
RULES = HERE / "prometheus" / "rules.yml"
BOARD_FILES = {board.uid: HERE / "grafana" / f"{board.uid}.json" for board in BOARDS}
HEADER = "# Written by `python -m dashboards build` from dashboards/rules.py; change it there.\n"


def board_texts() -> dict[Path, str]:
    """Needs Grafana's SDK (extra ``boards``); nothing else here does."""
    from dashboards.render import to_json

    return {BOARD_FILES[board.uid]: to_json(board, BOARDS) for board in BOARDS}


def rules_text(docs_url: str = "") -> str:
    """The rules file; ``docs_url`` is where docs/ can be read by whoever gets the alert."""
    return HEADER + yaml.safe_dump(rules.document(docs_url), sort_keys=False, width=1000, allow_unicode=True)


def docs_text() -> str:
    """docs/metrics.md."""
    return docs.markdown()


def texts() -> dict[Path, str]:
    """All of them."""
    return {**board_texts(), RULES: rules_text(), METRICS_DOC: docs_text()}


def committed_board(uid: str) -> object:
    """A board as it is on disk."""
    return json.loads(BOARD_FILES[uid].read_text())


def write(found: dict[Path, str]) -> list[Path]:
    """Write what differs from what is there; returns what was written."""
    changed = [path for path, text in found.items() if not path.is_file() or path.read_text() != text]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found[path])
    return changed
