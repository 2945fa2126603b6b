"""What a process tells when it is scraped, through the client library's own parser."""

import json
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dashboards.files import BOARD_FILES


class Scraped:
    """One scrape, of a registry or as text."""

    def __init__(self, told: CollectorRegistry | str) -> None:
        self.text = told if isinstance(told, str) else generate_latest(told).decode()
        self.families = {family.name: family for family in text_string_to_metric_families(self.text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float | None:
        """Of the one series of ``name`` (its prefix left out) that has these labels; None if there is none."""
        found = [each.value for each in self.samples if each.name == f"manta_{name}" and has(each.labels, labels)]
        assert len(found) <= 1, f"{len(found)} series of {name} have {labels}"
        return found[0] if found else None

    def values(self, name: str, label: str) -> dict[str, float]:
        """By the value of one label, summed over the others."""
        found: dict[str, float] = {}
        for each in self.samples:
            if each.name == f"manta_{name}":
                found[each.labels[label]] = found.get(each.labels[label], 0.0) + each.value
        return found

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of ``name`` that have these labels."""
        return sum(each.value for each in self.samples if each.name == f"manta_{name}" and has(each.labels, labels))


def has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return wanted.items() <= labels.items()


def committed_board(uid: str) -> Any:
    """Read a board as it is on disk."""
    return json.loads(BOARD_FILES[uid].read_text())


def panels(document: Any) -> list[Any]:
    """Return every panel of a board's file, those inside closed rows too; without the rows themselves."""
    inside = [each for row in document["panels"] for each in row.get("panels", [])]
    return [each for each in (*document["panels"], *inside) if each["type"] != "row"]
