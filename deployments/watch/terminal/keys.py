"""``manta key list``: the keys of the routers' file, with what each may use a minute and has used.

Never: shows or holds a key.
"""

import sys
from collections.abc import Mapping
from typing import Any

from deployments.watch.terminal import ask
from deployments.watch.terminal.table import Table, count, plain, spaced

USED = {"requests": ">requests/min", "input_tokens": ">uncached input/min", "output_tokens": ">output/min",
        "choices": ">open choices"}  # fmt: skip


def drawn(body: Mapping[str, Any]) -> str:
    """Draw a table of the keys, used of allowed; and why the file is not in force, where it is not."""
    rows = [
        {
            "key": key["id"],
            "tenant": key["tenant"],
            ">weight": f"{key['weight']:g}",
            **{name: _of(key["used"][kind], key["limits"][kind]) for kind, name in USED.items()},
            "admin": "admin" if key["admin"] else "",
        }
        for key in sorted(body["keys"], key=lambda key: (key["tenant"], key["id"]))
    ]
    said = [f"{body['path']}: {len(rows)} keys in force"]
    if body["error"]:
        said.append(f"These are of before, since the file cannot be used: {body['error']}")
    return plain(spaced([*said, Table(rows)]))


def _of(used: float, limit: int | None) -> str:
    return count(used) if limit is None else f"{count(used)} of {count(limit)}"


def run(url: str, key: str | None) -> int:
    """Print the keys. Return the exit status: 0, or why there is no answer (ask.py)."""
    try:
        body = ask.keys(url, key)
    except ask.Unanswered as error:
        print(error, file=sys.stderr)
        return error.status
    print(drawn(body) if body["path"] else "router.keys_file is not set: see docs/operate.md, Tenants")
    return 0
