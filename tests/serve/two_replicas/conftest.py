"""Two replicas behind one router, and an observatory, for all tests of this folder: some only ask, others kill."""

from collections.abc import Iterator

import pytest

from tests.serve.hanging import FOLDER
from tests.serve.running import Running, serving
from tests.serve.watched import PATIENT

HANG_KILL_S = 12.0  # with what follows, 10 s of a question to its own node, it is late enough for the alert
DEAD_PROXY = "http://127.0.0.1:9"
BACK_S = 120.0  # a replica that was killed: a process that imports torch, beside whatever else the machine does


@pytest.fixture(scope="package")
def two_replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Their engine threads can be hung (tests/serve/hanging.py). Nothing of theirs asks the HTTP proxy of their
    environment, at which nobody listens: with one, the start waited for ever."""
    folder = tmp_path_factory.mktemp("two_replicas")
    gates = folder / "hang"
    gates.mkdir()
    with serving(
        folder,
        import_path="tests.serve.hanging:build",
        environment={FOLDER: str(gates), "http_proxy": DEAD_PROXY, "https_proxy": DEAD_PROXY},
        replicas={"count": 2, "cpus": 1, "health_period_s": 1},
        cache={"max_total_tokens": 16_000},
        router={"policy": "estimated_ttft"},
        scheduler={"hang_kill_s": HANG_KILL_S},
        observatory=True,
        observability=PATIENT,
    ) as running:
        yield running


@pytest.fixture
def app(two_replicas: Running) -> Running:
    """Both replicas are there, and nothing runs."""
    two_replicas.until(lambda: two_replicas.serves_with(2) and two_replicas.idle(), BACK_S)
    return two_replicas
