"""API keys and the admin key: what asks for which, what a key may do, and that nothing shows one. On the real model."""

import asyncio
import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from deployments import app
from deployments.http.access import KeyCheck
from deployments.http.http_app import make_app
from deployments.http.http_errors import MESSAGES, OLLAMA
from deployments.http.service import Service
from deployments.output import examined
from deployments.output.examined import ExaminedGrammars
from deployments.record.rids import client_rid, owner_of
from deployments.settings.schema import parse
from deployments.tenancy.keys import NO_KEYS, CacheIsolation, KeyDigests, read_keys
from replicas.engine.loop import EngineLoop
from replicas.errors import InvalidConfig
from replicas.grammar.checking import Examined
from tests.embedded import MODEL
from tests.unit.deployments import listening
from tests.unit.deployments.in_process import House
from tests.waiting import until_async

pytestmark = pytest.mark.model
ONE, OTHER, ADMIN = "key-of-one-client", "key-of-another", "key-of-the-admin"
ENVIRON = {"MANTA_API_KEYS": f"{ONE}, {OTHER}\n", "MANTA_ADMIN_KEY": ADMIN}
KEYS = read_keys(api_key_file=None, admin_key=None, environ=ENVIRON)
ONLY_ADMIN = read_keys(api_key_file=None, admin_key=ADMIN, environ={})
OF_THE_ADMIN = ["/get_server_info", "/server_info", "/metrics", "/prometheus/metrics", "/route/x", "/flush_cache"]
LONG = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def client_of(service: Service, keys: KeyDigests) -> httpx.AsyncClient:
    return listening.client_of(make_app(service, keys=keys))


@pytest.fixture
def http(service: Service) -> httpx.AsyncClient:
    return client_of(service, KEYS)


def paths(service: Service) -> list[tuple[str, str]]:
    """(method, path) of every route, and of one that there is not."""
    routes = make_app(service).openapi()["paths"]
    named = {path: path.replace("{rid}", "x").replace("{name}", "x") for path in routes}
    found = [(method.upper(), name) for path, name in named.items() for method in routes[path]]
    assert ("GET", "/route/x") in found
    return [*found, ("GET", "/openapi.json"), ("GET", "/no/such/route"), ("POST", "/health/x"), ("GET", "/x/health")]


async def test_everything_but_health_asks_for_an_api_key_routes_that_do_not_exist_too(
    http: httpx.AsyncClient, service: Service
) -> None:
    open_ones = set()
    for method, path in paths(service):
        answer = await http.request(method, path)
        if answer.status_code != 401:
            open_ones.add(path)
            continue
        if method != "HEAD":
            error = answer.json()["error"]
            if path in OLLAMA:
                assert "API key" in error, path
            elif path in MESSAGES:
                assert error["type"] == "authentication_error", path
            else:
                assert error["code"] == "invalid_api_key", path
        assert answer.headers["www-authenticate"] == 'Bearer realm="manta"'
    assert open_ones == {"/", "/health", "/ready", "/ping"}


async def test_either_header_carries_a_key_and_any_of_them_is_right(http: httpx.AsyncClient) -> None:
    for headers in (bearer(ONE), bearer(OTHER), {"x-api-key": ONE}, bearer(ADMIN), {**bearer("x"), "x-api-key": ONE}):
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
    wrong: tuple[dict[str, str], ...] = (
        bearer(ONE[:-1]), bearer(ONE + "x"), bearer(""), {"Authorization": ONE}, {"Authorization": f"Basic {ONE}"},
        {"x-api-key": f"Bearer {ONE}"}, {"api-key": ONE}, bearer(hashlib.sha256(ONE.encode()).hexdigest()),
    )  # fmt: skip
    for headers in wrong:
        refused = await http.get("/v1/models", headers=headers)
        assert refused.status_code == 401, headers
        assert ONE not in refused.text


@pytest.mark.parametrize(("keys", "client"), [(KEYS, ONE), (ONLY_ADMIN, "")])
async def test_as_soon_as_any_key_exists_what_is_everybodys_asks_for_the_admins(
    service: Service, keys: KeyDigests, client: str
) -> None:
    async with client_of(service, keys) as http:
        asks = [("GET", path, None) for path in OF_THE_ADMIN]
        asks += [("POST", "/flush_cache", None), ("POST", "/route/explain", {"prompt": "x"})]
        asks += [("POST", "/abort_request", {"abort_all": True})]
        asks += [("POST", f"/{do}_memory_occupation", {"tags": ["kv_cache"]}) for do in ("release", "resume")]
        for method, path, body in asks:
            refused = await http.request(method, path, json=body, headers=bearer(client) if client else {})
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "admin_key_needed"), path
            right = await http.request(method, path, json=body, headers=bearer(ADMIN))
            assert right.status_code == (404 if path == "/route/x" else 200), path
        assert (await http.get("/v1/models", headers=bearer(client) if client else {})).status_code == 200


async def test_api_keys_without_an_admin_key_leave_the_admins_routes_to_nobody(service: Service) -> None:
    keys = read_keys(api_key_file=None, admin_key=None, environ={"MANTA_API_KEYS": ONE})
    assert (keys.guard, NO_KEYS.guard, ONLY_ADMIN.guard) == (b"", None, hashlib.sha256(ADMIN.encode()).digest())
    async with client_of(service, keys) as http:
        refused = await http.get("/metrics", headers=bearer(ONE))
        assert refused.status_code == 401
        assert "router.admin_key, or MANTA_ADMIN_KEY" in refused.json()["error"]["message"]


async def test_a_request_is_aborted_only_with_the_key_that_opened_it(
    http: httpx.AsyncClient, engine_loop: EngineLoop, house: House
) -> None:
    async def aborted(key: str, name: str = "same-name") -> int:
        answer = await http.post("/abort_request", json={"rid": name}, headers=bearer(key))
        return int(answer.json()["num_aborted"])

    def opened(key: str) -> asyncio.Task[httpx.Response]:
        headers = {**bearer(key), "X-Request-Id": "same-name"}
        return asyncio.create_task(http.post("/v1/completions", json=LONG, headers=headers))

    pending = [opened(ONE), opened(OTHER)]
    await until_async(lambda: engine_loop.num_open == 2)
    rids = [record.rid for record in house.dispatcher.routes.recent()]
    assert {client_rid(rid) for rid in rids} == {"same-name"}
    assert len({owner_of(rid) for rid in rids} - {""}) == 2
    for guess in ("*", "same", ".*", *rids, *(rid.partition("-")[0] for rid in rids)):
        assert await aborted(ONE, guess) == 0
    assert await aborted(ONE) == 1
    assert (await pending[0]).json()["choices"][0]["finish_reason"] == "abort"
    async with asyncio.timeout(30):  # its lease ends a moment later
        while await aborted(ONE):
            await asyncio.sleep(0.01)
    assert not pending[1].done()
    assert await aborted(ADMIN) == 1
    await pending[1]


@pytest.mark.parametrize(
    ("isolation", "cached"), [("key", [0, 0, 0, 96]), ("tenant", [0, 96, 0, 96]), ("none", [0, 96, 96, 96])]
)
async def test_keys_and_tenants_share_no_cached_prefix_unless_they_are_told_to(
    tmp_path: Path, service: Service, isolation: CacheIsolation, cached: list[int]
) -> None:
    """Security note, item 11: whoever sent a prompt learnt how much of it another client's had left in the cache. Six
    pages of 16 tokens, of 100; the salt that all give is the same."""
    service.__dict__["isolation"] = isolation
    held = {ONE: "team", OTHER: "team", "key-of-a-stranger": "strangers"}
    file = tmp_path / "keys.json"
    entries = [
        {"id": f"{tenant}-{number}", "sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant}
        for number, (key, tenant) in enumerate(held.items())
    ]
    file.write_text(json.dumps(entries))
    keys = read_keys(api_key_file=None, admin_key=ADMIN, keys_file=str(file), environ={})
    found = []
    async with client_of(service, keys) as http:
        assert (await http.post("/flush_cache?timeout=5", headers=bearer(ADMIN))).status_code == 200
        for key in (*held, ONE):
            body = {"prompt": list(range(1000, 1100)), "max_tokens": 1, "cache_salt": "ours"}
            answer = await http.post("/v1/completions", json=body, headers=bearer(key))
            found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found == cached


def masked(text: str) -> str:
    """``text`` without what differs between any two answers: ids and times."""
    return re.sub(r'[0-9a-f]{8,}|"created":[0-9]+', "*", text)


async def test_what_a_key_may_read_is_the_same_whatever_another_has_cached(
    service: Service, engine_loop: EngineLoop
) -> None:
    """Usage, headers and every route that a key may read, after another key has sent the same prompt or a different one
    of that length; the admin sees in what order the router chose, and there is no other's hit in it either. The first
    round makes the prompts known, so that both after it find what the spying key itself sent before the flush."""
    seen = []
    async with client_of(service, KEYS) as http:
        gets = sorted({path for method, path in paths(service) if method == "GET"} - {"/openapi.json"})
        for first in (list(range(1000, 1100)), list(range(1000, 1100)), list(range(3000, 3100))):
            assert (await http.post("/flush_cache?timeout=5", headers=bearer(ADMIN))).status_code == 200
            said = []
            for key, prompt in ((ONE, first), (OTHER, list(range(1000, 1100)))):
                body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": "ours", "logprobs": 1}
                said.append(await http.post("/v1/completions", json=body, headers=bearer(key)))
            spied = said[1]
            assert spied.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            reads = [await http.get(path, headers=bearer(OTHER)) for path in gets]
            explained = await http.get(f"/route/{spied.headers['x-request-id']}", headers=bearer(ADMIN))
            tries = explained.json()["tries"]
            assert [each["actual"]["cached_tokens"] for each in tries] == [0]
            headers = {name: value for name, value in spied.headers.items() if name not in ("x-request-id", "date")}
            told = [spied.text, json.dumps(headers), *(f"{each.url} {each.status_code} {each.text}" for each in reads)]
            seen.append([masked(each) for each in told])
    _, same, different = seen
    assert len(same) > 20
    assert same == different


async def test_no_answer_log_line_or_record_holds_a_key(
    http: httpx.AsyncClient, house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = {"prompt": "The capital of France is", "max_tokens": 2}
    answers = [
        await http.post("/v1/completions", json=body, headers={**bearer(ONE), "X-Request-Id": "shown"}),
        await http.post("/v1/completions", json={"prompt": {}}, headers=bearer(ONE)),
        await http.get("/route/shown", headers=bearer(ADMIN)),
        await http.get("/get_server_info", headers=bearer(ADMIN)),
        await http.get("/v1/models", headers=bearer("wrong-" + ONE)),
    ]
    assert [answer.status_code for answer in answers] == [200, 400, 200, 200, 401]
    told = [answer.text + str(answer.headers) for answer in answers] + [caplog.text, repr(KEYS)]
    told += [repr(record) for record in house.dispatcher.routes.recent()]
    digests = [hashlib.sha256(key.encode()) for key in (ONE, OTHER, ADMIN)]
    secret = [ONE, OTHER, ADMIN, *(each.hexdigest() for each in digests), *(repr(each.digest()) for each in digests)]
    assert [each for each in secret for text in told if each in text] == []


def test_keys_come_from_a_file_and_the_environment_and_what_is_wrong_never_repeats_one(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# two clients\n{ONE}\n\n  {OTHER}  \n")
    keys = read_keys(api_key_file=str(file), admin_key=f" {ADMIN}\n", environ={"MANTA_API_KEYS": "a-third-key"})
    assert len(keys.api) == 3
    callers = [keys.caller(Headers(bearer(key))) for key in (ONE, OTHER, "a-third-key", "# two clients")]
    assert [caller is not None for caller in callers] == [True, True, True, False]
    names = {each.name for each in keys.api}
    assert len(names) == 3
    assert {each.name for each in KEYS.api} <= names  # the same at every router, and after a restart
    wrong = [
        (str(tmp_path / "none"), None, {}, "cannot be read"),
        (str(file), None, {"MANTA_API_KEYS": "seven77"}, "MANTA_API_KEYS has a key of 7 characters: .* at least 8"),
        (str(file), ONE, {}, "router.admin_key: is also an API key"),
        (None, "short", {}, "router.admin_key, or MANTA_ADMIN_KEY, has a key of 5 characters"),
    ]
    at_least = read_keys(api_key_file=None, admin_key="a" * 20, environ={"MANTA_API_KEYS": "eight888"})
    assert at_least.short == ("MANTA_API_KEYS",)
    for path, admin, environ, says in wrong:
        with pytest.raises(InvalidConfig, match=says) as error:
            read_keys(api_key_file=path, admin_key=admin, environ=environ)
        assert not [each for each in (ONE, "seven77", "short") if each in str(error.value)]
    file.write_text("# nobody yet\n")
    with pytest.raises(InvalidConfig, match="holds no key"):
        read_keys(api_key_file=str(file), admin_key=None, environ={})


def test_settings_never_show_the_admin_key_nor_do_their_errors() -> None:
    args = {"model": {"path": MODEL}, "router": {"admin_key": ADMIN}}
    config = parse(args)
    assert ADMIN not in repr(config)
    assert {"admin_key", "api_key_file"} & config.router.shown().keys() == set()
    for router in ({"admin_key": ADMIN, "policy": "x"}, {"admin_key": [ADMIN]}):
        with pytest.raises(InvalidConfig) as error:
            parse({**args, "router": router})
        assert ADMIN not in str(error.value)


def test_replicas_get_a_digest_and_no_setting_that_names_a_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new API key restarts routers alone: what model replicas are bound to stays the same."""
    monkeypatch.setattr(app, "shortages", lambda *_: [])
    monkeypatch.setattr(app, "too_wide", lambda *_: [])
    monkeypatch.setattr(app.serve_details, "capacity_of_cluster", lambda: None)  # there is no cluster

    def bound(api_keys: str) -> tuple[Any, Any]:
        monkeypatch.setenv("MANTA_API_KEYS", api_keys)
        monkeypatch.setenv("MANTA_ADMIN_KEY", ADMIN)
        router = app.build({"model": {"path": MODEL}, "router": {"admin_key": ADMIN}, "replicas": {"count": 1}})
        deployment = router._bound_deployment
        [replica] = [each for each in deployment.init_args if not isinstance(each, dict)]
        return replica._bound_deployment.init_args, (deployment.init_args[0], deployment.init_kwargs)

    one, _ = bound(ONE)
    two, (settings, kwargs) = bound(f"{ONE} {OTHER}")
    left = {"model": {"path": MODEL}, "router": {}, "replicas": {"count": 1}}
    assert one == two == (left, "unified", ONLY_ADMIN.guard)
    assert settings == one[0]
    assert len(kwargs["keys"].api) == 2
    assert ADMIN not in json.dumps(settings) + repr(kwargs) + caplog.text
    assert "no admin key" not in caplog.text
    short = "MANTA_API_KEYS has a key of fewer than 20 characters, which can be guessed: `manta key new`"
    assert short in caplog.text
    caplog.clear()
    bound("k" * 20)
    assert short not in caplog.text
    monkeypatch.delenv("MANTA_ADMIN_KEY")
    app.build({"model": {"path": MODEL}, "replicas": {"count": 1}})
    assert "API keys and no admin key (MANTA_ADMIN_KEY): routes of the admin and metrics refuse all" in caplog.text


FORM = {"type": "json_schema", "name": "x", "schema": {"enum": [1]}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
HI = [{"role": "user", "content": "x"}]
HELD: dict[str, dict[str, Any]] = {  # by route: a body whose output is held to a form
    "/v1/chat/completions": {"messages": HI, "tools": TOOLS, "tool_choice": "required"},
    "/v1/completions": {"prompt": "x", "json_schema": FORM["schema"]},
    "/v1/responses": {"input": "x", "text": {"format": FORM}},
    "/v1/messages": {"messages": HI, "max_tokens": 1, "output_config": {"format": FORM}},
    "/generate": {"text": "x", "sampling_params": {"json_schema": FORM["schema"]}},
}


@pytest.mark.parametrize("path", HELD)
async def test_a_form_is_examined_in_the_line_of_its_key_until_the_client_hangs_up(
    service: Service, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    asked, statuses = asyncio.Event(), list[int]()
    callers: list[str] = []
    received = iter([{"type": "http.request", "body": json.dumps(HELD[path]).encode(), "more_body": False}])

    async def of(_: ExaminedGrammars, kind: str, text: str, caller: str = "") -> Examined:
        callers.append(caller)
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def receive() -> dict[str, Any]:
        for message in received:
            return message
        await asked.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    monkeypatch.setattr(ExaminedGrammars, "of", of)
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers":
             [(b"authorization", f"Bearer {OTHER}".encode())]}  # fmt: skip
    async with asyncio.timeout(60):
        await make_app(service, keys=KEYS)(scope, receive, send)
    assert statuses == [499]
    assert callers == [next(key.name for key in KEYS.api if key.digest == hashlib.sha256(OTHER.encode()).digest())]


async def test_a_key_with_too_many_forms_is_told_when_to_come_again(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examined, "MAX_OF_CALLER", 0)
    body = {"prompt": "x", "max_tokens": 1, "regex": "a+"}
    answer = await http.post("/v1/completions", json=body, headers=bearer(ONE))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")


async def test_a_key_that_sends_many_requests_at_once_does_not_delay_the_first_of_another_key() -> None:
    """Class 74: 3,000 new streams of one key delayed another's answers by 16 s. A probe waits for nobody."""
    begun: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["state"]["caller"].name or scope["path"])

    check = KeyCheck(app, keys=KEYS)

    def send(key: str, path: str = "/v1/completions") -> asyncio.Task[None]:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        return asyncio.create_task(check(scope, None, None))  # type: ignore[arg-type]

    flood = [send(ONE) for _ in range(300)]
    await asyncio.sleep(0)  # each waits for its turn
    flood[7].cancel()
    others = [send(OTHER), send(OTHER), send("nobody", "/health")]
    await asyncio.gather(*flood, *others, return_exceptions=True)
    one, other = (KEYS.caller(Headers(bearer(key))) for key in (ONE, OTHER))
    assert one is not None
    assert other is not None
    assert (begun.count(one.name), begun.count(other.name), begun.count("/health")) == (299, 2, 1)
    assert max(index for index, name in enumerate(begun) if name != one.name) <= 8
