"""Runs a function on every rank of a tensor-parallel group, each a process of its own, as on a real host."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from replicas.layers.tp_group import TpGroup
from tests.engine_process import prepared


def run_ranks(size: int, work: Callable[..., Any], *args: Any, meet: Path) -> list[Any]:
    """``work(tp, *args)`` on each rank; returns the results in rank order. ``meet`` is a file that is not there yet."""
    context = prepared()
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=_rank, args=(rank, size, meet, pipes[rank][1], work, args), daemon=True)
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    for _, end in pipes:
        end.close()  # so that a rank that dies is an EOFError here, not a hang
    try:
        return [pickle.loads(begin.recv_bytes()) for begin, _ in pipes]
    finally:
        for rank in ranks:
            rank.join(timeout=60)
            rank.kill()


def _rank(rank: int, size: int, meet: Path, end: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    tp = TpGroup.create(rank, size, init_method=f"file://{meet}", device="cpu", timeout_s=120)
    end.send_bytes(pickle.dumps(work(tp, *args)))  # send() would share tensors' memory, which goes with this process
    tp.barrier()
    tp.close()
