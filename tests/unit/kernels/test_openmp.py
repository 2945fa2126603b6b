"""Kernels run on the libgomp that torch ships, in whichever folder its wheel has it."""

import ctypes
from pathlib import Path

import pytest
import torch

from replicas.kernels import team


@pytest.mark.parametrize("folder", ["torch/lib", "torch.libs"])
def test_the_library_is_found_in_either_folder_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """What is found is a link to the one that is loaded: a copy would be a second pool of threads."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    made = tmp_path / folder / "libgomp-98e0a5ab.so.1"
    made.parent.mkdir(parents=True)
    made.symlink_to(next(line.split()[-1] for line in maps if "libgomp" in line))
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    found = team._openmp()
    assert found._name == str(made)
    assert address(found.GOMP_parallel) == address(team._PARALLEL)


def address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
