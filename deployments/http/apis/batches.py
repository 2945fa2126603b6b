"""The routes of OpenAI's files and batches, as its SDK calls them; batches/ keeps and runs them.

Owns:      the form of files and batches in answers.
Never:     holds a file: one that comes goes to disk, one that goes comes from there.
Invariant: a file or a batch is there for the key that made it; to any other it does not exist.
"""

import asyncio
import contextlib
import json
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from deployments.batches.runner import ENDPOINTS
from deployments.batches.store import BatchStore, FolderFails, FolderFull, Row, TooMany
from deployments.http.access import caller_of, read_chunks
from deployments.http.api_document import gives, shape
from deployments.http.apis.multipart import boundary_of, read_form
from deployments.http.bodies import BatchRequest, PathName, Route
from deployments.http.http_errors import BodyTooLarge, BodyTooSlow, Busy
from deployments.http.service import service_of
from replicas.errors import Fault, InvalidRequest, MantaError
from replicas.types import MAX_DEADLINE_S

router = APIRouter(route_class=Route)
T = TypeVar("T")
MOST_UPLOADS, MOST_OF_KEY = 8, 2  # at a time, in all and of one key of several
FORM_BYTES = 64 << 10  # of a form beside its file
LEAST_RATE = 64 << 10  # bytes a second of an upload on average, beyond body_timeout_s
MOST_DRAINED, DRAIN_S = 8 << 20, 2.0  # bytes and time
LATE_S = 40.0  # that a client waits for the folder, which may wait for another change for 30
MOST_KEPT_S = 30 * 24 * 3600
_uploads = Counter[str]()  # those that run, by key
_WINDOW = re.compile(r"([1-9]\d{0,5})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_TIMES = [
    "created",
    "in_progress",
    "expires",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": shape(
                    {"expires_after[anchor]": {"const": "created_at"}, "expires_after[seconds]": {"type": "integer"}},
                    file={"contentMediaType": "application/octet-stream"}, purpose={"type": "string"},
                )
            }
        },
    }
}  # fmt: skip
_PAGE = [
    {"name": "after", "in": "query", "schema": {"type": "string"}},
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1}},
]
_OF_FILES = [
    {"name": "purpose", "in": "query", "schema": {"type": "string"}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
]


class FileContent(FileResponse):
    """A file as it was uploaded."""

    media_type = "application/octet-stream"


class NoBatches(MantaError):
    """This server has no folder for files and batches."""

    fault = Fault.NOT_FOUND
    code = "batches_off"


class NotThere(MantaError):
    """No file or batch of this id belongs to this key."""

    fault = Fault.NOT_FOUND
    code = "not_found"


@router.post("/v1/files", openapi_extra=_FORM, **gives("OpenAI's `file`", 400, 404, 408, 413, 429, 499, 503, 507))
async def upload_file(request: Request) -> Response:
    """Keep a file, as it comes, for batches."""
    async with contextlib.aclosing(read_chunks(request, timeout_s=service_of(request).body_timeout_s)) as chunks:
        try:
            store, boundary = _store(request), boundary_of(request.headers.get("content-type", ""))
            with _counted(request):
                async with contextlib.aclosing(_bounded(request, chunks)) as bounded:
                    return JSONResponse(_file(await _kept(request, store, bounded, boundary)))
        except (InvalidRequest, NoBatches, Busy, FolderFails, FolderFull, TooMany):
            await _drain(chunks)
            raise


@contextlib.contextmanager
def _counted(request: Request) -> Iterator[None]:
    """Count an upload while it runs. Raises: Busy, where there are too many."""
    owner = caller_of(request).name
    if _uploads.total() >= MOST_UPLOADS or (_uploads[owner] >= MOST_OF_KEY and not _is_alone(request)):
        raise Busy(f"{_uploads[owner]} files of this key are being uploaded, and others': try again later")
    _uploads[owner] += 1
    try:
        yield
    finally:
        _uploads[owner] -= 1


def _is_alone(request: Request) -> bool:
    """Whether there are no other keys."""
    return bool(request.app.state.keys.num <= 1)


async def _call(request: Request, call: Callable[..., T], *args: Any, **named: Any) -> T:
    """Make a call of the store. Raises: FolderFails, and what it raises."""
    store = _store(request)
    try:
        async with asyncio.timeout(LATE_S):  # TimeoutError is an OSError
            return await store.run(call, *args, **named)
    except (OSError, sqlite3.Error) as error:
        raise store.failure(error) from error


async def _bounded(request: Request, chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield an upload within bounds on the whole of it. Raises: BodyTooLarge, BodyTooSlow."""
    service, begun_s, num_bytes = service_of(request), time.monotonic(), 0
    async for chunk in chunks:
        num_bytes += len(chunk)
        if num_bytes > service.max_file_bytes + FORM_BYTES:
            raise BodyTooLarge(f"the form has more than {service.max_file_bytes + FORM_BYTES:,} bytes")
        if time.monotonic() - begun_s > service.body_timeout_s + num_bytes / LEAST_RATE:
            raise BodyTooSlow(f"less than {LEAST_RATE:,} bytes of the upload came in a second")
        yield chunk


async def _kept(request: Request, store: BatchStore, chunks: AsyncIterator[bytes], boundary: bytes) -> Row:
    """Keep the file of a form. Raises: as `read_form`, InvalidRequest, FolderFull, TooMany, FolderFails."""
    owner, most = caller_of(request).name, service_of(request).max_file_bytes
    announced = request.headers.get("content-length", "")
    num_bytes = min(int(announced), most) if announced.isdecimal() else most
    file_id = await _call(request, store.new_file, owner, num_bytes=num_bytes, alone=_is_alone(request))
    path, is_kept = store.path(file_id), False
    try:
        fields, filename = await read_form(chunks, boundary, path, max_bytes=most, run=store.run)
        if filename is None:
            raise InvalidRequest("file: the form has no file", param="file")
        purpose, kept_s, name = fields.get("purpose", "")[:64], _kept_s(fields), filename[:512]
        if not purpose:
            raise InvalidRequest("purpose: is missing; that of a batch's input is batch", param="purpose")

        def keep() -> Row:
            with path.open("rb+") as file:
                os.fsync(file.fileno())
            return store.add_file(file_id, owner=owner, filename=name, purpose=purpose, kept_s=kept_s)

        row = await store.run(keep)
        is_kept = True
        return row
    except (OSError, sqlite3.Error) as error:
        raise store.failure(error) from error
    finally:
        if not is_kept:
            with contextlib.suppress(OSError):
                await store.run(path.unlink, missing_ok=True)
            await store.run(store.drop_room, file_id)


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    """Read what a refused client still sends, for a moment: one that sees its connection closed shows no answer."""
    num_bytes = 0
    with contextlib.suppress(MantaError, TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            async for chunk in chunks:
                num_bytes += len(chunk)
                if num_bytes > MOST_DRAINED:
                    return


@router.get(
    "/v1/files", openapi_extra={"parameters": [*_PAGE, *_OF_FILES]}, **gives("A page of files", 400, 404, 503, 507)
)
async def list_files(request: Request) -> Response:
    """List this key's files, the newest first."""
    given, store = request.query_params, _store(request)
    order = given.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: must be asc or desc", param="order")
    rows, has_more = await _call(
        request, store.files, caller_of(request).name, purpose=given.get("purpose"), after=given.get("after"),
        most=_limit(request, 10_000, 10_000), ascending=order == "asc",
    )  # fmt: skip
    return _list([_file(row) for row in rows], has_more=has_more)


@router.get("/v1/files/{file_id}", **gives("OpenAI's `file`", 404, 503, 507))
async def retrieve_file(request: Request, file_id: PathName) -> Response:
    """Show what is known of a file."""
    return JSONResponse(_file(await _row(request, _store(request).file, file_id)))


@router.get("/v1/files/{file_id}/content", response_class=FileContent, **gives(None, 404, 503, 507))
async def file_content(request: Request, file_id: PathName) -> Response:
    """Send a file's content."""
    store = _store(request)
    row = await _row(request, store.file, file_id)
    return FileContent(store.path(row["id"]), media_type=FileContent.media_type)


@router.delete("/v1/files/{file_id}", **gives("That the file is deleted, as OpenAI says it", 404, 409, 503, 507))
async def delete_file(request: Request, file_id: PathName) -> Response:
    """Delete a file that no open batch reads."""
    await _row(request, _store(request).delete_file, file_id)
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


@router.post("/v1/batches", **gives("OpenAI's `batch`", 400, 404, 408, 413, 415, 429, 499, 503, 507))
async def create_batch(request: Request, body: BatchRequest) -> Response:
    """Run the requests of a file when replicas have room."""
    store, owner = _store(request), caller_of(request).name
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint: must be one of {', '.join(ENDPOINTS)}", param="endpoint")
    found = _WINDOW.fullmatch(body.completion_window)
    window_s = int(found[1]) * _SECONDS[found[2]] if found is not None else 0
    if not 0 < window_s <= MAX_DEADLINE_S:
        raise InvalidRequest("completion_window: must be as 24h, and at most 7d", param="completion_window")
    if body.metadata is not None and len(json.dumps(body.metadata)) > 16 << 10:
        raise InvalidRequest("metadata: has more than 16 KiB", param="metadata")
    file = await _call(request, store.file, owner, body.input_file_id)
    if file is None or file["purpose"] != "batch":
        why = "there is no such file of this key" if file is None else f"its purpose is {file['purpose']}, not batch"
        raise InvalidRequest(f"input_file_id: {why}", param="input_file_id")
    row = await _call(
        request, store.add_batch, owner=owner, endpoint=body.endpoint, input_file_id=body.input_file_id,
        window=body.completion_window, window_s=window_s, metadata=body.metadata, alone=_is_alone(request),
    )  # fmt: skip
    return JSONResponse(batch_body(row))


@router.get("/v1/batches", openapi_extra={"parameters": _PAGE}, **gives("A page of batches", 400, 404, 503, 507))
async def list_batches(request: Request) -> Response:
    """List this key's batches, the newest first."""
    store, most = _store(request), _limit(request, 20, 100)
    rows, has_more = await _call(
        request, store.batches, caller_of(request).name, after=request.query_params.get("after"), most=most
    )
    return _list([batch_body(row) for row in rows], has_more=has_more)


@router.get("/v1/batches/{batch_id}", **gives("OpenAI's `batch`", 404, 503, 507))
async def retrieve_batch(request: Request, batch_id: PathName) -> Response:
    """Show how far a batch is."""
    return JSONResponse(batch_body(await _row(request, _store(request).batch, batch_id, what="batch")))


@router.post("/v1/batches/{batch_id}/cancel", **gives("OpenAI's `batch`", 404, 503, 507))
async def cancel_batch(request: Request, batch_id: PathName) -> Response:
    """End a batch, unless it has ended; what is answered becomes its output."""
    return JSONResponse(batch_body(await _row(request, _store(request).cancel, batch_id, what="batch")))


def batch_body(row: Row) -> dict[str, Any]:
    """Make a batch in OpenAI's form."""
    same = ("id", "endpoint", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id")
    errors = None if row["errors"] is None else {"object": "list", "data": json.loads(row["errors"])}
    return {
        **{name: row[name] for name in same},
        **{f"{name}_at": row[f"{name}_at"] for name in _TIMES},
        "object": "batch",
        "errors": errors,
        "metadata": json.loads(row["metadata"]),
        "request_counts": {name: row[name] for name in ("total", "completed", "failed")},
    }


def _file(row: Row) -> dict[str, Any]:
    shown = {name: row[name] for name in ("id", "bytes", "created_at", "expires_at", "filename", "purpose")}
    return {**shown, "object": "file", "status": "processed", "status_details": None}


def _list(data: list[dict[str, Any]], *, has_more: bool) -> Response:
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return JSONResponse({"object": "list", "data": data, **ends, "has_more": has_more})


def _store(request: Request) -> BatchStore:
    store = service_of(request).batches
    if store is None:
        raise NoBatches(
            "this server keeps no files and runs no batches: set router.batch_folder to a folder that all routers share"
        )
    return store


async def _row(request: Request, call: Callable[[str, str], T | None], name: str, *, what: str = "file") -> T:
    """Make a call of the store for one file or batch of this key. Raises: NotThere, and as `_call`."""
    found = await _call(request, call, caller_of(request).name, name)
    if not found:
        raise NotThere(f"there is no {what} {name[:200]!r} of this key")
    return found


def _limit(request: Request, default: int, most: int) -> int:
    given = request.query_params.get("limit", str(default))
    if not (given.isdecimal() and len(given) < 7 and 1 <= int(given) <= most):
        raise InvalidRequest(f"limit: must be 1 to {most:,}, got {given[:64]!r}", param="limit")
    return int(given)


def _kept_s(fields: dict[str, str]) -> int | None:
    given = fields.get("expires_after[seconds]")
    if fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise InvalidRequest("expires_after: anchor must be created_at", param="expires_after")
    if given is None:
        return None
    if not (given.isdecimal() and len(given) < 9 and 1 <= int(given) <= MOST_KEPT_S):
        raise InvalidRequest(f"expires_after: seconds must be 1 to {MOST_KEPT_S:,}", param="expires_after")
    return int(given)
