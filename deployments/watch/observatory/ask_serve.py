"""Asks Ray Serve's controller what runs.

Never:  keeps anything; waits longer than ANSWER_S.
Thread: its functions block; call them on a thread.
"""

import ray
from ray.serve.context import _get_global_client

from deployments.watch.observatory.serve_details import ServeDetails, details_of

ANSWER_S = 5.0


def listens_on() -> str:
    """What clients connect to (http_options.host)."""
    client = _get_global_client()
    assert client is not None, "this process is one of Serve's"
    return str(client.http_config.host)


def ask(application: str) -> ServeDetails:
    """As of now. `serve.status()` is public, but does not say how many replicas are wanted; what it is made of does."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return ServeDetails()
    details = ray.get(client._controller.get_serve_instance_details.remote(), timeout=ANSWER_S)
    return details_of(details, application)
