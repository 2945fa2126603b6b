"""The Triton backend for its tests: compiled on a GPU, interpreted on a CPU (the same arithmetic, slowly; conftest.py).

A module that imports this is skipped only if Triton itself is missing, there is no GPU, and the tools are not required
(CI requires them). A failed import of our own code is never a reason to skip.
"""

import importlib.util
import os
from typing import Any

import pytest

from tests.gpu.device_steps import DEVICE
from tests.programs import REQUIRED

if DEVICE == "cpu" and importlib.util.find_spec("triton") is None and not os.environ.get(REQUIRED):
    pytest.skip("triton is not installed, so that its kernels cannot even be interpreted", allow_module_level=True)

from replicas.attention import triton_paged


def patch_once_a_launch() -> None:
    """Have Triton's interpreter replace the functions of `triton.language` once a launch for each module of ours, and
    not again for every call of a function of a kernel, which found them replaced: a quarter of its time."""
    from triton.runtime import interpreter

    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[int] = set()

    def replace_once(function: Any) -> Any:
        if (names := id(function.__globals__)) in replaced:
            return interpreter._LangPatchScope()  # has nothing to put back
        replaced.add(names)
        return replace(function)

    def launch_anew(self: Any, *args: Any, **options: Any) -> None:
        replaced.clear()  # the launch before has put back what it replaced
        launch(self, *args, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_anew


if DEVICE == "cpu":
    patch_once_a_launch()

__all__ = ["triton_paged"]
