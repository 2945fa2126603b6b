"""Writes the tables of docs/api.md: routes, fields, answers and errors, all from the document at /openapi.json.

    python -m tools.api_doc

Owns:   what stands between `<!-- NAME -->` and `<!-- end NAME -->` there. The text around it is written by hand.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel

from deployments.http.access import OPEN, admin_only
from deployments.http.answer_bodies import ErrorBody, MessagesErrorBody
from deployments.http.api_document import ROUTES, describe
from deployments.http.apis.meanings import REFUSED
from deployments.http.apis.readouts import ReadoutRequest
from deployments.http.bodies import ChatRequest, NativeSampling, SamplingFields, WireType
from deployments.http.http_app import ROUTERS
from deployments.settings.keys import NO_KEYS

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
CONTEXT, VOCABULARY = 1_000_003, 1_000_033  # stand for those of the served model
TOKEN = (VOCABULARY - 1, 2**31 - 1)  # the largest id, of a known and of any vocabulary
WORDS = {CONTEXT: "the context", 2**63 - 1: "2^63 - 1", -(2**63): "-2^63"}
TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean", "object": "object",
         "null": "null"}  # fmt: skip
# sets of fields that are no body of their own: heading, and a body that has them
SHARED: Mapping[type[BaseModel], tuple[str, type[BaseModel] | None]] = {
    SamplingFields: ("Sampling fields", ChatRequest),
    ReadoutRequest: ("Fields of embeddings, scores and rerankings", None),
    NativeSampling: ("Sampling fields of /generate", NativeSampling),
}
Schema = Mapping[str, Any]


def document() -> dict[str, Any]:
    """Return the document of a server without keys, whose model is made up."""
    app = FastAPI()
    app.state.keys = NO_KEYS
    face = SimpleNamespace(name="MODEL", context_len=CONTEXT, vocab_size=VOCABULARY)
    describe(app, ROUTERS, SimpleNamespace(model=face, version=""))  # type: ignore[arg-type]
    return app.openapi()


def tables() -> dict[str, str]:
    """Return each part of the page by its name."""
    made = document()
    return {
        "routes": _routes(made),
        "fields": _fields(made["components"]["schemas"]),
        "answers": _answers(made["components"]["schemas"]),
        "errors": _errors(made["components"]["responses"]),
    }


def written(page: str, parts: Mapping[str, str]) -> str:
    """Return ``page`` with each part between its marks."""
    for name, text in parts.items():
        before, first, rest = page.partition(f"<!-- {name} -->\n")
        _, last, after = rest.partition(f"<!-- end {name} -->")
        assert first, f"the page has no mark for {name}"
        assert last, f"the page has no mark for the end of {name}"
        page = before + first + text + last + after
    return page


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *(list(row) for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _link(heading: str, shown: str = "") -> str:
    """Return a link to ``heading``, by the name that GitHub gives it."""
    place = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
    return f"[{shown or heading[0].lower() + heading[1:]}](#{place})"


def _routes(made: Schema) -> str:
    """A row for each route; two paths of one route stand together."""
    names: dict[Any, list[APIRoute]] = {}
    for route in [each for router in ROUTERS for each in router.routes if isinstance(each, APIRoute)]:
        names.setdefault(route.endpoint, []).append(route)
    usual = set(made["paths"]["/tokenize"]["post"]["responses"])
    rows = []
    for routes in names.values():
        operations = made["paths"][routes[-1].path_format]
        methods = [method for method in ("get", "post") if method in operations]
        operation = operations[methods[-1]]
        paths = ", ".join(f"`{route.path_format}`" for route in reversed(routes))
        body = ROUTES[routes[-1].path_format].body
        said = operation["summary"] + (f" ({_link(_heading(body), 'fields')})" if body else "")
        errors = sorted(set(operation["responses"]) - (usual if body else {"200", "401", "403", "500"}))
        named = ", ".join(method.upper() for method in methods)
        rows.append((named, paths, said, _key(routes[0]), ", ".join(errors)))
    return _table(("", "route", "what it does", "key", "errors"), rows)


def _key(route: APIRoute) -> str:
    guards = [each.call for each in route.dependant.dependencies]
    return "none" if route.path in OPEN else "admin" if admin_only in guards else "API"


def _heading(body: type[BaseModel]) -> str:
    if body in SHARED:
        return SHARED[body][0]
    return f"Body of {next(path for path, each in ROUTES.items() if each.body is body)}"


def _fields(schemas: Mapping[str, Schema]) -> str:
    """A section for each body, and one for each set of fields that several share."""
    bodies = [*dict.fromkeys(each.body for each in ROUTES.values() if each.body is not None), NativeSampling]
    said = dict.fromkeys(each for body in bodies for each in reversed(_family(body)))
    texts = []
    for body in said:
        base = next(iter(_family(body)[1:]), None)
        schema = schemas[_holder(body, bodies).__name__]
        told = {} if base is None else schemas[_holder(base, bodies).__name__]["properties"]
        rows, refused = list[tuple[str, str, str]](), list[str]()
        for name in body.model_fields:
            field, needed = schema["properties"][name], name in schema.get("required", ())
            if field["description"] == REFUSED:
                refused.append(f"`{name}`")
            elif base is None or name not in base.model_fields or told[name]["description"] != field["description"]:
                rows += _parts(name + "`" + (" (required)" if needed else ""), field, schemas)
        beside = f"Beside the {_link(_heading(base))}:\n\n" if base else ""
        after = f"\nRefused if they ask for anything: {', '.join(refused)}.\n" if refused else ""
        texts.append(f"### {_heading(body)}\n\n{beside}{_table(('field', 'values', 'meaning'), rows)}{after}")
    return "\n".join(texts)


def _holder(body: type[BaseModel], bodies: Iterable[type[BaseModel]]) -> type[BaseModel]:
    """Return a body whose schema has the fields of ``body``."""
    shown = SHARED.get(body, ("", body))[1]
    return shown or next(each for each in bodies if body in _family(each))


def _family(body: type[BaseModel]) -> list[type[BaseModel]]:
    return [each for each in body.__mro__ if issubclass(each, WireType) and each is not WireType]


def _parts(name: str, field: Schema, schemas: Mapping[str, Schema]) -> Iterator[tuple[str, str, str]]:
    """Yield a field's row, and those of the fields of its object."""
    yield f"`{name}", _type(field), field["description"]
    refs = [each["$ref"].rpartition("/")[2] for each in field.get("anyOf", [field]) if "$ref" in each]
    for ref in refs:
        if ref != NativeSampling.__name__:
            for inner, schema in schemas[ref]["properties"].items():
                yield f"`{name.partition('`')[0]}.{inner}`", _type(schema), schema["description"]


def _type(schema: Schema, *, many: bool = False) -> str:
    """Return the values of a field in words; ``many``: of a list's elements."""
    ending = "s" if many else ""
    if "anyOf" in schema:
        said = dict.fromkeys(_type(each, many=many) for each in schema["anyOf"] if each.get("type") != "null")
        return " or ".join(each for each in said if each)
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        if False in values and None in values:
            return ""  # only what asks for nothing
        shown = [str(each).lower() if isinstance(each, bool) else each for each in values if each not in (None, "")]
        return ", ".join(f"`{each}`" for each in shown)
    if schema.get("maximum") in TOKEN:
        return f"token id{ending}"
    if schema.get("type") == "array":
        most = f" (at most {schema['maxItems']})" if schema.get("maxItems", 1) > 1 else ""
        return f"list{ending} of {_type(schema.get('items', {}), many=True) or 'values'}{most}"
    if "$ref" in schema or schema.get("type") == "object":
        return f"object{ending}"
    kind = TYPES.get(schema.get("type", ""), "")
    return kind + ending * bool(kind) + _range(schema)


def _range(schema: Schema) -> str:
    low, over, high = schema.get("minimum"), schema.get("exclusiveMinimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f", {_word(low)} to {_word(high)}"
    parts = [f"at least {_word(low)}"] if low is not None else [f"above {_word(over)}"] if over is not None else []
    parts += [f"at most {_word(high)}"] if high is not None else []
    return "".join(f", {each}" for each in parts)


def _word(value: float) -> str:
    return WORDS.get(int(value), f"{value:g}") if value == int(value) else f"{value:g}"


def _answers(schemas: Mapping[str, Schema]) -> str:
    """A section for each answer, event and error."""
    named: dict[type[BaseModel], str] = {}
    for path, each in ROUTES.items():
        for model, what in ((each.answer, "Answer"), (each.event, "Event"), (each.error, "Error")):
            if model is not None:
                named.setdefault(model, f"{what} of {path}")
    named[ErrorBody], named[MessagesErrorBody] = "Fields of an error", "Fields of an error in Anthropic's form"
    texts = []
    for model, heading in named.items():
        rows = list(_leaves(schemas[model.__name__], schemas, ""))
        about = (model.__doc__ or "").partition("\n")[0]
        texts.append(f"### {heading}\n\n{about}\n\n{_table(('field', 'values', 'meaning'), rows)}")
    return "\n".join(texts)


def _leaves(schema: Schema, schemas: Mapping[str, Schema], path: str) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each field, those of objects inside included."""
    for name, field in schema.get("properties", {}).items():
        inner, brackets = field, ""
        while True:
            some = [each for each in inner.get("anyOf", [inner]) if each.get("type") != "null"]
            inner = some[0]
            if inner.get("type") != "array" or len(some) > 1:
                break
            inner, brackets = inner.get("items", {}), brackets + "[]"
        where = f"{path}{name}{brackets}"
        if "$ref" in inner and len(some) == 1:
            yield from _leaves(schemas[inner["$ref"].rpartition("/")[2]], schemas, f"{where}.")
        else:
            null = " or null" if {"type": "null"} in field.get("anyOf", ()) else ""
            yield f"`{where}`", (_type(field if not brackets else inner) or "any") + null, field["description"]


def _errors(responses: Mapping[str, Schema]) -> str:
    return _table(("status", "what happened"), ((status, each["description"]) for status, each in responses.items()))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), tables()))
