"""The bodies of the native API (SGLang's ``/generate`` and its neighbours); ``inputs`` and ``parameters`` are TGI's."""

from typing import Annotated, Any

from pydantic import Field

from deployments.http.body import MAX_PROMPTS, Items, Named, WireType


class NativeSampling(WireType):
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
    rid: str | Items[str] | None = None
    text: str | Items[str] | None = None
    input_ids: Items[int] | Items[Items[int]] | None = None
    inputs: str | None = None
    sampling_params: NativeSampling | Annotated[Items[NativeSampling], Field(max_length=MAX_PROMPTS)] | None = None
    parameters: NativeSampling | None = None
    truncate_prompt_tokens: int | None = None  # the last so many tokens of each prompt; -1: as many as fit
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


class AbortRequest(WireType):
    rid: str | None = None
    abort_all: bool | None = None
