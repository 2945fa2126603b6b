"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them, and as SGLang does without /v1: names of
adapters (LoRA) while Manta runs. GET /adapters: what they stand for, and where that is loaded.

Never:     loads an adapter into a replica: the first request that names it does.
Invariant: only what lies below ``adapters.roots`` is loaded, and only by the admin, where there is any key.
"""

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from deployments.http.access import admin_only
from deployments.http.api_document import BODY, gives
from deployments.http.bodies import LoadAdapterRequest, Route, UnloadAdapterRequest
from deployments.http.convert import refuse_unsupported
from deployments.http.service import Service, service_of
from deployments.places import shown_path

router = APIRouter(route_class=Route, dependencies=[Depends(admin_only)])
TEXT = {"response_class": PlainTextResponse, **gives(None, *BODY)}


@router.get("/adapters", **gives("The names", 503))
async def named(request: Request) -> Response:
    """List the names of adapters, what each stands for, which replicas hold that, and its requests to this router."""
    service = service_of(request)
    adapters, watch = service.adapters, service.dispatcher.watch
    bodies = [
        {
            "name": ref.name,
            "identity": ref.identity,
            "path": shown_path(ref.path),
            "rank": rank,
            "bytes": num_bytes,
            "replicas": service.fleet.holders_of(ref.identity),
            "requests": watch.requests_of(ref.name),
        }
        for ref, (rank, num_bytes) in await adapters.looks.run(lambda: adapters.sized(adapters.all()))
    ]
    return JSONResponse({"router": service.dispatcher.router_id, "adapters": bodies})


@router.post("/v1/load_lora_adapter", **TEXT)
async def load(request: Request, body: LoadAdapterRequest) -> Response:
    """Give a name to an adapter, or to another one."""
    await _load(service_of(request), body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", **TEXT)
async def unload(request: Request, body: UnloadAdapterRequest) -> Response:
    """Forget the name of an adapter; requests that run keep it."""
    await _unload(service_of(request), body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post("/load_lora_adapter", **gives("All names, with their folders", *BODY))
async def load_as_sglang(request: Request, body: LoadAdapterRequest) -> Response:
    """Give a name to an adapter, in SGLang's form."""
    await _load(service_of(request), body)
    return await _loaded(service_of(request))


@router.post("/unload_lora_adapter", **gives("All names, with their folders", *BODY))
async def unload_as_sglang(request: Request, body: UnloadAdapterRequest) -> Response:
    """Forget the name of an adapter, in SGLang's form."""
    await _unload(service_of(request), body)
    return await _loaded(service_of(request))


async def _load(service: Service, body: LoadAdapterRequest) -> None:
    """Raises: InvalidAdapter, InvalidRequest, Overloaded."""
    refuse_unsupported(body, "lora_path", pinned=None, is_3d_lora_weight=None)
    adapters, in_place = service.adapters, bool(body.load_inplace)
    await adapters.loads.run(lambda: adapters.load(body.lora_name, body.lora_path, in_place=in_place))


async def _unload(service: Service, body: UnloadAdapterRequest) -> None:
    """Raises: UnknownModel, InvalidRequest, Overloaded."""
    await service.adapters.loads.run(lambda: service.adapters.unload(body.lora_name))


async def _loaded(service: Service) -> Response:
    loaded = {each.name: each.path for each in await service.adapters.looks.run(service.adapters.all)}
    return JSONResponse({"success": True, "loaded_adapters": loaded})
