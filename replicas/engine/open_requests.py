"""The choices of all open requests, and what their callers are told of them.

Owns:      which choices are open; a choice leaves with the delta that carries its finish.
Never:     decides when a request ends, but for stop strings, which only text can show.
Invariant: every choice that is added gets exactly one delta with ``finish``.
Thread:    the engine's.
"""

from collections.abc import Callable, Sequence

from replicas.engine.choice import Choice
from replicas.request import Req
from replicas.scheduler.tokens import NewToken
from replicas.types import Finish, TokenDelta


class OpenRequests:
    """By rid."""

    def __init__(self, finish: Callable[[Req, Finish], None]) -> None:
        """``finish``: takes a sequence out of the scheduler; idempotent."""
        self._finish = finish
        self._choices: dict[str, list[Choice]] = {}
        self._by_req: dict[Req, Choice] = {}  # the same, for a token a request and step

    def __len__(self) -> int:
        return len(self._choices)

    def __contains__(self, rid: str) -> bool:
        return rid in self._choices

    @property
    def rids(self) -> list[str]:
        return list(self._choices)

    def add(self, rid: str, choices: Sequence[Choice]) -> None:
        assert rid not in self._choices, f"request {rid} is open"
        self._choices[rid] = list(choices)
        self._by_req.update((choice.req, choice) for choice in choices)

    def choices(self, rid: str) -> list[Choice]:
        """Those that have not ended; none of a request that is not open."""
        return list(self._choices.get(rid, ()))

    def find(self, rid: str, index: int) -> Req | None:
        """Choice ``index`` of an open request."""
        return next((choice.req for choice in self._choices.get(rid, ()) if choice.req.index == index), None)

    def push(self, token: NewToken) -> TokenDelta:
        """Token -> delta; a stop string found here ends the request."""
        req, choice = token.req, self._by_req[token.req]
        if token.token_id is None:
            return self._tell(choice)
        text, finish = choice.push(token.token_id)
        if finish is not None:
            self._finish(req, finish)
            req.finish = finish  # a stop string wins over the length limit reached by the same token
        return self._tell(choice, token, text)

    def end(self, choice: Choice, finish: Finish) -> TokenDelta:
        """End an open choice. Returns: its last delta."""
        self._finish(choice.req, finish)
        return self._tell(choice)

    def tell(self, req: Req) -> TokenDelta:
        """What is to be told of the open choice of ``req``, without a new token."""
        return self._tell(self._by_req[req])

    def _tell(self, choice: Choice, token: NewToken | None = None, text: str = "") -> TokenDelta:
        delta = choice.delta(token, text)
        if delta.finish is not None:
            self._forget(choice)
        return delta

    def _forget(self, choice: Choice) -> None:
        choices = self._choices[choice.req.rid]
        choices.remove(choice)
        del self._by_req[choice.req]
        if not choices:
            del self._choices[choice.req.rid]
