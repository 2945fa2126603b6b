"""``deployments.watch.observatory.app:build``: the observatory, a Serve application beside the one it watches.

One replica that no request passes: when it dies or hangs, requests go on, and Serve starts it again.
"""

from typing import Any

from ray import serve
from ray.serve import Application

from deployments import logs
from deployments.watch.observatory.ingress import Observatory
from deployments.watch.observatory.settings import parse, with_key
from deployments.watch.observatory.viewers import MOST_VIEWERS

MOST_BESIDES = 64  # calls at once that are no viewers: pages, scrapes
STOP_S = 2.0  # a viewer's stream never ends by itself


def build(args: dict[str, Any]) -> Application:
    """The application. Raises: InvalidConfig."""
    settings = with_key(args)
    log_format = parse(settings).log_format
    deployment = serve.deployment(Observatory).options(
        name="Observatory",
        num_replicas=1,
        max_ongoing_requests=MOST_VIEWERS + MOST_BESIDES,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=STOP_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        health_check_timeout_s=15,
        **logs.options(log_format),
    )
    application: Application = deployment.bind(settings)
    return application
