"""POST /v1/responses, as OpenAI's Responses API, without a memory: each request brings its whole conversation.

Owns:      the routes.
Never:     stores a response; what asks for a stored one is answered with 404, or refused by name.
"""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from deployments.http.answer_bodies import ResponseBody, ResponseEventBody
from deployments.http.api_document import RUN, gives
from deployments.http.apis.response_form import ResponseForm, new_writer
from deployments.http.apis.response_input import ResponsesRequest, ToolSet, chat_of, renamed, tools_of
from deployments.http.arrivals import DROPPED, name_of, opening_of
from deployments.http.bodies import PathName, Route
from deployments.http.chat import prepare
from deployments.http.http_errors import error_body
from deployments.http.service import service_of
from deployments.http.streaming import Answer
from replicas.errors import InvalidRequest

router = APIRouter(route_class=Route)


@router.post("/v1/responses", **gives(ResponseBody, *RUN, 410, event=ResponseEventBody))
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer a conversation of items, streaming or not."""
    tools = tools_of(body)
    answer = await _answer(request, body, tools, name_of(request, body.rid))
    response = await answer.respond(request, streams=body.stream)
    if tools.dropped:
        response.headers[DROPPED] = ", ".join(dict.fromkeys(tools.dropped))
    return response


@router.get("/v1/responses/{response_id}", **gives(ResponseBody, 404))
async def stored_response(response_id: PathName) -> Response:
    """Answer with 404, always: no response is stored."""
    message = f"no response {response_id[:200]!r}: this server keeps none; send the whole conversation as input"
    return JSONResponse(error_body(message, status=404, param="response_id"), status_code=404)


async def _answer(request: Request, body: ResponsesRequest, tools: ToolSet, name: str) -> Answer:
    service = service_of(request)
    try:
        prepared = await prepare(request, chat_of(body, tools), name)
    except InvalidRequest as error:
        raise renamed(error) from error
    asked = prepared.request
    opening = opening_of(request)
    writer = new_writer(body, tools, name, model=service.model.name, sampling=asked.sampling, opening=opening)
    num_top = body.top_logprobs or 0 if asked.return_logprobs else None
    return prepared.answer(ResponseForm(service=service, writer=writer, num_top=num_top), writer.response["id"])
