"""Three prefill ranks hand over to one decode rank, on a real local Ray over NIXL. SPEC H06; issue 4, TP 3:1."""

from collections.abc import Iterator

import httpx
import pytest

from tests.serve.running import Running, serving

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(
        tmp_path_factory.mktemp("disaggregated_tp"),
        base="docs/examples/disaggregated.yaml",
        cache={"max_total_tokens": 4_000},
        prefill={"tp": 3, "cpus": 0.3},
        transfer={"hand_off": "always"},
    ) as running:
        running.until(lambda: len(running.states()) == 2, 60)
        yield running


def test_three_ranks_hand_over_to_one_and_the_answer_is_the_same(app: Running) -> None:
    """The second time decode does it alone, without what it has cached."""
    body = {"prompt": "A long story about harbours, told slowly. " * 70, "max_tokens": 24, "temperature": 0}
    apart = httpx.post(f"{app.url}/v1/completions", json=body, timeout=120)
    assert "hand_off=transferred" in apart.headers["x-manta-route"]
    assert sorted(state["replica"]["tp"] for state in app.states()) == [1, 3]
    app.until(app.idle, 30)
    httpx.get(f"{app.url}/flush_cache?timeout=10", timeout=30).raise_for_status()
    [decode] = [each["replica"]["replica_id"] for each in app.states() if each["replica"]["role"] == "decode"]
    alone = httpx.post(f"{app.url}/v1/completions", json=body, headers={"x-manta-replicas": decode}, timeout=120)
    assert "pair=no_prefill_replica" in alone.headers["x-manta-route"]
    assert apart.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
    app.until(app.idle, 30)
