"""The playground over a real API: a router, two replicas of the short model, and the page at the same origin.

The state that the page polls is a fake fleet's, with the replicas and the requests of the real router.
"""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any
from urllib.parse import unquote

import pytest
import uvicorn
from selenium.webdriver.common.keys import Keys
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.access import browser_rules
from deployments.http.http_app import make_app
from deployments.http.routes import own_route
from deployments.http.service import Service
from deployments.replica.served_engine import ServedEngine
from deployments.tenancy.keys import NO_KEYS, KeyDigests, read_keys
from deployments.watch.observatory.page_files import read_files
from replicas.config import CacheConfig
from replicas.engine.engine import Engine
from replicas.engine.loop import EngineLoop
from replicas.launch import EngineSettings, load_engine
from replicas.scheduler.plan import PendingStep, StepPlan
from tests.browser.chromium import Page
from tests.embedded import short_model
from tests.fake_fleet import FakeFleet
from tests.fake_observatory import POLICY
from tests.unit.deployments.in_process import House, changed_rows

pytestmark = [pytest.mark.browser, pytest.mark.model]
KEY = "key-of-one-client"
ROOT = "/manta/"
NAMES = {"Model#one": "replica 1", "Model#two": "replica 2"}
COMPUTES_S = 120  # a short answer, on cores that others use too
BEGUN = 4  # steps after which an answer has begun to show


class Site:
    """The API at /, the page below ROOT."""

    def __init__(self, house: House, service: Service) -> None:
        self.house = house
        self.fleet = FakeFleet(unified=2)
        self.told: list[str] = []  # addresses and bodies that the page sent to the observatory
        self.go_on = threading.Event()  # while it is cleared, the engine stops after BEGUN further steps
        self.go_on.set()
        self._files = read_files()
        self._service = service
        self.serve_api()

    def serve_api(self, keys: KeyDigests = NO_KEYS) -> None:
        async def live_view() -> str:
            return ROOT

        rules = browser_rules(listens_on="127.0.0.1", has_keys=bool(keys.api), allowed_hosts=())
        self._api: ASGIApp = make_app(self._service, keys=keys, browsers=rules, live_view=live_view)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(ROOT):
            request = Request(scope, receive)
            self.told.append(f"{request.url} {(await request.body()).decode()}")
            await self._page(scope["path"].removeprefix(ROOT))(scope, receive, send)
        else:
            await self._api(scope, receive, send)

    def _page(self, path: str) -> Response:
        if path == "api/state":
            return JSONResponse(self._state())
        if found := re.fullmatch(r"api/requests/(.+)", path):
            route = own_route(self.house.dispatcher, found[1])
            rows = [row for row in self._rows() if row["rid"] == found[1]]
            return JSONResponse({"row": rows[-1] if rows else None, "page_keys": [], "route": route})
        if path == "api/tree":
            return JSONResponse(self.fleet.tree(next(iter(self.fleet.roles)), 2))
        if found := re.fullmatch(r"api/replicas/(.+)/kill", path):
            self.kill(unquote(found[1]))
            return JSONResponse({})
        file = self._files.get(path.removeprefix("ui/") if path else "index.html")
        if file is None:
            return JSONResponse({}, 404)
        headers = {"Content-Type": file.content_type, "Content-Security-Policy": POLICY}
        return Response(file.body, headers=headers)

    def _state(self) -> dict[str, Any]:
        whole = self.fleet.answer(0)
        here = self.house.leases.replicas
        ids = zip(whole["replicas"], here, strict=False)
        rows = [row | {"id": replica, "name": NAMES[replica]} for row, replica in ids]
        end = {"role": "unified", "time": whole["time"], "died": True}
        ended = [{"id": replica, "name": name, **end} for replica, name in NAMES.items() if replica not in here]
        return whole | {"replicas": rows, "ended": ended, "requests": self._rows()}

    def _rows(self) -> list[dict[str, Any]]:
        return list(changed_rows(self.house.dispatcher, 0)[0])

    def hold(self, engine: Engine) -> None:
        """Have ``engine`` mind `go_on`."""
        launch, steps = engine.steps.launch, count()

        def launch_later(plan: StepPlan) -> PendingStep:  # engine thread
            if not self.go_on.is_set() and next(steps) >= BEGUN:
                self.go_on.wait(COMPUTES_S)
            return launch(plan)

        engine.steps.launch = launch_later

    def kill(self, replica_id: str) -> None:
        """End a replica's connections, as its death would."""
        served = self.house.leases.replicas[replica_id]
        assert isinstance(served, ServedEngine)
        self.house.remove(replica_id)
        for connection in list(served._clients.values()):
            connection.close()
        self.go_on.set()


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[str, Site]]:
    """Where the page is, on an event loop of its own thread."""
    loop = EngineLoop(
        load_engine(
            EngineSettings(
                model=short_model(), cache=CacheConfig(max_total_tokens=4000), num_threads=2, record_events=True
            )
        )
    )
    loop.start()
    made: list[Site] = []
    ready, events = threading.Event(), asyncio.new_event_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    stop = asyncio.Event()

    async def serve() -> None:
        house = House(policy="estimated_ttft", report_period_s=0.1)
        await house.start()
        await house.ready(*(ServedEngine(loop, replica_id=f"Model#{name}", node_id="here") for name in ("one", "two")))
        made.append(Site(house, house.service(loop.engine.tokenizer)))
        made[0].hold(loop.engine)
        server = uvicorn.Server(uvicorn.Config(made[0], lifespan="off", log_level="warning"))
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        ready.set()
        await stop.wait()
        server.should_exit = True
        await serving
        await house.stop()

    thread = threading.Thread(target=lambda: events.run_until_complete(serve()))
    thread.start()
    assert ready.wait(60)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", made[0]
    events.call_soon_threadsafe(stop.set)
    thread.join(20)
    loop.stop()


def ask(page: Page, text: str, *, tokens: int = 4) -> None:
    """Type a prompt and send it by Enter, at temperature 0: a drawn answer may end before its replica is killed."""
    page.one(".play-settings summary").click()
    for field, value in zip(page.all(".play-settings input"), (tokens, 0), strict=True):
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(str(value))
    page.one(".play-settings summary").click()
    page.one("#play-text").send_keys(text + Keys.ENTER)


def answered(page: Page, count: int) -> None:
    page.until(lambda: len(page.all(".answer.done")) == count, f"{count} answers", patience_s=COMPUTES_S)
    assert page.one("#tab-try").get_attribute("aria-selected") == "true"  # no answer leads away from the playground


def press(page: Page, words: str, *, at: int = 0) -> str:
    """Click the button of a turn that begins with ``words``, of several number ``at``. Returns: all its words."""
    script = """const found = [...document.querySelectorAll(".turn .play-row button")].filter(
        (each) => each.innerText.startsWith(arguments[0]))[arguments[1]];
        const said = found?.innerText; found?.click(); return said;"""
    return str(page.until(lambda: page.js(script, words, at), f"a button {words}"))


def kinds(page: Page) -> list[str]:
    """Of the pages of the last prompt, in their order."""
    script = """const strip = [...document.querySelectorAll(".strip")].at(-1);
        return [...strip.children].map((each) => each.className.split(" ")[1]);"""
    return list(page.js(script))


def test_a_prompt_is_followed_from_typing_to_the_pages_that_were_reused(page: Page, site: tuple[str, Site]) -> None:
    url, behind = site
    page.open(f"{url}/")  # a browser is led to the page
    assert page.driver.current_url.startswith(f"{url}{ROOT}")
    page.one(".play-welcome button").click()
    page.says(".ghost", "0 of 325 tokens cached")
    assert len(page.all(".ghost li")) == 2
    ask(page, "")
    answered(page, 1)
    page.says(".turn-figures summary", "0 of 325 tokens cached")
    assert kinds(page) == ["computed"] * 21
    page.says(".turn", "21 pages of 16 tokens: 325 tokens computed")
    page.one(".prompt-text summary").click()
    painted = page.js("return document.querySelector('.painted').textContent")
    assert painted.startswith("<|im_start|>system\nYou answer questions about this text")
    assert painted.endswith("<|im_start|>user\nHow do mantas feed?<|im_end|>\n<|im_start|>assistant\n")
    press(page, "Same again")
    answered(page, 2)
    page.says(".turn:last-child .turn-figures summary", "320 of 325 tokens cached")
    assert kinds(page) == ["device"] * 20 + ["computed"]
    page.says(".turn:last-child .play-legend", "saved by the cache")
    page.says(".turn:last-child .play-legend", "predicted")
    page.one("#play-text").send_keys("And how do they breed?")
    page.says(".ghost", "320 of")
    assert page.axe() == []
    secret = [each for each in behind.told if "mantas" in each.lower() or "breed" in each]
    assert secret == []  # no prompt reaches the observatory
    assert "mantas" not in page.driver.current_url.lower()


def test_a_prompt_that_would_be_refused_is_told_once_and_is_not_sent(page: Page, site: tuple[str, Site]) -> None:
    page.open(f"{site[0]}{ROOT}")
    script = "const it = arguments[0]; it.value = arguments[1]; it.dispatchEvent(new Event('input', {bubbles: true}))"
    page.js(script, page.one("#play-text"), "one two three " * 4000)
    page.until(lambda: page.all(".play .note.warn") != [], "the reason")
    page.one("#play-text").send_keys(Keys.ENTER)
    assert not page.one(".play-send").is_enabled()
    assert (page.all(".turn"), page.all(".play .notice")) == ([], [])
    assert [each for each in page.complaints() if "400" not in each] == []


def test_a_prompt_that_is_refused_for_the_length_of_its_answer_can_be_sent_once_that_is_less(
    page: Page, site: tuple[str, Site]
) -> None:
    page.open(f"{site[0]}{ROOT}")
    page.one("#play-text").send_keys("Name a colour.")
    page.one(".play-settings summary").click()
    longest = page.all(".play-settings input")[0]
    longest.send_keys(Keys.CONTROL, "a")
    longest.send_keys("-1")
    page.until(lambda: page.all(".play .note.warn") != [], "the reason")
    assert not page.one(".play-send").is_enabled()
    longest.send_keys(Keys.CONTROL, "a")
    longest.send_keys("4")
    page.says(".ghost", "Would go to")
    assert page.one(".play-send").is_enabled()
    assert [each for each in page.complaints() if "400" not in each] == []


def test_a_turn_that_is_forked_goes_on_from_there(page: Page, site: tuple[str, Site]) -> None:
    page.open(f"{site[0]}{ROOT}")
    ask(page, "Name a colour.")
    answered(page, 1)
    ask(page, "Name another.")
    answered(page, 2)
    rid = page.js("return new URLSearchParams(location.hash.slice(1)).get('request')")
    assert rid.startswith("try-")  # the request is chosen on the page
    press(page, "Edit and fork", at=1)
    page.until(lambda: len(page.all(".turn")) == 1, "one turn")
    assert page.one("#play-text").get_attribute("value") == "Name another."


def test_the_replica_that_answers_is_killed_and_the_answer_goes_on(page: Page, site: tuple[str, Site]) -> None:
    """However long it takes to press the buttons, the answer has begun and has not ended then."""
    url, behind = site
    page.open(f"{url}{ROOT}")
    behind.go_on.clear()
    try:
        ask(page, "Count from one to one hundred in words.", tokens=16)
        page.one(".answer.streaming")
        lost = " ".join(press(page, "Kill").split()[1:3])  # replica 1
        press(page, "Kill")
        answered(page, 1)
    finally:
        behind.go_on.set()
    other, left = {"replica 1": ("replica 2", "two"), "replica 2": ("replica 1", "one")}[lost]
    page.says(".turn .jump", f"{lost} was lost, {other} goes on")
    page.says(".turn", f"Answered by {other}, after {lost} was lost")
    assert not page.text(".answer").endswith("goes on")
    assert list(behind.house.leases.replicas) == [f"Model#{left}"]


def test_where_the_api_asks_for_a_key_the_page_does_too_and_keeps_it_for_the_tab(
    page: Page, site: tuple[str, Site]
) -> None:
    url, behind = site
    environ = {"MANTA_API_KEYS": KEY, "MANTA_ADMIN_KEY": "key-of-the-admin"}
    behind.serve_api(read_keys(api_key_file=None, admin_key=None, environ=environ))
    try:
        page.open(f"{url}/")  # leads to the page without a key
        ask(page, "Name a colour.")
        page.says(".play-key", "The API asks for a key")
        assert page.one("#play-text").get_attribute("value") == "Name a colour."
        page.one("#play-key").send_keys(KEY + Keys.ENTER)
        page.says(".play", "shown to the admin key only")
        page.one("#play-text").send_keys(Keys.ENTER)
        answered(page, 1)
        assert json.loads(page.js("return JSON.stringify(sessionStorage)")) == {"manta-api-key": KEY}
        refused = [each for each in page.complaints() if "401" not in each]
        assert refused == []
    finally:
        behind.serve_api()
        page.js("sessionStorage.clear()")
