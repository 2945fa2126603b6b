"""One HTTP request's way to replicas: the hints it came with, and the ``x-manta-route`` header it leaves with.

    in   x-manta-session: ID            among equally good replicas, the one that had this session last
         x-manta-replicas: ID, ID       only these replicas
    out  x-manta-route: replica=ID; overlap_predicted=96; overlap_actual=96; policy=...; reason=...; tries=1
         one such part per prompt, joined by commas; overlap_actual once a token has come, tokens of the prompt both;
         with mode: disaggregated also prefill=ID or local; pair=why; hand_off=transferred or failed

Owns:      which generations belong to the HTTP request.
Thread:    the router's event loop; pure ASGI, so that streams pass through untouched.
"""

from collections.abc import AsyncGenerator

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.dispatch.dispatcher import NO_HINTS, RouteHints
from deployments.dispatch.rids import check_name
from deployments.dispatch.route_log import RouteLog, RouteRecord, Try
from deployments.dispatch.timeline import Arrival
from deployments.http.arrivals import arrival_of
from deployments.http.key_check import caller_of, scoped
from deployments.http.service import Service, service_of
from deployments.settings.keys import ANYBODY, Caller
from replicas.errors import InvalidRequest
from replicas.types import GenerateRequest, TokenDelta

HEADER = "x-manta-route"
SESSION = "x-manta-session"
REPLICAS = "x-manta-replicas"
MOST_PARTS = 8  # prompts of one request that the header tells of
MOST_REPLICAS = 1024


class Routed:
    """Starts the generations of one HTTP request and remembers which they were."""

    def __init__(
        self,
        service: Service,
        arrival: Arrival,
        hints: RouteHints = NO_HINTS,
        answer_id: str | None = None,
        caller: Caller = ANYBODY,
    ) -> None:
        """``answer_id``: that of the answer; None where each prompt's part has its own."""
        self.answer_id = answer_id
        self._service = service
        self._arrival = arrival
        self._hints = hints
        self._caller = caller
        self.rids: list[str] = []

    def stream(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        request = scoped(request, self._caller, isolates=self._service.isolates_keys)
        self.rids.append(request.rid)
        return self._service.dispatcher.stream(request, self._hints, self._arrival)


def routed_of(request: Request, answer_id: str | None) -> Routed:
    """For one HTTP request; its header is written from what is started here. Raises: InvalidRequest for bad hints."""
    hints, caller = hints_of(request.headers), caller_of(request)
    routed = Routed(service_of(request), arrival_of(request), hints, answer_id, caller)
    request.state.routed = routed
    return routed


def hints_of(headers: Headers) -> RouteHints:
    """Raises: InvalidRequest."""
    session, replicas = headers.get(SESSION, ""), headers.get(REPLICAS)
    if session:
        check_name(session)
    if replicas is None:
        return RouteHints(session_id=session)
    allowed = frozenset(each.strip() for each in replicas.split(",") if each.strip())
    if not 1 <= len(allowed) <= MOST_REPLICAS:
        raise InvalidRequest(f"{REPLICAS}: names {len(allowed)} replicas; give 1 to {MOST_REPLICAS}, or no header")
    return RouteHints(session_id=session, allowed=allowed)


class RouteHeaders:
    """ASGI middleware: writes the header on whatever answer a request with decisions gets, an error included."""

    def __init__(self, app: ASGIApp, *, routes: RouteLog) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})

        async def told(message: Message) -> None:
            routed = state.get("routed")
            if routed is not None and message["type"] == "http.response.start":
                parts = header_parts(self._routes, routed.rids)
                if parts:
                    MutableHeaders(scope=message)[HEADER] = ", ".join(parts)
            await send(message)

        await self._app(scope, receive, told)


def header_parts(routes: RouteLog, rids: list[str]) -> list[str]:
    records = [routes.get(rid) for rid in rids[:MOST_PARTS]]
    return [header_part(record) for record in records if record is not None]


def header_part(record: RouteRecord) -> str:
    last = record.tries[-1]
    decision = last.decision
    fields = {
        "replica": decision.replica_id,
        "overlap_predicted": decision.overlap_tokens,
        "overlap_actual": last.cached_tokens,
        "policy": decision.policy,
        "reason": decision.reason.value,
        "tries": len(record.tries),
        **_pair_fields(last),
    }
    return "; ".join(f"{name}={value}" for name, value in fields.items() if value is not None)


def _pair_fields(last: Try) -> dict[str, str | None]:
    """Where prefill and decode are apart: who computed the prompt, why, and what the hand-off came to."""
    pair = last.decision.pair
    if pair is None:
        return {}
    came = None if last.hand_off is None else "transferred" if last.hand_off.transferred else "failed"
    return {"prefill": pair.prefill_id or "local", "pair": pair.reason.value, "hand_off": came}
