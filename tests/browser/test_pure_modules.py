"""The page's modules that need no browser, under node."""

import pathlib
import subprocess

from tests.programs import program

HERE = pathlib.Path(__file__).parent


def test_the_pages_pure_modules_under_node() -> None:
    node = program("node", "nodejs")
    done = subprocess.run([node, "--test", str(HERE / "pure.test.mjs")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
