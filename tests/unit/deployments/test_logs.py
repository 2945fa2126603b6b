"""Log lines as JSON and as text, through the handlers that Ray Serve itself sets up, and which lines reach them."""

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig

from deployments import logs
from deployments.app import replica_options
from deployments.dispatch.route_log import RequestWatch, RouteLog
from deployments.http.arrivals import Arrivals
from deployments.settings.schema import AppConfig, parse
from kvtransfer.replay import observe
from tests.unit.deployments.listening import client_of

log = logging.getLogger("deployments.test")
Lines = Callable[[], list[str]]


def config(log_format: str) -> AppConfig:
    return parse({"model": {"path": "models/x"}, "replicas": {"count": 1}, "observability": {"log_format": log_format}})


@pytest.fixture
def loggers() -> Iterator[None]:
    """All loggers are as before afterwards."""
    found = [logging.getLogger(name) for name in ("ray.serve", *logs.OURS)]
    before = [(each, each.handlers[:], each.level, each.propagate) for each in found]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(params=["json", "text"])
def lines(request: pytest.FixtureRequest, tmp_path: Path, loggers: None) -> Lines:
    """What stands in the replica's log file, in the format of the deployment's options."""
    given = replica_options(config(request.param)).get("logging_config", {})
    configure_component_logger(
        component_name="ModelReplica", component_id="abc123", max_bytes=1 << 20, backup_count=1,
        logging_config=LoggingConfig(**given, logs_dir=str(tmp_path)),
    )  # fmt: skip
    logs.into_serve()

    def written() -> list[str]:
        for handler in logging.getLogger("ray.serve").handlers:
            handler.flush()
        [file] = tmp_path.iterdir()
        return file.read_text().splitlines()

    return written


json_only = pytest.mark.parametrize("lines", ["json"], indirect=True)
text_only = pytest.mark.parametrize("lines", ["text"], indirect=True)


def only(lines: list[str]) -> dict[str, Any]:
    [line] = lines
    body: dict[str, Any] = json.loads(line)
    return body


@json_only
def test_a_line_is_one_object_with_time_level_logger_message_and_replica(lines: Lines) -> None:
    log.warning("pool is %d %% full\nin two lines", 95)
    line = only(lines())
    assert line["asctime"][:2] == "20"
    told = {name: line[name] for name in ("levelname", "name", "message", "component_name", "component_id")}
    assert told == {
        "levelname": "WARNING", "name": "deployments.test", "message": "pool is 95 % full\nin two lines",
        "component_name": "ModelReplica", "component_id": "abc123",
    }  # fmt: skip
    assert "request_id" not in line


@json_only
def test_an_exception_is_part_of_its_line(lines: Lines) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("a step failed")
    line = only(lines())
    assert line["exc_text"].startswith("Traceback (most recent call last):\n")
    assert line["exc_text"].endswith("ValueError: broken")


@json_only
async def test_lines_of_a_request_carry_its_id_in_tasks_too_and_others_do_not(lines: Lines) -> None:
    async def work() -> None:
        log.info("inside")

    with logs.about(request="me", rid="a1.0-me"):
        await asyncio.create_task(work())
    log.info("outside")
    inside, outside = (json.loads(line) for line in lines())
    assert (inside["request_id"], inside["rid"]) == ("me", "a1.0-me")
    assert not {"request_id", "rid"} & outside.keys()


@json_only
async def test_the_clients_request_id_is_in_the_lines_of_its_request_and_in_the_answer(lines: Lines) -> None:
    app = FastAPI()

    @app.get("/")
    async def root() -> str:
        log.info("asked")
        return "x"

    async with client_of(Arrivals(app, watch=RequestWatch(), routes=RouteLog(1), echo=True)) as client:
        answers = [await client.get("/", headers=headers) for headers in ({"x-request-id": "mine"}, {})]
    told = [json.loads(line)["request_id"] for line in lines()]
    assert told == [answer.headers["x-request-id"] for answer in answers]
    assert told[0] == "mine"
    assert len(told[1]) == 16


@text_only
def test_text_lines_stay_as_serve_writes_them_and_name_the_request(lines: Lines) -> None:
    log.info("hello")
    with logs.about(request="me"):
        log.info("hello")
    without, named = lines()
    assert without.startswith("INFO 20")
    assert without.endswith(" ModelReplica abc123 -- hello")
    assert named.endswith(" ModelReplica abc123 me -- hello")


@text_only
def test_calls_that_the_observatory_makes_each_second_leave_no_line_unless_they_fail(lines: Lines) -> None:
    for call in ("observe OK 0.6ms", "observe ERROR 0.6ms", "generate OK 30.0ms"):
        logging.getLogger("ray.serve").info(f"CALL {call}")
    assert [line.partition("CALL ")[2] for line in lines()] == ["observe ERROR 0.6ms", "generate OK 30.0ms"]


def test_text_logs_leave_serves_logging_configuration_alone() -> None:
    assert "logging_config" not in replica_options(config("text"))


@pytest.fixture
def serve_log(loggers: None) -> Iterator[io.StringIO]:
    """What Serve's handler writes."""
    written = io.StringIO()
    logging.getLogger("ray.serve").handlers = [logging.StreamHandler(written)]
    yield written
    observe.enable(False)


@pytest.mark.parametrize(("value", "observed"), [("", []), ("1", ['{"event": "decode_step", "rid": "r"'])])
def test_our_lines_are_among_serves_and_observations_where_the_environment_switches_them_on(
    serve_log: io.StringIO, monkeypatch: pytest.MonkeyPatch, value: str, observed: list[str]
) -> None:
    """SPEC J01-J04 in a served replica."""
    monkeypatch.setenv("MANTA_OBSERVE", value)
    logs.into_serve()
    logging.getLogger("replicas.engine.engine").info("hello")
    observe.decode_step(rid="r", index=0, i=1, last_token=4, next_token=5, slot=9, finish=None)
    assert [line.partition(', "index')[0] for line in serve_log.getvalue().splitlines()] == ["hello", *observed]
