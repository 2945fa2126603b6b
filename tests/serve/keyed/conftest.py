"""Two routers that ask for keys, over two replicas with short queues, and an observatory, for all tests of this folder.

Some only ask, others kill.
"""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.running import Running, serving

KEY = "what an operator shows and no log does"
SHOWN = {"Authorization": f"Bearer {KEY}"}
API_KEY = "what-clients-show-and-no-log-does"
TENANT_KEY = "what-a-tenant-shows-and-no-log-does"
MOST = 20  # requests of it a minute
RUNNING, QUEUED = 2, 4  # requests of one replica
AT_ONCE = 12  # questions to routers: more than a test has streams


@pytest.fixture(scope="package")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys").write_text(f"{API_KEY}\n")
    digest = hashlib.sha256(TENANT_KEY.encode()).hexdigest()
    entry = {"id": "few", "sha256": digest, "limits": {"requests": MOST}}
    (folder / "keys.json").write_text(json.dumps([entry]))
    with serving(
        folder,
        admin_key=KEY,
        observatory={"admin_key": KEY},  # the routers ask for the same one
        replicas={"count": 2, "cpus": 0.5, "health_period_s": 0.5},
        cache={"max_total_tokens": 8_000},
        # no drafts: out of them an answer that was given before comes too soon for something to happen in its midst
        scheduler={"max_running_requests": RUNNING, "max_queued_requests": QUEUED, "speculation": "off"},
        router={
            "policy": "estimated_ttft",
            "count": 2,
            "api_key_file": str(folder / "keys"),
            "keys_file": str(folder / "keys.json"),
        },
    ) as running:
        yield running


def routers(app: Running, within_s: float = 20) -> dict[str, dict[str, Any]]:
    """What the server says of itself through each of the two routers, by id. The proxy asks the one with fewer
    connections: all of the time the same one, where the other has all streams and only one question is open."""
    found: dict[str, dict[str, Any]] = {}

    def both() -> bool:
        found.update((info["router"]["router_id"], info) for info in pool.map(lambda _: app.info(), range(AT_ONCE)))
        return len(found) == 2

    with ThreadPoolExecutor(AT_ONCE) as pool:
        app.until(both, within_s)
    return found
