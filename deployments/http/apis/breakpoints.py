"""Where the blocks of a message's request say `cache_control`: the parts of its prompt that are to be kept.

Invariant: of several breakpoints with one time to live the last counts: what is before it is kept with it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from replicas.errors import InvalidRequest

TTLS_S = {"5m": 300.0, "1h": 3600.0}
NO_WORDS = {"role": "user", "content": ""}
AN_ANSWER = {"role": "assistant", "content": "Yes."}
_WANTED = '{"type": "ephemeral"}, with a ttl of 5m (the default) or 1h'


class Cut(NamedTuple):
    """The part of a prompt that ends at a breakpoint."""

    fields: Mapping[str, Any]  # that differ in its body; none: it is the whole prompt
    adds_turn: bool = False  # it ends in a turn of no words, since templates want one


def breakpoints(*, tools: list[Any] | None, system: Any, messages: list[Any], cache_control: Any) -> dict[float, Cut]:
    """Find the last breakpoint of each time to live. Args: as the fields of a body.

    Returns: by seconds, the part of the prompt that ends there.
    Raises:  InvalidRequest for a `cache_control` of another form.
    """
    found: dict[float, Cut] = {}
    for where, block, cut in _blocks(tools or [], system, messages):
        given = block.get("cache_control") if isinstance(block, Mapping) else None
        if given is not None:
            found[_ttl_s(f"{where}.cache_control", given)] = cut
    if cache_control is not None:  # at the end, wherever that is
        found[_ttl_s("cache_control", cache_control)] = Cut({})
    return found


def _blocks(tools: list[Any], system: Any, messages: list[Any]) -> Iterator[tuple[str, Any, Cut]]:
    """Yield all blocks: their place, they, and the part of the prompt that ends with them. Templates write tools before
    the system message or behind it: both stay."""
    for number, tool in enumerate(tools):
        fields = {"tools": tools[: number + 1], "tool_choice": None, "messages": [NO_WORDS]}
        yield f"tools.{number}", tool, Cut(fields, adds_turn=True)
    for number, block in enumerate(system if isinstance(system, list) else []):
        yield f"system.{number}", block, Cut({"system": system[: number + 1], "messages": [NO_WORDS]}, adds_turn=True)
    for turn, message in enumerate(messages):
        content = message.get("content")
        for number, block in enumerate(content if isinstance(content, list) else []):
            where, before = f"messages.{turn}.content.{number}", content[:number]
            parts = block.get("content") if isinstance(block, Mapping) else None  # of a tool's result
            parts = parts if isinstance(parts, list) else []
            for at, each in enumerate(parts):
                last = {**message, "content": [*before, {**block, "content": parts[: at + 1]}]}
                yield f"{where}.content.{at}", each, Cut({"messages": [*messages[:turn], last]})
            yield where, block, Cut({"messages": [*messages[:turn], {**message, "content": [*before, block]}]})


def _ttl_s(where: str, given: Any) -> float:
    ttl = given.get("ttl") if isinstance(given, Mapping) and given.get("type") == "ephemeral" else ""
    if ttl is None:
        ttl = "5m"
    if not isinstance(ttl, str) or ttl not in TTLS_S:
        raise InvalidRequest(f"{where}: must be {_WANTED}, got {str(given)[:64]}", param=where.partition(".")[0])
    return TTLS_S[ttl]
