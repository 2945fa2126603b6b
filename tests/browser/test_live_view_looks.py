"""How the live view looks: it fits narrow screens, its texts can be read in both themes, and it asks no other host."""

import pytest

from tests.browser.chromium import Page
from tests.fake_observatory import FakeObservatory

pytestmark = pytest.mark.browser

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


def newest(served: FakeObservatory, name: str) -> str:
    return str(served.fleets[name].state["requests"][0]["rid"])


@pytest.mark.parametrize("width", [360, 700, 1440])
@pytest.mark.parametrize("fleet", ["disaggregated", "eight"])
def test_no_width_needs_a_scroll_sideways(page: Page, served: FakeObservatory, fleet: str, width: int) -> None:
    page.open(f"{served.url}/{fleet}/?snapshot=1#request={newest(served, fleet)}", width=width)
    wide, seen = page.js("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide == seen <= width
    columns = len(set(page.js("return [...document.querySelectorAll('.column')].map((each) => each.offsetLeft)")))
    assert columns == (2 if width == 1440 else 1)
    page.picture(f"{fleet}_{width}")


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


def test_the_chart_is_as_wide_as_its_panel_and_has_its_axes(page: Page, served: FakeObservatory) -> None:
    for width in (1440, 400):
        page.open(f"{served.url}/eight/?snapshot=1", width=width)
        sizes = page.js("""const [place, plot] = [".chart", ".uplot"].map(
            (each) => document.querySelector(each).getBoundingClientRect());
            return [place.width, plot.width, place.height, plot.height]""")
        assert sizes[1] == pytest.approx(sizes[0], abs=1)
        assert sizes[3] <= sizes[2]
    assert len(page.all("#history .legend li")) == 8
