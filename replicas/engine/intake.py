"""What an engine can serve: requests in, refusals out.

Owns:      the longest sequence that fits, and what is said to a request that can never be served.
Never:     looks at what runs or waits: a request that it lets in may still be refused for the moment (Overloaded).
Thread:    any; nothing here changes.
"""

from dataclasses import replace

from replicas.config import ModelConfig
from replicas.disagg.hand_offs import require_possible
from replicas.errors import InvalidRequest, PromptTooLong
from replicas.types import GenerateRequest


class Intake:
    """Of one engine."""

    def __init__(self, model: ModelConfig, *, pool_tokens: int, has_desk: bool) -> None:
        """``has_desk``: it takes part in hand-offs."""
        self._model = model
        self._pool_tokens = pool_tokens
        self._has_desk = has_desk
        self.longest = min(model.context_len, pool_tokens)  # prompt + output, in tokens

    def check(self, request: GenerateRequest) -> None:
        """Raises: InvalidRequest, or PromptTooLong with the lengths and what is allowed."""
        request.validate(vocab_size=self._model.vocab_size)
        require_possible(request, has_desk=self._has_desk)
        if request.resumed_ids and request.sampling.n > 1:
            raise InvalidRequest("resumed_ids: a request with n > 1 is resumed by sending it anew", param="resumed_ids")
        length = len(request.token_ids)
        room = 1 if request.sampling.max_new_tokens > 0 else 0
        if length + room > self.longest:
            why = ""
            if self.longest < self._model.context_len:
                why = f" here (the model's own is {self._model.context_len}, the KV pool holds {self._pool_tokens})"
            raise PromptTooLong.of_prompt(length, longest=self.longest, param="prompt", room=room, why=why)

    def clip(self, request: GenerateRequest) -> GenerateRequest:
        """``request``, or one that ends with `length` where the pool ends (or the context: routers refuse that)."""
        room = self.longest - len(request.token_ids)
        if request.sampling.max_new_tokens <= room:
            return request
        sampling = replace(
            request.sampling, max_new_tokens=room, min_new_tokens=min(request.sampling.min_new_tokens, room)
        )
        return replace(request, sampling=sampling)
