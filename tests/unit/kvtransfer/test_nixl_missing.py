"""What `NixlAgent` does without NIXL; at work it is in tests/contract/test_transfer_agents.py."""

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from kvtransfer.errors import TransferError
from kvtransfer.layout import head_slices
from kvtransfer.ports import agent
from kvtransfer.ports.agent import NixlAgent, cut_connections, descriptors, may_pin
from kvtransfer.ports.memory import KvMemory
from tests.kv_pools import layout, random_pools


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the agent sets is gone after the test."""
    for name, value in {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,cma", "UCX_LOG_LEVEL": "error"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NIXL_LOG_LEVEL", "WARN")


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    memory = KvMemory.of_array(layout(), random_pools(layout(), 3, 0)[0])
    with pytest.raises(TransferError, match=r"pip install 'nixl==1\.5\.1'"):
        NixlAgent(memory)


def test_an_address_of_another_machine_is_refused() -> None:
    memory = KvMemory.of_array(layout(), random_pools(layout(), 3, 0)[0])
    with pytest.raises(TransferError, match=r"no interface of .* has the address 192\.0\.2\.1; there are: .*lo"):
        NixlAgent(memory, host="192.0.2.1")


def test_a_slice_of_every_page_is_one_strided_row() -> None:
    slices = head_slices(layout(2), 1, layout(1), 0)  # 3 of 6 heads, 128 bytes each, in 2 layers' K and V
    rows = descriptors(
        [part.dst_offset for part in slices], slices, base_address=1000, page_bytes=3072, num_pages=9, device=0
    )
    np.testing.assert_array_equal(
        rows,
        [
            [1000 + 384, 384, 0, 3072, 9],
            [1000 + 1152, 384, 0, 3072, 9],
            [2920, 384, 0, 3072, 9],
            [3688, 384, 0, 3072, 9],
        ],
    )


def on_a_gpu() -> KvMemory:
    """Memory of the host that says it is a device's, which NIXL finds out."""
    pool = random_pools(layout(), 3, 0)[0]
    return KvMemory.of_device(
        layout(), base_address=pool.ctypes.data, num_pages=3, device=0, owner=pool, reader=lambda pages: pool[pages]
    )


@pytest.mark.parametrize(
    ("transport", "host", "device"), [("auto", "tcp,cma", "tcp,cuda_copy,cuda_ipc"), ("tcp", "tcp", "tcp,cuda_copy")]
)
def test_transports_within_a_machine_reach_the_memory_that_is_moved(
    monkeypatch: pytest.MonkeyPatch, transport: Literal["auto", "tcp"], host: str, device: str
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    for memory, wanted in ((KvMemory.of_array(layout(), random_pools(layout(), 3, 0)[0]), host), (on_a_gpu(), device)):
        monkeypatch.delenv("UCX_TLS")
        with pytest.raises(TransferError, match="needs the package nixl"):
            NixlAgent(memory, transport=transport)
        assert os.environ["UCX_TLS"] == wanted


@pytest.mark.parametrize(("transports", "pins"), [("tcp,cma", False), ("tcp", False), ("rc,tcp", True), (None, True)])
def test_a_pool_is_pinned_only_where_ucx_may_use_a_device_of_rdma(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transports: str | None, pins: bool
) -> None:
    monkeypatch.setattr(agent, "RDMA_DEVICES", tmp_path)
    monkeypatch.delenv("UCX_TLS") if transports is None else monkeypatch.setenv("UCX_TLS", transports)
    assert not may_pin()
    (tmp_path / "mlx5_0").mkdir()
    assert may_pin() is pins


def test_where_ucx_does_not_see_the_gpu_the_error_says_which_setting_lets_it() -> None:
    """By NIXL itself: without CUDA's transports it takes the pool for memory of the host, and refuses it."""
    with pytest.raises(TransferError, match=r"UCX_TLS=tcp,cma\).* UCX sees CUDA: .* UCX_TLS must allow cuda_copy"):
        NixlAgent(on_a_gpu())


def test_a_fence_cuts_every_connection_to_a_machine_and_no_other_one() -> None:
    """127.0.0.2 is the machine; what it had sent before can still be read, later bytes are answered with a reset."""
    with contextlib.ExitStack() as held:
        pairs = []
        for host in ("127.0.0.1", "127.0.0.2", "127.0.0.2"):
            server = held.enter_context(socket.create_server((host, 0)))
            ours = held.enter_context(socket.create_connection(server.getsockname(), timeout=10))
            theirs, _ = server.accept()
            pairs.append((ours, held.enter_context(theirs)))
        (other, far), (cut, dead), (_, _) = pairs
        dead.sendall(b"before")
        assert cut_connections("127.0.0.2") == 2
        assert (cut.recv(9), cut.recv(9)) == (b"before", b"")
        dead.sendall(b"after")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            dead.sendall(b"after the reset")
        with pytest.raises(ConnectionResetError):
            cut.recv(9)
        far.sendall(b"as ever")
        assert other.recv(9) == b"as ever"
