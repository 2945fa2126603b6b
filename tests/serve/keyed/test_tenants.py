"""A key of ``router.keys_file`` at two routers: its limit holds for both together."""

import time

import httpx

from tests.serve.keyed.conftest import MOST, SHOWN, TENANT_KEY
from tests.serve.running import Running


def test_two_routers_agree_on_what_a_key_has_used(app: Running) -> None:
    """Beyond the limit go at most those that one router takes before the other one's counts have come: one by one,
    each answered before the next is asked, that is few."""
    taken, begun_s = 0, time.monotonic()
    with httpx.Client(headers={"Authorization": f"Bearer {TENANT_KEY}"}, timeout=60) as client:
        for _ in range(3 * MOST):
            answer = client.post(f"{app.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert answer.status_code in (200, 429), answer.text
            taken += answer.status_code == 200
    free_again = MOST * (time.monotonic() - begun_s) / 60  # at most: the minute slides
    assert MOST <= taken <= MOST + 4 + free_again

    def agree() -> bool:
        seen = [httpx.get(f"{app.url}/keys", headers=SHOWN).json() for _ in range(6)]
        assert all(each["error"] == "" for each in seen)
        return len({str(each["keys"]) for each in seen}) == 1 and seen[0]["keys"][0]["used"]["requests"] >= 1

    app.until(agree, 20)
