"""Answers batch requests (batches/runner.py) by the routes that they name, as requests of their batch's owner.

Never:     is sent a key: the batch was made with one, which must still be accepted. Counts a line as a request of HTTP.
Thread:    the router's event loop.
"""

import asyncio
import time
from collections.abc import MutableMapping
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic_core import to_json

from deployments.batches.runner import Answer
from deployments.batches.store import Line, Row
from deployments.http import chat, completions, http_errors
from deployments.http.access import Unforeseen
from deployments.http.apis import pooling, responses
from deployments.http.arrivals import BATCH, REPLICAS
from deployments.http.service import Service
from deployments.record.timeline import Arrival
from deployments.tenancy.keys import CALLER, NO_KEYS, KeyDigests

ROUTERS: tuple[APIRouter, ...] = (chat.router, completions.router, responses.router, pooling.router)
KEY_GONE = to_json(
    http_errors.error_body("the API key of this batch is not accepted any more", status=401, code="invalid_api_key")
)


def line_answers(service: Service, keys: KeyDigests) -> Answer:
    """Make what answers lines, within the limits of their owner's key as it is when they begin."""
    app = FastAPI(openapi_url=None)
    app.state.service, app.state.keys = service, NO_KEYS
    for router in ROUTERS:
        app.include_router(router)
    http_errors.install(app)
    app.add_middleware(Unforeseen)

    async def answer(batch: Row, line: Line, body: bytes, replica: str) -> tuple[int, str, bytes]:
        name, status = f"{batch['id']}/{line.number}", 0
        unread, parts = [body], list[bytes]()
        caller = keys.named(batch["owner"])
        if caller is None:
            return 401, name, KEY_GONE
        CALLER.set(caller.name)  # in this line's task alone

        async def receive() -> dict[str, Any]:
            if not unread:
                await asyncio.Future()  # nobody leaves
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        headers = {"content-type": "application/json", "content-length": str(len(body)), REPLICAS: replica}
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": batch["endpoint"],
            "root_path": "", "query_string": b"", "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "state": {
                "request_name": name, "send_body": send, "caller": caller,
                "arrival": Arrival(endpoint=BATCH, arrived_s=time.monotonic()),
            },
        }  # fmt: skip
        await app(scope, receive, send)
        return status, name, b"".join(parts)

    return answer
