"""``manta serve CONFIG``: like ``serve run``, with progress, and no process is left at the end.

Owns:      the Serve applications of the file.
Invariant: Ctrl-C, SIGTERM or a failed start ends every process that it started (cluster.py).
Thread:    the main thread.

    check settings ──> Ray ──> Serve + deploy ──> watch until RUNNING ──> announce ──> supervise ──> stop all
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.api import serve_start
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve.config import gRPCOptions
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    LoggingConfig,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from deployments import logs
from deployments.command import cluster, log_files, startup
from deployments.command.announce import EventLines, Observatories, announce
from deployments.command.check import read
from deployments.settings.capacity import outages, shortages, too_wide
from deployments.settings.schema import AppConfig
from deployments.settings.settings_file import MANTA, OBSERVATORY, Given, check_port, refuse
from deployments.tenancy.keys import KEY_VARIABLE, KEYS_VARIABLE
from deployments.watch.observatory import serve_details
from deployments.watch.observatory import settings as observatory
from replicas.errors import InvalidConfig

LOOK_S = 0.5


def run(config_path: Given) -> int:
    """Serve ``config_path`` until a signal comes or Serve dies. Returns: the exit status."""
    progress = startup.StartProgress()
    try:
        return _run(config_path, progress)
    finally:
        progress.close()


def _run(config_path: Given, progress: startup.StartProgress) -> int:
    say = progress.say
    try:
        schema, configs = read(config_path, say)
        check_port(schema.http_options.host, schema.http_options.port)
        settle_key(schema, say, on_cluster="RAY_ADDRESS" in os.environ)
    except InvalidConfig as error:
        progress.close()
        return refuse(config_path, error)
    cluster.listen_for_the_end()
    try:
        with cluster.opened(say) as opened:
            for shortage in () if opened.ours else shortages(configs.values(), serve_details.capacity_of_cluster()):
                say(f"{shortage}; they start when the cluster has grown")
            opened.serving = _deploy(schema, configs, progress)
            if opened.serving:
                opened.lost = _until_the_end(configs, ours=opened.ours)
            return 1
    except cluster.NoCluster as error:
        progress.close()
        print(error, file=sys.stderr)
        return 1
    except cluster.StoppedAtOnce:
        progress.close()
        print("stopped at once", file=sys.stderr)
        return cluster.AT_ONCE
    except KeyboardInterrupt:
        progress.close()
        say("stopped")
    return 0


def check(config_path: Given) -> int:
    """Print whether ``config_path`` can be served. Returns: the exit status."""
    try:
        schema, configs = read(config_path, print)
        if (address := os.environ.get("RAY_ADDRESS")) is not None:
            _check_cluster(address, configs)
    except InvalidConfig as error:
        return refuse(config_path, error)
    print(f"{config_path} is in order")
    if address is not None:
        print("not looked at: whether the cluster's port is free")
        return 0
    try:  # another machine, or another hour, may have the address
        check_port(schema.http_options.host, schema.http_options.port)
    except InvalidConfig as error:
        print(f"but here it would not start now: {error}")
    return 0


def _check_cluster(address: str, configs: Mapping[str, AppConfig]) -> None:
    """Ask the Ray at ``address`` whether a node can hold the ranks of a replica, and whether what serves there would
    stop before its successor is ready. Raises: InvalidConfig that says so."""
    try:
        cluster.connect(address)
    except cluster.NoCluster as error:
        print(f"not looked at: whether the nodes can hold the replicas, and what serves there. {error}")
        return
    try:
        problems = too_wide(configs.values(), serve_details.capacity_of_cluster())
        for name, config in configs.items():
            problems += outages(config, serve_details.serving(name))
        if problems:
            raise InvalidConfig(*problems)
    except RayError as error:
        print(f"not looked at: what serves at {address}, since Serve does not answer: {error}")
    finally:
        ray.shutdown()


def settle_key(schema: ServeDeploySchema, say: Callable[[str], None], *, on_cluster: bool) -> None:
    """Bring the keys to the processes that build the applications.

    A Ray of our own has our environment: the admin key moves there, out of the arguments that Serve logs. An
    existing cluster has its own environment: our keys are sent as runtime_env. Raises: InvalidConfig.
    """
    applications = [each for each in schema.applications if each.import_path in (OBSERVATORY, MANTA)]
    if not on_cluster:
        observatory.check_one_key([_keyed(each) for each in applications])
    for each in applications:
        is_api = each.import_path == MANTA
        if not on_cluster:
            moved = observatory.key_moved(_keyed(each))
            each.args = {**each.args, "router": moved} if is_api else moved
            continue
        names = (KEY_VARIABLE, KEYS_VARIABLE) if is_api else (KEY_VARIABLE,)
        if (sent := observatory.key_sent(_keyed(each), each.runtime_env, names=names)) is not None:
            each.runtime_env = sent
            said = " and ".join(name for name in names if name in sent["env_vars"])
            say(
                f"{said} of this shell goes to the cluster as runtime_env of {each.name}, and Ray logs it there; to "
                "avoid that, set it where `ray start` runs, and not here"
            )


def _keyed(application: ServeApplicationSchema) -> dict[str, Any]:
    """Find the group of an application's settings that may hold the admin key."""
    return application.args if application.import_path == OBSERVATORY else application.args.get("router") or {}


def settle_log_format(schema: ServeDeploySchema, configs: Iterable[AppConfig]) -> None:
    """Have every process of Serve write JSON, the controller, proxies and observatories too, if a model's do."""
    if schema.logging_config is None and any(each.observability.log_format == "json" for each in configs):
        schema.logging_config = LoggingConfig(**logs.options("json")["logging_config"])


def _deploy(schema: ServeDeploySchema, configs: dict[str, AppConfig], progress: startup.StartProgress) -> bool:
    """Deploy as `serve run` does, and show the progress until every application runs. Returns: False if one failed."""
    progress.say("starting Serve")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the progress is shown here
    settle_log_format(schema, configs.values())
    options = schema.http_options
    with cluster.starts(f"Serve at {options.host}:{options.port}", get_serve_logs_dir):
        client = serve_start(
            http_options=schema.http_options.model_dump(),
            proxy_location=schema.proxy_location,
            global_logging_config=schema.logging_config,
            grpc_options=gRPCOptions(**schema.grpc_options.model_dump()),
        )
    folder = get_serve_logs_dir()
    log_files.remember(schema.http_options.port, folder)
    progress.say(f"logs: {folder}")
    replica_logs = startup.ReplicaLogs(Path(folder))
    client.deploy_apps(schema, _blocking=False)
    observatories = Observatories(schema, progress.say)
    failed = _until_running(progress, replica_logs, observatories)
    progress.close()
    if failed:
        for name, application in failed.items():
            print(f"{name} failed to start:\n{_why(application)}", file=sys.stderr)
        return False
    applications = serve.status().applications
    observatories.look(applications, last=True)
    announce(schema, configs, applications, progress.say, watched_at=observatories.addresses, logs=folder)
    EventLines(observatories.urls, sys.stdout).start()
    return True


def _until_the_end(names: Collection[str], *, ours: bool) -> bool:
    """Supervise the applications until serving has ended, and print why. Returns: whether Ray itself has died."""
    processes = cluster.processes_of_ray(ours=ours)
    served = cluster.Supervision(
        names,
        status=cluster.status_of_serve(),
        serves=lambda name: bool(serve_details.serving(name)),
        ray_lacks=lambda: cluster.first_dead(processes),
        clock=time.monotonic,
    )
    while (reason := served.look()) is None:
        cluster.pause(cluster.LOOK_S)
    print(f"serving has ended: {reason}", file=sys.stderr)
    return served.ray_is_dead


def _until_running(
    progress: startup.StartProgress, replica_logs: startup.ReplicaLogs, observatories: Observatories
) -> dict[str, ApplicationStatusOverview]:
    """Show the progress until every application runs or one has failed. Returns: those that failed."""
    while True:
        applications = serve.status().applications
        replica_logs.look()
        now: dict[str, startup.DeploymentProgress] = {}
        for name, each in applications.items():
            now |= startup.lines(name, each.deployments, replica_logs)
        progress.show(now)
        observatories.look(applications)
        failed = {
            name: each for name, each in applications.items() if each.status is ApplicationStatus.DEPLOY_FAILED
        }
        running = [each.status is ApplicationStatus.RUNNING for each in applications.values()]
        failed |= {name: each for name, each in applications.items() if startup.hopeless(_messages(each))}
        if failed or (running and all(running)):
            return failed
        cluster.pause(LOOK_S)


def _why(application: ApplicationStatusOverview) -> str:
    """Explain a failed start: by our own errors if there are any, else by all that Serve reports."""
    whole = _messages(application)
    return "\n".join(serve_details.our_errors(whole)) or whole


def _messages(application: ApplicationStatusOverview) -> str:
    """Join all messages of Serve about an application."""
    messages = [application.message, *(status.message for status in application.deployments.values())]
    return "\n".join(message for message in messages if message)
