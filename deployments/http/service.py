"""The value that all HTTP routes use: facts about the model, the dispatcher to the replicas, the limits.

Owns:      the bounded executors for long texts and bodies.
Never:     imports torch, but where config.json leaves its context to its family: a router reads that file and the
           tokenizer, and loads no weights.
Thread:    the router's event loop; long texts and bodies on the executors' threads.
"""

import asyncio
import functools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from huggingface_hub import hf_hub_download, snapshot_download
from prometheus_client import CollectorRegistry
from starlette.requests import HTTPConnection

from deployments.batches.store import BatchStore
from deployments.dispatch.background import BackgroundStreams
from deployments.dispatch.dispatcher import Dispatcher
from deployments.dispatch.leases import Leases
from deployments.dispatch.resumable_streams import ResumableStreams
from deployments.fleet.fleet import Fleet
from deployments.fleet.peers import NoPeers, RouterPeers
from deployments.http.http_errors import Busy
from deployments.output.examined import ExaminedGrammars
from deployments.output.output_format import OutputFormat
from deployments.output.prompting import ChatPrompting
from deployments.output.tools import ToolUse
from deployments.places import local_path, nearest_folder, shown_path
from deployments.settings.adapters import Adapters
from deployments.settings.schema import ModelSettings
from deployments.tenancy.keys import CALLER, CacheIsolation
from replicas.checkpoints import hub
from replicas.errors import InvalidConfig, InvalidRequest, PromptTooLong, UnsupportedModel
from replicas.hf_config import (
    contexts,
    model_config_from_hf,
    named_context,
    read_generation_config,
)
from replicas.loading.model_files import architecture_of, read_config
from replicas.models.registry import MODELS
from replicas.text.tokenizer import Rendered, Tokenizer
from replicas.types import GenerateRequest, SamplingParams, TokenIds, client_fields

LONG_TEXT = 10_000  # characters; longer texts, about 6 ms, are tokenised on another thread
MAX_HELD = 16 << 20  # characters or bytes of long work that runs or waits
A_VALUE = 16  # characters that a value of a message counts as, beside its text: templates are slower than tokenizers

T = TypeVar("T")


class BoundedExecutor:
    """Threads for one kind of long work, with a bounded queue, half of which one key's requests may fill."""

    def __init__(self, name: str, *, threads: int, max_held: int = MAX_HELD) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"manta-{name}")
        self._max_held = max_held
        self._held = 0  # size of what runs or waits
        self._held_by: Counter[str] = Counter()  # of each caller with a key
        self._lock = Lock()

    async def run(self, work: Callable[[], T], *, size: int) -> T:
        """Run ``work`` on a thread, so that other requests are not delayed. Raises: Busy if too much work waits."""
        caller = CALLER.get()
        with self._lock:
            if self._held and self._held + size > self._max_held:
                raise Busy(f"too many long requests are being read: {self._held:,} characters wait; try again later")
            held = self._held_by[caller]
            if caller and held and held + size > self._max_held // 2:
                raise Busy(f"too many long requests of this API key are being read: {held:,} characters wait")
            self._held += size
            self._held_by[caller] += size
        future = self._threads.submit(work)
        future.add_done_callback(lambda _: self._leave(caller, size))
        return await asyncio.wrap_future(future)

    def _leave(self, caller: str, size: int) -> None:
        with self._lock:
            self._held -= size
            self._held_by[caller] -= size
            if not self._held_by[caller]:
                del self._held_by[caller]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFace:
    """The facts about the model that clients may see."""

    name: str  # as requests name it
    path: str  # that Transformers can load, relative to the project's root where it lies inside
    tokenizer_path: str
    context_len: int
    vocab_size: int  # of the model's logits; the tokenizer's may be smaller
    architectures: tuple[str, ...]
    model_type: str
    sampling: Mapping[str, float] = field(default_factory=dict)  # by its author, where a request says nothing


@dataclass(frozen=True, kw_only=True)
class Service:
    """The state of one router's HTTP service; routes find it in ``app.state.service``."""

    model: ModelFace
    tokenizer: Tokenizer
    dispatcher: Dispatcher
    fleet: Fleet
    leases: Leases
    settings: dict[str, Any]  # the configuration as given, for /get_server_info
    adapters: Adapters = field(default_factory=Adapters)
    peers: RouterPeers = field(default_factory=NoPeers)
    streams: ResumableStreams = field(default_factory=ResumableStreams)
    background: BackgroundStreams = field(default_factory=BackgroundStreams)
    batches: BatchStore | None = None
    max_file_bytes: int = 200 << 20  # of an upload
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)  # what GET /metrics shows
    max_body_bytes: int = 4 << 20
    max_schema_bytes: int = 1 << 20
    isolation: CacheIsolation = "key"  # between whose requests cached prefixes are not shared
    body_timeout_s: float = 60.0
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    # one at a time: the parser holds the GIL
    parsing: BoundedExecutor = field(default_factory=lambda: BoundedExecutor("parse", threads=1))
    encoding: BoundedExecutor = field(default_factory=lambda: BoundedExecutor("encode", threads=2))
    version: str = "0.1.0"
    started_s: float = field(default_factory=time.time)

    @functools.cached_property
    def examined(self) -> ExaminedGrammars:
        """What clients asked of outputs' forms."""
        return ExaminedGrammars(self.tokenizer)

    def name_of(self, request: GenerateRequest) -> str:
        """Return the name of what answers ``request``: its adapter's, or the model's."""
        return self.model.name if request.adapter is None else request.adapter.name

    async def encode(self, text: str, *, param: str = "prompt", add_special_tokens: bool = True) -> TokenIds:
        """Tokenise one text. Raises: PromptTooLong, Busy."""
        [ids] = await self.encode_all([text], param=param, add_special_tokens=add_special_tokens)
        return ids

    async def encode_all(
        self,
        texts: Sequence[str],
        *,
        param: str = "prompt",
        add_special_tokens: bool = True,
        must_fit: bool = False,
        together: bool = False,
    ) -> list[TokenIds]:
        """Tokenise each text, without delaying other requests.

        Args:   must_fit: refuse the first text with more tokens than the context, and tokenise none after it.
                together: the limit on characters holds for the sum of the texts, not for each.
        Raises: PromptTooLong, also for a text with more characters than the context can hold; Busy.
        """
        for num_characters in [sum(map(len, texts))] if together else map(len, texts):
            self._check_characters(num_characters, param=param)

        def work() -> list[TokenIds]:
            rows = []
            for text in texts:
                rows.append(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
                if must_fit:
                    self.check_length(len(rows[-1]), param=param, room=0)
            return rows

        size = sum(map(len, texts))
        return work() if size <= LONG_TEXT else await self.encoding.run(work, size=size)

    @functools.cached_property
    def prompting(self) -> ChatPrompting:
        """What the chat template takes of tools, and what the model's output means."""
        output = OutputFormat.of(self.tokenizer, tool_format=self.tool_format, reasoning_format=self.reasoning_format)
        return ChatPrompting.of(output, self.tokenizer.template, self.tokenizer.chat_text)

    async def encode_chat(
        self, messages: list[dict[str, Any]], *, use: ToolUse | None = None, **options: Any
    ) -> TokenIds:
        """Tokenise a conversation, without delaying other requests. Raises: PromptTooLong, Busy."""
        return await self._chat(self.tokenizer.chat, messages, use, options)

    async def render_chat(
        self, messages: list[dict[str, Any]], *, use: ToolUse | None = None, **options: Any
    ) -> Rendered:
        """Write a conversation in the chat template, as `encode_chat` encodes it. Raises: PromptTooLong, Busy."""
        return await self._chat(self.tokenizer.render_chat, messages, use, options)

    async def num_before(self, prompt: Rendered, end: int, *, num_tokens: int) -> int:
        """Count tokens as `Tokenizer.num_before`, without delaying other requests. Raises: Busy."""
        work = functools.partial(self.tokenizer.num_before, prompt, end, num_tokens=num_tokens)
        size = min(end, len(prompt.text) - end)
        return work() if size <= LONG_TEXT else await self.encoding.run(work, size=size)

    async def _chat(
        self, make: Callable[..., T], messages: list[dict[str, Any]], use: ToolUse | None, options: dict[str, Any]
    ) -> T:
        self.check_length(len(messages), param="messages", at_least=True)  # each message has a token at least

        def check(text: str) -> None:
            self._check_characters(len(text), param="messages")

        def work() -> T:
            for each in (*messages, tools, *options.values()):
                self._check_characters(size_of(each, a_value=0), param="messages")
            if use is None and not any(has_tools(message) for message in messages):
                return make(messages, check=check, **options)
            prompt = self.prompting.prompt(messages, use)
            return make(prompt.messages, tools=prompt.tools, marks=prompt.marks, check=check, **options)

        tools = [] if use is None else [tool.body for tool in use.tools]
        size = size_of([messages, tools, options], most=LONG_TEXT)
        return work() if size <= LONG_TEXT else await self.encoding.run(work, size=size)

    def _check_characters(self, num_characters: int, *, param: str) -> None:
        """Check characters before tokenising. Raises: PromptTooLong if they exceed the context in any tokenisation."""
        self.check_length(self.tokenizer.least_tokens(num_characters), param=param, room=0, at_least=True)

    def check_length(self, num_tokens: int, *, param: str, room: int = 1, at_least: bool = False) -> None:
        """Check that ``room`` output tokens fit behind a prompt of ``num_tokens``; the pool is checked by the replica.

        Args:   at_least: the prompt was not tokenised, and may have more tokens.
        Raises: PromptTooLong.
        """
        longest = self.model.context_len
        if num_tokens + room > longest:
            raise PromptTooLong.of_prompt(num_tokens, longest=longest, param=param, room=room, at_least=at_least)


def service_of(request: HTTPConnection) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def size_of(value: Any, *, most: float = math.inf, a_value: int = A_VALUE) -> int:
    """Count the characters in ``value``, and ``a_value`` for each value; counting stops above ``most``."""
    size, left = 0, [value]
    while left and size <= most:
        each = left.pop()
        size += a_value
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)
    return size


def has_tools(message: dict[str, Any]) -> bool:
    """Whether a message calls tools, or is a tool's result."""
    return message.get("tool_calls") is not None or message.get("role") == "tool"


TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def read_face(model: ModelSettings) -> ModelFace:
    """Read the facts about the model from its config.json.

    Raises: InvalidConfig if the file is missing or lacks a number, or model.context_len exceeds the model's.
    """
    config = _config_json(model)
    if not {"max_position_embeddings", "vocab_size"} <= config.keys():
        config = _with_defaults(model, config)
    try:
        (own, longest), vocab_size = contexts(config), int(config["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidConfig(f"model.path = {model.path!r}: its config.json has no number for {error}") from error
    if model.context_len is not None and model.context_len > longest:
        raise InvalidConfig(f"model.context_len = {model.context_len}; {model.path} allows 1 to {longest}")
    shown = shown_path(model.path)
    return ModelFace(
        name=model.name,
        path=shown,
        tokenizer_path=shown,
        context_len=model.context_len or own,
        vocab_size=vocab_size,
        architectures=tuple(config.get("architectures") or ()),
        model_type=str(config.get("model_type", "")),
        sampling={} if model.sampling_defaults == "openai" else _authors_sampling(model),
    )


def _authors_sampling(model: ModelSettings) -> Mapping[str, float]:
    """Read what generation_config.json wants of sampling where a request says nothing. ``do_sample`` does not count, as
    in vLLM and SGLang. Raises: InvalidConfig, naming the file."""
    file, found = Path(tokenizer_folder(model)) / "generation_config.json", dict[str, Any]()
    try:
        generation = read_generation_config(file)
        for name in ("top_k", *(name for name, each in client_fields(SamplingParams).items() if each.authors)):
            value, whole = generation.get(name), name == "top_k"
            if value is None or (whole and value in (0, -1)):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or (whole and value != int(value)):
                wanted = "a whole number" if whole else "a number"
                raise InvalidConfig(f"{name} = {str(value)[:64]!r}; {wanted} is wanted")
            found[name] = int(value) if whole else float(value)
        SamplingParams(**found).validate(vocab_size=1)
    except (InvalidRequest, InvalidConfig) as error:
        raise InvalidConfig(
            f"model.path = {model.path!r}: {file.name}: {error}. Mend it, or set model.sampling_defaults: openai"
        ) from error
    return found


def adaptable_weights(model: ModelSettings) -> dict[str, tuple[int, int]]:
    """Return the shapes of the weights that adapters can add to (`ModelConfig.adaptable`), without torch."""
    folder = config_folder(model)
    if model.implementation == "transformers" or architecture_of(folder) not in MODELS:
        return {}
    return model_config_from_hf(model.path, read_config(folder), eos_ids=(), dtype="float32").adaptable()


def config_folder(model: ModelSettings) -> Path:
    """Find the folder with the model's config.json; for a hub id, in the hub's local cache.

    Raises: InvalidConfig if the hub does not deliver it.
    """
    folder = Path(local_path(model.path))
    if folder.is_dir():
        return folder
    with hub.asking(model.path, near=nearest_folder(model.path)) as how:
        return Path(hf_hub_download(model.path, "config.json", revision=model.revision, **how)).parent


def tokenizer_folder(model: ModelSettings) -> str:
    """Find the folder with the model's tokenizer; for a hub id, fetch it without the weights.

    Raises: InvalidConfig if the hub does not deliver it.
    """
    folder = Path(local_path(model.path))
    if folder.is_dir():
        return str(folder)
    with hub.asking(model.path) as how:
        return str(snapshot_download(model.path, revision=model.revision, allow_patterns=TOKENIZER_FILES, **how))


def _config_json(model: ModelSettings) -> dict[str, Any]:
    file = config_folder(model) / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"model.path = {model.path!r}: its config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidConfig(f"model.path = {model.path!r}: its config.json is not a JSON object")
    return config


def _with_defaults(model: ModelSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Fill in what the model's family says: defaults, numbers of the text part of a model that also sees, the context
    under the name that all share. Takes Transformers' classes, 3 s of a start, and torch."""
    from replicas.loading.model_files import family_config

    try:
        filled = family_config(config_folder(model))
    except UnsupportedModel:
        return config
    filled |= {key: config[key] for key in ("architectures", "model_type") if key in config}
    own = named_context(filled)
    return filled if own is None else filled | {"max_position_embeddings": own}
