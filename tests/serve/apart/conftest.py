"""One prefill and one decode replica, and an observatory, for all tests of this folder."""

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest

from tests.serve.running import Running, serving
from tests.serve.watched import PATIENT


@pytest.fixture(scope="package")
def otlp_port() -> int:
    """Where the routers send spans: those of requests whose caller traces them, and none else.

    It is bound minutes later, so it is none that the kernel gives to others, nor one of Ray's workers'.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("none of 100 ports is free")


@pytest.fixture(scope="package")
def app(otlp_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(
        tmp_path_factory.mktemp("apart"),
        base="docs/examples/disaggregated.yaml",
        observatory=True,
        replicas={"cpus": 1, "health_period_s": 1},
        cache={"max_total_tokens": 12_000},
        router={"retry_wait_s": 90},
        transfer={"disaggregation": "always"},
        observability={**PATIENT, "otlp_endpoint": f"http://127.0.0.1:{otlp_port}", "trace_ratio": 0},
    ) as running:
        yield running
