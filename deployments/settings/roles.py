"""The names of the replicas of each role, and the settings that they run with.

A role's own group (``prefill``, ``decode``) replaces parts of ``replicas``, ``parallel`` and ``cache``.
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
    """List the roles that the application has replicas of."""
    return (Role.UNIFIED,) if config.mode == "unified" else (Role.PREFILL, Role.DECODE)


def config_of(config: AppConfig, role: Role) -> AppConfig:
    """Fill the settings of ``role``'s own group into ``config``, for the replicas of that role."""
    if role is Role.UNIFIED:
        on_gpus, most_s = config.replicas.gpus > 0, config.router.max_wait_s
        return config.model_copy(update={"transfer": config.transfer.resolved(on_gpus=on_gpus, max_wait_s=most_s)})
    own = config.prefill if role is Role.PREFILL else config.decode
    gpus = (config.replicas.gpus if each.gpus is None else each.gpus for each in (config.prefill, config.decode))
    replicas = {name: getattr(own, name) for name in ("cpus", "gpus") if getattr(own, name) is not None}
    if own.count is not None:
        replicas |= {"count": own.count, "autoscaling": None}
    elif own.autoscaling is not None:
        replicas["autoscaling"] = own.autoscaling
    elif config.replicas.count == "auto":
        replicas["count"] = 1  # auto is for one kind of replica; with two roles there is one of each
    parallel = config.parallel if own.tp is None else dataclasses.replace(config.parallel, tp=own.tp)
    return config.model_copy(
        update={
            "replicas": config.replicas.model_copy(update=replicas),
            "parallel": parallel,
            "cache": dataclasses.replace(config.cache, **own.cache),
            "transfer": config.transfer.resolved(on_gpus=any(gpus), max_wait_s=config.router.max_wait_s),
        }
    )


def keeps_whole_pages(config: AppConfig) -> bool:
    """Tell whether replicas of any role keep all tokens in layers that see a window too: on a GPU, or with a host tier.
    Then all do, since KV transfers want equal pages on both sides."""
    of_roles = [config_of(config, role) for role in roles_of(config)]
    return any(own.replicas.gpus or own.cache.host_memory_bytes for own in of_roles)


def check_ranks(config: AppConfig, *, num_kv_heads: int | None = None, latent: bool = False) -> None:
    """Check that each rank of several has a GPU of its own, if any, as NCCL wants. And that the ranks of both roles,
    or of two replicas that fetch, can hand pages to each other: each rank has whole KV heads, and all heads of a rank
    on the side with more ranks belong to one rank of the other side.

    Args:   num_kv_heads: of the model; None where it is not known yet.
            latent: whether all ranks have the same pages (MLA): then any sizes will do.
    Raises: InvalidConfig.
    """
    for role in roles_of(config):
        own = config_of(config, role)
        if own.parallel.tp > 1 and 0 < own.replicas.gpus < 1:
            raise InvalidConfig(
                f"gpus = {own.replicas.gpus:g} with tp = {own.parallel.tp} ({role.value} replicas): the ranks of a "
                "replica cannot share a GPU; set gpus: 1 (each rank gets one), or tp: 1"
            )
    if latent or (config.mode == "unified" and config.transfer.fetch == "off"):
        return
    sizes = {role: config_of(config, role).parallel.tp for role in roles_of(config)}
    if max(sizes.values()) % min(sizes.values()):
        raise InvalidConfig(
            f"prefill.tp = {sizes[Role.PREFILL]} and decode.tp = {sizes[Role.DECODE]}: one must be a multiple "
            "of the other, so that the heads that a rank sends are heads that one rank, or a whole number of them, "
            "receives"
        )
    for role, tp in sizes.items():
        name = "parallel" if role is Role.UNIFIED else role.value
        if num_kv_heads is not None and num_kv_heads % tp:
            raise InvalidConfig(
                f"{name}.tp = {tp} does not split the model's {num_kv_heads} KV heads, and only whole heads can be "
                f"handed over; allowed: {[each for each in range(1, num_kv_heads + 1) if num_kv_heads % each == 0]}"
            )
