"""`python -m deployments serve` in a process of its own, on a real local Ray, and its end checked.

Every process that descends from it carries a mark in its environment, by which leftovers are found.
"""

import contextlib
import csv
import io
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from deployments.places import ROOT

MARK = "MANTA_TEST_MARK"
START_S = 240.0
DEPLOY = """
import sys, time
import ray, yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
ray.init(namespace="serve", log_to_driver=False)
_get_global_client().deploy_apps(ServeDeploySchema(**yaml.safe_load(sys.stdin)), _blocking=False)
while (found := serve.status().applications["manta"]).status == "DEPLOYING":
    time.sleep(0.2)
print(found.status.value, found.message)
"""
STOP_S = 60.0


def http_client(*, retries: int = 0) -> httpx.Client:
    """Make a client that opens a connection for each request: one that is kept may end with who serves it.
    ``retries``: of a connection that is refused."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.Client(transport=httpx.HTTPTransport(verify=False, retries=retries, limits=limits))


# All tests with Ray ask through these: to make a client takes the processor for longer than to answer a request does.
HTTP, PATIENT_HTTP = http_client(), http_client(retries=5)


def processes_of(mark: str) -> dict[int, str]:
    """Living processes whose environment has ``mark``, by id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it ended, or is not ours to look at
    return found


def is_idle(state: Mapping[str, Any]) -> bool:
    """Whether a replica that tells this runs nothing, and every page of it is free or evictable."""
    pool, stats = state["stats"]["pool"], state["stats"]
    if stats["num_running"] or stats["num_waiting"] or state["num_open"]:
        return False
    return bool(pool["free_pages"] + pool["evictable_pages"] == pool["num_pages"])


def free_port() -> int:
    """A port that no process is given unasked: the kernel draws those of connections above 32,767, Ray its workers'
    below 20,000."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Running:
    """The application of a file of the project with some settings changed."""

    def __init__(
        self,
        folder: Path,
        *,
        base: str = "serve_config.yaml",
        observatory: bool | Mapping[str, Any] = False,
        haproxy: bool = True,
        admin_key: str = "",
        import_path: str = "",
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> None:
        """``base``: the file to start from, of the project; ``observatory``: whether it runs too, or settings of it;
        ``haproxy``: False has Serve's own proxy serve; ``admin_key``: what `info` and `states` show; ``import_path``:
        in the place of the first application's; ``python``: by another path;
        ``environment``: beside ours; ``changes``: settings, by group where they have one."""
        self._haproxy, self._python = haproxy, python
        self._environment = environment or {}
        self._shown = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self.port, self._stats_port = free_port(), free_port()
        self.mark = secrets.token_hex(8)
        config = yaml.safe_load((ROOT / base).read_text())
        config["http_options"]["port"] = self.port
        if observatory is False:
            del config["applications"][1:]
        elif observatory is not True:
            config["applications"][1]["args"].update(observatory)
        self._said = "Try it:"  # when all of it serves
        if import_path:
            config["applications"][0]["import_path"] = import_path
            self._said = "stop      Ctrl-C"  # a foreign application has no line to try
        args = config["applications"][0]["args"]
        for group, settings in changes.items():
            if isinstance(settings, dict):
                args.setdefault(group, {}).update(settings)
            else:
                args[group] = settings
        self.config = folder / "serve_config.yaml"
        self.config.write_text(yaml.safe_dump(config))
        self.log = folder / "serve.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Launch it and wait until it serves."""
        self.launch()
        self.until(lambda: self._said in self.log.read_text() or self.process_ended, START_S)
        assert not self.process_ended, self.log.read_text()

    def launch(self) -> None:
        """Start its process, and wait for nothing."""
        environment = {**os.environ, **self._environment, MARK: self.mark}
        environment.pop("RAY_ADDRESS", None)
        environment["RAY_SERVE_HAPROXY_STATS_PORT"] = str(self._stats_port)
        if not self._haproxy:
            environment["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [self._python, "-m", "deployments", "serve", str(self.config)],
                stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    @property
    def process_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def stop(self) -> list[str]:
        """Ctrl-C; returns the command lines of processes that are left (and kills those, by id)."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        self.process.wait(STOP_S)
        left = self.processes()
        deadline_s = time.monotonic() + 5
        while left and time.monotonic() < deadline_s:
            threading.Event().wait(0.1)
            left = self.processes()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return list(left.values())

    def deploy(self, *, surge: bool = False, **changes: Any) -> str:
        """Do what `serve deploy` does with the file, some settings changed. ``surge``: the successor of a replica
        starts before that stops. Returns: Serve's state of it at the end, and what Serve says of that."""
        titles = self.processes()
        raylet = next(pid for pid, title in titles.items() if title.partition(" ")[0].endswith("raylet/raylet"))
        environ = dict(line.split("=", 1) for line in Path(f"/proc/{raylet}/environ").read_text().split("\0") if line)
        address = next(word for word in titles[raylet].split() if word.startswith("--gcs-address="))
        config = yaml.safe_load(self.config.read_text())
        config["applications"][0]["args"].update(changes)
        if surge:
            config["applications"][0]["deployments"] = [{"name": "ModelReplica", "max_surge_percent": 100}]
        told = subprocess.run(
            [sys.executable, "-c", DEPLOY], input=yaml.safe_dump(config), capture_output=True, text=True,
            timeout=300, env=environ | {"RAY_ADDRESS": address.partition("=")[2]},
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
        return told.stdout.strip()

    def processes(self) -> dict[int, str]:
        """Living processes that descend from ours, by id."""
        return processes_of(self.mark)

    @property
    def has_haproxy(self) -> bool:
        return any("/haproxy -dS -db " in command for command in self.processes().values())

    def haproxy_answers(self) -> dict[str, int]:
        """Answers of status 2xx since HAProxy started, by the name that Serve has for who gave them."""
        text = HTTP.get(f"http://127.0.0.1:{self._stats_port}/stats;csv", timeout=30).text.removeprefix("# ")
        rows = csv.DictReader(io.StringIO(text))
        servers = [row for row in rows if row["svname"].startswith("SERVE_")]
        return {row["svname"]: int(row["hrsp_2xx"]) for row in servers}

    def states(self) -> list[dict[str, Any]]:
        """What each replica says of itself now."""
        return list(self.info()["internal_states"])

    def info(self) -> dict[str, Any]:
        """What the server says of itself; asked for again while Serve's proxy, slow on a busy machine, is replaced.
        Raises: httpx.HTTPStatusError for an answer that says no."""
        answer = PATIENT_HTTP.get(f"{self.url}/get_server_info", headers=self._shown, timeout=30)
        return dict(answer.raise_for_status().json())

    def serves_with(self, replicas: int) -> bool:
        """Whether it is healthy, and so many replicas tell of themselves; not while its proxy or router is replaced."""
        try:
            return HTTP.get(f"{self.url}/health", timeout=5).status_code == 200 and len(self.states()) == replicas
        except (httpx.HTTPError, ValueError, KeyError):
            return False

    def idle(self) -> bool:
        """Nothing runs, and every page is free or evictable."""
        return all(map(is_idle, self.states()))

    @staticmethod
    def until(condition: Callable[[], bool], within_s: float, look_s: float = 0.02) -> float:
        """Wait for another process. Returns: for how many seconds it was certainly not so: when the last look that
        failed began; how long a look takes says more of the machine."""
        started_s = time.monotonic()
        failed_s = 0.0
        while True:
            began_s = time.monotonic() - started_s
            if condition():
                return failed_s
            failed_s = began_s
            ended_s = time.monotonic() - started_s
            assert ended_s < within_s, f"not within {within_s:.1f} s"
            pause_s = min(ended_s - began_s, 0.5)  # as long as the look: what it waits for needs the processor
            threading.Event().wait(max(look_s, pause_s))


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Running]:
    """The application of `Running`, started; asserts at the end that Ctrl-C stopped all of it."""
    running = Running(folder, **settings)
    try:
        running.start()
        yield running
    finally:
        left = running.stop()
    assert "graceful_shutdown failed" not in running.log.read_text(), "what Ray says of its own end is no news"
    assert left == [], "Ctrl-C must stop all that it started, ranks included"
