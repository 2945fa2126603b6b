"""The live view's files (dashboards/ui), with the headers that browsers need for each.

Owns:      which files are served: those of known kinds, read once; and terms.js, made from the one table of routing's
           terms.
Never:     follows a path that a client gives: it is looked up among what was found.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import dashboards
from routing import terms

FOLDER = Path(dashboards.__path__[0]) / "ui"
INDEX = "index.html"
LOGIN = "login.html"
RUNBOOK = "runbook.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
}
# only our own scripts run, and no other host is contacted; libraries set styles on elements
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SAFETY: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """One file of the live view, as it is served."""

    body: bytes
    content_type: str
    etag: str


def read_files(folder: Path = FOLDER) -> dict[str, PageFile]:
    """The page's files by path below ``folder``, with terms.js beside the page; empty where there is no such folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.suffix in KINDS and path.is_file() and not any(part.startswith(".") for part in name.parts):
            found[name.as_posix()] = _served(path.read_bytes(), KINDS[path.suffix])
    if INDEX in found:
        found["terms.js"] = _served(_terms_module().encode(), KINDS[".js"])
    return found


def _terms_module() -> str:
    """What a request's terms are called and mean (routing/terms.py), as a module of the page."""
    tables = {"CANDIDATE": terms.CANDIDATE, "DECODE_REPLICA": terms.DECODE_REPLICA}
    return "".join(
        f"export const {name} = {json.dumps([asdict(term) for term in table])};\n" for name, table in tables.items()
    )


def _served(body: bytes, content_type: str) -> PageFile:
    return PageFile(body=body, content_type=content_type, etag=f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def login_needs(files: Mapping[str, PageFile]) -> set[str]:
    """Return the files that the login page names."""
    login = files.get(LOGIN)
    return set() if login is None else set(re.findall(r'(?:href|src)="ui/([^"]+)"', login.body.decode()))
