"""What `deployments serve` takes for dead, how long it waits for Ray to mend, and a cluster that is away."""

import contextlib
import io
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest.mock import Mock

import pytest
import ray
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ReplicaState,
    ServeDeploySchema,
)

from deployments.command import cluster, serve, startup
from deployments.command.cluster import PATIENCE_S, Supervision, first_dead
from tests.harness import Clock


class Served:
    """An application with two deployments, and a Ray."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.dead, self.answers, self.there, self.serves = "", True, True, False
        self.status = ApplicationStatus.RUNNING
        self.num_running = 2
        self.supervision = Supervision(
            ["manta"],
            status=self.applications,
            serves=lambda name: self.serves,
            ray_lacks=lambda: self.dead,
            clock=self.clock,
        )

    def applications(self) -> Mapping[str, ApplicationStatusOverview]:
        if not self.answers:
            raise RuntimeError("the actor is restarting")
        healthy = DeploymentStatus.HEALTHY if self.num_running == 2 else DeploymentStatus.UNHEALTHY
        running = {ReplicaState.RUNNING: self.num_running} if self.num_running else {ReplicaState.STARTING: 2}
        told = DeploymentStatusOverview(
            status=healthy, status_trigger=DeploymentStatusTrigger.UNSPECIFIED, replica_states=running, message=""
        )
        application = ApplicationStatusOverview(
            status=self.status, message="", last_deployed_time_s=0.0, deployments={"ModelReplica": told}
        )
        return {"manta": application} if self.there else {}

    def after(self, seconds: float) -> str | None:
        self.clock.now_s += seconds
        return self.supervision.look()


@pytest.mark.parametrize("dead", ["GCS", "raylet"])
def test_a_process_of_ray_that_nothing_restarts_ends_it_at_once(dead: str) -> None:
    served = Served()
    assert served.after(0) is None
    served.dead = dead
    assert served.after(2) == f"Ray has died: its {dead} does not answer"
    assert served.supervision.ray_is_dead


def test_a_controller_that_comes_back_ends_nothing_and_one_that_does_not_does() -> None:
    served = Served()
    served.answers = False
    assert served.after(0) is None
    assert served.after(PATIENCE_S - 1) is None
    served.answers = True
    assert served.after(2) is None
    served.answers = False
    assert served.after(2) is None
    assert served.after(PATIENCE_S) == "Serve's controller has not answered for 60 s"
    assert not served.supervision.ray_is_dead


def test_an_application_lives_while_one_replica_of_each_deployment_runs() -> None:
    served = Served()
    served.num_running = 1
    assert served.after(0) is None
    assert served.after(10 * PATIENCE_S) is None
    served.num_running = 0
    assert served.after(0) is None
    assert served.after(PATIENCE_S) == "ModelReplica of application manta has had no replica that runs for 60 s"


@pytest.mark.parametrize("how", ["gone", "failed"])
def test_an_application_that_failed_or_was_deleted_has_died(how: str) -> None:
    served = Served()
    served.there = how != "gone"
    served.status = ApplicationStatus.DEPLOY_FAILED
    assert served.after(0) is None
    said = {"gone": "has not been there", "failed": "has been failed"}[how]
    assert served.after(PATIENCE_S) == f"application manta {said} for 60 s"


def test_a_file_that_cannot_be_deployed_ends_nothing_while_what_was_deployed_before_serves() -> None:
    """`serve deploy` of a bad file ended, a minute later, what `manta serve` had started on the cluster."""
    served = Served()
    served.status, served.serves = ApplicationStatus.DEPLOY_FAILED, True
    assert served.after(0) is None
    assert served.after(PATIENCE_S) is None
    served.serves = False
    assert served.after(1) is None
    assert served.after(PATIENCE_S) == "application manta has been failed for 60 s"


def test_a_process_of_ray_is_dead_once_nothing_listens_at_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        processes = {"GCS": f"127.0.0.1:{gcs.getsockname()[1]}"}
        with socket.create_server(("127.0.0.1", 0)) as raylet:
            processes["raylet"] = f"127.0.0.1:{raylet.getsockname()[1]}"
            assert first_dead(processes) == ""
        assert first_dead(processes) == "raylet"
    assert first_dead(processes) == "GCS"


@pytest.fixture
def _signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cluster, "_signalled", threading.Event())
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    cluster.listen_for_the_end()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
def test_a_signal_whose_exception_was_lost_ends_the_next_wait() -> None:
    """Python drops what is raised in callbacks: Manta then served on, deaf to the Ctrl-C."""
    cluster.pause(0)
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        cluster.pause(60)


@pytest.mark.usefixtures("_signals")
def test_while_ray_starts_a_signal_raises_until_it_is_seen() -> None:
    with pytest.raises(KeyboardInterrupt), cluster._insisting():  # noqa: PT012
        for _ in range(3):
            with contextlib.suppress(KeyboardInterrupt):
                if not cluster._signalled.is_set():
                    signal.raise_signal(signal.SIGINT)
                threading.Event().wait(10)
        threading.Event().wait(10)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_cluster_that_does_not_answer_is_said_with_what_to_do() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nothing listens there
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        started_s = time.monotonic()
        with pytest.raises(cluster.NoCluster, match=f"Ray at {address} .* does not answer") as raised:
            cluster.connect(address)
    assert "ray start --head" in str(raised.value)
    assert time.monotonic() - started_s < cluster.REACH_S + 5  # Ray alone takes minutes


@pytest.mark.parametrize("address", ["ray://head.example:10001", "http://head.example:8265", "ray://[::1]:10001"])
def test_the_address_of_a_ray_client_or_a_dashboard_is_no_name_to_look_up(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=AssertionError))
    with pytest.raises(cluster.NoCluster) as raised:
        cluster.connect(address)
    host = "[::1]" if "::1" in address else "head.example"
    assert str(raised.value).startswith(f"RAY_ADDRESS={address} is no address of a Ray cluster itself")
    assert f"give RAY_ADDRESS={host}:6379" in str(raised.value)


def test_where_ray_or_serve_is_late_it_is_said_where_the_logs_are_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    late = Exception("The current node timed out during startup. This could happen because ...\n  frame 1\n  frame 2")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(cluster.node, "Node", cluster.node.Node)  # put back at the end
    monkeypatch.setattr(ray, "init", Mock(side_effect=late))
    with pytest.raises(cluster.NoCluster) as ray_is_late:
        cluster.Cluster(None, print).start()
    first, logs = str(ray_is_late.value).splitlines()
    assert first == "Ray did not start: The current node timed out during startup. This could happen because ..."
    assert logs.startswith(f"Its logs are in {tmp_path}/ray/session_latest/logs. If the machine was busy, start Manta")
    monkeypatch.setattr(serve, "serve_start", Mock(side_effect=TimeoutError))
    with pytest.raises(cluster.NoCluster, match=r"^Serve at 0.0.0.0:8000 did not start: TimeoutError\nIts logs"):
        serve._deploy(ServeDeploySchema(applications=[]), {}, startup.StartProgress(io.StringIO()))
    crash = RuntimeError("HAProxy crashed during startup: [NOTICE] (9) : version\n[ALERT] (9) : Address already in use")
    told = ray.exceptions.RayTaskError("HAProxyManager.ready", "Traceback ...", crash)
    monkeypatch.setattr(serve, "serve_start", Mock(side_effect=told))
    with pytest.raises(cluster.NoCluster, match=r"did not start: \[ALERT\] \(9\) : Address already in use\nIts logs"):
        serve._deploy(ServeDeploySchema(applications=[]), {}, startup.StartProgress(io.StringIO()))
