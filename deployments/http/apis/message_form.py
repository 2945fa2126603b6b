"""The answers of /v1/messages in Anthropic's form, whole or in events.

Invariant: the whole answer is what its events add up to: it is made from them. Content blocks follow each other, and at
           most one is open.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from deployments.http.apis.breakpoints import TTLS_S
from deployments.http.http_errors import body_of, messages_error
from deployments.http.streaming import AnswerSoFar, AnswerTokens, Change, Form
from deployments.output.parts import ArgumentsPart, CallPart, Part, TextPart
from replicas.types import CacheBreakpoint, Finish, FinishReason

Event = dict[str, Any]
_NEW: dict[str, dict[str, Any]] = {
    "text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}},
}  # fmt: skip


class ContentBlocks:
    """The content blocks of one answer, made from its parts in order.

    A call's block begins when a client that parses what has come of its input finds something there, or when all of it
    has come: one that is cut before that is left out, since clients would run it with an empty input.
    """

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self._call_id = call_id
        self._open: str | None = None  # the type of the block that was begun and not ended
        self._num = 0
        self._held: tuple[CallPart, list[str]] | None = None  # a call whose block has not begun, and its input
        self._try_at = 0  # characters of the held input at which it is parsed again: the work is linear in them

    def events(self, parts: Sequence[Part]) -> list[Event]:
        """Make the events of ``parts``."""
        found: list[Event] = []
        for part in parts:
            if isinstance(part, ArgumentsPart):
                found += self._add("input_json", "partial_json", part.text) if self._held is None else self._hold(part)
                continue
            found += self._release()
            if isinstance(part, CallPart):
                self._held, self._try_at = (part, []), 1
                continue
            kind = "text" if isinstance(part, TextPart) else "thinking"
            found += [] if self._open == kind else self._begin(kind)
            found += self._add(kind, kind, part.text)
        return found

    def end(self, *, is_cut: bool) -> list[Event]:
        """End the open block. An answer without any content gets an empty text, which clients expect to be there."""
        if is_cut and self._held is not None and not _says("".join(self._held[1])):
            self._held = None
        return [*self._release(), *([] if self._num else self._begin("text")), *self._end()]

    def _hold(self, part: ArgumentsPart) -> list[Event]:
        """Hold the input of a call whose block has not begun. Whether it begins depends on the text alone, and not on
        where that was cut: a client may come back to another run of its request."""
        assert self._held is not None
        self._held[1].append(part.text)
        text = ""
        while sum(map(len, self._held[1])) >= self._try_at:
            text = text or "".join(self._held[1])
            if _says(text[: self._try_at]):
                return self._release()
            self._held[1][:], self._try_at = [text], self._try_at + self._try_at // 4 + 1
        return []

    def _release(self) -> list[Event]:
        """Begin the block of the held call, with what has come of its input."""
        if self._held is None:
            return []
        (part, texts), self._held = self._held, None
        begun = self._begin("tool_use", id=self._call_id(part.index), name=part.name)
        return [*begun, *self._add("input_json", "partial_json", "".join(texts))]

    def _add(self, kind: str, name: str, text: str) -> list[Event]:
        delta = {"type": f"{kind}_delta", name: text}
        return [{"type": "content_block_delta", "index": self._num - 1, "delta": delta}] if text else []

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
class MessageForm(Form):
    """The form of a message, which has one choice."""

    names_events = True

    answer_id: str
    model: str
    max_tokens: int  # as asked for; the request's own limit is lower where the context leaves less
    stop: tuple[str, ...]
    is_text: bool  # there are neither calls nor reasoning
    blocks: ContentBlocks
    breakpoints: Sequence[CacheBreakpoint] = ()  # of the prompt, by length

    @property
    def only_text(self) -> bool:
        return self.is_text

    def whole(self, choices: Sequence[Change], so_far: AnswerSoFar) -> dict[str, Any]:
        events = self.events(choices[0], so_far)
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
                    block["input"] = parsed_input(arguments)
                case "message_delta":
                    message.update(event["delta"], usage=event["usage"])
        return message

    def events(self, change: Change, so_far: AnswerSoFar) -> list[Event]:
        found: list[Event] = []
        delta, parts = change.delta, change.parts
        if change.begins:
            message: Event = {
                "id": self.answer_id, "type": "message", "role": "assistant", "model": self.model, "content": [],
                "stop_reason": None, "stop_sequence": None, "usage": self._usage(so_far.tokens),
            }  # fmt: skip
            found.append({"type": "message_start", "message": message})
            if self.is_text:
                parts = [TextPart(delta.text)]  # its block is open from now on: what follows is only text
        found += self.blocks.events(parts)
        if delta.finish is not None:
            found += [
                *self.blocks.end(is_cut=delta.finish.reason is not FinishReason.STOP),
                {
                    "type": "message_delta",
                    "delta": self._stop(delta.finish, change),
                    "usage": self._usage(so_far.tokens),
                },
                {"type": "message_stop"},
            ]
        return found

    def error_events(self, error: Exception) -> list[Event]:
        return [messages_error(*body_of(error))]

    def _stop(self, finish: Finish, change: Change) -> dict[str, Any]:
        """Say why the answer ended. An aborted one is cut, as by a limit: Anthropic's API has no name for it."""
        if finish.reason is not FinishReason.STOP:
            full = finish.reason is FinishReason.LENGTH and change.delta.usage.completion_tokens < self.max_tokens
            return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}
        if finish.matched in self.stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
        return {"stop_reason": "tool_use" if change.num_calls else "end_turn", "stop_sequence": None}

    def _usage(self, tokens: AnswerTokens) -> dict[str, Any]:
        """Count the prompt's tokens: those that were in the cache; those before a breakpoint that were computed and are
        in it now; and the rest."""
        held, created = tokens.cached, dict.fromkeys(TTLS_S.values(), 0)
        for each in self.breakpoints:
            end = max(held, min(each.length, tokens.kept))
            created[each.ttl_s] += end - held
            held = end
        return {
            "input_tokens": tokens.prompt - held,
            "cache_creation_input_tokens": sum(created.values()),
            "cache_creation": {f"ephemeral_{ttl}_input_tokens": created[ttl_s] for ttl, ttl_s in TTLS_S.items()},
            "cache_read_input_tokens": tokens.cached,
            "output_tokens": tokens.output,
        }


def _says(arguments: str) -> bool:
    """Whether what has come of a call's arguments is all, or more than an empty input to a client that parses it."""
    for is_partial in (False, True):
        try:
            found = from_json(arguments, allow_partial=is_partial)
        except ValueError:
            continue
        return not is_partial or bool(found)
    return arguments != ""


def parsed_input(arguments: str) -> dict[str, Any]:
    """Parse a call's arguments. If they were cut, what is complete of them counts, as the SDK reads a stream. What is
    no JSON object, or has a number that JSON cannot write, comes under the name that Anthropic's documentation gives
    it."""
    try:
        found = from_json(arguments or "{}", allow_partial=True)
        json.dumps(found, allow_nan=False)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}
