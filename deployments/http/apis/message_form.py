"""The answers of /v1/messages in Anthropic's form, whole or in events.

Invariant: the whole answer is what its events add up to: it is made from them. Content blocks follow each other, and at
           most one is open.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from deployments.http.http_errors import body_of, messages_error
from deployments.http.streaming import Deltas, Key
from deployments.output.parts import CallPart, Part, ReasoningPart, TextPart, TextReader
from deployments.output.reading import ChoiceReading
from replicas.types import Finish, FinishReason, TokenDelta

Event = dict[str, Any]
_NEW: dict[str, dict[str, Any]] = {
    "text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}},
}  # fmt: skip


class ContentBlocks:
    """The content blocks of one answer, made from its parts in order."""

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self._call_id = call_id
        self._open: str | None = None  # the type of the block that was begun and not ended
        self._num = 0

    def events(self, parts: Sequence[Part]) -> list[Event]:
        """Make the events of ``parts``."""
        found: list[Event] = []
        for part in parts:
            if isinstance(part, CallPart):
                found += self._begin("tool_use", id=self._call_id(part.index), name=part.name)
                continue
            if isinstance(part, TextPart | ReasoningPart):
                kind, name = ("text", "text") if isinstance(part, TextPart) else ("thinking", "thinking")
                found += [] if self._open == kind else self._begin(kind)
            else:
                kind, name = "input_json", "partial_json"
            if part.text:
                delta = {"type": f"{kind}_delta", name: part.text}
                found.append({"type": "content_block_delta", "index": self._num - 1, "delta": delta})
        return found

    def end(self) -> list[Event]:
        """End the open block. An answer without any content gets an empty text, which clients expect to be there."""
        return [*([] if self._num else self._begin("text")), *self._end()]

    def _begin(self, kind: str, **fields: str) -> list[Event]:
        ended = self._end()
        self._open, self._num = kind, self._num + 1
        block = {"type": kind, **fields, **_NEW[kind]}
        return [*ended, {"type": "content_block_start", "index": self._num - 1, "content_block": block}]

    def _end(self) -> list[Event]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._num - 1}]


@dataclass(frozen=True, kw_only=True)
class MessageForm:
    """The form of a message (streaming.py), which has one choice."""

    is_cumulative = False
    names_events = True

    answer_id: str
    model: str
    max_tokens: int  # as asked for; the request's own limit is lower where the context leaves less
    stop: tuple[str, ...]
    reading: ChoiceReading
    call_id: Callable[[int], str]  # of each call by its number
    blocks: ContentBlocks = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", ContentBlocks(self.call_id))

    @property
    def only_text(self) -> bool:
        return isinstance(self.reading.reader, TextReader)

    def whole(self, deltas: Deltas) -> dict[str, Any]:
        [(key, delta)] = deltas.items()
        events = self.events(key, delta, deltas, begins=True)
        message: Event = events[0]["message"]
        for event in events:
            match event["type"]:
                case "content_block_start":
                    block, arguments = event["content_block"], ""
                    message["content"].append(block)
                case "content_block_delta":
                    _, name = event["delta"]
                    if name == "partial_json":
                        arguments += event["delta"][name]
                    else:
                        block[name] += event["delta"][name]
                case "content_block_stop" if block["type"] == "tool_use":
                    block["input"] = _input(arguments)
                case "message_delta":
                    message.update(event["delta"], usage=event["usage"])
        return message

    def events(self, key: Key, delta: TokenDelta, latest: Deltas, *, begins: bool) -> list[Event]:
        found: list[Event] = []
        if begins:
            message: Event = {
                "id": self.answer_id, "type": "message", "role": "assistant", "model": self.model, "content": [],
                "stop_reason": None, "stop_sequence": None, "usage": _usage(delta),
            }  # fmt: skip
            found.append({"type": "message_start", "message": message})
        parts = self.reading.read(delta)
        if begins and self.only_text:
            parts = [TextPart(delta.text)]  # its block is open from now on: what follows is only text
        found += self.blocks.events(parts)
        if delta.finish is not None:
            found += [
                *self.blocks.end(),
                {"type": "message_delta", "delta": self._stop(delta.finish, delta), "usage": _usage(delta)},
                {"type": "message_stop"},
            ]
        return found

    def last_events(self, latest: Deltas) -> list[Event]:
        return []

    def error_events(self, error: Exception) -> list[Event]:
        return [messages_error(*body_of(error))]

    def _stop(self, finish: Finish, delta: TokenDelta) -> dict[str, Any]:
        """Say why the answer ended. An aborted one is cut, as by a limit: Anthropic's API has no name for it."""
        if finish.reason is not FinishReason.STOP:
            full = finish.reason is FinishReason.LENGTH and delta.usage.completion_tokens < self.max_tokens
            return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}
        if finish.matched in self.stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
        return {"stop_reason": "tool_use" if self.reading.num_calls else "end_turn", "stop_sequence": None}


def _usage(delta: TokenDelta) -> dict[str, int]:
    """``input_tokens`` are those that were computed: with those from the cache they sum to the prompt's."""
    usage = delta.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _input(arguments: str) -> dict[str, Any]:
    """Parse a call's arguments. If they were cut, what is complete of them counts, as the SDK reads a stream. What is
    no JSON object, or has a number that JSON cannot write, comes under the name that Anthropic's documentation gives
    it."""
    try:
        found = from_json(arguments or "{}", allow_partial=True)
        json.dumps(found, allow_nan=False)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}
