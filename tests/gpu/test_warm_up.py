"""What a GPU's first requests would wait for is compiled at the start."""

import numpy as np
import pytest
import torch

from replicas.runner.sampler import Sampler
from replicas.scheduler.plan import SampleRow
from replicas.types import SamplingParams
from tests.gpu import fake_cuda


@pytest.mark.parametrize("num_rows", [1, 2, 3, 16])
@pytest.mark.parametrize("penalties", [False, True], ids=["plain", "penalties"])
def test_no_program_is_new_for_rows_that_draw(
    gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch, num_rows: int, penalties: bool
) -> None:
    """After a warm-up with one row: Triton tells 1, multiples of 16 and other integers apart unless it is told not to,
    and the addresses of rows in a matrix of an odd number of columns from those of an even one."""
    if gpu is None:
        pytest.skip("counted by what the fake device is asked for")
    monkeypatch.setattr(gpu, "kernel", lambda run, name: None)  # which program it would be is all that counts
    monkeypatch.setattr(torch, "empty", torch.zeros)
    logits = torch.randn(16, 300, generator=torch.Generator().manual_seed(2)).to("cuda")
    sampler = Sampler(300, "cuda")
    sampler.warm_up(logits[:1], on_device=True)
    assert {name for name, _ in gpu.programs} == {"greatest", "scale", "draw", "penalise"}
    compiled = set(gpu.programs)
    params = SamplingParams(seed=1, top_p=0.8, frequency_penalty=0.5 if penalties else 0.0)
    rows = [
        SampleRow(params, position=3, num_output=2, stop_ids=frozenset(), prompt_ids=ids, output_ids=ids)
        for ids in np.arange(2 * num_rows, dtype=np.int32).reshape(num_rows, 2)
    ]
    launched = gpu.kernels
    tokens, _ = sampler.sample_on_device(logits[:num_rows], rows)
    assert len(tokens) == num_rows
    assert gpu.kernels == launched + 3 + penalties
    assert gpu.programs == compiled
    assert all("'enable_fp_fusion': False" in program for _, program in compiled), "its bits are the host's"
