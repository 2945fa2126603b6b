"""What Ray Serve says of the application: which replicas there are, and how many it wants of each deployment.

Pure; ask_serve.py asks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.settings.roles import DEPLOYMENTS

ROUTER = "router"
_ROLES = {name: role.value for role, name in DEPLOYMENTS.items()} | {"Router": ROUTER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One replica of a deployment, a router too, as Serve lists it."""

    replica_id: str
    role: str  # unified, prefill, decode, router
    node_id: str
    state: str  # Serve's: STARTING, RUNNING, STOPPING, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeDetails:
    """Of one application."""

    replicas: tuple[Listed, ...] = ()
    desired: Mapping[str, int] = field(default_factory=dict)  # role -> replicas wanted; of model replicas alone

    def running(self, role: str) -> int:
        return sum(each.role == role and each.state == "RUNNING" for each in self.replicas)


def details_of(details: Mapping[str, Any], application: str) -> ServeDetails:
    """Of the form of ray.serve.schema.ServeInstanceDetails, as a mapping."""
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
