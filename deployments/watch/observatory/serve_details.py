"""What Ray Serve's controller reports: the application's replicas, and how many each deployment should have.

Never:  keeps an answer; waits longer than ANSWER_S.
Thread: `ask` and `listens_on` block: call them on a thread. The rest is pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.serve.context import _get_global_client

from deployments.settings.roles import DEPLOYMENTS

ROUTER = "router"
_ROLES = {name: role.value for role, name in DEPLOYMENTS.items()} | {"Router": ROUTER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One replica of a deployment, a router too, as Serve lists it."""

    replica_id: str
    role: str  # unified, prefill, decode, router
    node_id: str
    state: str  # as Serve names it: STARTING, RUNNING, STOPPING, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeDetails:
    """The replicas of one application, and how many are wanted."""

    replicas: tuple[Listed, ...] = ()
    desired: Mapping[str, int] = field(default_factory=dict)  # role -> replicas wanted, of model replicas only

    def running(self, role: str) -> int:
        return sum(each.role == role and each.state == "RUNNING" for each in self.replicas)


def details_of(details: Mapping[str, Any], application: str) -> ServeDetails:
    """Read ``details``, which has the form of ray.serve.schema.ServeInstanceDetails, as a mapping."""
    deployments = (details["applications"].get(application) or {}).get("deployments") or {}
    replicas: list[Listed] = []
    desired = {}
    for name, deployment in deployments.items():
        role = _ROLES.get(name)
        if role is None:
            continue
        if role != ROUTER:
            desired[role] = int(deployment["target_num_replicas"])
        replicas += [
            Listed(
                replica_id=each["replica_id"],
                role=role,
                node_id=each.get("node_id") or "",
                state=str(getattr(each["state"], "value", each["state"])),
            )
            for each in deployment["replicas"]
        ]
    return ServeDetails(replicas=tuple(replicas), desired=desired)


ANSWER_S = 5.0


def listens_on() -> str:
    """Return the host that clients connect to (http_options.host)."""
    client = _get_global_client()
    assert client is not None, "this process is one of Serve's"
    return str(client.http_config.host)


def ask(application: str) -> ServeDetails:
    """Ask the controller. `serve.status()` is public but lacks the wanted number of replicas; its source has it."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return ServeDetails()
    details = ray.get(client._controller.get_serve_instance_details.remote(), timeout=ANSWER_S)
    return details_of(details, application)
