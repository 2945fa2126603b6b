"""One request as the live view and `GET /route/{rid}` show it: what became of it, and where its time went.

Owns:   the form of a row (deployments/watch/observatory/README.md).
Never:  holds a prompt's text or ids.
"""

import dataclasses
from typing import Any

from deployments.dispatch.dispatcher import Dispatcher
from deployments.dispatch.route_log import RouteRecord


def changed_rows(dispatcher: Dispatcher, since: int) -> tuple[tuple[dict[str, Any], ...], int]:
    """Rows that changed after change number ``since`` (0: all that are kept), the longest unchanged first, and the
    number to ask with next."""
    records, seq = dispatcher.routes.changed_since(since)
    return tuple(request_row(record, router_id=dispatcher.router_id) for record in records), seq


def request_row(record: RouteRecord, *, router_id: str) -> dict[str, Any]:
    """Of the last try, where tries differ. ``output_tokens`` are as of the last change of the record."""
    timeline, last = record.timeline, record.tries[-1]
    decision = last.decision
    return {
        "rid": record.name,
        "router": router_id,
        "time": record.time_s,
        "endpoint": timeline.arrival.endpoint,
        "outcome": record.ending,
        "replica": decision.replica_id,
        "prefill": decision.prefill_id,
        "policy": decision.policy,
        "reason": decision.reason.value,
        "tries": len(record.tries),
        "prompt_tokens": decision.num_tokens,
        "output_tokens": timeline.num_output,
        "cached_tokens": last.cached_tokens,
        "predicted_tokens": decision.overlap_tokens,
        "best_tokens": decision.best_overlap[1],
        "ttft_s": timeline.ttft_s,
        **times_body(record),
    }


def times_body(record: RouteRecord) -> dict[str, Any]:
    """``total_s`` once it has ended; ``stages``, which sum to it, if every choice came to its end."""
    stages = record.timeline.stages
    return {
        "total_s": record.timeline.total_s,
        "stages": None if stages is None else dataclasses.asdict(stages),
    }
