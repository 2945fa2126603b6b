"""Programs that tests run and pip does not install. Without one its tests are skipped, or fail where CI requires it."""

import os
import shutil
from typing import NoReturn

import pytest

REQUIRED = "MANTA_REQUIRE_TOOLS"  # set: a missing program fails the tests that need it


def program(name: str, package: str) -> str:
    """Find ``name`` on PATH; ``package`` is Debian's that has it."""
    found = shutil.which(name)
    if found is None:
        unavailable(f"{name} is not on PATH: `apt-get install {package}`, or run `make tools-test` as root")
    return found


def unavailable(message: str, *, required: str = REQUIRED) -> NoReturn:
    """Skip the test, or fail it where the variable ``required`` is set."""
    if os.environ.get(required):
        pytest.fail(f"{message} ({required} is set)")
    pytest.skip(message, allow_module_level=True)
