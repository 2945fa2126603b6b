"""`top`: whole snapshots of text, the program in a pseudo-terminal, and what it says when Manta does not answer."""

import io
import json
import os
import pathlib
import pty
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from rich.console import Console

from dashboards import files
from dashboards.catalog import FAILED, OUTCOMES, POOL_STATES, STAGES
from deployments.watch.terminal import ask, top, words
from deployments.watch.terminal.health import figures, merged, troubles
from deployments.watch.terminal.keyboard import on_terminal
from deployments.watch.terminal.table import bar, count, percent, plain, seconds, sparkline
from deployments.watch.terminal.tables import replica_table, request_table
from deployments.watch.terminal.view import View
from tests.unit.deployments import listening
from tests.unit.deployments.pseudo_terminal import manta

pytestmark = pytest.mark.usefixtures("utc")

L1 = {"tier": "L1", "capacity": 1600, "free": 400, "evictable": 400, "protected": 600, "reserved": 200,
      "quarantined": 0}  # fmt: skip


def replica(replica_id: str, **changed: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": replica_id, "name": "replica 1", "role": "unified", "node": "0123456789abcdef", "host": "10.0.0.1",
        "state": "accepting", "error": None,
        "running": 3, "running_limit": 64, "waiting": 2, "preallocating": 0, "receiving": 0, "handing_off": 0,
        "queued_tokens": 512, "prefill_tokens_per_s": 1500.0, "decode_step_s": 0.02, "report_age_s": 0.1,
        "pools": [L1], "cache_nodes": 12, "page_size": 16,
        "rates": {"prefill_tokens_per_s": 250.0, "cached_tokens_per_s": 750.0, "decode_tokens_per_s": 88.0},
    }  # fmt: skip
    return {**body, **changed}


def request(rid: str, **changed: Any) -> dict[str, Any]:
    stages = {"route_s": 0.0, "queue_s": 0.25, "prefill_s": 0.25, "transfer_s": 0.0, "decode_s": 0.5}
    body: dict[str, Any] = {
        "rid": rid, "router": "r1", "time": 1763721990.0, "endpoint": "chat", "outcome": "ok",
        "replica": "abc", "prefill": None, "policy": "estimated_ttft", "reason": "soonest_first_token",
        "tries": 1, "prompt_tokens": 400, "output_tokens": 11, "cached_tokens": 300, "predicted_tokens": 300,
        "best_tokens": 300, "ttft_s": 0.5, "itl_s": 0.05, "last_s": 1.0, "total_s": 1.0, "stages": stages, "missed": [],
    }  # fmt: skip
    return {**body, **changed}


def figure(name: str, title: str, unit: str, value: float, level: str = "ok", **more: float) -> dict[str, Any]:
    return {"name": name, "title": title, "unit": unit, "value": value, "level": level, "series": [name], "more": more,
            "most": 60.0 if unit == "seconds" else None}  # fmt: skip


FIGURES = [
    figure("ttft", "TTFT", "seconds", 0.091, p50=0.091), figure("output", "Output", "tokens/s", 88.0),
    figure("hit", "Cache hit", "ratio", 0.75), figure("queue", "Queue", "requests", 2),
]  # fmt: skip


def alert(summary: str, **changed: Any) -> dict[str, Any]:
    return {"name": "A", "severity": "critical", "state": "firing", "summary": summary, "replica": None, **changed}


def state(**changed: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "time": 1763722000.1, "started": 1763719480.1, "version": 17, "whole": True, "model": "SmolLM2",
        "mode": "unified", "period_s": 1.0, "figures": FIGURES, "alerts": [],
        "routers": [{"id": "r1", "node": "0123456789abcdef", "answering": True, "open": 5}],
        "replicas": [replica("abc")], "links": [],
        "requests": [], "autoscaling": {"targets": [], "log": []},
        "history": {"names": ["ttft", "output", "hit", "queue"], "step_s": 1, "points": [[1763722e3, 0.1, 88, 1, 2]]},
    }  # fmt: skip
    return {**body, **changed}


BLOCK = """\
SmolLM2, unified: 1 replica, 1 router, up 42 min  10:46:40
TTFT p50 91 ms | Output 88 | Cache hit 75 % | Queue 2
all well

replica    id   node      state      running  waiting  pool                                      cached  prefill/s  output/s
replica 1  abc  10.0.0.1  accepting     3/64        2  [#########%%%oooooo......]  50 % of 1.6k    75 %        250        88

request  outcome  replica    prompt  cached  output    TTFT   total  stages
one      ok       replica 1     400    75 %      11  500 ms  1.00 s  [qqqqqqppppppdddddddddddd]

router  node      open  answering
r1      01234567     5  yes

pool: # protected, % reserved, x quarantined, o evictable, . free
stages: r route, q queue, p prefill, t transfer, d decode"""  # noqa: E501


def snapshot(**changed: Any) -> str:
    return plain(top.snapshot(state(**changed)))


def test_a_state_is_a_block_of_lines() -> None:
    assert snapshot(requests=[request("one")]) == BLOCK


def test_the_words_are_those_of_the_metrics() -> None:
    """docs/metrics.md is written from the catalogue."""
    assert [name for name, _, _ in words.STAGES] == list(STAGES)
    assert {name for name, _, _ in words.POOL} == set(POOL_STATES)
    assert {each for each in (*OUTCOMES, words.RUNNING) if words.outcome_colour(each) == words.TROUBLE} == set(FAILED)


def test_the_live_views_words_are_those_of_the_metrics_too() -> None:
    ui = pathlib.Path(files.__file__).parent / "ui"
    listed = re.search(r"OUTCOMES = (\[.*\]);", (ui / "requests.js").read_text())
    states = re.search(r"STATES = \[(.*?)\];", (ui / "pools.js").read_text(), flags=re.DOTALL)
    assert listed is not None
    assert states is not None
    assert json.loads(listed[1]) == [words.RUNNING, *OUTCOMES, "unknown"]  # unknown: its router left before it told
    assert set(re.findall(r'^  \["(\w+)"', states[1], flags=re.MULTILINE)) == set(POOL_STATES)


def test_tiers_are_columns_where_a_replica_has_them() -> None:
    host = {"tier": "L2", "capacity": 3200, "free": 800, "evictable": 2400, "protected": 0, "reserved": 0,
            "quarantined": 0}  # fmt: skip
    tiers = {"host_hit_tokens": 900, "store_hit_tokens": 100, "saved_s": 2.5, "wrong_pages": 0, "store_bytes": None,
             "store_error": None}  # fmt: skip
    pools = [L1, host]
    rows = [replica("abc", pools=pools, tiers=tiers), replica("x", pools=pools, tiers=tiers | {"wrong_pages": 3})]
    text = snapshot(replicas=[*rows, replica("old")]).splitlines()
    assert [line.split(" of 1.6k")[-1].split() for line in text[5:8]] == [
        ["75", "%", "1.0k", "2.50", "s", "75", "%", "250", "88"],
        ["75", "%", "1.0k,", "3", "WRONG", "2.50", "s", "75", "%", "250", "88"],
        ["-", "-", "-", "75", "%", "250", "88"],
    ]
    assert text[4].split()[7:10] == ["host", "loaded", "saved"]


def test_what_is_not_known_is_a_dash_and_no_replica_is_explained() -> None:
    starting = replica("s", state="starting", pools=[], rates=None, running=None, running_limit=None, waiting=None)
    line = snapshot(replicas=[starting]).splitlines()[5]
    assert line.split() == ["replica", "1", "s", "10.0.0.1", "starting", "-/-", "-", "-", "-", "-", "-"]
    assert "! no replica yet" in snapshot(replicas=[])


def test_before_serve_has_told_since_when_manta_runs_nothing_is_said_of_it() -> None:
    assert snapshot(started=0.0).startswith("SmolLM2, unified: 1 replica, 1 router  10:46:40\n")


def test_links_are_shown_where_prefill_and_decode_are_apart() -> None:
    link = {"from": "p", "to": "d", "bytes_per_s": 2_500_000.0, "kv_transfers_per_s": 1.5, "failed_per_s": 0.0}
    text = snapshot(mode="disaggregated", links=[link])
    assert "from  to  KV transfers/s  failed/s  bytes/s\np     d              1.5         0     2.5M\n" in text


def test_a_bar_has_its_width_whatever_the_shares() -> None:
    thirds = bar((("#", "blue", 1 / 3), ("o", "yellow", 1 / 3), (".", "grey", 1 / 3)), "so", width=10)
    assert thirds.plain == "[###oooo...] so"
    assert bar((("#", "blue", 0.0),), "", width=4).plain == "[    ] "


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (1.5, "1.5"), (9.96, "10"), (999.4, "999"), (1000, "1.0k"), (53_000, "53k"),
     (1.4e6, "1.4M"), (2.5e9, "2.5G")],
)  # fmt: skip
def test_counts_have_three_digits_or_so(value: float | None, text: str) -> None:
    assert count(value) == text


def test_times_and_shares_are_written_with_their_unit() -> None:
    assert [seconds(x) for x in (None, 0.0, 0.0003, 0.091, 1.523, 75.0, 2520, 18e3)] == [
        "-", "0 ms", "0.3 ms", "91 ms", "1.52 s", "75 s", "42 min", "5 h"]  # fmt: skip
    assert [percent(x) for x in (None, 0.0, 0.914)] == ["-", "0 %", "91 %"]


def test_a_sparkline_ends_with_the_newest_and_leaves_out_what_is_not_known() -> None:
    assert sparkline([9.0, 0.0, 1.0, None, 2.0, 4.0], 5) == "▁▃ ▅█"
    assert sparkline([0.0, 0.0], 4) == "  ▁▁"
    assert sparkline([], 3) == "   "


def test_of_a_request_that_runs_the_stage_that_it_is_in_is_drawn_to_the_end() -> None:
    running = {"outcome": "running", "total_s": None, "time": 1763722000.1 - 4}
    none = dict.fromkeys(("route_s", "queue_s", "prefill_s", "transfer_s", "decode_s"), 0.0)
    rows = [request("new", ttft_s=None, stages=none, **running)]
    rows.append(request("old", ttft_s=1.0, tries=2, stages=none | {"queue_s": 0.5, "prefill_s": 0.5}, **running))
    lines = plain(request_table(rows, {}, now_s=1763722000.1, stages_width=8)).splitlines()
    assert lines[1].endswith("-  4.00 s  [qqqqqqqq] ...")
    assert lines[2].endswith("1.00 s  4.00 s  [qpdddddd] ...")
    assert "open, 2 tries" in lines[2]
    assert " 11 " in lines[2]


def test_an_alert_that_is_pending_is_told_before_it_is_trouble() -> None:
    body = state(alerts=[alert("6 % are refused.", state="pending")])
    assert troubles(body) == []
    assert plain(top.snapshot(body)).splitlines()[2] == "! 6 % are refused."


def test_an_answer_adds_what_is_new_to_what_was_kept_and_a_whole_one_replaces_it() -> None:
    first = merged(None, state(requests=[request("a", time=1.0), request("b", time=2.0, outcome="running")]))
    points = {**state()["history"], "points": [[1763722001.1, 0.2, 90, 1, 3]]}
    news = state(whole=False, requests=[request("b", time=2.0), request("c", time=3.0)], history=points)
    second = merged(first, news)
    assert [(row["rid"], row["outcome"]) for row in second["requests"]] == [("c", "ok"), ("b", "ok"), ("a", "ok")]
    assert [each.line for each in figures(second)][:2] == [[0.1, 0.2], [88, 90]]
    assert merged(second, state())["requests"] == []


def test_a_replica_that_is_replaced_and_requests_that_moved_are_told_before_they_are_trouble() -> None:
    replaced = [replica("abc"), replica("new", state="starting", pools=[])]
    body = state(replicas=replaced, requests=[request("a", tries=2), request("b")])
    assert troubles(body) == []
    assert plain(top.snapshot(body)).splitlines()[2:4] == [
        "! 1 of 2 replicas accept requests", "! 1 of the last 2 requests were tried again elsewhere",
    ]  # fmt: skip
    lines = screen(View(body, 0.0))
    assert lines[1] == "! 1 of 2 replicas accept requests  (and 1 more)"


def test_all_is_not_well_while_one_of_two_is_gone_and_the_next_is_not_there_yet() -> None:
    for desired, said in ((1, "all well"), (2, "! 1 of 2 replicas accept requests")):
        body = state(replicas=[replica("a")], autoscaling={"targets": [{"role": "unified", "desired": desired}]})
        assert plain(top.snapshot(body)).splitlines()[2] == said


def test_a_figure_is_red_where_the_observatory_says_that_its_alert_fires() -> None:
    [most] = figures(state(figures=[figure("ttft", "TTFT", "seconds", 60.0)]))
    assert most.text == "> 60 s", "a histogram's last bound is that much or more"
    told = figures(state(figures=[figure("ttft", "TTFT", "seconds", 3.0, "warning"), FIGURES[1]]))
    assert [(each.name, each.is_trouble) for each in told] == [("TTFT", True), ("Output", False)]


def screen(view: View, width: int = 80, height: int = 24) -> list[str]:
    out = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    out.print(view.drawn(width, height), height=height)
    return [line.rstrip() for line in out.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_the_screen_fits_a_small_terminal() -> None:
    many = [replica(f"M#{n:02}") for n in range(30)]
    view = View(state(replicas=many, requests=[request(f"req-{n}") for n in range(50)]), 0.0)
    lines = screen(view)
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("SmolLM2, unified: 30 replicas, 1 router")
    assert lines[1] == "all well"
    assert lines[5].startswith("replicas (1-7 of 30), by trouble ──")
    assert lines[14].startswith("> requests (1-7 of 50), by newest ──")
    assert "[qqqpppdddddd]" in lines[16]
    assert lines[23].startswith("q quit")
    assert any("pool: # protected" in line for line in screen(view, 200, 60))


def test_keys_choose_sort_pause_and_ask_for_an_explanation() -> None:
    rows = [request("slow", ttft_s=3.0, time=1.0), request("new", time=9.0), request("old", time=0.5)]
    replicas = [replica("a", name="A"), replica("b", name="B", running=9)]
    view = View(state(replicas=replicas, requests=rows), 0.0)

    def press(*keys: str) -> None:
        for key in keys:
            view.press(key)

    def shown(column: str) -> list[str]:
        lines = screen(view)
        start = next(at for at, line in enumerate(lines) if line.startswith(column))
        return [line.split()[0] for line in lines[start + 1 : start + 4] if line]

    assert shown("request ") == ["new", "slow", "old"]
    press("down", "enter")
    assert view.wants == "slow"
    press("s", "s")
    assert "by TTFT" in "\n".join(screen(view))
    assert shown("request ")[0] == "slow"
    press("S", "tab", "s", "s")
    assert shown("replica ")[:2] == ["B", "A"]
    press("p")
    view.take(state(model="Other"), 1.0)
    assert screen(view)[0].startswith("PAUSED  SmolLM2")
    press("p", "?")
    assert "explain the chosen request" in "\n".join(screen(view))
    press("escape", "x")
    view.take(state(model="Other"), 2.0)
    assert screen(view)[0].startswith("Other, unified")
    press("q")
    assert view.quits


def test_an_explanation_that_comes_late_does_not_cover_the_tables_to_which_a_key_has_gone_back() -> None:
    view = View(state(), 0.0)
    for wait, shown in ((False, True), (True, False)):
        view.show("asking")
        if wait:
            view.press("escape")
        view.answer("because of its cache")
        assert ("because of its cache" in "\n".join(screen(view))) is shown


def test_while_manta_is_away_the_last_tables_stay_under_a_note_of_how_long() -> None:
    view = View(state(), 10.0)
    view.lose("it answers 500", 14.0)
    assert screen(view)[1] == "! no answer for 4.00 s (asking again): it answers 500"
    assert any(line.startswith("replica 1") for line in screen(view))
    view.take(state(), 15.0)
    assert screen(view)[1] == "all well"


def test_a_narrow_terminal_goes_without_what_matters_least_and_says_so() -> None:
    out = Console(file=io.StringIO(), width=80, color_system=None)
    out.print(replica_table([replica("abc")]))
    assert [line.rstrip() for line in out.file.getvalue().splitlines()] == [  # type: ignore[attr-defined]
        "replica    state      running  waiting  pool",
        "replica 1  accepting     3/64        2  [#########%%%oooooo......]  50 % of 1.6k",
        "(a wider terminal shows: node, cached, prefill/s, output/s, id)",
    ]
    wide = Console(file=io.StringIO(), width=200, color_system=None)
    wide.print(replica_table([replica("abc")]))
    header, *rows = wide.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert (len(header.split()), len(rows)) == (10, 1)


class Scripted:
    """Answers of an observatory, the last of them for ever."""

    url = ""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = [(200, state(requests=[request("one")]))]
        self.asked: list[tuple[str, str | None]] = []

    def respond(self, path: str, headers: Mapping[str, str], _: bytes) -> tuple[int, bytes]:
        if path.startswith("/route/"):
            return 404, b'{"error": {"message": "no decision is kept for it", "code": "route_not_found"}}'
        self.asked.append((path, headers.get("Authorization")))
        status, body = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        return status, json.dumps(body).encode()


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    with listening.answering(scripted.respond) as port:
        scripted.url = f"http://127.0.0.1:{port}"
        yield scripted


def run_top(*args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "deployments", "top", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env={**os.environ, **env})


def test_once_prints_one_block_and_ends_without_importing_ray(server: Scripted) -> None:
    done = run_top("--once", "--url", server.url, PYTHONPROFILEIMPORTTIME="1", MANTA_ADMIN_KEY="k")
    assert (done.returncode, done.stdout) == (0, f"{BLOCK}\n")
    assert server.asked == [("/manta/api/state?since=0", "Bearer k")]
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "rich.table" in imported
    assert not imported & {"ray", "torch", "fastapi", "pydantic"}


def test_json_is_the_state_itself(server: Scripted) -> None:
    assert json.loads(run_top("--once", "--json", "--url", f"{server.url}/elsewhere").stdout) == server.answers[0][1]
    assert server.asked == [("/elsewhere/api/state?since=0", None)]


@pytest.mark.parametrize(
    ("status", "body", "code", "said"),
    [
        (401, {}, 4, "an admin key is asked for; give it in MANTA_ADMIN_KEY, or name a file"),
        (404, {}, 1, "has no observatory: add the application"),
        (500, {"error": {"message": "it broke"}}, 3, "answers 500: it broke"),
        (200, [], 1, "does not answer as Manta does: check --url"),
        (200, {"status": "success"}, 1, "does not answer as Manta does: check --url"),
    ],
)
def test_what_is_amiss_is_said_with_what_to_do(server: Scripted, status: int, body: Any, code: int, said: str) -> None:
    server.answers = [(status, body)]
    with pytest.raises(ask.Unanswered, match=said) as caught:
        ask.state(server.url, None)
    assert caught.value.status == code


def test_nothing_listening_is_an_exit_status_and_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = top.Options(once=True, as_json=False, interval_s=1.0)
    assert top.run("127.0.0.1:1", None, options) == 3
    assert capsys.readouterr().err.startswith("nothing answers at http://127.0.0.1:1 ([Errno 111]")


NO_PROXY = "http://127.0.0.1:9"  # where none listens


def test_no_http_proxy_is_asked_for_this_machine_or_for_what_was_started_here(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, NO_PROXY)
    server.answers = [(200, {"version": 1})] * 2
    assert ask.state(server.url, None)["version"] == 1
    elsewhere = server.url.replace("127.0.0.1", "127.1")  # no address to Python, and one to the system
    assert ask.opened(urllib.request.Request(elsewhere), timeout_s=5, is_ours=True).status == 200
    with pytest.raises(ask.Unanswered, match=r"127\.1:\d+ \(.*, asked through http_proxy, ALL_PROXY\): start"):
        ask.state(elsewhere, None)


@pytest.mark.parametrize(
    ("payload", "code", "said"),
    [
        (b"SSH-2.0-OpenSSH\r\n", ask.NOT_THERE, r"does not answer as Manta does \(BadStatusLine: SSH-2.0-OpenSSH\)"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", ask.UNREACHABLE, "nothing answers .*IncompleteRead"),
        (b"", ask.UNREACHABLE, "nothing answers .*without response"),
        (b"HTTP/1.1 500 X\r\nContent-Length: 99\r\n\r\n{", ask.UNREACHABLE, "answers 500: X"),
    ],
)
def test_what_is_not_http_or_breaks_off_is_said(payload: bytes, code: int, said: str) -> None:
    """`top` asks again where Manta was killed in the middle of an answer."""
    with listening.speaking(payload) as port, pytest.raises(ask.Unanswered, match=said) as caught:
        ask.state(f"127.0.0.1:{port}", None)
    assert caught.value.status == code


@pytest.mark.parametrize("url", ["http://localhost:80a0", "http://[::1", "http://a b"])
def test_an_address_that_is_none_is_said(url: str) -> None:
    with pytest.raises(ask.Unanswered, match=r"(is no address|does not answer as Manta does) .*check --url") as caught:
        ask.state(url, None)
    assert caught.value.status == ask.NOT_THERE


@pytest.mark.parametrize("key", ["sec\nret", "secret\u20ac", "sec\x00ret"])
def test_a_key_that_no_header_carries_is_not_sent_and_not_shown(server: Scripted, key: str) -> None:
    with pytest.raises(ask.Unanswered, match="character that no HTTP header carries") as caught:
        ask.state(server.url, key)
    assert (caught.value.status, server.asked) == (ask.REFUSED, [])
    assert "sec" not in str(caught.value)


def test_on_a_terminal_it_is_drawn_in_place_and_heeds_keys(server: Scripted) -> None:
    with manta("top", "--url", server.url, "--interval", "0.1", TZ="UTC") as terminal:
        shown = terminal.until("p pause  ? help")  # the last line
        assert "> requests (1), by newest" in shown
        assert len(shown.splitlines()) == 24
        assert max(map(len, shown.splitlines())) <= 80
        terminal.press("\t")
        terminal.until("> replicas (1), by trouble")
        terminal.press("ss")
        terminal.until("> replicas (1), by running")
        terminal.press("\t\x1b[B\r")
        terminal.until("no decision is kept for it")
        terminal.press("\x1b")
        server.answers = [(500, {"error": {"message": "it broke"}})]
        terminal.until("(asking again)")
        terminal.press("q")
        written = terminal.rest()
        assert terminal.process.wait(60) == 0
    assert written.startswith("\x1b[?1049h")
    assert "\x1b[?1049l" in written  # back to the shell


def test_a_key_that_is_refused_later_ends_it_with_the_reason(server: Scripted) -> None:
    server.answers = [(200, state()), (401, {})]
    with manta("top", "--url", server.url, "--interval", "0.1", columns=200) as terminal:
        written = terminal.rest()
        assert terminal.process.wait(60) == 4
    assert "admin key is asked for" in written.partition("\x1b[?1049l")[2]


def test_no_color_makes_plain_blocks_on_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with os.fdopen(master), os.fdopen(slave, "w") as terminal:
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        assert on_terminal(terminal)
        monkeypatch.setenv("NO_COLOR", "1")
        assert not on_terminal(terminal)
    assert not on_terminal(io.StringIO())
