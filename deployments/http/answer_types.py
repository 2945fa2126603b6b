"""The answers of the HTTP routes, as /openapi.json describes them.

Owns:   the form that clients may count on. An answer may have more fields than are named here.
Never:  makes an answer: the routes write theirs as they go, and the tests hold them to these types.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None = Field(description="The field of the request that is wrong, where it is one.")
    code: str | int | None


class Error(Answer):
    """Every error of this server, also as an event in a stream that has begun."""

    object: Literal["error"]
    message: str
    error: ErrorDetail


class PromptTokensDetails(Answer):
    cached_tokens: int = Field(description="Prompt tokens that were not computed again.")


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


FinishReason = Literal["stop", "length", "abort"]


class Choice(Answer):
    index: int
    finish_reason: FinishReason | None = Field(description="null until the choice ends.")
    matched_stop: int | str | None = Field(description="The stop string or token that ended it.")
    token_ids: list[int] = Field(default=[], description="With return_token_ids.")


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[int]


class PromptLogprob(Answer):
    logprob: float | None
    rank: int | None
    decoded_token: str


# With the field of this name: by token id, for each token of the prompt; null for the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs = []


class OpenAIAnswer(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str | None


class Completion(OpenAIAnswer):
    """Also a chunk of a stream: its choices hold what is new, and usage only what was asked for."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenLogprob(Answer):
    token: str
    logprob: float | None
    bytes: list[int] | None


class TopLogprobs(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[TopLogprobs]


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str


class ChatDelta(Answer):
    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChunkChoice(Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatCompletion(OpenAIAnswer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = []


class ChatCompletionChunk(OpenAIAnswer):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice] = Field(description="Empty in the last chunk, with stream_options.include_usage.")
    usage: Usage | None = None


class NativeFinish(Answer):
    type: FinishReason
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class MetaInfo(Answer):
    id: str
    finish_reason: NativeFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int
    weight_version: str
    e2e_latency: float = Field(description="Seconds.")
    input_token_logprobs: list[list[Any]] = Field(default=[], description="[logprob, token id, text or null] each.")
    output_token_logprobs: list[list[Any]] = []
    input_top_logprobs: list[list[list[Any]] | None] = []
    output_top_logprobs: list[list[list[Any]] | None] = []


class Generated(Answer):
    """In a stream text and ids are those of all that was generated so far."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    generated_text: str | None = None


class Tokens(Answer):
    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int


class Text(Answer):
    prompt: str | list[str]
    text: str | list[str]


class TokenizerInfo(Answer):
    tokenizer_path: str
    vocab_size: int
    eos_token: str | None
    eos_token_id: int | None
    eos_token_ids: list[int]
    bos_token: str | None
    pad_token: str | None
    chat_template: str | None = Field(description="The Jinja source.")
    max_model_len: int


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class Models(Answer):
    object: Literal["list"]
    data: list[Model]


class ModelInfo(Answer):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool
    preferred_sampling_params: dict[str, Any] | None
    weight_version: str
    disaggregation_mode: str
    model_type: str
    architectures: list[str]
    max_model_len: int
    vocab_size: int


class ServerInfo(Answer):
    """The settings as given, this router, and each replica's state."""

    version: str
    startup_time: float
    uptime_s: float
    model_path: str
    tokenizer_path: str
    served_model_name: str
    context_length: int
    router: dict[str, Any]
    num_retries: int
    recent_retries: list[dict[str, Any]]
    internal_states: list[dict[str, Any]]


class Health(Answer):
    status: Literal["ok"]
    replicas_ready: int


class Version(Answer):
    version: str


class Aborted(Answer):
    success: bool
    num_aborted: int


class RouteDecision(Answer):
    replica: str
    policy: str
    reason: str
    num_tokens: int
    predicted: dict[str, Any]
    best_overlap: dict[str, Any]
    candidates: list[dict[str, Any]]


class RouteExplanation(RouteDecision):
    dry_run: Literal[True]
    router: str
    explanation: str


class RouteTry(RouteDecision):
    sentence: str
    actual: dict[str, Any]
    outcome: str
    failure: str | None


class RouteRecord(Answer):
    rid: str
    internal_rid: str
    router: str
    time: float
    replica: str
    outcome: str
    total_s: float | None
    stages: dict[str, float] | None
    num_retries: int
    tries: list[RouteTry]
    explanation: str
