"""GET /route/{rid}: the routing of a recent request, explained. POST /route/explain: that of a hypothetical one.

Never:     changes anything: a dry run sends nothing, and changes neither the index nor the loads. Holds a prompt's text
           or ids.
"""

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from deployments.dispatch.dispatcher import Dispatcher, query_of
from deployments.fleet.peers import newer
from deployments.http import bodies
from deployments.http.access import admin_only, caller_of, scoped
from deployments.http.admin import AskedSeconds
from deployments.http.api_document import RUN, body_like, gives, said
from deployments.http.arrivals import hints_of
from deployments.http.bodies import Route
from deployments.http.convert import Job, asked_adapter, asked_of, prompts_of_ids, salt_of
from deployments.http.http_errors import RETRY_AFTER_S, error_body
from deployments.http.service import Service, service_of
from deployments.record.route_forms import decision_body, record_body
from replicas.errors import InvalidRequest
from replicas.types import GenerateRequest, SamplingParams, TokenIds
from routing.explain import explain
from routing.why import summed

LAST = AskedSeconds(name="last", least=1, most=86_400, default=3600)
# both show requests and prefixes of all callers
router = APIRouter(route_class=Route, dependencies=[Depends(admin_only)])


class ExplainRequest(bodies.RequestFields):
    """One prompt in any of the forms that the generating routes take."""

    model_config = body_like(
        {"prompt": "The capital of France is", "max_tokens": 8}, one_of=("prompt", "messages", "text", "input_ids")
    )

    prompt: bodies.Text | bodies.TokenRow | None = said("Text or token ids, as in /v1/completions.")
    messages: bodies.Conversation | None = said(bodies.CONVERSATION)
    text: str | None = said("The prompt, as in /generate.")
    input_ids: bodies.TokenRow | None = said("The prompt as token ids.")
    max_tokens: bodies.UpToContext | None = said("The most output tokens; without it 128, or what the context leaves.")
    extra_key: bodies.ExtraKey = None
    lora_path: bodies.LoraPath = None


@router.post("/route/explain", **gives("The decision that the request would get now", *RUN))
async def explain_route(request: Request, body: ExplainRequest) -> Response:
    """Route a request without sending it. Raises: InvalidRequest, PromptTooLong; NoReplica if none may take it."""
    service = service_of(request)
    adapter = await asked_adapter(request, body.model, body.lora_path)
    whole, param = await _ids(service, body)
    job = Job(
        http=request, name="explain", adapter=adapter, cache_salt=salt_of(body.cache_salt, body.extra_key),
        fields=asked_of(GenerateRequest, body, request.headers), names={"prompt": param},
    )  # fmt: skip
    ids, most = job.fit(whole, given=body.max_tokens, default=128)
    would_be = job.request(ids, SamplingParams(max_new_tokens=most))
    would_be = scoped(would_be, caller_of(request), isolation=service.isolation, model=service.name_of(would_be))
    dispatcher, hints = service.dispatcher, hints_of(request.headers)
    decision = dispatcher.explain_only(query_of(dispatcher.with_objective(would_be), hints))
    router_id, shown = dispatcher.router_id, decision_body(decision)
    return JSONResponse({"dry_run": True, "router": router_id, **shown, "explanation": explain(decision)})


@router.get("/route/{rid:path}", **gives("Where the request went, and why", 404, 503))
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
        "until it ends"
    )
    return JSONResponse(error_body(message, status=404, code="route_not_found"), status_code=404)


@router.get(
    "/uncached",
    openapi_extra=LAST.described,
    **gives("Why prompts were not cached: requests, tokens, seconds, by tenant and cause", 400),
)
async def uncached(request: Request) -> Response:
    """Sum up the causes of the ``last`` seconds, of all routers that answer, to five minutes.

    Raises: InvalidRequest.
    """
    service, last = service_of(request), LAST.of(request)
    own = {service.dispatcher.router_id: service.dispatcher.prompts.misses.table(last)}
    tables = {**await service.peers.misses(last), **own}
    return JSONResponse({"last_s": last, "routers": sorted(tables), "causes": summed(tables.values())})


async def _ids(service: Service, body: ExplainRequest) -> tuple[TokenIds, str]:
    """Return the prompt's ids, and the name of its field."""
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
    return ids, param


def own_route(dispatcher: Dispatcher, name: str) -> dict[str, Any] | None:
    """Show this router's decision for the request called ``name``; None if it keeps none."""
    record = dispatcher.routes.find(name)
    return None if record is None else record_body(record, router_id=dispatcher.router_id)
