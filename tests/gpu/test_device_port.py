"""The pages of a pool on a GPU as the transfer sees them: where they lie, and how their digests are made."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.layout import KvLayout
from kvtransfer.ports.memory import KvMemory, page_digests
from kvtransfer.types import TransferSettings
from replicas.memory.pool import MHATokenToKVPool
from replicas.ranks.port import PortSpec, kv_memory, make_port
from tests.gpu.fake_cuda import CUDA, FakeCuda

LAYOUT = KvLayout(
    model="m", architecture="MHA", num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16", item_bytes=2,
    page_size=16, tp=1,
)  # fmt: skip
WHOLE = ((0, LAYOUT.page_bytes),)
SPEC = PortSpec(layout=LAYOUT, settings=TransferSettings(host="127.0.0.1", token=b"a token of this test"))


def pool_on(device: str) -> MHATokenToKVPool:
    """10 pages that differ, and the sink."""
    pool = MHATokenToKVPool(10, 16, 2, 2, 64, torch.float16, device)
    pool.buffer.copy_(torch.arange(11.0).view(-1, 1, 1, 1, 1, 1).expand(pool.buffer.shape).half().to(device))
    if device == "cuda":
        torch.cuda.synchronize()  # as after a step's result: what reads pages waits for no other stream
    return pool


def test_digests_of_pages_on_a_gpu_are_those_of_the_same_pages_on_the_host(gpu: FakeCuda | None) -> None:
    """On a stream that is not the engine's, through pinned memory: neither waits for the other's work."""
    pages = np.array([7, 1, 10], np.int32)
    host = KvMemory.of_array(LAYOUT, pool_on("cpu").buffer.view(torch.uint8).numpy())
    memory = kv_memory(pool_on("cuda"), LAYOUT)
    assert memory.device == 0
    page_digests(memory, pages, WHOLE)  # the first use of a kernel loads it, for which the driver may wait
    if gpu is None:
        torch.cuda._sleep(4_000_000_000)  # the engine's stream is busy for two seconds
    else:
        gpu.copied_on.clear(), gpu.waits.clear()
    digests = page_digests(memory, pages, WHOLE)
    np.testing.assert_array_equal(digests, page_digests(host, pages, WHOLE))
    if gpu is None:
        assert not torch.cuda.current_stream().query()
    else:
        assert gpu.waits == ["stream"]
        assert len(gpu.copied_on) == 1
        assert gpu.copied_on[0] is not gpu.streams[0]


def test_the_transfer_thread_works_on_the_pools_gpu(
    gpu: FakeCuda | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another thread than the model's, and UCX looks for the device of its thread. Memory that CUDA IPC cannot
    reach is warned of."""
    chosen: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    agent: Any = SimpleNamespace(name="a", metadata=b"", close=lambda: None)
    with caplog.at_level(logging.WARNING):
        port = make_port(pool_on("cuda"), 0, SPEC, host="127.0.0.1", make_agent=lambda memory: agent)
    assert chosen == [CUDA]
    assert port.info.place == "cuda:0"  # SPEC J02
    assert "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True" in caplog.text
    port.close()
