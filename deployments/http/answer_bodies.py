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
    """The error in OpenAI's form, inside an error's body."""

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
    """How many prompt tokens came from the cache."""

    cached_tokens: int = Field(description="Prompt tokens that were not computed again.")


class CompletionTokensDetailsBody(AnswerBody):
    """How many output tokens were reasoning."""

    reasoning_tokens: int


class UsageBody(AnswerBody):
    """The tokens that a request has used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetailsBody
    completion_tokens_details: CompletionTokensDetailsBody


FinishReason = Literal["stop", "length", "abort"]
ChoiceReason = Literal["stop", "length", "abort", "tool_calls"]


class ChoiceBody(AnswerBody):
    """What every choice of an answer has."""

    index: int
    finish_reason: ChoiceReason | None = Field(description="null until the choice ends.")
    matched_stop: int | str | None = Field(description="The stop string or token that ended it.")
    token_ids: list[int] = Field(default=[], description="With return_token_ids.")


class CompletionLogprobsBody(AnswerBody):
    """The log probabilities of a text completion, token by token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None
    text_offset: list[int]


class PromptLogprobBody(AnswerBody):
    """The log probability of one prompt token."""

    logprob: float | None
    rank: int | None
    decoded_token: str


# For each token of the prompt: token id -> its logprob; null for the first token.
PromptLogprobs = list[dict[str, PromptLogprobBody] | None]


class CompletionChoiceBody(ChoiceBody):
    """One choice of a text completion."""

    text: str
    logprobs: CompletionLogprobsBody | None
    prompt_logprobs: PromptLogprobs = []


class OpenAIAnswerBody(AnswerBody):
    """What every answer in OpenAI's form has."""

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
    """One token and its log probability."""

    token: str
    logprob: float | None
    bytes: list[int] | None


class TopLogprobsBody(TokenLogprobBody):
    """One output token, with the most probable tokens in its place."""

    top_logprobs: list[TokenLogprobBody]


class ChatLogprobsBody(AnswerBody):
    """The log probabilities of a chat's choice."""

    content: list[TopLogprobsBody]


class CalledFunctionBody(AnswerBody):
    """The function that a tool call names, and its arguments."""

    name: str
    arguments: str = Field(description="JSON as the model wrote it: unfinished if max_tokens cut it.")


class ToolCallBody(AnswerBody):
    """One tool call of a message."""

    id: str
    type: Literal["function"]
    function: CalledFunctionBody


class ChatMessageBody(AnswerBody):
    """The message of a chat's choice."""

    role: Literal["assistant"]
    content: str | None = Field(description="null where there are only tool calls.")
    reasoning_content: str = Field(default="", description="What the model thought before it answered.")
    tool_calls: list[ToolCallBody] = []


class CalledFunctionPartBody(AnswerBody):
    """The name, in the first event of a tool call, or some of its arguments."""

    name: str = ""
    arguments: str


class ToolCallPartBody(AnswerBody):
    """The new part of one tool call."""

    index: int
    id: str = Field(default="", description="In the first event of the call, as type and name.")
    type: Literal["function"] = "function"
    function: CalledFunctionPartBody


class ChatDeltaBody(AnswerBody):
    """The new part of a chat's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallPartBody] = []


class ChatChoiceBody(ChoiceBody):
    """One choice of a chat completion."""

    message: ChatMessageBody
    logprobs: ChatLogprobsBody | None


class ChunkChoiceBody(ChoiceBody):
    """One choice in an event of a streamed chat completion."""

    delta: ChatDeltaBody
    logprobs: ChatLogprobsBody | None


class ChatCompletionBody(OpenAIAnswerBody):
    """The answer to a chat, whole."""

    object: Literal["chat.completion"]
    choices: list[ChatChoiceBody]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs = []


class ChatCompletionChunkBody(OpenAIAnswerBody):
    """One event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoiceBody] = Field(description="Empty in the last chunk, with stream_options.include_usage.")
    usage: UsageBody | None = None


class ContentBlockBody(AnswerBody):
    """One content block of a message."""

    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = Field(default="", description="Of a tool_use, as its name and input.")
    name: str = ""
    input: dict[str, Any] = {}


class MessageUsageBody(AnswerBody):
    """The tokens that a message has used; input_tokens and cache_read_input_tokens sum to the prompt's."""

    input_tokens: int = Field(description="Prompt tokens that were computed.")
    cache_read_input_tokens: int = Field(description="Prompt tokens that came from the cache.")
    cache_creation_input_tokens: int
    output_tokens: int


class MessageBody(AnswerBody):
    """An answer in Anthropic's form."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlockBody]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessageUsageBody


class MessageEventBody(AnswerBody):
    """One event of a streamed message; the other fields are those of its type in Anthropic's documentation."""

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    index: int = Field(default=0, description="Of the content block.")


class CountedTokensBody(AnswerBody):
    """The number of a prompt's tokens."""

    input_tokens: int


class MessagesErrorDetailBody(AnswerBody):
    """What is wrong, in Anthropic's form."""

    type: str
    message: str


class MessagesErrorBody(AnswerBody):
    """The body of every error under /v1/messages, also as an event in a stream that has begun."""

    type: Literal["error"]
    error: MessagesErrorDetailBody
    request_id: str | None


class ResponseUsageBody(AnswerBody):
    """The tokens that a response has used."""

    input_tokens: int
    input_tokens_details: PromptTokensDetailsBody
    output_tokens: int
    output_tokens_details: CompletionTokensDetailsBody
    total_tokens: int


class OutputItemBody(AnswerBody):
    """One item of a response, with the fields of its type, as OpenAI's."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseBody(AnswerBody):
    """A response; it also repeats the fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None = Field(description="`reason` is max_output_tokens, or it was aborted.")
    model: str
    output: list[OutputItemBody]
    usage: ResponseUsageBody | None


class ResponseEventBody(AnswerBody):
    """One event of a streamed response, with the fields of its type, as OpenAI's. No [DONE] follows the last."""

    type: str
    sequence_number: int


class ReadoutUsageBody(AnswerBody):
    """The tokens of the prompts that were read out."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetailsBody


class ReadoutAnswerBody(AnswerBody):
    """What the answers of embeddings, scores and rerankings share."""

    model: str
    usage: ReadoutUsageBody


class EmbeddingBody(AnswerBody):
    """The embedding of one text, of length 1."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="A string with encoding_format base64: little-endian float32.")


class EmbeddingsBody(ReadoutAnswerBody):
    """The embeddings of all texts, in their order."""

    object: Literal["list"]
    data: list[EmbeddingBody]


class ScoresBody(ReadoutAnswerBody):
    """The scores of each item's labels."""

    object: Literal["scoring"]
    scores: list[list[float]]


class RankedBody(AnswerBody):
    """One document; the text with return_documents."""

    index: int
    relevance_score: float
    document: dict[str, str] = {}


class RankingBody(ReadoutAnswerBody):
    """The documents by relevance, the most relevant first."""

    id: str
    results: list[RankedBody]


class NativeFinishBody(AnswerBody):
    """Why a choice of /generate has ended."""

    type: FinishReason
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class CachedTokensBody(AnswerBody):
    """The cached tokens of a prompt by the tier that had them; they sum to ``cached_tokens``."""

    device: int
    host: int = Field(description="Loaded from host memory.")
    storage: int = Field(description="Read from the store (setting cache.store).")


class MetaInfoBody(AnswerBody):
    """What /generate says beside the text of a choice."""

    id: str
    finish_reason: NativeFinishBody | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = Field(description="Prompt tokens that were not computed again.")
    cached_tokens_details: CachedTokensBody
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


class MemoryBody(AnswerBody):
    """Memory was given back, or is used again."""

    success: bool
    num_replicas: int


class TokensBody(AnswerBody):
    """The token ids of a text."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    texts: list[str] | list[list[str]] = Field(
        default=[], description="With return_texts: what each token adds to the text."
    )
    max_model_len: int


class IndexBody(AnswerBody):
    """The answer to clients that are not browsers, which are led to the live view (307)."""

    name: str
    live_view: str | None = Field(description="Path of the live view; null while none runs.")
    document: str


class TextBody(AnswerBody):
    """The text of token ids."""

    prompt: str | list[str]
    text: str | list[str]


class TokenizerInfoBody(AnswerBody):
    """The tokenizer's vocabulary size, special tokens and chat template."""

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
    """One model that this server has."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class Models(AnswerBody):
    """The list of served models."""

    object: Literal["list"]
    data: list[Model]


class ModelInfoBody(AnswerBody):
    """The path, lengths and type of the served model."""

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
    """The answer while replicas are ready."""

    status: Literal["ok"]
    replicas_ready: int


class VersionBody(AnswerBody):
    """The version of this Manta."""

    version: str


class AbortedBody(AnswerBody):
    """How many requests an abort has ended."""

    success: bool
    num_aborted: int


class RouteDecisionBody(AnswerBody):
    """One routing decision, with all its candidates."""

    replica: str
    policy: str
    reason: str
    num_tokens: int
    predicted: dict[str, Any]
    best_overlap: dict[str, Any]
    candidates: list[dict[str, Any]]


class RouteExplanationBody(RouteDecisionBody):
    """The decision that a request would get now."""

    dry_run: Literal[True]
    router: str
    explanation: str


class RouteTryBody(RouteDecisionBody):
    """One try of a request, with its outcome."""

    sentence: str
    actual: dict[str, Any]
    outcome: str
    failure: str | None


class RouteBody(AnswerBody):
    """Where a request went, and why."""

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
