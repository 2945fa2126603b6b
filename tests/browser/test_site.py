"""`make site` as CI has it: built strictly, and read without a network or a server."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from deployments.places import ROOT
from tests.browser.chromium import open_chromium
from tests.programs import unavailable

pytestmark = [pytest.mark.slow, pytest.mark.browser]
LOADED = re.compile(r"<(?:script|img|link|source)\b[^>]*?\b(?:src|href)=\"?([^\s\">]+)")
LINKED = re.compile(r"<a\b[^>]*?\bhref=\"?([^\s\">]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("material") is None:
        unavailable("mkdocs-material is not installed: `make install-test`")
    made = subprocess.run(
        # what it would install first is what this Python has
        ["make", "--no-print-directory", "-o", ".venv/.installed-site", f"BIN={Path(sys.executable).parent}", "site"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env={name: value for name, value in os.environ.items() if name != "MAKEFLAGS"},  # of a `make -j` around this
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    assert made.stderr == ""
    return Path(shutil.copytree(ROOT / "site", tmp_path_factory.mktemp("site") / "site"))


def test_every_link_leads_to_a_file_of_the_site_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {page: page.read_text() for page in site.rglob("*.html") if page.name != "404.html"}  # a server's
    assert {site / "index.html", site / "docs" / "tutorial.html"} <= pages.keys()
    loaded = {(page, each) for page, text in pages.items() for each in LOADED.findall(text)}
    linked = {(page, each) for page, text in pages.items() for each in LINKED.findall(text)}
    assert len(loaded) > len(pages)
    assert {each for _, each in loaded if urlsplit(each).netloc} == set()
    inside = {(page, unquote(urlsplit(each).path)) for page, each in loaded | linked if not urlsplit(each).netloc}
    assert {(str(page), path) for page, path in inside if path and not (page.parent / path).exists()} == set()


def test_a_word_is_found_from_a_folder_without_a_server(site: Path, tmp_path: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert any("quarantined" in each["text"] for each in index["docs"])
    page = open_chromium(tmp_path / "chromium")
    try:
        page.resize(780, 600)  # where the search is behind a button
        page.driver.get(f"file://{site}/index.html")
        page.one("label.md-header__button[for=__search]").click()
        page.until(lambda: page.one("input[name=query]").is_displayed(), "the field of the search")
        page.one("input[name=query]").send_keys("quarantined")
        page.until(lambda: page.all(".md-search-result__item"), "a document that has the word")
        assert "docs/runbook.html" in (page.one(".md-search-result__link").get_attribute("href") or "")
        assert page.complaints() == []
    finally:
        page.close()
