"""The metrics of this process from its start to its end: an emitter that knows its build, and the server over it.

Owns:   the server.
Never:  serves before everything that the process emits is bound: a first scrape without a series looks like a loss.
Thread: any.
"""

import importlib.metadata

from dashboards.metric import Process
from deployments.fleet.seen import Target
from deployments.watch.metrics.emitter import Emitter, Identity
from deployments.watch.metrics.server import MetricsServer


def emitter_of(process: Process, identity: Identity, *, disaggregated: bool) -> Emitter:
    """An emitter with what every process tells; the rest is to be bound to it."""
    emitter = Emitter(process, identity, disaggregated=disaggregated)
    versions = {name: importlib.metadata.version(name) for name in ("manta", "ray")}
    emitter.gauge("build_info", version=versions["manta"], ray=versions["ray"]).set(1)
    return emitter


class ServedMetrics:
    """``emitter``'s metrics on the port of ``server``, from now on."""

    def __init__(self, emitter: Emitter, server: MetricsServer, *, node_id: str) -> None:
        self._server = server
        server.serve(emitter.registry)
        self.target = Target(
            address=self._server.address,
            role=emitter.identity.role,
            process_id=emitter.identity.replica,
            node_id=node_id,
        )

    def close(self) -> None:
        """May be called again."""
        self._server.close()
