"""Why a request went where it did, and what can be seen of one replica and done with it."""

from urllib.parse import quote

import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser.chromium import Page
from tests.fake_fleet import FakeFleet
from tests.fake_observatory import FakeObservatory

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SHARES = """
    const track = document.querySelector(".bar-row.chosen .bar-track"), whole = track.getBoundingClientRect().width;
    return [...track.querySelectorAll(".cost")].map(
        (part) => [part.className.split(" ")[1], part.getBoundingClientRect().width / whole]);
"""
MARKS = """
    const box = (selector) => document.querySelector(`.bar-row.chosen ${selector}`).getBoundingClientRect();
    const track = box(".bar-track");
    return [".predicted", ".measured"].map((each) => (box(each).left - track.left + 1) / track.width);
"""


def at(served: FakeObservatory, fleet: str, **chosen: str) -> str:
    return f"{served.url}/{fleet}/#{'&'.join(f'{name}={quote(value)}' for name, value in chosen.items())}"


def test_bars_and_marks_are_as_long_as_their_times(page: Page, served: FakeObservatory) -> None:
    row = next(row for row in served.fleets["eight"].state["requests"] if row["outcome"] == "ok")
    details = served.fleets["eight"].details(row["rid"])
    assert details is not None
    [each] = details["route"]["tries"]
    chosen = next(one for one in each["candidates"] if one["chosen"])
    page.open(at(served, "eight", request=row["rid"], tab="why"))
    page.says("#why .bar-row.chosen .bar-end", "ms")
    shares = dict(page.js(SHARES))
    scale = shares["own_s"] / chosen["own_s"]
    terms = ("queue_s", "own_s", "step_s", "decode_s", "way_s")
    wanted = {field: scale * chosen[field] for field in terms if chosen[field]}
    assert shares == pytest.approx(wanted, abs=0.01)
    times = [each["predicted"]["ttft_s"], each["actual"]["ttft_s"]]
    assert page.js(MARKS) == pytest.approx([scale * time for time in times], abs=0.02)
    ends = [text for text in page.text("#why .bar-end").splitlines() if text][1:]
    assert [text[0] for text in ends] == ["+"] * 7  # each loser costs more than the chosen one
    page.one(".bar-row.chosen .bar-head").send_keys(Keys.ENTER)
    page.says(".bar-row.chosen .parts", "its own tokens that are not cached there")
    assert page.axe() == []


def test_of_many_candidates_the_best_are_drawn_until_all_are_asked_for(page: Page, served: FakeObservatory) -> None:
    page.open(at(served, "many", request=served.fleets["many"].state["requests"][0]["rid"], tab="why"))
    page.until(lambda: len(page.all("#why .bar-row")) == 8, "eight bars")
    page.js("[...document.querySelectorAll('#why button')].find((each) => each.innerText === 'Show all 48').click()")
    page.until(lambda: len(page.all("#why .bar-row")) == 48, "all bars")


def test_each_try_of_a_request_whose_replica_died_can_be_looked_at(page: Page, served: FakeObservatory) -> None:
    fleet = FakeFleet(unified=3, requests_per_tick=4, ticks=8)
    served.fleets["dying"] = fleet
    running = next(row for row in fleet.state["requests"] if row["outcome"] == "running")
    fleet.kill(running["replica"])
    for _ in range(12):
        fleet.tick()
    row = next(row for row in fleet.state["requests"] if row["rid"] == running["rid"])
    page.open(at(served, "dying", request=row["rid"], tab="why"))
    page.says("#why h3", "2 tries")
    other, dead = (fleet.names.name(each["replica"]) for each in (row, running))
    first, second = page.all(".try-row")
    assert "died" in first.text
    assert second.get_attribute("aria-pressed") == "true"
    page.says("#why .sentence", f"Sent to {other}: ")
    first.click()
    page.says("#why .sentence", f"Sent to {dead}: ")
    page.says("#why .sentence.failed", f"This try failed: {dead} died, or its connection was lost")


def test_a_replica_is_shown_with_its_process_its_log_and_its_stacks(page: Page, served: FakeObservatory) -> None:
    replica = served.fleets["unified"].state["replicas"][1]
    page.open(at(served, "unified", replica=replica["id"], tab="replica"))
    page.says("#replica .identity", "gpu-box-3 (10.0.3.17)")
    page.says("#replica .uses", "memory 3.9 GB")
    assert page.text("#replica h2") == replica["name"] == "replica 2"
    assert len(page.all("#replica .spark")) == 7
    log, stacks = page.all("#replica .operate button")[:2]
    log.click()
    page.says("#replica .log-lines", "step 199 took")
    assert len(page.all("#replica .log-lines .bad")) == 22
    page.until(lambda: page.js("const it = document.querySelector('.log-lines'); return it.scrollTop > 100"), "the end")
    assert page.axe() == []
    stacks.click()
    page.says("#replica .log-lines", "replicas/engine/loop.py")


def test_an_action_is_asked_about_and_escape_takes_it_back(page: Page, served: FakeObservatory) -> None:
    served.fleets["operated"] = fleet = FakeFleet(unified=2, ticks=8)
    drained = fleet.state["replicas"][0]["id"]
    page.open(at(served, "operated", replica=drained, tab="replica"))
    flush, drain, _ = page.all("#replica .operate button")[2:]
    flush.click()
    page.says("dialog", f"Flush cache {fleet.names.name(drained)}?")
    page.until(lambda: page.js("return document.activeElement.innerText") == "Cancel", "the focus on what does no harm")
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.until(lambda: not page.all("dialog"), "the question to go")
    assert not [each for each in served.calls if each.endswith("/flush")]
    assert f"replica={quote(drained)}" in page.driver.current_url  # Escape closed the question alone
    drain.click()
    page.says("dialog", "1 other replica takes requests.")
    assert page.axe() == []
    page.one("dialog .sure").click()
    page.says("#replica [role=status]", "Drain: it takes no new requests.")
    served.tick("operated")
    page.says("#replica .panel-head", "draining")
    asked = [each for each in served.calls if each.endswith("/drain")]
    assert asked == [f"/operated/api/replicas/{quote(drained)}/drain"]


def test_without_an_admin_key_it_says_what_to_set(page: Page, served: FakeObservatory) -> None:
    served.fleets["keyless"] = fleet = FakeFleet(unified=1)
    fleet.state["keys"] = {"admin": False}
    page.open(at(served, "keyless", replica=fleet.state["replicas"][0]["id"], tab="replica"))
    page.says("#replica .notice", "Set MANTA_ADMIN_KEY before you start Manta")
    assert page.all("#replica .operate") == []
    page.says("#replica .identity", "gpu-box-3")  # as GET /get_server_info shows without a key
