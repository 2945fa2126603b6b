"""``manta adapters``: the adapters (LoRA) that requests may name, and where each is loaded; gives and takes names.

Never: looks into a folder: the routers do, by a path that is theirs.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from deployments.watch.terminal import ask
from deployments.watch.terminal.table import NOTHING, Table, count, plain

DIGEST_LEN = 12  # of a digest's characters, as in logs


def run(url: str, key: str | None, action: str, name: str = "", path: str = "", *, replace: bool, as_json: bool) -> int:
    """Run the command. Return the exit status: 0, or why Manta did not answer (ask.py)."""
    bodies: dict[str, dict[str, Any]] = {
        "load": {"lora_name": name, "lora_path": path, "load_inplace": replace},
        "unload": {"lora_name": name},
    }
    try:
        if action in bodies:
            ask.change_adapter(url, action, key, bodies[action])
        found = ask.adapters(url, key)
    except ask.Unanswered as error:
        print(error, file=sys.stderr)
        return error.status
    if as_json:
        print(json.dumps(found))
    else:
        rows = [row_of(each) for each in found["adapters"]]
        print(plain(Table(rows)) if rows else "no adapter has a name: see docs/adapters.md")
    return 0


def row_of(adapter: Mapping[str, Any]) -> dict[str, str]:
    """Make the row of an adapter; its requests are those of the router that answered."""
    return {
        "adapter": adapter["name"],
        "digest": adapter["identity"][:DIGEST_LEN],
        ">rank": NOTHING if adapter["rank"] is None else str(adapter["rank"]),
        ">bytes": count(adapter["bytes"]),
        ">requests": count(adapter["requests"]),
        "loaded at": ", ".join(adapter["replicas"]) or NOTHING,
        "folder": adapter["path"],
    }
