"""Request bodies: their types, and the parsing of one, with bounds on its shape (access.py: on bytes and time).

Owns:      the fields of every body, their meanings and limits, from which /openapi.json and docs/api.md are made. Each
           may be null, which means its default. Limits that are only `shown` are checked by the code that reads them.
           The cost of a body before it is validated: a long one is parsed on another thread; since the JSON parser
           holds the GIL there too, its values are counted first, and a body with too many is refused.
Never:     answers a malformed body with a 422 or a 500: every error in it is an InvalidRequest.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import fields
from hashlib import blake2b
from inspect import iscoroutinefunction
from math import isfinite
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args, get_type_hints

import numpy as np
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request
from starlette.responses import Response

from deployments.batches.runner import ENDPOINTS
from deployments.http.access import read_bytes
from deployments.http.api_document import about, body_like, said, shape, shown
from deployments.http.arrivals import last_event_of
from deployments.http.service import service_of
from deployments.output.tools import MAX_TOOLS
from deployments.settings.groups import ADAPTER_NAME, LONGEST_NAME
from replicas.errors import InvalidRequest
from replicas.text.chat_template import ROLES
from replicas.types import GenerateRequest, SamplingParams, client_fields

log = logging.getLogger(__name__)

LONG_BODY = 64 << 10  # bytes; longer ones are parsed on another thread
# of one body; the parser takes 20 to 60 ms for this many
MAX_VALUES = 1 << 20
MAX_NAMES = 1 << 17
MAX_CONTAINERS = 1 << 15
MAX_PROMPTS = 256
MAX_DETOKENIZED = 1 << 17  # ids of one request
MAX_BAD_WORDS = 256  # of one request
MAX_BAD_CHARACTERS = 16_384  # of all of them
FORM_TYPES = ("grammar", "json", "json_object", "json_schema", "regex", "structural_tag")  # of response_format
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


async def read_body(request: Request, wire: type[WireT]) -> WireT:
    """Read and validate a body.

    Raises: BodyTooLarge; BodyTooSlow; RequestAborted if the client leaves before the end of the body; Busy if too many
            long bodies wait; InvalidRequest, naming the field.
    """
    service = service_of(request)
    within = asyncio.timeout(service.body_timeout_s)
    data = await read_bytes(request, max_bytes=service.max_body_bytes, within=within)
    if last_event_of(request.headers) is not None:
        request.state.body_digest = blake2b(data).digest()
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


# what pydantic says otherwise, by its word for the error
_WORDS = {
    "greater_than_equal": "must be at least {ge}, got {input}",
    "less_than_equal": "must be at most {le}, got {input}",
    "too_short": "is empty; give at least one",
}


def _named(error: ValidationError) -> InvalidRequest:
    errors = error.errors(include_url=False)
    param = str(errors[0]["loc"][0]) if errors[0]["loc"] else None
    named = [each for each in errors if each["loc"][:1] == (param,)]
    ways = [f"{'.'.join(str(part) for part in each['loc'][1:])} {_words(each)}".strip() for each in named]
    return InvalidRequest(f"{param}: {'; or '.join(ways[:5])}", param=param)


def _words(error: ErrorDetails) -> str:
    words = _WORDS.get(error["type"])
    return error["msg"] if words is None else words.format(**error.get("ctx", {}), input=str(error["input"])[:64])


def _log_unknown(wire: str, extra: dict[str, Any]) -> None:
    for name in extra:
        if len(_logged) >= _LOGGED_MOST:
            return
        if (wire, name) not in _logged:
            _logged.add((wire, name))
            log.info("%s: the field %.64r is not known here and is ignored", wire, name)


class Route(APIRoute):
    """A route that reads its body by `read_body`, and gives it to its endpoint beside the request.

    FastAPI would read a body of any size for any time, and answer what is wrong with it by a 422. Its guards are
    functions of the request, given to the route or to its own router; they run before the body is read.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        field = self.body_field
        if field is None:
            return super().get_route_handler()
        assert not any(iscoroutinefunction(guard.dependency) for guard in self.dependencies), "a guard would not run"
        wire, required = cast(type[WireType], field.field_info.annotation), field.field_info.is_required()

        async def handler(request: Request) -> Response:
            for guard in self.dependencies:
                cast(Callable[[Request], None], guard.dependency)(request)
            headers = request.headers
            empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
            body = wire() if empty and not required else await read_body(request, wire)
            return cast(Response, await self.endpoint(request, body))

        return handler


Object = dict[str, Any]
TEXT, NULL = {"type": "string"}, {"type": "null"}
ROLE = {"enum": list(ROLES)}
TOOL_NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}
FUNCTION = {"const": "function"}
_PART = {"anyOf": [TEXT, shape(text=TEXT), shape(type={"const": "refusal"}, refusal=TEXT)]}
_CONTENT = {"anyOf": [TEXT, NULL, {"type": "array", "items": _PART}]}
_CALL = shape(function=shape({"arguments": {"type": ["string", "object"]}}, name=TEXT))
_MESSAGE = shape({"content": _CONTENT, "tool_calls": {"anyOf": [NULL, {"type": "array", "items": _CALL}]}}, role=ROLE)
_ABOUT_TOOL = {
    "description": {"type": ["string", "null"]},
    "parameters": {"type": ["object", "null"], "properties": {"type": {"const": "object"}}},
    "strict": {"type": ["boolean", "null"]},
}
Conversation = Annotated[Items[Annotated[Object, WithJsonSchema(_MESSAGE)]], shown(minItems=1)]
CONVERSATION = (
    "The conversation. Roles: OpenAI's, and the chat template's own; `developer` becomes `system` where the template "
    "does not know it."
)
Tool = Annotated[Object, WithJsonSchema(shape({"type": FUNCTION}, function=shape(_ABOUT_TOOL, name=TOOL_NAME)))]
Tools = Annotated[Items[Tool], shown(maxItems=MAX_TOOLS)]
NamedTool = Annotated[Object, WithJsonSchema(shape(type=FUNCTION, function=shape(name=TOOL_NAME)))]
NOTHING: list[Any] = [None, False, 0, "", [], {}]
REFUSED = "Not supported: refused if it asks for anything."
Refused = Annotated[Any, about(REFUSED, enum=NOTHING)]

PathName = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1})]  # documented, and not checked
Token = Annotated[int, shown(limit="token")]
UpToContext = Annotated[int, shown(minimum=0, limit="context")]
Seed = Annotated[int, shown(limit="64 bits")]
RequestName = Annotated[str, shown(pattern="^[A-Za-z0-9._:/@+=-]{0,128}$")]
StopText = Annotated[str, shown(minLength=1, maxLength=1024)]
UpTo20 = Annotated[int, Field(ge=0, le=20)]
Text = Annotated[str, shown(minLength=1)]
Many = Annotated[list[T], Field(fail_fast=True), shown(minItems=1)]  # as Items
Few = Annotated[list[T], Field(fail_fast=True), shown(minItems=1, maxItems=MAX_PROMPTS)]
TokenRow = Many[Token]
Prompts = Text | TokenRow | Many[Text] | Many[TokenRow]
AnyToken = Annotated[int, shown(minimum=0, maximum=2**31 - 1)]
_IDS = shown(propertyNames={"pattern": "^[0-9]{1,9}$"}, maxProperties=1024)
_FORMAT = {"type": "object", "properties": {"type": {"enum": [None, "text", *FORM_TYPES]}}}
StopTexts = Annotated[Items[StopText], shown(maxItems=64)]
STOPS = "Texts that end the answer; they are not part of it."
ToolUse = Annotated[str, shown(enum=["none", "auto", "required"])]
ToolChoice = ToolUse | NamedTool
TOOL_CHOICE = "Whether, and which, tools are called ([more](#tools-and-reasoning))."
TOOLS = "The functions that the model may call ([more](#tools-and-reasoning))."
# fields that several bodies have
Model = Annotated[
    Annotated[str, shown(limit="model")] | None,
    about("The model's name, an adapter's, or `MODEL:ADAPTER`, as `/v1/models` lists them; may be left out."),
]
LORA_PATH = "SGLang's: the name or the folder of a known adapter, which answers."
LoraPath = Annotated[str | None, about(LORA_PATH)]
User = Annotated[str | None, about("Accepted, without effect.")]
CacheSalt = Annotated[str | None, about("Cached prefixes are shared only with requests of the same salt.")]
ExtraKey = Annotated[str | None, about("SGLang's second salt, beside `cache_salt`.")]
Stream = Annotated[bool | None, about("Send tokens as server-sent events.")]
TopK = Annotated[
    Annotated[int, shown(minimum=-1)] | None,
    about(
        "Choose among this many of the most likely tokens; -1 or 0: all. `top_p` counts among all tokens, not among "
        "these, as in SGLang."
    ),
]
MinTokens = Annotated[UpToContext | None, about("No token and no `stop` text ends the answer before this many.")]
KeptTokens = Annotated[int, shown(minimum=-1, limit="context", **{"not": {"const": 0}})]
Keep = Annotated[
    KeptTokens | None,
    about("Keep this many of the prompt's last tokens; -1: as many as leave room for the output."),
]
TopLogprobs = Annotated[UpTo20 | None, about("Also of this many most likely tokens in its place.")]
SingleCall = Annotated[bool | None, about("false: at most one call.")]
TemplateVariables = Annotated[Object | None, about("Variables for the chat template, such as `enable_thinking`.")]
# forms of the output (constraints.py), or what asks for none; an empty text or list is an error: it would allow nothing
NO_FORM = [each for each in NOTHING if each not in ("", [])]
ASKS_NOTHING = {"enum": NO_FORM}
_SOME_TEXT = {**TEXT, "minLength": 1}
Schema = Annotated[
    Any, about("A JSON schema that the output must fit.", anyOf=[_SOME_TEXT, {"type": "object"}, ASKS_NOTHING])
]
Regex = Annotated[Any, about("A regular expression that the output must match.", anyOf=[_SOME_TEXT, ASKS_NOTHING])]
Grammar = Annotated[Any, about("A grammar that the output must follow.", anyOf=[_SOME_TEXT, ASKS_NOTHING])]


def asked_fields(of: Any, *names: str) -> dict[str, Any]:
    """Make the fields of a body from those of ``of`` that clients ask for in bodies: ``names``, or all of them."""
    kinds, defaults, found = get_type_hints(of), {each.name: each.default for each in fields(of)}, {}
    for name, each in client_fields(of).items():
        if each.header or (names and each.name not in names):
            continue
        kind = next(one for one in get_args(kinds[name]) or (kinds[name],) if one is not NoneType)
        bounds = {"minimum": each.least, "exclusiveMinimum": each.above, "maximum": each.most}
        keywords: dict[str, Any] = {word: bound for word, bound in bounds.items() if isfinite(bound)}
        meaning = each.meaning
        if each.authors:
            meaning += f" Without it: what the model's author says (`model.sampling_defaults`), or {defaults[name]:g}."
        found[each.name] = Annotated[Annotated[kind, shown(**keywords)] | None, said(meaning)]
    return found


class StreamOptions(WireType):
    """What a stream says beside its tokens."""

    include_usage: bool | None = said("Send the usage in a last event without choices.")
    continuous_usage_stats: bool | None = said("Send the usage so far in every event.")


class RequestFields(WireType):
    """The fields of all bodies that run prompts."""

    __annotations__ = asked_fields(GenerateRequest)
    model: Model = None
    cache_salt: CacheSalt = None


class Sampling(WireType):
    """How tokens are chosen, and when to stop, on every generating route."""

    __annotations__ = asked_fields(SamplingParams)
    top_k: TopK = None
    seed: Seed | None = said(
        "The same seed, prompt and settings give the same answer; any number of 64 bits with a sign."
    )
    stop: Annotated[str, shown(maxLength=1024)] | StopTexts | None = said(
        f"{STOPS} That of a special token ends it only with `skip_special_tokens: false`; else use `stop_token_ids`."
    )
    stop_token_ids: Annotated[Items[Token], shown(maxItems=256)] | None = said("Tokens that end the answer.")
    no_stop_trim: bool | None = said("SGLang's name for `include_stop_str_in_output`.")
    logit_bias: Annotated[Named[Annotated[float, shown(minimum=-100, maximum=100)]], _IDS] | None = said(
        "Added to logits, by token id."
    )
    allowed_token_ids: Annotated[Items[Token], shown(minItems=1)] | None = said(
        "No other token is generated. With `min_tokens`, a token that ends the answer stays allowed if no other is."
    )
    bad_words: Annotated[Items[Annotated[str, shown(pattern=r"\S")]], shown(maxItems=MAX_BAD_WORDS)] | None = said(
        "Texts whose token sequences are not generated: of the text itself, and of the text after a space. Other "
        f"tokenisations of it are possible. At most {MAX_BAD_WORDS}, with {MAX_BAD_CHARACTERS:,} characters, a request."
    )
    json_schema: Schema = None
    regex: Regex = None
    ebnf: Grammar = None
    structural_tag: Any = said(
        "SGLang's: forms that hold between tags.", anyOf=[_SOME_TEXT, {"type": "object"}, ASKS_NOTHING]
    )


class SamplingFields(Sampling, RequestFields):
    """The fields that completions, chats and responses share."""

    min_tokens: MinTokens = None
    include_stop_str_in_output: bool | None = said("Keep the stop text in the answer.")
    truncate_prompt_tokens: Keep = None
    stream: Stream = None
    stream_options: StreamOptions | None = said("What a stream says beside its tokens.")
    user: User = None
    rid: RequestName | None = said("The request's name, instead of the `X-Request-Id` header.")
    guided_json: Schema = None
    guided_regex: Regex = None
    guided_choice: Any = said(
        "The output is one of these texts.", anyOf=[{"type": "array", "items": TEXT, "minItems": 1}, ASKS_NOTHING]
    )
    guided_grammar: Grammar = None
    structured_outputs: Any = said(
        "vLLM's: one of `json`, `regex`, `choice`, `grammar`, `structural_tag`, `json_object`.",
        anyOf=[{"type": "object"}, ASKS_NOTHING],
    )
    logits_processors: Refused = None
    lora_path: LoraPath = None


class GeneratingFields(SamplingFields):
    """The fields that completions and chats share, and responses have by other names or not at all."""

    max_tokens: UpToContext | None = said(
        "The most output tokens. Without it: what the context leaves; in completions at most 16."
    )
    prompt_logprobs: UpTo20 | None = said(
        "vLLM's: for each prompt token, by id, logprob, rank and text, and the same of this many most likely tokens; "
        "null for the first. Not in a stream."
    )
    return_token_ids: bool | None = said("Choices carry the ids of their tokens.")
    return_tokens_as_token_ids: bool | None = said(
        "vLLM's: logprobs name a token `token_id:N` instead of by its text, which two tokens may share."
    )
    response_format: Annotated[Object, WithJsonSchema(_FORMAT)] | None = said(
        "`type`: `text`, `json_object`, `json_schema`, or SGLang's `regex`, `grammar`, `structural_tag`; beside it the "
        "schema, pattern or grammar."
    )


class CompletionRequest(GeneratingFields):
    """The body of a request for text completions."""

    model_config = body_like(
        {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}, one_of=("prompt",)
    )

    prompt: Prompts | None = said("Text or token ids, or a list of these: one answer for each.")
    best_of: int | None = said("Accepted where it equals `n`.")
    echo: bool | None = said("Put the prompt before the output.")
    logprobs: UpTo20 | None = said("Logprobs of each output token, and of this many most likely ones.")
    suffix: Annotated[str, shown(maxLength=0)] | None = said(
        "Only the empty string: text after the completion is not supported."
    )
    add_special_tokens: bool | None = said("false: the tokenizer adds no special tokens to a prompt that is text.")


class TemplateFields(WireType):
    """The fields of a chat that go into its prompt beside the messages."""

    tools: Tools | None = said(TOOLS)
    tool_choice: ToolChoice | None = said(TOOL_CHOICE)
    functions: Any = said(f"The old form of `tools`. {REFUSED}", enum=NOTHING)
    function_call: Any = said(f"The old form of `tool_choice`. {REFUSED}", enum=[None, "none", "auto"])
    reasoning_effort: str | None = said("A variable for the chat template.")
    chat_template_kwargs: TemplateVariables = None
    add_generation_prompt: bool | None = said(
        "false: the prompt does not end with the beginning of the assistant's turn."
    )
    continue_final_message: bool | None = said("The last message is the beginning of the answer, which continues it.")


class ChatRequest(TemplateFields, GeneratingFields):
    """The body of a request for chat completions."""

    model_config = body_like({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8})

    messages: Conversation = about(CONVERSATION)
    max_completion_tokens: UpToContext | None = said("OpenAI's newer name for `max_tokens`.")
    logprobs: bool | None = said("Logprobs of each output token.")
    top_logprobs: TopLogprobs = None
    parallel_tool_calls: SingleCall = None
    separate_reasoning: bool | None = said("SGLang's; false: reasoning is part of the text, with its tags.")
    include_reasoning: bool | None = said("vLLM's; false: reasoning is left out of the answer.")
    modalities: Annotated[Items[Annotated[str, shown(const="text")]], shown(minItems=1, maxItems=1)] | None = said(
        'Only `["text"]`.'
    )


class BatchRequest(WireType):
    """The body of /v1/batches: a file to be run."""

    model_config = body_like(
        {"input_file_id": "file-0123", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    )

    input_file_id: str = about("The file with a request on each line; its purpose is `batch`.")
    endpoint: str = about(f"That of all its lines: {', '.join(f'`{each}`' for each in ENDPOINTS)}.")
    completion_window: str = about("How long it may take, as `24h`, `30m`; at most `7d`. Then it expires.")
    metadata: dict[str, str] | None = said("Shown with the batch.")


class TokenizeRequest(TemplateFields):
    """The body of /tokenize: a prompt or a chat."""

    model_config = body_like({"messages": [{"role": "user", "content": "Hello"}]}, one_of=("prompt", "messages"))

    model: Model = None
    prompt: str | Few[str] | None = said("Text, or texts.")
    messages: Conversation | None = said(CONVERSATION)
    add_special_tokens: bool | None = said("false: the tokenizer adds no special tokens to a prompt that is text.")
    return_texts: bool | None = said("Also the text that each token adds.")


class DetokenizeRequest(WireType):
    """The body of /detokenize: token ids, or lists of them."""

    model_config = body_like({"tokens": [19, 20]})
    max_values = MAX_DETOKENIZED + MAX_CONTAINERS

    model: Model = None
    tokens: Items[AnyToken] | Items[Many[AnyToken]] = about("Token ids, or lists of them.")
    skip_special_tokens: bool | None = said("false: special tokens appear in the text.")


class NativeSampling(Sampling):
    """The field ``sampling_params`` of /generate."""

    max_new_tokens: UpToContext | None = said(
        "The most output tokens. Without it: what the context leaves, at most 128."
    )
    min_new_tokens: UpToContext | None = said("No token ends the answer before this many; a `stop` text may.")
    sampling_seed: Seed | None = said("SGLang's name for `seed`.")
    truncate: KeptTokens | None = said("TGI's name for `truncate_prompt_tokens`.")
    do_sample: bool | None = said("TGI's; false: the most likely token.")
    stop_regex: Refused = None
    custom_params: Refused = None


class NativeRequest(RequestFields):
    """The body of /generate, in SGLang's form."""

    model_config = body_like(
        {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 8}},
        one_of=("text", "input_ids", "inputs"),
    )

    rid: RequestName | Items[RequestName] | None = said(
        "The request's name, instead of the `X-Request-Id` header; of a batch, one for each prompt."
    )
    text: str | Items[str] | None = said("The prompt, or a list of prompts.")
    input_ids: TokenRow | Many[TokenRow] | None = said("The prompt as token ids, or a list of prompts.")
    inputs: str | None = said("TGI's name for `text`.")
    sampling_params: NativeSampling | Annotated[Items[NativeSampling], Field(max_length=MAX_PROMPTS)] | None = said(
        "How tokens are chosen and when to stop: one object, or one for each prompt."
    )
    parameters: NativeSampling | None = said("TGI's name for `sampling_params`.")
    truncate_prompt_tokens: Keep = None
    return_logprob: bool | Items[bool] | None = said(
        "Logprobs of the output, and of the prompt from `logprob_start_len` on."
    )
    logprob_start_len: int | Items[int] | None = said(
        "Index of the prompt's first token that gets a logprob; -1: none."
    )
    top_logprobs_num: Annotated[int, shown(minimum=0, maximum=20)] | Items[int] | None = said(
        "Also of this many most likely tokens in its place."
    )
    return_text_in_logprobs: bool | None = said("Logprobs carry the tokens' texts.")
    stream: Stream = None
    extra_key: ExtraKey = None
    input_embeds: Refused = None
    image_data: Refused = None
    audio_data: Refused = None
    token_ids_logprob: Refused = None
    lora_path: str | Items[str | None] | None = said(f"{LORA_PATH} Of a batch, one for each prompt.")
    session_params: Refused = None


class MemoryRequest(WireType):
    """The body of /release_memory_occupation and /resume_memory_occupation."""

    model_config = body_like({"tags": ["kv_cache"]})

    tags: list[Literal["kv_cache", "weights"]] | None = said("The parts of the memory; all where none is named.")


class LoadAdapterRequest(WireType):
    """The body of /v1/load_lora_adapter: a name, and the folder that it is to stand for."""

    model_config = body_like({"lora_name": "poet", "lora_path": "/adapters/poet"})

    lora_name: Annotated[str, shown(pattern=ADAPTER_NAME, maxLength=LONGEST_NAME)] = about(
        "The name by which requests ask for it."
    )
    lora_path: str = about("A folder below `adapters.roots`: absolute, or relative to one of them.")
    load_inplace: bool | None = said("The name may stand for something already, which new requests no longer get.")
    pinned: Refused = None
    is_3d_lora_weight: Refused = None


class UnloadAdapterRequest(WireType):
    """The body of /v1/unload_lora_adapter: the name that is to stand for nothing."""

    model_config = body_like({"lora_name": "poet"})

    lora_name: str = about("A name that was loaded.")


class SnapshotRequest(WireType):
    """The body of /snapshot_request: one choice of a request that runs."""

    model_config = body_like({"rid": "my-request"})

    rid: str = about("The request's name.")
    index: int | None = said("The choice, where the request asked for several; 0 by default.")


class AbortRequest(WireType):
    """The body of /abort_request: one request, or all."""

    model_config = body_like({"rid": "my-request"})

    rid: str | None = said("The request's name.")
    abort_all: bool | None = said("Abort every request; needs the admin key once any key exists.")
