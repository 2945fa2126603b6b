"""The Triton backend for its tests: compiled on a GPU, interpreted on a CPU (the same arithmetic, slowly; conftest.py).

A module that imports this is skipped only if Triton itself is missing, there is no GPU, and the tools are not required
(CI requires them). A failed import of our own code is never a reason to skip.
"""

import importlib.util
import os

import pytest

from tests.gpu.device_steps import DEVICE
from tests.programs import REQUIRED

if DEVICE == "cpu" and importlib.util.find_spec("triton") is None and not os.environ.get(REQUIRED):
    pytest.skip("triton is not installed, so that its kernels cannot even be interpreted", allow_module_level=True)

from replicas.attention import triton_paged

__all__ = ["triton_paged"]
