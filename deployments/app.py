"""``deployments.app:build``: the settings of serve_config.yaml -> a Ray Serve application.

    RouterIngress (HTTP) ──handle──> ModelReplica x count        (one placement group per replica when tp > 1)
    mode: disaggregated  ──handle──> PrefillReplica x count ──K/V (kvtransfer)──> DecodeReplica x count
                         ──handle──────────────────────────────────────────────────^

Never: loads the model. Impossible settings are refused here, before a replica starts.
"""

import logging
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException

from deployments import logs
from deployments.http.service import config_folder
from deployments.places import local_model, weights_bytes
from deployments.replica.feasible import checked
from deployments.replica.model_replica import ModelReplica
from deployments.router import RouterIngress
from deployments.settings.capacity import auto_count, num_routers, outages, shortages, too_wide
from deployments.settings.groups import AutoscalingSettings
from deployments.settings.roles import DEPLOYMENTS, config_of, roles_of
from deployments.settings.schema import AppConfig, notices
from deployments.tenancy.keys import GOOD_KEY_LEN, KEY_VARIABLE, without_keys
from deployments.watch.observatory import serve_details
from replicas.errors import InvalidConfig
from replicas.memory.ram import available_ram

log = logging.getLogger("ray.serve")

ROUTER_MOST_ONGOING = 4096
DRAIN_LOOK_S = 0.5  # between two looks of a leaving replica whether it is idle


class CannotBeServed(InvalidConfig, RayServeException):  # type: ignore[misc]  # Ray has no types
    """Settings that cannot be served. Of RayServeException Serve shows the text alone, and does not build again."""


def build(args: dict[str, Any]) -> Application:
    """Build the application. Raises: InvalidConfig, saying which setting, why, and what is allowed.

    Serve calls it in a process of the cluster, and leaves what it serves as it is until the application is built.
    """
    try:
        return build_of(ModelReplica, args)
    except InvalidConfig as error:
        raise CannotBeServed(*error.problems) from error


def build_of(replica: type[ModelReplica], args: dict[str, Any]) -> Application:
    """Build the application with another class of model replicas, as benchmarks do."""
    config, settings = checked(args)
    for sentence in notices(args):
        log.warning("%s", sentence)
    count = config.router.count or 1
    if ray.is_initialized():
        capacity = serve_details.capacity_of_cluster()
        count = num_routers(config, capacity)
        if wide := too_wide([config], capacity):
            raise InvalidConfig(*wide)
        for name in () if config.allow_outage else serve_details.being_built(args):
            if stopping := outages(config, serve_details.serving(name)):
                raise InvalidConfig(*stopping)
        for shortage in shortages([config], capacity):
            log.warning("%s; they wait until the cluster grows", shortage)
    keys, settings = config.router.known_keys(), without_keys(settings)
    for where in keys.short:
        told = "%s has a key of fewer than %d characters, which can be guessed: `manta key new` makes a long one"
        log.warning(told, where.rstrip(","), GOOD_KEY_LEN)
    if keys.asked and keys.admin is None:
        log.warning("API keys and no admin key (%s): routes of the admin and metrics refuse all", KEY_VARIABLE)
    if config.model.revision is None and local_model(config.model.path) is None:
        log.warning("model.revision is not set: each start loads the newest commit of %s. Set it to a commit; "
                    "the newest is now %s", config.model.path, config_folder(config.model).name)  # fmt: skip
    replicas = [
        serve.deployment(replica)
        .options(name=DEPLOYMENTS[role], **replica_options(config_of(config, role)))
        .bind(settings, role.value, keys.guard)
        for role in roles_of(config)
    ]
    router = serve.deployment(RouterIngress).options(
        name="Router",
        num_replicas=count,
        max_replicas_per_node=1 if config.router.count is None and count > 1 else None,
        max_surge_percent=100 if _may_overlap(config, count) else 0,
        max_ongoing_requests=ROUTER_MOST_ONGOING,
        ray_actor_options={"num_cpus": config.router.cpus},
        graceful_shutdown_timeout_s=config.replicas.drain_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
        health_check_period_s=config.replicas.health_period_s,
        health_check_timeout_s=config.replicas.health_timeout_s,
        **logs.options(config.observability.log_format),
    )
    if count > 1:  # replicas are not told: they stay when it changes
        settings = {**settings, "router": {**settings.get("router", {}), "count": count}}
    application: Application = router.bind(settings, *replicas, keys=keys)
    return application


def _may_overlap(config: AppConfig, num_routers: int) -> bool:
    """Whether the successor of the only router is to start before that stops: not where it would wait for ever, for a
    port or for a CPU. Of several, Serve replaces one after the other."""
    return num_routers == 1 and not config.observability.metrics_port and not config.router.cpus


def replica_options(config: AppConfig) -> dict[str, Any]:
    """Return Serve's options of the model replicas."""
    replicas, tp = config.replicas, config.parallel.tp
    options: dict[str, Any] = {
        "max_ongoing_requests": config.scheduler.max_queued_requests + ROUTER_MOST_ONGOING,
        "health_check_period_s": replicas.health_period_s,
        "health_check_timeout_s": replicas.health_timeout_s,
        "graceful_shutdown_timeout_s": replicas.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": DRAIN_LOOK_S,
        "request_router_config": RequestRouterConfig(
            request_router_class="deployments.dispatch.request_router.ExactReplicaRouter"
        ),
        # and no runtime_env: Ray would start a process for it, through a line of bash, where one stands by
        "ray_actor_options": {"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
        **logs.options(config.observability.log_format),
    }
    if tp > 1:
        bundle = {"CPU": replicas.cpus} | ({"GPU": replicas.gpus} if replicas.gpus else {})
        options["placement_group_bundles"] = [bundle] * tp
        options["placement_group_strategy"] = "STRICT_PACK"  # too_wide has seen whether a node is large enough
    if replicas.autoscaling is not None:
        options["autoscaling_config"] = autoscaling_config(replicas.autoscaling)
    else:
        options["num_replicas"] = num_replicas(config)
    return options


def autoscaling_config(settings: AutoscalingSettings) -> AutoscalingConfig:
    """Return Serve's options, with our rule (autoscaling.py)."""
    ours = {"ttft_objective_s", "pool_high", "running_high", "slack"}
    serves = settings.model_dump(exclude=ours, exclude_none=True)
    objective = {
        "ttft_s": settings.ttft_objective_s,
        "pool_high": settings.pool_high,
        "running_high": settings.running_high,
        "slack": settings.slack,
    }
    policy = AutoscalingPolicy(policy_function="deployments.autoscaling:TtftPolicy", policy_kwargs=objective)
    return AutoscalingConfig(**serves, policy=policy)


def num_replicas(config: AppConfig) -> int:
    """Return the count that the settings ask for, or that this cluster can carry."""
    if config.replicas.count != "auto":
        return config.replicas.count
    count, why = auto_count(
        config,
        serve_details.capacity_of_cluster(),
        available_bytes=available_ram(),
        weights_bytes=weights_bytes(config.model.path),
    )
    log.info("replicas.count: auto -> %d (%s)", count, why)
    return count
