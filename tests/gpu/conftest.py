"""What the tests of devices share."""

import importlib
from pathlib import Path

import pytest

from tests.gpu import fake_cuda
from tests.gpu.device_steps import DEVICE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here is slow where kernels are interpreted; after a change of them there is `make test-gpu`."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(
    params=[
        pytest.param("fake", marks=pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is here, the better test")),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU; torch sees none on this machine"),
            ],
        ),
    ]
)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> fake_cuda.FakeCuda | None:
    """A GPU from here on: one that is not there (fake_cuda.py), or, as None, the real one."""
    if request.param == "cuda":
        return None
    importlib.import_module("tests.gpu.triton_or_skip")
    return fake_cuda.install(monkeypatch)
