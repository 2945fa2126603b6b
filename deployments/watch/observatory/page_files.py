"""The live view's files, as they lie in dashboards/ui, with what browsers need to know of each.

Owns:      which files are served: those of known kinds, read once.
Never:     follows a path that a client gives: it is looked up among what was found.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import dashboards

FOLDER = Path(dashboards.__path__[0]) / "ui"
INDEX = "index.html"
LOGIN = "login.html"
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
# only our own scripts run, nothing is asked of another host; libraries set styles on elements
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
    """By path below ``folder``; empty where there is no such folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = KINDS.get(path.suffix)
        name = path.relative_to(folder)
        if kind is None or not path.is_file() or any(part.startswith(".") for part in name.parts):
            continue
        body = path.read_bytes()
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        found[name.as_posix()] = PageFile(body=body, content_type=kind, etag=etag)
    return found


def login_needs(files: Mapping[str, PageFile]) -> set[str]:
    """The files that the login page names."""
    login = files.get(LOGIN)
    return set() if login is None else set(re.findall(r'(?:href|src)="ui/([^"]+)"', login.body.decode()))
