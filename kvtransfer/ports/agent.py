"""The transfer protocol over NIXL (UCX): the only file that imports nixl.

Owns:      one rank's NIXL agent, its registration of the pool, and the prepared descriptors of each peer.
Never:     waits, times out or retries; takes metadata from anything but the hello of an authenticated peer.
Invariant: one thread calls NIXL; a handle is dropped only when terminal; a peer is removed only when it is dead, has
           said goodbye, or its endpoint is broken (removing a live one leaks a descriptor on both sides).
Thread:    the first that writes, checks or takes notes; a call from another one fails an assertion. The agent may be
           constructed on any thread.

There is no progress thread: NIXL's spins on a core. Progress is made in `take_notes` and in the checks, which the
transfer thread calls in every turn. The completion of a peer's write, and over tcp its data too, waits for that turn.

UCX reads its settings from the environment when it starts. What the operator has set wins. The defaults set here:
    UCX_NET_DEVICES   the interface of ``host``; by default UCX listens on all of them. With RDMA set it yourself
    UCX_TLS           "tcp" with transport "tcp"; "tcp,cma" with "auto" on the loopback interface; else UCX chooses.
                      For GPU memory "tcp,cuda_copy" and "tcp,cuda_copy,cuda_ipc": without cuda_copy UCX takes the
                      pool's addresses for host addresses, and NIXL refuses them; CMA cannot read GPU memory
"""

import importlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import psutil

from kvtransfer.errors import PeerLost, TransferError
from kvtransfer.layout import PageSlice
from kvtransfer.ports.memory import KvMemory
from kvtransfer.ports.transfer_agent import RemotePool, Transfer
from kvtransfer.types import PageIds, WriteTimes

log = logging.getLogger(__name__)

_CUDA_WANTED = (
    "the pool is on a GPU, so UCX_TLS must allow cuda_copy (and cuda_ipc within a machine) or be unset, and NIXL's "
    "wheel must be that of torch's CUDA (nixl-cu12, nixl-cu13)"
)
UNPINNED = frozenset({"tcp", "cma", "self"})  # transports of UCX that need no registered memory
RDMA_DEVICES = Path("/sys/class/infiniband")
Descriptors = npt.NDArray[np.uint64]  # [S, 5] address, length, device, stride, count


class NixlAgent:
    """A `TransferAgent` over NIXL 1.5. Its name is ``role``, for people to read, and a number that no other has."""

    def __init__(
        self, memory: KvMemory, *, role: str = "kv", host: str = "127.0.0.1", transport: Literal["auto", "tcp"] = "auto"
    ) -> None:
        """Register the pool. Raises: TransferError when NIXL is missing or cannot start."""
        _set_environment(host, transport, on_host=memory.on_host)
        nixl = _import_nixl()
        self.name = f"{role}-{uuid.uuid4().hex}"
        self._memory = memory
        self._segment = "DRAM" if memory.on_host else "VRAM"
        self._owner: int | None = None  # thread
        config = nixl.nixl_agent_config(
            enable_prog_thread=False,
            capture_telemetry=True,  # 1 to 4 us a write, and nothing measurable of its own time
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            backends=[],
        )
        try:
            self._nixl: Any = nixl.nixl_agent(self.name, config)
            self._nixl.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
            region = [(memory.base_address, memory.num_bytes, memory.device, "")]
            self._registration: Any = self._nixl.register_memory(region, self._segment)
            self.metadata: bytes = self._nixl.get_agent_metadata()
        except Exception as error:  # NIXL has no common root of its errors
            raise TransferError(
                f"NIXL cannot start on {host} (UCX_NET_DEVICES={os.environ.get('UCX_NET_DEVICES')}, "
                f"UCX_TLS={os.environ.get('UCX_TLS')}): {error}. Check that the interface is up"
                + ("" if memory.on_host else f", and that UCX sees CUDA: {_CUDA_WANTED}")
            ) from error
        self._peers: dict[str, _PreparedPeer] = {}
        self._sources: dict[tuple[PageSlice, ...], Any] = {}  # our side's descriptors, by what of a page is sent

    def add_peer(self, pool: RemotePool) -> None:
        """Connect to a peer, which takes milliseconds, and prepare its descriptors. Raises: PeerLost."""
        self._assert_thread()
        if pool.agent in self._peers:
            return
        try:
            added = self._nixl.add_remote_agent(pool.metadata)
        except Exception as error:  # NIXL has no common root of its errors
            raise PeerLost(f"{pool.agent} cannot be reached: {type(error).__name__}: {error}") from error
        name = added.decode() if isinstance(added, bytes) else str(added)
        if name != pool.agent:
            self._nixl.remove_remote_agent(name)
            raise PeerLost(f"the metadata of {pool.agent} belong to {name}")
        try:
            self._peers[name] = self._prepare(pool)
        except Exception as error:  # the peer named an address that it has not registered
            self._nixl.remove_remote_agent(name)
            raise PeerLost(f"the pool of {name} cannot be written: {type(error).__name__}: {error}") from error

    def remove_peer(self, agent: str) -> None:
        self._assert_thread()
        peer = self._peers.pop(agent, None)
        if peer is not None:
            self._nixl.remove_remote_agent(agent)
            self._nixl.release_dlist_handle(peer.remote)

    def fence(self, agent: str, host: str) -> None:
        """Over tcp the peer's bytes are put into the pool by this process, as it reads its connections: cut them. RDMA
        needs no fence: a queue pair that was not answered for seconds has failed, and is not connected again."""
        num_cut = cut_connections(host)
        log.warning("%s: its machine %s is dead; %d connections to it are cut", agent, host, num_cut)

    def write(self, agent: str, src_pages: PageIds, dst_pages: PageIds, note: bytes) -> Transfer:
        self._assert_thread()
        transfer = Transfer(agent, _NixlWrite(self._nixl, self._peers, agent, src_pages, dst_pages, note))
        transfer.post()
        return transfer

    def send_note(self, agent: str, note: bytes) -> None:
        self._assert_thread()
        try:
            self._nixl.send_notif(agent, note)
        except Exception as error:  # NIXL has no common root of its errors
            raise PeerLost(f"no note reaches {agent}: {type(error).__name__}: {error}") from error

    def take_notes(self) -> Sequence[tuple[str, bytes]]:
        self._assert_thread()
        notes: dict[str, list[bytes]] = self._nixl.get_new_notifs()
        return [(agent, note) for agent, of_agent in notes.items() for note in of_agent]

    def close(self) -> None:
        """Remove all peers and deregister the pool, whose memory must outlive the writes still on their way to it."""
        for agent in list(self._peers):
            self.remove_peer(agent)
        for source in self._sources.values():
            self._nixl.release_dlist_handle(source)
        self._sources.clear()
        self._nixl.deregister_memory(self._registration)
        del self._nixl, self._registration

    def _prepare(self, pool: RemotePool) -> "_PreparedPeer":
        source = self._sources.get(pool.slices)
        ours = self._memory
        if source is None:
            rows = descriptors(
                [part.src_offset for part in pool.slices],
                pool.slices,
                base_address=ours.base_address,
                page_bytes=ours.layout.page_bytes,
                num_pages=ours.num_pages,
                device=ours.device,
            )
            source = self._sources[pool.slices] = self._nixl.prep_xfer_dlist("", rows, self._segment)
        rows = descriptors(
            [part.dst_offset for part in pool.slices],
            pool.slices,
            base_address=pool.base_address,
            page_bytes=pool.page_bytes,
            num_pages=pool.num_pages,
            device=pool.device,
        )
        remote = self._nixl.prep_xfer_dlist(pool.agent, rows, self._segment)
        return _PreparedPeer(source, remote, ours.num_pages, pool.num_pages, len(pool.slices))

    def _assert_thread(self) -> None:
        here = threading.get_ident()
        if self._owner is None:
            self._owner = here
        if self._owner != here:
            raise AssertionError(f"the agent {self.name} belongs to one thread; another one has called it")


def cut_connections(host: str) -> int:
    """Shut down every TCP connection of this process to ``host``, UCX's among them, of which it shows no list.

    The kernel answers later bytes of the other end with a reset; what it has received already can still be read.
    Returns: how many there were.
    """
    address, num_cut = socket.gethostbyname(host), 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(entry))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.getpeername()[0] == address:
                    connection.shutdown(socket.SHUT_RDWR)
                    num_cut += 1
        except (OSError, IndexError):  # no socket, not connected, closed meanwhile; a Unix socket without a name
            continue
    return num_cut


class _PreparedPeer:
    """The prepared descriptors of one peer: entry s * num_pages + p is slice s of page p."""

    def __init__(self, source: Any, remote: Any, num_ours: int, num_theirs: int, num_slices: int) -> None:
        self.source = source
        self.remote = remote
        self._num_ours = num_ours
        self._num_theirs = num_theirs
        self._slices = np.arange(num_slices, dtype=np.int32)

    def entries(self, src: PageIds, dst: PageIds) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the entries [n * S] of both sides, page by page. NIXL merges neighbours where both sides are
        contiguous (SPEC H09)."""
        ours = (src[:, None] + self._slices * np.int32(self._num_ours)).ravel()
        theirs = (dst[:, None] + self._slices * np.int32(self._num_theirs)).ravel()
        return ours.astype(np.int32, copy=False), theirs.astype(np.int32, copy=False)


class _NixlWrite:
    """One write, behind NIXL's handle of it."""

    def __init__(
        self,
        nixl: Any,
        peers: dict[str, _PreparedPeer],
        agent: str,
        src_pages: PageIds,
        dst_pages: PageIds,
        note: bytes,
    ) -> None:
        self._nixl = nixl
        self._peers = peers
        self._agent = agent
        self._pages = (src_pages, dst_pages)
        self._note = note
        self._handle: Any = None
        self._post_s = 0.0

    def post(self) -> bool:
        peer = self._peers[self._agent]
        ours, theirs = peer.entries(*self._pages)
        self._handle = self._nixl.make_prepped_xfer("WRITE", peer.source, ours, peer.remote, theirs, self._note)
        began_s = time.thread_time()
        state = self._nixl.transfer(self._handle)
        self._post_s = time.thread_time() - began_s
        return self._is_done(state)

    def check(self) -> bool:
        if self._agent not in self._peers:
            raise PeerLost(f"{self._agent} was removed")
        return self._is_done(self._nixl.check_xfer_state(self._handle))

    def times(self) -> WriteTimes | None:
        """Return the times, NIXL's in whole microseconds."""
        try:
            measured = self._nixl.get_xfer_telemetry(self._handle)
        except Exception as error:  # noqa: BLE001 - NIXL has no common root of its errors; the write itself is done
            log.debug("NIXL does not say how long a write took: %s", error)
            return None
        return WriteTimes(post_s=self._post_s, wire_s=measured.xferDuration / 1e6)

    def release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._nixl.release_xfer_handle(handle)

    def _is_done(self, state: str) -> bool:
        if state not in ("DONE", "PROC"):
            raise TransferError(f"NIXL reports {state}")
        return state == "DONE"


def descriptors(
    offsets: Sequence[int],
    slices: Sequence[PageSlice],
    *,
    base_address: int,
    page_bytes: int,
    num_pages: int,
    device: int,
) -> Descriptors:
    """Return one strided row for each slice, over all pages of a pool."""
    rows = [
        (base_address + offset, part.num_bytes, device, page_bytes, num_pages)
        for offset, part in zip(offsets, slices, strict=True)
    ]
    return np.array(rows, dtype=np.uint64)


def _import_nixl() -> Any:
    """Import nixl. Raises: TransferError when it is not installed."""
    try:
        return importlib.import_module("nixl")
    except ImportError as error:
        raise TransferError(
            f"moving KV pages between processes needs the package nixl (pip install 'nixl==1.5.1'), and: {error}"
        ) from error


def _set_environment(host: str, transport: Literal["auto", "tcp"], *, on_host: bool) -> None:
    """Set UCX's defaults (see the module docstring) before NIXL is imported. ``on_host``: the pool is host memory."""
    device = _interface_of(host)
    os.environ.setdefault("UCX_NET_DEVICES", device)
    if transport == "tcp":
        os.environ["UCX_TLS"] = "tcp" if on_host else "tcp,cuda_copy"
    elif host.startswith("127."):
        os.environ.setdefault("UCX_TLS", "tcp,cma" if on_host else "tcp,cuda_copy,cuda_ipc")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")


def may_pin() -> bool:
    """Return whether UCX may use RDMA, whose devices keep to the memory that a pool has when it is registered.
    It is known once an agent of this process is made."""
    allowed = os.environ.get("UCX_TLS")
    if allowed is not None and UNPINNED.issuperset(allowed.split(",")):
        return False
    return RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())


def _interface_of(host: str) -> str:
    """Return the network interface that has the address ``host``. Raises: TransferError."""
    address = socket.gethostbyname(host)
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(entry.address == address for entry in addresses):
            return name
    if address.startswith("127."):
        return "lo"
    raise TransferError(f"no interface of this machine has the address {address}; there are: {', '.join(interfaces)}")
