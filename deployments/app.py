"""``deployments.app:build``: the settings of serve_config.yaml -> a Ray Serve application.

    RouterIngress (HTTP) ──handle──> ModelReplica x count        (one placement group per replica when tp > 1)
    mode: disaggregated  ──handle──> PrefillReplica x count ──K/V (kvtransfer)──> DecodeReplica x count
                         ──handle──────────────────────────────────────────────────^

Never: loads the model; but what is impossible is refused here, before a replica starts.
"""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from deployments import logs, tracing
from deployments.capacity import auto_count, replica_bytes
from deployments.model_face import read_face
from deployments.places import check_model_path, local_path, weights_bytes
from deployments.replica import ModelReplica
from deployments.replica_settings import AutoscalingSettings
from deployments.roles import DEPLOYMENTS, check_ranks, config_of, roles_of
from deployments.router import RouterIngress
from deployments.schema import AppConfig, parse
from deployments.transfer_settings import with_token
from replicas.config import Device, resolve
from replicas.runner.device import measure_hardware
from replicas.runner.weights import load_model_config

log = logging.getLogger("ray.serve")

ROUTER_MOST_ONGOING = 4096
DRAIN_LOOK_S = 0.5  # how often a leaving replica looks whether it is idle


def build(args: dict[str, Any]) -> Application:
    """The application. Raises: InvalidConfig, saying which setting, why, and what is allowed."""
    return build_of(ModelReplica, args)


def build_of(replica: type[ModelReplica], args: dict[str, Any]) -> Application:
    """As `build`, with another class of model replicas, as benchmarks have."""
    config, settings = checked(args)
    replicas = [
        serve.deployment(replica)
        .options(name=DEPLOYMENTS[role], **replica_options(config_of(config, role)))
        .bind(settings, role.value)
        for role in roles_of(config)
    ]
    router = serve.deployment(RouterIngress).options(
        name="Router",
        num_replicas=config.router.count,
        max_ongoing_requests=ROUTER_MOST_ONGOING,
        ray_actor_options={"num_cpus": config.router.cpus},
        graceful_shutdown_timeout_s=config.replicas.drain_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
        health_check_period_s=config.replicas.health_period_s,
        health_check_timeout_s=config.replicas.health_timeout_s,
        **logs.options(config.observability.log_format),
    )
    application: Application = router.bind(settings, *replicas)
    return application


def checked(args: dict[str, Any]) -> tuple[AppConfig, dict[str, Any]]:
    """The settings, and the arguments that the replicas read them from. Raises: InvalidConfig, as `build`."""
    config, settings = parse(args), args
    if config.mode == "disaggregated":
        settings = with_token(args)
        config = parse(settings)  # the token of the environment too
    check_config(config)
    return config, settings


def check_config(config: AppConfig) -> None:
    """Raises: InvalidConfig for what this model or any machine cannot do."""
    check_model_path(config.model.path)
    tracing.check(config.observability)
    read_face(config.model)
    path = local_path(config.model.path)
    if not Path(path).is_dir():
        check_ranks(config)
        return
    for role in roles_of(config):
        own = config_of(config, role)
        # the replicas' device, which the machine that checks may lack; its memory is not judged here
        hardware = replace(measure_hardware(), device=device_of(own))
        model = load_model_config(
            path,
            dtype=own.model.dtype,
            context_len=own.model.context_len,
            device=hardware.device,
            quantization=own.model.quantization,
        )
        check_ranks(config, num_kv_heads=model.num_kv_heads)
        resolve(
            model, hardware, cache=own.cache, scheduler=own.scheduler, parallel=own.parallel, attention=own.attention
        )


def device_of(config: AppConfig) -> Device:
    """What replicas with these settings compute on."""
    return "cuda" if config.replicas.gpus else "cpu"


def replica_options(config: AppConfig) -> dict[str, Any]:
    """Serve's options of the model replicas."""
    replicas, tp = config.replicas, config.parallel.tp
    environment = {"OMP_NUM_THREADS": str(max(1, math.floor(replicas.cpus)))}
    if device_of(config) == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides the GPUs of a machine only from who reserves some of them
    options: dict[str, Any] = {
        "max_ongoing_requests": config.scheduler.max_queued_requests + ROUTER_MOST_ONGOING,
        "health_check_period_s": replicas.health_period_s,
        "health_check_timeout_s": replicas.health_timeout_s,
        "graceful_shutdown_timeout_s": replicas.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": DRAIN_LOOK_S,
        "request_router_config": RequestRouterConfig(
            request_router_class="deployments.request_router.ExactReplicaRouter"
        ),
        "ray_actor_options": {
            "num_cpus": replicas.cpus,
            "num_gpus": replicas.gpus,
            "runtime_env": {"env_vars": environment},
        },
        **logs.options(config.observability.log_format),
    }
    if tp > 1:
        bundle = {"CPU": replicas.cpus} | ({"GPU": replicas.gpus} if replicas.gpus else {})
        options["placement_group_bundles"] = [bundle] * tp
        options["placement_group_strategy"] = "PACK"
    if replicas.autoscaling is not None:
        options["autoscaling_config"] = autoscaling_config(replicas.autoscaling)
    else:
        options["num_replicas"] = num_replicas(config)
    return options


def autoscaling_config(settings: AutoscalingSettings) -> AutoscalingConfig:
    """Serve's options: our rule (autoscaling.py), or Serve's own where its target is given."""
    serves = settings.model_dump(exclude={"ttft_objective_s", "pool_high", "running_high", "slack"}, exclude_none=True)
    if settings.target_ongoing_requests is not None:
        return AutoscalingConfig(**serves)
    objective = {
        "ttft_s": settings.ttft_objective_s,
        "pool_high": settings.pool_high,
        "running_high": settings.running_high,
        "slack": settings.slack,
    }
    policy = AutoscalingPolicy(policy_function="deployments.autoscaling:TtftPolicy", policy_kwargs=objective)
    return AutoscalingConfig(**serves, policy=policy)


def num_replicas(config: AppConfig) -> int:
    """The count that the settings ask for, or that this cluster carries."""
    if config.replicas.count != "auto":
        return config.replicas.count
    available = measure_hardware().available_memory_bytes
    need = replica_bytes(
        config.cache, available_bytes=available, weights_bytes=weights_bytes(config.model.path)
    )
    count, why = auto_count(
        num_cpus=ray.cluster_resources().get("CPU", 1.0),
        cpus_per_replica=config.replicas.cpus * config.parallel.tp,
        available_bytes=available,
        bytes_per_replica=need,
    )
    log.info("replicas.count: auto -> %d (%s)", count, why)
    return count
