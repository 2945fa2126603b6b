"""Processes that begin with what is imported: one server imports PyTorch and the kernels, every process is its fork.

A spawned process imports for 2 to 4 s of CPU; a fork of that server begins at once. The server runs nothing, so that
no thread of OpenMP's, NIXL's or an engine's is lost in a fork, as it would be in one of the process that asks.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext

IMPORTED = ["replicas.launch", "replicas.engine.loop", "replicas.engine.ranks"]


def prepared() -> ForkServerContext:
    """The context to start such processes from. They have the environment of the first call of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context
