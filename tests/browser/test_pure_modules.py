"""The page's modules that need no browser, under node, as the server gives them."""

import pathlib
import shutil
import subprocess

from deployments.watch.observatory.page_files import read_files
from tests.programs import program

HERE = pathlib.Path(__file__).parent


def test_the_pages_pure_modules_under_node(tmp_path: pathlib.Path) -> None:
    node = program("node", "nodejs")
    for name, file in read_files().items():
        path = tmp_path / "dashboards" / "ui" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.body)
    tests = tmp_path / "tests" / "browser" / "pure.test.mjs"
    tests.parent.mkdir(parents=True)
    shutil.copy(HERE / tests.name, tests)
    done = subprocess.run([node, "--test", str(tests)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
