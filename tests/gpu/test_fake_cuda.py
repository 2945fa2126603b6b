"""The fake device refuses the operations that a device refuses, and computes as the CPU does."""

import pytest
import torch

from tests.gpu.device_steps import DEVICE
from tests.gpu.fake_cuda import CUDA, NOTHING_YET, FakeCuda, install
from tests.gpu.triton_or_skip import triton_paged

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a real GPU is here; the fake is not needed")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    assert triton_paged is not None
    return install(monkeypatch)


def test_tensors_of_the_device_stay_there_and_hold_the_cpus_numbers(fake: FakeCuda) -> None:
    x = torch.arange(6.0, device="cuda").view(2, 3)
    x[0] += 1
    y = (x @ x.T).to(torch.float16).contiguous()
    assert {x.device, x[1].device, y.device, torch.empty_like(y).device} == {CUDA}
    assert y.cpu().device.type == "cpu"
    assert y.tolist() == [[14.0, 26.0], [26.0, 50.0]]
    with pytest.raises(TypeError, match="can't convert cuda"):
        y.numpy()


def test_an_operation_on_tensors_of_both_is_refused_but_for_numbers_and_indices(fake: FakeCuda) -> None:
    x, host = torch.ones(3, device="cuda"), torch.ones(3)
    with pytest.raises(RuntimeError, match="same device, but add_ got one of the CPU"):
        x.add_(host)
    with pytest.raises(RuntimeError, match="same device"):
        host * x
    assert (x * torch.tensor(2.0))[torch.tensor([0, 2])].tolist() == [2.0, 2.0]


def test_an_asynchronous_copy_needs_pinned_memory(fake: FakeCuda) -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="is not pinned"):
        torch.zeros(3).to("cuda", non_blocking=True)
    with pytest.raises(RuntimeError, match="is not pinned"):
        torch.empty(3).copy_(x, non_blocking=True)
    before = len(fake.waits)
    torch.zeros(3).pin_memory().to("cuda", non_blocking=True)
    torch.empty(3, pin_memory=True)[:2].copy_(x[:2], non_blocking=True)
    assert fake.waits[before:] == []
    assert x.sum().item() == 3
    x.cpu()
    assert fake.waits[before:] == ["item", "copy"]


def test_an_asynchronous_copy_is_late_and_reads_what_must_not_be_written_before(fake: FakeCuda) -> None:
    x, host = torch.ones(2, device="cuda"), torch.zeros(2).pin_memory()
    copied, later = torch.cuda.Event(), torch.cuda.Event()
    host.copy_(x, non_blocking=True)
    copied.record()
    x.fill_(5.0)
    assert host.view(torch.uint8).unique().tolist() == [NOTHING_YET]
    copied.synchronize()
    assert host.tolist() == [1.0, 1.0]
    x.copy_(host, non_blocking=True)
    later.record()
    copied.synchronize()  # is before it
    host.fill_(2.0)
    with pytest.raises(RuntimeError, match="a fence is missing"):
        later.synchronize()


def test_a_copy_on_another_stream_runs_when_something_waits_for_it(fake: FakeCuda) -> None:
    """Out of the device, and into it."""
    x, host, side = torch.ones(2, device="cuda"), torch.full((2,), 3.0).pin_memory(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.copy_(host, non_blocking=True)
    assert x.tolist() == [1.0, 1.0]
    torch.cuda.current_stream().wait_stream(side)
    assert x.tolist() == [3.0, 3.0]
    back = torch.zeros(2).pin_memory()
    with torch.cuda.stream(side):
        back.copy_(x, non_blocking=True)
    x.fill_(4.0)  # nobody has ordered it behind the copy
    side.synchronize()
    assert back.tolist() == [4.0, 4.0]


def test_a_graph_computes_again_over_the_same_memory_and_captures_no_wait(fake: FakeCuda) -> None:
    x, out = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_((x * 2).add_(torch.full((2,), 1.0, device="cuda")))
    x.fill_(5.0)
    graph.replay()
    assert out.tolist() == [11.0, 11.0]
    for touch in (x.tolist, x.cpu, torch.cuda.synchronize):
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), torch.cuda.graph(graph):
            touch()


def test_memory_of_the_device_is_counted_once_a_storage(fake: FakeCuda) -> None:
    before = torch.cuda.mem_get_info()[0]
    x = torch.zeros(1 << 20, device="cuda")
    views = [x[i:] for i in range(4)]
    assert before - torch.cuda.mem_get_info()[0] == 4 << 20
    del x, views
    assert torch.cuda.mem_get_info()[0] == before
