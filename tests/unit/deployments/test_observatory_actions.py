"""What the observatory shows of one replica and does with it, without Ray: to whom, and what it says."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray
from ray.exceptions import GetTimeoutError
from ray.serve._private.common import DeploymentID, ReplicaID, RunningReplicaInfo

from deployments.dispatch.leases import ReplicaGone
from deployments.fleet.node_tasks import remote
from deployments.places import ROOT as ROOT_FOLDER
from deployments.watch import process
from deployments.watch.observatory import serve_details
from deployments.watch.observatory.actions import Actions, NotReadable, on_node
from deployments.watch.observatory.http_app import make_app
from deployments.watch.observatory.serve_details import LOOK_KEPT_S, MOST_GONE, Listed, Looks
from tests.unit.deployments.observed import seen
from tests.unit.deployments.sample_values import info
from tests.unit.deployments.test_observatory_http import KEY, ROOT, Site

GPU = """# TYPE manta_replica_device_memory_bytes gauge
manta_replica_device_memory_bytes{device="H200",kind="used",model="m",replica="a",role="unified"} 7e+10
manta_replica_device_memory_bytes{device="H200",kind="own",model="m",replica="a",role="unified"} 6.5e+10
manta_replica_device_utilization_ratio{device="H200",model="m",replica="a",role="unified"} 0.42
"""
SHOWN = {"Authorization": f"Bearer {KEY}"}
PLACE = Listed(
    replica_id="a", role="unified", node_id="n1", state="RUNNING", actor="SERVE_REPLICA::a", address="10.0.0.1",
    pid=4711, log_file="a.log", started=1000.0,
)  # fmt: skip
FOUND = {"a": (PLACE, True)}.get


class Operated:
    """A replica ``a`` that Serve runs, and what was asked of it."""

    def __init__(self, key: str | None = KEY) -> None:
        self.site = Site(key)
        self.places = {"a": (PLACE, True)}
        self.asked: list[tuple[Any, ...]] = []
        self.answer: Any = True
        actions = Actions(find=self.places.get, seen={"a": seen("a")}.get, ask=self._ask, there=self._there)
        transport = httpx.ASGITransport(app=make_app(self.site.parts, actions=actions), root_path=ROOT)
        self.client = httpx.AsyncClient(transport=transport, base_url=f"http://host{ROOT}", headers=SHOWN)

    async def _ask(self, *asked: Any) -> Any:
        self.asked.append(asked)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def _there(self, node_id: str, function: Any, *args: Any) -> Any:
        self.asked.append((node_id, function.__name__, *args))
        return {"read_usage": {"host": "box", "cpu_s": 2.5}, "read_log": ["one", "two"], "read_stacks": "Thread 1"}[
            function.__name__
        ]


async def test_the_facts_of_a_replica_join_what_it_reported_with_what_its_process_uses() -> None:
    operated = Operated()
    facts = (await operated.client.get("/api/replicas/a")).json()
    assert operated.asked == [("n1", "read_usage", 4711)]
    named = ("id", "host", "address", "pid", "device", "tp", "page_size", "cpu_s", "running")
    assert [facts[name] for name in named] == ["a", "box", "10.0.0.1", 4711, "cpu", 1, 16, 2.5, True]


async def test_the_gpu_of_a_replica_is_read_from_its_own_metrics_and_its_models_path_is_the_apis() -> None:
    place = str(ROOT_FOLDER / "models" / "tiny")
    on_gpu = replace(seen("a"), info=replace(info("a"), kernels="", metrics="a:1000", model_path=place))
    texts = {"a:1000": GPU}

    async def fetch(address: str) -> str:
        return texts[address]

    async def nothing(*asked: Any) -> dict[str, Any]:
        return {}

    actions = Actions(find=FOUND, seen={"a": on_gpu}.get, ask=nothing, there=nothing, fetch=fetch)
    facts = await actions.facts("a")
    assert (facts["device"], facts["gpu_used_bytes"], facts["gpu_own_bytes"]) == ("cuda", 7e10, 6.5e10)
    assert (facts["gpu_utilization"], facts["model_path"]) == (0.42, "models/tiny")
    texts.clear()  # its metrics do not come
    assert "gpu_used_bytes" not in await actions.facts("a")


PATHS = [("GET", "/logs"), ("GET", "/stacks"), ("POST", "/flush"), ("POST", "/drain"), ("POST", "/kill")]


async def test_without_an_admin_key_the_facts_are_shown_and_nothing_else_and_with_a_wrong_one_nothing() -> None:
    operated = Operated(key=None)
    assert (await operated.client.get("/api/replicas/a")).status_code == 200
    operated.asked.clear()
    for method, path in PATHS:
        refused = await operated.client.request(method, f"/api/replicas/a{path}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_not_set"), path
        assert "MANTA_ADMIN_KEY" in refused.json()["error"]["message"]
    assert operated.asked == []
    operated = Operated()
    for method, path in (("GET", ""), *PATHS):
        refused = await operated.client.request(method, f"/api/replicas/a{path}", headers={"Authorization": "Bearer x"})
        assert refused.status_code == 401, path
    assert operated.asked == []


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "same-site"}, {"Content-Type": "text/plain"}],
    ids=["another origin", "another port", "a form"],
)
async def test_a_page_of_another_site_does_nothing_though_the_browser_adds_the_login(headers: dict[str, str]) -> None:
    operated = Operated()
    assert (await operated.client.post("/api/replicas/a/drain", headers=headers)).status_code in (403, 415)
    assert operated.asked == []
    own = {"Origin": "http://host", "Sec-Fetch-Site": "same-origin", "Content-Type": "application/json"}
    assert (await operated.client.post("/api/replicas/a/drain", headers=own)).status_code == 200
    assert operated.asked == [("a", "drain")]


async def test_a_flush_of_a_busy_replica_is_409_and_says_what_to_do() -> None:
    operated = Operated()
    assert (await operated.client.post("/api/replicas/a/flush")).json()["message"] == "its cache is empty"
    operated.answer = False
    refused = await operated.client.post("/api/replicas/a/flush")
    assert (refused.status_code, "try again when none runs" in refused.json()["error"]["message"]) == (409, True)
    operated.answer = ReplicaGone("replica a is gone")
    assert (await operated.client.post("/api/replicas/a/flush")).status_code == 503


async def test_what_is_unknown_is_told_by_name() -> None:
    operated = Operated()
    assert (await operated.client.get("/api/replicas/nobody")).json()["error"]["code"] == "replica_not_found"
    assert (await operated.client.post("/api/replicas/nobody/kill")).status_code == 404
    assert "flush, drain, kill" in (await operated.client.post("/api/replicas/a/fold")).json()["error"]["message"]
    for lines in ("0", "-1", "2001", "many"):
        assert (await operated.client.get(f"/api/replicas/a/logs?lines={lines}")).status_code == 400, lines


async def test_the_log_of_a_replica_that_has_died_is_still_shown_and_it_is_not_killed_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No browser keeps a log, and a name in our own log is one line."""
    operated = Operated()
    log = await operated.client.get("/api/replicas/a/logs?lines=7")
    assert (log.json(), log.headers["Cache-Control"]) == ({"file": "a.log", "lines": ["one", "two"]}, "no-store")
    assert operated.asked == [("n1", "read_log", "a.log", 7)]
    operated.places["a"] = (PLACE, False)
    assert (await operated.client.get("/api/replicas/a/logs")).status_code == 200
    assert (await operated.client.post("/api/replicas/a/kill")).status_code == 409
    assert (await operated.client.get("/api/replicas/a/stacks")).status_code == 503
    gone = (await operated.client.get("/api/replicas/a")).json()
    assert (gone["running"], gone["pid"]) == (False, 4711)
    await operated.client.post("/api/replicas/a%0Aforged/kill")
    assert "replica 'a\\nforged'" in caplog.text


class Controller:
    """What Serve's controller answers, and how often it was asked."""

    def __init__(self, *ids: str) -> None:
        self.ids = list(ids)
        self.num_asked = 0
        self.silent = False
        self.now_s = 100.0
        self.looks = Looks("manta", ask=self._ask, clock=lambda: self.now_s)

    def _ask(self) -> dict[str, Any]:
        self.num_asked += 1
        if self.silent:
            raise GetTimeoutError
        models, routers = ([self._entry(name) for name in names] for names in (self.ids, ["r"]))
        deployments = {
            "ModelReplica": {"replicas": models, "target_num_replicas": 1}, "Router": {"replicas": routers}
        }  # fmt: skip
        return {"applications": {"manta": {"deployments": deployments}}}

    def _entry(self, name: str) -> dict[str, Any]:
        return {
            "replica_id": name, "state": "RUNNING", "actor_name": "x", "node_id": "n", "node_ip": "i", "pid": 1,
            "start_time_s": 2.0, "log_file_path": f"/serve/{name}.log",
        }  # fmt: skip


def test_a_replica_that_is_gone_is_remembered_though_nobody_had_looked_at_it_and_a_router_is_none() -> None:
    controller = Controller("a", *(f"old {i}" for i in range(MOST_GONE)))
    controller.looks.look()
    assert controller.looks.find("r") is None
    for ids in (["a", "b"], ["b"]):
        controller.ids, controller.now_s = ids, controller.now_s + LOOK_KEPT_S
        controller.looks.look()
    gone, here, forgotten = (controller.looks.find(name) for name in ("a", "b", "old 0"))
    assert gone is not None
    assert here is not None
    assert (gone[1], here[1], forgotten) == (False, True, None)
    assert (gone[0].actor, gone[0].log_file) == ("x", "a.log"), "of the log's path the name counts"


class Built(Controller):
    """The controller while it builds the application anew: as long as that lasts, or after it has failed."""

    listed = True

    def details(self) -> dict[str, Any]:
        found = self._ask()["applications"]["manta"] if self.listed else {"deployments": {}}
        built = {"status": "DEPLOYING", "deployed_app_config": {"args": {"model": {"path": "m"}}}}
        return {"applications": {"manta": {**found, **built}, "twin": built}}

    def running(self) -> dict[DeploymentID, list[RunningReplicaInfo]]:
        models, routers = (DeploymentID(name=name, app_name="manta") for name in ("ModelReplica", "Router"))
        return {routers: [self._running(routers, "r")], models: [self._running(models, name) for name in self.ids]}

    def _running(self, deployment: DeploymentID, name: str) -> RunningReplicaInfo:
        return RunningReplicaInfo(
            replica_id=ReplicaID(name, deployment), node_id="n", node_ip="i", availability_zone=None, actor_name="x",
            max_ongoing_requests=1,
        )  # fmt: skip

    def deployments(self) -> dict[DeploymentID, tuple[Any, str]]:
        bundles = SimpleNamespace(replica_config=SimpleNamespace(placement_group_bundles=[{"CPU": 1}] * 3))
        return dict.fromkeys(self.running(), (bundles, "/"))

    def called(self, answer: Callable[[], Any]) -> Any:
        return SimpleNamespace(remote=answer)

    @property
    def client(self) -> Any:
        calls = {
            "get_serve_instance_details": self.details, "_all_running_replicas": self.running,
            "list_deployments_internal": self.deployments,
        }  # fmt: skip
        return SimpleNamespace(_controller=SimpleNamespace(**{name: self.called(each) for name, each in calls.items()}))


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Built:
    controller = Built("a", "b")
    monkeypatch.setattr(serve_details, "_get_global_client", lambda **_: controller.client)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    return controller


def test_while_an_application_is_built_anew_the_replicas_that_serve_are_seen_and_what_was_known_of_them(
    built: Built,
) -> None:
    """Serve then lists no deployment of it: a bad file would empty the live view and Prometheus' targets."""
    looks = Looks("manta", clock=lambda: built.now_s)
    before = looks.look()
    built.listed, built.now_s = False, built.now_s + LOOK_KEPT_S
    now = looks.look()
    assert {each.replica_id: each.role for each in now.replicas} == {"a": "unified", "b": "unified", "r": "router"}
    assert (now.desired, now.running("router")) == ({"unified": 2}, 1)
    assert looks.find("a") == (before.replicas[0], True)
    assert before.replicas[0].log_file == "a.log"


def test_what_serves_is_told_by_its_ranks_and_an_application_by_what_it_is_built_with(built: Built) -> None:
    built.listed = False
    assert serve_details.serving("manta") == {"ModelReplica": 3}
    assert serve_details.serving("another") == {}
    assert serve_details.being_built({"model": {"path": "m"}}) == ["manta", "twin"], "Serve does not tell"
    assert serve_details.being_built({"model": {"path": "other"}}) == []
    built.ids = []
    assert serve_details.serving("manta") == {}, "nothing runs: there is nothing to stop"


def test_however_many_look_serve_is_asked_once_a_second_and_while_it_is_silent_one_look_waits_for_it() -> None:
    controller = Controller("a")
    for _ in range(50):
        controller.now_s += LOOK_KEPT_S / 10
        assert controller.looks.find("a")
    assert controller.num_asked == 5
    controller.silent, controller.now_s = True, controller.now_s + LOOK_KEPT_S
    for _ in range(2):
        with pytest.raises(GetTimeoutError):
            controller.looks.find("a")
    assert controller.num_asked == 6
    controller.silent, controller.now_s = False, controller.now_s + LOOK_KEPT_S
    assert controller.looks.find("a")


STUCK = """
from deployments.watch.process import offer_stacks
offer_stacks()
def never_ends():
    print("ready", flush=True)
    while True:
        sum(range(10**9))  # C code that keeps Python's lock
never_ends()
"""


@pytest.fixture
def stuck() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child.pid
        finally:
            child.kill()


def test_the_stacks_of_a_process_that_hangs_are_read_again_and_again(stuck: int) -> None:
    for _ in range(2):
        text = process.read_stacks(stuck)
        assert text is not None
        assert text.count("in never_ends") == 1
        assert text.startswith(("Thread", "Current thread"))
    usage = process.read_usage(stuck)
    assert (usage["num_threads"], usage["rss_bytes"] > 1 << 20) == (1, True)


def test_a_process_that_offers_no_stacks_is_not_signalled() -> None:
    with subprocess.Popen(["sleep", "100"]) as child:
        assert process.read_stacks(child.pid) is None
        assert child.poll() is None
        child.kill()
    assert process.read_stacks(child.pid) is None  # it has ended
    assert process.read_usage(child.pid)["rss_bytes"] is None
    assert process.read_usage(os.getpid())["rss_bytes"] > 1 << 20


def test_the_end_of_a_long_file_has_whole_lines_only(tmp_path: Path) -> None:
    file = tmp_path / "log"
    assert process.read_end(str(file), 5) is None
    file.write_text("".join(f"line {number}\n" for number in range(40_000)))
    assert process.read_end(str(file), 2) == ["line 39998", "line 39999"]
    every = process.read_end(str(file), 100_000)
    assert every is not None
    assert (len(every) < 40_000, every[-1]) == (True, "line 39999")
    assert {line.partition(" ")[0] for line in every} == {"line"}


async def test_while_serve_does_not_answer_it_is_said_so() -> None:
    def find(replica_id: str) -> None:
        raise GetTimeoutError

    actions = Actions(find=find, seen={}.get, ask=on_node)
    with pytest.raises(NotReadable, match="Serve's controller did not answer"):
        await actions.kill("a")


def test_ray_is_given_one_remote_function_however_often_a_replica_is_looked_at() -> None:
    assert remote(process.read_usage) is remote(process.read_usage)


def test_what_was_imported_without_collections_is_scanned_by_none_afterwards() -> None:
    frozen = gc.get_freeze_count()
    with process.without_collections():
        enabled = gc.isenabled()
    try:
        assert [enabled, gc.isenabled()] == [False, True]
        assert gc.get_freeze_count() > frozen
        gc.disable()
        with process.without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
