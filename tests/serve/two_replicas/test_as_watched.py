"""Two replicas watched as people watch them: Prometheus over http_sd, Chromium, and the terminal, all real.

The numbers they show are held against what the clients of these requests counted. Issue 5, what shows that it works.
A replica joins and another one leaves by kill -9 and Serve's replacement: the harder way to leave, since nothing of the
replica can say goodbye. The tests run in their order: what is killed is killed last. They come before all others of the
folder: counters are held against these clients alone.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from deployments.places import ROOT
from tests.browser.chromium import Page, open_chromium
from tests.serve import watched as held
from tests.serve.running import HTTP, Running
from tests.serve.watched import UP_S, Watched, address_of, watched

pytestmark = [
    pytest.mark.serve, pytest.mark.model, pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(400),
]  # fmt: skip


@pytest.fixture(scope="module")
def fleet(two_replicas: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("prometheus")
    with watched(two_replicas, folder, num_processes=4) as running:  # two replicas, router, observatory
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = open_chromium(tmp_path_factory.mktemp("chromium"))
    yield page
    page.close()


def test_all_targets_are_up_within_fifteen_seconds(fleet: Watched) -> None:
    print(f"4 targets up {fleet.up_s:.1f} s after the start of Prometheus")
    assert fleet.up_s < UP_S


def test_every_query_of_boards_and_rules_returns_data(fleet: Watched) -> None:
    assert fleet.missing == []
    held.check_recordings(fleet)


def test_each_process_tells_what_the_catalogue_has_for_it_and_nothing_else(fleet: Watched) -> None:
    held.check_emission(fleet, disaggregated=False)


def test_counters_are_what_clients_counted(fleet: Watched) -> None:
    held.check_truth(fleet)
    held.check_pools(fleet, 2)
    reused = fleet.traffic.sum_of("cached", whole=False)
    fleet.settled("sum(manta_cache_hit_tokens_total)", reused)
    assert reused > 0.5 * fleet.traffic.sum_of("prompt", whole=False)  # most of each prompt is shared


def test_the_page_shows_the_replicas_and_the_shared_prefix_of_a_request_and_why_it_went_there(
    fleet: Watched, browser: Page
) -> None:
    browser.open(f"{fleet.app.url}/manta/")
    ids = fleet.accepting()
    assert {each.get_attribute("data-replica") for each in browser.all(".card")} == ids
    name = fleet.traffic.last("completions").name
    told = fleet.get(f"/api/requests/{name}").json()
    browser.one(f'.request-name[data-rid$="{name}"]').click()
    *_, only = HTTP.get(f"{fleet.app.url}/route/{name}", timeout=30).json()["tries"]
    [called] = [each["name"] for each in fleet.state()["replicas"] if each["id"] == only["replica"]]
    browser.says("#why .sentence", f"Sent to {called}: ")
    cached = only["predicted"]["cached_tokens"]
    browser.says("#why .sentence", f"{cached} of {only['num_tokens']} prompt tokens are cached")
    assert len(browser.all("#why .bar-row")) == 2

    tree = fleet.get("/api/tree", replica=told["row"]["replica"], depth="6").json()
    [trunk] = [node for node in tree["root"]["children"] if node["key"] in told["page_keys"]]
    assert trunk["tokens"] >= 128
    on_path = '.cell.on-path[aria-level="2"]'
    label = browser.one(on_path).get_attribute("aria-label") or ""
    below = ", " if trunk["subtree_nodes"] > 1 else "; "  # other prompts for completions, unless all went elsewhere
    assert label.startswith(f"{trunk['tokens']} tokens{below}")
    browser.picture("live_unified")
    assert browser.complaints() == []


def sentence(route: Mapping[str, Any]) -> str:
    """The router's words for the request's only try, behind its moves."""
    *moves, only = route["tries"]
    assert all(each["moved"] for each in moves)
    return str(only["sentence"])


def test_top_in_the_terminal_says_what_the_state_says(fleet: Watched) -> None:
    fleet.app.until(lambda: all(each["running"] == 0 for each in fleet.state()["replicas"]), 20)
    said = terminal("top", "--once", "--url", fleet.app.url)
    state = fleet.state()
    assert f"{state['model']}, unified: 2 replicas, 1 router" in said
    for replica in state["replicas"]:
        [row] = [line for line in said.splitlines() if line.startswith(f"{replica['name']} ")]
        assert row.split()[2:6] == [replica["id"][:12], replica["host"], "accepting", f"0/{replica['running_limit']}"]
        assert " of 16k" in row


def test_explain_in_the_terminal_says_what_the_router_says(fleet: Watched) -> None:
    name = fleet.traffic.last("chat").name
    said = terminal("explain", name, "--url", fleet.app.url)
    route = HTTP.get(f"{fleet.app.url}/route/{name}", timeout=30).json()
    assert said.startswith(f"{name}: ok, 1 try, ")
    assert sentence(route) in said
    actual = route["tries"][-1]["actual"]["cached_tokens"]
    assert f"{actual} of {route['tries'][-1]['num_tokens']} prompt tokens were cached" in said


def terminal(*words: str) -> str:
    command = [sys.executable, "-m", "deployments", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout


def test_a_replica_that_is_killed_leaves_and_another_joins_without_an_alert(fleet: Watched, browser: Page) -> None:
    """kill -9; times from the kill. Alerts that look back for longer have their tests with promtool."""
    browser.open(f"{fleet.app.url}/manta/")
    before = fleet.accepting()
    gone = min(before)
    address = address_of(fleet, gone)
    [pid] = [each["replica"]["pid"] for each in fleet.app.states() if each["replica"]["replica_id"] == gone]
    os.kill(pid, signal.SIGKILL)
    came_s = times_of(
        {
            "off the page": lambda: not browser.all(f'[data-replica="{gone}"]'),
            "no target": lambda: address not in fleet.prometheus.targets(),
            "ready": lambda: len(fleet.accepting() - {gone}) == 2,
            "scraped": lambda: any(new_ids(fleet, before)),
        },
        within_s=90,
    )
    print(", ".join(f"{what} after {at_s:.1f} s" for what, at_s in came_s.items()))
    [new] = fleet.accepting() - before
    assert came_s["off the page"] < 10
    assert came_s["no target"] < 15
    assert came_s["scraped"] - came_s["ready"] < 10
    browser.one(f'[data-replica="{new}"]')
    settled_s = time.time()
    fleet.app.until(lambda: fleet.prometheus.rules_ran_s() > settled_s, 30)
    assert kinds_of(fleet, gone)[-1] == "lost"
    assert kinds_of(fleet, new)[-1] == "replaced"
    fleet.settled('manta_replica_deaths_total{target_role="unified"}', 1)
    fleet.app.until(lambda: f"({gone}) is lost" in fleet.app.log.read_text(), 10)  # on the console of `serve`
    assert fleet.prometheus.series("ALERTS") == []  # nor does any wait to fire
    assert fleet.prometheus.fired() == []
    assert browser.complaints() == []


def kinds_of(fleet: Watched, replica: str) -> list[str]:
    """What the feed has of a replica, the oldest first."""
    return [each["kind"] for each in fleet.get("/api/events").json()["events"] if each["replica"] == replica]


def new_ids(fleet: Watched, before: set[str]) -> list[str]:
    scraped = {labels["replica"] for labels, _ in fleet.prometheus.series("manta_replica_info")}
    return sorted(scraped - before)


def times_of(events: dict[str, Callable[[], bool]], *, within_s: float) -> dict[str, float]:
    """When each came to be, in seconds from now."""
    started_s, left, came_s = time.monotonic(), dict(events), dict[str, float]()

    def look() -> bool:
        for what in [what for what, holds in left.items() if holds()]:
            came_s[what] = time.monotonic() - started_s
            del left[what]
        return not left

    try:
        Running.until(look, within_s)
    except AssertionError as error:
        raise AssertionError(f"{sorted(left)} not within {within_s} s; {came_s}") from error
    return came_s


def test_the_page_goes_on_when_the_observatory_was_killed_and_is_back(fleet: Watched, browser: Page) -> None:
    """While it is away the proxy may hold the page's poll: whether a banner is seen depends on how long that takes."""

    def observatories() -> set[int]:
        return {pid for pid, command in fleet.app.processes().items() if "Observatory" in command}

    browser.open(f"{fleet.app.url}/manta/")
    browser.says(".link", "live")
    [pid] = observatories()
    names = {each["id"]: each["name"] for each in fleet.state()["replicas"]}
    told = fleet.get("/api/events").json()["events"]
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(fleet.traffic.round)
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        under_way.result()
    fleet.traffic.round()  # others come
    fleet.app.until(lambda: bool(observatories() - {pid}), 60)
    fleet.app.until(lambda: not browser.all(".banner"), 60)
    print(f"live again {time.monotonic() - killed_s:.1f} s after the kill")
    browser.says(".link", "live")
    seqs = [each["seq"] for each in fleet.get("/api/events").json()["events"]]
    assert told != []
    assert {each["seq"] for each in told} <= set(seqs), "events outlive it"
    assert {each["id"]: each["name"] for each in fleet.state()["replicas"]} == names
    newest = fleet.traffic.last("chat").name
    browser.until(lambda: browser.all(f'.request-name[data-rid$="{newest}"]'), f"{newest} among the requests")
    fleet.app.until(lambda: sorted(fleet.prometheus.targets().values()) == ["up"] * 4, 30)
    assert fleet.prometheus.fired() == []
    browser.complaints()  # of the tries meanwhile


def test_a_replica_that_hangs_fires_an_alert_within_thirty_seconds_and_is_killed_and_replaced(fleet: Watched) -> None:
    """SIGSTOP, and nothing ends it: Serve alone would take nearly four minutes. Times from the stop."""
    fleet.app.until(lambda: len(fleet.accepting()) == 2, 60)
    hung = min(fleet.accepting())
    [pid] = [each["replica"]["pid"] for each in fleet.app.states() if each["replica"]["replica_id"] == hung]

    def shown() -> dict[str, Any]:
        return next((each for each in fleet.state()["replicas"] if each["id"] == hung), {"state": "gone"})

    os.kill(pid, signal.SIGSTOP)
    try:
        came_s = times_of(
            {
                "silent": lambda: shown()["state"] == "silent",
                "fired": lambda: "ReplicaSilent" in fleet.prometheus.fired(),
                "killed": lambda: pid not in fleet.app.processes(),
                "replaced": lambda: len(fleet.accepting() - {hung}) == 2,
            },
            within_s=120,
        )
    finally:
        if pid in fleet.app.processes():
            os.kill(pid, signal.SIGKILL)
    print(", ".join(f"{what} after {at_s:.1f} s" for what, at_s in came_s.items()))
    assert list(came_s) == ["silent", "fired", "killed", "replaced"]
    assert came_s["fired"] < 30
    assert kinds_of(fleet, hung)[-2:] == ["silent", "lost"]
    assert hung in [each["id"] for each in fleet.state()["ended"]]


def fires_about(fleet: Watched, replica: str) -> bool:
    return any(each["state"] == "firing" and each["replica"] == replica for each in fleet.state()["alerts"])


LATE_S = 3.0  # for so long the view may name a healthy replica, or miss an ill one
AFTER_S = 20.0  # looked on after the last fault: alerts that had ended fired for 17 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the view and Prometheus show in one moment."""

    at_s: float
    state: Mapping[str, Any]
    fired: frozenset[str]  # Prometheus' alerts

    def names(self, replica: str) -> bool:
        """Whether the view says that something is wrong with this replica."""
        rows = (each["state"] for each in self.state["replicas"] if each["id"] == replica)
        return any(each["replica"] == replica for each in self.state["alerts"]) or any(
            each in ("silent", "unhealthy") for each in rows
        )

    def misses(self, replica: str) -> bool:
        """Whether all looks well with this replica."""
        ready = [each["id"] for each in self.state["replicas"] if each["state"] == "accepting"]
        wanted = sum(each["desired"] for each in self.state["autoscaling"]["targets"])
        return replica in ready or (not self.state["alerts"] and len(ready) >= wanted)


@contextmanager
def looked_at(fleet: Watched) -> Iterator[list[Shown]]:
    """Look each half second until the block ends."""
    seen, over = list[Shown](), threading.Event()

    def look() -> None:
        while not over.is_set():
            alerts = fleet.prometheus.series('ALERTS{alertstate="firing"}')
            fired = frozenset(labels["alertname"] for labels, _ in alerts)
            seen.append(Shown(at_s=time.monotonic(), state=fleet.state(), fired=fired))
            over.wait(0.5)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            yield seen
        finally:
            over.set()
        looking.result()


def longest_s(seen: list[Shown], holds: list[bool]) -> float:
    """For how long it held without a break, as far as certain; a moment in which the machine stood still counts as half
    a second."""
    longest = now = 0.0
    for (before, held_before), (after, held_after) in itertools.pairwise(zip(seen, holds, strict=True)):
        now = now + min(after.at_s - before.at_s, 0.5) if held_before and held_after else 0.0
        longest = max(longest, now)
    return longest


def test_the_view_names_no_healthy_replica_and_misses_no_ill_one(fleet: Watched) -> None:
    """One is stopped until its alert fires, and goes on. Each half second the view is held against the truth, and what
    fires in Prometheus against the view."""
    fleet.app.until(lambda: len(fleet.accepting()) == 2, 90)
    pids = {each["replica"]["replica_id"]: each["replica"]["pid"] for each in fleet.app.states()}
    stopped = min(pids)
    with looked_at(fleet) as seen:
        os.kill(pids[stopped], signal.SIGSTOP)
        began_s = time.monotonic()
        try:
            fleet.app.until(lambda: fires_about(fleet, stopped), 20)
        finally:
            os.kill(pids[stopped], signal.SIGCONT)
        ended_s = time.monotonic()
        over_s = ended_s + AFTER_S
        fleet.app.until(lambda: time.monotonic() > over_s, AFTER_S + 10)
    for replica in {each["id"] for shown in seen for each in shown.state["replicas"]}:
        at = [(shown, replica == stopped and began_s <= shown.at_s < ended_s) for shown in seen]
        accused = longest_s(seen, [shown.names(replica) and not ill for shown, ill in at])
        missed = longest_s(seen, [shown.misses(replica) and ill for shown, ill in at])
        print(f"{replica}: accused for {accused:.1f} s, missed for {missed:.1f} s")
        assert accused <= LATE_S
        assert missed <= LATE_S
    names = {each["name"] for shown in seen for each in shown.state["alerts"]}
    fired = frozenset[str]().union(*(shown.fired for shown in seen))
    assert fired <= names, "the view shows what fires in Prometheus"
    assert kinds_of(fleet, stopped)[-2:] == ["silent", "back"]
