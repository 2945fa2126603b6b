"""Our log lines in Serve's log files, where operators look (``serve`` folder of Ray's logs, one file per replica)."""

import logging

OURS = ("deployments", "replicas", "routing", "kvtransfer")


def into_serve() -> None:
    """Call once in each Serve replica, after Serve has set its own logging up."""
    serve = logging.getLogger("ray.serve")
    for name in OURS:
        logger = logging.getLogger(name)
        logger.handlers = list(serve.handlers)
        logger.setLevel(logging.INFO)
        logger.propagate = False
