"""The live view over a fleet that does not exist: what it draws, and that it can be used by mouse and by keyboard."""

from collections.abc import Iterator

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.browser.chromium import Page, rids
from tests.fake_fleet import SHED, FakeFleet
from tests.fake_observatory import FakeObservatory

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SHARES = """
    const card = document.querySelector(`[data-replica="${arguments[0]}"]`), bar = card.querySelector(".bar");
    const whole = bar.getBoundingClientRect().width;
    return [...bar.children].map((part) => [part.className.split(" ")[1], part.getBoundingClientRect().width / whole]);
"""

WIDTHS = """
    return [...document.querySelectorAll(arguments[0] + " > rect:first-child")].map(
        (each) => each.getBoundingClientRect().width);
"""

LAID_OUT = """
    const [it, tour] = [arguments[0], ".tour"].map((each) => document.querySelector(each).getBoundingClientRect());
    const across = tour.left < it.right && tour.right > it.left, along = tour.top < it.bottom && tour.bottom > it.top;
    return [it.top >= 0 && it.bottom <= innerHeight, across && along];
"""  # whether it is in view, and whether the tour covers it

CHANGE = "const it = arguments[0]; it.value = arguments[1]; it.dispatchEvent(new Event('change', {bubbles: true}))"
TYPE = "const it = arguments[0]; it.value = arguments[1]; it.dispatchEvent(new Event('input', {bubbles: true}))"


def press(page: Page, *keys: str) -> None:
    ActionChains(page.driver).send_keys(*keys).perform()


def focused(page: Page) -> str:
    return str(page.js("const at = document.activeElement; return at.dataset.id ?? at.id ?? at.innerText"))


def test_both_replicas_are_drawn_with_bars_as_wide_as_their_numbers(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/unified/")
    replicas = served.fleets["unified"].state["replicas"]
    assert len(page.all(".card")) == len(replicas) == 2
    for each in replicas:
        pool = each["pools"][0]
        shares = dict(page.js(SHARES, each["id"]))
        assert list(shares) == ["protected", "reserved", "quarantined", "evictable", "free"]
        assert shares == pytest.approx({state: pool[state] / pool["capacity"] for state in shares}, abs=0.005)


def test_where_grafana_is_known_its_boards_are_one_click_away(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/live/")
    assert page.one(".top-end a").get_attribute("href") == "http://grafana:3000/d/manta-fleet"


def test_a_new_second_changes_what_it_brings(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/live/")
    page.says(".link", "live")
    fleet = served.fleets["live"]
    served.tick("live")
    newest = fleet.state["requests"][0]["rid"]
    page.until(lambda: rids(page)[0] == newest, f"{newest} at the top")
    for each in fleet.state["replicas"]:
        said = f"Running {each['running']} {each['waiting']} waiting"
        page.says(f'[data-replica="{each["id"]}"] .replica-sparks', said)


def test_a_click_on_a_request_explains_it_candidate_by_candidate(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/unified/")
    row = served.fleets["unified"].state["requests"][2]
    page.all(".requests tbody tr")[2].click()
    name = served.fleets["unified"].names.name(row["replica"])
    page.says("#why .sentence", f"Sent to {name}: ")
    assert page.text("#why h2") == f"Why {name}?"
    assert page.text("#why .bar-row.chosen .id") == name
    assert len(page.all("#why .bar-row")) == 2
    assert "160 cached tokens" in page.text("#why")  # given up
    assert page.text("#why .timeline-row").splitlines()[0] == "route"
    assert page.text("#cache h2") == f"Radix cache of {name}"  # the icicle follows


def test_the_icicle_of_the_chosen_replica_outlines_the_chosen_request(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/unified/")
    other = served.fleets["unified"].state["replicas"][1]["id"]
    page.one(f'[data-replica="{other}"] .card-name').click()
    page.says("#cache h2", "Radix cache of replica 2")
    page.until(lambda: len(page.js(WIDTHS, ".cell")) > 60, "the icicle's nodes")
    whole = page.js(WIDTHS, ".cell")[0]
    systems = page.js(WIDTHS, '[aria-level="2"]')
    tree = served.fleets["unified"].tree(other, 6)
    assert tree is not None
    wanted = [each["subtree_tokens"] / tree["tokens"] for each in tree["root"]["children"]]
    assert [each / whole for each in systems[:3]] == pytest.approx(wanted, abs=0.005)
    assert page.all(".cell.on-path") == []
    page.all(".requests tbody tr")[0].click()
    page.until(lambda: len(page.all(".cell.on-path")) == 2, "the path of two nodes")
    assert [each.get_attribute("aria-level") for each in page.all(".cell.on-path")] == ["2", "3"]
    assert len(page.all(".cell.rest")) == 3  # what the server left out


def test_arrow_keys_walk_the_icicle_and_enter_widens_a_node(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/unified/")
    root = page.one('.cell[tabindex="0"]')
    assert len(page.all('.cell[tabindex="0"]')) == 1
    page.js("arguments[0].focus()", root)
    page.says("#cache .detail", "the whole cache")
    tree = served.fleets["unified"].tree(served.fleets["unified"].state["replicas"][0]["id"], 6)
    assert tree is not None
    systems = [each["key"] for each in tree["root"]["children"]]
    for key, wanted in ((Keys.ARROW_DOWN, systems[0]), (Keys.ARROW_RIGHT, systems[1]), (Keys.ARROW_UP, "root")):
        press(page, key)
        page.until(lambda: focused(page) == wanted, f"{wanted} to be focused")  # noqa: B023
    press(page, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    page.until(lambda: focused(page) == systems[1], "the second system prompt")
    page.says("#cache .detail", "640 tokens")
    width = """const [node, all] = [document.activeElement.querySelector("rect"), document.querySelector(".icicle")];
        return node.getBoundingClientRect().width / all.getBoundingClientRect().width"""
    assert page.js(width) < 0.5
    press(page, Keys.ENTER)
    page.until(lambda: page.js(width) > 0.99, "the node at full width")
    press(page, Keys.ESCAPE)
    page.until(lambda: page.js(width) < 0.5, "the whole tree")
    press(page, Keys.ENTER)
    page.says(".crumbs", "Whole cache 640 tokens")
    page.one(".crumbs button").click()
    page.until(lambda: page.all(".crumbs") == [], "the whole tree again")


def test_the_tab_key_reaches_every_part_and_focus_is_seen(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/unified/?snapshot=1")
    seen = []
    for _ in range(60):
        press(page, Keys.TAB)
        at = page.js("""
            const at = document.activeElement, seen = getComputedStyle(at).outlineStyle !== "none" ||
                getComputedStyle(at, "::after").outlineStyle !== "none" || at.matches(".cell");
            const name = at.id || at.dataset.id || at.classList[0] || at.type || at.tagName;
            return [at.dataset.rid ? "request" : name, seen]""")
        seen.append(at[0])
        assert at[1], f"the focus on {at[0]} cannot be seen"
        if at[0] == "root":
            break
    first = [each for each in seen if each != "A"][:11]  # the header may have links
    assert first == ["skip", "pause", "theme", "help", *["tile"] * 7], seen
    assert [each for each in seen if each in ("card-name", "search", "request", "tab-try", "root")] == [
        "card-name", "card-name", "search", "request", "tab-try", "root"], seen  # fmt: skip


def test_requests_can_be_filtered_by_words_replica_outcome_and_kind(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/burning/?snapshot=1")
    rows = served.fleets["burning"].state["requests"]
    outcome, replica = page.all("#requests select")

    def shows(wanted: list[str]) -> None:
        note = f"{len(wanted)} of the newest {len(rows)}"
        page.until(lambda: rids(page) == wanted[: len(rids(page))] and note in page.text("#requests .panel-head"), note)

    one = rows[0]["replica"]
    page.js(CHANGE, replica, one)
    shows([row["rid"] for row in rows if row["replica"] == one])
    slow = next(each for each in page.all("#requests .controls button") if each.text == "Slow")
    slow.click()
    shows([row["rid"] for row in rows if row["replica"] == one and row["missed"]])
    page.js(CHANGE, replica, "")
    slow.click()
    page.js(TYPE, page.one("#requests input"), f"{rows[5]['rid']} chat")
    page.says("#requests .panel-head", "of the newest")
    assert rows[5]["rid"] in rids(page)
    page.js(CHANGE, outcome, "shed")
    page.says("#requests .notice", f"None of the last {len(rows)} requests matches.")


def test_kv_transfers_are_bars_as_wide_as_their_rates(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/disaggregated/?snapshot=1")
    state = served.fleets["disaggregated"].state
    assert page.text(".group h3").split() == ["Prefill", "2", "Decode", "2"]
    widths = [each.size["width"] for each in page.all(".rate-bar")]
    rates = sorted((link["bytes_per_s"] for link in state["links"]), reverse=True)
    assert len(rates) == 4
    assert [width / max(widths) for width in widths] == pytest.approx([rate / max(rates) for rate in rates], abs=0.01)
    page.all(".requests tbody tr")[0].click()
    page.says("#why .sentence", "handing the prompt over costs less")
    page.says("#why .sentence", "113 pages (41 MB) were handed over")
    ways = [each for each in page.text("#why .bar-name strong").split("\n") if each]  # those not behind "details"
    assert ways == ["handed over", "in one place"]


def test_the_focus_stays_where_it_is_when_news_come(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/live/")
    page.says(".link", "live")
    for selector in ('.cell[tabindex="0"]', "#requests select", ".tile"):
        page.js("document.querySelector(arguments[0]).focus()", selector)
        at = page.js("return document.activeElement")
        served.tick("live")
        newest = served.fleets["live"].state["requests"][0]["rid"]
        page.until(lambda: rids(page)[0] == newest, f"{newest} at the top")  # noqa: B023
        assert page.js("return document.activeElement === arguments[0]", at), f"{selector} has lost the focus"


def test_no_line_moves_while_the_focus_is_in_the_list(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/live/")
    page.says(".link", "live")
    before = rids(page)
    page.js("document.querySelector('#requests [data-rid]').focus()")
    served.tick("live")
    page.says("#requests .news", "1 new")
    assert rids(page) == before
    page.one("#requests .news").click()
    newest = served.fleets["live"].state["requests"][0]["rid"]
    page.until(lambda: rids(page)[0] == newest, f"{newest} at the top")
    assert page.all("#requests .news") == []


def test_the_strip_names_what_is_wrong_and_leads_to_it(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/unified/?snapshot=1")
    assert page.text(".health strong") == "All well"
    page.open(f"{served.url}/burning/?snapshot=1")
    page.says(".health.warning", "Warning 45 % of the requests miss the ITL objective of 100 ms.")
    assert page.js("return document.title").startswith("! 45 % of the requests miss")
    assert page.one(".health a").get_attribute("href") == f"{served.url}/burning/runbook#itlobjectiveburn"
    first, second = page.all(".health .finding")  # the worst first; what is pending is told too
    assert "Pending 6 % of the requests are refused" in " ".join(second.text.split())
    first.find_element(By.TAG_NAME, "button").click()
    page.says("#chart h2", "ITL")
    assert page.all('.tile.warning[aria-pressed="true"]') != []
    page.open(f"{served.url}/many/?snapshot=1")
    page.says(".health.critical", "): CUDA error: an illegal memory access was encountered.")
    page.one(".health button").click()
    sick = next(each["id"] for each in served.fleets["many"].state["replicas"] if each["state"] == "unhealthy")
    page.until(lambda: page.one("#tab-replica").get_attribute("aria-selected") == "true", "the tab of the replica")
    assert sick.partition("#")[2] in page.driver.current_url


def test_the_strip_is_not_green_with_fewer_than_wanted_or_something_pending_and_tells_who_died(
    page: Page, served: FakeObservatory
) -> None:
    served.fleets["short"] = fleet = FakeFleet(unified=3, requests_per_tick=4, ticks=8)
    dies = min(fleet.roles)
    fleet.kill(dies)
    fleet.tick()
    page.open(f"{served.url}/short/?snapshot=1")
    page.says(".health.warning strong", "2 of 3 replicas ready")
    page.says(".health .events li.bad", f"replica 1 ({dies.partition('#')[2]}) is lost; ")
    page.one(f'#fleet [data-ended="{dies}"]').click()
    page.says("#replica .log-lines, #replica h3", "Log and actions")
    fleet.roles[f"{dies}2"] = "unified"
    fleet.tick()
    fleet.state["alerts"] = [SHED | {"since": fleet.state["time"] - 20}]
    page.open(f"{served.url}/short/?snapshot=1")
    page.says(".health.warning strong", "Something may be wrong")
    assert page.axe() == []


def test_the_strip_tells_three_things_and_how_many_ready_and_the_others_on_demand(
    page: Page, served: FakeObservatory
) -> None:
    served.fleets["worse"] = fleet = FakeFleet(unified=3, requests_per_tick=4, ticks=8)
    fleet.kill(min(fleet.roles))
    fleet.tick()
    since = {"since": fleet.state["time"] - 20}
    fleet.state["alerts"] = [SHED | since | {"state": "firing", "name": f"Shed{number}"} for number in range(5)]
    page.open(f"{served.url}/worse/?snapshot=1")
    page.says(".health", "2 of 3 replicas ready")
    page.says("#fleet .panel-head", "2 of 3 ready")
    assert len(page.all(".health .finding")) == 4  # three alerts, and how many are ready
    more = page.one(".health > button")
    assert more.text == "and 2 more"
    more.click()
    page.until(lambda: len(page.all(".health .finding")) == 6, "all of them")
    assert page.axe() == []


def test_finish_and_key_are_columns_and_headings_order_the_list_by_keyboard(
    page: Page, served: FakeObservatory
) -> None:
    page.open(f"{served.url}/eight/?snapshot=1")
    rows = {row["rid"]: row for row in served.fleets["eight"].state["requests"]}
    for name in ("finish", "caller"):
        kind = "key" if name == "caller" else name
        cells = page.js(f"return [...document.querySelectorAll('td.c-{kind}')].map((each) => each.innerText)")
        assert cells == [rows[rid][name] or "–" for rid in rids(page)]
    head = next(each for each in page.all("#requests th button") if each.text == "finish")
    page.js("arguments[0].focus()", head)
    press(page, Keys.ENTER)
    page.until(lambda: rows[rids(page)[0]]["finish"] == "length", "answers that reached their limit")
    press(page, " ")
    page.until(lambda: rows[rids(page)[0]]["finish"] == "stop", "answers that ended by themselves")
    assert page.text(".link") == "snapshot"  # Space was the heading's, and froze nothing
    assert len(page.all("#requests th button")) == 10


def test_tiles_show_the_figures_and_open_their_chart(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/burning/?snapshot=1")
    figures = served.fleets["burning"].state["figures"]
    names = ["TTFT p50", "ITL p50", "Output", "Cache hit", "Errors", "Queue", "KV in use, max"]
    assert page.text(".tile .name").splitlines() == names
    assert "NaN" not in page.text(".tile")
    itl = page.all(".tile")[1]
    assert itl.get_attribute("class") == "tile warning"
    assert "".join(itl.text.split()).startswith(f"ITLp50{figures[1]['value'] * 1e3:.3g}ms")
    itl.click()
    legend = [" ".join(each.text.split()) for each in page.all("#chart .legend li")]
    assert [each.split()[0] for each in legend] == ["now", "p50", "p95", "p99", "objective"]
    assert legend[-1] == "objective 100 ms"
    paths = page.js("return [...document.querySelectorAll('#chart .curve')].map((each) => each.getBBox().width)")
    assert len(paths) == 3
    assert min(paths) > 300  # 120 of 300 s are known
    middle = "const it = arguments[0].getBoundingClientRect(); return [it.left + it.width - 128, it.top + 60]"
    left, top = page.js(middle, page.one("#chart svg"))
    page.command("Input.dispatchMouseEvent", type="mouseMoved", x=left, y=top)
    page.says(".tile .more", "s ago")  # all tiles are read at the same moment
    page.until(lambda: not page.text("#chart .legend").startswith("now"), "the time that is pointed at")
    page.command("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    served.calls.clear()
    next(each for each in page.all("#chart .choice button") if each.text == "1 h").click()
    page.until(lambda: "/burning/api/history?span_s=3600" in served.calls, "the hour to be asked for")
    page.until(lambda: page.all('#chart [aria-pressed="true"]')[0].text == "1 h", "the hour")
    itl.click()
    page.until(lambda: page.all("#chart") == [], "the chart to close")


def test_many_replicas_are_a_grid_with_the_worst_first(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/many/?snapshot=1")
    cells = page.all(".heat-cell")
    assert len(cells) == 48
    assert page.all(".card") == []
    assert "unhealthy" in (cells[0].get_attribute("aria-label") or "")
    assert len(page.all('.heat-cell[tabindex="0"]')) == 1
    page.js("arguments[0].focus()", cells[0])
    page.says("#fleet .detail", "unhealthy · CUDA error")
    press(page, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ENTER)
    wanted = cells[1].get_attribute("data-replica") or ""
    page.until(lambda: "heat-cell accepting chosen" in str(cells[1].get_attribute("class")), "the second to be chosen")
    assert wanted.partition("#")[2] in page.driver.current_url


def test_replicas_of_a_large_fleet_stand_with_their_node_and_the_worst_node_is_first(
    page: Page, served: FakeObservatory
) -> None:
    page.open(f"{served.url}/many/?snapshot=1")
    sick = next(each for each in served.fleets["many"].state["replicas"] if each["state"] == "unhealthy")
    [other] = {"10.0.3.17", "10.0.3.18"} - {sick["host"]}
    said = [each.find_element(By.CSS_SELECTOR, ".note").text for each in page.all(".heat-node")]
    assert said == [f"{sick['host']} 23 of 24 ready", f"{other} 24 of 24 ready"]
    page.js("document.querySelector('.heat-cell').focus()")
    rows = "return [...document.querySelectorAll('.heat-node')].indexOf(document.activeElement.closest('.heat-node'))"
    press(page, *[Keys.ARROW_DOWN] * 2)
    page.until(lambda: page.js(rows) == 1, "the other node, below")
    press(page, *[Keys.ARROW_UP] * 2)
    page.until(lambda: page.js(rows) == 0, "the first one again")


def test_replicas_have_names_that_people_can_say_and_their_last_minutes(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/eight/?snapshot=1")
    replicas = served.fleets["eight"].state["replicas"]
    assert sorted(page.text(".card-name").splitlines()) == [f"replica {number}" for number in range(1, 9)]
    for each in replicas:
        page.says(f'[data-replica="{each["id"]}"]', f"{each['name']} accepting on {each['host']}")
    assert len(page.all(".card .spark")) == 3 * 8
    drawn = page.js("return document.querySelector('.card .spark path:last-of-type').getBBox().width")
    assert drawn > 250  # of 300 s: those before the page was opened, too
    assert page.all("#river .river-lane")[0].text.startswith("replica 1")
    assert set(page.text("td.c-replica").split("\n")) <= {each["name"] for each in replicas}


@pytest.fixture
def first_visit(page: Page, served: FakeObservatory) -> Iterator[Page]:
    """The tab of a browser that has not been shown the tour."""
    page.open(f"{served.url}/live/")
    page.js("localStorage.removeItem('manta-toured')")
    page.command("Page.removeScriptToEvaluateOnNewDocument", identifier=page.toured)
    yield page
    page.hide_tour()


def test_the_tour_has_three_steps_once_and_is_away_while_something_is_critical(
    first_visit: Page, served: FakeObservatory
) -> None:
    page = first_visit
    page.open(f"{served.url}/many/")
    page.says(".health", "CUDA error")
    assert page.all(".tour") == []
    page.open(f"{served.url}/live/")
    page.says(".tour", "Trouble comes first 1 of 3")
    assert page.axe() == []
    press(page, Keys.TAB, Keys.TAB, Keys.TAB, Keys.ENTER)  # the link that skips, "Leave", "Next"
    page.says(".tour", "Each bar is a request 2 of 3")
    assert page.all("#river[data-toured]") != []
    press(page, Keys.ENTER)
    page.says(".tour", "3 of 3")
    press(page, Keys.ESCAPE)
    page.until(lambda: page.all(".tour, [data-toured]") == [], "the tour to go")
    page.open(f"{served.url}/live/")
    page.says(".link", "live")
    assert page.all(".tour") == []


@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_the_tour_covers_nothing_that_it_points_to(first_visit: Page, served: FakeObservatory, width: int) -> None:
    first_visit.open(f"{served.url}/live/", width=width, height=800)
    for step, selector in enumerate((".health", "#river", ".play"), 1):
        first_visit.says(".tour", f"{step} of 3")
        assert first_visit.js(LAID_OUT, selector) == [True, False]
        first_visit.one(".tour .sure").click()


def test_a_thousand_replicas_fit_on_one_screen(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/thousand/?snapshot=1", width=1440, height=900)
    assert len(page.all(".heat-cell")) == 1000
    assert page.js("return document.querySelector('.heat').getBoundingClientRect().height") < 700


def test_keys_do_what_their_list_says(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/keys/")
    page.says(".link", "live")
    first, second = rids(page)[:2]
    press(page, "jj")
    page.says("#why", second)
    press(page, "k")
    page.says("#why", first)
    press(page, Keys.ENTER)
    assert page.js("return document.activeElement.id") == "pane-why"
    press(page, Keys.ESCAPE)
    page.until(lambda: page.all("#requests tr.chosen") == [], "nothing to be chosen")
    press(page, "r")
    page.until(lambda: page.one("#tab-replica").get_attribute("aria-selected") == "true", "the tab of the replica")
    press(page, " ")
    page.says(".link", "frozen")
    served.tick("keys")
    newest = served.fleets["keys"].state["requests"][0]["rid"]
    asked = len(served.calls)
    page.until(lambda: len(served.calls) > asked + 1, "polls that a pause does not end")
    assert newest not in rids(page)
    press(page, " ")
    page.until(lambda: rids(page)[0] == newest, f"{newest} at the top")
    press(page, "/", "j")
    assert page.one("#requests input").get_attribute("value") == "j"  # typed, not obeyed
    press(page, Keys.BACKSPACE, Keys.ESCAPE, "?")
    page.says("dialog[open]", "next and previous request")
    assert page.axe() == []
    page.one("dialog input").click()
    press(page, Keys.ESCAPE)
    page.until(lambda: page.all("dialog") == [], "the list of keys to close")
    press(page, "j")
    assert page.all("#requests tr.chosen") == []
    page.js("localStorage.removeItem('manta-keys-off')")


def test_axe_finds_nothing_serious_on_any_screen(page: Page, served: FakeObservatory) -> None:
    newest = served.fleets["disaggregated"].state["requests"][0]["rid"]
    replica = served.fleets["unified"].state["replicas"][0]["id"].replace("#", "%23")
    screens = (
        f"disaggregated/?snapshot=1#request={newest}", f"unified/?snapshot=1#replica={replica}&tab=replica",
        "burning/?snapshot=1#tile=itl", "many/?snapshot=1", "idle/?snapshot=1", "empty/?snapshot=1",
    )  # fmt: skip
    found = {}
    for screen, theme in zip(screens, ("light", "dark") * 3, strict=True):
        page.open(f"{served.url}/{screen}", theme=theme)
        found[screen] = page.axe()
    assert found == {screen: [] for screen in screens}
