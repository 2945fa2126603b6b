"""The routes of OpenAI's Responses API, without a memory: each request brings its whole conversation. A response in the
background can be asked for, cancelled and deleted, at whichever router.

Owns:      the routes; what the router that has a response does for a client of another one.
Never:     stores a response; one in the background is kept in memory for a while (dispatch/background.py).
Invariant: a response is there for the key that opened it; to any other it does not exist.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import Response

from deployments.dispatch.background import BackgroundStream, BackgroundStreams
from deployments.dispatch.event_ids import StreamGone
from deployments.dispatch.resumable_streams import MOST_STREAMS, Event
from deployments.fleet.peers import Body, ResponseAsk, What
from deployments.http.access import caller_of
from deployments.http.api_document import NAMED_EVENTS, RUN, gives
from deployments.http.apis.response_form import ResponseForm, new_writer
from deployments.http.apis.response_input import ResponsesRequest, ToolSet, chat_of, renamed, tools_of
from deployments.http.arrivals import DROPPED, generations_of, name_of, opening_of
from deployments.http.bodies import PathName, Route
from deployments.http.chat import prepare
from deployments.http.http_errors import Busy, body_of
from deployments.http.service import service_of
from deployments.http.streaming import (
    SCHEMA_HEADER,
    Answer,
    AnswerSoFar,
    Change,
    JsonAnswer,
    Writer,
    merged,
    sse,
    stream,
)
from deployments.record.rids import new_digits
from replicas.errors import Fault, InvalidRequest, MantaError

router = APIRouter(route_class=Route)
LOOK_S = 1.0  # how long a router waits for the next event before it tells one that asked
SILENT_S = 30.0  # how long a stream from another router goes on without an answer of it: it may only be slow
PAUSE_S = 0.1  # between two looks at the events of another router: those of a moment come together
_READS = {
    "parameters": [
        {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
        {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 999_999_999}},
    ]
}


class NoResponse(MantaError):
    """No response of this id is kept for this key."""

    fault = Fault.NOT_FOUND
    code = "response_not_found"


class RoutersSilent(MantaError):
    """A response is not here, and other routers, one of which may have it, did not answer."""

    fault = Fault.UNAVAILABLE
    code = "routers_silent"


@router.post("/v1/responses", **gives("OpenAI's `response`", *RUN, 410, stream=NAMED_EVENTS))
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer a conversation of items, streaming or not, or in the background."""
    tools = tools_of(body)
    answer = await _answer(request, body, tools, name_of(request, body.rid))
    if body.background:
        response = await _run_in_background(request, answer, streams=body.stream is True)
    else:
        response = await answer.respond(request, streams=body.stream)
    if tools.dropped:
        response.headers[DROPPED] = ", ".join(dict.fromkeys(tools.dropped))
    return response


@router.get(
    "/v1/responses/{response_id}", openapi_extra=_READS,
    **gives("OpenAI's `response`", 400, 404, 410, 503, stream=NAMED_EVENTS),
)  # fmt: skip
async def background_response(request: Request, response_id: PathName) -> Response:
    """Show a response in the background as it is now; with `stream=true` send its events behind `starting_after`."""
    given = request.query_params
    if request.method == "HEAD" or given.get("stream", "false").lower() in ("false", "0", ""):
        return JsonAnswer((await _asked(request, response_id, "response"))["response"])
    after = given.get("starting_after")
    if after is not None and not (after.isdecimal() and len(after) < 10):
        raise InvalidRequest(
            f"starting_after: must be the sequence_number of an event, got {after[:64]!r}", param="starting_after"
        )
    return await _events(request, response_id, 0 if after is None else int(after) + 1)


@router.post("/v1/responses/{response_id}/cancel", **gives("OpenAI's `response`", 404, 503))
async def cancel_response(request: Request, response_id: PathName) -> Response:
    """Cancel a response in the background, unless it has ended."""
    return JsonAnswer((await _asked(request, response_id, "cancel"))["response"])


@router.delete("/v1/responses/{response_id}", **gives("That the response is deleted, as OpenAI says it", 404, 503))
async def delete_response(request: Request, response_id: PathName) -> Response:
    """End a response in the background, if it runs, and forget it."""
    await _asked(request, response_id, "delete")
    return JsonAnswer({"id": response_id, "object": "response", "deleted": True})


async def asked_of(streams: BackgroundStreams, ask: ResponseAsk) -> Body | None:
    """Do what a client of this router, or of another one, asks of a response. Returns: None if it never was here."""
    key = (ask.owner, ask.response_id)
    found, why = streams.find(key), streams.why_gone(key)
    if found is None:
        return None if why is None else {"gone": why}
    if ask.what == "events":
        events = await found.more(ask.index, ask.within_s)
        return {"events": events, "ended": found.ended, "next": found.num_events, "dropped": found.num_dropped}
    if ask.what == "cancel":
        found.cancel()
    if ask.what == "delete":
        streams.delete(key)
    return {"response": found.shown()}


async def _asked(request: Request, response_id: str, what: What, index: int = 0, within_s: float = 0.0) -> Body:
    """Do what a client asks of a response, here or at the router that has it. Raises: NoResponse, RoutersSilent."""
    service, owner = service_of(request), caller_of(request).name
    ask = ResponseAsk(owner=owner, response_id=response_id, what=what, index=index, within_s=within_s)
    told = await asked_of(service.background, ask)
    if told is None:
        if within_s:
            await asyncio.sleep(PAUSE_S)
        others = await service.peers.ask_response(ask)
        told = others.body
        if told is None and others.unanswered:
            raise RoutersSilent(f"no response {response_id[:200]!r} was found, but {others.unanswered}: try again")
    if told is None or "gone" in told:
        why = "this server keeps none but those in the background, of this key" if told is None else told["gone"]
        raise NoResponse(
            f"no response {response_id[:200]!r}: {why}. It is kept in the memory of its router, for "
            f"{service.background.kept_s:g} s after its end: send the whole conversation again"
        )
    return told


async def _events(request: Request, response_id: str, index: int) -> Response:
    """Send the events of a response from ``index`` on. Raises: InvalidRequest, StreamGone, and as `_asked`."""
    told = await _asked(request, response_id, "events", index)
    if index > told["next"]:
        raise InvalidRequest(
            f"starting_after: {index - 1} has not come; {told['next']} events have, from 0 on", param="starting_after"
        )
    _check_kept(told, index)

    async def rest() -> AsyncGenerator[bytes, None]:
        nonlocal told
        yield told["events"]  # also where it is empty: the status goes out
        heard_s = time.monotonic()
        while not told["ended"]:
            index = told["next"]
            try:
                told = await _asked(request, response_id, "events", index, LOOK_S)
            except RoutersSilent:
                if time.monotonic() > heard_s + SILENT_S:
                    raise
                continue
            heard_s = time.monotonic()
            _check_kept(told, index)
            if told["events"]:
                yield told["events"]

    def failed(error: Exception) -> bytes:
        detail = body_of(error)[1]["error"]
        of_error = {name: detail[name] for name in ("code", "message", "param")}
        return sse({"type": "error", "sequence_number": told["next"], **of_error}, named=True)

    return await stream(request, rest(), failed=failed)


def _check_kept(told: Body, index: int) -> None:
    if index < told["dropped"]:
        raise StreamGone(
            f"the events before number {told['dropped']} are not kept any more: ask for the response without stream"
        )


async def _run_in_background(request: Request, answer: Answer, *, streams: bool) -> Response:
    """Run a request without its client. Raises: what refuses it at once; Busy, InvalidRequest."""
    service, form, response_id = service_of(request), answer.form, answer.answer_id
    assert isinstance(form, ResponseForm)
    assert response_id is not None
    background, key = service.background, (caller_of(request).name, response_id)
    if not background.has_room(key):
        raise Busy(
            f"too many responses run in the background: a router takes {MOST_STREAMS}, half of them of one key: cancel "
            "some, or try again later"
        )
    [asked] = answer.requests
    asked = replace(asked, deadline_s=min(asked.deadline_s or math.inf, background.timeout_s))
    writer = BackgroundWriter(form)
    events = answer.written(merged([generations_of(request, response_id).stream(asked)]), writer)
    kept = BackgroundStream(events, writer.error, form.writer.so_far)
    background.run(key, kept)
    await asyncio.sleep(0)  # its first step, in which the router decides
    if writer.failure is not None:
        background.delete(key)
        raise writer.failure
    response = await _events(request, response_id, 0) if streams else JsonAnswer(kept.shown())
    if answer.promise is not None:
        response.headers[SCHEMA_HEADER] = answer.promised_at_first
    return response


class BackgroundWriter(Writer[list[Event]]):
    """Writes the events of a response in the background, which have their numbers within."""

    form: ResponseForm
    failure: Exception | None = None

    def begin(self) -> list[Event]:
        return self._encoded(self.form.writer.queue())

    def write(self, change: Change, so_far: AnswerSoFar) -> list[Event]:
        return self._encoded(self.payloads(change, so_far))

    def error(self, error: Exception) -> list[Event]:
        """Write the end of a response that fails."""
        self.failure = error
        return self._encoded(self.form.error_events(error))

    def _encoded(self, payloads: list[Body]) -> list[Event]:
        return [Event("", sse(payload, named=True)) for payload in payloads]


async def _answer(request: Request, body: ResponsesRequest, tools: ToolSet, name: str) -> Answer:
    service = service_of(request)
    try:
        prepared = await prepare(request, chat_of(body, tools), name)
    except InvalidRequest as error:
        raise renamed(error) from error
    asked = prepared.request
    opening = opening_of(request)
    in_id = new_digits() if body.background else name  # one that is kept has an id that cannot be guessed
    writer = new_writer(body, tools, in_id, model=service.name_of(asked), sampling=asked.sampling, opening=opening)
    num_top = body.top_logprobs or 0 if asked.return_logprobs else None
    return prepared.answer(ResponseForm(service=service, writer=writer, num_top=num_top), writer.response["id"])
