"""What the replicas of each role are called, and the settings that they run with.

Pure. A role's own group (``prefill``, ``decode``) replaces parts of ``replicas``, ``parallel`` and ``cache``.
"""

import dataclasses
from collections.abc import Mapping

from deployments.settings.schema import AppConfig
from replicas.errors import InvalidConfig
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
    gpus = (config.replicas.gpus if each.gpus is None else each.gpus for each in (config.prefill, config.decode))
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
            "transfer": config.transfer.resolved(on_gpus=any(gpus)),
        }
    )


def check_ranks(config: AppConfig, *, num_kv_heads: int | None = None) -> None:
    """Whether the ranks of both roles can hand pages to each other: each has whole KV heads, and each rank of the
    side with more ranks has all its heads within one rank of the other.

    Args: num_kv_heads: of the model; None where that is not known here. Raises: InvalidConfig.
    """
    if config.mode == "unified":
        return
    prefill, decode = (config_of(config, role).parallel.tp for role in (Role.PREFILL, Role.DECODE))
    if max(prefill, decode) % min(prefill, decode):
        raise InvalidConfig(
            f"prefill.tp = {prefill} and decode.tp = {decode}: one must be a multiple of the other, so that the heads "
            "that a rank sends are heads that one rank, or a whole number of them, receives"
        )
    for name, tp in (("prefill", prefill), ("decode", decode)):
        if num_kv_heads is not None and num_kv_heads % tp:
            raise InvalidConfig(
                f"{name}.tp = {tp} does not split the model's {num_kv_heads} KV heads, which are handed over by whole "
                f"heads; allowed: {[each for each in range(1, num_kv_heads + 1) if num_kv_heads % each == 0]}"
            )
