"""Log lines as JSON, through the handlers that Ray Serve itself sets up for a replica."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig

from deployments import logs
from deployments.app import replica_options
from deployments.dispatch.route_log import RequestWatch, RouteLog
from deployments.http.arrivals import Arrivals
from deployments.settings.schema import AppConfig, parse

log = logging.getLogger("deployments.test")
Lines = Callable[[], list[str]]


def config(log_format: str) -> AppConfig:
    return parse({"model": {"path": "models/x"}, "replicas": {"count": 1}, "observability": {"log_format": log_format}})


@pytest.fixture(params=["json", "text"])
def lines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lines]:
    """What stands in the replica's log file. Its format is that of the deployment's options; loggers are restored."""
    names = ("ray.serve", *logs.OURS)
    loggers = [logging.getLogger(name) for name in names]
    before = [(each, each.handlers[:], each.level, each.propagate) for each in loggers]
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

    yield written
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


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

    transport = httpx.ASGITransport(app=Arrivals(app, watch=RequestWatch(), routes=RouteLog(1), echo=True))
    async with httpx.AsyncClient(transport=transport, base_url="http://manta") as client:
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


def test_what_is_said_of_logging_elsewhere_holds_for_text() -> None:
    assert "logging_config" not in replica_options(config("text"))
