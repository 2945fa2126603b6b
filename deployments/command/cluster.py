"""The Ray cluster that serves, one of our own or the one that RAY_ADDRESS names: its start, supervision and end.

    signal ──> KeyboardInterrupt ──> nothing served yet: Ray is ended at once      serving: Serve ends first
                 └── a second one meanwhile ──> every process of ours is killed

Owns:      the Ray it starts, with all its descendant processes; the handlers of SIGINT and SIGTERM; since when
           each application or deployment has been missing.
Never:     counts the death of one replica while another one runs: Serve replaces it.
Invariant: at the end no process of a Ray of our own is left; on a cluster that existed before, only Serve is ended.
           What Ray restarts (Serve's controller, replicas) has PATIENCE_S to return; Ray's GCS and the raylet of a Ray
           of our own, which nothing restarts, have none.
Thread:    the main thread.
"""

import contextlib
import io
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import psutil
import ray
from ray import serve
from ray._common.utils import get_default_ray_temp_dir
from ray._private import node
from ray.exceptions import AuthenticationError, RayError
from ray.serve.context import _get_global_client
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    ServeInstanceDetails,
)

OBJECT_STORE_BYTES = 200 << 20  # tokens do not pass through it
REACH_S = 5.0  # for an existing cluster to accept a connection
FINISH_S = 30.0  # Ray Serve's bound on ending applications that serve
FOREIGN_S = 8.0  # a cluster continues to remove applications after its client has left
KILL_S = 3.0
AGAIN_S = 0.3  # between two exceptions of one signal, until the first of them is seen
AT_ONCE = 130  # exit status after a second signal
_signalled = threading.Event()  # a signal has come
_insists = threading.Event()  # a signal raises until its exception is seen


class NoCluster(Exception):
    """The Ray that RAY_ADDRESS names cannot be used, or what was to be started here has not. Says what to do."""


class StoppedAtOnce(KeyboardInterrupt):
    """A second signal came while the first one was being handled."""


class ServingNode(node.Node):  # type: ignore[misc]  # Ray has no types
    """The processes of a Ray of our own, without three of Ray's that nothing here asks: the API server, for which
    `ray.init` would wait some seconds, the autoscaler's monitor and that of the logs."""

    def start_api_server(self, **_: Any) -> None: ...
    def start_monitor(self) -> None: ...
    def start_log_monitor(self) -> None: ...


class Cluster:
    """A running Ray. ``serving`` is set once every application runs, ``lost`` when Ray itself has died."""

    def __init__(self, address: str | None, say: Callable[[str], None]) -> None:
        """``address``: of an existing Ray; None starts one of our own."""
        self.ours = address is None
        self.serving = False
        self.lost = False
        self._name = "this machine" if address is None else address
        self._say = say

    def start(self) -> None:
        """Start Ray, or connect to it. Raises: NoCluster, which says what to do."""
        if not self.ours:
            self._say(f"connecting to Ray at {self._name}")
            connect(self._name)
            return
        self._say("starting Ray on this machine")
        node.Node = ServingNode
        with starts("Ray", lambda: os.path.join(get_default_ray_temp_dir(), "session_latest", "logs")):
            ray.init(
                address="local",
                namespace="serve",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level="warning",
            )

    def end(self) -> None:
        """End what was started here. Raises: StoppedAtOnce after a signal meanwhile; our processes are killed."""
        family = psutil.Process().children(recursive=True) if self.ours else []
        try:
            if not self.lost:  # Ray has died, and its shutdown would wait a minute for an answer
                self._say(f"stopping: {self._waits_for(len(family))}; Ctrl-C again stops at once")
                with contextlib.redirect_stdout(io.StringIO()):  # Ray says there that Serve's controller is gone
                    with contextlib.suppress(Exception):  # in whatever state Serve is, the processes are ended
                        self._end_serve()
                    ray.shutdown()
        except KeyboardInterrupt as second:
            raise StoppedAtOnce from second
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the third Ctrl-C must not interrupt the second's work
            _kill(family)

    def _waits_for(self, num_processes: int) -> str:
        if self.serving:
            return f"open requests are cut off; Serve has up to {FINISH_S:.0f} s to end"  # it kills its proxies first
        if self.ours:
            return f"nothing is served yet; waiting for Ray's {num_processes} processes to end"
        return (
            f"nothing is served yet; waiting up to {FOREIGN_S:.0f} s for Ray at {self._name} to remove the "
            "applications, which continues without us"
        )

    def _end_serve(self) -> None:
        if self.serving:
            serve.shutdown()
        elif not self.ours and (client := _get_global_client(raise_if_no_controller_running=False)) is not None:
            client.shutdown(timeout_s=FOREIGN_S)


@contextlib.contextmanager
def opened(say: Callable[[str], None]) -> Iterator[Cluster]:
    """Open the cluster that RAY_ADDRESS names, or a small one here, while the context lasts. Raises: NoCluster."""
    cluster = Cluster(os.environ.get("RAY_ADDRESS"), say)
    try:
        with _insisting():
            cluster.start()
        listen_for_the_end()  # Ray has set handlers of its own
        pause(0)
        yield cluster
    finally:
        if cluster.ours or ray.is_initialized():
            cluster.end()


@contextlib.contextmanager
def starts(what: str, logs: Callable[[], str]) -> Iterator[None]:
    """Start ``what`` in the context. ``logs``: finds where its logs are. Raises: NoCluster if it does not start."""
    try:
        yield
    except Exception as error:  # the edge: what is late or ends early is an Exception itself in Ray
        lines = str(getattr(error, "cause", None) or error).strip().splitlines() or [type(error).__name__]
        said = next((line for line in lines if "[ALERT]" in line), lines[0])  # HAProxy's word for what ends it
        raise NoCluster(
            f"{what} did not start: {said}\nIts logs are in {logs()}. If the machine was busy, start Manta again; "
            "`manta doctor` says what the machine lacks"
        ) from error


def connect(address: str) -> None:
    """Connect to an existing Ray. Raises: NoCluster, which says what to do."""
    if "://" in address:  # of a Ray client, which cannot supervise, or of the dashboard
        host = address.partition("://")[2].rpartition(":")[0] or "HOST"
        raise NoCluster(
            f"RAY_ADDRESS={address} is no address of a Ray cluster itself: give RAY_ADDRESS={host}:6379, where its "
            "head listens, and start Manta on a machine of the cluster"
        )
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdecimal():  # Ray itself tries for minutes
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level="warning")
    except AuthenticationError as error:
        raise NoCluster(
            f"Ray at {address} asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to "
            "what the cluster was started with"
        ) from error
    except (OSError, RayError, RuntimeError, ValueError) as error:
        shows = os.environ.get("RAY_AUTH_MODE") == "token"
        token = "" if shows else "; if it asks for a token, set RAY_AUTH_MODE=token"
        raise NoCluster(
            f"Ray at {address} (RAY_ADDRESS) does not answer: {error}\nStart it with `ray start --head`, give its "
            f"address, or unset RAY_ADDRESS to have Manta start a Ray of its own{token}"
        ) from error


def listen_for_the_end() -> None:
    """Make SIGINT and SIGTERM raise KeyboardInterrupt in the main thread."""
    # a shell may have started us with Ctrl-C ignored; the alarm is our own, see _insisting
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _interrupt)


def pause(seconds: float) -> None:
    """Sleep. Raises: KeyboardInterrupt if a signal has come, even if its exception was lost: Python drops exceptions of
    callbacks, such as those around the forks by which Ray starts its processes."""
    if _signalled.is_set():
        raise KeyboardInterrupt
    time.sleep(seconds)


@contextlib.contextmanager
def _insisting() -> Iterator[None]:
    """While the context lasts, raise again after a signal until one of its exceptions is seen."""
    _insists.set()
    try:
        yield
    finally:
        _insists.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _interrupt(*_: Any) -> None:
    _signalled.set()
    if _insists.is_set():
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    raise KeyboardInterrupt


def _kill(family: list[psutil.Process]) -> None:
    """Kill the processes of ``family`` that still run, and those that they have started since."""
    for process in list(family):
        with contextlib.suppress(psutil.NoSuchProcess):
            family += process.children(recursive=True)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # psutil compares start times: another process that has the id by now is not touched
    psutil.wait_procs(family, timeout=KILL_S)


LOOK_S = 2.0  # between two checks of the applications
PATIENCE_S = 60.0
ANSWER_S = 10.0  # Serve's controller, to one question
CONNECT_S = 5.0
WANTED = "RUNNING"  # of a replica's states
Status = Callable[[], Mapping[str, ApplicationStatusOverview]]


class Supervision:
    """The state of the applications, which is asked for from time to time."""

    def __init__(
        self,
        names: Collection[str],
        *,
        status: Status,
        serves: Callable[[str], bool],
        ray_lacks: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        """``names``: the applications that must live; ``status``: asks Serve, and raises if it does not answer.
        ``serves``: whether an application that could not be deployed again goes on with what it had; raises likewise.
        ``ray_lacks``: names a process of Ray that has died; "" if all live."""
        self._names = names
        self._status = status
        self._serves = serves
        self._ray_lacks = ray_lacks
        self._clock = clock
        self._since_s: dict[str, float] = {}  # what is wrong -> since when
        self.ray_is_dead = False

    def look(self) -> str | None:
        """Say why serving has ended; None while everything runs or may recover."""
        if self._ray_lacks() and (dead := self._ray_lacks()):
            self.ray_is_dead = True
            return f"Ray has died: its {dead} does not answer"
        now_s = self._clock()
        wrong = self._wrong()
        self._since_s = {each: self._since_s.get(each, now_s) for each in wrong}
        for each, since_s in self._since_s.items():
            if now_s - since_s >= PATIENCE_S:
                return f"{each} for {now_s - since_s:.0f} s"
        return None

    def _wrong(self) -> list[str]:
        try:
            applications = self._status()
            failed = [name for name, each in applications.items() if each.status is ApplicationStatus.DEPLOY_FAILED]
            dead = {name for name in failed if not self._serves(name)}
        except Exception:  # noqa: BLE001 - the edge: any error means that Serve does not answer
            return ["Serve's controller has not answered"]
        wrong = []
        for name in self._names:
            application = applications.get(name)
            if application is None:
                wrong.append(f"application {name} has not been there")
            elif name in dead:
                wrong.append(f"application {name} has been failed")
            else:
                lost = [each for each, overview in application.deployments.items() if _is_dead(overview)]
                wrong += [f"{each} of application {name} has had no replica that runs" for each in lost]
        return wrong


def _is_dead(deployment: DeploymentStatusOverview) -> bool:
    return deployment.status is DeploymentStatus.UNHEALTHY and not deployment.replica_states.get(WANTED)


def status_of_serve() -> Status:
    """Make a call that asks Serve's running controller; `serve.status` itself waits for its answer without a bound."""
    client = _get_global_client()
    assert client is not None

    def status() -> Mapping[str, ApplicationStatusOverview]:
        details = ray.get(client._controller.get_serve_instance_details.remote(), timeout=ANSWER_S)
        return dict(ServeInstanceDetails(**details)._get_status().applications)

    return status


def processes_of_ray(*, ours: bool) -> dict[str, str]:
    """Return the addresses of the processes without which Ray has died; ``ours``: it is all on this machine."""
    here = ray._private.worker._global_node
    found = {"GCS": ray.get_runtime_context().gcs_address}
    return found | {"raylet": f"{here.node_ip_address}:{here.node_manager_port}"} if ours else found


def first_dead(processes: Mapping[str, str]) -> str:
    """Return the name of the first of ``processes`` (name -> host:port) that accepts no connection; "" if all do."""
    return next((name for name, address in processes.items() if not listens(address)), "")


def listens(address: str) -> bool:
    """Whether a process accepts connections at ``address`` (host:port)."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError:
        return False
    return True
