"""KV pages between two processes over NIXL, beside a plain copy of the same bytes.

Rounds are alternated: copy here, write there, with digests, without, so that other work on the machine hits all alike.
A round takes 64 pages at random of a pool larger than the caches: those of a 1,024-token prompt of SmolLM2-135M.

Over CMA the sender copies, in process_vm_writev: what that takes is compared as CPU time, which other work on the
machine disturbs least, with memmove and with the bare system call on the same pages. Times from order to arrival are
wall time of two processes: they mean little on a machine that has other work.
"""

import argparse
import ctypes
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Row, Table, seconds
from kvtransfer.layout import KvLayout
from kvtransfer.ports.agent import NixlAgent
from kvtransfer.ports.memory import KvMemory, page_digest
from kvtransfer.ports.notifications import Note, pack
from kvtransfer.ports.port import AgentPort
from kvtransfer.ports.rank_port import Arrived, ExpectOrder, PeerRanks, WriteOrder
from kvtransfer.ports.transfer_agent import Transfer, TransferState
from kvtransfer.types import PageIds, Verify

SECTION = "KV pages between two processes (CMA), {dtype}, {page_kib:.0f} KiB a page"
PROMPT_PAGES = 64
META = b"m" * 400
LIMIT_S = 60.0

NUM_PAGES = 385  # 142 MB in fp16: four times the last cache of a small server's core complex
PAGES_PER_WRITE = 16
PAUSE_S = 1e-4  # between the receiver's turns, as a transfer service with open rooms does
PLAIN, VERIFIED = "written without digests", "written and verified"
MODES = {PLAIN: Verify.OFF, VERIFIED: Verify.ALL}


class _IoVec(ctypes.Structure):
    """The C type `struct iovec`: an address and a length."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What to expect of the sender in one round."""

    mode: str
    room: int
    pages: PageIds


def smollm2(dtype: str, item_bytes: int) -> KvLayout:
    return KvLayout(
        model="SmolLM2-135M", architecture="MHA", num_layers=30, num_kv_heads=3, head_dim=64, dtype=dtype,
        item_bytes=item_bytes, page_size=16, tp=1,
    )  # fmt: skip


class Side:
    """One of the two processes: an agent and a port for each mode, over one pool."""

    def __init__(self, layout: KvLayout, pool: npt.NDArray[np.uint8], role: str) -> None:
        self.memory = KvMemory.of_array(layout, pool)
        self.agents = {mode: NixlAgent(self.memory, role=role) for mode in MODES}
        self.ports = {mode: AgentPort(self.memory, 0, self.agents[mode], verify=MODES[mode]) for mode in MODES}
        self.ranks = {
            mode: PeerRanks(incarnation=f"{role}, {mode}", fingerprint=layout.fingerprint, tp=1, ranks=(port.info,))
            for mode, port in self.ports.items()
        }

    def connect(self, peers: dict[str, PeerRanks]) -> None:
        for mode, port in self.ports.items():
            port.connect(peers[mode])


def receive(pipe: Connection, layout: KvLayout) -> None:
    """Run the other process: say when the last page of each round was verified, by the clock that both share."""
    side = Side(layout, np.ones((NUM_PAGES, layout.page_bytes), dtype=np.uint8), "decode")
    pipe.send(side.ranks)
    peers: dict[str, PeerRanks] = pipe.recv()
    side.connect(peers)
    while True:
        while not pipe.poll(PAUSE_S):  # a write ends at the sender only with this side's turns
            for port in side.ports.values():
                port.poll()
        this: Round = pipe.recv()
        port = side.ports[this.mode]
        incarnation = peers[this.mode].incarnation
        port.expect(ExpectOrder(room=this.room, generation=0, incarnation=incarnation, pages=this.pages))
        pipe.send("ready")
        num_left = len(this.pages)
        while num_left:
            arrived = [event for event in port.poll() if isinstance(event, Arrived)]
            assert not any(event.bad_pages for event in arrived), "a page arrived changed"
            num_left -= sum(event.num_pages for event in arrived)
            if not arrived:
                time.sleep(PAUSE_S)
        pipe.send(time.monotonic())
        port.forget(this.room, 0)


def rows(options: argparse.Namespace) -> list[Row]:
    """Measure fp16 and fp32 pages."""
    rounds = options.rounds or (5 if options.quick else 21)
    return [
        row
        for dtype, item_bytes in (("float16", 2), ("float32", 4))
        for row in _measure_layout(smollm2(dtype, item_bytes), rounds)
    ]


def _measure_layout(layout: KvLayout, rounds: int) -> list[Row]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(theirs, layout), daemon=True)
    receiver.start()
    try:
        assert receiver.pid is not None
        return _send(pipe, layout, rounds, receiver.pid)
    finally:
        receiver.kill()
        receiver.join()


def _send(pipe: Connection, layout: KvLayout, rounds: int, pid: int) -> list[Row]:
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (NUM_PAGES, layout.page_bytes), dtype=np.uint8)
    copy, spans = np.ones_like(pool), ((0, layout.page_bytes),)
    side = Side(layout, pool, "prefill")
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"the receiving process has not started in {LIMIT_S} s")
    peers: dict[str, PeerRanks] = pipe.recv()
    pipe.send(side.ranks)
    side.connect(peers)
    taken: dict[str, list[float]] = {}
    rooms = itertools.count(1)

    def some() -> PageIds:
        return (rng.permutation(NUM_PAGES - 1)[:PROMPT_PAGES] + 1).astype(np.int32)

    def cpu(name: str, work: Callable[..., object], *pages: PageIds) -> None:
        taken.setdefault(name, []).append(seconds(lambda: work(*pages), clock=time.thread_time))

    def written(name: str, mode: str, num: int = PROMPT_PAGES) -> None:
        this = Round(mode=mode, room=next(rooms), pages=some()[:num])
        taken.setdefault(name, []).append(_time_write(pipe, side.ports[mode], peers[mode], this, some()[:num]))

    def memmove(src: PageIds, dst: PageIds) -> None:
        """Copy the same pages, one at a time."""
        for source, target in zip(src, dst, strict=True):
            copy[target] = pool[source]

    def digests(pages: PageIds) -> None:
        for page in pages:
            page_digest(pool[page], spans)

    for turn in range(rounds + 2):
        if turn == 2:
            taken.clear()  # the first two connect and touch the memory
        cpu("memmove", memmove, some(), some())
        cpu("process_vm_writev", partial(_system_calls, pid, side.memory, peers[PLAIN]), some(), some())
        for mode in MODES:
            written(mode, mode)
        posted: list[Transfer] = []
        cpu("posts", partial(_post, posted, side.agents[PLAIN], peers[PLAIN]), some(), some())
        for transfer in posted:
            while transfer.poll() is TransferState.POSTED:
                pass
            transfer.release()
        cpu("digests", digests, some())
        for _ in range(5):
            written("one page", VERIFIED, 1)
    return _rows(layout, taken)


def _system_calls(pid: int, memory: KvMemory, peer: PeerRanks, src: PageIds, dst: PageIds) -> None:
    """Copy by process_vm_writev, one call a page: what CMA is made of."""
    num_bytes = memory.layout.page_bytes
    ours, theirs = memory.base_address, peer.ranks[0].base_address
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        local = _IoVec(ours + source * num_bytes, num_bytes)
        remote = _IoVec(theirs + target * num_bytes, num_bytes)
        one = ctypes.c_ulong(1)
        if _LIBC.process_vm_writev(pid, ctypes.byref(local), one, ctypes.byref(remote), one, 0) != num_bytes:
            raise OSError(ctypes.get_errno(), f"process_vm_writev: {os.strerror(ctypes.get_errno())}")


def _post(posted: list[Transfer], agent: NixlAgent, peer: PeerRanks, src: PageIds, dst: PageIds) -> None:
    """Post writes, which over CMA copies; their notes are of an unknown room."""
    (info,) = peer.ranks
    note = pack(Note(room=0, generation=0, src_rank=0, page_offset=0, num_pages=PAGES_PER_WRITE, last=False))
    for start in range(0, len(src), PAGES_PER_WRITE):
        part = slice(start, start + PAGES_PER_WRITE)
        posted.append(agent.write(info.agent, src[part], dst[part], note))


def _time_write(pipe: Connection, port: AgentPort, peer: PeerRanks, this: Round, src: PageIds) -> float:
    """Return the time from the first order until the receiver has all pages, verified as the mode says."""
    pipe.send(this)
    if not pipe.poll(LIMIT_S) or pipe.recv() != "ready":
        raise TimeoutError(f"the receiving process does not answer in {LIMIT_S} s")
    orders = [
        WriteOrder(
            order_id=this.room * len(src) + start,
            incarnation=peer.incarnation,
            room=this.room,
            generation=0,
            page_offset=start,
            src_pages=src[start : start + PAGES_PER_WRITE],
            dst_pages=this.pages[start : start + PAGES_PER_WRITE],
            last=start + PAGES_PER_WRITE >= len(src),
            meta=META if start + PAGES_PER_WRITE >= len(src) else b"",
        )
        for start in range(0, len(src), PAGES_PER_WRITE)
    ]
    started = time.monotonic()
    for order in orders:
        port.write(order)
    while port.num_in_flight and time.monotonic() < started + LIMIT_S:
        port.poll()
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"{len(src)} pages have not arrived in {LIMIT_S} s")
    ended: float = pipe.recv()
    return ended - started


def _rows(layout: KvLayout, taken: dict[str, list[float]]) -> list[Row]:
    table = Table(SECTION.format(dtype=layout.dtype, page_kib=layout.page_bytes / 1024))
    num_bytes = PROMPT_PAGES * layout.page_bytes
    limit = num_bytes / statistics.median(taken["memmove"]) / 1e9

    def speed(name: str, key: str, target: str | None = None) -> None:
        note = f"best against best {min(taken['memmove']) / min(taken[key]):.1%}"
        rates = [num_bytes / each / 1e9 for each in taken[key]]
        table.add(f"64 pages, {name}, CPU time", rates, "GB/s", limit=limit, target=target, note=note)

    def wall(name: str, key: str, target: str | None = None) -> None:
        table.add(name, [each * 1e3 for each in taken[key]], "ms", target=target)

    speed("memmove", "memmove")
    speed("bare process_vm_writev", "process_vm_writev")
    speed("NIXL posts", "posts", ">= 80 %")
    speed("XXH3-64 digests", "digests")
    wall("64 pages, order to arrival, no digests", PLAIN)
    wall("64 pages, order to arrival, verified", VERIFIED)
    added = [100 * (own / plain - 1) for own, plain in zip(taken[VERIFIED], taken[PLAIN], strict=True)]
    note = f"best against best {min(taken[VERIFIED]) / min(taken[PLAIN]) - 1:.1%}"
    table.add("what verification adds to a hand-off", added, "%", target="< 15 %", note=note)
    wall("1 page + meta, order to arrival, verified", "one page", "< 1 ms")
    return table.rows
