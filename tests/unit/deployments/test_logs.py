"""Which of our log lines reach Serve's log files."""

import io
import logging
from collections.abc import Iterator

import pytest

from deployments import logs
from kvtransfer.replay import observe


@pytest.fixture
def serve_log() -> Iterator[io.StringIO]:
    """What Serve's handler writes; all loggers are as before afterwards."""
    names = ("ray.serve", *logs.OURS)
    before = {name: (log.handlers, log.level, log.propagate) for name in names if (log := logging.getLogger(name))}
    written = io.StringIO()
    logging.getLogger("ray.serve").handlers = [logging.StreamHandler(written)]
    yield written
    for name, (handlers, level, propagate) in before.items():
        log = logging.getLogger(name)
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)
    observe.enable(False)


def tell() -> None:
    observe.decode_step(rid="r", index=0, i=1, last_token=4, next_token=5, slot=9, finish=None)


def test_our_lines_are_among_serves_and_observations_are_not(
    serve_log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MANTA_OBSERVE", raising=False)
    logs.into_serve()
    logging.getLogger("replicas.engine.engine").info("hello")
    tell()
    assert serve_log.getvalue() == "hello\n"


def test_observations_are_switched_on_by_the_environment(
    serve_log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SPEC J01-J04 in a served replica."""
    monkeypatch.setenv("MANTA_OBSERVE", "1")
    logs.into_serve()
    tell()
    assert serve_log.getvalue().startswith('{"event": "decode_step", "rid": "r"')
