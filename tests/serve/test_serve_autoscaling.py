"""Load makes replicas, idleness takes them away, other settings replace them, and no request notices; on a real local
Ray, which dies at last."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.running import HTTP, Running

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
MOST = 3
UP_S = 240.0  # to start two processes that import torch, beside the load: what else the machine does decides


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(
        tmp_path_factory.mktemp("autoscaling"),
        replicas={
            "cpus": 0.5,
            "health_period_s": 1,
            "autoscaling": {
                "min_replicas": 1,
                "max_replicas": MOST,
                "ttft_objective_s": 0.3,
                "upscale_delay_s": 0.5,
                "downscale_delay_s": 3,
                "metrics_interval_s": 0.5,
                "look_back_period_s": 2,
            },
        },
        cache={"max_total_tokens": 8_000},
    )
    try:
        running.start()
        yield running
    finally:
        left = running.stop()
    assert left == []


def test_load_makes_it_go_up_to_three_and_idleness_back_to_one_with_no_failed_request(app: Running) -> None:
    """The load must not pause while the machine starts replicas, or it is rightly found idle."""
    stop, statuses = threading.Event(), list[int]()

    def client(number: int) -> None:
        round_ = 0
        while not stop.is_set():
            body = {"prompt": f"{number}-{round_}: a tale never told before. " * 40, "max_tokens": 8}
            statuses.append(HTTP.post(f"{app.url}/v1/completions", json=body, timeout=120).status_code)
            round_ += 1

    started_s = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        clients = [pool.submit(client, number) for number in range(16)]
        try:
            app.until(lambda: len(app.states()) == MOST, UP_S)
        finally:
            stop.set()
        up_s = time.monotonic() - started_s
        for each in clients:
            each.result()
    idle_s = time.monotonic()
    app.until(lambda: len(app.states()) == 1, 60)
    print(f"1 -> {MOST} replicas after {up_s:.0f} s of load, back to 1 {time.monotonic() - idle_s:.0f} s after it")
    assert set(statuses) == {200}
    assert len(statuses) >= 16
    assert HTTP.post(f"{app.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=60).status_code == 200


def under_light_load(app: Running, do: Callable[[], str]) -> tuple[str, list[str]]:
    """Have two clients ask while ``do`` runs. Returns: its result, and "" or the refusal of each answer."""
    stop, refusals = threading.Event(), list[str]()

    def client() -> None:
        while not stop.is_set():
            body = {"prompt": "Water is", "max_tokens": 8}
            answer = HTTP.post(f"{app.url}/v1/completions", json=body, timeout=120)
            refusals.append("" if answer.status_code == 200 else f"{answer.status_code}: {answer.text}")
            stop.wait(0.3)

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(client) for _ in range(2)]
        try:
            came = do()
        finally:
            stop.set()
        for each in clients:
            each.result()
    return came, refusals


def replica_pids(info: dict[str, Any]) -> set[int]:
    return {int(state["replica"]["pid"]) for state in info["internal_states"]}


def test_another_mode_is_refused_and_other_numbers_replace_replica_and_router_with_no_failed_request(
    app: Running,
) -> None:
    autoscaling = {"min_replicas": 1, "max_replicas": 1}
    before = app.info()
    came, refusals = under_light_load(app, lambda: app.deploy(surge=True, mode="disaggregated"))
    assert came.startswith("DEPLOY_FAILED"), came
    assert "mode = 'disaggregated': the application that serves has another mode" in came
    assert set(refusals) == {""}
    assert replica_pids(app.info()) & replica_pids(before), "what served goes on"
    changed = {"scheduler": {"max_running_requests": 9}, "replicas": {"cpus": 0.5, "autoscaling": autoscaling}}
    came, more = under_light_load(app, lambda: app.deploy(surge=True, **changed))
    assert came == "RUNNING"
    app.until(lambda: app.serves_with(1), UP_S)
    after = app.info()
    print(f"{len(refusals)} requests meanwhile, then {len(more)}")
    assert set(more) == {""}
    assert after["scheduler"]["max_running_requests"] == 9
    assert after["router"]["pid"] != before["router"]["pid"]
    assert replica_pids(after).isdisjoint(replica_pids(before))


def test_when_rays_gcs_has_died_it_says_so_and_ends_with_status_1(app: Running) -> None:
    assert app.process is not None
    [gcs] = [pid for pid, command in app.processes().items() if "gcs_server" in command.split()[0]]
    os.kill(gcs, signal.SIGKILL)
    assert app.process.wait(30) == 1
    assert "serving has ended: Ray has died: its GCS does not answer" in app.log.read_text()
