"""What the replicas of each role are called, and the settings that they run with.

Pure. A role's own group (``prefill``, ``decode``) replaces parts of ``replicas``, ``parallel`` and ``cache``.
"""

import dataclasses
from collections.abc import Mapping

from deployments.schema import AppConfig
from routing.types import Role

DEPLOYMENTS: Mapping[Role, str] = {
    Role.UNIFIED: "ModelReplica",
    Role.PREFILL: "PrefillReplica",
    Role.DECODE: "DecodeReplica",
}


def roles_of(config: AppConfig) -> tuple[Role, ...]:
    """The roles that this application has replicas of."""
    return (Role.UNIFIED,) if config.mode == "unified" else (Role.PREFILL, Role.DECODE)


def config_of(config: AppConfig, role: Role) -> AppConfig:
    """``config`` as the replicas of ``role`` read it."""
    if role is Role.UNIFIED:
        return config
    own = config.prefill if role is Role.PREFILL else config.decode
    replicas = {name: getattr(own, name) for name in ("cpus", "gpus") if getattr(own, name) is not None}
    if own.count is not None:
        replicas |= {"count": own.count, "autoscaling": None}
    elif own.autoscaling is not None:
        replicas["autoscaling"] = own.autoscaling
    elif config.replicas.count == "auto":
        replicas["count"] = 1  # auto counts replicas of one kind; of two roles it is one each
    parallel = config.parallel if own.tp is None else dataclasses.replace(config.parallel, tp=own.tp)
    return config.model_copy(
        update={
            "replicas": config.replicas.model_copy(update=replicas),
            "parallel": parallel,
            "cache": dataclasses.replace(config.cache, **own.cache),
        }
    )
