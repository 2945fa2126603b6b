"""What has to be so before any test module is imported, and the order of files."""

import gc
import os
from collections.abc import Generator
from typing import Any

import pytest
import torch

import replicas.kernels  # noqa: F401  # holds the tests to MANTA_CPU: PyTorch looks at its variable when it first computes
from tests.__main__ import says

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # `make test-gpu` needs none
    pass
else:  # how long an example takes depends on what else the machine does
    settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")
os.environ["MANTA_EXPERIMENTS"] = "1"  # tests change constants: times of seconds, to meet what comes after minutes
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which Transformers does too


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave modules and tests, which stay, out of every look for garbage: each would take a second, also of a test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse marks that tests/__main__.py would not find where it looks. Where processes share the files, the longest
    come first, which are those of numerics: the processes end together then."""
    for mark in ("serve", "slow"):
        marked = {item.path for item in items if item.get_closest_marker(mark)}
        if silent := [str(path) for path in marked if not says(path, mark)]:
            raise pytest.UsageError(f"tests in files that do not name `pytest.mark.{mark}` would not be run: {silent}")
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: "numerics" not in item.path.parts)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` a process takes whole files, and all of tests/browser: it has one Chromium."""
    from xdist.scheduler import LoadFileScheduling

    class Rooms(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/browser" if nodeid.startswith("tests/browser/") else super()._split_scope(nodeid)

    return Rooms(config, log) if config.getoption("dist") == "loadfile" else None
