"""The arrival of an HTTP request: its name, the generations that it starts, and the headers of its answer.

    in   x-request-id: NAME             the request's name, else a new one; in log lines too
         x-manta-session: ID            among equally good replicas, the one that had this session last
         x-manta-replicas: ID, ID       only these replicas
         x-manta-objective: 2.5         seconds within which its first token should come; with "; strict" it is refused
                                        (429) where that is not expected
         x-manta-reconnect: 1           its stream outlives the connection: events have ids (event_ids.py)
         last-event-id: ID              the client has had a stream of this name up to that event
         x-manta-resume: ...            as the answer said when that stream was opened
    out  x-request-id: NAME            of Anthropic's routes also request-id, which its SDK reads
         x-manta-route: replica=ID; overlap_predicted=96; overlap_actual=96; policy=...; reason=...; tries=1
         one such part for each prompt, joined by commas; overlap_actual once a token has come, both in prompt tokens;
         uncached=CAUSE where it reused less than it could have (routing/why.py);
         where some must be loaded: tiers_predicted=device+host+store and load_s, and tiers_actual likewise;
         with mode: disaggregated also prefill=ID or local; pair=why; kv_transfer=ok or error
         x-manta-resume: CREATED.DIGITS.SEED of a stream that can be resumed: what its bytes depend on beside the body
         x-manta-alive: 1               of such a stream: it sends something each so many seconds
         x-manta-dropped: what of the body was left out: the attribution of Claude Code, tools that only OpenAI runs

Owns:      which path is which endpoint of the catalogue; which generations belong to the HTTP request.
Never:     reads a body; counts health checks and scrapes.
Invariant: a counted HTTP request adds to ``requests_total`` once for each of its prompts, or once if it had none.
Thread:    the router's event loop; pure ASGI, so that streams pass through untouched.
"""

import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.dispatch.dispatcher import NO_HINTS, RequestDeltas, RouteHints
from deployments.dispatch.leases import ReplicaCalls
from deployments.http.access import caller_of, scoped
from deployments.http.http_errors import CLIENT_CLOSED, MESSAGES, fault_of
from deployments.http.service import Service, service_of
from deployments.record.rids import about, check_name, clean_name, new_digits
from deployments.record.route_log import (
    RequestWatch,
    RouteLog,
    RouteRecord,
    Try,
    outcome_of_fault,
    tell,
)
from deployments.record.timeline import Arrival
from deployments.tenancy.keys import ANYBODY, Caller
from replicas.errors import InvalidRequest
from replicas.text.detokenizer import Detokenizer
from replicas.text.tokenizer import Tokenizer
from replicas.types import GenerateRequest, TokenDelta, Usage

REQUEST_ID = "x-request-id"
ROUTE = "x-manta-route"
SESSION = "x-manta-session"
REPLICAS = "x-manta-replicas"
OBJECTIVE = "x-manta-objective"
RECONNECT = "x-manta-reconnect"
RESUME = "x-manta-resume"
ALIVE = "x-manta-alive"  # of a stream that is kept: it sends something each so many seconds
LAST_EVENT = "last-event-id"
DROPPED = "x-manta-dropped"
MOST_PARTS = 8  # prompts of one request that the route header describes
MOST_REPLICAS = 1024
RECALL_S = 2.0  # for replicas to say what they remember of a request
_OPENING = re.compile(r"(\d{1,12})\.([0-9a-f]{16})\.(\d{1,20})")

BATCH = "batch"  # the endpoint of batch requests (lines.py), which no path has
# end of the path, behind the application's route prefix -> endpoint
ENDPOINTS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/api/chat": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/score": "score",
    "/rerank": "score",  # under /v1, /v2, or neither
    "/generate": "generate",
    "/tokenize": "tokens",
    "/detokenize": "tokens",
    "/v1/messages/count_tokens": "tokens",
}


class Arrivals:
    """The outermost ASGI middleware: names each request, notes its arrival, and writes its answer's headers."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        watch: RequestWatch,
        routes: RouteLog,
        echo: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``echo``: write x-request-id; Ray Serve's proxy writes it too, and the two would be joined."""
        self._app = app
        self._watch = watch
        self._routes = routes
        self._echo = echo
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["send_body"] = send  # what stands between looks only at the start of an answer (streaming.py)
        name = state["request_name"] = clean_name(Headers(scope=scope).get(REQUEST_ID))
        endpoint = _endpoint(scope)
        if endpoint is not None:
            state["arrival"] = Arrival(endpoint=endpoint, arrived_s=self._clock())
        status = CLIENT_CLOSED  # until it is answered

        async def with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                if self._echo:
                    headers[REQUEST_ID] = name
                if scope["path"].endswith(MESSAGES):
                    headers["request-id"] = name
                parts = header_parts(self._routes, state["generations"].rids) if "generations" in state else []
                if parts:
                    headers[ROUTE] = ", ".join(parts)
            await send(message)

        try:
            with about(request=name):
                await self._app(scope, receive, with_headers)
        finally:
            if endpoint is not None:
                tell(self._watch.responded, status)
            if endpoint is not None and not state["arrival"].num_prompts:
                total_s = self._clock() - state["arrival"].arrived_s
                outcome = "ok" if status < 400 else outcome_of_fault(fault_of(status))
                tell(self._watch.answered, endpoint, outcome=outcome, total_s=total_s)


class Generations:
    """The generations of one HTTP request: starts each and remembers its id."""

    def __init__(
        self,
        service: Service,
        arrival: Arrival,
        hints: RouteHints = NO_HINTS,
        answer_id: str | None = None,
        caller: Caller = ANYBODY,
    ) -> None:
        """``answer_id``: of the answer; None if each prompt's part has its own."""
        self.answer_id = answer_id
        self._service = service
        self._arrival = arrival
        self._hints = hints
        self._caller = caller
        self.rids: list[str] = []

    def stream(self, request: GenerateRequest) -> RequestDeltas:
        """Start ``request`` for this caller. Returns: its deltas."""
        return self._service.dispatcher.stream(self._of_caller(request), self._hints, self._arrival)

    @asynccontextmanager
    async def together(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[list[RequestDeltas]]:
        """Start several ``requests``, which count as one until this is left. Gives: the deltas of each."""
        dispatcher, requests = self._service.dispatcher, [self._of_caller(each) for each in requests]
        async with dispatcher.together(requests, self._hints) as charge:
            yield [dispatcher.stream(each, self._hints, self._arrival, charge=charge) for each in requests]

    def _of_caller(self, request: GenerateRequest) -> GenerateRequest:
        service = self._service
        request = replace(request, routing_key=self._hints.session_id) if self._hints.session_id else request
        request = scoped(request, self._caller, isolation=service.isolation, model=service.name_of(request))
        if self._arrival.endpoint == BATCH:
            request = replace(request, offline=True)
        self.rids.append(request.rid)
        return request

    async def resumed(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Start ``request``, which another router may have run. Yields: its deltas, the first of which hold what a
        replica remembers of it, and does not make again."""
        request, service, deltas = self._of_caller(request), self._service, list[TokenDelta]()
        if not request.return_logprobs:  # a replica remembers none
            answers = await service.fleet.ask_all(
                lambda replica_id: service.leases.call(replica_id, ReplicaCalls.recall, request.recall),
                timeout_s=RECALL_S,
            )
            outputs = [each for answer in answers.values() for each in answer.items()]
            longest = dict(sorted(outputs, key=lambda each: len(each[1])))  # of each choice
            deltas = [made_before(request, choice, ids, service.tokenizer) for choice, ids in longest.items() if ids]
        service.streams.resumed("recalled" if deltas else "again")
        made = {delta.index: delta.token_ids for delta in deltas}
        async with aclosing(service.dispatcher.stream(request, self._hints, self._arrival, made=made)) as rest:
            async for delta in rest:
                while deltas:  # behind what may be refused
                    yield deltas.pop()
                yield delta


def made_before(request: GenerateRequest, choice: int, ids: Sequence[int], tokenizer: Tokenizer) -> TokenDelta:
    """Make the delta of ``ids``, what ``choice`` of ``request`` has made elsewhere; text follows from ids alone."""
    return TokenDelta(
        rid=request.rid,
        index=choice,
        token_ids=tuple(ids),
        text=Detokenizer.of(request.sampling, tokenizer).push(ids).text,
        usage=Usage(prompt_tokens=len(request.token_ids), completion_tokens=len(ids), cached_tokens=0),
    )


def generations_of(request: Request, answer_id: str | None) -> Generations:
    """Attach generations to an HTTP request to one of `ENDPOINTS`; its route header is written from them.

    Raises: InvalidRequest for bad routing headers.
    """
    arrival = request.state.arrival
    assert isinstance(arrival, Arrival)
    generations = Generations(service_of(request), arrival, hints_of(request.headers), answer_id, caller_of(request))
    request.state.generations = generations
    return generations


def name_of(request: Request, rid: str | None = None) -> str:
    """Choose the client's name of this request: the ``rid`` of its body, or its X-Request-Id."""
    return check_name(rid) if rid else str(request.state.request_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the bytes of an answer depend on beside the body of its request."""

    created: int  # seconds since 1970
    digits: str  # in the ids of its calls
    seed: int | None = None  # None: as the body says, or drawn

    def __str__(self) -> str:
        return f"{self.created}.{self.digits}.{self.seed}"


def opening_of(request: Request) -> Opening:
    """Read how a stream was opened that its client resumes, or open this request. Raises: InvalidRequest."""
    state, given = request.state, request.headers.get(RESUME)
    if not hasattr(state, "opening"):
        state.opening = Opening(created=int(state.arrival.time_s), digits=new_digits())
        if given is not None:
            found = _OPENING.fullmatch(given)
            if found is None or int(found[3]) >= 2**64:
                raise InvalidRequest(f"{RESUME}: {given[:64]!r} is not what an answer of this server said")
            state.opening = Opening(created=int(found[1]), digits=found[2], seed=int(found[3]))
    assert isinstance(state.opening, Opening)
    return state.opening


def last_event_of(headers: Headers) -> str | None:
    """Read whether a client asks for a stream that outlives its connection, and what it has had of it: "" nothing yet;
    None: it does not ask."""
    last = headers.get(LAST_EVENT, "")
    return last if last or headers.get(RECONNECT, "0") not in ("", "0", "false") else None


def hints_of(headers: Headers) -> RouteHints:
    """Read the routing headers. Raises: InvalidRequest."""
    session, replicas = headers.get(SESSION, ""), headers.get(REPLICAS)
    how = [each.strip() for each in headers.get(OBJECTIVE, "").split(";")[1:] if each.strip()]
    if how not in ([], ["strict"]):
        raise InvalidRequest(f"{OBJECTIVE}: {'; '.join(how)[:60]!r} is unknown; give seconds, or SECONDS; strict")
    if session:
        check_name(session)
    if replicas is None:
        return RouteHints(session_id=session, strict=bool(how))
    allowed = frozenset(each.strip() for each in replicas.split(",") if each.strip())
    if not 1 <= len(allowed) <= MOST_REPLICAS:
        raise InvalidRequest(f"{REPLICAS}: names {len(allowed)} replicas; give 1 to {MOST_REPLICAS}, or no header")
    return RouteHints(session_id=session, allowed=allowed, strict=bool(how))


def header_parts(routes: RouteLog, rids: list[str]) -> list[str]:
    """Write the parts of the route header, one for each request with a decision."""
    records = [routes.get(rid) for rid in rids[:MOST_PARTS]]
    return [header_part(record) for record in records if record is not None]


def header_part(record: RouteRecord) -> str:
    """Write the route header's part about the last try of one request."""
    last = record.tries[-1]
    decision = last.decision
    fields = {
        "replica": decision.replica_id,
        "overlap_predicted": decision.overlap_tokens,
        "overlap_actual": last.cached_tokens,
        **_tier_fields(last),
        "policy": decision.policy,
        "reason": decision.reason.value,
        "tries": record.num_tries,
        "migrations": record.num_migrations or None,
        "uncached": None if last.miss is None else last.miss.told,
        **_pair_fields(last),
    }
    return "; ".join(f"{name}={value}" for name, value in fields.items() if value is not None)


def _tier_fields(last: Try) -> dict[str, str | None]:
    """List, where tokens were to be loaded or were: how many from host and store, as device+host+store, and how long
    loading them was expected to take."""
    decision = last.decision
    below = decision.host_tokens + decision.store_tokens
    fields: dict[str, str | None] = {}
    if below:
        device = decision.overlap_tokens - below
        fields["tiers_predicted"] = f"{device}+{decision.host_tokens}+{decision.store_tokens}"
        fields["load_s"] = f"{decision.load_s:.4f}"
    if last.host_tokens or last.store_tokens:
        device = (last.cached_tokens or 0) - last.host_tokens - last.store_tokens
        fields["tiers_actual"] = f"{device}+{last.host_tokens}+{last.store_tokens}"
    return fields


def _pair_fields(last: Try) -> dict[str, str | None]:
    """List, for disaggregated mode: the prefill replica, the reason, and the outcome of the KV transfer."""
    pair = last.decision.pair
    if pair is None:
        return {}
    came = None if last.kv_transfer is None else "ok" if last.kv_transfer.transferred else "error"
    return {"prefill": pair.prefill_id or "local", "pair": pair.reason.value, "kv_transfer": came}


def _endpoint(scope: Scope) -> str | None:
    if scope["method"] != "POST":
        return None
    path: str = scope["path"]
    return next((endpoint for end, endpoint in ENDPOINTS.items() if path.endswith(end)), None)
