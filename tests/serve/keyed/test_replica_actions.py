"""What an operator does with one replica, on a real local Ray: nothing of it loses a request."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.places import ROOT
from tests.serve.keyed.conftest import SHOWN, routers
from tests.serve.running import HTTP, Running

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]
LONG = 150  # tokens of a request that still runs when something is done to its replica
STORY = "Once upon a time there was a tree of pages. " * 8
GCS = re.compile(r"--gcs-address=(\S+)")
ON_NODE = """
import asyncio, ray, sys
from ray._private import services
from deployments.watch import process
from deployments.fleet.node_tasks import in_task
services.resolve_ip_for_localhost = lambda host: host  # this Ray listens on the loopback alone
ray.init(address=sys.argv[3], log_to_driver=False, logging_level="ERROR")
print("stacks:", asyncio.run(in_task(sys.argv[1], process.read_stacks, int(sys.argv[2]))))
"""


def get(app: Running, path: str) -> dict[str, Any]:
    return dict(HTTP.get(f"{app.url}/manta/api/{path}", headers=SHOWN, timeout=30).json())


def act(app: Running, replica: str, action: str) -> httpx.Response:
    return HTTP.post(f"{app.url}/manta/api/replicas/{replica}/{action}", headers=SHOWN, timeout=30)


def states(app: Running) -> dict[str, str]:
    return {each["id"]: each["state"] for each in get(app, "state")["replicas"]}


def two(app: Running) -> list[str]:
    """Both replicas, once both take requests."""
    app.until(lambda: list(states(app).values()) == ["accepting"] * 2, 120)
    return sorted(states(app))


def stream(app: Running, replica: str = "", *, tokens: int = LONG, went: list[str] | None = None) -> Iterator[str]:
    """The texts of an answer; ``replica``: the only one that may compute it; ``went``: gets where it began."""
    body = {"prompt": STORY, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    headers = SHOWN | ({"x-manta-replicas": replica} if replica else {})
    with HTTP.stream("POST", f"{app.url}/v1/completions", json=body, headers=headers, timeout=120) as answer:
        assert answer.status_code == 200
        if went is not None:
            went.append(answer.headers["x-manta-route"].partition("replica=")[2].partition(";")[0])
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


def num_retries(app: Running) -> int:
    return sum(info["num_retries"] for info in routers(app).values())


def test_facts_log_and_stacks_of_a_replica_are_its_own(app: Running) -> None:
    infos = {each["replica"]["replica_id"]: each["replica"] for each in app.states()}
    for replica in two(app):
        facts = get(app, f"replicas/{replica}")
        for name in ("pid", "node_id", "dtype", "tp", "page_size", "pool"):
            assert facts[name] == infos[replica][name], name
        assert facts["rss_bytes"] > 100 << 20
        assert (facts["device"], facts["running"], bool(facts["host"])) == ("cpu", True, True)
        log = get(app, f"replicas/{replica}/logs?lines=500")
        assert replica in log["file"]
        assert any(f"replica {replica} serves" in line for line in log["lines"])
        text = get(app, f"replicas/{replica}/stacks")["stacks"]
        assert "replicas/engine/loop.py" in text
        assert "default_worker.py" in text  # the main thread too


def test_a_flush_empties_one_cache_and_waits_for_no_request(app: Running) -> None:
    first, second = two(app)
    for replica in (first, second):
        assert len(list(stream(app, replica, tokens=2))) > 1
    tokens = [get(app, f"tree?replica={replica}")["tokens"] for replica in (first, second)]
    assert min(tokens) > 64
    answer = stream(app, first)
    next(answer)
    refused = act(app, first, "flush")
    assert (refused.status_code, "try again when none runs" in refused.json()["error"]["message"]) == (409, True)
    assert len(list(answer)) > 1
    app.until(lambda: act(app, first, "flush").status_code == 200, 30)
    app.until(lambda: get(app, f"tree?replica={first}")["tokens"] == 0, 30)
    assert get(app, f"tree?replica={second}")["tokens"] == tokens[1]


@pytest.fixture(scope="module")
def whole(app: Running) -> str:
    """The text of a long answer to which nothing happened."""
    return "".join(stream(app))


def test_a_drained_replica_ends_its_request_and_another_one_comes_in_its_place(app: Running, whole: str) -> None:
    leaves, stays = two(app)
    retries = num_retries(app)
    answer = stream(app, leaves)
    begun = next(answer)
    assert act(app, leaves, "drain").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: "".join(answer))
        app.until(lambda: states(app).get(leaves) != "accepting", 30)
        assert begun + rest.result() == whole
    app.until(lambda: leaves not in states(app), 120)
    assert stays in two(app)
    assert num_retries(app) == retries


def test_a_killed_replicas_request_goes_on_elsewhere_and_its_log_can_still_be_read(app: Running, whole: str) -> None:
    both, dies = list[str](), ""

    def killed_in_its_midst() -> bool:
        nonlocal both, dies
        both, went, retries = two(app), list[str](), num_retries(app)
        answer = stream(app, went=went)
        begun = next(answer)
        [dies] = went
        assert act(app, dies, "kill").status_code == 200
        assert begun + "".join(answer) == whole
        assert num_retries(app) - retries in (0, 1)
        return num_retries(app) == retries + 1

    assert any(killed_in_its_midst() for _ in range(3)), "each answer had ended before its replica"
    app.until(lambda: dies not in states(app), 60)
    assert set(both) - {dies} < set(two(app))
    assert any(f"replica {dies} serves" in line for line in get(app, f"replicas/{dies}/logs")["lines"])
    assert act(app, dies, "kill").status_code == 409


def test_a_process_on_another_node_is_read_by_a_task_there(app: Running) -> None:
    facts = get(app, f"replicas/{two(app)[0]}")
    [address] = {found[1] for command in app.processes().values() if (found := GCS.search(command))}
    environment = Path(f"/proc/{facts['pid']}/environ").read_bytes().decode().split("\0")
    token = dict(line.split("=", 1) for line in environment if line.startswith("RAY_AUTH_"))
    words = [sys.executable, "-c", ON_NODE, facts["node_id"], str(facts["pid"]), address]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=os.environ | token, cwd=ROOT)
    assert "replicas/engine/loop.py" in done.stdout.partition("stacks:")[2], done.stderr
