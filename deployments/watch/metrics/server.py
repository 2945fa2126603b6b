"""A process's metrics over HTTP, on a port of their own: a scrape must reach this process and no other.

Owns:      one socket, taken before there are metrics to show, and its thread; each scrape has a thread of its own for
           as long as it lasts, and at most `MAX_SCRAPES` run at once.
Never:     answers on an event loop: a scrape and a busy process never wait for each other. Serves before everything
           that the process emits is bound: a first scrape that lacks a series looks like a loss.
Invariant: after `close` nothing listens.

Text format 0.0.4, or OpenMetrics where asked for; gzip where accepted (the client library's WSGI app).
"""

import contextlib
import hmac
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from deployments.fleet.seen import Target
from deployments.tenancy.keys import digest
from deployments.watch.metrics.emitter import Emitter
from replicas.errors import InvalidConfig

log = logging.getLogger(__name__)

READ_S = 10.0  # a client that sends nothing for this long is dropped
LEAVES_S = 1.0  # how long a scrape that is cut off may take to end
MAX_SCRAPES = 16  # at once; with one more, the oldest is cut off


class MetricsServer:
    """The server of one process's metrics: it has its port once made; a scrape that comes before `serve` waits."""

    def __init__(self, *, host: str, port: int = 0, guard: bytes | None = None) -> None:
        """``host``: this node's address, as others reach it. ``port``: 0 takes any that is free. ``guard``: digest of
        the key that is asked for (keys.py); None: of none.

        Raises: InvalidConfig when the port is taken.
        """
        try:
            self._server = _Server((host, port), _family_of(host))
        except OSError as error:
            raise InvalidConfig(
                f"observability.metrics_port = {port}: {host}:{port} cannot be listened on ({error.strerror}); with "
                "several processes on a node each needs a port of its own: leave it at 0"
            ) from error
        self._guard = guard
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._server.server_port}"  # host:port
        self._thread = threading.Thread(target=self._server.serve_forever, name="manta-metrics", daemon=True)

    def serve(self, registry: CollectorRegistry) -> None:
        """Start to answer with ``registry``'s metrics; call it once."""
        app: WSGIApplication = make_wsgi_app(registry)
        self._server.set_app(app if self._guard is None else _guarded(app, self._guard))
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    timeout = READ_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line per scrape is noise."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        self._open: dict[Any, None] = {}  # sockets of scrapes, the oldest first
        self._free = threading.Semaphore(MAX_SCRAPES)
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            with self._lock, contextlib.suppress(OSError, StopIteration):
                next(iter(self._open)).shutdown(socket.SHUT_RDWR)  # its thread sees the end and returns
            if not self._free.acquire(timeout=LEAVES_S):
                self.shutdown_request(request)
                return
        with self._lock:
            self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                del self._open[request]
            self._free.release()

    def server_bind(self) -> None:
        """Bind without looking up the host's full name, which can take seconds if no name server answers."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log one line: a scraper that hangs up or sends nothing needs no stack on stderr."""
        log.info("a scrape from %s failed: %r", client_address, sys.exception())


def _guarded(app: WSGIApplication, guard: bytes) -> WSGIApplication:
    """Wrap ``app`` so that it answers only requests with the key as a bearer token."""

    def checked(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        scheme, _, key = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(digest(key), guard):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", 'Bearer realm="manta"'), ("Content-Length", "0")])
        return []

    return checked


def _family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class ServedMetrics:
    """An emitter's metrics, served from its making until `close`."""

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
        """Stop serving. Idempotent."""
        self._server.close()
