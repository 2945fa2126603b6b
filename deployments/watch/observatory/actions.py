"""What an operator sees of one replica, and does with it: facts, log, stacks; flush, drain, kill.

    flush   every cached prefix is forgotten; refused while requests run there
    drain   no new request; those that run end (for at most replicas.drain_timeout_s); Serve starts another one and
            ends this one. Serve stops no replica by name, so the replica fails its health checks, three in a row
    kill    the process ends at once; its requests go on at other replicas, and Serve starts another one

Owns:      these routes.
Never:     does anything on the word of a page of another site; reads a path or a process that a client names.
Invariant: without an admin key only the facts are shown, as `GET /get_server_info` shows them.
Thread:    the observatory's event loop; files are read, and processes looked at, on a thread or in a task of the node.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import ray
from fastapi import APIRouter, Depends, Request, Response
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve._private.logging_utils import get_serve_logs_dir

from deployments.fleet.node_tasks import in_task
from deployments.fleet.seen import SeenReplica
from deployments.http.access import BrowserRules, Refused
from deployments.places import shown_path
from deployments.tenancy.keys import KEY_VARIABLE
from deployments.watch import process
from deployments.watch.observatory.fan_in import Fetch, fetch_text
from deployments.watch.observatory.parts import number_in, parts_of
from deployments.watch.observatory.serve_details import Listed
from replicas.errors import Fault, InvalidRequest, MantaError

log = logging.getLogger(__name__)

METRICS_S = 5.0
FLUSH_S = 2.0  # how long a flush waits for requests to end
LINES, MOST_LINES = 200, 2000
FACTS = (
    "pid", "model_path", "architecture", "dtype", "weights", "context_len", "tp", "page_size", "page_bytes", "pool",
    "host_bytes", "num_threads", "attention", "attention_why", "kernels", "products",
)  # fmt: skip
GPU = re.compile(r"^manta_replica_device_(?:memory_bytes|utilization_ratio){(.*)} (\S+)$", re.MULTILINE)
KIND = re.compile(r'\bkind="(\w+)"')
T = TypeVar("T")
Ask = Callable[..., Awaitable[Any]]  # replica id, method of ReplicaCalls, its arguments


class UnknownReplica(MantaError):
    """Serve runs no replica of this name."""

    fault = Fault.NOT_FOUND
    code = "replica_not_found"


class NotDone(MantaError):
    """The replica does not do what was asked now."""

    fault = Fault.CONFLICT
    code = "not_done"


class NotReadable(MantaError):
    """The replica's process or log cannot be read now."""

    fault = Fault.UNAVAILABLE
    code = "not_readable"


async def on_node(node_id: str, function: Callable[..., T], *args: Any) -> T:
    """Call ``function`` on a node. Raises: NotReadable."""
    if node_id == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(function, *args)
    try:
        return await in_task(node_id, function, *args)
    except (TimeoutError, RayError) as error:
        raise NotReadable(f"node {node_id[:8]} did not answer ({type(error).__name__})") from error


def kill(actor: str) -> None:
    """End an actor of Serve at once."""
    try:
        ray.kill(ray.get_actor(actor, namespace=SERVE_NAMESPACE), no_restart=True)
    except (ValueError, RayError) as error:
        raise NotDone(f"there is no such process now ({type(error).__name__})") from error


def read_log(name: str, num_lines: int) -> list[str] | None:
    """Return the end of one of Serve's log files on this node."""
    return process.read_end(str(Path(get_serve_logs_dir(), name)), num_lines)


class Actions:
    """What can be shown of a replica and done with it."""

    def __init__(
        self,
        *,
        find: Callable[[str], tuple[Listed, bool] | None],
        seen: Callable[[str], SeenReplica | None],
        ask: Ask,
        fetch: Fetch = fetch_text,
        there: Callable[..., Awaitable[Any]] = on_node,
    ) -> None:
        """``find``: `Looks.find`, blocks; ``seen``: what routers know of a replica; ``ask``: one replica, through any
        router; ``fetch``: the metrics of one process."""
        self._find = find
        self._seen = seen
        self._ask = ask
        self._fetch = fetch
        self._there = there

    async def facts(self, replica_id: str) -> dict[str, Any]:
        """Raises: UnknownReplica, NotReadable."""
        place, running = await self._place(replica_id)
        seen = self._seen(replica_id)
        facts = {} if seen is None or seen.info is None else asdict(seen.info)
        pid = place.pid if running else None
        used = {} if pid is None else await self._there(place.node_id, process.read_usage, pid)
        device = None if not facts else "cpu" if facts["kernels"] else "cuda"
        known = {name: facts.get(name) or None for name in FACTS} | {"pid": place.pid, "device": device}
        known["model_path"] = None if not facts else shown_path(facts["model_path"])
        gpu = await self._gpu(facts["metrics"]) if device == "cuda" and running else {}
        where = {"node_id": place.node_id, "address": place.address, "started": place.started, "running": running}
        return {"id": replica_id, **where, **known, **used, **gpu}

    async def _gpu(self, metrics: str | None) -> dict[str, float]:
        """Return what the replica's own metrics say of its GPU; nothing where they are off or do not come."""
        try:
            text = "" if metrics is None else await asyncio.wait_for(self._fetch(metrics), METRICS_S)
        except Exception as error:  # noqa: BLE001  # the other facts are shown without it
            log.info("the metrics of %s did not come: %r", metrics, error)
            return {}
        found = {}
        for labels, value in GPU.findall(text):
            kind = KIND.search(labels)
            found["gpu_utilization" if kind is None else f"gpu_{kind[1]}_bytes"] = float(value)
        return found

    async def log_lines(self, replica_id: str, num_lines: int) -> dict[str, Any]:
        """Return the last lines of its log, of one that has died too. Raises: UnknownReplica, NotReadable."""
        place, _ = await self._place(replica_id)
        lines = await self._there(place.node_id, read_log, place.log_file, num_lines) if place.log_file else None
        if lines is None:
            raise NotReadable(f"replica {replica_id} has no log yet")
        return {"file": place.log_file, "lines": lines}

    async def stacks(self, replica_id: str) -> dict[str, Any]:
        """Return the stacks of its threads, also while it hangs. Raises: UnknownReplica, NotReadable."""
        place, running = await self._place(replica_id)
        text = await self._there(place.node_id, process.read_stacks, place.pid) if running and place.pid else None
        if text is None:
            raise NotReadable(f"replica {replica_id} did not write its stacks: it starts, or has ended")
        return {"pid": place.pid, "stacks": text}

    async def flush(self, replica_id: str) -> str:
        """Raises: NotDone while requests run there; UnknownReplica."""
        await self._place(replica_id)
        if not await self._ask(replica_id, "flush_cache", FLUSH_S):
            raise NotDone(f"requests run on replica {replica_id}: its cache is as it was; try again when none runs")
        return "its cache is empty"

    async def drain(self, replica_id: str) -> str:
        """Raises: UnknownReplica."""
        await self._place(replica_id)
        await self._ask(replica_id, "drain")
        return "it takes no new requests; once those that run have ended, another replica stands in its place"

    async def kill(self, replica_id: str) -> str:
        """Raises: NotDone, UnknownReplica."""
        place, running = await self._place(replica_id)
        if not running or not place.actor:
            raise NotDone(f"replica {replica_id} no longer runs")
        await asyncio.to_thread(kill, place.actor)
        return "its process has ended; its requests go on at other replicas, and Serve starts a new one"

    async def _place(self, replica_id: str) -> tuple[Listed, bool]:
        """Return where a replica runs or ran, and whether it does now. Raises: UnknownReplica, NotReadable."""
        try:
            found = await asyncio.to_thread(self._find, replica_id)
        except RayError as error:
            raise NotReadable(f"Serve's controller did not answer ({type(error).__name__}): try again") from error
        if found is None:
            raise UnknownReplica(f"there is no replica {replica_id[:200]!r}")
        return found


OWN_PAGES = BrowserRules(hosts=None, origins=frozenset())
NO_KEY = f"this needs an admin key: set admin_key in the observatory's args, or {KEY_VARIABLE}, and log in"


async def not_kept(response: Response) -> None:
    """Have browsers keep no answer: a log stays behind the key."""
    response.headers["Cache-Control"] = "no-store"


async def operator_only(request: Request) -> None:
    """Refuse where no admin key is set, and a POST that another site's page sends. Raises: Refused."""
    if not parts_of(request).key.is_set:
        raise Refused(NO_KEY, code="admin_key_not_set")
    OWN_PAGES.check(request.method, request.url.path, request.headers)


def routes(actions: Actions) -> APIRouter:
    """Make the routes, to be put behind the admin key (`admit`)."""
    router = APIRouter(prefix="/api/replicas", dependencies=[Depends(not_kept)])
    guarded = [Depends(operator_only)]
    act = {"flush": actions.flush, "drain": actions.drain, "kill": actions.kill}

    @router.get("/{replica_id}")
    async def facts(replica_id: str) -> dict[str, Any]:
        return await actions.facts(replica_id)

    @router.get("/{replica_id}/logs", dependencies=guarded)
    async def logs(replica_id: str, request: Request) -> dict[str, Any]:
        num_lines = number_in(request, "lines", LINES, least=1, most=MOST_LINES)
        return await actions.log_lines(replica_id, num_lines)

    @router.get("/{replica_id}/stacks", dependencies=guarded)
    async def stacks(replica_id: str) -> dict[str, Any]:
        return await actions.stacks(replica_id)

    @router.post("/{replica_id}/{action}", dependencies=guarded)
    async def do(replica_id: str, action: str) -> dict[str, Any]:
        if action not in act:
            raise InvalidRequest(f"there is no action {action[:40]!r}; there are: {', '.join(act)}", param="action")
        log.warning("an operator asks: %s replica %.200r", action, replica_id)
        return {"replica": replica_id, "action": action, "message": await act[action](replica_id)}

    return router
