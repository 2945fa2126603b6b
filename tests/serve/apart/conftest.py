"""One prefill and one decode replica, and an observatory, for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.serve.running import Running, serving
from tests.serve.watched import PATIENT


@pytest.fixture(scope="package")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(
        tmp_path_factory.mktemp("apart"),
        base="docs/examples/disaggregated.yaml",
        observatory=True,
        replicas={"cpus": 1, "health_period_s": 1},
        cache={"max_total_tokens": 12_000},
        router={"retry_wait_s": 90},
        transfer={"hand_off": "always"},
        observability=PATIENT,
    ) as running:
        yield running
