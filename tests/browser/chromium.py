"""Debian's headless Chromium under selenium, and what the tests of pages ask of it.

Owns:      the driver's flags, and pictures under the git-ignored ``test_artifacts/``.
Never:     lets a page reach another host than this one.
"""

import os
import pathlib
from collections.abc import Callable
from typing import Any

from axe_core_python.base import AXE_SCRIPT
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.programs import program

PICTURES = pathlib.Path(__file__).parents[2] / "test_artifacts"
FONTS = {"system-ui": "DejaVu Sans", "sans-serif": "DejaVu Sans", "monospace": "DejaVu Sans Mono"}
PATIENCE_S = 20  # machines with two cores are busy at times
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-device-scale-factor=1",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip


def open_chromium(profile: pathlib.Path) -> "Page":
    """Start the browser; skips the test where Chromium or its driver is missing."""
    options = webdriver.ChromeOptions()
    options.binary_location = program("chromium", "chromium")
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    values = dict(os.environ) | {"FONTCONFIG_FILE": str(_fonts(profile))}
    service = Service(program("chromedriver", "chromium-driver"), env=values)
    return Page(webdriver.Chrome(options=options, service=service))


def _fonts(profile: pathlib.Path) -> pathlib.Path:
    """Write fontconfig's settings: the machine's own, with FONTS preferred."""
    lines = ["<include ignore_missing='yes'>/etc/fonts/fonts.conf</include>"]
    lines.append(f"<cachedir>{profile / 'fonts'}</cachedir>")
    lines += [
        f"<alias binding='same'><family>{name}</family><prefer><family>{font}</family></prefer></alias>"
        for name, font in FONTS.items()
    ]
    lines.append("<selectfont><rejectfont><glob>*MathTeXGyre*</glob></rejectfont></selectfont>")  # it claims to be Sans
    profile.mkdir(parents=True, exist_ok=True)
    path = profile / "fonts.conf"
    path.write_text(f"<?xml version='1.0'?><fontconfig>{''.join(lines)}</fontconfig>")
    return path


class Page:
    """One tab."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.hide_tour()

    def hide_tour(self) -> None:
        """Have no page show the tour of a first visit, until the script ``toured`` is removed: tests of its own do."""
        source = "location.protocol === 'http:' && localStorage.setItem('manta-toured', '1')"
        self.toured: str = self.command("Page.addScriptToEvaluateOnNewDocument", source=source)["identifier"]

    def open(self, url: str, *, width: int = 1440, height: int = 1000, theme: str = "light") -> None:
        """Opens ``url`` from scratch and waits until it is drawn. ``theme``: what the system prefers."""
        self.resize(width, height)
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.driver.get("about:blank")
        self.driver.get(url)
        self.until(lambda: self.js("return document.documentElement.dataset.ready"), f"{url} to be drawn")

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def command(self, name: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, arguments)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, holds: Callable[[], Any], wanted: str, *, patience_s: float = PATIENCE_S) -> Any:
        """The first true answer of ``holds``. Raises: AssertionError, with what was wanted and what is shown."""
        try:
            return WebDriverWait(self.driver, patience_s, poll_frequency=0.05).until(lambda _: holds())
        except Exception as error:
            shown = self.js("return document.body?.innerText ?? ''")[:600]
            raise AssertionError(f"waited {patience_s} s for {wanted}; the page shows:\n{shown}") from error

    def all(self, selector: str) -> list[WebElement]:
        found: list[WebElement] = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found

    def one(self, selector: str) -> WebElement:
        self.until(lambda: self.all(selector), f"an element {selector}")
        return self.all(selector)[0]

    def text(self, selector: str) -> str:
        """As it is in the document: joined words of what matches, hidden or not."""
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText).join('\\n')"
        found: str = self.js(script, selector)
        return found

    def says(self, selector: str, words: str) -> None:
        """Waits until ``words`` stand there."""
        self.until(lambda: words in " ".join(self.text(selector).split()), f"{words!r} in {selector}")

    def picture(self, name: str, folder: pathlib.Path = PICTURES) -> None:
        """The whole page as a PNG."""
        folder.mkdir(exist_ok=True)
        size = self.js("return [innerWidth, document.documentElement.scrollHeight]")
        self.resize(size[0], size[1])
        self.driver.save_screenshot(str(folder / f"{name}.png"))

    def axe(self) -> list[str]:
        """What axe-core finds on the page: rule, and the first element of it."""
        self.js(AXE_SCRIPT)
        found = self.driver.execute_async_script("axe.run({resultTypes: ['violations']}).then(arguments[0])")
        return [
            f"{each['id']} ({each['help']}): {each['nodes'][0]['html'][:160]}"
            for each in found["violations"]
        ]

    def complaints(self) -> list[str]:
        """What the page has logged as warnings or errors since the last call."""
        logged: list[dict[str, str]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [each["message"] for each in logged if each["level"] in ("WARNING", "SEVERE")]

    def close(self) -> None:
        self.driver.quit()


def rids(page: Page) -> list[str]:
    """Ids of the requests that are drawn, as they stand."""
    found: list[str] = page.js(
        "return [...document.querySelectorAll('#requests [data-rid]')].map((each) => each.dataset.rid)"
    )
    return found
