"""Writes the tables of docs/api.md (routes, errors) and of docs/api_fields.md, all from the document at
/openapi.json; and those of docs/routing.md, from the terms of a decision.

    python -m tools.api_doc

Owns:   what stands between `<!-- NAME -->` and `<!-- end NAME -->` there. The text around it is written by hand.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from deployments.http import bodies
from deployments.http.access import OPEN, admin_only
from deployments.http.api_document import LIMIT, describe
from deployments.http.apis.ollama import OllamaFields
from deployments.http.apis.pooling import PoolingRequest
from deployments.http.http_app import ROUTERS
from deployments.tenancy.keys import NO_KEYS
from routing.terms import CANDIDATE, DECODE_REPLICA, markdown

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
FIELDS = PAGE.with_name("api_fields.md")
ROUTING = PAGE.with_name("routing.md")
WORDS = {"string": "text"}  # for types of JSON
LIMITS = {"context": "0 to the context", "64 bits": "-2^63 to 2^63 - 1"}
# headings of what is no body of a route
SHARED: Mapping[type[bodies.WireType], str] = {
    bodies.RequestFields: "Fields of all requests that run prompts",
    bodies.Sampling: "Sampling fields",
    bodies.SamplingFields: "Fields of completions, chats and responses",
    bodies.GeneratingFields: "Fields of completions and chats",
    bodies.TemplateFields: "Fields of a chat's prompt",
    bodies.NativeSampling: "Sampling fields of /generate",
    OllamaFields: "Fields of /api/chat and /api/generate",
    PoolingRequest: "Fields of embeddings, scores and rerankings",
}
Schema = Mapping[str, Any]


def document() -> dict[str, Any]:
    """Return the document of a server without keys, with the names of the model's limits."""
    app = FastAPI()
    app.state.keys = NO_KEYS
    for router in ROUTERS:
        app.include_router(router)
    describe(app, None)
    return app.openapi()


def tables() -> dict[str, str]:
    """Return each part of the two pages by its name."""
    made = document()
    schemas = made["components"]["schemas"]
    return {
        "routes": _routes(made["paths"]),
        "fields": _fields(schemas),
        "errors": _errors(made["paths"]),
    }


def written(page: str, parts: Mapping[str, str], *names: str) -> str:
    """Return ``page`` with the parts called ``names``, or all of them, each between its marks."""
    for name, text in parts.items():
        if name not in (names or parts):
            continue
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


def _endpoints() -> list[list[APIRoute]]:
    """List the routes of each endpoint, the one with its usual path first."""
    found: dict[Any, list[APIRoute]] = {}
    for route in [each for router in ROUTERS for each in router.routes if isinstance(each, APIRoute)]:
        found.setdefault(route.endpoint, []).insert(0, route)
    return list(found.values())


def _methods(route: APIRoute) -> list[str]:
    """List its methods as the document names them, without HEAD."""
    return [method for method in ("get", "post", "delete") if method.upper() in (route.methods or ())]


def _body(route: APIRoute) -> Any:
    """Return the type of the route's body; None if it takes none."""
    return route.body_field and route.body_field.field_info.annotation


def _routes(paths: Schema) -> str:
    usual = set(paths["/tokenize"]["post"]["responses"])
    rows = []
    for routes in _endpoints():
        route, methods = routes[0], _methods(routes[0])
        operation, body = paths[route.path_format][methods[-1]], _body(route)
        fields = f" ({_link(_heading(body), 'fields').replace('(#', f'({FIELDS.name}#')})" if body else ""
        errors = sorted(set(operation["responses"]) - (usual if body else {"200", "401", "403", "500"}))
        guards = [each.call for each in route.dependant.dependencies]
        key = "none" if route.path in OPEN else "admin" if admin_only in guards else "API"
        names = ", ".join(f"`{each.path_format}`" for each in routes)
        rows.append((", ".join(methods).upper(), names, operation["summary"] + fields, key, ", ".join(errors)))
    return _table(("", "route", "what it does", "key", "errors"), rows)


def _heading(body: type[bodies.WireType]) -> str:
    return SHARED.get(body) or f"Body of {next(each[0].path for each in _endpoints() if _body(each[0]) is body)}"


def _fields(schemas: Mapping[str, Schema]) -> str:
    """A section for each body, and one for each set of fields that several share."""
    whole = [*dict.fromkeys(body for each in _endpoints() if (body := _body(each[0]))), bodies.NativeSampling]
    wire = bodies.WireType
    kinds = {k: body for body in whole for k in reversed(body.__mro__) if issubclass(k, wire) and k is not wire}
    texts = []
    for kind, body in kinds.items():
        rows, refused = list[tuple[str, str, str]](), list[str]()
        schema = schemas[body.__name__]
        for name in kind.__annotations__:
            field, needed = schema["properties"][name], " (required)" * (name in schema.get("required", ()))
            if field["description"] == bodies.REFUSED:
                refused.append(f"`{name}`")
            else:
                rows += _parts(f"{name}`{needed}", field, schemas)
        bases = [_link(_heading(base)) for base in kind.__bases__ if base in kinds]
        beside = f"Beside the {' and the '.join(bases)}:\n\n" if bases else ""
        after = f"\nRefused if they ask for anything: {', '.join(refused)}.\n" if refused else ""
        texts.append(f"### {_heading(kind)}\n\n{beside}{_table(('field', 'values', 'meaning'), rows)}{after}")
    return "\n".join(texts)


def _parts(name: str, field: Schema, schemas: Mapping[str, Schema]) -> Iterator[tuple[str, str, str]]:
    """Yield a field's row, and those of the fields of its object."""
    yield f"`{name}", _type(field), _meaning(field)
    for ref in [each["$ref"].rpartition("/")[2] for each in field.get("anyOf", [field]) if "$ref" in each]:
        if ref != bodies.NativeSampling.__name__:
            for inner, schema in schemas[ref]["properties"].items():
                yield f"`{name.partition('`')[0]}.{inner}`", _type(schema), _meaning(schema)


def _meaning(field: Schema) -> str:
    """Return its description, whose links lead to the text of docs/api.md."""
    return str(field["description"]).replace("](#", f"]({PAGE.name}#")


def _type(schema: Schema, *, many: bool = False) -> str:
    """Return the values of a field in words; ``many``: of a list's elements."""
    ending = "s" if many else ""
    if "anyOf" in schema and "type" not in schema:
        said = dict.fromkeys(_type(each, many=many) for each in schema["anyOf"] if each.get("type") != "null")
        return " or ".join(each for each in said if each)
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        if False in values and None in values:
            return ""  # only what asks for nothing
        shown = [str(each).lower() if isinstance(each, bool) else each for each in values if each not in (None, "")]
        return ", ".join(f"`{each}`" for each in shown)
    if schema.get(LIMIT) == "token" or schema.get("maximum") == 2**31 - 1:
        return f"token id{ending}"
    kind = schema.get("type", "")
    if kind == "array":
        most = f" (at most {schema['maxItems']})" if schema.get("maxItems", 1) > 1 else ""
        return f"list{ending} of {_type(schema.get('items', {}), many=True) or 'values'}{most}"
    if "$ref" in schema or "properties" in schema:
        kind = "object"
    return f"{WORDS.get(kind, kind)}{ending * bool(kind)}{_range(schema)}"


def _range(schema: Schema) -> str:
    low, over, high = schema.get("minimum"), schema.get("exclusiveMinimum"), schema.get("maximum")
    if schema.get(LIMIT) in LIMITS:
        limits = LIMITS[schema[LIMIT]]
        return f", {limits if low in (None, 0) else f'{low:g}{limits[1:]}'}"
    if low is not None and high is not None:
        return f", {low:g} to {high:g}"
    parts = [f"at least {low:g}"] if low is not None else [f"above {over:g}"] if over is not None else []
    parts += [f"at most {high:g}"] if high is not None else []
    return "".join(f", {each}" for each in parts)


def _errors(paths: Schema) -> str:
    found = {
        status: answer["description"]
        for operations in paths.values()
        for operation in operations.values()
        for status, answer in operation["responses"].items()
        if status != "200"
    }
    return _table(("status", "what happened"), sorted(found.items()))


if __name__ == "__main__":
    parts = tables()
    PAGE.write_text(written(PAGE.read_text(), parts, "routes", "errors"))
    FIELDS.write_text(written(FIELDS.read_text(), parts, "fields"))
    of_terms = {"terms": markdown(CANDIDATE), "terms of pairs": markdown(DECODE_REPLICA)}
    ROUTING.write_text(written(ROUTING.read_text(), of_terms))
