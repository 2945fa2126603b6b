"""The answers of the HTTP routes, as /openapi.json describes them.

Owns:   the fields that clients may rely on, and their meanings. An answer may have more fields than these.
Never:  makes an answer: the routes write theirs, and the tests compare them with these types, and OpenAI's with the
        types of its library.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class AnswerBody(BaseModel):
    """The base of all JSON answers, which may have more fields than are named."""

    model_config = ConfigDict(protected_namespaces=())


Id = Annotated[str, Field(description="The answer's id; holds the request's name.")]
Index = Annotated[int, Field(description="Place in the list.")]
ModelName = Annotated[str, Field(description="The served model.")]
ContextLen = Annotated[int, Field(description="Most tokens of prompt and output together.")]
PromptTokens = Annotated[int, Field(description="Tokens of the prompt.")]
OutputTokens = Annotated[int, Field(description="Tokens of the output.")]
TotalTokens = Annotated[int, Field(description="Both.")]
Logprob = Annotated[float | None, Field(description="Natural logarithm of its probability.")]
UnixTime = Annotated[int, Field(description="Seconds since 1970.")]
ErrorText = Annotated[str, Field(description="What is wrong, and what would be right.")]
TokenizerPath = Annotated[str, Field(description="Folder or hub id of the tokenizer.")]


class ErrorDetailBody(AnswerBody):
    """The error in OpenAI's form, inside an error's body."""

    message: ErrorText
    type: str = Field(description="`invalid_request_error`, `rate_limit_error`, ...")
    param: str | None = Field(description="The field of the request that is wrong, if it is a single one.")
    code: str | int | None = Field(description="A word such as `context_length_exceeded`, or the status.")


class ErrorBody(AnswerBody):
    """The body of every error, also as an event in a stream that has begun."""

    object: Literal["error"]
    message: ErrorText
    error: ErrorDetailBody = Field(description="What went wrong.")


class PromptTokensDetailsBody(AnswerBody):
    """How many prompt tokens came from the cache."""

    cached_tokens: int = Field(description="Prompt tokens that were not computed again.")


class CompletionTokensDetailsBody(AnswerBody):
    """How many output tokens were reasoning."""

    reasoning_tokens: int = Field(description="Tokens of the output that were reasoning.")


class UsageBody(AnswerBody):
    """The tokens that a request has used."""

    prompt_tokens: PromptTokens
    completion_tokens: OutputTokens
    total_tokens: TotalTokens
    prompt_tokens_details: PromptTokensDetailsBody
    completion_tokens_details: CompletionTokensDetailsBody


FinishReason = Literal["stop", "length", "abort"]
ChoiceReason = Literal["stop", "length", "abort", "tool_calls"]


class ChoiceBody(AnswerBody):
    """What every choice of an answer has."""

    index: Index
    finish_reason: ChoiceReason | None = Field(description="null until the choice ends.")
    matched_stop: int | str | None = Field(description="The stop string or token that ended it.")
    token_ids: list[int] = Field(default=[], description="With return_token_ids.")


class CompletionLogprobsBody(AnswerBody):
    """The log probabilities of a text completion, token by token."""

    tokens: list[str] = Field(
        description="Texts of the tokens. The part of a character, and a second token of one text, is `bytes:` and its "
        "bytes, as `bytes:\\xe6\\xbc`."
    )
    token_logprobs: list[float | None] = Field(description="Natural logarithm of each one's probability.")
    top_logprobs: list[dict[str, float | None] | None] | None = Field(
        description="The most likely tokens in its place."
    )
    text_offset: list[int] = Field(
        description="In characters; a token that begins inside a character has the character's place."
    )


class PromptLogprobBody(AnswerBody):
    """The log probability of one prompt token."""

    logprob: Logprob
    rank: int | None
    decoded_token: str


# For each token of the prompt: token id -> its logprob; null for the first token.
PromptLogprobs = list[dict[str, PromptLogprobBody] | None]


class CompletionChoiceBody(ChoiceBody):
    """One choice of a text completion."""

    text: str = Field(description="The new text, or all of it.")
    logprobs: CompletionLogprobsBody | None = Field(description="With `logprobs`.")
    prompt_logprobs: PromptLogprobs = Field(default=[], description="With `prompt_logprobs`: by token id.")


class OpenAIAnswerBody(AnswerBody):
    """What every answer in OpenAI's form has."""

    id: Id
    created: UnixTime
    model: ModelName
    system_fingerprint: str | None = Field(description="Always null.")


class CompletionBody(OpenAIAnswerBody):
    """A text completion, or a chunk of a stream: its choices hold the new part, and usage is there if requested."""

    object: Literal["text_completion"]
    choices: list[CompletionChoiceBody]
    usage: UsageBody | None = None


class TokenLogprobBody(AnswerBody):
    """One token and its log probability."""

    token: str = Field(description="The token's text; with return_tokens_as_token_ids `token_id:N`.")
    logprob: Logprob
    bytes: list[int] | None = Field(description="The token's bytes.")


class TopLogprobsBody(TokenLogprobBody):
    """One output token, with the most probable tokens in its place."""

    top_logprobs: list[TokenLogprobBody] = Field(description="The most likely tokens in its place.")


class ChatLogprobsBody(AnswerBody):
    """The log probabilities of a chat's choice."""

    content: list[TopLogprobsBody] = Field(description="One for each token of the output.")


class CalledFunctionBody(AnswerBody):
    """The function that a tool call names, and its arguments."""

    name: str = Field(description="The function's name.")
    arguments: str = Field(description="JSON as the model wrote it: unfinished if max_tokens cut it.")


class ToolCallBody(AnswerBody):
    """One tool call of a message."""

    id: str = Field(description="The call's id.")
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

    name: str = Field(default="", description="The function's name.")
    arguments: str = Field(description="The new part of its arguments.")


class ToolCallPartBody(AnswerBody):
    """The new part of one tool call."""

    index: Index
    id: str = Field(default="", description="In the first event of the call, as type and name.")
    type: Literal["function"] = "function"
    function: CalledFunctionPartBody


class ChatDeltaBody(AnswerBody):
    """The new part of a chat's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(default="", description="The new text, or all of it.")
    reasoning_content: str = Field(default="", description="The reasoning.")
    tool_calls: list[ToolCallPartBody] = []


class ChatChoiceBody(ChoiceBody):
    """One choice of a chat completion."""

    message: ChatMessageBody = Field(description="The answer's message.")
    logprobs: ChatLogprobsBody | None = Field(description="With `logprobs`.")


class ChunkChoiceBody(ChoiceBody):
    """One choice in an event of a streamed chat completion."""

    delta: ChatDeltaBody
    logprobs: ChatLogprobsBody | None = Field(description="With `logprobs`.")


class ChatCompletionBody(OpenAIAnswerBody):
    """The answer to a chat, whole."""

    object: Literal["chat.completion"]
    choices: list[ChatChoiceBody]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs = Field(default=[], description="With `prompt_logprobs`: by token id.")


class ChatCompletionChunkBody(OpenAIAnswerBody):
    """One event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoiceBody] = Field(description="Empty in the last chunk, with stream_options.include_usage.")
    usage: UsageBody | None = None


class ContentBlockBody(AnswerBody):
    """One content block of a message."""

    type: Literal["text", "thinking", "tool_use"] = Field(description="The kind.")
    text: str = Field(default="", description="The new text, or all of it.")
    thinking: str = Field(default="", description="The reasoning.")
    signature: str = Field(default="", description="Always empty.")
    id: str = Field(default="", description="Of a tool_use, as its name and input.")
    name: str = Field(default="", description="The function's name.")
    input: dict[str, Any] = Field(default={}, description="The call's arguments.")


class CacheCreationBody(AnswerBody):
    """The tokens that were put into the cache, by how long they were asked to be kept."""

    ephemeral_5m_input_tokens: int = Field(description="For five minutes.")
    ephemeral_1h_input_tokens: int = Field(description="For an hour.")


class MessageUsageBody(AnswerBody):
    """The tokens that a message has used; those of the prompt are input_tokens, cache_read_input_tokens and
    cache_creation_input_tokens."""

    input_tokens: int = Field(description="The rest: computed behind its last breakpoint, also what fills no page.")
    cache_read_input_tokens: int = Field(description="Prompt tokens that came from the cache, whatever its tier.")
    cache_creation_input_tokens: int = Field(
        description="Those before the last breakpoint (`cache_control`) that were computed, and are in the cache now."
    )
    cache_creation: CacheCreationBody
    output_tokens: OutputTokens


MessageReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageBody(AnswerBody):
    """An answer in Anthropic's form."""

    id: Id
    type: Literal["message"]
    role: Literal["assistant"]
    model: ModelName
    content: list[ContentBlockBody] = Field(description="The blocks of the answer.")
    stop_reason: MessageReason | None = Field(description="Why it ended; null until then.")
    stop_sequence: str | None = Field(description="The stop text that ended it.")
    usage: MessageUsageBody


class MessageEventBody(AnswerBody):
    """One event of a streamed message; the other fields are those of its type in Anthropic's documentation."""

    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ] = Field(description="The kind.")  # fmt: skip
    index: int = Field(default=0, description="Of the content block.")


class CountedTokensBody(AnswerBody):
    """The number of a prompt's tokens."""

    input_tokens: PromptTokens


class MessagesErrorDetailBody(AnswerBody):
    """What is wrong, in Anthropic's form."""

    type: str = Field(description="The kind.")
    message: ErrorText


class MessagesErrorBody(AnswerBody):
    """The body of every error under /v1/messages, also as an event in a stream that has begun."""

    type: Literal["error"]
    error: MessagesErrorDetailBody = Field(description="What went wrong.")
    request_id: str | None = Field(description="The request's name.")


class OllamaErrorBody(AnswerBody):
    """The body of every error of Ollama's routes, also as a line of a stream that has begun."""

    error: ErrorText


class OllamaAnswerBody(AnswerBody):
    """What an answer in Ollama's form has, whole or as a line of a stream; counts and durations in the last line."""

    model: ModelName
    created_at: str = Field(description="Time, as in RFC 3339.")
    done: bool = Field(description="Whether this is the last line.")
    done_reason: Literal["stop", "length", "load"] | None = Field(
        default=None, description="Why it ended; `load`: there was no prompt."
    )
    prompt_eval_count: int | None = Field(default=None, description="Tokens of the prompt.")
    eval_count: int | None = Field(default=None, description="Tokens of the output.")
    total_duration: int | None = Field(default=None, description="Nanoseconds.")
    prompt_eval_duration: int | None = Field(
        default=None, description="Nanoseconds to the first line, where there are several."
    )
    eval_duration: int | None = Field(
        default=None, description="Nanoseconds from the first line to the last; all of them where there is one line."
    )


class OllamaChatBody(OllamaAnswerBody):
    """An answer of /api/chat, or a line of it."""

    message: dict[str, Any] = Field(description="`role`, `content`, `thinking`; in the last line `tool_calls`.")


class OllamaTextBody(OllamaAnswerBody):
    """An answer of /api/generate, or a line of it."""

    response: str = Field(description="The new text, or all of it.")


class OllamaModelsBody(AnswerBody):
    """The served model and its adapters, as Ollama lists them."""

    models: list[dict[str, Any]] = Field(description="`name`, `model`, `modified_at`, `details`.")


class ResponseUsageBody(AnswerBody):
    """The tokens that a response has used."""

    input_tokens: PromptTokens
    input_tokens_details: PromptTokensDetailsBody
    output_tokens: OutputTokens
    output_tokens_details: CompletionTokensDetailsBody
    total_tokens: TotalTokens


class OutputItemBody(AnswerBody):
    """One item of a response, with the fields of its type, as OpenAI's."""

    type: Literal["message", "reasoning", "function_call"] = Field(description="The kind.")
    id: str = Field(description="The item's id.")
    status: Literal["in_progress", "completed", "incomplete"] = Field(description="How far it is.")


class ResponseBody(AnswerBody):
    """A response; it also repeats the fields of its request."""

    id: str = Field(description="The answer's id; holds the request's name, but in the background.")
    object: Literal["response"]
    created_at: UnixTime
    completed_at: int | None = Field(description="Seconds since 1970.")
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"] = Field(
        description="How far it is."
    )
    error: dict[str, Any] | None = Field(description="What went wrong.")
    incomplete_details: dict[str, Any] | None = Field(description="`reason` is max_output_tokens, or it was aborted.")
    model: ModelName
    output: list[OutputItemBody]
    usage: ResponseUsageBody | None


class DeletedResponseBody(AnswerBody):
    """What became of a response."""

    id: str = Field(description="The response's id.")
    object: Literal["response"]
    deleted: bool = Field(description="Always true.")


class FileBody(AnswerBody):
    """A file that is kept for batches."""

    id: str = Field(description="The file's id.")
    object: Literal["file"]
    bytes: int = Field(description="Its size.")
    created_at: UnixTime
    expires_at: int | None = Field(description="When it is deleted; null: it stays.")
    filename: str = Field(description="Its name, as it was uploaded.")
    purpose: str = Field(description="`batch`, `batch_output`, or as it was uploaded.")
    status: Literal["processed"]


class FileListBody(AnswerBody):
    """A page of the list of files."""

    object: Literal["list"]
    data: list[FileBody] = Field(description="The files.")
    has_more: bool = Field(description="Whether more follow behind the last one's id (`after`).")


class DeletedFileBody(AnswerBody):
    """What became of a file."""

    id: str = Field(description="The file's id.")
    object: Literal["file"]
    deleted: bool = Field(description="Always true.")


class BatchCountsBody(AnswerBody):
    """How far the lines of a batch are."""

    total: int = Field(description="Its lines.")
    completed: int = Field(description="Lines with an answer.")
    failed: int = Field(description="Lines with an entry in the error file.")


class BatchBody(AnswerBody):
    """A batch, as it is now."""

    id: str = Field(description="The batch's id.")
    object: Literal["batch"]
    endpoint: str = Field(description="That of its lines.")
    input_file_id: str = Field(description="The file with its lines.")
    completion_window: str = Field(description="How long it may take.")
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ] = Field(description="How far it is.")
    created_at: UnixTime
    expires_at: UnixTime
    output_file_id: str | None = Field(description="The file with the answers, once it has ended and there are any.")
    error_file_id: str | None = Field(description="The file with the lines that failed, likewise.")
    request_counts: BatchCountsBody = Field(description="How far its lines are.")
    metadata: dict[str, str] | None = Field(description="As it was given.")


class BatchListBody(AnswerBody):
    """A page of the list of batches."""

    object: Literal["list"]
    data: list[BatchBody] = Field(description="The batches.")
    has_more: bool = Field(description="Whether more follow behind the last one's id (`after`).")


class ResponseEventBody(AnswerBody):
    """One event of a streamed response, with the fields of its type, as OpenAI's. No [DONE] follows the last."""

    type: str = Field(description="The kind.")
    sequence_number: int = Field(description="Counts from 0.")


class ReadoutUsageBody(AnswerBody):
    """The tokens of the prompts that were read out."""

    prompt_tokens: PromptTokens
    total_tokens: int = Field(description="As `prompt_tokens`: a readout has no output.")
    prompt_tokens_details: PromptTokensDetailsBody


class ReadoutAnswerBody(AnswerBody):
    """What the answers of embeddings, scores and rerankings share."""

    model: ModelName
    usage: ReadoutUsageBody


class EmbeddingBody(AnswerBody):
    """The embedding of one text, of length 1."""

    object: Literal["embedding"]
    index: Index
    embedding: list[float] | str = Field(description="A string with encoding_format base64: little-endian float32.")


class EmbeddingsBody(ReadoutAnswerBody):
    """The embeddings of all texts, in their order."""

    object: Literal["list"]
    data: list[EmbeddingBody]


class ScoresBody(ReadoutAnswerBody):
    """The scores of each item's labels."""

    object: Literal["scoring"]
    scores: list[list[float]] = Field(description="For each item, one of each label.")


class RankedBody(AnswerBody):
    """One document; the text with return_documents."""

    index: Index
    relevance_score: float = Field(description="0 to 1.")
    document: dict[str, str] = Field(default={}, description="With `return_documents`.")


class RankingBody(ReadoutAnswerBody):
    """The documents by relevance, the most relevant first."""

    id: Id
    results: list[RankedBody]


class NativeFinishBody(AnswerBody):
    """Why a choice of /generate has ended."""

    type: FinishReason = Field(description="The kind.")
    matched: int | str | None = Field(default=None, description="The stop text or token that ended it.")
    length: int | None = Field(default=None, description="The limit that ended it.")
    message: str | None = Field(default=None, description="What is wrong, and what would be right.")


class CachedTokensBody(AnswerBody):
    """The cached tokens of a prompt by the tier that had them; they sum to ``cached_tokens``."""

    device: int = Field(description="In the replica's KV pool.")
    host: int = Field(description="Loaded from host memory.")
    storage: int = Field(description="Read from the store (setting cache.store).")


class MetaInfoBody(AnswerBody):
    """What /generate says beside the text of a choice."""

    id: Id
    finish_reason: NativeFinishBody | None
    prompt_tokens: PromptTokens
    completion_tokens: OutputTokens
    cached_tokens: int = Field(description="Prompt tokens that were not computed again.")
    cached_tokens_details: CachedTokensBody
    num_retractions: int = Field(description="How often it gave its pages back and was computed anew.")
    weight_version: str = Field(description="Always `default`.")
    e2e_latency: float = Field(description="Seconds.")
    input_token_logprobs: list[list[Any]] = Field(default=[], description="[logprob, token id, text or null] each.")
    output_token_logprobs: list[list[Any]] = Field(default=[], description="The same of the output.")
    input_top_logprobs: list[list[list[Any]] | None] = Field(
        default=[], description="Of the most likely tokens in each place."
    )
    output_top_logprobs: list[list[list[Any]] | None] = Field(default=[], description="The same of the output.")


class GeneratedBody(AnswerBody):
    """A native answer; in a stream, text and ids are cumulative."""

    text: str = Field(description="The new text, or all of it.")
    output_ids: list[int] = Field(description="Token ids of the output.")
    meta_info: MetaInfoBody
    generated_text: str | None = Field(default=None, description="TGI's name for `text`, where `inputs` was sent.")


class MemoryBody(AnswerBody):
    """Memory was given back, or is used again."""

    success: bool = Field(description="Whether it was done.")
    num_replicas: int = Field(description="How many replicas did it.")


class TokensBody(AnswerBody):
    """The token ids of a text."""

    tokens: list[int] | list[list[int]] = Field(description="Token ids.")
    count: int | list[int] = Field(description="How many.")
    texts: list[str] | list[list[str]] = Field(
        default=[], description="With return_texts: what each token adds to the text."
    )
    max_model_len: ContextLen


class IndexBody(AnswerBody):
    """The answer to clients that are not browsers, which are led to the live view (307)."""

    name: str = Field(description="Always `manta`.")
    live_view: str | None = Field(description="Path of the live view; null while none runs.")
    document: str = Field(description="Path of the OpenAPI document.")


class TextBody(AnswerBody):
    """The text of token ids."""

    prompt: str | list[str] = Field(description="The text.")
    text: str | list[str] = Field(description="The same as `prompt`.")


class TokenizerInfoBody(AnswerBody):
    """The tokenizer's vocabulary size, special tokens and chat template."""

    tokenizer_path: TokenizerPath
    vocab_size: int = Field(description="Tokens in the vocabulary.")
    eos_token: str | None = Field(description="Its text.")
    eos_token_id: int | None = Field(description="The first of `eos_token_ids`.")
    eos_token_ids: list[int] = Field(description="Every token that ends an answer.")
    bos_token: str | None = Field(description="Its text.")
    pad_token: str | None = Field(description="Its text.")
    chat_template: str | None = Field(description="The Jinja source.")
    max_model_len: ContextLen


class Model(AnswerBody):  # schemathesis finds its names for /v1/models/{name} by the name of this schema
    """One model that this server has."""

    id: str = Field(description="The model's name.")
    object: Literal["model"]
    created: UnixTime
    owned_by: str = Field(description="Always `manta`.")
    root: str = Field(description="The model's path.")
    parent: str | None = Field(description="Of an adapter: the model that it is for.")
    max_model_len: ContextLen


class Models(AnswerBody):
    """The list of served models."""

    object: Literal["list"]
    data: list[Model]


class ModelInfoBody(AnswerBody):
    """The path, lengths and type of the served model."""

    model_path: str = Field(description="Folder or hub id of the model.")
    tokenizer_path: TokenizerPath
    served_model_name: str = Field(description="The name that requests use.")
    is_generation: bool = Field(description="Always true.")
    preferred_sampling_params: dict[str, Any] | None = Field(
        description="What is meant where a request says nothing of sampling (`model.sampling_defaults`); else null."
    )
    weight_version: str = Field(description="Always `default`.")
    disaggregation_mode: str = Field(description="`null`: prefill and decode on one replica.")
    model_type: str = Field(description="As in config.json.")
    architectures: list[str] = Field(description="As in config.json.")
    max_model_len: ContextLen
    vocab_size: int = Field(description="Tokens in the vocabulary.")


class ServerInfoBody(AnswerBody):
    """The settings as given, this router, and each replica's state."""

    version: str = Field(description="Of Manta.")
    startup_time: float = Field(description="Seconds since 1970.")
    uptime_s: float = Field(description="Seconds.")
    model_path: str = Field(description="Folder or hub id of the model.")
    tokenizer_path: TokenizerPath
    served_model_name: str = Field(description="The name that requests use.")
    context_length: ContextLen
    router: dict[str, Any] = Field(description="The router that answered: its load and its index.")
    num_retries: int = Field(description="How often requests went to another replica.")
    recent_retries: list[dict[str, Any]] = Field(description="The newest of them.")
    internal_states: list[dict[str, Any]] = Field(description="For each replica: identity, pool, queues, counters.")
    not_answering: list[str] = Field(description="Ids of replicas that are in service, and did not answer in time.")


class KeyUse(AnswerBody):
    """What a key has used within a minute, at all routers."""

    requests: int = Field(description="Requests sent.")
    input_tokens: int = Field(description="Prompt tokens that no cache had; of open requests an estimate.")
    output_tokens: int = Field(description="Output tokens; of open requests an estimate, or what they have so far.")
    choices: int = Field(description="Choices that run or wait now.")


class KeyBody(AnswerBody):
    """One key of `router.keys_file`; none of its fields holds the key."""

    id: str = Field(description="Its id.")
    tenant: str = Field(description="Its tenant.")
    weight: float = Field(description="Of the tenant's share.")
    limits: dict[str, int | None] = Field(description="What it may use; null: no limit.")
    highest_priority: int = Field(description="A higher one counts as this.")
    models: list[str] | None = Field(description="The models that it may use; null: all.")
    admin: bool = Field(description="Whether it is an admin's key.")
    used: KeyUse


class KeysBody(AnswerBody):
    """All keys of `router.keys_file`, and whether the file as it is now is in force."""

    path: str | None = Field(description="The file; null: there is none.")
    error: str = Field(description="Why the file as it is now is not in force; empty if it is.")
    keys: list[KeyBody]


class HealthBody(AnswerBody):
    """The answer while replicas are ready. HAProxy gives `status` alone in the place of a router that is busy."""

    status: Literal["ok"]
    replicas_ready: int = Field(description="How many replicas take requests.")
    replicas_draining: int = Field(description="How many take none, and finish those that they have.")


class VersionBody(AnswerBody):
    """The version of this Manta."""

    version: str = Field(description="Of Manta.")


class AbortedBody(AnswerBody):
    """How many requests an abort has ended."""

    success: bool = Field(description="Whether it was done.")
    num_aborted: int = Field(description="How many requests ended.")


class AdaptersBody(AnswerBody):
    """The adapters that there are after one was loaded or unloaded."""

    success: bool = Field(description="Whether it was done.")
    loaded_adapters: dict[str, str] = Field(description="The folder of each, by name.")


class NamedAdapterBody(AnswerBody):
    """An adapter by its name."""

    name: str = Field(description="By which requests ask for it.")
    identity: str = Field(description="SHA-256 of its files when the name was given.")
    path: str = Field(description="Its folder.")
    rank: int | None = Field(description="Its rank; null where another version of Manta gave the name.")
    bytes: int | None = Field(description="Of its weights in fp32; null likewise.")
    replicas: list[str] = Field(description="Ids of the replicas that hold it.")
    requests: int | None = Field(
        description="Requests that ended at this router with it; null for names behind the first 100 that had one."
    )


class NamedAdaptersBody(AnswerBody):
    """The adapters that have names."""

    router: str = Field(description="Id of the router that counted the requests.")
    adapters: list[NamedAdapterBody]


class RouteDecisionBody(AnswerBody):
    """One routing decision, with all its candidates."""

    replica: str = Field(description="Id of the chosen replica.")
    policy: str = Field(description="The routing policy (`router.policy`).")
    reason: str = Field(description="Why this replica: [routing](routing.md).")
    num_tokens: PromptTokens
    predicted: dict[str, Any] = Field(
        description="What the router expects: cached tokens by tier, seconds to the first token."
    )
    best_overlap: dict[str, Any] = Field(
        description="The replica with the most cached tokens, and how many the choice gives up."
    )
    candidates: list[dict[str, Any]] = Field(description="Every replica that was compared, with each term of its cost.")


class RouteExplanationBody(RouteDecisionBody):
    """The decision that a request would get now."""

    dry_run: Literal[True]
    router: str = Field(description="Id of the router.")
    explanation: str = Field(description="The same for people.")


class RouteTryBody(RouteDecisionBody):
    """One try of a request, with its outcome."""

    sentence: str = Field(description="The same in a sentence.")
    actual: dict[str, Any] = Field(
        description="What came true: cached tokens, drafts (`drafted_tokens` that steps tried, and of them "
        "`accepted_tokens`), seconds to the first token, and for how many seconds (`passed_s`) others went before it, "
        "while it waited or ran, as their tenants had used less, and (`held_s`) its session waited for room beside "
        "older ones, at most `scheduler.session_wait_s`."
    )
    outcome: str = Field(description="How it ended, or `running`.")
    failure: str | None = Field(description="Why the try failed; null if it did not.")
    moved: str | None = Field(
        description="Why the request, which waited there, moved: `join`, `freed`, `silent`, `behind`; null if not."
    )


class RouteBody(AnswerBody):
    """Where a request went, and why."""

    rid: str = Field(description="The request's name.")
    internal_rid: str = Field(description="The name that replicas know it by.")
    router: str = Field(description="Id of the router.")
    time: float = Field(description="When it arrived: seconds since 1970.")
    replica: str = Field(description="Id of the chosen replica.")
    outcome: str = Field(description="How it ended, or `running`.")
    total_s: float | None = Field(description="Seconds from arrival to end.")
    stages: dict[str, float] | None = Field(description="Seconds of route, queue, prefill, transfer, decode.")
    num_retries: int = Field(description="How often it went to another replica after a failure.")
    num_moves: int = Field(description="How often it went to another replica that begins it sooner.")
    tries: list[RouteTryBody]
    explanation: str = Field(description="The same for people.")
