"""Parts of the OpenAI answers that completions and chat share: usage, reasons, logprobs.

Never: emits a number that JSON has no form for (a token masked out has no finite logprob).
"""

import math
from collections.abc import Sequence
from typing import Any

from replicas.tokenizer import Tokenizer
from replicas.types import Finish, TokenLogprob, Usage

LOWEST_LOGPROB = -9999.0


def finish_reason(finish: Finish | None) -> str | None:
    return None if finish is None else finish.reason.value


def matched_stop(finish: Finish | None) -> int | str | None:
    return None if finish is None else finish.matched


def usage_body(usages: dict[tuple[int, int], Usage]) -> dict[str, Any]:
    """Usage of a whole answer: a prompt counts once, whatever its number of choices; every output counts.

    Args: usages: by (request's number, choice).
    """
    prompts = {number: usage.prompt_tokens for (number, _), usage in usages.items()}
    cached: dict[int, int] = {}
    for (number, choice), usage in usages.items():
        if choice == 0 or number not in cached:  # choice 0 computes what the others share
            cached[number] = usage.cached_tokens
    return _usage_body(
        prompt=sum(prompts.values()),
        completion=sum(usage.completion_tokens for usage in usages.values()),
        cached=sum(cached.values()),
    )


def number(logprob: float | None) -> float | None:
    """``logprob`` as JSON can say it."""
    if logprob is None:
        return None
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def completion_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], *, with_top: bool, offset: int
) -> dict[str, Any]:
    """The completions form.

    Args: offset: characters of text before the first of ``logprobs``.
    """
    tokens = [tokenizer.token_text(each.token_id) for each in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [number(each.logprob) for each in logprobs],
        "top_logprobs": [_top_by_text(tokenizer, each) for each in logprobs] if with_top else None,
        "text_offset": offsets,
    }


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], *, num_top: int) -> dict[str, Any]:
    """The chat form."""
    return {
        "content": [
            {
                **_token(tokenizer, each.token_id, each.logprob),
                "top_logprobs": [_token(tokenizer, token, value) for token, value in each.top[:num_top]],
            }
            for each in logprobs
        ]
    }


def _usage_body(*, prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def _top_by_text(tokenizer: Tokenizer, each: TokenLogprob) -> dict[str, float | None] | None:
    """The alternatives by text, most likely first, the chosen token always among them; None without a context.

    Two tokens of one text (parts of characters) keep the likelier one's value.
    """
    if each.logprob is None:
        return None
    top: dict[str, float | None] = {}
    for token, value in (*each.top, (each.token_id, each.logprob)):
        top.setdefault(tokenizer.token_text(token), number(value))
    return top


def _token(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": number(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
