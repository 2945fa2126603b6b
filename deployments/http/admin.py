"""The routes that generate nothing: the way to the live view, health, facts about model and server, tokens, cache,
aborts, this router's metrics.

Never:     changes a replica except by flush and abort; asks a replica to tokenise: the router has its own tokenizer.
Invariant: with any key configured, a route that shows or changes the state of all callers asks for the admin key
           (access.py).
Thread:    the router's event loop; long texts and their answers are made on the executors of service.py.
"""

import asyncio
import dataclasses
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from prometheus_client.exposition import choose_encoder
from pydantic_core import to_json

from deployments.channel.frames import ReplicaReport
from deployments.dispatch.leases import ReplicaCalls, ReplicaInfo
from deployments.fleet.fleet import ANSWER_S
from deployments.http.access import admin_only, caller_of
from deployments.http.api_document import BODY, gives
from deployments.http.bodies import (
    MAX_DETOKENIZED,
    AbortRequest,
    DetokenizeRequest,
    PathName,
    Route,
    SnapshotRequest,
    TokenizeRequest,
)
from deployments.http.chat import template_options, tools_of
from deployments.http.convert import adapters_of, asked_adapter, check_count, to_ids, unknown_model
from deployments.http.http_errors import error_body
from deployments.http.service import Service, service_of
from deployments.http.streaming import JsonAnswer, answer
from deployments.places import shown_path
from replicas.errors import InvalidRequest
from replicas.text.detokenizer import token_texts
from replicas.types import AdapterRef, EngineStats

router = APIRouter(route_class=Route)
ADMIN = [Depends(admin_only)]
MAX_FLUSH_WAIT_S = 600.0
SNAPSHOT_S = 60.0  # to copy the K/V of one request, and to carry it here
METRICS = {"response_class": PlainTextResponse, **gives(None)}
METRICS["responses"][200] = {"content": {"application/openmetrics-text": {"schema": {"type": "string"}}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSeconds:
    """A number of seconds in the query of a route, whose `described` goes into the route's openapi_extra."""

    name: str
    least: float
    most: float
    default: float

    @property
    def described(self) -> dict[str, Any]:
        schema = {"type": "number", "minimum": self.least, "maximum": self.most, "default": self.default}
        return {"parameters": [{"name": self.name, "in": "query", "schema": schema}]}

    def of(self, request: Request) -> float:
        """Raises: InvalidRequest."""
        given = request.query_params.get(self.name, str(self.default))
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not self.least <= seconds <= self.most:
            bounds = f"{self.least:.0f} and {self.most:.0f} seconds"
            raise InvalidRequest(f"{self.name}: must be between {bounds}, got {given[:64]!r}")
        return seconds


WAIT = AskedSeconds(name="timeout", least=0, most=MAX_FLUSH_WAIT_S, default=0)  # for requests to end


class SnapshotFile(Response):
    """A file of kvtransfer/replay/snapshot.py as the body."""

    media_type = "application/octet-stream"


@router.get("/", **gives("Where the live view and this document are"))
async def index(request: Request) -> Response:
    """Lead a browser to the live view; tell other clients where it is, and where this document is."""
    view = await request.app.state.live_view()
    headers = {"Cache-Control": "no-store", "Vary": "Accept"}  # the live view may start later, or move
    if view is not None and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(view, status_code=307, headers=headers)
    root = request.scope.get("root_path", "").rstrip("/")
    return JSONResponse({"name": "manta", "live_view": view, "document": f"{root}/openapi.json"}, headers=headers)


@router.get("/ping", response_class=PlainTextResponse, **gives(None))
async def ping() -> Response:
    """Answer as soon as the router is alive, in any state of the replicas."""
    return PlainTextResponse("pong")


@router.get("/health", **gives("How many replicas take requests", 503))
@router.get("/ready", **gives("How many replicas take requests", 503))
async def health(request: Request) -> Response:
    """Answer 200 while at least one replica takes requests, else 503."""
    fleet = service_of(request).fleet
    if fleet.num_ready:
        ready, draining = fleet.num_ready, fleet.num_draining
        return JSONResponse({"status": "ok", "replicas_ready": ready, "replicas_draining": draining})
    return JSONResponse(error_body(f"no replica is ready: {fleet.describe()}", status=503), status_code=503)


@router.get("/version", **gives("The version"))
async def version(request: Request) -> Response:
    """Show the version of this Manta."""
    return JSONResponse({"version": service_of(request).version})


@router.get("/v1/models", **gives("The models, as OpenAI's `list`"))
async def models(request: Request) -> Response:
    """List the served model, and the adapters of it that the caller may use."""
    service = service_of(request)
    bodies = [_model_body(service), *(_model_body(service, each) for each in await adapters_of(request))]
    return JSONResponse({"object": "list", "data": bodies})


@router.get("/v1/models/{name:path}", **gives("The model, as OpenAI's `model`", 404))
async def model(request: Request, name: PathName) -> Response:
    """Show the served model, or an adapter of it."""
    service = service_of(request)
    adapter = None
    if name != service.model.name:
        adapter = next((each for each in await adapters_of(request) if each.name == name), None)
        if adapter is None:
            raise unknown_model(service, name)
    return JSONResponse(_model_body(service, adapter))


def _model_body(service: Service, adapter: AdapterRef | None = None) -> dict[str, Any]:
    return {
        "id": service.model.name if adapter is None else adapter.name,
        "object": "model",
        "created": int(service.started_s),
        "owned_by": "manta",
        "root": service.model.path if adapter is None else shown_path(adapter.path),
        "parent": None if adapter is None else service.model.name,
        "max_model_len": service.model.context_len,
    }


@router.get("/get_model_info", **gives("Facts about the model"))
@router.get("/model_info", **gives("Facts about the model"))
async def model_info(request: Request) -> Response:
    """Show the path, type and lengths of the served model."""
    face = service_of(request).model
    body = {
        "model_path": face.path,
        "tokenizer_path": face.tokenizer_path,
        "served_model_name": face.name,
        "is_generation": True,
        "preferred_sampling_params": dict(face.sampling) or None,
        "weight_version": "default",
        "disaggregation_mode": "null",
        "model_type": face.model_type,
        "architectures": list(face.architectures),
        "max_model_len": face.context_len,
        "vocab_size": face.vocab_size,
    }
    return JSONResponse(body)


@router.get("/keys", dependencies=ADMIN, **gives("The keys, and whether the file as it is now is in force"))
async def keys(request: Request) -> Response:
    """List the keys of `router.keys_file` with their limits, and what each has used within a minute."""
    dispatcher = service_of(request).dispatcher
    if dispatcher.quotas is None:
        return JSONResponse({"path": None, "error": "", "keys": []})
    return JSONResponse(dispatcher.quotas.body(dispatcher.choices))


@router.get("/get_server_info", dependencies=ADMIN, **gives("The settings, and each replica's state"))
@router.get("/server_info", dependencies=ADMIN, **gives("The settings, and each replica's state"))
async def server_info(request: Request) -> Response:
    """Show the settings in force, and the current state of each replica."""
    service = service_of(request)
    reports = await service.fleet.ask_all(lambda replica_id: service.leases.call(replica_id, ReplicaCalls.report))
    infos = service.fleet.infos
    states = [_state_body(info, reports[info.replica_id]) for info in infos if info.replica_id in reports]
    body = {
        **in_force(service.settings, service.fleet.infos),
        "version": service.version,
        "startup_time": service.started_s,
        "uptime_s": time.time() - service.started_s,
        "model_path": service.model.path,
        "tokenizer_path": service.model.tokenizer_path,
        "served_model_name": service.model.name,
        "context_length": service.model.context_len,
        "router": _router_body(service),
        "num_retries": service.dispatcher.num_retries,
        "recent_retries": [dataclasses.asdict(retry) for retry in service.dispatcher.retries],
        "internal_states": states,
        "not_answering": [info.replica_id for info in infos if info.replica_id not in reports],
    }
    return Response(to_json(body, inf_nan_mode="null"), media_type="application/json")


def in_force(settings: Mapping[str, Any], infos: Iterable[ReplicaInfo]) -> dict[str, Any]:
    """Return ``settings`` with what was left open as all replicas filled it in. Where they differ it stays open, and
    each replica's ``filled_in`` says what it has."""
    shown = {name: dict(value) if isinstance(value, dict) else value for name, value in settings.items()}
    found: dict[str, list[Any]] = {}
    for info in infos:
        for name, filled in info.filled_in.items():
            found.setdefault(name, []).append(filled["value"])
    for name, values in found.items():
        group, _, field = name.rpartition(".")
        if all(value == values[0] for value in values):
            (shown.setdefault(group, {}) if group else shown)[field] = values[0]
    return shown


def _router_body(service: Service) -> dict[str, Any]:
    """Describe this router; with several, another call may reach another one."""
    sync, dispatcher = service.fleet.sync, service.dispatcher
    return {
        "router_id": dispatcher.router_id,
        "pid": os.getpid(),
        "num_open": dispatcher.num_open,
        "cache_snapshots": sync.num_snapshots,
        "cache_event_gaps": sync.num_gaps,
        "awaiting_snapshots": sorted(sync.asking),
        "cache_pages": service.fleet.cache_pages(),
    }


def load_of(stats: EngineStats) -> int:
    """Count the requests of a replica in all states; each request is in one state."""
    return stats.num_running + stats.num_waiting + stats.num_handed_over


def _state_body(info: ReplicaInfo, report: ReplicaReport) -> dict[str, Any]:
    pool = report.stats.pool
    return {
        "replica": dataclasses.asdict(replace(info, migration=None, model_path=shown_path(info.model_path))),
        "healthy": report.error is None,
        "error": report.error,
        "num_open": report.num_open,
        "step_age_s": report.step_age_s,
        "load": load_of(report.stats),
        "memory_usage": {"token_capacity": pool.total_tokens, "kv_pool": info.pool},
        "max_total_num_tokens": pool.total_tokens,
        "pool_utilization": pool.utilization,
        "pressure": pool.pressure.value,
        "stats": dataclasses.asdict(report.stats),
    }


@router.api_route(
    "/flush_cache", methods=["GET", "POST"], dependencies=ADMIN, response_class=PlainTextResponse,
    openapi_extra=WAIT.described, **gives(None, 400),
)  # fmt: skip
async def flush_cache(request: Request) -> Response:
    """Drop all cached prefixes on all replicas; 400 if one is busy for longer than ``timeout`` seconds."""
    service = service_of(request)
    wait_s = WAIT.of(request)
    return await answer(request, _flush(service, wait_s))


async def _flush(service: Service, wait_s: float) -> Response:
    flushed = await service.fleet.ask_all(
        lambda replica_id: service.leases.call(replica_id, ReplicaCalls.flush_cache, wait_s),
        timeout_s=wait_s + ANSWER_S,
    )
    busy = sorted(replica_id for replica_id, ok in flushed.items() if not ok)
    missing = len(service.fleet.infos) - len(flushed)
    if busy or missing or not flushed:
        message = (
            f"flushed {len(flushed) - len(busy)} replicas; {busy or 'none'} busy with requests, {missing} silent: "
            "try again, or give ?timeout=seconds"
        )
        return JSONResponse(error_body(message, status=400), status_code=400)
    return PlainTextResponse(f"Cache flushed on {len(flushed)} replicas.\n")


@router.post("/abort_request", **gives("How many requests were aborted", *BODY))
async def abort_request(request: Request, body: AbortRequest) -> Response:
    """Abort the requests called ``rid`` that were sent with the same key; the admin key aborts those of all keys.

    ``abort_all``, with the admin key, aborts every request. Raises: InvalidRequest, KeyNeeded.
    """
    service = service_of(request)
    if not body.rid and not body.abort_all:
        raise InvalidRequest("rid: is missing; name a request, or set abort_all", param="rid")
    if body.abort_all:
        admin_only(request)
    name, caller = None if body.abort_all else body.rid, caller_of(request)
    owner = None if caller.is_admin or not request.app.state.keys.exist else caller.name
    counts = await service.fleet.ask_all(
        lambda replica_id: service.leases.call(replica_id, ReplicaCalls.abort, name, owner)
    )
    return JSONResponse({"success": True, "num_aborted": sum(counts.values())})


@router.post("/snapshot_request", dependencies=ADMIN, response_class=SnapshotFile, **gives(None, *BODY, 404, 409))
async def snapshot_request(request: Request, body: SnapshotRequest) -> Response:
    """Copy the state of a request that runs, K/V included, into a file that `python -m replicas.replay` continues.

    The request goes on. 404 if no replica has one called ``rid`` open; 409 if it is just being handed over.
    """
    service = service_of(request)
    found = await service.fleet.ask_all(
        lambda replica_id: service.leases.call(replica_id, ReplicaCalls.snapshot, body.rid, body.index or 0),
        timeout_s=SNAPSHOT_S,
    )
    if file := next((each for each in found.values() if isinstance(each, bytes)), None):
        return SnapshotFile(file, headers={"Content-Disposition": 'attachment; filename="request.snapshot"'})
    why_not = "; ".join(each for each in found.values() if isinstance(each, str))
    status = 409 if why_not else 404
    message = why_not or f"no replica has a request called {body.rid[:128]!r} open"
    return JSONResponse(error_body(message, status=status), status_code=status)


@router.get("/metrics", dependencies=ADMIN, **METRICS)
@router.get("/prometheus/metrics", dependencies=ADMIN, **METRICS)
async def metrics(request: Request) -> Response:
    """Show this router's own metrics; with several routers only the build information.

    Each scrape through the load balancer could reach another router. Routers and replicas serve their metrics on
    ports of their own, which the observatory lists.
    """
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    # on another thread: some values are read from this event loop
    text = await asyncio.to_thread(encode, service_of(request).registry)
    return Response(text, media_type=content_type)


@router.post("/tokenize", **gives("Token ids, and how many", *BODY))
@router.post("/v1/tokenize", **gives("Token ids, and how many", *BODY))
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Tokenise texts, or a chat as /v1/chat/completions would."""
    service = service_of(request)
    await asked_adapter(request, body.model)
    special = True if body.add_special_tokens is None else body.add_special_tokens
    use = tools_of(body)  # those beside a plain prompt are not used, but must be well formed
    if body.messages is not None:
        rows = [await service.encode_chat(body.messages, use=use, **template_options(body))]
    elif body.prompt is not None:
        texts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        check_count(len(texts), param="prompt")
        rows = await service.encode_all(texts, add_special_tokens=special, together=True)
    else:
        raise InvalidRequest("prompt: is missing; give a prompt or messages", param="prompt")
    is_list = body.messages is None and isinstance(body.prompt, list)

    def answer() -> Response:
        made: dict[str, list[Any]] = {"tokens": [row.tolist() for row in rows], "count": [len(row) for row in rows]}
        if body.return_texts:
            made["texts"] = [token_texts(service.tokenizer, row) for row in rows]
        either = made if is_list else {name: each[0] for name, each in made.items()}
        return JsonAnswer({**either, "max_model_len": service.model.context_len})

    return await service.encoding.run(answer, size=sum(map(len, rows)))


@router.post("/detokenize", **gives("The text", *BODY))
@router.post("/v1/detokenize", **gives("The text", *BODY))
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Turn token ids into text."""
    service = service_of(request)
    await asked_adapter(request, body.model)
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


@router.get("/tokenizer_info", **gives("Vocabulary size, special tokens and chat template"))
async def tokenizer_info(request: Request) -> Response:
    """Describe the tokenizer, as lm-eval's remote tokenizer expects it."""
    service = service_of(request)
    tokenizer = service.tokenizer
    eos = sorted(tokenizer.eos_ids)
    body = {
        "tokenizer_path": service.model.tokenizer_path,
        "vocab_size": tokenizer.vocab_size,
        "eos_token": tokenizer.named_token("eos") or (tokenizer.token_text(eos[0]) if eos else None),
        "eos_token_id": eos[0] if eos else None,
        "eos_token_ids": eos,
        "bos_token": tokenizer.named_token("bos"),
        "pad_token": tokenizer.named_token("pad"),
        "chat_template": tokenizer.template.source(),
        "max_model_len": service.model.context_len,
    }
    return JSONResponse(body)
