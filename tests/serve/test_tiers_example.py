"""docs/examples/tiers.yaml, with a smaller pool: what has left the pool is loaded from the host, and told as cached."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import HTTP, Running, serving

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]

POOL_TOKENS = 1024


def ask(app: Running, topic: str) -> dict[str, Any]:
    """About 400 tokens."""
    body = {"prompt": f"A long story about {topic}, told slowly. " * 40, "max_tokens": 4, "temperature": 0}
    answer = HTTP.post(f"{app.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_second_visit_of_evicted_prompts_hits_the_host(tmp_path: Path) -> None:
    """Four prompts of about 400 tokens do not fit a pool of 1,024. The fifth request is the first one again."""
    cache = {"max_total_tokens": POOL_TOKENS, "host_memory_bytes": 256 << 20, "store": f"file://{tmp_path}/store"}
    with serving(tmp_path, base="docs/examples/tiers.yaml", model={"context_len": POOL_TOKENS}, cache=cache) as app:
        app.until(lambda: app.serves_with(1), 60)
        answers = [ask(app, topic) for topic in ("lamps", "ships", "salt", "bridges", "lamps")]
        first, again = answers[0], answers[-1]
        prompt_tokens = first["usage"]["prompt_tokens"]
        assert prompt_tokens > 350
        assert 4 * prompt_tokens > POOL_TOKENS
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (prompt_tokens - 1) // 16 * 16
        app.until(app.idle, 30)
        tiers = app.states()[0]["stats"]["tiers"]
        # what the pool still had of it is not counted
        assert 256 <= tiers["host_hit_tokens"] <= prompt_tokens
        assert (tiers["host_wrong_pages"], tiers["store_wrong_pages"], tiers["store_errors"]) == (0, 0, 0)
        # in idle time all of it goes to the store
        app.until(lambda: app.states()[0]["stats"]["tiers"]["store_written_tokens"] >= 3 * prompt_tokens, 30)
        assert re.fullmatch(r".+:file://.+/store", app.states()[0]["stats"]["tiers"]["store"])
