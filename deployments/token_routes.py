"""Tokens without generation: a text or a conversation as ids, ids as text, and what the tokenizer is.

Owns:   the form of these answers.
Never:  asks a replica; the router has a tokenizer of its own.
Thread: the router's event loop; long texts are tokenised on another (service.py).
"""

from typing import Any

from fastapi import APIRouter, Request

from deployments.body import read_body
from deployments.chat import refuse_tools, template_options
from deployments.convert import check_count, check_model, to_ids
from deployments.openai_types import DetokenizeRequest, TokenizeRequest
from deployments.service import service_of
from replicas.errors import InvalidRequest

router = APIRouter()


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    service = service_of(request)
    body = await read_body(request, TokenizeRequest, max_bytes=service.max_body_bytes)
    check_model(service, body.model)
    special = True if body.add_special_tokens is None else body.add_special_tokens
    tokens: list[int] | list[list[int]]
    if body.messages is not None:
        refuse_tools(body)
        tokens = (await service.encode_chat(body.messages, **template_options(body))).tolist()
    elif isinstance(body.prompt, list):
        check_count(len(body.prompt), param="prompt")
        rows = [(await service.encode(text, add_special_tokens=special)).tolist() for text in body.prompt]
        return {"tokens": rows, "count": [len(row) for row in rows], "max_model_len": service.model.context_len}
    elif body.prompt is not None:
        tokens = (await service.encode(body.prompt, add_special_tokens=special)).tolist()
    else:
        raise InvalidRequest("prompt: is missing; give a prompt or messages", param="prompt")
    return {"tokens": tokens, "count": len(tokens), "max_model_len": service.model.context_len}


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(request: Request) -> dict[str, Any]:
    service = service_of(request)
    body = await read_body(request, DetokenizeRequest, max_bytes=service.max_body_bytes)
    check_model(service, body.model)
    flat = [token for token in body.tokens if isinstance(token, int)]
    skip = True if body.skip_special_tokens is None else body.skip_special_tokens
    if flat or not body.tokens:
        text: str | list[str] = service.tokenizer.decode(to_ids(flat, param="tokens"), skip) if flat else ""
    else:
        rows = [row for row in body.tokens if isinstance(row, list)]
        text = [service.tokenizer.decode(to_ids(row, param="tokens"), skip) for row in rows]
    return {"prompt": text, "text": text}


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
