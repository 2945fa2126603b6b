"""What a web page can make a browser send to a Manta without keys, and what programs send, which goes on working."""

import asyncio
import functools
import json
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from deployments.http.access import browser_rules
from deployments.http.http_app import make_app
from deployments.http.service import Service
from tests.unit.deployments import listening

pytestmark = pytest.mark.model
HERE = "127.0.0.1:8000"
EVIL = {"Origin": "http://evil.example"}
TEXT = {"Content-Type": "text/plain;charset=UTF-8"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
JSON = {"Content-Type": "application/json"}
client_of = functools.partial(listening.client_of, base_url=f"http://{HERE}")
BODY = json.dumps({"prompt": "a", "max_tokens": 1})


def app(service: Service, *, listens_on: str = "127.0.0.1", hosts: tuple[str, ...] = (), origins: Any = ()) -> Any:
    rules = browser_rules(listens_on=listens_on, has_keys=False, allowed_hosts=hosts, origins=origins)
    return make_app(service, browsers=rules, cors_origins=origins)


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app(service)) as client:
        yield client


async def test_a_name_that_was_rebound_to_the_loopback_is_refused_on_every_route(http: httpx.AsyncClient) -> None:
    """Security note, item 6: /get_server_info with Host: evil.example was answered."""
    asks = (("GET", "/get_server_info"), ("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/no/such/route"))
    for host in ("evil.example:80", "localhost.evil.example", "10.0.0.5", "[::2]"):
        for method, path in asks:
            refused = await http.request(method, path, headers={"Host": host, **JSON}, content=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed"), path
            assert refused.json()["error"]["type"] == "permission_error"
        assert (await http.get("/health", headers={"Host": host})).status_code == 200  # a balancer's probe


async def test_names_of_the_loopback_are_answered_and_http_1_0_without_any(http: httpx.AsyncClient) -> None:
    for host in ("127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "127.8.9.1", ""):
        assert (await http.get("/v1/models", headers={"Host": host})).status_code == 200, host


async def test_more_hosts_are_a_setting_and_what_is_served_to_other_machines_has_any_name(service: Service) -> None:
    for listens_on, hosts in (("127.0.0.1", ("gpu-box",)), ("127.0.0.1", ("*",)), ("0.0.0.0", ())):
        async with client_of(app(service, listens_on=listens_on, hosts=hosts)) as http:
            assert (await http.get("/v1/models", headers={"Host": "GPU-box:8000"})).status_code == 200
    assert browser_rules(listens_on="127.0.0.1", has_keys=True, allowed_hosts=()) is None


POSTS: list[tuple[dict[str, str], int]] = [
    ({**TEXT, **EVIL}, 403),  # fetch(..., {method: "POST", mode: "no-cors", body: ...})
    ({**JSON, **EVIL}, 403),  # after a preflight that was refused nobody sends it; if so, no
    ({**JSON, "Origin": "null"}, 403),  # a sandboxed frame
    ({**JSON, "Origin": "http://127.0.0.1:3000"}, 403),  # another port is another site
    ({**TEXT, "Sec-Fetch-Site": "cross-site"}, 403),
    ({**JSON, "Sec-Fetch-Site": "same-site"}, 403),
    (TEXT, 415),  # a form of an old browser, which sends neither
    ({**FORM, "Origin": f"http://{HERE}"}, 415),  # a page of our own has no such form
    ({**FORM, "Sec-Fetch-Site": "none"}, 415),
    ({**JSON, "Origin": f"http://{HERE}", "Sec-Fetch-Site": "same-origin"}, 200),
    (JSON, 200),
    ({"Content-Type": "application/json; charset=utf-8"}, 200),
    (FORM, 200),  # curl -d
    ({}, 200),  # requests.post(url, data=json.dumps(...))
]


async def test_a_post_of_another_sites_page_or_of_no_json_is_refused_and_a_programs_is_not(
    http: httpx.AsyncClient,
) -> None:
    for headers, status in POSTS:
        for path, content in (("/v1/completions", BODY), ("/abort_request", '{"rid": "nobody"}')):
            answer = await http.post(path, content=content, headers=headers)
            assert answer.status_code == status, (headers, path, answer.text)


async def test_a_picture_cannot_flush_the_cache_and_curl_can(http: httpx.AsyncClient) -> None:
    pages: tuple[dict[str, str], ...] = (
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, {"Sec-Fetch-Site": "none"}, EVIL,
        {"Referer": "http://evil.example/"},
    )  # fmt: skip
    for headers in pages:
        refused = await http.get("/flush_cache", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "from_a_browser"), headers
    assert (await http.post("/flush_cache", headers=EVIL)).status_code == 403
    assert (await http.get("/flush_cache?timeout=5")).status_code == 200
    assert (await http.post("/flush_cache?timeout=5")).status_code == 200  # SGLang's bench_serving


async def test_curl_works_as_documented_with_and_without_a_content_type(service: Service) -> None:
    async with listening.listening(app(service)) as port:
        url = f"http://127.0.0.1:{port}"
        for arguments in (
            [f"{url}/v1/completions", "-d", BODY],
            [f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d", BODY],
            [f"{url}/abort_request", "-d", '{"rid": "nobody"}'],
            ["-X", "POST", f"{url}/flush_cache?timeout=5"],
            [f"{url}/flush_cache?timeout=5"],
            ["-0", f"{url}/v1/models"],
            [f"http://localhost:{port}/v1/models"],
        ):
            command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", *arguments]
            said = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
            assert (said.stdout, said.stderr, said.returncode) == ("200", "", 0), arguments


async def test_cors_is_off_and_a_setting_lets_the_pages_of_a_site_call_and_read(service: Service) -> None:
    page = "http://localhost:3000"
    ask = {"Origin": page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with client_of(app(service)) as http:
        preflight = await http.options("/v1/completions", headers=ask)
        assert [name for name in preflight.headers if name.startswith("access-control")] == []
        assert (await http.post("/v1/completions", content=BODY, headers={**JSON, "Origin": page})).status_code == 403
    async with client_of(app(service, origins=[page])) as http:
        preflight = await http.options("/v1/completions", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == page
        assert preflight.headers["access-control-allow-headers"] == "authorization"
        answer = await http.post("/v1/completions", content=BODY, headers={**JSON, "Origin": page})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page)
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        other = await http.post("/v1/completions", content=BODY, headers={**JSON, **EVIL})
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (403, False)
    async with client_of(app(service, origins=["*"])) as http:
        answer = await http.post("/v1/completions", content=BODY, headers={**JSON, **EVIL})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


async def test_a_page_that_may_call_reads_why_its_key_is_wrong(service: Service) -> None:
    """A preflight carries no key, and an answer without CORS headers is only "failed to fetch" to a page."""
    from tests.unit.deployments.test_http_keys import KEYS

    page = "http://localhost:3000"
    async with client_of(make_app(service, keys=KEYS, cors_origins=[page])) as http:
        ask = {"Origin": page, "Access-Control-Request-Method": "GET"}
        assert (await http.options("/v1/models", headers=ask)).status_code == 200
        refused = await http.get("/v1/models", headers={"Origin": page, "Authorization": "Bearer wrong"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page)
