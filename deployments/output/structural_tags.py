"""Structural tags: free text, in which what stands between certain tags is held to a schema.

Owns:      SGLang's {"structures", "triggers"}, and of xgrammar's {"format"} the types triggered_tags and tag.
Thread:    any; pure functions.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from replicas.errors import InvalidRequest
from replicas.grammar.checking import ANY_TEXT, lark_document, lark_text, read_schema


class Tag(NamedTuple):
    """What may stand between ``begin`` and ``end``."""

    begin: str
    schema: dict[str, Any]
    end: str


def tags_of(asked: Any, *, special_ids: Mapping[str, int]) -> str:
    """Return the grammar of a structural tag, in llguidance's dialect of Lark.

    Args:   special_ids: the ids of the model's special tokens, by their texts: no text stands for them.
    Raises: InvalidRequest for a form that is not known.
    """
    if isinstance(asked, str):
        try:
            asked = json.loads(asked)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"is not valid JSON: {error}") from error
    form: Any = asked.get("format", asked) if isinstance(asked, dict) else None
    match form:
        case {"structures": list(structures), "triggers": list(triggers)}:
            return _triggered([_tag(each, "schema") for each in structures], triggers, {}, special_ids)
        case {"type": "triggered_tags", "tags": list(tags), "triggers": list(triggers)}:
            return _triggered([_tag(each, "content") for each in tags], triggers, dict(form), special_ids)
        case {"type": "tag"}:
            return "\n".join(["%llguidance {}", f"start: {_rule(_tag(form, 'content'), special_ids)}"])
    kind = form.get("type") if isinstance(form, dict) else None
    raise InvalidRequest(
        f"a structural tag of the type {str(kind)[:64]!r} is not supported; supported: structures with triggers, "
        "triggered_tags, tag"
    )


def _tag(given: Any, key: str) -> Tag:
    content = given.get(key) if isinstance(given, dict) else None
    if key == "content":
        content = content.get("json_schema") if isinstance(content, dict) else None
    if isinstance(content, str):
        content = read_schema(content)
    match given:
        case {"begin": str(begin), "end": str(end)} if begin and isinstance(content, dict):
            return Tag(begin, content, end)
    raise InvalidRequest("each tag needs a begin, a JSON schema and an end")


def _triggered(
    tags: Sequence[Tag], triggers: Sequence[Any], options: Mapping[str, Any], special_ids: Mapping[str, int]
) -> str:
    rules = ["%llguidance {}", f"FREE: {ANY_TEXT}"]
    segments = []
    for number, trigger in enumerate(triggers):
        held = [tag for tag in tags if isinstance(trigger, str) and trigger and tag.begin.startswith(trigger)]
        if not held:
            raise InvalidRequest(f"no tag begins with the trigger {str(trigger)[:64]!r}")
        rests = [_rule(tag._replace(begin=tag.begin[len(trigger) :]), special_ids) for tag in held]
        lazy = "" if trigger in special_ids else "[lazy]"
        rules.append(f"head_{number}{lazy}: FREE {lark_text(trigger, special_ids)}")
        rules.append(f"segment_{number}: head_{number} ({' | '.join(rests)})")
        segments.append(f"segment_{number}")
    untriggered = [tag.begin for tag in tags if not any(tag.begin.startswith(str(each)) for each in triggers)]
    if untriggered or not segments:
        raise InvalidRequest(f"no trigger begins the tag {''.join(untriggered[:1])[:64]!r}")
    segment = f"({' | '.join(segments)})"
    if options.get("stop_after_first"):
        start = segment if options.get("at_least_one") else f"{segment} | FREE"
    else:
        start = f"{segment}{'+' if options.get('at_least_one') else '*'} FREE"
    return "\n".join([*rules, f"start: {start}"])


def _rule(tag: Tag, special_ids: Mapping[str, int]) -> str:
    begin, end = lark_text(tag.begin, special_ids), lark_text(tag.end, special_ids)
    return f"{begin} {lark_document(tag.schema)} {end}".strip()
