"""The part of GET /route/{rid} and POST /route/explain that tells of prefill and decode apart.

Pure. Empty for a decision over replicas that do all of a request.
"""

import dataclasses
from typing import Any

from deployments.dispatch.route_log import Try
from deployments.http.openai_format import number
from routing.types import Decision


def pair_body(decision: Decision) -> dict[str, Any]:
    """Who computes the prompt, why, and what each decode replica would have cost either way."""
    pair = decision.pair
    if pair is None:
        return {}
    return {
        "pair": {
            "prefill": pair.prefill_id,
            "decode": decision.replica_id,
            "reason": pair.reason.value,
            "why": pair.why or None,
            "best_prefill": pair.best_prefill_id,
            "prefill_s": number(pair.prefill_s),
            "hand_off_cost_s": number(pair.hand_off_cost_s),
            "local_cost_s": number(pair.chosen.local_cost_s),
            "link_bytes_per_s": number(pair.link_bytes_per_s),
            "link_measured": pair.link_measured,
            "decode_replicas": [
                {"replica_id": replica_id, **{name: number(value) for name, value in dataclasses.asdict(terms).items()}}
                for replica_id, terms in pair.rows()
            ],
        }
    }


def hand_off_body(each: Try) -> dict[str, Any]:
    """What became of the hand-off of one try, and which prefill replicas were not asked after earlier ones."""
    if each.decision.pair is None:
        return {}
    report = None if each.hand_off is None else dataclasses.asdict(each.hand_off)
    return {"hand_off": report, "prefill_end": each.prefill_end, "held_out": dict(each.held_out)}
