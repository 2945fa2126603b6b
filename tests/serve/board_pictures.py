"""`make board-pictures`: each board in docs/pictures as Grafana draws it, over some minutes of a Manta with users.

Owns:      Grafana's components from npm under the git-ignored ``.tools/``, bundled with tests/grafana/panels/board.jsx
           (it says what is Grafana's own there and what is not), and the pages that show a board with them.
Never:     uses @grafana/scenes: it takes a panel's code from a Grafana server, and npm has none of it.
Invariant: what is drawn was scraped by a real Prometheus from a real Manta.
"""

import functools
import http.server
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from dashboards.files import BOARD_FILES
from deployments.places import ROOT
from tests.browser.chromium import Page, open_chromium
from tests.programs import program
from tests.scraped import committed_board
from tests.serve.pictures import FOLDER, USERS, check_rest, keep, loaded
from tests.serve.prometheus import prometheus
from tests.serve.running import serving

SOURCES = ROOT / "tests" / "grafana" / "panels"
TOOLS = ROOT / ".tools" / "grafana-panels"
SHOWN_S = 180.0
ESBUILD = (
    "board.jsx", "--bundle", "--minify", "--format=iife", "--outfile=board.js", "--log-level=error",
    '--define:process.env.NODE_ENV="production"',
    *(f"--loader:.{kind}=dataurl" for kind in ("svg", "png", "ttf", "woff2")),
)  # fmt: skip
PAGE = """<!doctype html><meta charset="utf-8"><title>Board</title><link rel="stylesheet" href="board.css">
<div id="root"></div><script>window.__grafana_public_path__ = "/node_modules/@grafana/ui/dist/public/";
window.ASKED = {asked};</script><script src="board.js"></script>"""


def bundle() -> None:
    """Install Grafana's components, 420 MB, where they are not yet, and put them into one script."""
    TOOLS.mkdir(parents=True, exist_ok=True)
    wanted, installed = (SOURCES / "package.json").read_text(), TOOLS / ".installed"
    if not installed.is_file() or installed.read_text() != wanted:
        for path in (SOURCES / "package.json", SOURCES.parent / ".npmrc"):
            shutil.copy(path, TOOLS)
        install = [program("npm", "npm"), "install", "--legacy-peer-deps", "--no-package-lock", "--no-progress"]
        subprocess.run(install, cwd=TOOLS, check=True)
        icons = TOOLS / "node_modules/@grafana/ui/dist/public/build"  # they are asked for in there
        icons.unlink(missing_ok=True)
        icons.symlink_to(".", target_is_directory=True)
        installed.write_text(wanted)
    shutil.copy(SOURCES / "board.jsx", TOOLS)
    subprocess.run([TOOLS / "node_modules" / ".bin" / "esbuild", *ESBUILD], cwd=TOOLS, check=True)


class Files(http.server.SimpleHTTPRequestHandler):
    """Serves TOOLS, silently."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served() -> Iterator[str]:
    """The URL of TOOLS."""
    handler = functools.partial(Files, directory=str(TOOLS))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def draw(page: Page, uid: str, files: str, source: str, span_s: float, *, light: bool, is_open: bool = False) -> None:
    """One board, of the last ``span_s``, as PNG in the folder of pictures."""
    now_s = time.time()
    asked = {"board": committed_board(uid), "prometheus": source, "from": now_s - span_s, "to": now_s, "width": 1440}
    asked |= {"light": light, "open": is_open}
    (TOOLS / "index.html").write_text(PAGE.replace("{asked}", json.dumps(asked)))
    page.complaints()
    page.open(f"{files}/index.html", height=300, theme="light" if light else "dark")
    page.picture(uid, FOLDER)
    wrong = [each for each in page.complaints() if "/board.js" in each]  # a query that failed, say
    assert not wrong, wrong
    with Image.open(FOLDER / f"{uid}.png") as picture:
        keep(picture.convert("RGB"), uid)


def main() -> int:
    """Take the pictures; returns the exit code."""
    check_rest()
    bundle()
    with tempfile.TemporaryDirectory(prefix="manta-boards-") as name, served() as files:
        folder = Path(name)
        page = open_chromium(folder / "chromium")
        replicas = {"count": 2, "health_period_s": 1}
        try:
            (folder / "app").mkdir()
            cache = {"max_total_tokens": 6_000}
            with serving(folder / "app", observatory=True, replicas=replicas, cache=cache) as app, loaded(app, USERS):
                (folder / "watch").mkdir()
                with prometheus(folder / "watch", f"{app.url}/manta") as watching:
                    threading.Event().wait(SHOWN_S)
                    for number, uid in enumerate(BOARD_FILES):
                        draw(page, uid, files, watching.url, SHOWN_S, light=number == 1)
        finally:
            page.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
