"""The answers of completions and chat in OpenAI's form: what both have in common, usage, reasons, logprobs.

Never: emits a number that JSON has no form for (a token that is masked out has no finite logprob).
"""

import codecs
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from deployments.http.arrivals import opening_of
from deployments.http.bodies import GeneratingFields
from deployments.http.convert import Job
from deployments.http.streaming import AnswerSoFar, AnswerTokens, Change, Form, Key
from replicas.text.tokenizer import Tokenizer
from replicas.types import TokenDelta, TokenLogprob, finite

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, kw_only=True)
class OpenAIForm(Form):
    """The parts of a form that completions and chat share; a choice is each endpoint's own."""

    prefix: ClassVar[str]  # of the answer's id
    kind: ClassVar[str]  # the answer's ``object``
    chunk_kind: ClassVar[str]

    job: Job
    body: GeneratingFields
    answer_id: str
    created: int  # seconds since 1970
    has_logprobs: bool  # choices carry the logprobs of their tokens

    @classmethod
    def of(cls, job: Job, body: GeneratingFields, **own: Any) -> Self:
        """Make the form of the answer to ``body``. ``own``: the other fields."""
        answer_id, created = f"{cls.prefix}-{job.name}", opening_of(job.http).created
        return cls(job=job, body=body, answer_id=answer_id, created=created, **own)

    @abstractmethod
    def choice(self, change: Change) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""

    @abstractmethod
    def chunks(self, change: Change) -> list[dict[str, Any]]:
        """The choice of each event; none where ``change`` has nothing for the client."""

    @abstractmethod
    def logprobs(self, key: Key, delta: TokenDelta) -> dict[str, Any]:
        """The logprobs of a choice, where they were asked for."""

    @property
    def only_text(self) -> bool:
        return not (self._has_usage_in_each or self.body.return_token_ids or self.has_logprobs)

    def whole(self, choices: Sequence[Change], so_far: AnswerSoFar) -> dict[str, Any]:
        body = self._body(self.kind, [self.choice(each) for each in choices])
        return {**body, **self.beside_choices(choices), "usage": usage_body(so_far.tokens)}

    def beside_choices(self, choices: Sequence[Change]) -> dict[str, Any]:
        """Fields of the whole answer that precede its usage."""
        return {}

    def events(self, change: Change, so_far: AnswerSoFar) -> list[dict[str, Any]]:
        bodies = [self._body(self.chunk_kind, [choice]) for choice in self.chunks(change)]
        return [{**body, "usage": usage_body(so_far.tokens)} for body in bodies] if self._has_usage_in_each else bodies

    def last_events(self, so_far: AnswerSoFar) -> list[dict[str, Any]]:
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return []
        return [{**self._body(self.chunk_kind, []), "usage": usage_body(so_far.tokens)}]

    @property
    def _has_usage_in_each(self) -> bool:
        """Whether each event carries the usage so far."""
        return self.body.stream_options is not None and bool(self.body.stream_options.continuous_usage_stats)

    def has_news(self, delta: TokenDelta) -> bool:
        """Whether ``delta`` has anything beside text for the client."""
        return bool(delta.finish or delta.logprobs or (self.body.return_token_ids and delta.token_ids))

    def choice_body(
        self, place: int, key: Key, delta: TokenDelta, content: dict[str, Any], reason: str | None = None
    ) -> dict[str, Any]:
        """A choice, or the new part of one. ``place``: in the answer; ``reason``: of its end, if it has another name
        here."""
        finish = delta.finish
        choice = {
            "index": place,
            **content,
            "logprobs": self.logprobs(key, delta) if self.has_logprobs else None,
            "finish_reason": None if finish is None else reason or finish.reason.value,
            "matched_stop": None if finish is None else finish.matched,
        }
        return {**choice, "token_ids": delta.token_ids} if self.body.return_token_ids else choice

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.job.model,
            "choices": choices,
            "system_fingerprint": None,
        }


def usage_body(tokens: AnswerTokens) -> dict[str, Any]:
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.output,
        "total_tokens": tokens.prompt + tokens.output,
        "prompt_tokens_details": {"cached_tokens": tokens.cached},
        "completion_tokens_details": {"reasoning_tokens": tokens.reasoning},
    }


class TextOffsets:
    """Where the tokens of one completion begin in its text, in characters; told its tokens in order.

    A token that begins within a character has the place of that character. One that is not shown has no width.
    """

    def __init__(self, tokenizer: Tokenizer, *, echo: str | None, skip_special_tokens: bool) -> None:
        """``echo``: the prompt as the text begins with it; None where it does not."""
        self._tokenizer = tokenizer
        self._echo = echo or ""
        self._shown = tokenizer.pieces(skip_special_tokens)
        self._begin(0, self._shown if echo is None else tokenizer.pieces(skip_special_tokens=False))

    def of_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """Places of the prompt's tokens, at the beginning of the text; the output's follow the prompt's text."""
        hidden = 0  # the tokenizer itself puts a special token before a text
        if token_ids[0] in self._tokenizer.special_ids:
            hidden = 0 if self._echo.startswith(self._tokenizer.token_text(token_ids[0])) else 1
        places = [0] * hidden + [self._place(token) for token in token_ids[hidden:]]
        self._begin(len(self._echo), self._shown)
        return places

    def of_output(self, token_ids: Sequence[int]) -> list[int]:
        return [self._place(token) for token in token_ids]

    def _begin(self, at: int, pieces: Sequence[bytes]) -> None:
        self._at, self._pieces = at, pieces
        self._decoder = _new_utf8_decoder(errors="replace")
        self._strips = self._tokenizer.strips_leading_space

    def _place(self, token_id: int) -> int:
        at = self._at
        text = self._decoder.decode(self._pieces[token_id] if token_id < len(self._pieces) else b"")
        if text and self._strips:
            text, self._strips = text.removeprefix(" "), False
        self._at += len(text)
        return at


def completion_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], *, num_top: int, offsets: list[int], by_id: bool = False
) -> dict[str, Any]:
    """Write logprobs in the form of completions, where a token is named by its text, or ``by_id``.

    Args: offsets: [len(logprobs)] of `TextOffsets`.
    """
    names = [
        _names(tokenizer, [*(token for token, _ in each.top[:num_top]), each.token_id], by_id) for each in logprobs
    ]
    return {
        "tokens": [of[each.token_id] for of, each in zip(names, logprobs, strict=True)],
        "token_logprobs": [finite(each.logprob) for each in logprobs],
        "top_logprobs": list(map(_top_by_name, names, logprobs)) if num_top else None,
        "text_offset": offsets,
    }


def chat_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], *, num_top: int, by_id: bool = False
) -> dict[str, Any]:
    """Write logprobs in the form of chat, where a token is named by its text, or ``by_id``."""

    def entry(token: int, value: float | None) -> dict[str, Any]:
        name = _by_id(token) if by_id else tokenizer.token_text(token)
        return {"token": name, "logprob": finite(value), "bytes": list(tokenizer.token_bytes(token))}

    return {
        "content": [
            {
                **entry(each.token_id, each.logprob),
                "top_logprobs": [entry(token, value) for token, value in each.top[:num_top]],
            }
            for each in logprobs
        ]
    }


def prompt_logprobs_body(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], *, num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's form: for each prompt token it and the ``num_top`` most likely ones by id; None where nothing precedes."""

    def entry(token: int, value: float | None, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(value), "rank": rank, "decoded_token": tokenizer.token_text(token)}

    def entries(each: TokenLogprob) -> dict[str, dict[str, Any]] | None:
        if each.logprob is None:
            return None
        own = {str(each.token_id): entry(each.token_id, each.logprob, each.rank)}
        top = enumerate(each.top[:num_top], start=1)
        return own | {str(t): entry(t, value, rank) for rank, (t, value) in top if t != each.token_id}

    return [entries(each) for each in logprobs]


def _names(tokenizer: Tokenizer, token_ids: Sequence[int], by_id: bool) -> dict[int, str]:
    """Name the tokens of one place, each otherwise than the others: by its text, else by its bytes, else by its id.

    The part of a character has no text, and a vocabulary may have two tokens of one text.
    """
    if by_id:
        return {token: _by_id(token) for token in token_ids}
    names: dict[int, str] = {}
    for token in dict.fromkeys(token_ids):
        name, raw = tokenizer.token_text(token), tokenizer.token_bytes(token)
        if name.encode() != raw or name in names.values():
            shown = "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in raw)
            name = f"bytes:{shown}"  # as OpenAI wrote it
        names[token] = _by_id(token) if name in names.values() else name
    return names


def _by_id(token: int) -> str:
    return f"token_id:{token}"  # as vLLM writes it


def _top_by_name(names: dict[int, str], each: TokenLogprob) -> dict[str, float | None] | None:
    """The alternatives that have ``names``, most likely first, the chosen token among them; None without a context."""
    if each.logprob is None:
        return None
    values = {token: finite(value) for token, value in (*each.top, (each.token_id, each.logprob))}
    return {name: values[token] for token, name in names.items()}
