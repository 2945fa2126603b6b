"""Request bodies: their types, and the parsing of one, with bounds on its shape (access.py: on bytes and time).

Owns:      the fields of every body. Each may be null, which means its default; meanings and limits are those of
           `SamplingParams` (convert.py checks them). The cost of a body before it is validated: a long one is parsed on
           another thread; since the JSON parser holds the GIL there too, its values are counted first, and a body with
           too many is refused.
Never:     answers a malformed body with a 422 or a 500: every error in it is an InvalidRequest.
"""

import asyncio
import logging
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from deployments.http.access import read_bytes
from deployments.http.service import service_of
from replicas.errors import InvalidRequest

log = logging.getLogger(__name__)

LONG_BODY = 64 << 10  # bytes; longer ones are parsed on another thread
# of one body; the parser takes 20 to 60 ms for this many
MAX_VALUES = 1 << 20
MAX_NAMES = 1 << 17
MAX_CONTAINERS = 1 << 15
MAX_PROMPTS = 256
MAX_DETOKENIZED = 1 << 17  # ids of one request
_BOM = b"\xef\xbb\xbf"

T = TypeVar("T")
# the first wrong element ends the check: an error for each of a million costs half a minute
Items = Annotated[list[T], Field(fail_fast=True)]
Named = Annotated[dict[str, T], Field(fail_fast=True)]


class WireType(BaseModel):
    """The base of all request bodies. Unknown fields, of which clients send many, are accepted and logged once each.

    Types are JSON's: true and "2" are not numbers, and 2.0 is not an integer.
    """

    max_values: ClassVar[int] = MAX_VALUES  # of a long body; they are counted before any is validated
    model_config = ConfigDict(extra="allow", protected_namespaces=(), strict=True)


WireT = TypeVar("WireT", bound=WireType)
_logged: set[tuple[str, str]] = set()
_LOGGED_MOST = 1000  # names come from clients: memory for them is bounded


async def read_body(request: Request, wire: type[WireT], *, max_bytes: int) -> WireT:
    """Read and validate a body.

    Raises: BodyTooLarge; BodyTooSlow; RequestAborted if the client leaves before the end of the body; Busy if too many
            long bodies wait; InvalidRequest, naming the field.
    """
    service = service_of(request)
    within = asyncio.timeout(service.body_timeout_s)
    data = await read_bytes(request, max_bytes=max_bytes, within=within)
    if len(data) <= LONG_BODY:
        return _parse(data, wire)
    return await service.parsing.run(lambda: _parse(data, wire), size=len(data))


def _parse(data: bytes, wire: type[WireT]) -> WireT:
    raw = parse_json(data, max_values=wire.max_values)
    if not isinstance(raw, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {type(raw).__name__}")
    try:
        value = wire.model_validate(raw)
    except ValidationError as error:
        raise _named(error) from error
    _log_unknown(wire.__name__, value.model_extra or {})
    return value


def parse_json(data: bytes, *, max_values: int = MAX_VALUES) -> Any:
    """Parse JSON. Raises: InvalidRequest if it is malformed, not UTF-8 or Unicode, too deep, or has too many values."""
    if len(data) > LONG_BODY:
        check_shape(data, max_values=max_values)
    try:
        return from_json(data.removeprefix(_BOM))
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON in UTF-8: {error}") from error


def check_shape(data: bytes, *, max_values: int = MAX_VALUES) -> None:
    """Count the values of JSON before it is parsed. Raises: InvalidRequest for too many."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote that is left begins or ends a string
    chars = np.frombuffer(data, dtype=np.uint8)
    in_string = np.logical_xor.accumulate(chars == ord('"'))
    outside = chars[~in_string]
    counts = {char: np.count_nonzero(outside == ord(char)) for char in ",:[{"}
    num_containers = counts["["] + counts["{"]
    for found, most, what in (
        (num_containers, MAX_CONTAINERS, "lists and objects"),
        (counts[":"], MAX_NAMES, "named values"),
        (counts[","] + num_containers, max_values, "values"),
    ):
        if found > most:
            raise InvalidRequest(f"the body has {found:,} {what}; at most {most:,} are accepted")


def _named(error: ValidationError) -> InvalidRequest:
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    param = str(errors[0]["loc"][0]) if errors[0]["loc"] else None
    ways = [
        f"{'.'.join(str(part) for part in e['loc'][1:])} {e['msg']}".strip() for e in errors if e["loc"][:1] == (param,)
    ]
    return InvalidRequest(f"{param}: {'; or '.join(ways[:5])}", param=param)


def _log_unknown(wire: str, extra: dict[str, Any]) -> None:
    for name in extra:
        if len(_logged) >= _LOGGED_MOST:
            return
        if (wire, name) not in _logged:
            _logged.add((wire, name))
            log.info("%s: the field %.64r is not known here and is ignored", wire, name)


class StreamOptions(WireType):
    """What a stream says beside its tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(WireType):
    """The fields that completions and chat share."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Named[float] | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    truncate_prompt_tokens: int | None = None  # keep this many of the prompt's last tokens; -1: as many as fit
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    user: str | None = None
    rid: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    return_token_ids: bool | None = None
    # what asks for a form of the output (constraints.py), and two that are refused (convert.refuse_unsupported)
    response_format: dict[str, Any] | None = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    structural_tag: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    logits_processors: Any = None
    lora_path: Any = None


class CompletionRequest(SamplingFields):
    """The body of a request for text completions."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None  # to a prompt that is text


class ChatRequest(SamplingFields):
    """The body of a request for chat completions."""

    messages: Items[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # false: at most one call
    functions: Any = None
    function_call: Any = None
    separate_reasoning: bool | None = None  # false: reasoning is text, with its tags
    include_reasoning: bool | None = None  # false: it is left out of the answer
    modalities: Items[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None  # a variable for the template


class TokenizeRequest(WireType):
    """The body of /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | Items[str] | None = None
    messages: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_texts: bool | None = None  # also the text of each token
    # with messages, as ChatRequest
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(WireType):
    """The body of /detokenize: token ids, or lists of them."""

    max_values = MAX_DETOKENIZED + MAX_CONTAINERS

    model: str | None = None
    tokens: Items[int] | Items[Items[int]]
    skip_special_tokens: bool | None = None


class NativeSampling(WireType):
    """The field ``sampling_params`` of /generate."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    logit_bias: Named[float] | None = None
    allowed_token_ids: Items[int] | None = None
    bad_words: Items[str] | None = None
    sampling_seed: int | None = None
    seed: int | None = None  # TGI's name
    truncate: int | None = None  # TGI's truncate_prompt_tokens
    do_sample: bool | None = None  # TGI: false means greedy
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    stop_regex: Any = None
    custom_params: Any = None


class NativeRequest(WireType):
    """The body of /generate, in SGLang's form."""

    rid: str | Items[str] | None = None
    text: str | Items[str] | None = None
    input_ids: Items[int] | Items[Items[int]] | None = None
    inputs: str | None = None
    sampling_params: NativeSampling | Annotated[Items[NativeSampling], Field(max_length=MAX_PROMPTS)] | None = None
    parameters: NativeSampling | None = None
    truncate_prompt_tokens: int | None = None  # keep this many of each prompt's last tokens; -1: as many as fit
    return_logprob: bool | Items[bool] | None = None
    logprob_start_len: int | Items[int] | None = None
    top_logprobs_num: int | Items[int] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    timeout: float | None = None
    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    token_ids_logprob: Any = None
    lora_path: Any = None
    session_params: Any = None


class MemoryRequest(WireType):
    """The body of /release_memory_occupation and /resume_memory_occupation."""

    tags: list[Literal["kv_cache", "weights"]] | None = None  # all if none is named


class AbortRequest(WireType):
    """The body of /abort_request: one request, or all."""

    rid: str | None = None
    abort_all: bool | None = None
