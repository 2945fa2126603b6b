"""The observatory over HTTP, without Ray: what each path answers, and to whom."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from starlette.types import Message

from deployments.fleet.peers import FoundRoute
from deployments.fleet.seen import Target
from deployments.http.access import FewReads, browser_rules
from deployments.watch.observatory.http_app import api, make_app
from deployments.watch.observatory.page_files import FOLDER, read_files
from deployments.watch.observatory.pages import open_pages, pages
from deployments.watch.observatory.parts import COOKIE, LASTS_S, AdminKey, Parts
from deployments.watch.observatory.router_view import RouterView
from deployments.watch.observatory.state import State
from deployments.watch.observatory.trees import Trees
from kvtransfer.pages import PageKey
from replicas.cache.tree_view import CacheTree, LeftOut, NodeView
from routing.terms import CANDIDATE, DECODE_REPLICA
from tests.harness import Clock
from tests.unit.deployments.observed import details, listed, row, seen, view
from tests.waiting import until_async

KEY = "open sesame"
ROOT = "/manta"  # where Serve puts the application
PROTECTED = ["/", "/runbook", "/ui/main.js", "/sd", "/metrics", "/api/state", "/api/history",
             "/api/events", "/api/tree", "/api/requests/x"]  # fmt: skip
OPEN = ["/login", "/ui/style.css"]


def node(tokens: int, *children: NodeView, key: PageKey | None = None, left_out: LeftOut | None = None) -> NodeView:
    below = sum(child.subtree_tokens for child in children) + (left_out.tokens if left_out else 0)
    return NodeView(
        tokens=tokens, subtree_tokens=tokens + below, subtree_nodes=1 + len(children), hits=3, locked=False,
        idle_s=1.25, key=key, children=children, left_out=left_out,
    )  # fmt: skip


class ListedRouters:
    """`Routers` that know one request and one tree."""

    def __init__(self) -> None:
        self.found = FoundRoute()
        self.error: Exception | None = None
        self.asked: list[tuple[str, int, int]] = []

    async def observe(self, since: Any) -> list[RouterView]:
        return []

    async def cache_tree(self, replica_id: str, *, max_depth: int, min_tokens: int) -> CacheTree:
        self.asked.append((replica_id, max_depth, min_tokens))
        if self.error is not None:
            raise self.error
        root = node(0, node(64, key=2**63 + 5, left_out=LeftOut(nodes=2, tokens=32)))
        return CacheTree(page_size=16, tokens=96, nodes=3, shown=1, root=root)

    async def find_request(self, name: str) -> FoundRoute:
        return self.found


class Site:
    """The app and what is behind it."""

    def __init__(self, key: str | None = None) -> None:
        self.clock = Clock()
        self.clock.now_s = 1000.0
        self.state = State()
        self.routers = ListedRouters()
        self.texts = {"a:1000": "# HELP manta_x X.\n# TYPE manta_x gauge\nmanta_x 1.0\n"}
        self.parts = Parts(
            state=self.state,
            routers=self.routers,
            trees=Trees(self.routers, clock=self.clock, calendar=self.clock),
            key=AdminKey(key),
            files=read_files(),
            own_target=lambda: Target(address="own:1", role="observatory", process_id="own", node_id="nn"),
            clock=self.clock,
            fetch=self._fetch,
        )
        self.state.advance([view("one", seen("a"), rows=(row("x"),))], details(listed("a"), unified=1), 1000.0)

    async def _fetch(self, address: str) -> str:
        if address not in self.texts:
            raise ConnectionError(f"{address} is not there")
        return self.texts[address]

    def client(self, parts: Parts | None = None) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=make_app(parts or self.parts), root_path=ROOT)
        return httpx.AsyncClient(transport=transport, base_url=f"http://host{ROOT}")


@pytest.fixture
async def site() -> Site:
    return Site()


@pytest.fixture
async def client(site: Site) -> AsyncIterator[httpx.AsyncClient]:
    async with site.client() as client:
        yield client


async def test_an_answer_has_what_changed_and_is_made_once_and_zipped_where_that_is_accepted(
    site: Site, client: httpx.AsyncClient
) -> None:
    version = site.state.version
    site.state.advance([view("one", seen("a"), rows=(row("y", time=1000.0),))], details(listed("a"), unified=1), 1001.0)
    plain = await client.get(f"/api/state?since={version}", headers={"Accept-Encoding": "identity"})
    assert [each["rid"] for each in plain.json()["requests"]] == ["y"]
    assert (plain.json()["whole"], len(plain.json()["history"]["points"])) == (False, 1)
    zipped = await client.get(f"/api/state?since={version}", headers={"Accept-Encoding": "gzip, br"})
    assert (zipped.headers["content-encoding"], zipped.headers["vary"]) == ("gzip", "Accept-Encoding")
    assert zipped.json() == plain.json()
    made = [site.state.answer(version, zipped=True, now_s=1.0) for _ in range(2)]
    assert made[0] is made[1]
    assert len(made[0]) < len(plain.content) / 2


async def test_history_is_answered_for_five_minutes_by_the_second_and_for_an_hour_in_steps(site: Site) -> None:
    for second in range(1, 1000):
        site.state.advance([view("one", seen("a"))], details(listed("a"), unified=1), 1000.0 + second)
    async with site.client() as client:
        fine = (await client.get("/api/history?span_s=300")).json()
        hour = (await client.get("/api/history")).json()
        assert (await client.get("/api/history?span_s=0")).status_code == 400
    assert (fine["step_s"], len(fine["points"]), fine["points"][-1][0]) == (1, 300, 1999.0)
    assert (hour["step_s"], [point[0] for point in hour["points"][:3]]) == (15, [1000.0, 1015.0, 1030.0])
    kv = 1 + hour["names"].index("kv_max")
    assert {point[kv] for point in hour["points"]} == {0.0}


async def test_discovery_has_an_entry_a_process_with_its_node_and_no_job(client: httpx.AsyncClient) -> None:
    assert (await client.get("/sd")).json() == [
        {"targets": ["a:1000"], "labels": {"node": "here"}},
        {"targets": ["one:1000"], "labels": {"node": "0123456789abcdef"}},
        {"targets": ["own:1"], "labels": {"node": "nn"}},
    ]


async def test_metrics_of_who_answers_come_and_the_silent_are_named(client: httpx.AsyncClient) -> None:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.text == (
        "# HELP manta_x X.\n# TYPE manta_x gauge\nmanta_x 1.0\n"
        "# router one at one:1000 did not answer: ConnectionError\n"
        "# observatory own at own:1 did not answer: ConnectionError\n"
    )


async def test_while_no_router_has_answered_it_is_not_known_who_serves_metrics(site: Site) -> None:
    """Prometheus keeps its targets when asking fails, and drops all that an answer leaves out."""
    fresh = replace(site.parts, state=State())
    async with site.client(fresh) as client:
        silent = await client.get("/sd")
        assert (silent.status_code, silent.headers["retry-after"]) == (503, "1")
        assert "who serves metrics is not known" in silent.json()["error"]["message"]
        assert (await client.get("/metrics")).text == (
            "# observatory own at own:1 did not answer: ConnectionError\n"
            "# no router has answered in the last 30 s: who serves metrics is not known\n"
        )


async def test_discovery_outlasts_routers_that_are_silent_for_less_than_30_s(
    site: Site, client: httpx.AsyncClient
) -> None:
    site.state.advance([], details(listed("a")), 1029.0)
    assert len((await client.get("/sd")).json()) == 3
    site.state.advance([], details(listed("a")), 1031.0)
    assert (await client.get("/sd")).status_code == 503
    site.state.advance([view("one")], details(), 1032.0)  # it has no replica
    assert [each["targets"] for each in (await client.get("/sd")).json()] == [["one:1000"], ["own:1"]]


async def test_a_tree_is_asked_of_a_router_and_its_keys_are_hex(site: Site, client: httpx.AsyncClient) -> None:
    body = (await client.get("/api/tree", params={"replica": "a", "depth": 3, "min_tokens": 32})).json()
    assert site.routers.asked == [("a", 3, 32)]
    [child] = body["root"]["children"]
    assert child["key"] == site.parts.trees.names(2**63 + 5) != "8000000000000005"
    assert child == {
        "tokens": 64, "subtree_tokens": 96, "subtree_nodes": 1, "hits": 3, "protected": False, "idle_s": 1.2,
        "key": child["key"], "children": [], "left_out": {"nodes": 2, "tokens": 32},
    }  # fmt: skip
    assert (body["replica"], body["page_size"], body["tokens"], body["nodes"], body["shown"]) == ("a", 16, 96, 3, 1)


@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        ("replica=b", 404, "there is no replica 'b'; there are: a"),
        ("", 404, "there is no replica ''"),
        ("replica=a&depth=0", 400, "depth: must be a number from 1 to 64, got '0'"),
        ("replica=a&depth=" + "9" * 5000, 400, "depth: must be a number"),
        ("replica=a&min_tokens=" + "0" * 4400, 400, "min_tokens: must be a number from 0"),
        ("replica=a&min_tokens=-1", 400, "min_tokens: must be a number from 0"),
    ],
)
async def test_a_tree_that_cannot_be_had_is_refused_with_the_reason(
    client: httpx.AsyncClient, query: str, status: int, says: str
) -> None:
    answer = await client.get(f"/api/tree?{query}")
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


async def test_a_request_comes_with_row_keys_and_route(site: Site, client: httpx.AsyncClient) -> None:
    keys = [f"{2**63 + 5:016x}"]  # of the page that the tree has
    body = {"time": 1.0, "row": {"rid": "x"}, "page_keys": keys, "route": {"replica": "a"}}
    site.routers.found = FoundRoute(body=body)
    [child] = (await client.get("/api/tree", params={"replica": "a"})).json()["root"]["children"]
    told = {"row": {"rid": "x"}, "page_keys": [child["key"]], "route": {"replica": "a"}}
    assert (await client.get("/api/requests/x")).json() == told


async def test_a_request_that_routers_forgot_is_told_as_far_as_it_is_shown(
    site: Site, client: httpx.AsyncClient
) -> None:
    body = (await client.get("/api/requests/x")).json()
    assert (body["row"]["rid"], body["page_keys"], body["route"]) == ("x", [], None)
    gone = await client.get("/api/requests/other")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")
    site.routers.found = FoundRoute(unanswered="1 of 2 routers did not answer within 2 s (TimeoutError)")
    silent = await client.get("/api/requests/other")
    assert (silent.status_code, silent.json()["error"]["code"]) == (503, "routers_silent")


async def test_without_a_key_everything_is_open(client: httpx.AsyncClient) -> None:
    for path in [*OPEN[1:], *(path for path in PROTECTED if path != "/api/tree")]:
        assert (await client.get(path)).status_code == 200, path
    assert (await client.get("/login")).headers["location"] == "/manta/"


async def test_with_a_key_every_path_but_the_login_asks_for_it() -> None:
    site = Site(KEY)
    served = {route.path.split("{")[0] for part in (pages, open_pages, api) for route in part.routes
              if isinstance(route, APIRoute)}  # fmt: skip
    ends = ("/ui/main.js", "/requests/x")
    known = {path.rpartition("/")[0] + "/" if path.endswith(ends) else path for path in [*PROTECTED, "/login"]}
    assert served == known
    async with site.client() as client:
        for path in PROTECTED:
            refused = await client.get(path)
            assert refused.status_code == 401, path
            assert refused.headers["www-authenticate"].startswith("Bearer")
            assert refused.json()["error"]["type"] == "authentication_error"
            led = await client.get(path, headers={"Accept": "text/html,*/*"})
            assert (led.status_code, led.headers["location"]) == (303, "/manta/login")
        assert [(await client.get(path)).status_code for path in OPEN] == [200, 200]
        wrong = {"Authorization": f"Bearer {KEY}!"}
        assert (await client.get("/sd", headers=wrong)).status_code == 401
        right = {"Authorization": f"Bearer {KEY}"}
        assert (await client.get("/sd", headers=right)).status_code == 200


async def test_shown_page_names_are_of_one_process_so_that_a_guessed_prompt_cannot_be_confirmed() -> None:
    """Security note, item 11: keys were unkeyed hashes of the tokens."""
    assert Site().parts.trees.names(5) != Site().parts.trees.names(5)
    names = Site().parts.trees.names
    assert names(5) == names(5) == names.of_hex(["05"])[0]


async def test_where_the_api_asks_for_keys_an_observatory_without_one_shows_nothing() -> None:
    site = Site()
    async with site.client() as client:
        assert (await client.get("/api/state")).status_code == 200
        site.state.advance([view("one", seen("a"), asks_for_key=True)], details(listed("a"), unified=1), 1001.0)
        refused = await client.get("/api/state")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "admin_key_needed")
        assert "set its admin_key, or MANTA_ADMIN_KEY" in refused.json()["error"]["message"]


async def test_20_wrong_keys_a_minute_are_one_line_in_the_log_and_never_keep_the_right_one_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Security note, item 3: after 20 wrong keys of anybody the right one was answered with 429."""
    site = Site(KEY)
    async with site.client() as client:
        wrong = [(await client.post("/login", data={"key": f"guess {i}"})).status_code for i in range(22)]
        assert wrong == [401] * 20 + [429] * 2
        assert (await client.post("/login", data={"key": KEY})).status_code == 303
        site.clock.now_s += 61.0
        assert (await client.post("/login", data={"key": "guess"})).status_code == 401
    assert [record.message for record in caplog.records] == ["20 logins with a wrong key came within 60 s"]


class HalfLogin:
    """A client that sends a part of the login's body and then waits for the answer."""

    def __init__(self, site: Site) -> None:
        self.status = 0
        self._left = asyncio.Event()
        self._messages = [{"type": "http.request", "body": b"key=op", "more_body": True}]
        headers = [(b"content-length", b"16")]
        scope = {"type": "http", "method": "POST", "path": f"{ROOT}/login", "raw_path": b"", "query_string": b"",
                 "headers": headers, "http_version": "1.1", "scheme": "http", "server": ("manta", 80),
                 "client": ("me", 1), "root_path": ROOT}  # fmt: skip
        self.task = asyncio.create_task(make_app(site.parts)(scope, self._receive, self._send))

    def leave(self) -> None:
        self._left.set()

    async def _receive(self) -> Message:
        if self._messages:
            return self._messages.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.status = message.get("status", self.status)


async def test_beside_150_half_logins_all_is_answered_and_the_right_key_logs_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Security note, item 3: they took all of the 128 calls that Serve lets in, for as long as they liked, and each
    that hung up was a traceback."""
    site = Site(KEY)
    site.parts.logins.timeout_s = 600.0  # none ends for its time, however slow this is
    halves = [HalfLogin(site) for _ in range(150)]
    await until_async(lambda: sum(half.task.done() for half in halves) >= 142)
    async with site.client() as client:
        assert (await client.post("/login", data={"key": KEY})).status_code == 303
        for path in ("/sd", "/metrics"):
            assert (await client.get(path)).status_code == 200
    open_ones = [half for half in halves if not half.task.done()]
    assert len(open_ones) == 7  # the login took the place of the eighth
    for half in open_ones:
        half.leave()
    await asyncio.gather(*(half.task for half in halves))
    assert [half.status for half in halves] == [408] * 143 + [499] * 7
    assert caplog.records == []


async def test_half_a_login_has_5_seconds(site: Site) -> None:
    assert Site(KEY).parts.logins.timeout_s == 5.0
    site = Site(KEY)
    site.parts = replace(site.parts, logins=FewReads(most=8, max_bytes=4096, timeout_s=0.01))
    half = HalfLogin(site)
    await asyncio.wait_for(half.task, 20)
    assert half.status == 408


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {"Host": "127.0.0.1:8000"}, 200),
        ("GET", {"Host": "evil.example"}, 403),
        ("GET", {"Host": "localhost:8000", "Sec-Fetch-Site": "same-origin"}, 200),
        ("POST", {"Host": "localhost:8000", "Origin": "http://evil.example"}, 403),
    ],
)
async def test_without_a_key_on_the_loopback_no_other_sites_page_reaches_it(
    site: Site, method: str, headers: dict[str, str], status: int
) -> None:
    """Security note, item 6: GET /manta/api/state with Host: evil.example was answered."""
    rules = browser_rules(listens_on="127.0.0.1", has_keys=False, allowed_hosts=())
    transport = httpx.ASGITransport(app=make_app(site.parts, browsers=rules), root_path=ROOT)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://host{ROOT}") as client:
        path = "/api/state" if method == "GET" else "/login"
        assert (await client.request(method, path, headers=headers)).status_code == status


async def test_a_login_gives_a_cookie_that_opens_everything_for_a_while_and_does_not_hold_the_key() -> None:
    site = Site(KEY)
    async with site.client() as client:
        refused = await client.post("/login", data={"key": "wrong <b>"})
        assert refused.status_code == 401
        assert "That is not the key: it is the value of MANTA_ADMIN_KEY" in refused.text
        assert refused.text.count('aria-invalid="true"') == refused.text.count('role="alert"') == 1
        assert (await client.post("/login", content=b"key=" + b"x" * 5000)).status_code == 413
        answer = await client.post("/login", data={"key": KEY})
        assert (answer.status_code, answer.headers["location"]) == (303, "/manta/")
        cookie = answer.headers["set-cookie"]
        assert all(part in cookie for part in ("HttpOnly", "SameSite=strict", "Path=/manta/", f"Max-Age={LASTS_S}"))
        assert KEY not in cookie
        assert "Secure" not in cookie  # over plain HTTP it would never come back
        assert (await client.get("/api/state")).status_code == 200
        site.clock.now_s += LASTS_S + 1
        assert (await client.get("/api/state")).status_code == 401


def test_a_cookie_is_good_only_for_the_key_and_the_time_it_was_made_for() -> None:
    key = AdminKey(KEY)
    value = key.login(1000.0)
    assert key.admits({}, {COOKIE: value}, 1000.0)
    expires, mac = value.split(".")
    for other in (f"{int(expires) + 1}.{mac}", f"{expires}.{mac[:-1]}", "", ".", f"{expires}.é", mac):
        assert not key.admits({}, {COOKIE: other}, 1000.0), other
    assert not AdminKey("another key").admits({}, {COOKIE: value}, 1000.0)


async def test_no_answer_with_a_key_holds_it() -> None:
    site = Site(KEY)
    async with site.client() as client:
        for path in ("/login", "/api/state", "/sd", "/metrics"):
            assert KEY not in (await client.get(path, headers={"Authorization": f"Bearer {KEY}"})).text
    assert KEY not in repr(site.parts)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "text/html"), ("/ui/main.js", "text/javascript"), ("/ui/style.css", "text/css"),
     ("/ui/icon.svg", "image/svg+xml")],
)  # fmt: skip
async def test_files_come_with_their_kind_and_are_not_sent_again(
    client: httpx.AsyncClient, path: str, kind: str
) -> None:
    answer = await client.get(path)
    assert answer.headers["content-type"].startswith(kind)
    assert answer.headers["cache-control"] == "no-cache"
    rules = answer.headers["content-security-policy"]
    assert all(rule in rules for rule in ("default-src 'none';", "script-src 'self';", "frame-ancestors 'none'"))
    again = await client.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/ui/none.js", "/ui/../page_files.py", "/ui/%2e%2e/catalog.py", "/ui/"])
async def test_nothing_but_the_known_files_is_served(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code == 404
    assert answer.json()["object"] == "error"


def test_hidden_files_and_other_kinds_are_not_read(tmp_path: Path) -> None:
    for name in ("a.js", "b.py", ".hidden.js", "deep/c.css", ".git/d.js"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("x")
    assert sorted(read_files(tmp_path)) == ["a.js", "deep/c.css"]
    assert read_files(tmp_path / "none") == {}
    assert {"index.html", "login.html", "main.js"} <= read_files(FOLDER).keys()


def test_the_pages_terms_are_the_table_of_routing() -> None:
    lines = read_files(FOLDER)["terms.js"].body.decode().splitlines()
    tables = [json.loads(line.partition(" = ")[2].removesuffix(";")) for line in lines]
    wanted = [[asdict(term) for term in table] for table in (CANDIDATE, DECODE_REPLICA)]
    assert tables == json.loads(json.dumps(wanted))  # a tuple is a list there


async def test_the_path_without_its_slash_leads_to_it(site: Site) -> None:
    transport = httpx.ASGITransport(app=make_app(site.parts), root_path=ROOT)
    async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
        answer = await client.get(ROOT)
        assert (answer.status_code, answer.headers["location"]) == (307, "/manta/")


async def test_without_the_views_files_that_is_said(site: Site) -> None:
    async with site.client(replace(site.parts, files={})) as client:
        for path in ("/", "/runbook"):
            assert "are not installed" in (await client.get(path)).text, path
        assert (await client.get("/api/state")).status_code == 200
