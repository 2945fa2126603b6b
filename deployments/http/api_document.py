"""/openapi.json: every route with the bodies that it takes, their limits, and the answers that it gives.

Owns:      the description of the routes beyond their paths and methods, which the app itself knows.
Never:     checks a request: the routes do, and `SamplingParams`; the limits repeat theirs in JSON schema. What no
           schema can say, such as fields that exclude each other, is a 400, which each route lists.
           tests/contract/test_api_document.py sends requests that fit the document, and requests that do not.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dashboards.dialects import DIALECTS
from deployments.http import answer_bodies as answers
from deployments.http.access import OPEN
from deployments.http.admin import MAX_FLUSH_WAIT_S
from deployments.http.apis import response_input
from deployments.http.apis.meanings import given, meaning
from deployments.http.apis.messages import CountTokensRequest, MessagesRequest
from deployments.http.apis.readouts import EmbeddingRequest, RerankRequest, ScoreRequest
from deployments.http.apis.response_input import ResponsesRequest
from deployments.http.bodies import (
    MAX_PROMPTS,
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    MemoryRequest,
    NativeRequest,
    TokenizeRequest,
)
from deployments.http.constraints import FORM_TYPES
from deployments.http.convert import MAX_BAD_WORDS
from deployments.http.routes import ExplainRequest
from deployments.http.service import Service
from deployments.output.tools import MAX_TOOLS
from replicas.text.control_tokens import ROLES

Limit = dict[str, Any]
Limits = dict[str, Limit]  # by the JSON type of what is given; "items" are those of a list's elements
_PART = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}},
        {
            "type": "object",
            "required": ["type", "refusal"],
            "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
        },
    ]
}
_TOOL_NAME: Limit = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}
_TOOL: Limit = {
    "required": ["function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": _TOOL_NAME,
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"], "properties": {"type": {"const": "object"}}},
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}
_NAMED_TOOL: Limit = {
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": _TOOL_NAME}},
    },
}
_CALL = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object"]}},
        }
    },
}
MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "null"},
                {"type": "array", "items": _PART},
            ]
        },
        "tool_calls": {"anyOf": [{"type": "null"}, {"type": "array", "items": _CALL}]},
    },
}
_TURNS: Limit = {
    "minItems": 1,
    "items": {
        "object": {
            "required": ["role", "content"],
            "properties": {
                "role": {"enum": ["user", "assistant", "system"]},
                "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
            },
        }
    },
}
_INPUT_TOOL: Limit = {
    "required": ["name", "input_schema"],
    "properties": {"name": {"type": "string"}, "input_schema": {"type": "object"}},
}
_TOOL_CHOICE: Limit = {"properties": {"type": {"enum": ["auto", "any", "tool", "none"]}}}
_ANYTHING = ""  # in place of a type, where the field's may be any
_NOT_DONE: Limit = {"enum": [None, False, 0, "", [], {}]}
# the fields that ask for a form of the output (constraints.py)
_STRINGS: Limit = {"type": "array", "items": {"type": "string"}}
_FORMS: dict[str, tuple[Limit, ...]] = {
    **dict.fromkeys(("regex", "ebnf", "guided_regex", "guided_grammar"), ({"type": "string"},)),
    **dict.fromkeys(("json_schema", "structural_tag", "guided_json"), ({"type": "string"}, {"type": "object"})),
    "guided_choice": (_STRINGS,),
    "structured_outputs": ({"type": "object"},),
}
_NAME: Limit = {"pattern": "^[A-Za-z0-9._:/@+=-]{0,128}$"}
_PENALTY: Limits = {"number": {"minimum": -2, "maximum": 2}}
_UP_TO_20: Limits = {"integer": {"minimum": 0, "maximum": 20}}


def limits_of(service: Service) -> dict[str, Limits]:
    """By the name of the field, on whatever route, or of the body and its field."""
    context: Limits = {"integer": {"minimum": 0, "maximum": service.model.context_len}}
    keep: Limits = {"integer": {"minimum": -1, "maximum": service.model.context_len, "not": {"const": 0}}}
    token: Limits = {"integer": {"minimum": 0, "maximum": service.model.vocab_size - 1}}
    any_token: Limits = {"integer": {"minimum": 0, "maximum": 2**31 - 1}}
    one_or_many: Limit = {"minItems": 1, "items": {**token, "array": {"minItems": 1, "items": token}}}
    texts: Limits = {"string": {"minLength": 1}, "array": one_or_many}
    stops: Limit = {"maxItems": 64, "items": {"string": {"minLength": 1, "maxLength": 1024}}}
    return {
        "model": {"string": {"enum": [service.model.name, ""]}},
        "MessagesRequest.messages": {"array": _TURNS},
        "CountTokensRequest.messages": {"array": _TURNS},
        "MessagesRequest.tools": {"array": {"items": {"object": _INPUT_TOOL}}},
        "CountTokensRequest.tools": {"array": {"items": {"object": _INPUT_TOOL}}},
        "MessagesRequest.max_tokens": {"integer": {"minimum": 0}},  # at most as many as the context leaves
        "MessagesRequest.tool_choice": {"object": _TOOL_CHOICE},
        "CountTokensRequest.tool_choice": {"object": _TOOL_CHOICE},
        "messages": {"array": {"minItems": 1, "items": {"object": {"$ref": "#/components/schemas/Message"}}}},
        "prompt": texts,
        "input_ids": texts,
        "TokenizeRequest.prompt": {"array": {"minItems": 1, "maxItems": MAX_PROMPTS}},  # no text has no token
        "AbortRequest.rid": {},  # of no request, if it is none's
        "EmbeddingRequest.input": texts,
        "query": {"array": {"items": token}},
        "items": {"array": {"minItems": 1, "maxItems": MAX_PROMPTS, "items": {"array": {"items": token}}}},
        "label_token_ids": {"array": {"minItems": 1, "maxItems": 1024, "items": token}},
        "documents": {"array": {"minItems": 1, "maxItems": MAX_PROMPTS}},
        "top_n": {"integer": {"minimum": 1}},
        "dimensions": {"integer": {"minimum": 1}},
        "tokens": {"array": {"items": {**any_token, "array": {"minItems": 1, "items": any_token}}}},
        "max_tokens": context,
        "max_completion_tokens": context,
        "max_new_tokens": context,
        "min_tokens": context,
        "min_new_tokens": context,
        "temperature": {"number": {"minimum": 0, "maximum": 100}},
        "top_p": {"number": {"exclusiveMinimum": 0, "maximum": 1}},
        "top_k": {"integer": {"minimum": -1}},
        "min_p": {"number": {"minimum": 0, "maximum": 1}},
        "repetition_penalty": {"number": {"minimum": 0.01, "maximum": 10}},
        "frequency_penalty": _PENALTY,
        "presence_penalty": _PENALTY,
        "n": {"integer": {"minimum": 1, "maximum": 128}},
        "seed": {"integer": {"minimum": -(2**63), "maximum": 2**63 - 1}},
        "sampling_seed": {"integer": {"minimum": -(2**63), "maximum": 2**63 - 1}},
        "stop": {"string": {"maxLength": 1024}, "array": stops},
        "stop_token_ids": {"array": {"maxItems": 256, "items": token}},
        "logit_bias": {
            "object": {
                "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            }
        },
        "logprobs": _UP_TO_20,
        "top_logprobs": _UP_TO_20,
        "prompt_logprobs": _UP_TO_20,
        "allowed_token_ids": {"array": {"minItems": 1, "items": token}},
        "bad_words": {"array": {"maxItems": MAX_BAD_WORDS, "items": {"string": {"pattern": r"\S"}}}},
        "truncate_prompt_tokens": keep,
        "truncate": keep,
        "top_logprobs_num": _UP_TO_20,
        "tools": {"array": {"maxItems": MAX_TOOLS, "items": {"object": _TOOL}}},
        "tool_choice": {"string": {"enum": ["none", "auto", "required"]}, "object": _NAMED_TOOL},
        "function_call": {_ANYTHING: {"enum": [None, "none", "auto"]}},
        "priority": {"integer": {"minimum": -1000, "maximum": 1000}},
        "timeout": {"number": {"exclusiveMinimum": 0}},
        "rid": {"string": _NAME, "array": {"items": {"string": _NAME}}},
        "modalities": {"array": {"items": {"string": {"const": "text"}}, "minItems": 1, "maxItems": 1}},
        "suffix": {"string": {"maxLength": 0}},
        "response_format": {"object": {"properties": {"type": {"enum": [None, "text", *FORM_TYPES]}}}},
        **{name: {_ANYTHING: _form(*allowed)} for name, allowed in _FORMS.items()},
        **_of_responses(context),
    }


def _of_responses(context: Limits) -> dict[str, Limits]:
    """Limits of what /v1/responses has beside, or not as, the fields of chats."""
    text, role = {"type": "string"}, {"enum": list(ROLES)}
    kinds = {"text": [each for each in response_input.PARTS if each != "refusal"], "refusal": ["refusal"]}
    part = {"anyOf": [_object(type={"enum": kind}, **{name: text}) for name, kind in kinds.items()]}
    content = {"anyOf": [text, {"type": "null"}, {"type": "array", "items": part}]}
    items = [
        _object(role=role) | {"properties": {"type": {"const": "message"}, "role": role, "content": content}},
        _object(type={"const": "reasoning"}),
        _object(type={"const": "function_call"}, call_id=text, name=text, arguments=text),
        _object(type={"const": "function_call_output"}, call_id=text, output=content),
    ]
    function = _object(type={"const": "function"}, name=text)
    return {
        "input": {"array": {"minItems": 1, "items": {"object": {"anyOf": items}}}},
        "max_output_tokens": context,
        "include": {"array": {"items": {"string": {"enum": list(response_input.INCLUDES)}}}},
        "ResponsesRequest.tools": {"array": {"items": {"object": function}}},
        **{f"ResponsesRequest.{name}": {"boolean": {"const": False}} for name in ("store", "background")},
        "ResponsesRequest.previous_response_id": {"string": {"maxLength": 0}},
        "ResponsesRequest.prompt": {_ANYTHING: _NOT_DONE},
        "ResponsesRequest.n": {"integer": {"const": 1}},
        **{f"ResponsesRequest.{name}": {"integer": {"const": 0}} for name in ("max_tokens", "prompt_logprobs")},
        "ResponsesRequest.return_token_ids": {"boolean": {"const": False}},
        "ResponsesRequest.response_format": {"object": {"maxProperties": 0}},
    }


def _object(**properties: Any) -> dict[str, Any]:
    """Make the schema of an object that has all of ``properties``."""
    return {"type": "object", "required": [*properties], "properties": properties}


def limit(body: str, properties: Mapping[str, Any], limits: Mapping[str, Limits]) -> None:
    """Put ``limits`` and meanings into the schemas of ``properties``. What is typed as anything and has no limits is
    only refused."""
    for name, schema in properties.items():
        schema["description"] = meaning(body, name)
        _limit(schema, limits.get(f"{body}.{name}", limits.get(name, {_ANYTHING: _NOT_DONE})))


def _form(*allowed: Limit) -> Limit:
    return {"anyOf": [*allowed, _NOT_DONE]}


def _limit(schema: dict[str, Any], limits: Limits) -> None:
    for allowed in schema.get("anyOf", [schema]):
        for name, value in limits.get(allowed.get("type", allowed.get("$ref", _ANYTHING)), {}).items():
            if name == "items":
                _limit(allowed["items"], value)
            else:
                allowed[name] = value


JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
_REF = "#/components/schemas/{model}"
_STATUSES = {
    400: "Something in the request is wrong; `param` names it",
    401: "A key is missing or wrong",
    403: "A browser may not ask for this",
    404: "There is no such thing",
    408: "The body did not come in time",
    409: "A replica is busy, or cannot do this",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "Too much waits; `Retry-After` says for how long",
    499: "The client left, or the request was aborted",
    500: "The server failed",
    503: "No replica takes requests; `Retry-After` says for how long",
    504: "The request's deadline passed",
}
_ALL = (401, 403, 500)
_BODY = (*_ALL, 400, 404, 408, 413, 415, 429, 499)  # of whatever reads a body and tokenises it
_RUN = (*_BODY, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What a route takes and gives."""

    body: type[BaseModel] | None = None
    may_lack_body: bool = False
    answer: type[BaseModel] | None = None  # None: plain text
    many: bool = False  # a list of answers, for several prompts or choices
    event: type[BaseModel] | None = None  # of a stream
    names_events: bool = False  # as `Form.names_events`
    error: type[BaseModel] = answers.ErrorBody
    errors: tuple[int, ...] = _ALL
    query: Mapping[str, Any] = field(default_factory=dict)
    content: tuple[str, ...] = ()  # of the answer, where it is not JSON


_GENERATES = {
    "/v1/completions": Described(
        body=CompletionRequest, answer=answers.CompletionBody, event=answers.CompletionBody, errors=_RUN
    ),
    "/v1/chat/completions": Described(
        body=ChatRequest, answer=answers.ChatCompletionBody, event=answers.ChatCompletionChunkBody, errors=_RUN
    ),
    "/v1/responses": Described(
        body=ResponsesRequest, answer=answers.ResponseBody, event=answers.ResponseEventBody, errors=_RUN
    ),
    "/generate": Described(
        body=NativeRequest, answer=answers.GeneratedBody, many=True, event=answers.GeneratedBody, errors=_RUN
    ),
}
_MESSAGES = {
    "/v1/messages": Described(
        body=MessagesRequest, answer=answers.MessageBody, event=answers.MessageEventBody, names_events=True,
        error=answers.MessagesErrorBody, errors=_RUN,
    ),
    "/v1/messages/count_tokens": Described(
        body=CountTokensRequest, answer=answers.CountedTokensBody, error=answers.MessagesErrorBody, errors=_BODY
    ),
}  # fmt: skip
_READOUTS = {
    "/v1/embeddings": Described(body=EmbeddingRequest, answer=answers.EmbeddingsBody, errors=_RUN),
    "/v1/score": Described(body=ScoreRequest, answer=answers.ScoresBody, errors=_RUN),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"),
        Described(body=RerankRequest, answer=answers.RankingBody, errors=_RUN),
    ),
}
_TOKENIZE = Described(body=TokenizeRequest, answer=answers.TokensBody, errors=_BODY)
_DETOKENIZE = Described(body=DetokenizeRequest, answer=answers.TextBody, errors=_BODY)
_HEALTH = Described(answer=answers.HealthBody, errors=(*_ALL, 503))
_MODEL_INFO = Described(answer=answers.ModelInfoBody)
_SERVER_INFO = Described(answer=answers.ServerInfoBody)
_METRICS = Described(
    content=(TEXT, "application/openmetrics-text"),
    errors=(*_ALL, 400),
    query={"dialect": {"type": "string", "enum": list(DIALECTS)}},
)
_IN_PATHS: Mapping[str, dict[str, Any]] = {"dialect": {"enum": list(DIALECTS)}}
_ANY_NAME = {"minLength": 1}
_FLUSH_WAIT = {"type": "number", "minimum": 0, "maximum": MAX_FLUSH_WAIT_S, "default": 0}
_EXAMPLES: Mapping[type[BaseModel], dict[str, Any]] = {
    CompletionRequest: {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
    ChatRequest: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
    ResponsesRequest: {"input": "Hello", "max_output_tokens": 8},
    NativeRequest: {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 8}},
    MessagesRequest: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
    CountTokensRequest: {"messages": [{"role": "user", "content": "Hello"}]},
    EmbeddingRequest: {"input": ["Hello"]},
    ScoreRequest: {"query": "Is this a city? ", "items": ["Paris", "Rhine"], "label_token_ids": [19, 20]},
    RerankRequest: {"query": "capital of France", "documents": ["Paris", "Rhine"]},
    TokenizeRequest: {"messages": [{"role": "user", "content": "Hello"}]},
    DetokenizeRequest: {"tokens": [19, 20]},
    ExplainRequest: {"prompt": "The capital of France is", "max_tokens": 8},
    AbortRequest: {"rid": "my-request"},
    MemoryRequest: {"tags": ["kv_cache"]},
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
ROUTES: Mapping[str, Described] = {
    "/": Described(answer=answers.IndexBody),
    **_GENERATES,
    **_MESSAGES,
    **_READOUTS,
    "/tokenize": _TOKENIZE,
    "/v1/tokenize": _TOKENIZE,
    "/detokenize": _DETOKENIZE,
    "/v1/detokenize": _DETOKENIZE,
    "/v1/responses/{response_id}": Described(answer=answers.ResponseBody, errors=(*_ALL, 404)),
    "/tokenizer_info": Described(answer=answers.TokenizerInfoBody),
    "/route/explain": Described(body=ExplainRequest, answer=answers.RouteExplanationBody, errors=_RUN),
    "/route/{rid}": Described(answer=answers.RouteBody, errors=(*_ALL, 404, 503)),
    "/v1/models": Described(answer=answers.Models),
    "/v1/models/{name}": Described(answer=answers.Model, errors=(*_ALL, 404)),
    "/get_model_info": _MODEL_INFO,
    "/model_info": _MODEL_INFO,
    "/get_server_info": _SERVER_INFO,
    "/server_info": _SERVER_INFO,
    "/flush_cache": Described(content=(TEXT,), errors=(*_ALL, 400), query={"timeout": _FLUSH_WAIT}),
    "/release_memory_occupation": Described(
        body=MemoryRequest, may_lack_body=True, answer=answers.MemoryBody, errors=(*_BODY, 409, 503),
        query={"timeout": _FLUSH_WAIT},
    ),
    "/resume_memory_occupation": Described(
        body=MemoryRequest, may_lack_body=True, answer=answers.MemoryBody, errors=(*_BODY, 503)
    ),
    "/abort_request": Described(body=AbortRequest, answer=answers.AbortedBody, errors=_BODY),
    "/health": _HEALTH,
    "/ready": _HEALTH,
    "/ping": Described(content=(TEXT,)),
    "/version": Described(answer=answers.VersionBody),
    "/metrics": _METRICS,
    "/metrics/{dialect}": Described(content=(TEXT,), errors=(*_ALL, 400)),
    "/prometheus/metrics": _METRICS,
}


def describe(app: FastAPI, routers: Sequence[APIRouter], service: Service) -> None:
    """Have ``app`` give the document of ``routers`` at /openapi.json; it is made when it is first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(routers, service, asks_for_key=bool(app.state.keys.api))
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # FastAPI's way to have a document of one's own


def _document(routers: Sequence[APIRouter], service: Service, *, asks_for_key: bool) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in [route for router in routers for route in router.routes]:
        if isinstance(route, APIRoute):
            operations = paths.setdefault(route.path_format, {})
            for method in sorted(route.methods or ()):
                operation = _operation(route, method, ROUTES[route.path_format])
                operations[method.lower()] = operation | ({"security": []} if route.path in OPEN else {})
    return {
        "openapi": "3.1.0",
        "info": {"title": "Manta", "version": service.version},
        "security": [{name: []} for name in _KEYS] if asks_for_key else [],
        "paths": paths,
        "components": {
            "securitySchemes": _KEYS,
            "schemas": _schemas(service),
            "responses": {
                str(status): _error(status, answers.ErrorBody) for status in _STATUSES
            },
        },
    }


def _operation(route: APIRoute, method: str, described: Described) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", **_IN_PATHS.get(name, _ANY_NAME)}}
        for name in route.param_convertors
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in described.query.items()]
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{route.path_format.translate(str.maketrans('/{', '__', '}'))}",
        "summary": _summary(route),
        "parameters": parameters,
        "responses": {"200": _answer(described)},
    }
    if described.body is not None:
        body = {"schema": _ref(described.body), "example": _EXAMPLES[described.body]}
        operation["requestBody"] = {"required": not described.may_lack_body, "content": {JSON: body}}
    if method == "HEAD":
        operation["responses"]["200"] = {"description": "As GET answers, without the body"}
    for status in sorted(described.errors):
        error = {"$ref": f"#/components/responses/{status}"}
        if method == "HEAD":
            error = {"description": _STATUSES[status]}
        elif described.error is not answers.ErrorBody:
            error = _error(status, described.error)
        operation["responses"][str(status)] = error
    return operation


def _summary(route: APIRoute) -> str:
    """The first sentences of its docstring."""
    first = " ".join(route.description.partition("\n\n")[0].split())
    return first.partition(" Raises:")[0].replace("``", "`").rstrip(".")


def _error(status: int, error: type[BaseModel]) -> dict[str, Any]:
    return {"description": _STATUSES[status], "content": _content(JSON, _ref(error))}


def _answer(described: Described) -> dict[str, Any]:
    if described.answer is None:
        text = [_content(each, {"type": "string"}) for each in described.content]
        return {"description": "Text", "content": {name: value for part in text for name, value in part.items()}}
    schema = _ref(described.answer)
    if described.many:
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    content = _content(JSON, schema)
    if described.event is not None:
        content[EVENTS] = {"itemSchema": _event(described, described.event)}
    return {"description": "The answer", "content": content}


def _event(described: Described, event: type[BaseModel]) -> dict[str, Any]:
    """One of a stream's, as OpenAPI 3.2 describes them. An error ends the stream."""
    either = {"anyOf": [_ref(event), _ref(described.error)]}
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": either}
    if described.names_events:
        named = {"event": {"type": "string"}, "data": data}
        return {"type": "object", "required": list(named), "properties": named}
    last = {"const": "[DONE]"}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [last, data]}}}


def _content(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {media_type: {"schema": schema}}


def _ref(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF.format(model=model.__name__)}


def _schemas(service: Service) -> dict[str, Any]:
    """Every body and answer by name."""
    bodies = {each.body for each in ROUTES.values() if each.body is not None}
    given_bodies = {model for each in ROUTES.values() for model in (each.answer, each.event, each.error)}
    schemas = _of_models(bodies)
    for name, schema in schemas.items():
        limit(name, schema.get("properties", {}), limits_of(service))
    shown = _of_models(model for model in given_bodies if model is not None)
    for name, schema in shown.items():
        for field_name, field_schema in schema.get("properties", {}).items():
            field_schema.setdefault("description", given(name, field_name))
    return schemas | {"Message": MESSAGE} | shown


def _of_models(models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    named = sorted(models, key=lambda model: model.__name__)
    _, made = models_json_schema([(model, "validation") for model in named], ref_template=_REF)
    return dict(made["$defs"])
