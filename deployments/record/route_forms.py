"""The JSON forms of routing decisions: the answers of /route, and a request's row in the live view.

The row is described in deployments/watch/observatory/README.md.

Never:     holds a prompt's text or ids; imports what a router needs beside its records: the observatory has these forms
           too.
"""

import dataclasses
from typing import Any

from deployments.record.rids import owner_of
from deployments.record.route_log import RouteRecord, Try
from replicas.types import PdTransferReport, finite
from routing.explain import candidate_terms, explain, fetch_clause, sentence
from routing.types import Candidate, Decision, PageFetch


def record_body(record: RouteRecord, *, router_id: str) -> dict[str, Any]:
    last = record.tries[-1]
    return {
        "rid": record.name,
        "internal_rid": record.rid,
        "router": router_id,
        "time": record.time_s,
        "replica": last.decision.replica_id,
        "outcome": record.outcome,
        **times_body(record),
        "num_retries": record.num_tries - 1,
        "num_migrations": record.num_migrations,
        "tries": [_try_body(each, record.name) for each in record.tries],
        "explanation": "\n".join(_explained(each) for each in record.tries),
    }


def _explained(each: Try) -> str:
    said = explain(each.decision, each.outcome)
    return said if each.miss is None else f"{said}\nNot cached: {each.miss.words(each.decision)}."


def _try_body(each: Try, name: str) -> dict[str, Any]:
    return {
        "sentence": sentence(each.decision, name),
        **decision_body(each.decision),
        "actual": {
            "cached_tokens": each.cached_tokens,
            "host_tokens": each.host_tokens,
            "store_tokens": each.store_tokens,
            "drafted_tokens": each.drafted_tokens,
            "accepted_tokens": each.accepted_tokens,
            "ttft_s": each.ttft_s,
            "passed_s": None if each.times.own is None else each.times.own.passed_s,
        },
        "outcome": "running" if each.outcome is None else each.outcome.ending.value,
        "failure": each.failure,
        "moved": each.moved,
        "miss": miss_body(each),
        **kv_transfer_body(each),
    }


def miss_body(each: Try) -> dict[str, Any] | None:
    """Show why not more of the prompt was cached."""
    miss = each.miss
    if miss is None:
        return None
    words = miss.words(each.decision)
    return {"cause": miss.cause.value, "tokens": miss.tokens, "cost_s": finite(miss.cost_s), "words": words}


def decision_body(decision: Decision) -> dict[str, Any]:
    best, best_tokens = decision.best_overlap
    return {
        "replica": decision.replica_id,
        "policy": decision.policy,
        "reason": decision.reason.value,
        "num_tokens": decision.num_tokens,
        "predicted": {
            "cached_tokens": decision.overlap_tokens,
            "host_tokens": decision.host_tokens,
            "store_tokens": decision.store_tokens,
            "load_s": finite(decision.load_s),
            "ttft_s": finite(decision.predicted_ttft_s),
        },
        "best_overlap": {"replica": best, "cached_tokens": best_tokens, "given_up": decision.given_up},
        "candidates": [_candidate_body(each, decision) for each in decision.candidates],
        **pair_body(decision),
    }


def _candidate_body(candidate: Candidate, decision: Decision) -> dict[str, Any]:
    return {
        "replica": candidate.replica_id,
        "role": candidate.view.role.value,
        "chosen": candidate.replica_id in (decision.replica_id, decision.prefill_id),
        "ended_by": candidate.ended_by,
        **{name: finite(value) for name, value in candidate_terms(candidate, decision).items()},
    }


def pair_body(decision: Decision) -> dict[str, Any]:
    """Show the replica that computes the prompt, the reason, and the costs of each decode replica."""
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
            "prefill_s": finite(pair.prefill_s),
            "kv_transfer_cost_s": finite(pair.kv_transfer_cost_s),
            "local_cost_s": finite(pair.chosen.local_cost_s),
            "link_bytes_per_s": finite(pair.link_bytes_per_s),
            "link_measured": pair.link_measured,
            "decode_replicas": [
                {"replica_id": replica_id, **{name: finite(value) for name, value in dataclasses.asdict(terms).items()}}
                for replica_id, terms in pair.rows()
            ],
        }
    }


def kv_transfer_body(each: Try) -> dict[str, Any]:
    """Show the outcome of a try's fetch; its KV transfer's, and prefill replicas held out after earlier tries."""
    body: dict[str, Any] = {}
    if (fetch := each.decision.fetch) is not None:
        expected = {name: finite(value) if isinstance(value, float) else value for name, value in
                    dataclasses.asdict(fetch).items()}  # fmt: skip
        report, sentence = _report_body(each.fetch_report), fetch_sentence(fetch, each.fetch_report)
        body["fetch"] = {**expected, "report": report, "sentence": sentence}
    if each.decision.pair is not None:
        report = _report_body(each.kv_transfer)
        body |= {"kv_transfer": report, "prefill_end": each.prefill_end, "held_out": dict(each.held_out)}
    return body


def _report_body(report: PdTransferReport | None) -> dict[str, Any] | None:
    return None if report is None else dataclasses.asdict(report)


def fetch_sentence(fetch: PageFetch, report: PdTransferReport | None) -> str:
    """Say how the fetch of a try went, and what it was weighed against."""
    if report is None:
        return f"{fetch_clause(fetch)}."
    if not report.transferred:
        return f"{fetch_clause(fetch)}; that failed after {report.grant_s + report.wait_s:.2f} s: {report.reason}."
    num_tokens = round(fetch.num_tokens * report.num_bytes / max(fetch.num_bytes, 1))
    return fetch_clause(fetch, came=(num_tokens, report.grant_s + report.wait_s)) + "."


def request_row(record: RouteRecord, *, router_id: str) -> dict[str, Any]:
    """Make the row of a request, from its last try. What grows with each token is as of now (`progress_of`)."""
    timeline, last = record.timeline, record.tries[-1]
    decision = last.decision
    return {
        "rid": record.name,
        "router": router_id,
        "time": record.time_s,
        "endpoint": timeline.arrival.endpoint,
        "outcome": record.outcome,
        "finish": ",".join(timeline.finish_reasons) or None,
        "caller": owner_of(record.rid) or None,
        "session": record.session,
        "tenant": record.tenant or None,
        "replica": decision.replica_id,
        "prefill": decision.prefill_id,
        "policy": decision.policy,
        "reason": decision.reason.value,
        "tries": record.num_tries,
        "prompt_tokens": decision.num_tokens,
        **progress_of(record),
        "cached_tokens": last.cached_tokens,
        "predicted_tokens": decision.overlap_tokens,
        "best_tokens": decision.best_overlap[1],
        "miss": None if last.miss is None else last.miss.cause.value,
        "ttft_s": timeline.ttft_s,
        "total_s": timeline.total_s,
        "stages": dataclasses.asdict(timeline.stages_so_far),
        "tries_at": [_try_at(each, timeline.arrival.arrived_s) for each in record.tries],
    }


def progress_of(record: RouteRecord) -> dict[str, Any]:
    """Return what of a request's row grows with each token; ``last_s``: from its arrival to its newest token."""
    timeline = record.timeline
    return {"output_tokens": timeline.num_output, "itl_s": timeline.mean_itl_s, "last_s": timeline.last_s}


def _try_at(each: Try, arrived_s: float) -> dict[str, Any]:
    """Show where and when a try ran; times in seconds from the arrival of the request."""
    return {
        "replica": each.decision.replica_id,
        "prefill": each.decision.prefill_id,
        "start_s": max(0.0, each.decision.time_s - arrived_s),
        "end_s": None if each.ended_s is None else each.ended_s - arrived_s,
        "failure": each.failure,
        "moved": each.moved,
        "fetch": _fetch_at(each, arrived_s),
    }


def _fetch_at(each: Try, arrived_s: float) -> dict[str, Any] | None:
    """Show from where and when pages came to a try, if they did; its way to the replica counts as no time."""
    fetch, report = each.decision.fetch, each.fetch_report
    if fetch is None or report is None or not report.transferred:
        return None
    start_s = max(0.0, each.decision.time_s - arrived_s) + report.grant_s
    return {"from": fetch.donor_id, "start_s": start_s, "end_s": start_s + report.wait_s}


def times_body(record: RouteRecord) -> dict[str, Any]:
    """Show ``total_s`` once the request has ended, and ``stages``, which sum to it, if every choice has ended."""
    stages = record.timeline.stages
    return {
        "total_s": record.timeline.total_s,
        "stages": None if stages is None else dataclasses.asdict(stages),
    }
