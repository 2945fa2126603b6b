"""Tensor-parallel ranks above 0 as Ray actors in the replica's placement group.

Owns:      the actors: they live as long as the replica, and die with it (Ray owns children).
Never:     sends them plans: those go over rank 0's plan channel, not as actor calls.
Thread:    the engine's start-up thread makes them; the watchdog asks `dead`.
"""

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from replicas.runner.worker import WorkerSpec, run_worker


class RankActor:
    """One follower; its only method lasts as long as the rank does."""

    def run(self, spec: WorkerSpec) -> None:
        run_worker(spec)


class RayWorkers:
    """Starts one actor per rank, rank r in bundle r of ``group``. A `WorkerLauncher`, and the handles it returns."""

    def __init__(self, group: PlacementGroup, *, host: str, cpus: float, gpus: float) -> None:
        self.host = host  # address of rank 0 that other nodes can reach
        self._group = group
        self._cpus = cpus
        self._gpus = gpus
        self._actors: list[Any] = []
        self._runs: dict[Any, int] = {}  # running call -> rank

    def start(self, specs: Sequence[WorkerSpec]) -> "RayWorkers":
        actor_class = ray.remote(RankActor)
        for spec in specs:
            strategy = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=spec.rank, placement_group_capture_child_tasks=True
            )
            options = {"num_cpus": self._cpus, "num_gpus": self._gpus, "scheduling_strategy": strategy}
            actor = actor_class.options(**options).remote()
            self._actors.append(actor)
            self._runs[actor.run.remote(spec)] = spec.rank
        return self

    def dead(self) -> str | None:
        """A sentence when a rank is gone: `run` returns only when rank 0 hangs up."""
        ended, _ = ray.wait(list(self._runs), num_returns=1, timeout=0)
        if not ended:
            return None
        rank = self._runs[ended[0]]
        try:
            ray.get(ended[0])
        except ray.exceptions.RayError as error:
            return f"tensor-parallel rank {rank} died: {type(error).__name__}"
        return f"tensor-parallel rank {rank} has ended"

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
