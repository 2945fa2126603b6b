"""Our log lines in Serve's log files, where operators look (``serve`` folder of Ray's logs, one file per replica).

With MANTA_OBSERVE=1 in the replicas' environment (``runtime_env``) hand-offs and decode steps are among them, a JSON
line each (kvtransfer/observe.py); every prompt's K/V is read and hashed for it, so not while speed counts.
"""

import logging
import os

from kvtransfer import observe

OURS = ("deployments", "replicas", "routing", "kvtransfer")


def into_serve() -> None:
    """Call once in each Serve replica, after Serve has set its own logging up."""
    serve = logging.getLogger("ray.serve")
    for name in OURS:
        logger = logging.getLogger(name)
        logger.handlers = list(serve.handlers)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    observe.enable(os.environ.get("MANTA_OBSERVE") == "1")
