"""GET /route/{rid}: the routing of a recent request, explained. POST /route/explain: that of a hypothetical one.

Owns:      the form of both answers, and of a request's row in the live view (deployments/watch/observatory/README.md).
Never:     changes anything: a dry run sends nothing, and changes neither the index nor the loads. Holds a prompt's text
           or ids.
"""

import dataclasses
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from deployments.dispatch.dispatcher import Dispatcher, query_of
from deployments.dispatch.rids import new_rid
from deployments.dispatch.route_log import RouteRecord, Try
from deployments.fleet.peers import newer
from deployments.http import bodies
from deployments.http.access import admin_only, caller_of, scoped
from deployments.http.answer_bodies import RouteBody, RouteExplanationBody
from deployments.http.api_document import RUN, body_like, gives, said
from deployments.http.arrivals import hints_of
from deployments.http.bodies import Route, WireType
from deployments.http.convert import check_model, prompts_of_ids, salt_of
from deployments.http.http_errors import RETRY_AFTER_S, error_body
from deployments.http.openai_format import number
from deployments.http.service import Service, service_of
from replicas.errors import InvalidRequest
from replicas.types import GenerateRequest, SamplingParams, TokenIds
from routing.explain import candidate_terms, explain, sentence
from routing.types import Candidate, Decision

# both show requests and prefixes of all callers
router = APIRouter(route_class=Route, dependencies=[Depends(admin_only)])


class ExplainRequest(WireType):
    """One prompt in any of the forms that the generating routes take."""

    model_config = body_like(
        {"prompt": "The capital of France is", "max_tokens": 8}, one_of=("prompt", "messages", "text", "input_ids")
    )

    model: bodies.Model = None
    prompt: bodies.Text | bodies.TokenRow | None = said("Text or token ids, as in /v1/completions.")
    messages: bodies.Conversation | None = said(bodies.CONVERSATION)
    text: str | None = said("The prompt, as in /generate.")
    input_ids: bodies.TokenRow | None = said("The prompt as token ids.")
    max_tokens: bodies.UpToContext | None = said("The most output tokens; without it 128.")
    priority: bodies.Priority = None
    cache_salt: bodies.CacheSalt = None
    extra_key: bodies.ExtraKey = None


@router.post("/route/explain", **gives(RouteExplanationBody, *RUN))
async def explain_route(request: Request, body: ExplainRequest) -> Response:
    """Route a request without sending it. Raises: InvalidRequest; NoReplica if no replica may take the request."""
    service = service_of(request)
    check_model(service, body.model)
    would_be = GenerateRequest(
        rid=new_rid("explain"),
        token_ids=await _ids(service, body),
        sampling=SamplingParams(max_new_tokens=128 if body.max_tokens is None else body.max_tokens),
        cache_salt=salt_of(body.cache_salt, body.extra_key),
        priority=body.priority or 0,
    )
    would_be = scoped(would_be, caller_of(request), isolates=service.isolates_keys)
    would_be.validate(vocab_size=service.model.vocab_size)
    decision = service.dispatcher.explain_only(query_of(would_be, hints_of(request.headers)))
    router_id, shown = service.dispatcher.router_id, decision_body(decision)
    return JSONResponse({"dry_run": True, "router": router_id, **shown, "explanation": explain(decision)})


@router.get("/route/{rid:path}", **gives(RouteBody, 404, 503))
async def route(request: Request, rid: bodies.PathName) -> Response:
    """Show the latest decision for the request called ``rid``, of any router that still keeps it."""
    service = service_of(request)
    own = own_route(service.dispatcher, rid)
    if own is not None and own["internal_rid"] == rid:
        return JSONResponse(own)  # no other request has this name, at any router
    others = await service.peers.find_route(rid)
    found = newer(own, others.body)
    if found is not None:
        return JSONResponse(found)
    if others.unanswered:
        message = f"no decision for {rid[:200]!r} was found, but {others.unanswered}: try again in a moment"
        body, again = error_body(message, status=503, code="routers_silent"), {"Retry-After": str(RETRY_AFTER_S)}
        return JSONResponse(body, status_code=503, headers=again)
    kept = service.dispatcher.routes.capacity
    message = (
        f"no decision is kept for {rid[:200]!r}: a router keeps those of its last {kept} requests "
        "(router.decisions_kept) until it ends"
    )
    return JSONResponse(error_body(message, status=404, code="route_not_found"), status_code=404)


async def _ids(service: Service, body: ExplainRequest) -> TokenIds:
    given = {name: getattr(body, name) for name in ("prompt", "messages", "text", "input_ids")}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise InvalidRequest(f"give exactly one of {', '.join(given)}; got {named or 'none'}", param="prompt")
    [param] = named
    value = given[param]
    if param == "messages":
        ids = await service.encode_chat(value, add_generation_prompt=True)
    elif isinstance(value, str):
        ids = await service.encode(value, param=param)
    else:
        [ids] = await prompts_of_ids(service, [value], param=param)
    if not len(ids):
        raise InvalidRequest(f"{param}: is empty; give at least one token", param=param)
    service.check_length(len(ids), param=param)
    return ids


def own_route(dispatcher: Dispatcher, name: str) -> dict[str, Any] | None:
    """Show this router's decision for the request called ``name``; None if it keeps none."""
    record = dispatcher.routes.find(name)
    return None if record is None else record_body(record, router_id=dispatcher.router_id)


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
        "num_retries": len(record.tries) - 1,
        "tries": [_try_body(each, record.name) for each in record.tries],
        "explanation": "\n".join(explain(each.decision, each.outcome) for each in record.tries),
    }


def _try_body(each: Try, name: str) -> dict[str, Any]:
    return {
        "sentence": sentence(each.decision, name),
        **decision_body(each.decision),
        "actual": {
            "cached_tokens": each.cached_tokens,
            "host_tokens": each.host_tokens,
            "store_tokens": each.store_tokens,
            "ttft_s": each.ttft_s,
        },
        "outcome": "running" if each.outcome is None else each.outcome.ending.value,
        "failure": each.failure,
        **hand_off_body(each),
    }


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
            "load_s": number(decision.load_s),
            "ttft_s": number(decision.predicted_ttft_s),
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
        **{name: number(value) for name, value in candidate_terms(candidate, decision).items()},
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
    """Show the outcome of a try's hand-off, and the prefill replicas that were held out after earlier tries."""
    if each.decision.pair is None:
        return {}
    report = None if each.hand_off is None else dataclasses.asdict(each.hand_off)
    return {"hand_off": report, "prefill_end": each.prefill_end, "held_out": dict(each.held_out)}


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
        "replica": decision.replica_id,
        "prefill": decision.prefill_id,
        "policy": decision.policy,
        "reason": decision.reason.value,
        "tries": len(record.tries),
        "prompt_tokens": decision.num_tokens,
        **progress_of(record),
        "cached_tokens": last.cached_tokens,
        "predicted_tokens": decision.overlap_tokens,
        "best_tokens": decision.best_overlap[1],
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
    }


def times_body(record: RouteRecord) -> dict[str, Any]:
    """Show ``total_s`` once the request has ended, and ``stages``, which sum to it, if every choice has ended."""
    stages = record.timeline.stages
    return {
        "total_s": record.timeline.total_s,
        "stages": None if stages is None else dataclasses.asdict(stages),
    }
