"""Tensor parallelism under Ray: rank 0 in the replica, further ranks as child actors in its placement group;
and what serves without HAProxy.
"""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.serve.running import Running, serving

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(
        tmp_path_factory.mktemp("serve_tp"),
        haproxy=False,
        replicas={"count": 1, "cpus": 0.5, "health_period_s": 1},
        cache={"max_total_tokens": 4_000},
        parallel={"tp": 3},
    ) as running:
        yield running


def ranks(app: Running) -> list[int]:
    """Ids of the processes of ranks above 0."""
    return [pid for pid, command in app.processes().items() if "RankActor" in command]


def ask(app: Running) -> str:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_serves_own_proxy_serves_where_haproxy_is_turned_off(app: Running) -> None:
    """A stream comes to its end, and one that its client leaves frees its pages."""
    assert not app.has_haproxy
    body = {"prompt": "Once upon a time", "max_tokens": 2, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{app.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    with httpx.stream("POST", f"{app.url}/v1/completions", json=body | {"max_tokens": 2000}, timeout=60) as answer:
        next(answer.iter_bytes())
    app.until(app.idle, 5)


def test_three_ranks_answer_as_one(app: Running) -> None:
    assert ask(app) == "The capital of France is Paris."
    assert len(ranks(app)) == 2
    assert app.states()[0]["replica"]["tp"] == 3


def test_a_dead_rank_is_noticed_and_its_replica_replaced(app: Running) -> None:
    before = app.states()[0]["replica"]["replica_id"]
    os.kill(ranks(app)[0], signal.SIGKILL)
    app.until(lambda: httpx.get(f"{app.url}/health", timeout=30).status_code == 503, 20)
    app.until(lambda: httpx.get(f"{app.url}/health", timeout=30).status_code == 200, 120)
    assert app.states()[0]["replica"]["replica_id"] != before
    assert ask(app) == "The capital of France is Paris."
    app.until(lambda: len(ranks(app)) == 2, 20)
