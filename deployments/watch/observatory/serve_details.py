"""What Ray and Serve's controller report: the cluster's capacity, the application's replicas, and how many each
deployment should have.

Never:  keeps an answer, except `Looks` and `LiveView`; waits longer than ANSWER_S.
Thread: `Looks` is for any thread, and blocks, as `listens_on` does. `LiveView` is for an event loop. The rest is pure.
"""

import asyncio
import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.serve.context import _get_global_client

from deployments.settings.capacity import Capacity
from deployments.settings.roles import DEPLOYMENTS

ROUTER = "router"
CONTROLLER = "controller"
_OUR_ERROR = re.compile(r"^replicas\.errors\.(\w+: .*(?:\n[a-z][\w.]*(?: = .*|: .*))*)", re.MULTILINE)
_ROLES = {name: role.value for role, name in DEPLOYMENTS.items()} | {"Router": ROUTER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One replica of a deployment, a router too, as Serve lists it."""

    replica_id: str
    role: str  # unified, prefill, decode, router
    node_id: str
    state: str  # as Serve names it: STARTING, RUNNING, STOPPING, ...
    actor_id: str = ""
    actor: str = ""  # its name in Ray
    address: str = ""  # of its node
    pid: int | None = None  # None until it has started
    log_file: str = ""  # its name in Serve's folder of logs; "" until it has started
    started: float | None = None  # seconds since 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    """A process beside the model replicas: a router, a node's HAProxy with its manager, or Serve's controller."""

    name: str  # in a sentence
    place: str  # the next process of this place stands in for it
    actor_id: str
    leaves: bool = False  # Serve stops it
    starts: bool = False  # or a new controller has not asked it yet


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeDetails:
    """The replicas of one application, and how many are wanted."""

    helpers: Mapping[str, Helper] = field(default_factory=dict)  # by id of the process; empty: Serve did not tell
    ends: Mapping[str, str] = field(
        default_factory=dict
    )  # process -> Ray's reason (WORKER_DIED, ...), of the last ones
    failure: str = ""  # of the last deploy
    replicas: tuple[Listed, ...] = ()
    desired: Mapping[str, int] = field(default_factory=dict)  # role -> replicas wanted, of model replicas only
    started_s: float = 0.0  # when the application was deployed, seconds since 1970; 0: not known
    route_prefix: str = "/"  # of its API

    def running(self, role: str) -> int:
        return sum(each.role == role and each.state == "RUNNING" for each in self.replicas)


def details_of(details: Mapping[str, Any], application: str) -> ServeDetails:
    """Read ``details``, which has the form of ray.serve.schema.ServeInstanceDetails, as a mapping."""
    found = details["applications"].get(application) or {}
    deployments = found.get("deployments") or {}
    replicas: list[Listed] = []
    desired = {}
    for name, deployment in deployments.items():
        role = _ROLES.get(name)
        if role is None:
            continue
        if role != ROUTER:
            wanted = deployment.get("target_num_replicas")  # None where it is not told; 0 of one that ends
            desired[role] = len(deployment["replicas"]) if wanted is None else int(wanted)
        replicas += [
            Listed(
                replica_id=each["replica_id"],
                role=role,
                node_id=each.get("node_id") or "",
                state=str(getattr(each["state"], "value", each["state"])),
                actor_id=each.get("actor_id") or "",
                actor=each.get("actor_name") or "",
                address=each.get("node_ip") or "",
                pid=each.get("pid"),
                log_file=Path(each.get("log_file_path") or "").name,
                started=each.get("start_time_s"),
            )
            for each in deployment["replicas"]
        ]
    return ServeDetails(
        helpers=_helpers(details, replicas),
        failure=_failure(found) if found.get("status") == "DEPLOY_FAILED" else "",
        replicas=tuple(replicas),
        desired=desired,
        started_s=float(found.get("last_deployed_time_s") or 0.0),
        route_prefix=found.get("route_prefix") or "/",
    )


def _helpers(details: Mapping[str, Any], replicas: Iterable[Listed]) -> dict[str, Helper]:
    controller, found = details.get("controller_info") or {}, dict[str, Helper]()
    if life := controller.get("worker_id"):
        found[life] = Helper(name="Serve's controller", place=CONTROLLER, actor_id="")  # it has the same one for ever
    what = "HAProxy" if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else "Serve's proxy"
    for node_id, proxy in (details.get("proxies") or {}).items():
        status = str(getattr(proxy["status"], "value", proxy["status"]))
        if actor_id := proxy.get("actor_id"):
            name = f"{what} on {proxy.get('node_ip') or node_id[:8]}"
            found[actor_id] = Helper(name=name, place=node_id, actor_id=actor_id, leaves=status.startswith("DRAIN"),
                                     starts=status == "STARTING")  # fmt: skip
    for each in replicas:
        if each.role == ROUTER and each.state in ("RUNNING", "STOPPING"):
            name = f"router {each.replica_id.rpartition('#')[2]}"
            leaves = each.state == "STOPPING"
            found[each.replica_id] = Helper(name=name, place=ROUTER, actor_id=each.actor_id, leaves=leaves)
    return found


def _failure(application: Mapping[str, Any]) -> str:
    """Return why a deploy failed, in a line: our own errors, else the last line of Serve's message."""
    message = str(application.get("message") or "").strip()
    return " ".join(" ".join(our_errors(message)).split() or message.rpartition("\n")[2].split())[:MOST_CHARS]


def our_errors(text: str) -> list[str]:
    """Extract our own errors from a message of Serve, each once; some have several lines."""
    return list(dict.fromkeys(_OUR_ERROR.findall(text)))


ANSWER_S = 5.0
MOST_CHARS = 300
KEPT_UNDER, NAMESPACE = "observatory:{}", b"manta"


def end_of(actor_id: str) -> str:
    """Return Ray's reason for the end of an actor; "" where it has none, or does not tell."""
    try:
        actor = ray._private.state.actors(actor_id)
        cause = actor["DeathCause"].actor_died_error_context
        return str(cause.Reason.Name(cause.reason)) if actor["State"] == "DEAD" else ""
    except (RayError, KeyError, ValueError, AttributeError):
        return ""


def read_kept(application: str) -> bytes:
    """Read what an observatory of ``application`` has kept in the Ray cluster, which outlives it; b"" if nothing."""
    kept: bytes | None = internal_kv._internal_kv_get(KEPT_UNDER.format(application).encode(), namespace=NAMESPACE)
    return kept or b""


def write_kept(application: str, kept: bytes) -> None:
    internal_kv._internal_kv_put(KEPT_UNDER.format(application).encode(), kept, overwrite=True, namespace=NAMESPACE)


def listens_on() -> str:
    """Return the host that clients connect to (http_options.host)."""
    client = _get_global_client()
    assert client is not None, "this process is one of Serve's"
    return str(client.http_config.host)


def ask_all() -> Mapping[str, Any]:
    """Ask the controller. `serve.status()` is public but lacks the wanted number of replicas; its source has it.

    While an application is built anew, and after that has failed, Serve lists none of its deployments there, though
    they serve: the replicas that run are then asked for.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return {"applications": {}}
    details: Mapping[str, Any] = ray.get(client._controller.get_serve_instance_details.remote(), timeout=ANSWER_S)
    unlisted = {name: each for name, each in details["applications"].items() if not each.get("deployments")}
    if unlisted:
        for deployment, replicas in _running(client).items():
            if deployment.app_name in unlisted and replicas:
                found = {"replicas": [_shown(each) for each in replicas]}
                unlisted[deployment.app_name].setdefault("deployments", {})[deployment.name] = found
    return details


def capacity_of_cluster() -> Capacity:
    """Return the capacity of the Ray cluster that this process is connected to."""
    has = ray.cluster_resources()
    nodes = tuple(
        (node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0)) for node in ray.nodes() if node["Alive"]
    )
    return Capacity(num_cpus=has.get("CPU", 1.0), num_gpus=has.get("GPU", 0.0), where="the cluster", nodes=nodes)


def serving(application: str) -> dict[str, int]:
    """Return the ranks of a replica, of each deployment of model replicas of ``application`` that has some running."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return {}
    known = ray.get(client._controller.list_deployments_internal.remote(), timeout=ANSWER_S)
    return {
        each.name: len(known[each][0].replica_config.placement_group_bundles or [None])
        for each, replicas in _running(client).items()
        if each.app_name == application and each.name in DEPLOYMENTS.values() and replicas and each in known
    }


def being_built(args: Mapping[str, Any]) -> list[str]:
    """Return the applications that Serve builds with ``args``: a builder is not told which of them it builds."""
    return [
        str(name)
        for name, each in ask_all()["applications"].items()
        if each.get("status") == "DEPLOYING" and ((each.get("deployed_app_config") or {}).get("args") or {}) == args
    ]


def _running(client: Any) -> Mapping[Any, Any]:
    replicas: Mapping[Any, Any] = ray.get(client._controller._all_running_replicas.remote(), timeout=ANSWER_S)
    return replicas


def _shown(replica: Any) -> dict[str, Any]:
    """Write one that runs as the controller does, as far as it is known."""
    return {
        "replica_id": replica.replica_id.unique_id,
        "state": "RUNNING",
        "node_id": replica.node_id,
        "node_ip": replica.node_ip,
        "actor_name": replica.actor_name,
    }


LOOK_KEPT_S = 1.0
MOST_GONE = 64


class Looks:
    """Serve's list of one application, asked for at most once in LOOK_KEPT_S, and the model replicas that left it."""

    def __init__(
        self,
        application: str,
        *,
        ask: Callable[[], Mapping[str, Any]] = ask_all,
        end_of: Callable[[str], str] = end_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application = application
        self._ask = ask
        self._end_of = end_of
        self._clock = clock
        self._details = ServeDetails()
        self._failure: RayError | None = None  # of the last time it was asked
        self._asked_s: float | None = None
        self._known: dict[str, Listed] = {}  # model replicas by id; those seen last are last
        self._one_at_a_time = threading.Lock()

    def look(self) -> ServeDetails:
        """Raises: RayError."""
        with self._one_at_a_time:
            if self._asked_s is None or self._clock() - self._asked_s >= LOOK_KEPT_S:
                self._failure = None
                try:
                    self._take(details_of(self._ask(), self._application))
                except RayError as error:
                    self._failure = error
                self._asked_s = self._clock()
            if self._failure is not None:  # for all who waited: not each of them waits for ANSWER_S
                raise self._failure
            return self._details

    def find(self, replica_id: str) -> tuple[Listed, bool] | None:
        """Return where a model replica runs or ran, and whether it does now. Raises: RayError."""
        details = self.look()
        listed = self._known.get(replica_id)
        return None if listed is None else (listed, any(each.replica_id == replica_id for each in details.replicas))

    def _take(self, details: ServeDetails) -> None:
        details = replace(details, replicas=tuple(map(self._whole, details.replicas)))
        here = {each.replica_id: each for each in details.replicas if each.role != ROUTER}
        gone = [each for each in self._known.items() if each[0] not in here]
        before, ends = self._details.helpers, dict(self._details.ends)
        if details.helpers:
            ended = (each for each in before if each not in details.helpers and before[each].actor_id)
            ends |= {each: self._end_of(before[each].actor_id) for each in ended}
        # while its application is built anew, Serve tells no actor's id
        helpers = {
            each: before[each] if each in before and not it.actor_id else it
            for each, it in details.helpers.items()
            if each in before or not it.starts
        }
        details = replace(details, helpers=helpers, ends=dict(list(ends.items())[-MOST_GONE:]))
        self._details, self._known = details, dict(gone[-MOST_GONE:]) | here

    def _whole(self, listed: Listed) -> Listed:
        """Fill in what was known before: Serve tells less of replicas whose application it builds anew."""
        known = self._known.get(listed.replica_id)
        return listed if known is None or listed.pid is not None else replace(known, state=listed.state)


def live_view_of(details: Mapping[str, Any], application: str) -> str | None:
    """Find the path of the observatory that watches ``application``, in what `details_of` reads; None if none runs."""
    for each in details["applications"].values():
        prefix, config = each.get("route_prefix"), each.get("deployed_app_config") or {}
        watches = (config.get("args") or {}).get("application", "manta")
        if prefix and watches == application and "Observatory" in (each.get("deployments") or {}):
            return f"{prefix.rstrip('/')}/"
    return None


VIEW_KEPT_S = 5.0


class LiveView:
    """Where the live view of one application is; asks the controller at most once in VIEW_KEPT_S."""

    def __init__(
        self,
        application: str,
        *,
        ask: Callable[[], Mapping[str, Any]] = ask_all,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application = application
        self._ask = ask
        self._clock = clock
        self._path: str | None = None
        self._asked_s: float | None = None
        self._one_at_a_time = asyncio.Lock()

    async def path(self) -> str | None:
        """Return its path; the last one known where the controller does not answer."""
        async with self._one_at_a_time:
            if self._asked_s is None or self._clock() - self._asked_s >= VIEW_KEPT_S:
                with contextlib.suppress(RayError):
                    self._path = live_view_of(await asyncio.to_thread(self._ask), self._application)
                self._asked_s = self._clock()
        return self._path
