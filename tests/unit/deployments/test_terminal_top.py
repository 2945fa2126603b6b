"""`top`: whole blocks of text, what it says when Manta does not answer, and that nothing is drawn where none looks."""

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from rich.console import Console

from deployments.watch.terminal import ask, top
from deployments.watch.terminal.table import Bar, count, percent, seconds
from tests.unit.deployments import listening

pytestmark = pytest.mark.usefixtures("utc")

L1 = {"tier": "L1", "capacity": 1600, "free": 400, "evictable": 400, "protected": 600, "reserved": 200,
      "quarantined": 0}  # fmt: skip


def replica(name: str, **changed: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": name, "role": "unified", "node": "0123456789abcdef", "state": "accepting", "error": None,
        "running": 3, "running_limit": 64, "waiting": 2, "preallocating": 0, "receiving": 0, "handing_off": 0,
        "queued_tokens": 512, "prefill_tokens_per_s": 1500.0, "decode_step_s": 0.02, "report_age_s": 0.1,
        "pools": [L1], "cache_nodes": 12, "page_size": 16,
        "rates": {"prefill_tokens_per_s": 250.0, "cached_tokens_per_s": 750.0, "decode_tokens_per_s": 88.0},
    }  # fmt: skip
    return {**body, **changed}


def state(**changed: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "time": 1763722000.1, "version": 17, "model": "SmolLM2", "mode": "unified", "period_s": 1.0,
        "routers": [{"id": "r1", "node": "0123456789abcdef", "answering": True, "open": 5}],
        "replicas": [replica("abc")], "links": [],
        "totals": {"requests_per_s": 4.0, "ttft_p50_s": 0.091, "ttft_p90_s": 1.684, "reuse_ratio": 0.75,
                   "fullest_pool_ratio": 0.5},
        "requests": [], "autoscaling": {"targets": [], "log": []}, "history": {"times": [], "used": {}},
    }  # fmt: skip
    return {**body, **changed}


BLOCK = """\
SmolLM2, unified: 1 replica, 1 router  10:46:40
requests/s 4 | TTFT p50 91 ms, p90 1.68 s | reused 75 % | running 3, waiting 2 | fullest pool 50 %

replica  role     node      state      running  waiting  pool                                       hit  prefill/s  decode/s
abc      unified  01234567  accepting     3/64        2  [#########%%%oooooo......]  50 % of 1.6k  75 %        250        88

router  node      open  answering
r1      01234567     5  yes

pool: # protected, % reserved, x quarantined, o evictable, . free"""  # noqa: E501


def test_a_state_is_a_block_of_lines() -> None:
    assert top.plain(state()) == BLOCK


def test_tiers_are_columns_where_a_replica_has_them() -> None:
    host = {"tier": "L2", "capacity": 3200, "free": 800, "evictable": 2400, "protected": 0, "reserved": 0,
            "quarantined": 0}  # fmt: skip
    tiers = {"host_hit_tokens": 900, "store_hit_tokens": 100, "saved_s": 2.5, "wrong_pages": 0, "store_bytes": None,
             "store_error": None}  # fmt: skip
    pools = [L1, host]
    rows = [replica("abc", pools=pools, tiers=tiers), replica("x", pools=pools, tiers=tiers | {"wrong_pages": 3})]
    text = top.plain(state(replicas=[*rows, replica("old")])).splitlines()
    assert [line.split(" of 1.6k")[-1].split() for line in text[4:7]] == [
        ["75", "%", "1.0k", "2.50", "s", "75", "%", "250", "88"],
        ["75", "%", "1.0k,", "3", "WRONG", "2.50", "s", "75", "%", "250", "88"],
        ["-", "-", "-", "75", "%", "250", "88"],
    ]
    assert text[3].split()[7:10] == ["host", "loaded", "saved"]


def test_what_is_not_known_is_a_dash_and_no_replica_is_explained() -> None:
    starting = replica("s", state="starting", pools=[], rates=None, running=None, running_limit=None, waiting=None)
    line = top.plain(state(replicas=[starting])).splitlines()[4]
    assert line.split() == ["s", "unified", "01234567", "starting", "-/-", "-", "-", "-", "-", "-"]
    assert "no replica yet" in top.plain(state(replicas=[]))


def test_links_are_shown_where_prefill_and_decode_are_apart() -> None:
    link = {"from": "p", "to": "d", "bytes_per_s": 2_500_000.0, "hand_offs_per_s": 1.5, "failed_per_s": 0.0}
    text = top.plain(state(mode="disaggregated", links=[link]))
    assert "from  to  hand-offs/s  failed/s  bytes/s\np     d           1.5         0     2.5M\n" in text


def test_a_bar_has_its_width_whatever_the_shares() -> None:
    thirds = Bar(parts=(("#", "blue", 1 / 3), ("o", "yellow", 1 / 3), (".", "grey", 1 / 3)), words="", width=10)
    assert "".join(text for text, _ in thirds.pieces()) == "###oooo..."
    none = Bar(parts=(("#", "blue", 0.0),), words="", width=4)
    assert "".join(text for text, _ in none.pieces()) == "    "


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (1.5, "1.5"), (9.96, "10"), (999.4, "999"), (1000, "1.0k"), (53_000, "53k"),
     (1.4e6, "1.4M"), (2.5e9, "2.5G")],
)  # fmt: skip
def test_counts_have_three_digits_or_so(value: float | None, text: str) -> None:
    assert count(value) == text


def test_times_and_shares_are_written_with_their_unit() -> None:
    assert [seconds(x) for x in (None, 0.0, 0.0003, 0.091, 1.523, 75.0)] == [
        "-", "0 ms", "0.3 ms", "91 ms", "1.52 s", "75 s"]  # fmt: skip
    assert [percent(x) for x in (None, 0.0, 0.914)] == ["-", "0 %", "91 %"]


def test_rich_draws_the_same_cells() -> None:
    out = Console(file=io.StringIO(), width=160, color_system=None)
    out.print(top.drawn(state(), note="lost"))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    for words in ("abc", "accepting", "3/64", "[#########%%%oooooo......]", "50 % of 1.6k", "lost"):
        assert words in text


def test_a_narrow_terminal_goes_without_what_matters_least_and_says_so() -> None:
    out = Console(file=io.StringIO(), width=80, color_system=None)
    out.print(top.tables(state())[0])
    assert [line.rstrip() for line in out.file.getvalue().splitlines()] == [  # type: ignore[attr-defined]
        "replica  state      running  waiting  pool",
        "abc      accepting     3/64        2  [#########%%%oooooo......]  50 % of 1.6k",
        "(a wider terminal shows: node, hit, prefill/s, decode/s, role)",
    ]
    wide = Console(file=io.StringIO(), width=200, color_system=None)
    wide.print(top.tables(state())[0])
    header, *rows = wide.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert (len(header.split()), len(rows)) == (10, 1)


class Scripted:
    """Answers of an observatory, the last of them for ever."""

    url = ""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = [(200, state())]
        self.asked: list[tuple[str, str | None]] = []

    def respond(self, path: str, headers: Mapping[str, str], _: bytes) -> tuple[int, bytes]:
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
    assert (done.returncode, done.stdout) == (0, f"{BLOCK}\n\n")
    assert server.asked == [("/manta/api/state", "Bearer k")]
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "rich.table" in imported
    assert not imported & {"ray", "torch", "fastapi", "pydantic"}


def test_json_is_the_state_itself(server: Scripted) -> None:
    assert json.loads(run_top("--once", "--json", "--url", f"{server.url}/elsewhere").stdout) == state()
    assert server.asked == [("/elsewhere/api/state", None)]


@pytest.mark.parametrize(
    ("status", "body", "code", "said"),
    [
        (401, {}, 4, "an admin key is asked for; give it in MANTA_ADMIN_KEY, or name a file"),
        (404, {}, 1, "has no observatory: add the application"),
        (500, {"error": {"message": "it broke"}}, 3, "answers 500: it broke"),
        (200, [], 1, "does not answer as Manta does: check --url"),
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
    assert capsys.readouterr().err.startswith("nothing answers at http://127.0.0.1:1/manta/api/state ([Errno 111]")


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


def test_white_space_around_the_key_does_not_count(server: Scripted) -> None:
    ask.state(server.url, " secret\n")
    assert server.asked == [("/manta/api/state", "Bearer secret")]


def test_while_manta_is_away_the_last_table_stays_under_a_note_of_how_long(server: Scripted) -> None:
    server.answers = [(200, state()), (500, {}), (500, {}), (200, state()), (401, {})]
    screen, shown, now_s = io.StringIO(), [], [0.0]
    console = Console(file=screen, width=160, height=40, force_terminal=True, color_system=None)

    def wait(interval_s: float) -> None:
        shown.append(screen.getvalue())
        screen.seek(0)
        screen.truncate()
        now_s[0] += interval_s

    with pytest.raises(ask.Unanswered, match="admin key"):
        top._live(lambda: ask.state(server.url, None), 2.0, console, wait, lambda: now_s[0])
    notes = [re.findall(r"no answer for .*?\)", each) for each in shown]
    assert notes == [[], ["no answer for 2.00 s (asking again)"], ["no answer for 4.00 s (asking again)"], []]
    assert all("accepting" in each for each in shown)


def test_blocks_go_on_over_a_gap_and_end_when_the_key_is_refused(server: Scripted) -> None:
    """Not a terminal: one block an interval; a server that is away for a moment is asked again."""
    server.answers = [(200, state()), (500, {}), (200, state()), (401, {})]
    out, err, waits = io.StringIO(), io.StringIO(), []
    options = top.Options(once=False, as_json=False, interval_s=2.0)
    with pytest.raises(ask.Unanswered, match="admin key is wrong"):
        top._blocks(lambda: ask.state(server.url, "k"), options, out, err, waits.append)
    assert out.getvalue() == f"{BLOCK}\n\n" * 2
    assert "\x1b" not in out.getvalue()
    assert "answers 500" in err.getvalue()
    assert waits == [2.0, 2.0, 2.0]


def test_a_terminal_gets_the_table_in_place_until_the_server_refuses(server: Scripted) -> None:
    """In a pseudo-terminal: the alternate screen, the table, and back to the shell with the reason."""
    server.answers = [(200, state()), (200, state()), (401, {})]
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "deployments", "top", "--interval", "0.1", "--url", server.url]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    env.pop("NO_COLOR", None)
    process = subprocess.Popen(command, stdout=slave, stderr=subprocess.PIPE, env=env)
    os.close(slave)
    written = b""
    with contextlib.suppress(OSError):  # the end of a pseudo-terminal
        while piece := os.read(master, 65536):
            written += piece
    os.close(master)
    assert process.stderr is not None
    assert b"admin key is asked for" in process.stderr.read()
    assert process.wait(30) == 4
    assert written.startswith(b"\x1b[?1049h")
    assert b"accepting" in written
    assert b"\x1b[?1049l" in written


def test_no_color_makes_plain_blocks_on_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with os.fdopen(master), os.fdopen(slave, "w") as terminal:
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        assert top.on_terminal(terminal)
        monkeypatch.setenv("NO_COLOR", "1")
        assert not top.on_terminal(terminal)
    assert not top.on_terminal(io.StringIO())
