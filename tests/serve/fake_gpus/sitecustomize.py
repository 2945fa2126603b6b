"""On PYTHONPATH of a Ray whose GPUs are not there: its processes compute on tests/gpu/fake_cuda.py where they have one.

MANTA_TEST_FAKE_GPUS names the file in which each rank says where it runs. Three modules are changed as they are
imported: who looks for GPUs finds as many as Ray has, who settles on one gets the fake one, and NIXL hears where that
has its pages.
"""

import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

TOLD = "MANTA_TEST_FAKE_GPUS"
ROOT = str(Path(__file__).resolve().parents[3])


def _finds_gpus(device: ModuleType) -> None:
    device.num_gpus = lambda: int(json.loads(os.environ["RAY_OVERRIDE_RESOURCES"])["GPU"])  # type: ignore[attr-defined]


def _settles(replica: Any) -> None:
    settle = replica.settle

    def settle_on_the_fake_one(*, num_threads: int, device: str) -> None:
        settle(num_threads=num_threads, device=device)
        if device == "cuda":
            _install()

    replica.settle = settle_on_the_fake_one


def _lies_on_the_host(memory: Any) -> None:
    of_device = memory.KvMemory.of_device

    def of_the_fake_one(*given: Any, **named: Any) -> Any:
        pages = of_device(*given, **named)
        pages.on_host = True
        return pages

    memory.KvMemory.of_device = staticmethod(of_the_fake_one)


def _install() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    sys.path.insert(0, ROOT)
    import pytest

    from replicas.layers import tp_group
    from tests.gpu import fake_cuda
    from tests.serve.fake_gpus.places import place_of

    fake_cuda.install(pytest.MonkeyPatch())
    begin = tp_group.TpGroup.__init__

    def begin_and_tell(group: Any, rank: int = 0, *place: Any, **device: Any) -> None:
        begin(group, rank, *place, **device)
        with open(os.environ[TOLD], "a") as file:
            file.write(json.dumps(place_of(rank)) + "\n")

    tp_group.TpGroup.__init__ = begin_and_tell  # type: ignore[assignment,method-assign]
    tp_group._meet = fake_cuda.meet_through_the_host


class _Finder:
    """Finds the modules that are changed, as the other finders do, and changes them behind their import."""

    def __init__(self) -> None:
        self.changes = {
            "replicas.loading.device": _finds_gpus,
            "deployments.replica.model_replica": _settles,
            "kvtransfer.ports.memory": _lies_on_the_host,
        }

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if (change := self.changes.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


if TOLD in os.environ:
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
