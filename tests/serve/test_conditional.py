"""docs/examples/disaggregated.yaml as it is: a prompt is handed over when that costs less, and the decision says so."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.serve.running import Running, serving

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(
        tmp_path_factory.mktemp("conditional"),
        base="docs/examples/disaggregated.yaml",
        cache={"max_total_tokens": 12_000},
    ) as running:
        running.until(lambda: len(running.states()) == 2, 60)
        yield running


def ask(app: Running, text: str, *, name: str, max_tokens: int = 8) -> dict[str, Any]:
    """The request's last try, as the router explains it."""
    body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{app.url}/v1/completions", json=body, headers={"X-Request-Id": name}, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(httpx.get(f"{app.url}/route/{name}", timeout=30).json()["tries"][-1])


def story(topic: str, times: int) -> str:
    return f"A long story about {topic}, told slowly. " * times


def test_a_prompt_is_handed_over_only_while_somebody_would_wait_for_it(app: Running) -> None:
    """Alone, about 700 tokens are computed where they decode; beside four streams prefill has them. Both hold them
    then: the second time a page at most is computed, or goes over."""
    idle = ask(app, story("lamps", 70), name="idle")["pair"]
    assert (idle["reason"], idle["prefill"]) == ("local_costs_less", None)
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(ask, app, f"Count to {n}: ", name=f"stream-{n}", max_tokens=400) for n in range(4)]
        app.until(lambda: sum(state["stats"]["num_running"] for state in app.states()) == 4, 20)
        beside = ask(app, story("ships", 70), name="beside")
        again = ask(app, story("ships", 70), name="again")["pair"]
        assert not any(stream.done() for stream in streams), "the streams ended before the prompts were sent"
        for stream in streams:
            stream.result()
    pair = beside["pair"]
    assert pair["reason"] == "hand_off_costs_less"
    assert pair["hand_off_cost_s"] < pair["local_cost_s"]
    assert beside["hand_off"]["transferred"]
    [row] = again["decode_replicas"]
    assert row["cached_tokens"] > 600
    assert (row["own_tokens"] <= 16, row["transfer_pages"]) == (True, 1)
    app.until(app.idle, 30)
