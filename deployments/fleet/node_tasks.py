"""Calls of plain functions on a given node of the Ray cluster."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

T = TypeVar("T")
ANSWER_S = 20.0  # of a task on another node, whose worker may have to start first


@functools.cache
def remote(function: Callable[..., Any]) -> Any:
    """Return Ray's remote function, one for each function: Ray stores every new one in the cluster, and keeps it."""
    return ray.remote(function)


async def in_task(node_id: str, function: Callable[..., T], *args: Any, within_s: float = ANSWER_S) -> T:
    """Call ``function`` in a task of a node. Raises: TimeoutError, RayError."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    async with asyncio.timeout(within_s):
        found: T = await task.remote(*args)
        return found
