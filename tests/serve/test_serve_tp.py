"""Tensor parallelism under Ray: rank 0 in the prefill replica, further ranks as child actors in its placement group,
which all hand over to one decode rank over NIXL (SPEC H06). And what serves without HAProxy.
"""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.running import HTTP, Running, serving

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]
STORY = {"prompt": "A long story about harbours, told slowly. " * 70, "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(
        tmp_path_factory.mktemp("serve_tp"),
        base="docs/examples/disaggregated.yaml",
        haproxy=False,
        replicas={"health_period_s": 1},
        cache={"max_total_tokens": 4_000},
        prefill={"tp": 3, "cpus": 0.3},
        transfer={"disaggregation": "always"},
    ) as running:
        running.until(lambda: running.serves_with(2), 60)
        yield running


def ranks(app: Running) -> list[int]:
    """Ids of the processes of ranks above 0."""
    return [pid for pid, command in app.processes().items() if "RankActor" in command]


def replica_id(app: Running, role: str) -> str:
    """Of the one replica of ``role``; empty while there is none."""
    return "".join(each["replica"]["replica_id"] for each in app.states() if each["replica"]["role"] == role)


def ask(app: Running, **headers: str) -> tuple[str, str]:
    """The route, and the text."""
    answer = HTTP.post(f"{app.url}/v1/completions", json=STORY, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-manta-route"], str(answer.json()["choices"][0]["text"])


def flush(app: Running) -> None:
    app.until(app.idle, 30)
    HTTP.get(f"{app.url}/flush_cache?timeout=10", timeout=30).raise_for_status()


def test_serves_own_proxy_serves_where_haproxy_is_turned_off(app: Running) -> None:
    """A stream comes to its end, and one that its client leaves frees its pages."""
    assert not app.has_haproxy
    body: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 2, "stream": True, "ignore_eos": True}
    with HTTP.stream("POST", f"{app.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    with HTTP.stream("POST", f"{app.url}/v1/completions", json=body | {"max_tokens": 2000}, timeout=60) as answer:
        next(answer.iter_bytes())
    app.until(app.idle, 30)


def test_three_ranks_hand_over_to_one_and_the_answer_is_the_same(app: Running) -> None:
    """The second time decode does it alone, without what it has cached."""
    route, apart = ask(app)
    assert "kv_transfer=ok" in route
    assert sorted(state["replica"]["tp"] for state in app.states()) == [1, 3]
    assert len(ranks(app)) == 2
    flush(app)
    route, alone = ask(app, **{"x-manta-replicas": replica_id(app, "decode")})
    assert "pair=no_prefill_replica" in route
    assert apart == alone


def test_a_dead_rank_is_noticed_and_its_replica_replaced(app: Running) -> None:
    flush(app)
    before, decode = replica_id(app, "prefill"), replica_id(app, "decode")
    os.kill(ranks(app)[0], signal.SIGKILL)
    app.until(lambda: replica_id(app, "prefill") not in (before, ""), 120)
    app.until(lambda: len(ranks(app)) == 2, 120)
    assert replica_id(app, "decode") == decode
    route, apart = ask(app)
    assert "kv_transfer=ok" in route
    flush(app)
    assert apart == ask(app, **{"x-manta-replicas": decode})[1]
