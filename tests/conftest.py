"""What has to be so before any test module is imported, and the order of files."""

import os
from typing import Any

import pytest
import torch

import replicas.kernels  # noqa: F401  # holds the tests to MANTA_CPU: PyTorch looks at its variable when it first computes

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # `make test-gpu` needs none
    pass
else:  # how long an example takes depends on what else the machine does
    settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which Transformers does too


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse tests with Ray whose file does not say so: tests/__main__.py looks there. Where processes share the files,
    the longest come first, which are those of numerics: the processes end together then."""
    with_ray = {item.path for item in items if item.get_closest_marker("serve")}
    if silent := [str(path) for path in with_ray if "pytest.mark.serve" not in path.read_text()]:
        raise pytest.UsageError(f"tests that start Ray in files without `pytest.mark.serve` would not be run: {silent}")
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
