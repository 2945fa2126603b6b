"""How the live view looks: it fits narrow screens, its texts can be read in both themes, and it asks no other host."""

import pytest

from tests.browser.chromium import Page
from tests.fake_fleet import FakeFleet
from tests.fake_observatory import FakeObservatory

pytestmark = [pytest.mark.browser, pytest.mark.slow]

# WCAG 2's contrast of every text with what lies behind it: [ratio, text, class], the worst first
CONTRASTS = """
const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
};
const over = (top, below) => [0, 1, 2].map((at) => top[at] * top[3] + below[at] * (1 - top[3]));
const behind = (at) => {
    if (!at) return [255, 255, 255];
    const colour = rgba(getComputedStyle(at).backgroundColor);
    return colour[3] === 1 ? colour.slice(0, 3) : over(colour, behind(at.parentElement));
};
const luminance = (rgb) => rgb.map((each) => each / 255)
    .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4)
    .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
    const node = walker.currentNode, at = node.parentElement, style = getComputedStyle(at);
    if (!node.data.trim() || !at.getClientRects().length || style.visibility === "hidden") continue;
    let [ink, ground] = [style.color, null];
    if (at.tagName === "text") {
        const fill = getComputedStyle(at.parentElement.querySelector("rect")).fill;
        const shown = fill.startsWith("url") ? getComputedStyle(document.querySelector(".hatch-line")).fill : fill;
        [ink, ground] = [style.fill, rgba(shown).slice(0, 3)];
    } else if (at.tagName === "title") continue;
    ground ??= behind(at);
    const [one, two] = [luminance(over(rgba(ink), ground)), luminance(ground)].sort((a, b) => b - a);
    found.push([(one + 0.05) / (two + 0.05), node.data.trim().slice(0, 40), at.getAttribute("class") ?? at.tagName]);
}
return found.sort((a, b) => a[0] - b[0]);
"""


AT_ONCE = {  # state of docs/observability.md -> class of the strip, its words, and what else is seen then
    "idle": ("well", "All well 2 replicas ready", ".tile.idle"),
    "loaded": ("well", "All well 2 replicas ready", ".replica-spark"),
    "killed": ("warning", "2 of 3 replicas ready", ".river-lane.dead"),
    "stopped": ("critical", "is silent (replica 1, ", ".card.silent:first-child"),
    "overloaded": ("warning", "miss the TTFT objective of 2 s", ".tile.warning:first-child"),
    "disaggregated": ("well", "All well 4 replicas ready", ".transfers"),
    "nodes": ("well", "All well 6 replicas ready", ".card .node"),
}


def newest(served: FakeObservatory, name: str) -> str:
    return str(served.fleets[name].state["requests"][0]["rid"])


@pytest.mark.parametrize("width", [360, 1024, 1440])
@pytest.mark.parametrize("fleet", ["disaggregated", "eight"])
def test_no_width_needs_a_scroll_sideways(page: Page, served: FakeObservatory, fleet: str, width: int) -> None:
    page.open(f"{served.url}/{fleet}/?snapshot=1#request={newest(served, fleet)}", width=width)
    wide, seen = page.js("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide == seen <= width
    box = "return document.querySelector(arguments[0]).getBoundingClientRect()"
    tiles, side, column = (page.js(box, each) for each in (".tiles", ".side", ".column"))
    if width == 1440:
        assert side["left"] > column["right"]
        assert side["top"] == column["top"]
    else:
        assert tiles["bottom"] < column["top"] < column["bottom"] < side["top"]  # what an operator looks at is first
    page.picture(f"{fleet}_{width}")


@pytest.mark.parametrize("state", AT_ONCE)
def test_each_state_is_told_at_once_at_any_width_and_axe_finds_nothing(
    page: Page, served: FakeObservatory, state: str
) -> None:
    level, words, seen = AT_ONCE[state]
    for width, theme in ((1440, "light"), (390, "dark")):
        page.open(f"{served.url}/{state}/?snapshot=1", width=width, height=900, theme=theme)
        page.says(f".health.{level}", words)
        strip = page.js("return document.querySelector('.health').getBoundingClientRect().bottom")
        assert strip < 300, "the first thing that is seen"
        assert page.all(seen) != []
        assert page.axe() == []
        page.picture(f"{state}_{width}_{theme}")


@pytest.mark.parametrize("width", [1024, 1101, 1279, 1280, 1440, 1920])
def test_no_word_of_a_tile_is_cut_where_there_is_a_desktop(page: Page, served: FakeObservatory, width: int) -> None:
    """The longest words that there are: of an overload whose requests wait for room, with p95 beyond its histogram."""
    served.fleets["worst"] = worst = FakeFleet(unified=2, requests_per_tick=3, ticks=40, overloaded=True, slow=True)
    for figure in worst.state["figures"]:
        if figure["objective"] is not None:
            figure["more"] = {"p50": 2.45, "p95": 60.0, "p99": 60.0}
            figure |= {"value": 2.45, "most": 60.0, "met": 0.87}
        if figure["name"] == "kv":
            figure["more"] |= {"mean": 0.953, "without_room": 128}
    page.open(f"{served.url}/worst/?snapshot=1", width=width)
    page.says(".tile .more", "87 % within 2.00 s · p95 > 60.0 s · p99 > 60.0 s")
    page.says(".tile .more", "128 wait for room")
    cut = """return [...document.querySelectorAll(".tile .more, .tile .more > *")]
        .filter((each) => each.offsetWidth && (each.scrollWidth > each.clientWidth
            || each.scrollHeight > each.clientHeight
            || each.getBoundingClientRect().right > each.closest(".tile").getBoundingClientRect().right))
        .map((each) => each.innerText)"""
    assert page.js(cut) == []
    page.picture(f"worst_{width}")


def test_on_a_phone_a_chosen_request_scrolls_to_its_answer(page: Page, served: FakeObservatory) -> None:
    page.open(f"{served.url}/unified/?snapshot=1", width=390, height=800)
    page.js("document.querySelector('#requests [data-rid]').click()")
    top = "return Math.round(document.getElementById('side').getBoundingClientRect().top)"
    page.until(lambda: 0 <= page.js(top) < 20, "the answer at the top")
    page.js("window.scrollTo(0, 0)")
    page.one("#to-try").click()
    page.until(lambda: 0 <= page.js(top) < 20, "the playground at the top")
    page.until(lambda: page.js("return document.activeElement.closest('#pane-try') != null"), "the focus in it")
    small = page.js("""return [...document.querySelectorAll("button, select, input:not([type=checkbox])")]
        .filter((each) => each.offsetHeight > 0 && each.offsetHeight < 24).map((each) => each.className || each.id)""")
    assert small == []  # WCAG 2.2's least size of a target


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_the_contrast_that_wcag_aa_asks_for(page: Page, served: FakeObservatory, theme: str) -> None:
    page.open(f"{served.url}/disaggregated/?snapshot=1#request={newest(served, 'disaggregated')}", theme=theme)
    contrasts = page.js(CONTRASTS)
    assert len(contrasts) > 200
    assert [each for each in contrasts if each[0] < 4.5] == []
    page.picture(f"disaggregated_{theme}")


def test_the_theme_can_be_chosen_and_is_kept(page: Page, served: FakeObservatory) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    page.open(f"{served.url}/unified/?snapshot=1", theme="light")
    light = page.js(ground)
    button = page.one("#theme")
    button.click()
    page.says("#theme", "Theme: light")
    button.click()
    page.says("#theme", "Theme: dark")
    dark = page.js(ground)
    assert dark != light
    page.open(f"{served.url}/unified/?snapshot=1", theme="light")
    assert page.js(ground) == dark  # though the system prefers light
    page.picture("unified_dark")
    page.one("#theme").click()
    page.says("#theme", "Theme: system")
    assert page.js(ground) == light


def test_no_other_host_is_asked_and_no_inline_code_needed(page: Page, served: FakeObservatory) -> None:
    """The fake observatory's policy forbids both; a breach would be logged."""
    page.open(f"{served.url}/eight/#request={newest(served, 'eight')}")
    asked = page.js("return performance.getEntriesByType('resource').map((each) => each.name)")
    assert len(asked) > 15
    assert [each for each in asked if not each.startswith(f"{served.url}/eight/")] == []
    assert page.complaints() == []
