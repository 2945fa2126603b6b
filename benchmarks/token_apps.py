"""Two Serve applications over the same token source: Manta's own deployments, and Ray Serve's plain streaming.

``manta`` is `deployments.app:build` but for the engine in the replica. ``plain`` is what Serve's documents show: an
ingress that iterates over ``handle.options(stream=True)`` and sends one event a token, of the same form as Manta's.

Never: measures anything (token_path.py).
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from benchmarks.token_source import paced_engine, request
from deployments.app import build_of
from deployments.replica.model_replica import ModelReplica
from deployments.settings.places import local_path
from deployments.settings.schema import AppConfig
from replicas.engine.engine import Engine
from replicas.engine.loop import EngineLoop
from replicas.types import GenerateRequest, TokenDelta
from routing.types import Role

MOST_ONGOING = 4096


class PacedReplica(ModelReplica):
    """A model replica whose engine has no model."""

    @staticmethod
    def load(config: AppConfig, role: Role) -> Engine:
        return paced_engine(local_path(config.model.path))


def manta(args: dict[str, Any]) -> Application:
    return build_of(PacedReplica, args)


class PlainEngine:
    """The same engine behind Serve's own streaming."""

    def __init__(self, model: str) -> None:
        self._loop = EngineLoop(paced_engine(local_path(model), record_events=False))
        self._loop.start()

    async def generate(self, asked: GenerateRequest) -> AsyncIterator[TokenDelta]:
        async for delta in self._loop.generate(asked):
            yield delta


class PlainIngress:
    """/v1/completions, as far as token_path.py asks for it."""

    def __init__(self, engine: DeploymentHandle) -> None:
        self._engine = engine.options(method_name="generate", stream=True)
        self._count = 0

    async def __call__(self, received: Request) -> Response:
        if received.method == "GET":  # whether it is up
            return Response()
        body = await received.json()
        self._count += 1
        asked = request(
            f"plain-{self._count}",
            max_new_tokens=body["max_tokens"],
            tokens_per_s=body["seed"],
            number=self._count,
        )
        deltas = self._engine.remote(asked)
        if body["stream"]:
            return StreamingResponse(_events(asked.rid, deltas), media_type="text/event-stream")
        text = "".join([delta.text async for delta in deltas])
        return JSONResponse(_chunk(asked.rid, text, None))


def plain(args: dict[str, Any]) -> Application:
    options: dict[str, Any] = {"max_ongoing_requests": MOST_ONGOING, "ray_actor_options": {"num_cpus": 0}}
    engine = serve.deployment(PlainEngine).options(**options).bind(args["model"])
    application: Application = serve.deployment(PlainIngress).options(**options).bind(engine)
    return application


async def _events(name: str, deltas: AsyncIterator[TokenDelta]) -> AsyncIterator[bytes]:
    async for delta in deltas:
        finish = None if delta.finish is None else delta.finish.reason.value
        yield b"data: " + json.dumps(_chunk(name, delta.text, finish), separators=(",", ":")).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _chunk(name: str, text: str, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "matched_stop": None}
    return {
        "id": f"cmpl-{name}", "object": "text_completion", "created": 0, "model": "SmolLM2-135M-Instruct",
        "choices": [choice], "system_fingerprint": None,
    }  # fmt: skip
