"""Load makes replicas, idleness takes them away, and no request notices; on a real local Ray, which dies at last."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

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


def test_when_rays_gcs_has_died_it_says_so_and_ends_with_status_1(app: Running) -> None:
    assert app.process is not None
    [gcs] = [pid for pid, command in app.processes().items() if "gcs_server" in command.split()[0]]
    os.kill(gcs, signal.SIGKILL)
    assert app.process.wait(30) == 1
    assert "serving has ended: Ray has died: its GCS does not answer" in app.log.read_text()
