"""What the fields of requests may be, for /openapi.json: what their types leave open and the routes check.

Owns:   nothing; `SamplingParams.validate` and convert.py judge, and this repeats it in JSON schema.
Never:  says what no schema can: fields that exclude each other. The answer to that is a 400, which each route lists.
"""

from collections.abc import Mapping
from typing import Any

from deployments.http.body import MAX_PROMPTS
from deployments.http.service import Service
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
    },
}
_ANYTHING = ""  # in place of a type, where the field's may be any
_NOT_DONE: Limit = {
    "enum": [None, False, 0, "", [], {}],
    "description": "Not supported: refused if it asks for anything.",
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
        "messages": {"array": {"minItems": 1, "items": {"object": {"$ref": "#/components/schemas/Message"}}}},
        "prompt": texts,
        "input_ids": texts,
        "TokenizeRequest.prompt": {"array": {"minItems": 1, "maxItems": MAX_PROMPTS}},  # no text has no token
        "AbortRequest.rid": {},  # of no request, if it is none's
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
        "bad_words": {"array": {"maxItems": 512, "items": {"string": {"pattern": r"\S"}}}},
        "truncate_prompt_tokens": keep,
        "truncate": keep,
        "top_logprobs_num": _UP_TO_20,
        "tool_choice": {"string": {"enum": ["none", "auto"]}},
        "function_call": {_ANYTHING: {"enum": [None, "none", "auto"]}},
        "priority": {"integer": {"minimum": -1000, "maximum": 1000}},
        "timeout": {"number": {"exclusiveMinimum": 0}},
        "rid": {"string": _NAME, "array": {"items": {"string": _NAME}}},
        "modalities": {"array": {"items": {"string": {"const": "text"}}, "minItems": 1, "maxItems": 1}},
        "suffix": {"string": {"maxLength": 0}},
        "response_format": {"object": {"properties": {"type": {"enum": [None, "text"]}}}},
    }


def limit(body: str, properties: Mapping[str, Any], limits: Mapping[str, Limits]) -> None:
    """Put ``limits`` into the schemas of ``properties``. What is typed as anything and has none is only refused."""
    for name, schema in properties.items():
        _limit(schema, limits.get(f"{body}.{name}", limits.get(name, {_ANYTHING: _NOT_DONE})))


def _limit(schema: dict[str, Any], limits: Limits) -> None:
    for allowed in schema.get("anyOf", [schema]):
        for name, value in limits.get(allowed.get("type", allowed.get("$ref", _ANYTHING)), {}).items():
            if name == "items":
                _limit(allowed["items"], value)
            else:
                allowed[name] = value
