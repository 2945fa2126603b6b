"""GET /v1/streams/{name}: the rest of a stream whose client comes back to the router that has it.

Never:     runs a request; the POST of the same request, with the same headers, does where the stream is not kept.
Invariant: a stream is there for the key that opened it; to any other it does not exist.
"""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from deployments.dispatch.event_ids import StreamGone
from deployments.http.access import caller_of
from deployments.http.api_document import gives
from deployments.http.arrivals import LAST_EVENT
from deployments.http.bodies import PathName, Route
from deployments.http.service import service_of
from deployments.http.streaming import EventsResponse, kept_answer, of_kept
from replicas.errors import Fault, MantaError

router = APIRouter(route_class=Route)
GIVES = gives(None, 400, 404, 410, 429, 499, 503, 504)


class NoStream(MantaError):
    """No stream of this name was opened with this key."""

    fault = Fault.NOT_FOUND
    code = "stream_not_found"


@router.get("/v1/streams/{name:path}", status_code=200, response_class=EventsResponse, **GIVES)
async def rest_of_stream(request: Request, name: PathName) -> Response:
    """Send the rest of a stream that was opened with `x-manta-reconnect`, behind the event in `Last-Event-ID`."""
    streams, key = service_of(request).streams, (caller_of(request).name, name)
    kept, why = streams.find(key), streams.why_gone(key)
    again = "send its request again, with Last-Event-ID and x-manta-resume"
    if kept is None and why is None:
        raise NoStream(f"no stream {name[:200]!r} of this key is kept here, and none was of late: {again}")
    index = None if kept is None else kept.index_after(request.headers.get(LAST_EVENT, ""))
    if kept is None or index is None:
        raise StreamGone(f"{why or 'the events behind Last-Event-ID are not kept any more'}: {again}")
    if request.method == "HEAD":
        return EventsResponse(of_kept(kept))
    streams.resumed("kept")
    return await kept_answer(request, streams, streams.attach(kept, index))
