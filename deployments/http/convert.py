"""Converts request bodies to `GenerateRequest`: defaults, aliases, and the refusal of unsupported fields by name.

Owns:      the meaning of an absent field on each API.
Never:     ignores a field that would change the answer (beam search, say): it refuses it.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from starlette.requests import HTTPConnection, Request

from deployments.http.access import caller_of
from deployments.http.bodies import (
    MAX_BAD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_PROMPTS,
    NOTHING,
    GeneratingFields,
    NativeSampling,
    RequestFields,
    Sampling,
    SamplingFields,
    WireType,
)  # fmt: skip
from deployments.http.service import Service, service_of
from deployments.record.rids import new_rid
from replicas.errors import InvalidRequest, PromptTooLong, UnknownModel
from replicas.types import (
    AdapterRef,
    Constraint,
    GenerateRequest,
    SamplingParams,
    TokenIds,
    check_prompt_logprobs,
    client_fields,
    to_token_ids,
)

T = TypeVar("T")
MAX_CHOICES = 512  # of all prompts of one HTTP request: about half of a replica's waiting queue
_FIELD = re.compile(r"^\w+|\bm(?:ax|in)_tokens\b")  # what `GenerateRequest.validate` calls a field, in its message
# Fields of OpenAI's, vLLM's, SGLang's and TGI's requests that would change the answer and are not supported. Each is
# refused unless it is null, false, empty, or its neutral value (at the end).
_NOT_DONE: dict[str, Any] = dict.fromkeys((
    # constraints on the output that are not those of its form
    "stop_regex", "repetition_detection", "thinking_token_budget",
    # other ways to choose tokens
    "logits_processors", "logits_processor", "custom_logit_processor", "custom_params", "vllm_xargs",
    "use_beam_search", "typical_p", "watermark", "token_ids_logprob",
    # other weights or another prompt
    "lora_path", "lora_request", "adapter_id", "chat_template", "documents", "session_params", "web_search_options",
    "input_embeds", "prompt_embeds", "image_data", "video_data", "audio_data", "mm_processor_kwargs", "media_io_kwargs",
    # other parts of the answer
    "return_hidden_states", "return_routed_experts", "return_entropy", "return_bytes", "return_tokens_as_token_ids",
    "decoder_input_details", "top_n_tokens", "details", "return_full_text",
    # KV transfers between servers that a router other than ours arranges
    "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
)) | {"typical_p": 1.0}  # fmt: skip
# fields that ask for a form of the output (constraints.py)
FORM_FIELDS = (
    "response_format", "structured_outputs", "regex", "ebnf", "json_schema", "structural_tag", "grammar",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip


class Masks(NamedTuple):
    """The tokens that a request may or must not generate, in the form of `SamplingParams`."""

    allowed_token_ids: tuple[int, ...] | None
    bad_words: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request asks of all its prompts: from each, and what is wanted of it, it makes a request.

    body ─> prompt ─`fit`─> ids and the most output tokens ─> what is wanted: `SamplingParams` ─`request`─> checked
    """

    http: Request
    name: str  # of the requests
    adapter: AdapterRef | None = None
    cache_salt: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)  # of `GenerateRequest`, as clients ask for them
    names: Mapping[str, str] = field(default_factory=dict)  # this route's for ``prompt``, max_tokens and min_tokens

    @staticmethod
    async def of(http: Request, body: RequestFields, name: str, **names: str) -> "Job":
        """Read ``body``. Raises: InvalidRequest; UnknownModel; Overloaded."""
        return Job(
            http=http,
            name=name,
            adapter=await asked_adapter(http, body.model, getattr(body, "lora_path", None)),
            cache_salt=salt_of(body.cache_salt),
            fields=asked_of(GenerateRequest, body, http.headers),
            names=names,
        )

    @property
    def service(self) -> Service:
        return service_of(self.http)

    @property
    def model(self) -> str:
        """The name of what answers."""
        return self.service.model.name if self.adapter is None else self.adapter.name

    def fit(
        self,
        ids: TokenIds,
        keep: int | None = None,
        given: int | None = None,
        default: int | None = None,
        *,
        param: str = "truncate_prompt_tokens",
    ) -> tuple[TokenIds, int]:
        """Keep the last ``keep`` tokens of a prompt (-1: as many as leave room for the output; None: all), and choose
        its most output tokens: as ``given``, else ``default``, or less if the context has less room, the model's or
        what the caller's key may use of it.

        Raises: InvalidRequest or PromptTooLong, naming the field.
        """
        model_len, of_key = self.service.model.context_len, self._context_of_key
        longest = model_len if of_key is None else min(model_len, of_key)
        most = default if given is None else given
        if keep == -1:
            keep = max(longest - max(1 if most is None else most, 0), 1)
        if keep is not None and not 0 < keep <= model_len:
            raise InvalidRequest(
                f"{param}: must be -1, or between 1 and the context of {model_len} tokens, got {keep}", param=param
            )
        ids = ids if keep is None else ids[-keep:]
        left = max(longest - len(ids), 1)  # a prompt that leaves none is refused
        limit = given if given is not None else left if default is None else min(default, left)
        self._check_length(len(ids), limit)
        return ids, limit

    def request(self, ids: TokenIds, sampling: SamplingParams, **own: Any) -> GenerateRequest:
        """Make the request for a prompt that fits. Raises: InvalidRequest, naming the field.

        Args: own: fields that this prompt has otherwise than the others, or which only this route sets.
        """
        common = {"rid": new_rid(self.name), "adapter": self.adapter, "cache_salt": self.cache_salt, **self.fields}
        made = GenerateRequest(**{**common, **own}, token_ids=ids, sampling=sampling)
        try:
            made.validate(vocab_size=self.service.model.vocab_size)
        except InvalidRequest as error:
            text = _FIELD.sub(lambda found: self.names.get(found[0], found[0]), str(error))
            raise InvalidRequest(text, param=self.names.get(error.param or "", error.param)) from error
        return made

    @property
    def _context_of_key(self) -> int | None:
        key = caller_of(self.http).key
        return None if key is None else key.limits.context

    def _check_length(self, prompt_len: int, limit: int) -> None:
        service, of_key = self.service, self._context_of_key
        prompt, output = self.names.get("prompt", "prompt"), self.names.get("max_tokens", "max_tokens")
        service.check_length(prompt_len, param=prompt, room=1 if limit > 0 else 0)
        if of_key is not None and prompt_len + limit > of_key:
            param = output if prompt_len + min(limit, 1) <= of_key else prompt
            raise InvalidRequest(
                f"{param}: prompt and answer may have {of_key:,} tokens with this key; the prompt has {prompt_len:,}, "
                f"and {limit:,} more are asked for",
                param=param,
            )
        if prompt_len + limit > service.model.context_len:
            raise PromptTooLong.of_output(prompt_len, limit, longest=service.model.context_len, param=output)


def asked_of(of: Any, body: WireType, headers: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Read what ``body`` and ``headers`` say of the fields of ``of``, by their names in it. Raises: InvalidRequest."""
    found: dict[str, Any] = {}
    for name, each in client_fields(of).items():
        value = getattr(body, each.name) if each.name in type(body).model_fields else None
        if each.header and (given := headers.get(each.header)) is not None:
            try:
                value = float(given.partition(";")[0])  # what follows is of its meaning, not of its number
            except ValueError:
                raise InvalidRequest(f"{each.header}: {given[:60]!r} is no number", param=each.header) from None
        if value is not None:
            found[name] = value
    return found


async def asked_adapter(request: HTTPConnection, model: str | None, lora_path: str | None = None) -> AdapterRef | None:
    """Find what one prompt asks for, as `asked_adapters` does."""
    [found] = await asked_adapters(request, model, [lora_path])
    return found


async def asked_adapters(
    request: HTTPConnection, model: str | None, lora_paths: Sequence[str | None]
) -> list[AdapterRef | None]:
    """Find what ``model`` names (the model, an adapter, or MODEL:ADAPTER) and, for each prompt, what of ``lora_paths``
    does (an adapter's name, or its folder). One that the caller's key may not use is as one that is not there.

    Returns: for each prompt, None for the model as it is. Raises: UnknownModel; InvalidRequest; Overloaded.
    """
    service = service_of(request)
    adapters, own = service.adapters, service.model.name
    asked = "" if model in (None, own) else str(model)
    paths = list(dict.fromkeys(path or "" for path in lora_paths))  # each is looked up once
    if not asked and not any(paths):
        return [None] * len(lora_paths)

    def look() -> tuple[AdapterRef | None, dict[str, list[AdapterRef]]]:
        by_name = {name: adapters.find(name) for name in (asked.removeprefix(f"{own}:"), *paths) if name}
        named = {name: ref for name, ref in by_name.items() if ref is not None and _may_use(request, ref)}
        found = {path: [named[path]] if path in named else adapters.of_folder(path) for path in paths if path}
        return named.get(asked.removeprefix(f"{own}:")), found

    named, found = await adapters.looks.run(look)
    if asked and named is None:
        raise unknown_model(service, asked)
    of_path = {"": named} | {
        path: _one_of([each for each in refs if _may_use(request, each)], path, asked, named)
        for path, refs in found.items()
    }
    return [of_path[path or ""] for path in lora_paths]


def _one_of(found: Sequence[AdapterRef], path: str, model: str, named: AdapterRef | None) -> AdapterRef:
    """Choose of what ``path`` may mean; ``named``: what ``model`` names. Raises: InvalidRequest."""
    if named is not None and named in found:
        return named
    if not found:
        why = "is not loaded here"
    elif named is not None:
        why = f"is another adapter than that of model, {model!r:.200}"
    elif len({each.identity for each in found}) > 1:
        why = f"has several versions: use a name of {', '.join(each.name for each in found):.200}"
    else:
        return found[0]
    raise InvalidRequest(f"lora_path: {path[:200]!r} {why}", param="lora_path")


async def adapters_of(request: HTTPConnection) -> list[AdapterRef]:
    """Return the adapters that the caller's key may use. Raises: Overloaded."""
    adapters = service_of(request).adapters
    return [each for each in await adapters.looks.run(adapters.all) if _may_use(request, each)]


def _may_use(request: HTTPConnection, adapter: AdapterRef) -> bool:
    key = caller_of(request).key
    return key is None or key.models is None or adapter.name in key.models


def unknown_model(service: Service, name: str) -> UnknownModel:
    """Make the error for a name that is neither the model's nor an adapter's."""
    others = ", and the adapters that GET /v1/models lists" if service.adapters.are_possible else ""
    return UnknownModel(f"the model {name[:200]!r} is not served here; served: {service.model.name!r}{others}")


def refuse_unsupported(body: WireType, *done: str, **here: Any) -> None:
    """Refuse the first field that asks for an unsupported feature. Raises: InvalidRequest.

    Args: done: fields that this route supports and others do not. here: those that this one does not, and their neutral
          values.
    """
    neutral = {name: value for name, value in _NOT_DONE.items() if name not in done} | here
    for name, value in (vars(body) | (body.model_extra or {})).items():
        if name in neutral and value not in (*NOTHING, neutral[name]):
            raise InvalidRequest(f"{name}: is not supported by this server; leave it out", param=name)


def asks_form(fields: WireType) -> bool:
    """Whether a field may ask for a form of the output (constraints.py)."""
    extra = fields.model_extra
    return any(getattr(fields, name, None) is not None or (extra and name in extra) for name in FORM_FIELDS)


def openai_sampling(
    fields: SamplingFields,
    authors: Mapping[str, Any],
    *,
    max_new_tokens: int,
    masks: Masks,
    constraint: Constraint | None,
    shows_special: bool = False,
) -> SamplingParams:
    """Convert the sampling fields of a completion or chat request; `Job.request` checks their ranges.

    Args: authors: what is meant where the request says nothing (`ModelFace.sampling`), before OpenAI's defaults.
          shows_special: special tokens are part of the text, whatever the request says: a reader needs them.
    """
    return _sampling(
        fields,
        authors,
        masks,
        constraint=constraint,
        **({"skip_special_tokens": False} if shows_special else {}),
        max_new_tokens=max_new_tokens,
        min_new_tokens=_or(fields.min_tokens, 0),
        min_holds_stops=True,
        seed=_seed(fields.seed),
        include_stop=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
    )


def native_sampling(
    fields: NativeSampling,
    authors: Mapping[str, Any],
    *,
    max_new_tokens: int,
    masks: Masks,
    constraint: Constraint | None = None,
) -> SamplingParams:
    """Convert the sampling fields of ``/generate``, as `openai_sampling`."""
    refuse_unsupported(fields, best_of=1)
    seed_name = "seed" if fields.sampling_seed is None else "sampling_seed"
    if fields.do_sample is False:
        authors, fields = {**authors, "temperature": 0.0}, fields.model_copy(update={"temperature": None})
    return _sampling(
        fields,
        authors,
        masks,
        constraint=constraint,
        max_new_tokens=max_new_tokens,
        min_new_tokens=_or(fields.min_new_tokens, 0),
        seed=_seed(getattr(fields, seed_name), param=seed_name),
        include_stop=bool(fields.no_stop_trim),
    )


def _sampling(fields: Sampling, authors: Mapping[str, Any], masks: Masks, **own: Any) -> SamplingParams:
    """Convert the fields that all routes share; ``own`` are the route's."""
    top_k = _or(fields.top_k, authors.get("top_k"))
    given = {
        **authors,
        **asked_of(SamplingParams, fields),
        "top_k": None if top_k in (-1, 0) else top_k,
        "logit_bias": _logit_bias(fields.logit_bias),
        "stop": _stop(fields.stop),
        "stop_token_ids": tuple(fields.stop_token_ids or ()),
        **masks._asdict(),
        **own,
    }
    return SamplingParams(**given)


def masks_of(service: Service, samplings: Sequence[Sampling]) -> list[Masks]:
    """Make the masks of each prompt, once for parameters that several prompts share.

    Raises: InvalidRequest, also for too many bad words in one request.
    """
    distinct = {id(each): each for each in samplings}
    words = [word for each in distinct.values() for word in each.bad_words or ()]
    if len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_BAD_CHARACTERS:
        raise InvalidRequest(
            f"bad_words: {len(words)} with {sum(map(len, words)):,} characters; a request may have {MAX_BAD_WORDS} "
            f"with {MAX_BAD_CHARACTERS:,}",
            param="bad_words",
        )
    if not all(map(str.strip, words)):
        raise InvalidRequest("bad_words: holds an empty word", param="bad_words")
    made = {key: _masks(service, each.allowed_token_ids, each.bad_words or ()) for key, each in distinct.items()}
    return [made[id(each)] for each in samplings]


def _masks(service: Service, allowed: list[int] | None, words: Sequence[str]) -> Masks:
    """Make the masks of one prompt. ``words`` are masked as at a text's beginning and as after a space."""
    texts = [before + word.lstrip() for word in words for before in ("", " ")]
    spelt = [tuple(service.tokenizer.encode(text, add_special_tokens=False).tolist()) for text in texts]
    return Masks(None if allowed is None else tuple(dict.fromkeys(allowed)), tuple(dict.fromkeys(spelt)))


def logprobs_wanted(fields: GeneratingFields) -> int | None:
    """Read ``prompt_logprobs``. Raises: InvalidRequest if it is given with a stream."""
    if fields.prompt_logprobs is None:
        return None
    if fields.stream:
        raise InvalidRequest("prompt_logprobs: are not given in a stream; leave stream out", param="prompt_logprobs")
    return fields.prompt_logprobs


def check_together(requests: Sequence[GenerateRequest]) -> None:
    """Check the sum of the requests of one HTTP request, each valid by itself. Raises: InvalidRequest."""
    num_choices = sum(request.sampling.n for request in requests)
    if num_choices > MAX_CHOICES:
        raise InvalidRequest(
            f"n: {num_choices:,} choices of {len(requests)} prompts; at most {MAX_CHOICES} go into one request",
            param="n",
        )
    check_prompt_logprobs(sum(request.num_prompt_logprobs for request in requests))


def to_ids(raw: Sequence[Any], *, param: str) -> TokenIds:
    """Convert token ids to an array. Raises: InvalidRequest for ids that no model can have."""
    if not raw:
        raise InvalidRequest(f"{param}: is empty; give at least one token", param=param)
    return to_token_ids(raw, param=param)


async def prompts_of_ids(
    service: Service, rows: Iterable[Sequence[Any]], *, param: str, must_fit: bool = True
) -> list[TokenIds]:
    """Convert the ids of each prompt, checking their number first. Raises: InvalidRequest, PromptTooLong."""
    prompts = []
    for row in rows:
        if must_fit:
            service.check_length(len(row), param=param, room=0)
        prompts.append(to_ids(row, param=param))
        await asyncio.sleep(0)  # a body may have a million ids
    return prompts


def salt_of(cache_salt: str | None, extra_key: str | None = None) -> str:
    """Join two salts into one, unique for the pair. Raises: InvalidRequest for what marks a pair, or an adapter."""
    for name, key in (("cache_salt", cache_salt), ("extra_key", extra_key)):
        if key and ("\0" in key or "\1" in key):
            raise InvalidRequest(
                f"{name}: must not contain the characters U+0000 and U+0001; leave them out", param=name
            )
    return "\0" + json.dumps([cache_salt or "", extra_key]) if extra_key else cache_salt or ""


def check_count(num_prompts: int, *, param: str) -> None:
    if num_prompts == 0:
        raise InvalidRequest(f"{param}: is empty; give at least one prompt", param=param)
    if num_prompts > MAX_PROMPTS:
        raise InvalidRequest(f"{param}: {num_prompts} prompts; at most {MAX_PROMPTS} go into one request", param=param)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _seed(seed: int | None, *, param: str = "seed") -> int:
    """Choose a request's seed: the client's, negative or not, else a random one. Raises: InvalidRequest.

    It is drawn once, so that a retry on another replica continues with the same numbers.
    """
    if seed is None:
        return secrets.randbits(62)
    if not -(2**63) <= seed < 2**63:
        raise InvalidRequest(f"{param}: must be between -2**63 and 2**63 - 1, got {str(seed)[:64]}", param=param)
    return seed % 2**64


def _stop(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if stop is None or stop == "":
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(bias: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    pairs = []
    for token, value in (bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise InvalidRequest(f"logit_bias: {token[:64]!r} is not a token id", param="logit_bias")
        pairs.append((int(token), value))
    return tuple(pairs)
