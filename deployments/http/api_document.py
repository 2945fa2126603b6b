"""/openapi.json, which FastAPI writes from the routes and their bodies: how these say what types cannot, and what is
added to it.

Owns:      the functions with which fields (`about`, `said`, `shown`), bodies (`body_like`) and routes (`gives`) are
           described; the forms of errors; the limits that depend on the served model. Of an answer it says what it is,
           not its fields.
Never:     checks a request. A field that is only `shown` is checked by the code that reads it, as `SamplingParams`;
           what no schema can say, such as fields that exclude each other, is a 400.
           tests/contract/test_api_document.py sends requests that fit the document, and requests that do not.
"""

import asyncio
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from deployments.http.access import OPEN
from deployments.http.http_errors import MESSAGES, OLLAMA
from deployments.http.service import ModelFace

JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"
STATUSES = {
    400: "Something in the request is wrong; `param` names it",
    401: "A key is missing or wrong",
    403: "A browser may not ask for this",
    404: "There is no such thing",
    408: "The body did not come in time",
    409: "A replica is busy, or cannot do this",
    410: "The stream is not kept any more, or cannot be made again as it was",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "Too much waits; `Retry-After` says for how long",
    499: "The client left, or the request was aborted",
    500: "The server failed",
    503: "No replica takes requests, or a folder fails; `Retry-After` says for how long",
    504: "The request's deadline passed",
    507: "The disk for files and batches is full",
}
BODY = (400, 404, 408, 413, 415, 429, 499)  # of whatever reads a body and tokenises it
RUN = (*BODY, 503, 504)
LIMIT = "x-limit"  # of a value: the name of a limit that `_limits` knows
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def shown(*, limit: str | None = None, **keywords: Any) -> Any:
    """Describe a value by ``keywords`` of JSON schema, and by a ``limit`` that `_limits` knows."""
    return Field(json_schema_extra=keywords if limit is None else {**keywords, LIMIT: limit})


def about(meaning: str, **more: Any) -> Any:
    """Describe a field by what it means, and by keywords of JSON schema; ``more`` may also have its default."""
    given: dict[str, Any] = {"default": more.pop("default")} if "default" in more else {}
    given |= {"json_schema_extra": more} if more else {}
    return Field(description=meaning, **given)


def said(meaning: str, **keywords: Any) -> Any:
    """Describe a field that may be left out, as `about` does."""
    return about(meaning, default=None, **keywords)


def shape(optional: Mapping[str, Any] | None = None, /, **required: Any) -> dict[str, Any]:
    """Make the JSON schema of an object."""
    return {"type": "object", "required": [*required], "properties": {**required, **(optional or {})}}


def body_like(example: dict[str, Any], *, one_of: tuple[str, ...] = ()) -> ConfigDict:
    """Describe a body by an example, and by fields of which it needs one."""
    extra: dict[str, Any] = {"examples": [example]}
    if one_of:
        extra["anyOf"] = [shape(**{name: {"not": {"type": "null"}}}) for name in one_of]
    return ConfigDict(json_schema_extra=extra)


_TEXT = {"type": "string"}
_OBJECT = {"type": "object"}
_DATA = {"type": "string", "contentMediaType": JSON, "contentSchema": _OBJECT}
# an element of each kind of stream, as OpenAPI 3.2 describes it; an error ends the stream
EVENT_STREAM = {EVENTS: {"itemSchema": shape(data={"anyOf": [{"const": "[DONE]"}, _DATA]})}}
NAMED_EVENTS = {EVENTS: {"itemSchema": shape(event=_TEXT, data=_DATA)}}
JSON_LINES = {LINES: {"itemSchema": _OBJECT}}
_CODE = {"type": ["string", "integer", "null"]}
_ERRORS = {
    "Error": shape(
        object={"const": "error"}, message=_TEXT,
        error=shape(message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code=_CODE),
    ),
    "MessagesError": shape(
        type={"const": "error"}, error=shape(type=_TEXT, message=_TEXT), request_id={"type": ["string", "null"]}
    ),
    "OllamaError": shape(error=_TEXT),
}  # fmt: skip


def gives(
    answer: str | None, *errors: int, stream: Mapping[str, Any] | None = None, many: bool = False
) -> dict[str, Any]:
    """Describe the answers of a route, as arguments of its decorator.

    Args: answer: what its JSON object is; None: it answers no JSON.
          errors: statuses beside those that every route has.
          stream: the kind of stream that it can answer with. many: the answer can also be a list of such objects.
    """
    statuses = sorted({401, 403, 500, *errors})
    responses: dict[int, Any] = {status: {"description": STATUSES[status]} for status in statuses}
    if answer is not None:
        schema = {"anyOf": [_OBJECT, {"type": "array", "items": _OBJECT}]} if many else _OBJECT
        responses[200] = {"content": {JSON: {"schema": schema}, **(stream or {})}}
    return {"response_model": None, "responses": responses, "response_description": answer or "The answer"}


def describe(app: FastAPI, model: ModelFace | None, *, any_model: bool = False) -> None:
    """Have ``app`` give FastAPI's document at /openapi.json, completed. It is made and written when it is first asked
    for, on another thread: that takes half a second.

    Args: model: whose limits it shows; None leaves their names. any_model: other names may be served, now or later.
    """
    written, lock, kept, bodies = app.openapi, threading.Lock(), dict[str, Any](), dict[str, bytes]()
    # GET and HEAD of a route have one id until `_complete`
    warnings.filterwarnings("ignore", message="Duplicate Operation ID")

    def document() -> dict[str, Any]:
        with lock:
            if not kept:
                made = written()
                _complete(made, asks_for_key=bool(app.state.keys.api))
                if model is not None:
                    _put_limits(made["components"], _limits(model) | ({"model": {}} if any_model else {}))
                kept.update(made)
        return kept

    async def answer(request: Request) -> Response:
        root = request.scope.get("root_path", "").rstrip("/")  # one server's is always the same
        if root not in bodies:
            servers = {"servers": [{"url": root}]} if root else {}
            bodies[root] = await asyncio.to_thread(lambda: bytes(JSONResponse(document() | servers).body))
        return Response(bodies[root], media_type=JSON)

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's way to have a document of one's own
    app.add_route("/openapi.json", answer, include_in_schema=False)


def _complete(document: dict[str, Any], *, asks_for_key: bool) -> None:
    document["security"] = [{name: []} for name in _KEYS] if asks_for_key else []
    document["components"]["securitySchemes"] = _KEYS
    schemas = document["components"]["schemas"]
    schemas.update(_ERRORS)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for path, operations in document["paths"].items():
        name = "MessagesError" if path in MESSAGES else "OllamaError" if path in OLLAMA else "Error"
        error = {"$ref": f"#/components/schemas/{name}"}
        for method, operation in operations.items():
            operation["operationId"] = f"{method}{path.translate(str.maketrans('/{', '__', '}'))}"
            first = " ".join(operation.pop("description").partition("\n\n")[0].split())
            operation["summary"] = first.partition(" Raises:")[0].replace("``", "`").rstrip(".")
            operation |= {"security": []} if path in OPEN else {}
            operation["responses"].pop("422", None)  # FastAPI's own for what is wrong with a body: ours is a 400
            for status, response in operation["responses"].items():
                if method == "head":
                    response.pop("content", None)
                elif status != "200":
                    response["content"] = {JSON: {"schema": error}}


def _limits(model: ModelFace) -> dict[str, dict[str, Any]]:
    return {
        "model": {"enum": [model.name, ""]},
        "context": {"maximum": model.context_len},
        "token": {"minimum": 0, "maximum": model.vocab_size - 1},
        "64 bits": {"minimum": -(2**63), "maximum": 2**63 - 1},  # FastAPI would round them to floats
    }


def _put_limits(node: Any, limits: Mapping[str, Mapping[str, Any]]) -> None:
    """Put ``limits`` in the places of their names, in ``node`` and everything inside it."""
    if isinstance(node, dict):
        node.update(limits[node.pop(LIMIT)] if LIMIT in node else {})
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _put_limits(each, limits)
