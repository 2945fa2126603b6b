"""The form of a response: its object, and the events that it is streamed in.

    created  [queued]  in_progress
    (output_item.added  (content_part.added  delta...  done  content_part.done)  output_item.done)...
    completed | incomplete | failed

Owns:      the ids, order and numbers of events; the items of one response.
Invariant: a stream's events add up to the response that its last event holds, which is the answer without a stream.
Thread:    the router's event loop.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.http.apis.response_input import ENCRYPTED, ResponsesRequest, ToolSet, sealed
from deployments.http.arrivals import Opening
from deployments.http.bodies import WireType
from deployments.http.http_errors import body_of
from deployments.http.openai_format import chat_logprobs
from deployments.http.service import Service
from deployments.http.streaming import AnswerSoFar, AnswerTokens, Change, Form
from deployments.output.parts import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from deployments.output.reading import call_id
from replicas.types import FinishReason, SamplingParams

Event = dict[str, Any]
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


@dataclass(slots=True, kw_only=True)
class OutputItem:
    """One item of a response, while it is written."""

    kind: str
    item_id: str
    index: int  # in the output
    call: dict[str, Any] = field(default_factory=dict)  # the fields of a function call that are known at its beginning
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    seals: bool = False  # a reasoning item also has its text in the form that clients send back

    def content(self) -> list[dict[str, Any]]:
        """The part that holds the text."""
        part = {"type": _TEXTS[self.kind], "text": "".join(self.texts)}
        return [part if self.kind == "reasoning" else {**part, "annotations": [], "logprobs": [*self.logprobs]}]

    def body(self, status: str) -> dict[str, Any]:
        """The item as it is now; without its part until that has begun."""
        own: dict[str, Any] = {"type": self.kind, "id": self.item_id, "status": status}
        content = self.content() if self.texts else []
        if self.kind == "function_call":
            return {**own, **self.call, "arguments": "".join(self.texts)}
        if self.kind == "message":
            return {**own, "role": "assistant", "content": content}
        return {
            **own,
            "summary": [],
            "content": content,
            "encrypted_content": sealed("".join(self.texts)) if self.seals and status != "in_progress" else None,
        }


class ResponseWriter:
    """Writes one response, part by part, and its events."""

    def __init__(self, response: dict[str, Any], name: str, *, calls_of: str, tools: ToolSet, seals: bool) -> None:
        """``response``: without an output; ``name``: of the request, in the ids of all items; ``calls_of``: what the
        ids of calls are made of, which no other request of a conversation may have."""
        self.response = {**response, "output": []}
        self._name = name
        self._calls_of = calls_of
        self._spaced = tools.spaced
        self._seals = seals
        self._done: list[dict[str, Any]] = []
        self._open: OutputItem | None = None
        self._waiting: list[dict[str, Any]] = []  # logprobs of tokens whose text has not come yet
        self._num_events = 0

    def queue(self) -> list[Event]:
        """Begin the response as one that waits in the background."""
        self.response["status"] = "queued"
        return [self._event(f"response.{kind}", response=self.response) for kind in ("created", "queued")]

    def begin(self) -> list[Event]:
        kinds = ("in_progress",) if self.response["status"] == "queued" else ("created", "in_progress")
        self.response["status"] = "in_progress"
        return [self._event(f"response.{kind}", response=self.response) for kind in kinds]

    def so_far(self, is_cancelled: bool) -> dict[str, Any]:
        """Return the response as it is now, with the item that is being written."""
        status = {"status": "cancelled"} if is_cancelled else {}
        written = [] if self._open is None else [self._open.body("incomplete" if is_cancelled else "in_progress")]
        return {**self.response, **status, "output": [*self._done, *written]}

    def write(self, parts: Sequence[Part], logprobs: list[dict[str, Any]]) -> list[Event]:
        """Add ``parts``, and the ``logprobs`` of the tokens that they come from. Returns: the events."""
        self._waiting += logprobs
        return [event for part in parts for event in self._write(part)]

    def end(self, reason: FinishReason, usage: dict[str, Any]) -> list[Event]:
        """End the response as its choice has ended. Returns: the last events."""
        is_whole = reason is FinishReason.STOP
        if self._open is not None and self._open.kind == "message":
            self._open.logprobs += self._waiting  # of the last tokens, which have no text
        events = self._close("completed" if is_whole else "incomplete")
        self._finish("completed" if is_whole else "incomplete", usage=usage)
        if reason is FinishReason.LENGTH:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._event(f"response.{self.response['status']}", response=self.response)]

    def fail(self, error: Exception) -> list[Event]:
        """End the response with ``error``. Returns: the last events."""
        status, body = body_of(error)
        told = {"code": _CODES.get(status, "server_error"), "message": body["message"]}
        item, self._open = self._open, None
        if item is not None:
            self._done.append(item.body("incomplete"))
        self._finish("failed", error=told)
        failed = {"response": self.response}
        return [self._event("error", **told, param=body["error"]["param"]), self._event("response.failed", **failed)]

    def _finish(self, status: str, **fields: Any) -> None:
        self.response |= {"status": status, "output": self._done, "completed_at": None, **fields}
        if status == "completed":
            self.response["completed_at"] = int(time.time())

    def _write(self, part: Part) -> list[Event]:
        match part:
            case CallPart(index, name):
                space, own_name = self._spaced.get(name, (None, name))
                call = {"call_id": call_id(self._calls_of, 0, index), "name": own_name}
                return self._begin("function_call", call if space is None else {**call, "namespace": space})
            case ArgumentsPart(_, text):
                return self._add(text)
            case TextPart(text):
                return [*self._begin("message"), *self._add(text)]
            case ReasoningPart(text):
                return [*self._begin("reasoning"), *self._add(text)]

    def _begin(self, kind: str, call: dict[str, Any] | None = None) -> list[Event]:
        """Begin an item, unless it is open; the one before it ends."""
        if self._open is not None and self._open.kind == kind and call is None:
            return []
        events, index = self._close("completed"), len(self._done)
        item_id = f"{_PREFIXES[kind]}_{self._name}_{index}"
        item = OutputItem(kind=kind, item_id=item_id, index=index, call=call or {}, seals=self._seals)
        self._open = item
        events.append(self._event("response.output_item.added", output_index=index, item=item.body("in_progress")))
        if kind != "function_call":
            events.append(self._of_text(item, "response.content_part.added", part=item.content()[0]))
        return events

    def _add(self, text: str) -> list[Event]:
        item = self._open
        assert item is not None, "a text has an item"
        item.texts.append(text)
        fields: dict[str, Any] = {"delta": text}
        if item.kind == "message":
            fields["logprobs"], self._waiting = self._waiting, []
            item.logprobs += fields["logprobs"]
        return [self._of_text(item, f"response.{_TEXTS[item.kind]}.delta", **fields)]

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        text, name = "".join(item.texts), f"response.{_TEXTS[item.kind]}.done"
        if item.kind == "function_call":
            events = [self._of_text(item, name, name=item.call["name"], arguments=text)]
        else:
            scores: dict[str, Any] = {"logprobs": [*item.logprobs]} if item.kind == "message" else {}
            events = [
                self._of_text(item, name, text=text, **scores),
                self._of_text(item, "response.content_part.done", part=item.content()[0]),
            ]
        self._done.append(item.body(status))
        return [*events, self._event("response.output_item.done", output_index=item.index, item=self._done[-1])]

    def _of_text(self, item: OutputItem, kind: str, **fields: Any) -> Event:
        if item.kind != "function_call":
            fields = {"content_index": 0, **fields}
        return self._event(kind, item_id=item.item_id, output_index=item.index, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        shown = {name: {**each} if name == "response" else each for name, each in fields.items()}
        return {"type": kind, "sequence_number": self._num_events - 1, **shown}


@dataclass(frozen=True, kw_only=True)
class ResponseForm(Form):
    """The form of a response's answer: one choice, in events with names and numbers."""

    names_events = True

    service: Service
    writer: ResponseWriter
    num_top: int | None  # most likely tokens beside each of the output; None: no logprobs at all

    def whole(self, choices: Sequence[Change], so_far: AnswerSoFar) -> dict[str, Any]:
        self._write(choices[0], so_far)
        return self.writer.response

    def events(self, change: Change, so_far: AnswerSoFar) -> list[Event]:
        return [*(self.writer.begin() if change.begins else ()), *self._write(change, so_far)]

    def error_events(self, error: Exception) -> list[Event]:
        return self.writer.fail(error)

    def _write(self, change: Change, so_far: AnswerSoFar) -> list[Event]:
        logprobs, finish = list[dict[str, Any]](), change.delta.finish
        if self.num_top is not None:
            logprobs = chat_logprobs(self.service.tokenizer, change.delta.logprobs, num_top=self.num_top)["content"]
        events = self.writer.write(change.parts, logprobs)
        return events if finish is None else [*events, *self.writer.end(finish.reason, usage_of(so_far.tokens))]


def usage_of(tokens: AnswerTokens) -> dict[str, Any]:
    return {
        "input_tokens": tokens.prompt,
        "input_tokens_details": {"cached_tokens": tokens.cached, "cache_write_tokens": 0},
        "output_tokens": tokens.output,
        "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
        "total_tokens": tokens.prompt + tokens.output,
    }


def new_writer(
    body: ResponsesRequest, tools: ToolSet, name: str, *, model: str, sampling: SamplingParams, opening: Opening
) -> ResponseWriter:
    """Begin the response to ``body``, with its own fields or what was taken in their place; ``name``: in its id."""
    response = {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": opening.created,
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "instructions": body.instructions,
        "tools": tools.kept,
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": {"type": "text"}, **_given(body.text)},
        "reasoning": {"effort": None, "summary": None, **_given(body.reasoning)},
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "user": body.user,
        "usage": None,
        "service_tier": "default",
        "truncation": "disabled",
        "store": body.background is True,
        "background": body.background is True,
        "previous_response_id": None,
    }
    calls_of = f"{opening.digits}-{name}"
    return ResponseWriter(response, name, calls_of=calls_of, tools=tools, seals=body.includes(ENCRYPTED))


def _given(options: WireType | None) -> dict[str, Any]:
    return {} if options is None else options.model_dump(exclude_none=True)
