"""The OpenAI request bodies, with the extensions that SGLang and vLLM clients send.

Every field may be null, which means its default. Meanings and limits are `SamplingParams`' (convert.py checks them).
"""

from typing import Any

from deployments.http.body import Items, Named, WireType


class StreamOptions(WireType):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(WireType):
    """What completions and chat share."""

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
    truncate_prompt_tokens: int | None = None  # the last so many tokens of a prompt; -1: as many as fit
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
    # constraints on the output; refused unless they ask for nothing (convert.refuse_unsupported)
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
    prompt: str | Items[int] | Items[str] | Items[Items[int]] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None  # to a prompt that is text


class ChatRequest(SamplingFields):
    messages: Items[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Items[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None  # a variable for the template


class TokenizeRequest(WireType):
    model: str | None = None
    prompt: str | Items[str] | None = None
    messages: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
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
    model: str | None = None
    tokens: Items[int] | Items[Items[int]]
    skip_special_tokens: bool | None = None
