"""Looks whether what `make serve` has started is still there, so that a supervisor hears of its death.

Owns:      since when each thing has been missing.
Never:     ends anything; counts a single replica's death, which Serve mends, for as long as another one runs.
Invariant: what Ray restarts by itself (Serve's controller, replicas) has PATIENCE_S for it; Ray's GCS has none, since
           nobody starts that one again.
Thread:    the main thread.
"""

import socket
from collections.abc import Callable, Collection, Mapping

import ray
from ray.serve.context import _get_global_client
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    ServeInstanceDetails,
)

LOOK_S = 2.0
PATIENCE_S = 60.0
ANSWER_S = 10.0  # Serve's controller, to one question
CONNECT_S = 5.0
WANTED = "RUNNING"  # of a replica's states

Status = Callable[[], Mapping[str, ApplicationStatusOverview]]


class Supervision:
    """What is served, as asked from time to time."""

    def __init__(
        self, names: Collection[str], *, status: Status, gcs_answers: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        """``names``: the applications that must live; ``status``: of all, raises where Serve does not answer."""
        self._names = names
        self._status = status
        self._gcs_answers = gcs_answers
        self._clock = clock
        self._since_s: dict[str, float] = {}  # what is wrong -> since when
        self.ray_is_dead = False

    def look(self) -> str | None:
        """Why nothing is served any more; None while all lives, or may come back."""
        if not self._gcs_answers() and not self._gcs_answers():
            self.ray_is_dead = True
            return "Ray has died: its GCS does not answer"
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
        except Exception:  # noqa: BLE001 - the edge: whatever it is, Serve does not answer
            return ["Serve's controller has not answered"]
        wrong = []
        for name in self._names:
            application = applications.get(name)
            if application is None:
                wrong.append(f"application {name} has not been there")
            elif application.status is ApplicationStatus.DEPLOY_FAILED:
                wrong.append(f"application {name} has been failed")
            else:
                dead = [each for each, overview in application.deployments.items() if _is_dead(overview)]
                wrong += [f"{each} of application {name} has had no replica that runs" for each in dead]
        return wrong


def _is_dead(deployment: DeploymentStatusOverview) -> bool:
    return deployment.status is DeploymentStatus.UNHEALTHY and not deployment.replica_states.get(WANTED)


def status_of_serve() -> Status:
    """A call that asks Serve's controller, which runs; `serve.status` itself waits for its answer without a bound."""
    client = _get_global_client()
    assert client is not None

    def status() -> Mapping[str, ApplicationStatusOverview]:
        details = ray.get(client._controller.get_serve_instance_details.remote(), timeout=ANSWER_S)
        return dict(ServeInstanceDetails(**details)._get_status().applications)

    return status


def listens(address: str) -> bool:
    """Whether somebody accepts connections at ``address``, host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError:
        return False
    return True
