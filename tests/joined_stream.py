"""A stream of OpenAI's chunks as one answer, so that two streams can be compared: where an event ends is a matter of
time, and so is which of several choices goes first."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

# the parts of an answer that later events add to; any other field of a choice is said once
GROWS = {"content", "text", "arguments", "reasoning_content", "refusal"}

TEXTS = ("text", "thinking", "partial_json")  # in the delta of a message's event


def joined(lines: Iterable[str]) -> dict[Any, Any]:
    """Join the events of a whole stream. Returns: its choices by index, each as if told in one event, and its usage.

    Raises: AssertionError for an error, a field that is said twice, or a stream that does not end with [DONE].
    """
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1:] == ["[DONE]"], events[-3:]
    whole: dict[Any, Any] = {}
    for event in events[:-1]:
        payload = json.loads(event)
        assert "error" not in payload, payload
        for choice in payload.pop("choices"):
            index = choice.pop("index")
            _add(whole.setdefault(index, {}), choice)
        if payload.get("usage"):
            assert "usage" not in whole
            whole["usage"] = payload["usage"]
    return whole


def named_events(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the events of a whole stream of OpenAI's Responses or Anthropic's Messages, without times and the ids of
    blocks; those that only go on with one text are joined."""
    events: list[dict[str, Any]] = []
    for line in lines:
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        assert event["type"] != "error", event
        event.pop("sequence_number", None)
        event.get("content_block", {}).pop("id", None)
        event.get("message", {}).get("usage", {}).pop("output_tokens", None)  # when the message began: a matter of time
        for name in ("created_at", "completed_at"):
            event.get("response", {}).pop(name, None)
        text, rest = _delta(event)
        if text is None or not events or _delta(events[-1])[1] != rest:
            events.append(event)
            continue
        before = events[-1]
        if isinstance(event["delta"], str):
            before["delta"] += text
        else:
            [name] = [name for name in TEXTS if name in event["delta"]]
            before["delta"][name] += text
    return events


def _delta(event: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the text that ``event`` adds, if that is all it does, and the event without it."""
    delta = event.get("delta")
    if isinstance(delta, str):
        return delta, {**event, "delta": ""}
    for name in TEXTS if isinstance(delta, dict) else ():
        if isinstance(delta.get(name), str):
            return delta[name], {**event, "delta": {**delta, name: ""}}
    return None, event


def _add(whole: dict[str, Any], new: dict[str, Any]) -> None:
    """Add the fields of ``new`` to those said so far."""
    for name, value in new.items():
        said = whole.get(name)
        if name == "tool_calls" and value is not None:
            calls = whole.setdefault(name, {})
            for call in value:
                _add(calls.setdefault(call.pop("index"), {}), call)
        elif isinstance(value, dict):
            whole[name] = said or {}
            _add(whole[name], value)
        elif said is None:
            whole[name] = value
        elif isinstance(value, list):
            said.extend(value)
        elif name in GROWS and value is not None:
            whole[name] = said + value
        else:
            assert value is None, f"{name} is said twice: {said!r}, {value!r}"


def equal(one: Any, other: Any) -> bool:
    """Compare all but the last bits of logprobs: those of a token that was computed again as part of a prompt differ
    (docs/architecture.md, "Same answer"). Ids of calls are made anew by each answer."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(each, other[name]) for name, each in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float):
        return one == pytest.approx(other, abs=1e-4)
    return bool(one == other)
