"""On PYTHONPATH of a Ray whose GPUs are not there: its processes compute on tests/gpu/fake_cuda.py where they have one.

MANTA_TEST_FAKE_GPUS names the file in which each rank says where it runs. Two modules are changed as they are
imported: who looks for GPUs finds as many as Ray has, and who settles on one gets the fake one.
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


def _install() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    sys.path.insert(0, ROOT)
    import pytest
    import ray

    from replicas.layers import tp_group
    from tests.gpu import fake_cuda

    fake_cuda.install(pytest.MonkeyPatch())

    def meet(rank: int, *place: Any) -> fake_cuda.ThroughTheHost:
        context = ray.get_runtime_context()
        told = {
            "pid": os.getpid(), "rank": rank, "group": context.get_placement_group_id(),
            "resources": sorted(context.worker.core_worker.resource_ids()), "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
        }  # fmt: skip
        with open(os.environ[TOLD], "a") as file:
            file.write(json.dumps(told) + "\n")
        return fake_cuda.meet_through_the_host(rank, *place)

    tp_group._meet = meet  # type: ignore[assignment]


class _Finder:
    """Finds the modules that are changed, as the other finders do, and changes them behind their import."""

    def __init__(self) -> None:
        self.changes = {"replicas.loading.device": _finds_gpus, "deployments.replica.model_replica": _settles}

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
