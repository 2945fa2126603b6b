"""The request river in a real browser: what is drawn, and that pointer and keys reach every request and every time."""

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.browser.chromium import Page
from tests.fake_fleet import CALLERS, FakeFleet
from tests.fake_observatory import FakeObservatory

pytestmark = [pytest.mark.browser, pytest.mark.slow]

COLOURED = """
    const probe = document.body.appendChild(document.createElement("span"));
    const canvas = document.querySelector(".river-canvas");
    const wanted = Object.fromEntries(arguments[0].map((name) => {
        probe.style.color = `var(--${name})`;
        return [name, getComputedStyle(probe).color.match(/[0-9]+/g).map(Number)];
    }));
    probe.remove();
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 21, canvas.width, canvas.height - 21);
    const columns = Object.fromEntries(arguments[0].map((name) => [name, new Array(canvas.width).fill(0)]));
    for (let at = 0; at < data.length; at += 4)
        for (const [name, [r, g, b]] of Object.entries(wanted))
            if (data[at] === r && data[at + 1] === g && data[at + 2] === b) columns[name][(at / 4) % canvas.width] += 1;
    return Object.fromEntries(Object.entries(columns).map(([name, each]) => [name, Math.max(...each)]));
"""  # -> of each colour, the most pixels of it in one column
MOVES = "return document.querySelector('.river-move').getAnimations().length"
RANGE = "const at = document.querySelector('.river-range').style; return parseFloat(at.left)"


@pytest.fixture(scope="module")
def fleet(served: FakeObservatory) -> FakeFleet:
    served.fleets["river"] = FakeFleet(unified=3, requests_per_tick=6, ticks=90)
    return served.fleets["river"]


def press(page: Page, *keys: str) -> None:
    ActionChains(page.driver).send_keys(*keys).perform()


def status(page: Page) -> str:
    return page.text(".river-controls [role=status]")


def test_a_replica_that_is_killed_ends_in_red_and_its_requests_go_on_in_other_lanes(
    page: Page, served: FakeObservatory, fleet: FakeFleet
) -> None:
    page.open(f"{served.url}/river/")
    page.until(lambda: len(page.all(".river-lane")) == 3, "three lanes")
    before = page.js(COLOURED, ["decode", "prefill", "bad", "transfer"])
    assert before["transfer"] >= 3  # where pages came to that a request fetched
    assert min(before["decode"], before["prefill"]) >= 6  # px, about a bar
    assert before["bad"] < 40
    victim = fleet._open[0]["replica"]
    with served.lock:
        fleet.kill(victim)
    served.tick("river")
    page.says("#river .panel-head", "1 replica lost")
    page.says("#river .panel-head", "went on with another replica")
    page.says(".river-lane.dead", f"{fleet.names.name(victim)} lost")
    assert page.js(COLOURED, ["bad"])["bad"] >= 40  # of a lane's 76


def test_arrow_keys_walk_through_the_requests_and_enter_chooses_one(
    page: Page, served: FakeObservatory, fleet: FakeFleet
) -> None:
    page.open(f"{served.url}/river/")
    page.js("document.querySelector('.river-frame').focus()")
    press(page, Keys.ARROW_LEFT)
    page.until(lambda: page.text("#river [aria-live]").startswith("req-"), "the newest request to be told")
    first = page.text("#river [aria-live]")
    press(page, Keys.ARROW_LEFT)
    page.until(lambda: page.text("#river [aria-live]") != first, "the one before it")
    told = page.text("#river [aria-live]")
    assert "prompt tokens cached" in told
    assert len(page.all(".river-mark.at")) >= 1
    press(page, Keys.ENTER)
    page.until(lambda: f"request={told.partition(':')[0]}" in page.js("return location.hash"), "it to be chosen")
    assert page.one("#tab-why").get_attribute("aria-selected") == "true"


def test_space_holds_the_river_alone_and_keys_zoom_and_go_back(
    page: Page, served: FakeObservatory, fleet: FakeFleet
) -> None:
    page.open(f"{served.url}/river/")
    page.js("document.querySelector('.river-frame').focus()")
    served.tick("river")
    page.until(lambda: page.js(MOVES) == 1, "a river that moves")
    press(page, " ")
    page.until(lambda: status(page).startswith("Held at"), "a pause")
    assert page.js(MOVES) == 0
    assert "live" in page.text(".link")  # the page goes on
    press(page, "+")
    page.until(lambda: "40.0 s shown" in status(page), "two thirds of a minute")
    at = page.js(RANGE)
    press(page, Keys.HOME)
    page.until(lambda: page.js(RANGE) < at, "the oldest request")
    press(page, Keys.END)
    page.until(lambda: status(page) == "", "the present")


def test_without_new_states_the_river_stands_still(page: Page, served: FakeObservatory, fleet: FakeFleet) -> None:
    page.open(f"{served.url}/river/")
    page.until(lambda: page.js(MOVES) == 0, "a river that does not make up what it was not told")


def test_a_drag_goes_back_a_brush_zooms_and_a_click_chooses(
    page: Page, served: FakeObservatory, fleet: FakeFleet
) -> None:
    page.open(f"{served.url}/river/")
    river = page.one(".river-window")
    ActionChains(page.driver).move_to_element(river).click_and_hold().move_by_offset(150, 0).release().perform()
    page.until(lambda: "60.0 s shown" in status(page), "a minute that is over")
    assert "request=" not in page.js("return location.hash")  # a drag is no click
    strip = page.one(".river-overview")
    ActionChains(page.driver).move_to_element(strip).click_and_hold().move_by_offset(100, 0).release().perform()
    page.until(lambda: "s shown" in status(page) and "60.0 s" not in status(page), "the range of the brush")
    pressed = "new PointerEvent('pointerdown', {button: 0, clientX: 9, clientY: 9})"  # and let go outside
    page.js(f"document.querySelector('.river-window').dispatchEvent({pressed})")
    ActionChains(page.driver).move_to_element(river).perform()
    page.js("document.querySelector('.river-frame').focus()")
    press(page, Keys.ARROW_LEFT)
    mark = page.one(".river-mark.at")
    ActionChains(page.driver).move_to_element(mark).perform()
    page.says(".river-tip", "prompt tokens cached")
    rid = page.text(".river-tip").partition(":")[0]
    ActionChains(page.driver).click().perform()
    page.until(lambda: f"request={rid}" in page.js("return location.hash"), "a choice by click")


def test_with_reduced_motion_the_river_moves_only_when_a_state_comes(
    page: Page, served: FakeObservatory, fleet: FakeFleet
) -> None:
    page.open(f"{served.url}/river/")
    served.tick("river")
    page.until(lambda: page.js(MOVES) == 1, "a river that moves")
    page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    served.tick("river")
    page.until(lambda: page.js(MOVES) == 0, "a river at rest")
    page.js("document.querySelector('.river-frame').focus()")
    press(page, Keys.END)
    assert page.js(MOVES) == 0


def test_an_idle_river_is_folded_and_lanes_may_be_of_sessions_or_keys(
    page: Page, served: FakeObservatory, fleet: FakeFleet
) -> None:
    high = "return [...document.querySelectorAll('.river-lane')].map((each) => Math.round(each.offsetHeight))"
    page.open(f"{served.url}/idle/?snapshot=1")
    page.until(lambda: page.js(high) == [22, 22], "two low lanes")
    page.open(f"{served.url}/river/?snapshot=1")
    page.until(lambda: min(page.js(high)) > 40, "high lanes")
    sessions = {row["session"] for row in fleet.state["requests"] if row["time"] > fleet.state["time"] - 60}
    by = page.one(".river-controls select")
    choose = "const it = arguments[0]; it.value = arguments[1]; it.dispatchEvent(new Event('change', {bubbles: true}))"
    page.js(choose, by, "session")
    page.until(lambda: {each.text for each in page.all(".river-lane")} == sessions, "a lane a session")
    page.js(choose, by, "API key")
    page.until(lambda: {each.text for each in page.all(".river-lane")} == set(CALLERS), "a lane a key")
    page.js("document.querySelector('.river-frame').focus()")
    press(page, Keys.ARROW_LEFT, Keys.ENTER)
    page.until(lambda: page.one("#tab-why").get_attribute("aria-selected") == "true", "the newest to be explained")
    page.js(choose, by, "replica")
    page.until(lambda: page.text(".river-lane").count("replica") >= 2, "replicas again")


def test_the_moment_from_which_an_objective_was_missed_is_marked(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/eight/?snapshot=1")
    assert page.js(COLOURED, ["warn"])["warn"] == 0
    served.fleets["late"] = FakeFleet(unified=2, requests_per_tick=1, ticks=60, overloaded=True)
    page.open(f"{served.url}/late/?snapshot=1")
    assert page.js(COLOURED, ["warn"])["warn"] >= 12  # a bar's height: the moment itself
