"""Two routers side by side on a real local Ray, over replicas with short queues: they agree, and nothing gets lost."""

import asyncio
import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from deployments.client import ServerEvent, events
from tests.joined_stream import equal
from tests.serve.keyed.conftest import API_KEY, MOST, QUEUED, RUNNING, SHOWN, TENANT_KEY, routers
from tests.serve.running import HTTP, Running
from tests.unit.deployments.test_failover import CHAT, COMPLETIONS, DOCUMENT, TOOLS
from tests.unit.deployments.test_resumed_streams import answer_of, numbers

pytestmark = [pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]
TOPICS = ["pages", "trees", "harbours", "winters", "engines", "letters"]
BURST = 48


def prompt(topic: str, question: str = "") -> str:
    return f"A long story about {topic}, told slowly. " * 20 + question


def ask(app: Running, text: str, *, name: str = "", max_tokens: int = 8) -> httpx.Response:
    body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = SHOWN | ({"X-Request-Id": name} if name else {})
    return HTTP.post(f"{app.url}/v1/completions", json=body, headers=headers, timeout=120)


def explained(app: Running, text: str) -> dict[str, dict[str, int]]:
    """By router: how many of the prompt's tokens it believes each replica to hold."""
    found: dict[str, dict[str, int]] = {}

    def both() -> bool:
        dry = HTTP.post(f"{app.url}/route/explain", json={"prompt": text}, headers=SHOWN, timeout=30).json()
        found[dry["router"]] = {each["replica"]: each["cached_tokens"] for each in dry["candidates"]}
        return len(found) == 2

    app.until(both, 20)
    return found


def test_haproxy_is_what_clients_speak_to_and_it_speaks_to_the_routers_alone(app: Running) -> None:
    """Issue 6, section 1; test_serve_tp.py serves without. Serve's own proxy, its fallback, has answered nothing."""
    assert app.has_haproxy

    def five_answered() -> bool:  # it counts anew when Serve has it read new settings
        assert HTTP.get(f"{app.url}/v1/models", headers=SHOWN, timeout=30).status_code == 200
        answers = app.haproxy_answers()
        [fallback] = [name for name in answers if name.startswith("SERVE_PROXY_ACTOR-")]
        assert answers[fallback] == 0
        return sum(count for name, count in answers.items() if name.startswith("SERVE_REPLICA_manta-Router-")) >= 5

    app.until(five_answered, 20)


def test_a_decision_is_told_whichever_router_made_it_and_whichever_is_asked(app: Running) -> None:
    deciders: set[str] = set()
    number = itertools.count()

    def each_has_decided() -> bool:
        names = [f"mine-{next(number)}" for _ in range(16)]
        assert [ask(app, "Whose is it?", name=name, max_tokens=1).status_code for name in names] == [200] * 16
        for name in names:
            told = [HTTP.get(f"{app.url}/route/{name}", headers=SHOWN, timeout=30) for _ in range(4)]
            assert [each.status_code for each in told] == [200] * 4
            [decider] = {each.json()["router"] for each in told}
            assert told[0].json()["rid"] == name
            deciders.add(decider)
        return deciders == routers(app).keys()

    app.until(each_has_decided, 60)  # the proxy asks one alone while the other is slow to say that it is well
    assert HTTP.get(f"{app.url}/route/nobody", headers=SHOWN, timeout=30).status_code == 404


def test_both_routers_know_the_same_pages_soon_after_a_load(app: Running) -> None:
    """Each hears every replica's events; what each expects of its own requests alone is settled within some reports."""
    texts = [prompt(topic, f"Question {number}?") for number in range(3) for topic in TOPICS]
    apart = []
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, app, text) for text in texts]
        while not all(answer.done() for answer in answers):
            one, other = (info["router"]["cache_pages"] for info in routers(app).values())
            apart.append(sum(abs(sum(one[replica]) - sum(other[replica])) for replica in one))
        assert {answer.result().status_code for answer in answers} == {200}
    ended_s = time.monotonic()
    app.until(app.idle, 30)

    def agree() -> bool:
        pools = {state["replica"]["replica_id"]: state["stats"]["pool"] for state in app.states()}
        held = {replica_id: [pool["evictable_pages"], 0] for replica_id, pool in pools.items()}
        return all(info["router"]["cache_pages"] == held for info in routers(app).values())

    app.until(agree, 60)
    settled_s = time.monotonic() - ended_s
    print(f"pages apart under load {apart}; both equal to the replicas' caches {settled_s:.2f} s after it")
    for topic in TOPICS:
        one, other = explained(app, prompt(topic, "Last question?")).values()
        assert one == other
        assert max(one.values()) >= 128


def test_a_burst_beyond_the_queues_is_answered_whole_or_refused_with_a_time_to_come_back(app: Running) -> None:
    """Nothing else happens to any request, and whoever comes back as told is served in the end.

    A request is refused once each replica has found as many open as may run and wait there (docs/routing.md); neither
    router needs to know of the other's for that. What was open then is served: so many at least, however they came.
    """
    texts = [f"{number}: a tale never told before. " * 6 for number in range(BURST)]
    with ThreadPoolExecutor(BURST) as pool:
        answers = list(pool.map(lambda text: ask(app, text), texts))
        served = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert {answer.status_code for answer in refused} <= {429, 503}
        assert len(refused) >= 1
        assert {"tries=2" in answer.headers["x-manta-route"] for answer in refused} == {True}, "each replica was asked"
        assert len(served) >= 2 * (RUNNING + QUEUED)
        for answer in served:
            body = answer.json()
            assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (8, "length")
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert all("try again later" in answer.json()["error"]["message"] for answer in refused)
        again = [text for text, answer in zip(texts, answers, strict=True) if answer.status_code != 200]
        tries = list(pool.map(lambda text: until_served(app, text), again))
    print(f"of {BURST} at once {len(served)} were served, {len(refused)} refused; those came again {max(tries)} times")
    app.until(app.idle, 30)
    app.until(lambda: sum(info["router"]["num_open"] for info in routers(app).values()) == 0, 30)


def until_served(app: Running, text: str) -> int:
    """Come again after as long as the refusal says; how often it took."""
    for tries in range(1, 61):
        answer = ask(app, text)
        if answer.status_code == 200:
            assert answer.json()["usage"]["completion_tokens"] == 8
            return tries
        threading.Event().wait(float(answer.headers["retry-after"]))
    raise AssertionError("refused for a minute")


def test_a_response_in_the_background_is_there_at_whichever_router_is_asked(app: Running) -> None:
    """The proxy's choice changes with each request; only one router has the response, and another one may be told of it
    too late (503)."""
    body = {"input": "Tell a long story.", "temperature": 0, "ignore_eos": True, "background": True}
    routes = f"{app.url}/v1/responses"

    def begin(num_tokens: int) -> str:
        sent = {**body, "max_output_tokens": num_tokens}
        answer = HTTP.post(routes, json=sent, headers=SHOWN, timeout=30)
        assert (answer.status_code, answer.json()["status"]) == (200, "queued")
        return f"{routes}/{answer.json()['id']}"

    def tries(method: str, url: str, key: dict[str, str] = SHOWN) -> list[httpx.Response]:
        answers: list[httpx.Response] = []

        def is_told() -> bool:
            answers.append(HTTP.request(method, url, headers=key, timeout=60))
            return answers[-1].status_code != 503

        app.until(is_told, 60)
        return answers

    def told(method: str, url: str, key: dict[str, str] = SHOWN) -> httpx.Response:
        return tries(method, url, key)[-1]

    kept = begin(150)
    streams = [told("GET", f"{kept}?stream=true") for _ in range(4)]
    assert {each.text for each in streams} == {streams[0].text}
    assert streams[0].text.count("event: ") > 20
    assert "event: response.incomplete" in streams[0].text
    whole = [told("GET", kept).json() for _ in range(8)]
    assert [each["usage"]["output_tokens"] for each in whole] == [150] * 8
    other = {"Authorization": f"Bearer {API_KEY}"}
    assert [told("GET", kept, other).status_code for _ in range(4)] == [404] * 4
    for _ in range(4):
        cancelled = begin(3000)  # which no stall outlasts
        assert told("POST", f"{cancelled}/cancel").json()["status"] == "cancelled"
        *slow, deleted = tries("DELETE", cancelled)
        assert deleted.json().get("deleted") or (slow and deleted.status_code == 404)  # it was done without an answer
        assert [told("GET", cancelled).status_code for _ in range(2)] == [404] * 2
    app.until(app.idle, 30)


def test_they_agree_on_what_a_key_of_the_keys_file_has_used(app: Running) -> None:
    """Beyond the limit go at most those that one router takes before the other one's counts have come: one by one,
    each answered before the next is asked, that is few."""
    taken, begun_s = 0, time.monotonic()
    with httpx.Client(headers={"Authorization": f"Bearer {TENANT_KEY}"}, timeout=60) as client:
        for _ in range(3 * MOST):
            answer = client.post(f"{app.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert answer.status_code in (200, 429), answer.text
            taken += answer.status_code == 200
    free_again = MOST * (time.monotonic() - begun_s) / 60  # at most: the minute slides
    assert MOST <= taken <= MOST + 4 + free_again

    def agree() -> bool:
        seen = [httpx.get(f"{app.url}/keys", headers=SHOWN).json() for _ in range(6)]
        assert all(each["error"] == "" for each in seen)
        return len({str(each["keys"]) for each in seen}) == 1 and seen[0]["keys"][0]["used"]["requests"] >= 1

    app.until(agree, 20)


ASKED = [{"role": "user", "content": "Order three bolts and two nuts, and say why in a long story."}]
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": prompt("pages"), "max_tokens": 150, "temperature": 0, "ignore_eos": True}),
    (COMPLETIONS, {"prompt": prompt("trees"), "max_tokens": 150, "ignore_eos": True, **SEEDED}),
    (COMPLETIONS, {"prompt": prompt("engines"), "max_tokens": 80, "n": 2, "ignore_eos": True, **SEEDED}),
    (CHAT, {"messages": ASKED, "max_tokens": 150, "response_format": DOCUMENT, **SEEDED}),
    (CHAT, {"messages": ASKED, "max_tokens": 150, "tools": TOOLS, "tool_choice": "required", **SEEDED}),
]


async def test_clients_come_back_to_the_same_bytes_when_their_router_is_killed(app: Running) -> None:
    """Eight streams at a time; in their midst the router is killed that has the most of them, twice.

    How many it has is the proxy's choice: it may give all to one while the other is slow to say that it is well.
    """
    streams = (STREAMS * 2)[:8]
    posts: list[httpx.Request] = []

    async def note(request: httpx.Request) -> None:
        posts.append(request)

    async with httpx.AsyncClient(base_url=app.url, timeout=120, event_hooks={"request": [note]}) as http:
        calm = [await whole(http, f"calm-{at}", *each) for at, each in enumerate(STREAMS)]
        for kill in range(2):
            came: list[float] = []
            running = [
                asyncio.create_task(whole(http, f"back-{kill}-{at}", *each, came=came))
                for at, each in enumerate(streams)
            ]
            while len(came) < 60 and not any(each.done() for each in running):
                await asyncio.sleep(0.02)
            posts.clear()
            told = [info["router"] for info in (await asyncio.to_thread(routers, app)).values()]
            pid = max(told, key=lambda router: router["num_open"])["pid"]
            os.kill(pid, signal.SIGKILL)
            for at, got in enumerate(await asyncio.gather(*running)):
                path = streams[at][0]
                assert numbers(got) == list(range(1, len(got) + 1))
                assert equal(answer_of(path, got), answer_of(path, calm[at % len(STREAMS)]))
            assert posts, "no stream was cut, so that none had to come back"
            gap_s = max(after - before for before, after in itertools.pairwise(came))
            print(f"router {pid} was killed after 60 events of 8 streams; longest time without any event {gap_s:.2f} s")
            await asyncio.to_thread(routers, app, 60)  # the one in the place of the dead one too
        other = {"Authorization": f"Bearer {API_KEY}"}
        codes = [(await http.get(f"/v1/streams/back-1-{at}", headers=other)).status_code for at in range(8)]
        assert codes == [404] * 8
    await asyncio.to_thread(app.until, app.idle, 60)


async def whole(
    http: httpx.AsyncClient, name: str, path: str, body: dict[str, Any], *, came: list[float] | None = None
) -> list[ServerEvent]:
    """All events of an answer; ``came``: gets the time of each."""
    got = []
    sent = {**body, "stream_options": {"include_usage": True}}
    async for event in events(http, path, sent, headers={**SHOWN, "x-request-id": name}):
        got.append(event)
        if came is not None:
            came.append(time.monotonic())
    return got
