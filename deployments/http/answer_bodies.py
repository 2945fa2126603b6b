"""The answers of the HTTP routes, as /openapi.json describes them.

Owns:   the fields that clients may rely on. An answer may have more fields than these.
Never:  makes an answer: the routes write theirs, and the tests compare them with these types.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class AnswerBody(BaseModel):
    """The base of all JSON answers, which may have more fields than are named."""

    model_config = ConfigDict(protected_namespaces=())


class ErrorDetailBody(AnswerBody):
    message: str
    type: str
    param: str | None = Field(description="The field of the request that is wrong, if it is a single one.")
    code: str | int | None


class ErrorBody(AnswerBody):
    """The body of every error, also as an event in a stream that has begun."""

    object: Literal["error"]
    message: str
    error: ErrorDetailBody


class PromptTokensDetailsBody(AnswerBody):
    cached_tokens: int = Field(description="Prompt tokens that were not computed again.")


class CompletionTokensDetailsBody(AnswerBody):
    reasoning_tokens: int


class UsageBody(AnswerBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetailsBody
    completion_tokens_details: CompletionTokensDetailsBody


FinishReason = Literal["stop", "length", "abort"]


class ChoiceBody(AnswerBody):
    index: int
    finish_reason: FinishReason | None = Field(description="null until the choice ends.")
    matched_stop: int | str | None = Field(description="The stop string or token that ended it.")
    token_ids: list[int] = Field(default=[], description="With return_token_ids.")


class CompletionLogprobsBody(AnswerBody):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[int]


class PromptLogprobBody(AnswerBody):
    logprob: float | None
    rank: int | None
    decoded_token: str


# For each token of the prompt: token id -> its logprob; null for the first token.
PromptLogprobs = list[dict[str, PromptLogprobBody] | None]


class CompletionChoiceBody(ChoiceBody):
    text: str
    logprobs: CompletionLogprobsBody | None
    prompt_logprobs: PromptLogprobs = []


class OpenAIAnswerBody(AnswerBody):
    id: str
    created: int
    model: str
    system_fingerprint: str | None


class CompletionBody(OpenAIAnswerBody):
    """A text completion, or a chunk of a stream: its choices hold the new part, and usage is there if requested."""

    object: Literal["text_completion"]
    choices: list[CompletionChoiceBody]
    usage: UsageBody | None = None


class TokenLogprobBody(AnswerBody):
    token: str
    logprob: float | None
    bytes: list[int] | None


class TopLogprobsBody(TokenLogprobBody):
    top_logprobs: list[TokenLogprobBody]


class ChatLogprobsBody(AnswerBody):
    content: list[TopLogprobsBody]


class ChatMessageBody(AnswerBody):
    role: Literal["assistant"]
    content: str


class ChatDeltaBody(AnswerBody):
    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChoiceBody(ChoiceBody):
    message: ChatMessageBody
    logprobs: ChatLogprobsBody | None


class ChunkChoiceBody(ChoiceBody):
    delta: ChatDeltaBody
    logprobs: ChatLogprobsBody | None


class ChatCompletionBody(OpenAIAnswerBody):
    object: Literal["chat.completion"]
    choices: list[ChatChoiceBody]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs = []


class ChatCompletionChunkBody(OpenAIAnswerBody):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoiceBody] = Field(description="Empty in the last chunk, with stream_options.include_usage.")
    usage: UsageBody | None = None


class NativeFinishBody(AnswerBody):
    type: FinishReason
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class MetaInfoBody(AnswerBody):
    id: str
    finish_reason: NativeFinishBody | None
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


class GeneratedBody(AnswerBody):
    """A native answer; in a stream, text and ids are cumulative."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfoBody
    generated_text: str | None = None


class TokensBody(AnswerBody):
    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int


class TextBody(AnswerBody):
    prompt: str | list[str]
    text: str | list[str]


class TokenizerInfoBody(AnswerBody):
    tokenizer_path: str
    vocab_size: int
    eos_token: str | None
    eos_token_id: int | None
    eos_token_ids: list[int]
    bos_token: str | None
    pad_token: str | None
    chat_template: str | None = Field(description="The Jinja source.")
    max_model_len: int


class Model(AnswerBody):  # schemathesis finds its names for /v1/models/{name} by the name of this schema
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class Models(AnswerBody):
    object: Literal["list"]
    data: list[Model]


class ModelInfoBody(AnswerBody):
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


class ServerInfoBody(AnswerBody):
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


class HealthBody(AnswerBody):
    status: Literal["ok"]
    replicas_ready: int


class VersionBody(AnswerBody):
    version: str


class AbortedBody(AnswerBody):
    success: bool
    num_aborted: int


class RouteDecisionBody(AnswerBody):
    replica: str
    policy: str
    reason: str
    num_tokens: int
    predicted: dict[str, Any]
    best_overlap: dict[str, Any]
    candidates: list[dict[str, Any]]


class RouteExplanationBody(RouteDecisionBody):
    dry_run: Literal[True]
    router: str
    explanation: str


class RouteTryBody(RouteDecisionBody):
    sentence: str
    actual: dict[str, Any]
    outcome: str
    failure: str | None


class RouteBody(AnswerBody):
    rid: str
    internal_rid: str
    router: str
    time: float
    replica: str
    outcome: str
    total_s: float | None
    stages: dict[str, float] | None
    num_retries: int
    tries: list[RouteTryBody]
    explanation: str
