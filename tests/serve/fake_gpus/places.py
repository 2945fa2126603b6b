"""Replicas and ranks that say where Ray has put them, and load no model."""

import os
from types import SimpleNamespace
from typing import Any

import ray

from deployments.replica import model_replica
from deployments.settings.schema import AppConfig


def place_of(rank: int) -> dict[str, Any]:
    """Of this process: its id, placement group and resources, and the GPUs that it sees."""
    context = ray.get_runtime_context()
    return {
        "pid": os.getpid(), "rank": rank, "group": context.get_placement_group_id(),
        "resources": sorted(context.worker.core_worker.resource_ids()), "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
    }  # fmt: skip


class ToldRank(model_replica.RankActor):
    """The actor of a follower."""

    def run(self, spec: Any) -> dict[str, Any]:  # type: ignore[override]
        return place_of(spec.rank)


class ToldReplica:
    """A replica's own process, which is rank 0 and starts its followers."""

    def ranks(self, config: AppConfig) -> list[dict[str, Any]]:
        model_replica.settle(num_threads=1, device=config.replicas.device)
        model_replica.RankActor = ToldRank  # type: ignore[misc]
        settings = SimpleNamespace(num_threads=1, device=config.replicas.device)
        specs = [SimpleNamespace(rank=rank, config=settings) for rank in range(1, config.parallel.tp)]
        workers: Any = model_replica._workers(config)
        self._workers = workers.start(specs)
        return [place_of(0), *ray.get(list(workers._runs))]
