"""Reads every dialect in which a request asks for structured output, as one constraint.

Owns:      the fields and the forms of them: OpenAI's response_format, SGLang's regex, ebnf and json_schema, vLLM's
           structured_outputs and guided_*, TGI's and llama.cpp's grammar.
Never:     weakens a strict schema: a keyword that cannot be enforced is a 400, with its place.
Invariant: an error names the field that the client used.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.requests import Request

from deployments.http.access import caller_of
from deployments.http.bodies import FORM_TYPES, NO_FORM, WireType
from deployments.http.convert import FORM_FIELDS
from deployments.http.service import LONG_TEXT, service_of
from deployments.http.streaming import until_gone
from deployments.output.closing import closed_text
from deployments.output.output_format import Thought
from deployments.output.structural_tags import tags_of
from deployments.output.tool_grammar import arguments_schema, is_constrained, problems_of, tool_constraint
from deployments.output.tools import ToolUse
from deployments.output.validation import FormAsked, SchemaPromise
from replicas.errors import InvalidRequest
from replicas.grammar.checking import Problem, check_text
from replicas.types import Constraint

_MAX_SHOWN = 5  # keywords in an error
_ANY_OBJECT = '{"type":"object"}'
_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "gbnf", "structural_tag": "tags"}
# fields that hold the thing itself, and what it is
_PLAIN = {
    "regex": "regex", "ebnf": "gbnf", "json_schema": "json_schema", "structural_tag": "tags",
    "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "gbnf",
}  # fmt: skip


class _Wish(NamedTuple):
    """What one field asks for."""

    path: str  # of the field, as the client wrote it
    kind: str
    value: Any
    strict: bool = False


async def held_to(request: Request, fields: WireType, use: ToolUse | None, thought: Thought) -> FormAsked:
    """Make what an answer is held to: the form that ``fields`` ask for, calls of tools, or either of them; behind what
    the model thinks.

    Raises: as `form_asked` and `_tools_asked`.
    """
    form = await form_asked(request, fields)
    constraint, promise = form.constraint, form.promise
    if use is not None and (constraint is not None or is_constrained(use)):
        constraint = await until_gone(request.receive, _tools_asked(request, use, constraint))
    if use is not None and use.must_call:
        promise = None
    if thought.after:
        constraint = None if constraint is None else replace(constraint, after=thought.after, opens=thought.opens)
        promise = None if promise is None else replace(promise, after=thought.after)
    return FormAsked(constraint=constraint, promise=promise)


async def form_asked(request: Request, fields: WireType) -> FormAsked:
    """Read what ``fields`` of ``request`` ask of the output's form.

    Raises: InvalidRequest, naming the field; Overloaded; TooManyForms; ClientGone.
    """
    wishes = list(_wishes(fields))
    if not wishes:
        return FormAsked()
    if len(wishes) > 1:
        one, other = wishes[0].path, wishes[1].path
        raise InvalidRequest(f"{other}: only one form may be given, and {one} is too", param=other.partition(".")[0])
    [wish] = wishes
    try:
        return await until_gone(request.receive, _examined(request, wish))
    except InvalidRequest as error:
        raise InvalidRequest(f"{wish.path}: {error}", param=wish.path.partition(".")[0]) from error


async def _examined(request: Request, wish: _Wish) -> FormAsked:
    service, kind, text = service_of(request), wish.kind, _text(wish)
    if kind == "tags":
        special = {service.tokenizer.token_text(each): each for each in service.tokenizer.special_ids}
        kind, text = "lark", tags_of(wish.value, special_ids=special)
    if kind in ("json_schema", "lark"):
        check_text(text, service.max_schema_bytes)
    closed, size = text, len(text)
    if kind == "json_schema" and size <= LONG_TEXT:
        closed = closed_text(text)
    elif kind == "json_schema":
        closed = await service.parsing.run(lambda: closed_text(text), size=size)
    found = await service.examined.of(kind, closed, caller_of(request).name)
    if wish.strict and found.problems:
        raise _unheld(found.problems, "then the finished document is validated")
    promise = SchemaPromise(schema=text, problems=found.problems) if kind == "json_schema" else None
    return FormAsked(constraint=found.constraint, promise=promise)


def _unheld(problems: Sequence[Problem], otherwise: str) -> InvalidRequest:
    shown = ", ".join(f"{keyword!r} at {pointer}" for keyword, pointer in problems[:_MAX_SHOWN])
    more = f", and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
    return InvalidRequest(
        f"strict is true, and these keywords cannot be enforced: {shown}{more}. Leave them out, or leave strict "
        f"out: {otherwise}"
    )


async def _tools_asked(request: Request, use: ToolUse, content: Constraint | None) -> Constraint:
    """Make the constraint that holds an output to calls of tools. ``content``: what an answer without a call must be.

    Raises: InvalidRequest, naming the tool, also for a strict one of which a keyword cannot be enforced; Overloaded;
            TooManyForms.
    """
    service = service_of(request)
    output, token_id = service.prompting.output, service.tokenizer.id_of
    schemas: dict[str, Any] = {}
    for i, tool in enumerate(use.tools):
        if use.named not in (None, tool.name):
            continue
        path = f"tools[{i}].function.parameters"
        wish = _Wish(path, "json_schema", arguments_schema(tool), strict=tool.strict)
        try:
            held = (await _examined(request, wish)).constraint
            assert held is not None
            schema = json.loads(held.text)
            problems = problems_of(output.tools, schema) if output.tools else []
            if tool.strict and problems:
                raise _unheld(problems, "then they are not held where this model writes parameters in tags")
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}: {error}", param=path) from error
        schemas[tool.name] = schema
    made = tool_constraint(output, use, schemas=schemas, token_id=token_id, content=content)
    try:
        check_text(made.text, service.max_schema_bytes)
        await service.examined.of(made.kind, made.text, caller_of(request).name)
    except InvalidRequest as error:
        raise InvalidRequest(f"tools: the grammar of their calls {error}", param="tools") from error
    return made


def _wishes(fields: WireType) -> Iterator[_Wish]:
    given = vars(fields) | (fields.model_extra or {})
    for name in FORM_FIELDS:
        value: Any = given.get(name)
        if value in NO_FORM or (name == "grammar" and value == ""):  # which clients of llama.cpp send always
            continue
        if name == "response_format":
            yield from _of_response_format(value)
        elif name == "structured_outputs":
            yield from _of_structured_outputs(value)
        elif name == "grammar" and isinstance(value, dict):  # TGI's
            yield from _of_typed(name, value)
        else:
            yield _Wish(name, _PLAIN.get(name, "gbnf"), value)


def _of_response_format(asked: Mapping[str, Any]) -> Iterator[_Wish]:
    name = "response_format"
    if asked.get("type") in (None, "text"):
        return
    if asked.get("type") not in FORM_TYPES:
        given = str(asked.get("type"))[:64]
        raise InvalidRequest(
            f"{name}: type {given!r} is not supported by this server; supported: text, {', '.join(FORM_TYPES)}",
            param=name,
        )
    yield from _of_typed(name, asked)


def _of_typed(name: str, asked: Mapping[str, Any]) -> Iterator[_Wish]:
    """Read {"type": ..., and the thing itself}, under any of the names that clients give it."""
    match asked.get("type"):
        case "json_object":
            yield _Wish(name, "json_schema", asked.get("schema") or _ANY_OBJECT)
        case "json_schema" | "json":
            inner = asked.get("json_schema", asked)
            if not isinstance(inner, dict):
                raise InvalidRequest(f"{name}.json_schema: must be an object", param=name)
            path, key = (f"{name}.json_schema" if inner is not asked else name), "schema"
            if "value" in inner and "schema" not in inner:
                key = "value"
            yield _Wish(f"{path}.{key}", "json_schema", inner.get(key), strict=inner.get("strict") is True)
        case "structural_tag":
            yield _Wish(name, "tags", dict(asked))
        case kind:
            keys = [key for key in ("pattern", "value", "regex", "grammar") if key in asked]
            key = keys[0] if keys else "value"
            yield _Wish(f"{name}.{key}", "regex" if kind == "regex" else "gbnf", asked.get(key))


def _of_structured_outputs(asked: Any) -> Iterator[_Wish]:
    name = "structured_outputs"
    if not isinstance(asked, dict):
        raise InvalidRequest(f"{name}: must be an object", param=name)
    for key, kind in _KINDS.items():
        if asked.get(key) not in NO_FORM:
            yield _Wish(f"{name}.{key}", kind, asked[key])
    if asked.get("json_object"):
        yield _Wish(f"{name}.json_object", "json_schema", _ANY_OBJECT)


def _text(wish: _Wish) -> str:
    """The text of what is asked for. Raises: InvalidRequest for a value of another type."""
    value = wish.value
    if wish.kind == "tags":
        return ""
    if value == "" or value == []:
        raise InvalidRequest("is empty, and would allow no output; leave it out to ask for no form")
    if wish.kind == "choice":
        if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise InvalidRequest("must be a list of strings")
        return json.dumps(value)
    if wish.kind == "json_schema" and isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        wanted = "a JSON schema" if wish.kind == "json_schema" else "a string"
        raise InvalidRequest(f"must be {wanted}, got {type(value).__name__}")
    return value
