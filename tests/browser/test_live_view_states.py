"""The live view where something is missing: replicas, requests, the connection, the key, an answer."""

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from tests.browser.chromium import Page, rids
from tests.fake_fleet import FakeFleet
from tests.fake_observatory import KEY, FakeObservatory

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_without_a_router_or_replicas_it_says_what_is_waited_for(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/empty/")
    page.says("#fleet .notice", "No router has answered yet.")
    page.says(".health.waiting", "No replica is ready yet")
    assert page.text(".tile .value").splitlines()[0] == "–"
    assert page.all("#cache") == []
    page.open(f"{served.url}/starting/")
    page.says("#fleet .notice", "No replica takes requests now: 2 starting. A starting replica loads the model's")
    assert len(page.all(".card.starting")) == 2
    fleet = served.fleets["starting"]
    replicas = fleet.state["replicas"]
    fleet.state["replicas"] = [replicas[0], replicas[1] | {"node": "", "host": ""}]  # Serve has not placed it yet
    page.open(f"{served.url}/starting/")
    assert page.text(".card .node").splitlines() == [each["id"].partition("#")[2] for each in replicas]  # one host


def test_without_requests_it_gives_a_line_that_sends_one(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/idle/")
    line = page.text(".curl")
    assert line.startswith(f"curl {served.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{")
    assert served.fleets["idle"].state["model"] in line
    page.one("#requests button").click()
    page.until(lambda: "Cop" in page.text("#requests [role=status]"), "a word on what became of the copy")
    page.js("Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # as over HTTP from another machine
    page.one("#requests button").click()
    page.says("#requests [role=status]", "Copying is not allowed here: mark the text.")


def test_a_lost_connection_is_told_and_mended(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/lost/")
    page.says(".link", "live")
    before = rids(page)
    served.drop("lost")
    page.says(".banner", "Connection lost")
    page.says(".link", "connection lost")
    assert "s old. Next try in" in page.text(".banner")
    assert page.all("main.old") != []
    assert rids(page) == before  # what was known stays
    assert page.text(".banner button") == "Try now"
    served.restore("lost")
    page.js("document.querySelector('.banner button')?.click()")  # it may have tried by itself just now
    page.until(lambda: not page.all(".banner"), "the banner to go")
    page.says(".link", "live")
    served.tick("lost")
    page.until(lambda: rids(page) != before, "news over the mended connection")
    assert all("503" in each for each in page.complaints())  # of the tries meanwhile


def test_without_the_key_it_leads_to_the_login_and_back(page: Page, served: FakeObservatory) -> None:
    served.locked.add("locked")
    page.driver.get(f"{served.url}/locked/")
    page.until(lambda: page.driver.current_url.endswith("/locked/login"), "the login page")
    assert all("401" in each for each in page.complaints())
    page.picture("login")
    field = page.one("#key")
    assert page.driver.find_element(By.CSS_SELECTOR, "label[for=key]").text == "Admin key"
    field.send_keys(KEY)
    field.submit()
    page.until(lambda: len(page.all(".card")) == 2, "the live view")
    served.locked.discard("locked")


def test_no_answer_about_the_cache_is_told_with_a_way_to_ask_again(page: Page, served: FakeObservatory) -> None:
    served.no_tree.add("treeless")
    page.open(f"{served.url}/treeless/")
    page.says("#cache .notice", "This replica is gone.")
    assert len(page.all(".card")) == 2  # the rest is there
    served.no_tree.discard("treeless")
    page.one("#cache .notice button").click()
    page.until(lambda: len(page.all(".cell")) > 60, "the icicle")
    assert all("404" in each for each in page.complaints())


def test_a_request_that_no_router_keeps_is_told(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/unified/#request=long-gone")
    page.says("#why .notice", "This request is no longer kept.")
    assert all("404" in each for each in page.complaints())


def test_a_snapshot_asks_once(page: Page, served: FakeObservatory) -> None:
    page.driver.get("about:blank")  # what was open before asks no more
    served.calls.clear()
    page.open(f"{served.url}/unified/?snapshot=1")
    page.says(".link", "snapshot")
    asked = [each.partition("?")[0] for each in served.calls if "/api/" in each]
    assert asked == ["/unified/api/state", "/unified/api/tree"]


def test_a_filter_by_a_replica_that_leaves_is_taken_back_and_told(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/leaving/")
    page.says(".link", "live")
    fleet = served.fleets["leaving"]
    stays, leaves = fleet.roles
    page.one(f'#requests option[value="{leaves}"]').click()
    of_it = [row["rid"] for row in fleet.state["requests"] if row["replica"] == leaves]
    page.until(lambda: rids(page) == of_it, "the requests of one replica")
    del fleet.roles[leaves]
    served.tick("leaving")
    page.says("#requests [role=status]", "replica 2 has left: requests of all replicas are shown")
    every = [row["rid"] for row in fleet.state["requests"]]
    assert rids(page) == every
    assert page.js("return [...document.querySelectorAll('#requests select')].map((each) => each.value)") == ["", ""]
    page.one(f'#requests option[value="{stays}"]').click()
    page.until(lambda: page.text("#requests [role=status]") == "", "the word to go with the next choice")


def test_a_hidden_page_asks_nothing_and_a_page_shown_again_is_up_to_date(page: Page, served: FakeObservatory) -> None:
    """A browser opens six connections to a server, for all its tabs together: hidden ones must not use them up."""

    def asked() -> int:
        return len([each for each in served.calls if each.startswith("/hidden/api/")])

    page.open(f"{served.url}/hidden/")
    page.says(".link", "live")
    mine = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    page.until(lambda: page.js("return document.visibilityState") == "visible", "the other tab to be in front")
    before, beside = asked(), len(served.calls)
    page.driver.get(f"{served.url}/live/")
    page.until(lambda: len([each for each in served.calls[beside:] if "/live/api/state" in each]) >= 4, "four polls")
    assert asked() <= before + 1  # one may have been under way
    served.tick("hidden")
    page.driver.close()
    page.driver.switch_to.window(mine)
    newest = served.fleets["hidden"].state["requests"][0]["rid"]
    page.until(lambda: rids(page)[0] == newest, "what came meanwhile")
    page.says(".link", "live")


def test_a_list_that_a_filter_took_away_under_the_pointer_brings_what_is_new(
    page: Page, served: FakeObservatory
) -> None:
    page.open(f"{served.url}/live/")
    page.says(".link", "live")
    fleet = served.fleets["live"]
    ActionChains(page.driver).move_to_element(page.all("#requests tbody tr")[1]).perform()  # nothing moves below it
    newest = max(int(row["rid"].removeprefix("req-")) for row in fleet.state["requests"])
    field = page.one("#requests input[type=search]")
    field.send_keys(f"req-{newest + 1}")
    page.says("#requests .notice", "matches.")
    served.tick("live")
    page.until(lambda: rids(page) == [f"req-{newest + 1}"], "the request that came then")


def test_a_long_conversation_scrolls_in_its_place_and_makes_the_page_no_longer(
    page: Page, served: FakeObservatory
) -> None:
    page.open(f"{served.url}/live/")
    before, after = page.js("""
        const tall = document.createElement("div"), root = document.documentElement, before = root.scrollHeight;
        tall.style.cssText = "flex: none; height: 9000px";
        document.querySelector(".play").prepend(tall);
        return [before, root.scrollHeight];""")
    assert after == before


def test_tenants_and_batches_have_a_panel_where_there_are_any(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/idle/?snapshot=1")
    assert page.all("#tenants") == []
    names = ("acme", "globex", "umbrella")
    served.fleets["tenants"] = FakeFleet(unified=2, requests_per_tick=3, ticks=90, tenants=names)
    page.open(f"{served.url}/tenants/?snapshot=1")
    *tenants, batch = [row.text.split() for row in page.all("#tenants tbody tr")]
    assert {each[0] for each in tenants} == set(names)
    shares = [int(each[3]) for each in tenants]  # name, waiting, running, share, %, tokens
    assert sum(shares) in range(99, 102)
    assert shares == sorted(shares, reverse=True)
    assert batch[:8] == ["batch_6f1d2c", "in", "progress", "25", "%", "400", "10", "23"]
