"""One Chromium and one fake observatory for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Page, open_chromium
from tests.fake_fleet import FakeFleet
from tests.fake_observatory import FakeObservatory, fleets, states


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = open_chromium(tmp_path_factory.mktemp("chromium"))
    yield page
    page.close()


@pytest.fixture(scope="session")
def served() -> Iterator[FakeObservatory]:
    names = ("live", "lost", "locked", "treeless", "leaving", "hidden", "keys")
    own = {name: FakeFleet(unified=2, ticks=8) for name in names}
    starting = FakeFleet(unified=2)
    starting.become_starting()
    thousand = FakeFleet(unified=1000, requests_per_tick=20, ticks=2, sick=3)
    server = FakeObservatory(fleets() | states() | own | {"starting": starting, "thousand": thousand})
    yield server
    server.close()


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """The tab; nothing may have been logged as an error, unless the test has taken it with `complaints`."""
    browser.driver.get("about:blank")  # the page of a test before this one asks a server that may have gone since
    browser.complaints()
    yield browser
    assert browser.complaints() == []
