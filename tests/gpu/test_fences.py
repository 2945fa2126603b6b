"""What the host may write again, or read, only behind the copy that reads or makes it. Each test fails without its wait
(docs/log/2026-11-27-gpu-tests.md lists them); that no step waits for more than it must is test_gpu_engine.py's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from replicas.attention.base import BatchMeta
from replicas.runner.batch import BUFFERS, PendingTokens, Staging
from tests.gpu import fake_cuda, flashinfer_stand_in
from tests.gpu.device_steps import device_step


def test_a_staging_buffer_is_written_again_only_when_its_copy_has_run(gpu: fake_cuda.FakeCuda | None) -> None:
    """Twice around all buffers, without a wait for anything else."""
    staging, made = Staging(torch.device("cuda", 0)), []
    for i in range(2 * BUFFERS + 1):
        made += staging.upload([np.full(5, i, np.int64)])
    assert [x.tolist() for x in made] == [[i] * 5 for i in range(2 * BUFFERS + 1)]
    if gpu is not None:
        assert len(gpu.fenced) == BUFFERS + 1


def test_the_tokens_of_a_step_are_read_when_they_are_on_the_host(gpu: fake_cuda.FakeCuda | None) -> None:
    tokens = torch.arange(3, device="cuda") * 7
    if gpu is None:
        torch.cuda._sleep(100_000_000)
    pending = PendingTokens(tokens + 1, None)
    assert pending.result().token_ids.tolist() == [1, 8, 15]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_a_plan_of_flashinfer_is_written_when_the_copies_of_the_last_one_have_run(
    gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """Its wrappers stage plans in one pinned buffer each. The second step is another one, or that would not show."""
    if gpu is None:
        pytest.skip("FlashInfer's own pinned buffer cannot be looked into")
    module = flashinfer_stand_in.install(monkeypatch)
    shape: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    steps = [device_step(lengths, dtype=torch.float16, device="cuda", page_size=16, **shape) for lengths in (
        [(40, 1), (9, 1)], [(20, 1), (60, 1)]
    )]  # fmt: skip
    attention = module.FlashInferAttention(steps[0].pool, dtype=torch.float16, **shape)
    for step in steps:  # as batch.py gives them: nothing is read from the device
        step.batch.host_qo_indptr, step.batch.host_seq_lens = step.batch.on_host()
    begin: Callable[[BatchMeta], None] = attention.begin_graph if captured else attention.begin
    for step in steps:
        begin(step.batch)
    torch.cuda.synchronize()  # where the fake looks
