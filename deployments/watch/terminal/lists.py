"""What a running Manta lists, as tables: ``manta key list``, ``batch``, ``adapters``, ``why``. Ends a batch, and
gives and takes names of adapters (LoRA), where it is told to.

Never: shows or holds a key of the routers' file; looks into an adapter's folder: the routers do, by a path that is
theirs.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from deployments.watch.terminal import ask
from deployments.watch.terminal.table import NOTHING, Table, bar, count, plain, seconds, spaced

Row = Mapping[str, Any]
USED = {"requests": ">requests/min", "input_tokens": ">uncached input/min", "output_tokens": ">output/min",
        "choices": ">open choices"}  # fmt: skip
DIGEST_LEN = 12  # of a digest's characters, as in logs


def keys(url: str, key: str | None) -> None:
    """Print the keys of the routers' file, with what each may use a minute and has used. Raises: Unanswered."""
    body = ask.keys(url, key)
    print(drawn(body) if body["path"] else "router.keys_file is not set: see docs/operate.md, Tenants")


def batches(url: str, batch_id: str | None, key: str | None, *, cancel: bool, as_json: bool) -> None:
    """Print how far the batches of a key are, or one of them. Raises: Unanswered."""
    found = ask.batches(url, key) if batch_id is None else [ask.batch(url, batch_id, key, cancel=cancel)]
    rows = [batch_row(each, time.time()) for each in found]
    print(json.dumps(found) if as_json else _table(rows, "no batch was made with this key"))


def adapters(
    url: str, key: str | None, action: str, name: str = "", path: str = "", *, replace: bool, as_json: bool
) -> None:
    """Print the adapters that requests may name, and where each is loaded, after the ``action``. Raises: Unanswered."""
    bodies: dict[str, dict[str, Any]] = {
        "load": {"lora_name": name, "lora_path": path, "load_inplace": replace},
        "unload": {"lora_name": name},
    }
    if action in bodies:
        ask.adapters(url, key, action, bodies[action])
    found = ask.adapters(url, key)
    rows = [adapter_row(each) for each in found["adapters"]]
    print(json.dumps(found) if as_json else _table(rows, "no adapter has a name: see docs/adapters.md"))


def uncached(url: str, last_s: float, key: str | None, *, as_json: bool) -> None:
    """Print why prompts were not cached, and what that cost, by tenant. Raises: Unanswered."""
    found = ask.uncached(url, last_s, key)
    rows = [
        {
            "tenant": each["tenant"] or NOTHING,
            "cause": each["cause"],
            ">requests": count(each["requests"]),
            ">tokens": count(each["tokens"]),
            ">time": seconds(each["seconds"]),
        }
        for each in found["causes"]
    ]
    print(json.dumps(found) if as_json else _table(rows, "every prompt was cached as far as it could be"))


def _table(rows: Sequence[Mapping[str, Any]], none: str) -> str:
    return plain(Table(rows)) if rows else none


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


def batch_row(batch: Row, now_s: float) -> dict[str, Any]:
    """Make the row of a batch."""
    counts = batch["request_counts"]
    total, answered, failed = (counts[name] for name in ("total", "completed", "failed"))
    share = max(total, 1)
    ended_s = next(
        (batch[name] for name in ("completed_at", "cancelled_at", "expired_at", "failed_at") if batch[name]), 0
    )
    return {
        "batch": batch["id"],
        "status": batch["status"],
        "lines": bar(
            [("#", "green", answered / share), ("x", "red", failed / share)], f"{answered + failed} of {total}"
        ),
        ">failed": str(failed),
        ">took": seconds((ended_s or now_s) - batch["created_at"]),
        ">expires in": NOTHING if ended_s else seconds(max(batch["expires_at"] - now_s, 0)),
        "output": batch["output_file_id"] or NOTHING,
        "errors": batch["error_file_id"] or NOTHING,
    }


def adapter_row(adapter: Row) -> dict[str, str]:
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
