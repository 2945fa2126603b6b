"""Log lines as JSON and as text, through the handlers that Ray Serve itself sets up, and which lines reach them."""

import asyncio
import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from ray.serve._private.common import ServeComponentType
from ray.serve._private.logging_utils import ServeComponentFilter, configure_component_logger
from ray.serve.schema import LoggingConfig, ServeDeploySchema

from deployments import __main__ as command_line
from deployments import logs
from deployments.app import replica_options
from deployments.command import log_files, usage
from deployments.command.serve import settle_log_format
from deployments.dispatch.leases import ReplicaGone
from deployments.http.arrivals import Arrivals
from deployments.record.rids import about, clean_name
from deployments.record.route_log import RequestWatch, RouteLog
from deployments.replica.served_engine import ActivityLog
from deployments.settings.schema import AppConfig, parse
from kvtransfer.replay import observe
from replicas.types import Usage
from routing.types import NoReplica
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.listening import client_of
from tests.unit.deployments.sample_values import ask, ids, stats, token
from tests.waiting import until_async

log = logging.getLogger("deployments.test")
Lines = Callable[[], list[str]]


def config(log_format: str) -> AppConfig:
    return parse({"model": {"path": "models/x"}, "replicas": {"count": 1}, "observability": {"log_format": log_format}})


@pytest.fixture
def loggers() -> Iterator[None]:
    """All loggers are as before afterwards."""
    found = [logging.getLogger(name) for name in ("ray.serve", *logs.OURS)]
    before = [(each, each.handlers[:], each.filters[:], each.level, each.propagate) for each in found]
    yield
    for logger, handlers, filters, level, propagate in before:
        logger.handlers, logger.filters, logger.propagate = handlers, filters, propagate
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
async def test_lines_of_a_request_carry_its_id_in_tasks_too_and_others_do_not(lines: Lines) -> None:
    async def work() -> None:
        log.info("inside")

    with about(request="me", rid="a1.0-me"):
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
    with about(request="me"):
        log.info("hello")
    without, named = lines()
    assert without.startswith("INFO 20")
    assert without.endswith(" ModelReplica abc123 -- hello")
    assert named.endswith(" ModelReplica abc123 me -- hello")


@text_only
def test_calls_that_the_observatory_makes_each_second_leave_no_line_unless_they_fail(lines: Lines) -> None:
    for call in ("observe OK 0.6ms", "observe ERROR 0.6ms", "generate OK 30.0ms", "lease OK 9.1ms", "lease ERROR 1ms"):
        logging.getLogger("ray.serve").info(f"CALL {call}")
    left = ["observe ERROR 0.6ms", "generate OK 30.0ms", "lease ERROR 1ms"]
    assert [line.partition("CALL ")[2] for line in lines()] == left


async def finished(rid: str) -> None:
    """A request of 10 prompt tokens, whose first replica dies before its first token."""
    async with House() as house:
        await house.ready(ScriptedReplica("r0", die_at=0), ScriptedReplica("r1"))
        await house.collect(rid=rid)


@json_only
async def test_a_request_that_ends_is_one_line_with_its_figures(lines: Lines) -> None:
    for handler in logging.getLogger("ray.serve").handlers:  # in a replica Serve names the process so
        handler.addFilter(ServeComponentFilter("m_Router", "own", ServeComponentType.REPLICA))
    await finished("0123456789abcdefkey0key0key0key0.0-me")
    [line] = [each for each in map(json.loads, lines()) if each["message"].startswith("finished ")]
    told = ("key", "replica", "model_replica", "cached_l1", "cached_l2", "cached_l3", "output", "finish", "tries")
    assert [line[name] for name in told] == ["key0key0key0key0", "own", "r1", 0, 0, 0, 8, "length", 2]
    assert line["rid"] == "0123456789abcdefkey0key0key0key0.0-me"
    assert line["prompt"] == len(ask().token_ids)
    assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["total_s"]
    assert line["itl_s"] is not None
    assert (line["levelname"], line["name"]) == ("INFO", "deployments.record.route_log")
    assert "serve_access_log" not in line


@text_only
async def test_a_request_that_ends_is_one_line_of_text_too_and_tries_count_from_1(lines: Lines) -> None:
    await finished("a1.0-me")
    tried, line = (each.partition(" -- ")[2] for each in lines() if " a1.0-me" in each or "rid=a1.0-me" in each)
    assert tried.startswith("request a1.0-me, try 1 on replica r0 failed after 0 tokens: ")
    assert line.startswith("finished rid=a1.0-me model_replica=r1 prompt=")
    assert " cached_l1=0 cached_l2=0 cached_l3=0 output=8 queue_s=" in line
    assert line.endswith(" finish=length outcome=ok tries=2")
    assert not {"key", "None"} & set(re.split(r"[ =]", line))


async def test_what_tenants_have_used_is_added_up_from_the_lines_of_either_form(
    lines: Lines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with House() as house:
        await house.ready(ScriptedReplica("r1"))
        for at, tenant in enumerate(("shop", "shop", "", "search")):
            request = dataclasses.replace(ask(rid=f"a1.{at}-tenant=fake", num_tokens=6), tenant=tenant)
            async for _ in house.dispatcher.stream(request):
                pass
    async with House() as house:
        with pytest.raises(NoReplica):  # there is no replica: nothing is used
            async for _ in house.dispatcher.stream(dataclasses.replace(ask(rid="a1.9-x"), tenant="shop")):
                pass
    assert sum("finished rid=" in line for line in lines()) == 5
    month, none = time.strftime("%Y-%m"), "2001-01"
    for asked, shown in ((month, ["-,1,6,0,8", "search,1,6,0,8", "shop,2,12,0,16"]), (none, [])):
        assert command_line.main(["key", "usage", "--csv", "--month", asked, "--folder", str(tmp_path)]) == 0
        head, *rows = capsys.readouterr().out.splitlines()
        assert head == "month,tenant,requests,uncached_input_tokens,cached_input_tokens,output_tokens"
        assert rows == [f"{month},{row}" for row in shown]
    assert command_line.main(["key", "usage", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == [month, "shop", "2", "12", "0", "16"]
    assert command_line.main(["key", "usage", "--folder", str(tmp_path / "none")]) == 1


@text_only
async def test_a_request_that_goes_on_elsewhere_is_counted_once_as_its_first_replica_found_it(
    lines: Lines, tmp_path: Path
) -> None:
    async def dies_after(num_tokens: int, house: House, first: ScriptedReplica) -> None:
        await until_async(
            lambda: [each.timeline.num_output for each in house.dispatcher.routes.recent()] == [num_tokens]
        )
        first.hold.set()

    async with House() as house:
        first = ScriptedReplica("r0", die_at=0)
        first.hold.clear()
        await house.ready(first, ScriptedReplica("r1"))
        asking = asyncio.create_task(house.collect(rid="a1.0-first"))
        await until_async(lambda: len(first.requests) == 1)
        usage_there = Usage(prompt_tokens=4, completion_tokens=1, cached_tokens=3, host_tokens=1)
        first.send(dataclasses.replace(token(first.requests[0], 0, 0, None), usage=usage_there))
        await dies_after(1, house, first)
        assert len(ids(await asking)) == 8
    async with House(max_tries=2) as house:
        first = ScriptedReplica("r0", die_at=3)
        first.pause_at = 3
        await house.ready(first, ScriptedReplica("r1", die_at=3))
        asking = asyncio.create_task(house.collect(rid="a1.0-second"))
        await dies_after(3, house, first)
        with pytest.raises(ReplicaGone):  # the last try had no token
            await asking
    told = [line.partition(" model_replica=")[2] for line in lines() if "-- finished " in line]
    assert told[0].startswith("r1 prompt=4 cached_l1=2 cached_l2=1 cached_l3=0 output=8 ")
    assert told[1].startswith("r1 prompt=4 cached_l1=0 cached_l2=0 cached_l3=0 output=3 ")
    [sums] = usage.added(usage.lines_of(tmp_path.iterdir())).values()
    assert list(sums.values()) == [2, 1 + 4, 3, 8 + 3]


async def test_a_stream_that_goes_on_at_another_router_is_counted_once_and_whole(lines: Lines, tmp_path: Path) -> None:
    """A router that is killed writes no line; one whose client left it for another one does."""
    begun = dataclasses.replace(ask(rid="a1.0-x", max_new_tokens=6), recall="0123456789abcdef of all of its runs")

    async def used_after(made: dict[int, list[int]] | None, *, leaves_at: int | None = None) -> list[int]:
        async with House() as house:
            replica = ScriptedReplica("r0")
            replica.pause_at = leaves_at
            await house.ready(replica)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if leaves_at is None else 0.2):
                    async for _ in house.dispatcher.stream(begun, made=made):
                        pass
        [sums] = usage.added(usage.lines_of(tmp_path.iterdir())).values()
        return list(sums.values())

    assert await used_after({0: [1000]}, leaves_at=3) == [1, 4, 0, 1 + 2]  # its client leaves this one too
    assert await used_after({0: [1000, 1001, 1002]}) == [1, 4, 0, 3 + 3]
    assert await used_after({}) == [1, 4, 0, 6]  # no replica remembers anything: it is made anew
    assert await used_after(None, leaves_at=2) == [1, 4, 0, 6]  # the first router lives, and ends its run


def test_of_a_stream_that_an_older_manta_resumed_the_output_alone_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It told restored=1, and no name of the stream."""
    line = f"INFO 2026-11-30 23:59:59,999 manta_Router x id -- finished {TOLD} tries=1"
    (tmp_path / "replica_manta_Router_x.log").write_text(f"{line} restored=1\n{line} restored=1\n{line}\n")
    assert command_line.main(["key", "usage", "--csv", "--folder", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert (told.out.splitlines()[1:], told.err) == (["2026-11,victim,1,36,64,21"], "")


TOLD = "rid=a tenant=victim prompt=100 output=7 cached_l1=32 cached_l2=16 cached_l3=16 outcome=ok"


@pytest.mark.parametrize("name", ["x -- ", "-- ", "", "x\rINFO 2026-11-30 23:59:59,999 manta_Router x id -- "])
def test_a_client_forges_no_use_by_the_name_of_its_request_that_serve_writes_into_its_own_line(
    lines: Lines, tmp_path: Path, name: str
) -> None:
    access = {"request_id": f"{name}finished {TOLD}", "route": "/", "serve_access_log": True}
    logging.getLogger("ray.serve").info("GET / 401 1.0ms", extra=access)
    assert any(TOLD in line for line in lines())
    assert usage.added(usage.lines_of(tmp_path.iterdir())) == {}


@pytest.mark.parametrize("attributes", [[], ["name"], ["threadName", "name", "lineno", "stack_info"]])
def test_lines_are_read_whatever_serve_writes_before_their_message(
    tmp_path: Path, loggers: None, attributes: list[str]
) -> None:
    """additional_log_standard_attrs, in a file whose lines are text."""
    configure_component_logger(
        component_name="manta_Router", component_id="x", max_bytes=1 << 20, backup_count=1,
        logging_config=LoggingConfig(additional_log_standard_attrs=attributes, logs_dir=str(tmp_path)),
    )  # fmt: skip
    logs.into_serve()
    for request in (None, clean_name("me"), clean_name("--")):
        with about(request=request):
            log.info("finished %s", TOLD)
            log.info("said -- finished %s", TOLD)
    used = usage.added(usage.lines_of(tmp_path.iterdir()))
    assert [sums["output_tokens"] for sums in used.values()] == [3 * 7]


def test_lines_that_cannot_be_read_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = f"INFO 2026-11-30 23:59:59,999 manta_Router x id -- finished {TOLD}\n"
    in_json = json.dumps({"asctime": "2026-11-30 23:59:59,999", "message": f"finished {TOLD}"}) + "\n"
    bad = [
        whole.replace("prompt=100", "prompt=0'"),
        whole.replace(" cached_l3=16", ""),
        *(whole[: whole.index(cut)] + "\n" for cut in ("ictim", "ached_l3", "16 outcome")),
        in_json[:-20] + "\n",
        in_json.replace("asctime", "time"),
    ]
    (tmp_path / "replica_manta_Router_x.log").write_text("".join([whole, *bad, "GET / 200 1.0ms\n"]))
    (tmp_path / "replica_manta_Router_x.log.1").write_text(in_json)  # rotated
    assert command_line.main(["key", "usage", "--csv", "--folder", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[1:] == ["2026-11,victim,2,72,128,14"]
    assert told.err.splitlines() == ["7 lines that seem to tell of requests were not read: cut off, or forged"]


@pytest.mark.parametrize("tenant", ["=1+1", "@SUM(A1)", "a,b", "x" * 65])
def test_a_tenant_whose_name_no_file_of_keys_may_have_is_not_shown(tenant: str) -> None:
    line = f"INFO 2026-11-30 23:59:59,999 manta_Router x id -- finished {TOLD}\n"
    assert list(usage.added([line])) == [("2026-11", "victim")]
    assert usage.added([line.replace("victim", tenant)]) == {}


def test_a_replica_says_every_ten_seconds_what_it_does_and_nothing_while_it_is_idle(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    activity = ActivityLog(stats(), lambda: now_s)
    monkeypatch.setattr(logging.getLogger("deployments"), "propagate", True)
    caplog.set_level(logging.INFO, "deployments")

    def look(at_s: float, **figures: Any) -> list[str]:
        nonlocal now_s
        now_s = at_s
        caplog.clear()
        activity.look(dataclasses.replace(stats(), **figures))
        return [record.getMessage() for record in caplog.records]

    seen = {"prefill_tokens": 50, "cached_tokens": 150, "lookup_tokens": 200, "decode_tokens": 400, "num_finished": 2}
    assert look(109.9, **seen) == []  # not yet
    assert look(110.0, **seen, num_running=3) == [
        "running 3, waiting 0, handing_over 0, finished 2, kv_percent 0, hit_percent 75, prefill_tok_s 5.0, "
        "decode_tok_s 40.0"
    ]
    assert look(120.0, **seen, num_waiting=1) == [
        "running 0, waiting 1, handing_over 0, finished 0, kv_percent 0, prefill_tok_s 0.0, decode_tok_s 0.0"
    ]
    assert look(130.0, **seen) == []
    assert look(150.0, **{**seen, "decode_tokens": 440})[0].endswith("decode_tok_s 2.0")  # since the last look


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


@pytest.mark.parametrize(
    ("formats", "given", "encoding"),
    [
        (["json"], {}, "JSON"),
        (["text", "json"], {}, "JSON"),
        (["text"], {}, None),
        (["json"], {"logging_config": {"encoding": "TEXT"}}, "TEXT"),
    ],
)
def test_json_of_a_models_processes_is_json_of_all_of_serves(
    formats: list[str], given: dict[str, Any], encoding: str | None
) -> None:
    """791 of 791 lines of an observatory were text beside a model's JSON."""
    schema = ServeDeploySchema.model_validate({"applications": [], **given})
    settle_log_format(schema, map(config, formats))
    assert (None if schema.logging_config is None else schema.logging_config.encoding) == encoding


def write(file: Path, *lines: str, at_s: int) -> None:
    with file.open("a") as opened:
        opened.write("".join(lines))
    os.utime(file, (at_s, at_s))


def test_the_logs_are_printed_and_followed_through_new_files_and_halves_of_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "replica_m_ModelReplica_ab12.log", tmp_path / "replica_m_Router_cd34.log"
    write(one, "1\n", "2\n", "3\n", "half", at_s=1)
    write(two, "r\n", at_s=2)
    assert log_files.run(tmp_path, "", num_lines=2, follow=False) == 0
    assert capsys.readouterr().out.splitlines() == [f"==> {one.name} <==", "2", "3", f"==> {two.name} <==", "r"]
    serves = tmp_path / "controller_7.log"
    write(serves, "INFO 2026 controller 7 -- port 30001\n", "WARNING 2026 controller 7 -- late\n", "  why\n", at_s=0)
    write(tmp_path / "proxy_1.log", '{"levelname": "INFO", "message": "WARNING"}\n', at_s=3)
    assert log_files.run(tmp_path, "", num_lines=1, follow=False) == 0
    warned = [f"==> {serves.name} <==", "  why"]
    assert capsys.readouterr().out.splitlines() == [f"==> {one.name} <==", "3", f"==> {two.name} <==", "r", *warned]
    assert log_files.run(tmp_path, "controller", num_lines=3, follow=False) == 0
    assert "port 30001" in capsys.readouterr().out
    serves.unlink()
    (tmp_path / "proxy_1.log").unlink()
    assert log_files.run(tmp_path, "router", num_lines=0, follow=False) == 0
    assert capsys.readouterr().out == ""
    assert log_files.run(tmp_path, "zz", num_lines=2, follow=False) == 1
    known = f"no log of 'zz' in {tmp_path}; there are: {one.stem}, {two.stem}\n"
    assert capsys.readouterr().err == known

    later = tmp_path / "replica_m_ModelReplica_ef56.log"
    turns = iter([
        lambda: write(one, " a line\n", at_s=3),
        lambda: write(later, "born\n", at_s=4),
        lambda: (one.unlink(), write(one, "x\n", at_s=5)),
    ])  # fmt: skip

    def pause(_: float) -> None:
        turn = next(turns, None)
        if turn is None:
            raise KeyboardInterrupt
        turn()

    with pytest.raises(KeyboardInterrupt):
        log_files.run(tmp_path, "modelreplica", num_lines=1, follow=True, pause=pause)
    assert capsys.readouterr().out.splitlines() == [
        f"==> {one.name} <==", "3", "half a line", f"==> {later.name} <==", "born", f"==> {one.name} <==", "x",
    ]  # fmt: skip


def test_each_port_leads_to_its_own_logs_after_the_end_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a second Ray on the machine, session_latest was another server's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for port, run in ((8000, "a"), (8431, "b"), (8000, "c")):
        (tmp_path / run).mkdir()
        write(tmp_path / run / "proxy.log", f"{run}\n", at_s=1)
        log_files.remember(port, str(tmp_path / run))
    for port, line in (("8000", "c"), ("8431", "b")):
        assert command_line.main(["logs", "--port", port]) == 0
        assert capsys.readouterr().out.splitlines() == ["==> proxy.log <==", line]
    assert command_line.main(["logs", "--port", "9"]) == 1
    assert "give the folder that `manta serve` printed" in capsys.readouterr().err
    assert command_line.main(["logs", "--folder", str(tmp_path / "a")]) == 0
    log_files.remember(8000, "/elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    log_files.remember(8000, "/elsewhere")  # no home, no harm


def test_serve_says_that_a_replica_is_away_once_a_second_however_often_it_is_tried(
    loggers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kill gave 206 equal lines, a start that hung 90 a second; and the last word names the ones left out."""
    out, now_s, serve = io.StringIO(), [0.0], logging.getLogger("ray.serve")
    handler = logging.StreamHandler(out)
    serve.handlers, serve.propagate = [handler], False
    serve.setLevel(logging.INFO)
    monkeypatch.setattr(logs.Seldom.__init__, "__defaults__", (lambda: now_s[0],))
    logs.into_serve()
    for step in range(300):  # 100 a second
        now_s[0] = step / 100
        for replica in ("Replica(id='2zcjnwgx')", "Replica(id='7qpwmr1d')"):
            serve.warning(f"{replica} is temporarily unavailable.")
        serve.warning(f"Failed to route request after {step} attempts over {step}.0s. Retrying. Request ID: r{step}.")
        log.warning("one of ours")
        serve.info("one that does not warn")
    told = out.getvalue().splitlines()
    assert told.count("one of ours") == told.count("one that does not warn") == 300
    seldom = [line for line in told if "one" not in line.split()]
    assert len(seldom) == 9
    assert seldom[-3:] == [
        "Replica(id='2zcjnwgx') is temporarily unavailable. (99 more such lines)",
        "Replica(id='7qpwmr1d') is temporarily unavailable. (99 more such lines)",
        "Failed to route request after 200 attempts over 200.0s. Retrying. Request ID: r200. (99 more such lines)",
    ]
