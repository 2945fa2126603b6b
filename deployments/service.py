"""What the HTTP routes need, in one value: the model's face, the way to the replicas, the limits.

Owns:      nothing that changes but the set of open requests.
Thread:    the router's event loop.
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import HTTPConnection

from deployments.dispatch import Dispatcher
from deployments.fleet import Fleet
from deployments.leases import Leases
from deployments.peers import Alone, Peers
from replicas.errors import PromptTooLong
from replicas.tokenizer import Tokenizer
from replicas.types import TokenIds

LONG_TEXT = 20_000  # characters; longer texts are tokenised on another thread


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFace:
    """What clients may know of the model."""

    name: str  # as requests name it
    path: str  # that Transformers can load, relative to the project's root where it lies inside
    tokenizer_path: str
    context_len: int
    vocab_size: int  # of the model's logits; the tokenizer's may be smaller
    architectures: tuple[str, ...]
    model_type: str


@dataclass(frozen=True, kw_only=True)
class Service:
    """One router's service. The routes find it in ``app.state.service``."""

    model: ModelFace
    tokenizer: Tokenizer
    dispatcher: Dispatcher
    fleet: Fleet
    leases: Leases
    settings: dict[str, Any]  # the configuration as given, for /get_server_info
    peers: Peers = field(default_factory=Alone)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)  # what GET /metrics shows
    max_body_bytes: int = 4 << 20
    isolates_keys: bool = True  # requests of different API keys share no cached prefix
    version: str = "0.1.0"
    started_s: float = field(default_factory=time.time)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Ids of ``text``, without holding up other requests."""
        if len(text) <= LONG_TEXT:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> TokenIds:
        """Ids of a conversation, without holding up other requests."""
        if sum(len(str(message.get("content"))) for message in messages) <= LONG_TEXT:
            return self.tokenizer.chat(messages, **options)
        return await asyncio.to_thread(self.tokenizer.chat, messages, **options)

    def check_length(self, num_tokens: int, *, param: str, room: int = 1, at_least: bool = False) -> None:
        """Raises: PromptTooLong when no ``room`` tokens of output could follow a prompt of ``num_tokens`` (or, with
        ``at_least``, of more: it was not tokenised); pools are the replicas' to judge."""
        longest = self.model.context_len
        if num_tokens + room > longest:
            raise PromptTooLong.of_prompt(num_tokens, longest=longest, param=param, room=room, at_least=at_least)


def service_of(request: HTTPConnection) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
