"""`explain`: whole blocks of text for what the routers answer, and real answers of a router."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from deployments.http.routes import own_route
from deployments.watch.terminal import ask, explain
from deployments.watch.terminal.table import plain
from tests.unit.deployments.in_process import House, ScriptedReplica
from tests.unit.deployments.listening import answering

pytestmark = pytest.mark.usefixtures("utc")


def candidate(replica: str, *, chosen: bool, **changed: Any) -> dict[str, Any]:
    terms = {"queue_s": 0.0, "own_s": 0.2, "decode_s": 0.01, "pressure_s": 0.0, "behind_s": 0.0, "ttft_s": 0.21}
    return {
        "replica": replica, "role": "unified", "chosen": chosen, "cached_tokens": 1400, "num_requests": 3,
        "queued_tokens": 0, "own_tokens": 309, "prefill_tokens_per_s": 1500.0, "pool_utilization": 0.4,
        "report_age_s": 0.1, **terms, **changed,
    }  # fmt: skip


def tried(**changed: Any) -> dict[str, Any]:
    return {
        "sentence": f"me (1709 prompt tokens) went to {changed.get('replica', 'a1')} by estimated_ttft: soonest.",
        "replica": "a1", "policy": "estimated_ttft", "reason": "soonest_first_token", "num_tokens": 1709,
        "predicted": {"cached_tokens": 1400, "ttft_s": 0.21}, "best_overlap": {},
        "candidates": [
            candidate("a1", chosen=True),
            candidate("b2", chosen=False, cached_tokens=1704, own_tokens=5, queued_tokens=900, queue_s=0.6,
                      ttft_s=0.81, own_s=0.2, behind_s=1.5),
        ],
        "actual": {"cached_tokens": 1400, "ttft_s": 0.25}, "outcome": "ok", "failure": None, **changed,
    }  # fmt: skip


def answer(*tries: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {
        "rid": "me", "internal_rid": "f00.0-me", "router": "r1", "time": 1763722000.1, "replica": "a1",
        "outcome": "ok", "num_retries": len(tries) - 1, "tries": list(tries), **changed,
    }  # fmt: skip


BLOCK = """\
me: ok, 1 try, 2025-11-21 10:46:40, router r1

me (1709 prompt tokens) went to a1 by estimated_ttft: soonest.

   candidate  role     cached  to do  queued  tok/s   queue     own  decode  pressure  = TTFT  others  requests  pool
>  a1         unified    1.4k    309       0   1.5k    0 ms  200 ms   10 ms      0 ms  210 ms    0 ms         3  40 %
   b2         unified    1.7k      5     900   1.5k  600 ms  200 ms   10 ms      0 ms  810 ms  1.50 s         3  40 %

Outcome: ok. First token after 250 ms (210 ms predicted); 1400 of 1709 prompt tokens were cached (1400 predicted).

stage      time  of 1.00 s
route     10 ms  [                                                ]   1 %
queue     40 ms  [==                                              ]   4 %
prefill  200 ms  [  ==========                                    ]  20 %
decode   750 ms  [            ====================================]  75 %"""


def test_a_finished_request_is_its_sentence_its_candidates_its_end_and_where_its_time_went() -> None:
    stages = {"route_s": 0.01, "queue_s": 0.04, "prefill_s": 0.2, "transfer_s": 0.0, "decode_s": 0.75}
    assert plain(explain.drawn(answer(tried(), stages=stages, total_s=1.0))) == BLOCK


def test_terms_that_older_routers_lack_or_that_are_0_everywhere_have_a_column_once_they_are_not() -> None:
    shown = plain(explain.drawn(answer(tried(candidates=[candidate("a1", chosen=True, step_s=0.018, way_s=0.003)]))))
    heads, row = (line.split() for line in shown.split("\n\n")[2].splitlines())
    assert heads[heads.index("own") :][:6] == ["own", "step", "decode", "pressure", "way", "="]
    assert " ".join(row[-17:-7]) == "200 ms 18 ms 10 ms 0 ms 3.0 ms"


def test_a_request_without_a_token_says_so() -> None:
    running = tried(outcome="running", actual={"cached_tokens": None, "ttft_s": None})
    assert "Outcome: running; no token yet." in plain(explain.drawn(answer(running, outcome="running")))


def test_what_a_request_waited_behind_other_tenants_is_said() -> None:
    passed = tried(actual={"cached_tokens": 0, "ttft_s": 2.5, "passed_s": 2.0})
    text = "For 2.00 s others went before it, of tenants that had used less."
    assert text in " ".join(plain(explain.drawn(answer(passed))).split())



def test_drafts_are_said_where_there_were_any() -> None:
    drafted = {"cached_tokens": 0, "ttft_s": 2.5, "drafted_tokens": 9, "accepted_tokens": 4}
    text = " ".join(plain(explain.drawn(answer(tried(actual=drafted)))).split())
    assert "Of 9 tokens that were drafted, 4 came true." in text
    text = plain(explain.drawn(answer(tried(actual=drafted | {"drafted_tokens": 0, "accepted_tokens": 0}))))
    assert "drafted" not in text


TERMS = {
    "replica_id": "d1", "cached_tokens": 0, "own_tokens": 1709, "transfer_pages": 107, "transfer_bytes": 78_000_000,
    "ttft_s": 1.2, "stall_s": 2.0, "transfer_s": 0.05, "overhead_s": 0.01, "pressure_s": 0.0, "load_s": 0.0,
    "slower_s": 0.0, "local_cost_s": 3.2, "receive_cost_s": 0.06,
}  # fmt: skip
PAIR = {
    "prefill": "p1", "decode": "d1", "reason": "cheaper", "why": None, "best_prefill": "p1", "prefill_s": 1.1,
    "kv_transfer_cost_s": 1.16, "local_cost_s": 3.2, "link_bytes_per_s": 1e9, "link_measured": True,
    "decode_replicas": [TERMS],
}  # fmt: skip


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (
            {"transferred": True, "reason": None, "num_pages": 107, "num_bytes": 78_000_000, "grant_s": 0.002,
             "wait_s": 1.2, "transfer_s": 0.06},
            "KV transfer: 107 pages, 78MB in 60 ms (room after 2.0 ms, all there 1.20 s later)",
        ),
        (
            {"transferred": False, "reason": "peer silent", "num_pages": 0, "num_bytes": 0, "grant_s": 0.0,
             "wait_s": 0.0, "transfer_s": 0.0},
            "KV transfer failed: peer silent; the prompt was computed where it decodes",
        ),
    ],
)  # fmt: skip
def test_a_kv_transfer_tells_its_costs_and_how_it_went(report: dict[str, Any], said: str) -> None:
    body = answer(tried(pair=PAIR, kv_transfer=report, prefill_end=None, held_out={"p2": "its transfers failed"}))
    blocks = plain(explain.drawn(body)).split("\n\n")
    assert blocks[3:6] == [
        "The prompt is handed over by p1 (cheaper): handing over costs 1.16 s, computing in place 3.20 s.",
        "   decode replica  cached  to receive  transfer   stall  slower  computed  received\n"
        ">  d1                   0        78MB     50 ms  2.00 s    0 ms    3.20 s     60 ms",
        f"Not asked: p2, its transfers failed\n{said}",
    ]


async def test_the_answer_of_a_real_router_is_explained(house: House) -> None:
    """The form of `own_route` and this view do not drift apart."""
    await house.ready(ScriptedReplica("r0", die_at=0), ScriptedReplica("r1"))
    await house.collect(rid="a1.0-me")
    body = own_route(house.dispatcher, "me")
    assert body is not None
    text = plain(explain.drawn(json.loads(json.dumps(body))))
    assert "Try 1: me (4 prompt tokens) went to r0 by round_robin: " in text
    assert "It failed: ReplicaGone" in text
    assert "Try 2: me (4 prompt tokens) went to r1 by round_robin: " in text
    assert "0 of 4 prompt tokens were cached (0 predicted)." in text


@pytest.fixture
def url() -> Iterator[str]:
    """A router that asks for a key everywhere but at /route, and to which none is sent."""
    keys = []

    def respond(path: str, headers: Mapping[str, str], _: bytes) -> tuple[int, bytes]:
        keys.append(headers.get("Authorization"))
        if path == "/route/me%401/x":
            return 200, json.dumps(answer(tried())).encode()
        own = path.startswith("/route/")
        error = {"message": "no decision is kept for 'you'", "code": "route_not_found"} if own else {"message": "key?"}
        return 404 if own else 401, json.dumps({"error": error}).encode()

    with answering(respond) as port:
        yield f"127.0.0.1:{port}"
    assert set(keys) <= {None}


def test_the_command_prints_text_or_json_and_an_unknown_request_is_exit_status_1(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain.run(url, "me@1/x", None, as_json=False) == 0
    assert capsys.readouterr().out == plain(explain.drawn(answer(tried()))) + "\n"
    assert explain.run(url, "me@1/x", None, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == answer(tried())
    assert explain.run(url, "you", None, as_json=False) == ask.NOT_THERE
    assert capsys.readouterr().err == "no decision is kept for 'you'\n"


def test_replicas_have_the_names_of_the_live_view_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    state = {
        "version": 1,
        "replicas": [{"id": "a1", "name": "replica 1"}],
        "ended": [{"id": "b2", "name": "replica 2"}],
    }

    def respond(path: str, _: Mapping[str, str], __: bytes) -> tuple[int, bytes]:
        return 200, json.dumps(state if path.startswith("/manta/api/state") else answer(tried())).encode()

    with answering(respond) as port:
        assert explain.run(f"127.0.0.1:{port}", "me", None, as_json=False) == 0
    told = capsys.readouterr().out
    assert ">  a1         replica 1  unified" in told
    assert "   b2         replica 2  unified" in told


def test_routers_that_ask_for_the_admin_key_are_shown_it_and_a_refusal_says_how_to_give_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def respond(_: str, headers: Mapping[str, str], __: bytes) -> tuple[int, bytes]:
        right = headers.get("Authorization") == "Bearer open sesame"
        body = answer(tried()) if right else {"error": {"message": "a key", "code": "admin_key_needed"}}
        return 200 if right else 401, json.dumps(body).encode()

    with answering(respond) as port:
        url = f"http://127.0.0.1:{port}"
        assert explain.run(url, "me", "open sesame\n", as_json=False) == 0
        assert explain.run(url, "me", None, as_json=False) == ask.REFUSED
        assert capsys.readouterr().err == (
            f"{url}: an admin key is asked for; give it in MANTA_ADMIN_KEY, or name a file that holds it: --key-file\n"
        )


def test_the_observatorys_address_leads_to_its_routers(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.run(f"{url}/manta/", "me@1/x", None, as_json=False) == 0
    assert explain.run(f"{url}/manta", "you", None, as_json=False) == ask.NOT_THERE
    assert capsys.readouterr().err == "no decision is kept for 'you'\n"
    assert explain.run(f"{url}/a/b", "you", None, as_json=False) == ask.NOT_THERE
    assert capsys.readouterr().err == (
        f"no router of Manta answers under http://{url}/a/b or http://{url}/a: give its address with --url\n"
    )


def test_an_older_routers_answer_without_a_sentence_is_explained() -> None:
    text = plain(explain.drawn(answer(tried(sentence=None))))
    assert "\n\nme went to a1 by estimated_ttft.\n\n" in text
