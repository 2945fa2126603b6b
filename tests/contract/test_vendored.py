"""What the live view's page is made of: vendored files as they were published, small, and asking no other host."""

import hashlib
import pathlib
import re

UI = pathlib.Path(__file__).parents[2] / "dashboards" / "ui"
VENDOR = UI / "vendor"
MOST_BYTES = 350_000  # all that a browser loads, before compression
RUNBOOK = "runbook.html"  # written from docs/runbook.md, whose commands name hosts
OWN = sorted(path for path in UI.glob("*") if path.suffix in (".js", ".css", ".html") and path.name != RUNBOOK)


def listed() -> dict[str, str]:
    """Path below vendor/ -> sha256, out of its README's table."""
    text = (VENDOR / "README.md").read_text()
    return dict(re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \| `([0-9a-f]{64})` \|$", text, flags=re.MULTILINE))


def test_each_vendored_file_is_the_one_that_was_published() -> None:
    files = {path.relative_to(VENDOR).as_posix(): path for path in VENDOR.rglob("*") if path.is_file()}
    del files["README.md"]
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == listed()


def test_each_library_comes_with_its_licence() -> None:
    assert all((folder / "LICENSE").is_file() for folder in VENDOR.iterdir() if folder.is_dir())


def test_all_that_a_browser_loads_is_small() -> None:
    loaded = [path for path in UI.rglob("*") if path.suffix in (".js", ".css", ".html", ".svg", ".woff2")]
    assert sum(path.stat().st_size for path in loaded) < MOST_BYTES


def test_our_files_name_no_other_host_and_never_write_markup() -> None:
    for path in OWN:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        found = re.findall(r"https?://|innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|\bsrc=\"/", text)
        assert found == [], f"{path.name}: {found}"


def test_html_has_no_inline_script_or_style() -> None:
    for path in UI.glob("*.html"):
        assert re.findall(r"<style|\sstyle=|\son\w+=|<script>", path.read_text()) == [], path.name


def test_no_file_of_ours_is_long() -> None:
    assert [path.name for path in OWN if len(path.read_text().splitlines()) > 400] == []
