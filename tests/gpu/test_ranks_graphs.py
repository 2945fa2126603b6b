"""CUDA graphs that hold the collectives of two ranks: two processes, each with a GPU that is not there, and gloo
between them under NCCL's name. A collective that one rank replays and the other does not ends in an error."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from replicas.layers.tp_group import TpGroup
from replicas.runner.model_runner import ModelRunner
from replicas.scheduler.plan import DecodePlan, TableWrite
from tests.gpu import fake_cuda
from tests.gpu.device_steps import DEVICE
from tests.gpu.rigs import engine_config
from tests.gpu.triton_or_skip import triton_paged
from tests.numerics import tiny
from tests.numerics.ranks import run_ranks

assert triton_paged  # the attention of these ranks


class Nccl:
    """A group over the device's tensors, whose operations a graph records."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo

    def _run(self, operation: Callable[[], Any]) -> "Nccl":
        operation()
        if fake_cuda.FAKE.capturing is not None:
            fake_cuda.FAKE.capturing.operations.append(operation)
        return self

    def wait(self) -> None: ...

    def allreduce(self, tensors: list[Any], *options: Any) -> "Nccl":
        plains = [fake_cuda.plain(x) for x in tensors]
        return self._run(lambda: self._gloo.allreduce(plains, *options).wait())

    def allgather(self, parts: list[list[Any]], tensors: list[Any]) -> "Nccl":
        to, plains = [[fake_cuda.plain(x) for x in each] for each in parts], [fake_cuda.plain(x) for x in tensors]
        return self._run(lambda: self._gloo.allgather(to, plains).wait())

    def gather(self, parts: list[list[Any]], tensors: list[Any], options: Any) -> "Nccl":
        to, plains = [[fake_cuda.plain(x) for x in each] for each in parts], [fake_cuda.plain(x) for x in tensors]
        return self._run(lambda: self._gloo.gather(to, plains, options).wait())

    def broadcast(self, tensors: list[Any], options: Any) -> "Nccl":
        plains = [fake_cuda.plain(x) for x in tensors]
        return self._run(lambda: self._gloo.broadcast(plains, options).wait())


def decode(size: int, seq_len: int) -> DecodePlan:
    rows = np.arange(1, size + 1, dtype=np.int32)
    slots = np.arange(4, 4 + size * seq_len, dtype=np.int32).reshape(size, seq_len)
    writes = tuple(TableWrite(int(row), 0, mine) for row, mine in zip(rows, slots, strict=True))
    return DecodePlan(
        table_writes=writes, rows=rows, token_ids=rows + 5, seq_lens=np.full(size, seq_len, np.int32),
        slots=slots[:, -1].copy(), sampling=(),
    )  # fmt: skip


def both_ways(tp: TpGroup, folder: str, nccl: bool) -> tuple[list[int], float]:
    """Sizes captured on this rank, and the largest difference between steps with graphs, which follow what rank 0 alone
    has sampled, and steps without, which are told."""
    with pytest.MonkeyPatch.context() as patch:
        fake_cuda.install(patch)
        patch.setattr(dist, "ProcessGroupNCCL", Nccl if nccl else type(None), raising=False)
        tp.device, tp._group = fake_cuda.CUDA, Nccl(tp._group)
        config = engine_config(Path(folder), "cuda")
        runner = ModelRunner(replace(config, scheduler=replace(config.scheduler, max_running_requests=2)), tp)
        graphs, apart = runner._graphs, 0.0
        if graphs is None:
            tp._group = tp._group._gloo
            return [], apart
        one, two = decode(1, 9), decode(2, 30)
        for plan, follows in ((one, None), (two, None), (one, [1]), (two, [1, 0])):
            runner._graphs, given = graphs, plan
            if follows is not None:
                sampled = np.array([21, config.model.vocab_size - 9], np.int64)  # of the table's two halves
                plan = replace(plan, token_ids=sampled[follows].astype(np.int32))
                given = replace(plan, token_ids=np.zeros_like(plan.rows), follows=np.array(follows, np.int32))
                runner._sampled = None if tp.rank else torch.from_numpy(sampled).to(fake_cuda.CUDA)
            replayed = runner.forward(given)[0].clone()
            runner._graphs = None
            made = runner.forward(plan)[0]
            assert made.shape == replayed.shape == (len(plan.rows), 0 if tp.rank else config.model.vocab_size)
            if tp.rank == 0:
                apart = max(apart, float((replayed - made).abs().max()))
                assert float(replayed.abs().max()) > 0.0
        runner.close()
        tp.device, tp._group = torch.device("cpu"), tp._group._gloo
        return list(graphs.sizes), apart


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is here: two ranks on two are tested by test_gpu_engine.py")
@pytest.mark.parametrize("nccl", [True, False], ids=["nccl", "gloo"])
def test_two_ranks_replay_what_they_captured_together_and_gloo_is_refused(tmp_path: Path, nccl: bool) -> None:
    tiny.save("llama", tmp_path / "model", num_key_value_heads=2, num_attention_heads=4)
    made = run_ranks(2, both_ways, str(tmp_path / "model"), nccl, meet=tmp_path / "meet")
    assert [sizes for sizes, _ in made] == [[1, 2] if nccl else []] * 2
    assert max(apart for _, apart in made) == 0.0
