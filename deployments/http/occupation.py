"""POST /release_memory_occupation and /resume_memory_occupation: every replica gives memory back, or uses it again.

Owns:      the answer of all replicas together: a release holds for all of them or for none.
Never:     gives memory back while a request runs: it waits for ``timeout`` seconds, then answers 409.
Invariant: both ask for the admin key. While memory is given back no replica is ready: requests get 503 with
           Retry-After, and /health says so.
Thread:    the router's event loop.
Source:    SGLang's routes of these names; ``tags`` are kv_cache and weights, all if none is given.
"""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from deployments.dispatch.leases import ReplicaCalls
from deployments.fleet.fleet import ANSWER_S
from deployments.http.admin import ADMIN, WAIT
from deployments.http.api_document import BODY, gives
from deployments.http.bodies import MemoryRequest, Route
from deployments.http.http_errors import error_body
from deployments.http.service import Service, service_of
from deployments.http.streaming import answer

router = APIRouter(route_class=Route)
ALL = MemoryRequest()  # what a request without a body means
COPY_S = 60.0  # beyond the wait: the cache is copied to the host meanwhile


@router.post(
    "/release_memory_occupation",
    dependencies=ADMIN,
    openapi_extra=WAIT.described,
    **gives("Whether it was done", *BODY, 409, 503),
)
async def release(request: Request, body: MemoryRequest = ALL) -> Response:
    """Give back the memory of all replicas; 409, with nothing given back, if one is busy or cannot."""
    return await answer(request, _release(service_of(request), tuple(body.tags or ()), WAIT.of(request)))


@router.post("/resume_memory_occupation", dependencies=ADMIN, **gives("Whether it was done", *BODY, 503))
async def resume(request: Request, body: MemoryRequest = ALL) -> Response:
    """Use the memory of all replicas again."""
    return await answer(request, _resume(service_of(request), tuple(body.tags or ())))


async def _release(service: Service, tags: tuple[str, ...], wait_s: float) -> Response:
    why_not = await service.fleet.ask_all(
        lambda replica_id: service.leases.call(replica_id, ReplicaCalls.release_memory, tags, wait_s),
        timeout_s=wait_s + ANSWER_S + COPY_S,
    )
    refused = {replica_id: why for replica_id, why in why_not.items() if why}
    missing = [info.replica_id for info in service.fleet.infos if info.replica_id not in why_not]
    if why_not and not refused and not missing:
        return _done(len(why_not))
    await _resume(service, tags)  # those that did
    reasons = [f"{replica_id}: {why}" for replica_id, why in sorted(refused.items())]
    reasons += [f"{replica_id} does not answer" for replica_id in sorted(missing)]
    message = f"no memory was given back: {'; '.join(reasons) or 'there is no replica'}"
    status = 409 if refused else 503
    return JSONResponse(error_body(message, status=status), status_code=status, headers={"Retry-After": "1"})


async def _resume(service: Service, tags: tuple[str, ...]) -> Response:
    why_not = await service.fleet.ask_all(
        lambda replica_id: service.leases.call(replica_id, ReplicaCalls.resume_memory, tags)
    )
    missing = sorted(info.replica_id for info in service.fleet.infos if info.replica_id not in why_not)
    reasons = [f"{replica_id}: {why}" for replica_id, why in sorted(why_not.items()) if why]
    reasons += [f"{replica_id} does not answer" for replica_id in missing]
    if not reasons and why_not:
        return _done(len(why_not))
    message = f"not every replica uses its memory again: {'; '.join(reasons) or 'there is no replica'}"
    return JSONResponse(error_body(message, status=503), status_code=503, headers={"Retry-After": "1"})


def _done(num_replicas: int) -> Response:
    body: dict[str, Any] = {"success": True, "num_replicas": num_replicas}
    return JSONResponse(body)
