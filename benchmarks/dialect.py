"""How a server's completions differ from OpenAI's with vLLM's extensions, which is what the load client speaks.

Owns:      what a prompt looks like on the wire, and what a conversation resends of the answers it got.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FIELDS: Mapping[str, Any] = {
    "temperature": 0,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "return_token_ids": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One server's ways."""

    fields: Mapping[str, Any] = field(default_factory=lambda: FIELDS)  # besides model, prompt, max_tokens and stream
    as_text: Callable[[Sequence[int]], str] | None = None  # for a server that takes text alone; None: it takes ids
    keeps_alive: bool = True  # False: a connection for each request, as the server hangs up on kept ones unannounced
    says_done: bool = True  # the stream ends with [DONE]; otherwise with the chunk that tells why it ended


OPENAI = Dialect()


class History:
    """One conversation's tokens so far, as its server takes them."""

    def __init__(self, dialect: Dialect) -> None:
        self._as_text = dialect.as_text
        self._token_ids: list[int] = []
        self._text = ""

    @property
    def prompt(self) -> list[int] | str:
        return self._token_ids if self._as_text is None else self._text

    def ask(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids
        if self._as_text is not None:
            self._text += self._as_text(token_ids)

    def answered(self, token_ids: Sequence[int], text: str) -> None:
        """``token_ids``: the answer's, or stand-ins for them; only those or the text are resent."""
        self._token_ids += token_ids
        self._text += text
