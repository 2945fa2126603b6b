"""A Ray cluster of four machines as docs/operate.md describes it, and the Manta that is deployed to it.

Owns:      the machines; what is deployed.
Invariant: the router and the proxy are on the head, which has no CPU for replicas; a node has one, so that two replicas
           never share a node. A node's Ray is started anew when it ends, as its unit of systemd's does.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import yaml

from deployments.places import ROOT
from tests.cluster.machines import Client, Network
from tests.scraped import Scraped
from tests.serve.running import MARK, Running, is_idle, processes_of

BIN = Path(sys.executable).parent
NODES = ("a", "b", "c")
STORE_BYTES = 80 << 20
START_S = 300.0  # Ray on the head, then on the nodes; on a busy machine a minute each
BACK_S = 300.0  # all replicas, after a deployment or after a node has joined anew; on a busy machine a third of it
SILENT_S = 120.0  # a stream that says nothing for so long hangs
AGAIN = 'while :; do "$@"; sleep 2; done'  # Restart=always
MODEL = "SmolLM2-135M-Instruct"


@dataclass(kw_only=True)
class Answer:
    """One streamed answer, as its client saw it."""

    status: int = 0
    text: str = ""
    end: str = ""  # DONE, or what came instead
    route: str = ""
    rid: str = ""
    at_s: list[float] = field(default_factory=list)  # when each text came
    ended_s: float = 0.0

    @property
    def longest_gap_s(self) -> float:
        """The longest time in which nothing came, from the first text to the end."""
        times_s = [*self.at_s, self.ended_s or self.at_s[-1]] if self.at_s else []
        return max((later - earlier for earlier, later in pairwise(times_s)), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A replica as it is now."""

    replica_id: str
    role: str
    node: str
    metrics: str  # host:port
    num_open: int  # requests
    num_receiving: int  # KV transfers
    num_sent: int  # pages, since its start


class Cluster:
    """The running cluster, and the requests that a client on its head sends."""

    def __init__(self, folder: Path) -> None:
        self.network = Network(folder)
        head = self.network.add("head")
        self.head = head.address
        for name in NODES:
            self.network.add(name)
        self.client = Client(head)
        self._token = secrets.token_hex(32)
        self.environment = self._variables()

    def _variables(self) -> dict[str, str]:
        """What an operator's shell has after `. deploy/manta.env`."""
        lines = (ROOT / "deploy" / "manta.env").read_text().splitlines()
        ours = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        ours |= {
            "RAY_AUTH_TOKEN": self._token,
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(ROOT / "deployments" / "command" / "haproxy_no_splice.sh"),
            "RAY_SERVE_HAPROXY_MAXCONN": "1024",  # as many as a small limit on open files allows
            "RAY_USAGE_STATS_ENABLED": "0",
            MARK: self._token,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),  # of this checkout, whose .venv may be another one's
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MANTA_"))}
        return kept | ours

    def start(self) -> None:
        """Start Ray on every machine."""
        start = ["ray", "start", f"--object-store-memory={STORE_BYTES}"]
        self.run_on("head", *start, "--head", f"--node-ip-address={self.head}", "--num-cpus=0",
                    "--dashboard-host=0.0.0.0", '--resources={"head": 1}')  # fmt: skip
        self.until(lambda: self.nodes() != {}, START_S)
        for name in NODES:
            again = ["bash", "-c", AGAIN, "again", *start, "--block"]
            self.run_on(name, *again, f"--address={self.head}:6379", "--num-cpus=1")
        self.until(lambda: all(self.is_alive(name) for name in NODES), START_S)

    def run_on(self, name: str, *command: str) -> None:
        machine = self.network.machines[name]
        machine.start(command, environment=self.environment, log=machine.tmp / "commands.log")

    def stop(self) -> None:
        self.client.close()
        self.network.off()

    # what Ray and Serve say

    def ask(self, path: str) -> Any:
        """GET ``path`` of Ray's dashboard. Raises: httpx.HTTPError."""
        headers = {"Authorization": f"Bearer {self._token}"}
        answer = self.client.call(httpx.get, f"http://{self.head}:8265{path}", headers=headers, timeout=30)
        return answer.raise_for_status().json()

    def nodes(self) -> dict[str, str]:
        """The state of each node that Ray has known, the newest of a machine last; {} while Ray does not answer."""
        try:
            found = self.ask("/api/v0/nodes?limit=100")["data"]["result"]["result"]
        except httpx.HTTPError:
            return {}
        return {each["node_ip"]: each["state"] for each in sorted(found, key=lambda each: each["state"], reverse=True)}

    def is_dead(self, name: str) -> bool:
        """Whether Ray says that it is dead; False while Ray does not answer."""
        return self.nodes().get(self.network.machines[name].address) == "DEAD"

    def is_alive(self, name: str) -> bool:
        return self.nodes().get(self.network.machines[name].address) == "ALIVE"

    def address(self, name: str) -> str:
        return self.network.machines[name].address

    def deploy(self, *, num_routers: int = 1, **args: Any) -> None:
        """`serve deploy` an application with ``args`` beside ours. Of one router the place is the head."""
        alone = num_routers == 1
        ours: dict[str, Any] = {
            "model": {"path": f"models/{MODEL}"},
            "cache": {"page_size": 16, "max_total_tokens": 8192, "device_memory_bytes": 1_200_000_000},
            "scheduler": {"chunked_prefill_size": 64},
            "router": {"allowed_hosts": ["*"], "retry_wait_s": 60} | ({"count": 1} if alone else {}),
            "allow_outage": True,  # one mode follows the other
        }
        on_head = {"name": "Router", "ray_actor_options": {"num_cpus": 0, "resources": {"head": 0.1}}}
        application = {
            "name": "manta",
            "route_prefix": "/",
            "import_path": "deployments.app:build",
            "args": {**ours, **args},
            "deployments": [on_head] if alone else [],
        }
        settings = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "0.0.0.0", "port": 8000},
            "applications": [application],
        }
        (self.network.machines["head"].tmp / "serve.yaml").write_text(yaml.safe_dump(settings))
        self.run_on("head", "serve", "deploy", "--address", f"http://{self.head}:8265", "/tmp/serve.yaml")

    def drain_node(self, name: str, deadline_s: float) -> None:
        """Tell Ray that the machine will be gone after that time."""
        nodes = self.ask("/api/v0/nodes?limit=100")["data"]["result"]["result"]
        [node_id] = [
            each["node_id"] for each in nodes if each["node_ip"] == self.address(name) and each["state"] == "ALIVE"
        ]
        self.run_on("head", "ray", "drain-node", "--address", f"{self.head}:6379", "--node-id", node_id, "--reason",
                    "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "it is taken back",
                    "--deadline-remaining-seconds", f"{deadline_s:.0f}")  # fmt: skip

    def routers(self) -> list[str]:
        """The machines whose routers run, as Serve lists them; [] while the dashboard does not answer."""
        try:
            listed = self.ask("/api/serve/applications/")["applications"]["manta"]["deployments"]["Router"]["replicas"]
        except (httpx.HTTPError, KeyError):
            return []
        names = {machine.address: name for name, machine in self.network.machines.items()}
        return [names[each["node_ip"]] for each in listed if each["state"] == "RUNNING"]

    def status(self) -> tuple[str, str]:
        """Serve's state of the application, and what it says of it."""
        try:
            found = self.ask("/api/serve/applications/")["applications"]["manta"]
        except (httpx.HTTPError, KeyError):
            return "NOT_STARTED", ""
        return found["status"], found["message"]

    # what Manta says

    def states(self) -> list[dict[str, Any]]:
        """What each replica that answers the router says of itself; [] while the router does not answer."""
        try:
            answer = self.get("/get_server_info", timeout_s=30)
            return list(answer.raise_for_status().json()["internal_states"])
        except httpx.HTTPError:
            return []

    def get(self, path: str, *, timeout_s: float) -> httpx.Response:
        """GET ``path`` of Manta. Raises: httpx.HTTPError."""
        return self.client.call(httpx.get, f"{self.url}{path}", timeout=timeout_s)

    def is_whole(self, count: int) -> bool:
        """Whether ``count`` replicas take part, nothing runs there, and every page is free or evictable."""
        states = self.states()
        return len(states) == count and all(map(is_idle, states))

    def processes(self) -> dict[int, str]:
        """Living processes of the machines, by id here."""
        return processes_of(self._token)

    def replicas(self) -> list[Replica]:
        return [self._replica(**state) for state in self.states()]

    def _replica(self, replica: dict[str, Any], num_open: int, stats: dict[str, Any], **_: Any) -> Replica:
        transfer = stats["transfer"] or {}  # None where there are no KV transfers
        [node] = [name for name in NODES if self.address(name) == replica["metrics"].rpartition(":")[0]]
        return Replica(
            replica_id=replica["replica_id"],
            role=replica["role"],
            node=node,
            metrics=replica["metrics"],
            num_receiving=transfer.get("rooms_receiving", 0),
            num_sent=transfer.get("sent_pages", 0),
            num_open=num_open,
        )

    def until_ready(self, count: int, within_s: float) -> float:
        """Wait until ``count`` replicas take part. Returns: for how long."""
        return self.until(lambda: len(self.replicas()) == count, within_s)

    def num_retries(self) -> int:
        """Count the requests that have gone on at another replica, since the router's start."""
        return int(self.get("/get_server_info", timeout_s=30).json()["num_retries"])

    def num_held(self, replica: Replica) -> float:
        """Count the tokens in quarantine there, and the KV transfers that drain."""
        told = Scraped(self.client.call(httpx.get, f"http://{replica.metrics}/metrics", timeout=30).text)
        draining = told.total("transfers_in_flight", direction="draining")
        return told.total("kv_pool_tokens", state="quarantined") + draining

    # requests

    @property
    def url(self) -> str:
        return f"http://{self.head}:8000"

    def begin(self, prompt: str, num_tokens: int, **more: Any) -> "tuple[Answer, Future[None]]":
        """Send a chat whose answer is streamed; it has ``num_tokens`` tokens, the most likely ones."""
        answer = Answer()
        return answer, self.client.begin(read_chat, self.url, prompt, num_tokens, answer, **more)

    def answer(self, prompt: str, num_tokens: int, **more: Any) -> Answer:
        answer, done = self.begin(prompt, num_tokens, **more)
        done.result()
        return answer

    @staticmethod
    def until(condition: Callable[[], bool], within_s: float, look_s: float = 0.2) -> float:
        """Wait for other processes. Returns: for how many seconds it was certainly not so, as `Running.until`."""
        return Running.until(condition, within_s, look_s)


def read_chat(url: str, prompt: str, num_tokens: int, answer: Answer, **more: Any) -> None:
    """Send a chat whose answer is streamed, the most likely ``num_tokens`` tokens, and read it into ``answer``."""
    body = {
        "model": MODEL, "stream": True, "temperature": 0, "max_tokens": num_tokens, "ignore_eos": True,
        "messages": [{"role": "user", "content": prompt}], **more,
    }  # fmt: skip
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=SILENT_S) as response:
            _read(response, answer)
    except httpx.HTTPError as error:
        answer.end = repr(error)
    answer.ended_s = time.monotonic()


def _read(response: httpx.Response, answer: Answer) -> None:
    answer.status, answer.rid = response.status_code, response.headers.get("x-request-id", "")
    answer.route = response.headers.get("x-manta-route", "")
    if response.status_code != 200:
        answer.end = response.read().decode()
        return
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]" or '"error"' in data:
            answer.end = data.strip("[]")
        elif line != data and (choices := json.loads(data)["choices"]) and choices[0]["delta"].get("content"):
            answer.at_s.append(time.monotonic())
            answer.text += choices[0]["delta"]["content"]
