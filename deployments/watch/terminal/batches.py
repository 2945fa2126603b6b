"""``manta batch``: how far the batches of a key are, and the end of one.

Never: ends one unless told to.
"""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from deployments.watch.terminal import ask
from deployments.watch.terminal.table import NOTHING, Table, bar, plain, seconds

Row = Mapping[str, Any]


def run(url: str, batch_id: str | None, key: str | None, *, cancel: bool, as_json: bool) -> int:
    """Run the command. Return the exit status: 0, or why Manta did not answer (ask.py)."""
    try:
        found = ask.batches(url, key) if batch_id is None else [ask.batch(url, batch_id, key, cancel=cancel)]
    except ask.Unanswered as error:
        print(error, file=sys.stderr)
        return error.status
    if as_json:
        print(json.dumps(found))
    elif found:
        print(plain(Table([row_of(each, time.time()) for each in found])))
    else:
        print("no batch was made with this key")
    return 0


def row_of(batch: Row, now_s: float) -> dict[str, Any]:
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
