"""docs/api.md and docs/api_fields.md say what the routes take: their tables are made from the document, and all of it
is explained."""

import re
from pathlib import Path

from deployments.http.convert import _NOT_DONE
from tools.api_doc import FIELDS, PAGE, document, tables, written

TEXT, REFERENCE = PAGE.read_text(), FIELDS.read_text()
TABLES = tables()


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    """Else: run `python -m tools.api_doc`."""
    assert written(TEXT, TABLES, "routes", "errors") == TEXT
    assert written(REFERENCE, TABLES, "fields") == REFERENCE


def test_every_field_of_a_body_has_a_meaning() -> None:
    """Else: say it at the field, in deployments/http/bodies.py or apis."""
    rows = TABLES["fields"].splitlines()
    assert len(rows) > 250
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_route_and_every_header_of_ours_is_on_the_page() -> None:
    assert [path for path in document()["paths"] if f"`{path}`" not in TEXT] == []
    sources = [path.read_text() for path in Path("deployments/http").rglob("*.py")]
    headers = {name for text in sources for name in re.findall(r'"(x-manta-[a-z]+)"', text)}
    assert len(headers) >= 5
    assert [name for name in headers if f"| `{name}` |" not in TEXT] == []


def test_every_field_that_is_refused_is_named() -> None:
    prefixes = re.findall(r"`(\w+_)\*`", TEXT + REFERENCE)
    named = set(re.findall(r"`(\w+)`", TEXT + REFERENCE))
    missing = [name for name in _NOT_DONE if name not in named and not name.startswith(tuple(prefixes))]
    assert missing == []


def test_every_kind_of_error_has_its_status_in_the_table() -> None:
    told = set(re.findall(r"^\| (\d{3}) \|", TEXT, flags=re.MULTILINE))
    assert told >= {"400", "401", "403", "404", "408", "413", "415", "429", "499", "500", "503", "504"}
