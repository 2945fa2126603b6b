"""Tokens without generation: a text or a conversation as ids, ids as text, and what the tokenizer is.

Owns:   the form of these answers.
Never:  asks a replica; the router has a tokenizer of its own.
Thread: the router's event loop; texts, and the answers, are made on others (service.py).
"""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from deployments.http.body import read_body
from deployments.http.chat import refuse_tools, template_options
from deployments.http.convert import check_count, check_model, to_ids
from deployments.http.openai_types import DetokenizeRequest, TokenizeRequest
from deployments.http.service import service_of
from deployments.http.streaming import JsonAnswer
from replicas.errors import InvalidRequest

router = APIRouter()
MAX_DETOKENIZED = 1 << 17  # ids of one request


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(request: Request) -> Response:
    service = service_of(request)
    body = await read_body(request, TokenizeRequest, max_bytes=service.max_body_bytes)
    check_model(service, body.model)
    special = True if body.add_special_tokens is None else body.add_special_tokens
    if body.messages is not None:
        refuse_tools(body)
        rows = [await service.encode_chat(body.messages, **template_options(body))]
    elif body.prompt is not None:
        texts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        check_count(len(texts), param="prompt")
        rows = await service.encode_all(texts, add_special_tokens=special, together=True)
    else:
        raise InvalidRequest("prompt: is missing; give a prompt or messages", param="prompt")
    is_list = body.messages is None and isinstance(body.prompt, list)

    def answer() -> Response:
        tokens, counts = [row.tolist() for row in rows], [len(row) for row in rows]
        either = {"tokens": tokens, "count": counts} if is_list else {"tokens": tokens[0], "count": counts[0]}
        return JsonAnswer({**either, "max_model_len": service.model.context_len})

    return await service.encoding.run(answer, size=sum(map(len, rows)))


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(request: Request) -> Response:
    service = service_of(request)
    body = await read_body(request, DetokenizeRequest, max_bytes=service.max_body_bytes)
    check_model(service, body.model)
    skip = True if body.skip_special_tokens is None else body.skip_special_tokens
    is_list = bool(body.tokens) and isinstance(body.tokens[0], list)
    rows = [row for row in (body.tokens if is_list else [body.tokens]) if isinstance(row, list)]
    num_tokens = sum(map(len, rows))
    if num_tokens > MAX_DETOKENIZED:
        message = f"tokens: {num_tokens:,} ids; at most {MAX_DETOKENIZED:,} go into one request"
        raise InvalidRequest(message, param="tokens")

    def answer() -> Response:
        texts = [service.tokenizer.decode(to_ids(row, param="tokens"), skip) if row or is_list else "" for row in rows]
        text = texts if is_list else texts[0]
        return JsonAnswer({"prompt": text, "text": text})

    return await service.encoding.run(answer, size=num_tokens)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """What lm-eval's remote tokenizer asks for."""
    service = service_of(request)
    tokenizer = service.tokenizer
    eos = sorted(tokenizer.eos_ids)
    return {
        "tokenizer_path": service.model.tokenizer_path,
        "vocab_size": tokenizer.vocab_size,
        "eos_token": tokenizer.named_token("eos") or (tokenizer.token_text(eos[0]) if eos else None),
        "eos_token_id": eos[0] if eos else None,
        "eos_token_ids": eos,
        "bos_token": tokenizer.named_token("bos"),
        "pad_token": tokenizer.named_token("pad"),
        "chat_template": tokenizer.chat_template,
        "max_model_len": service.model.context_len,
    }
