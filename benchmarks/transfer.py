"""KV pages between two processes over NIXL, beside a plain copy of the same bytes: `python -m benchmarks transfer`.

Rounds are alternated: copy here, write there, with digests, without, so that the machine's mood is the same for all. A
round takes 64 pages at random of a pool larger than the caches: those of a 1,024-token prompt of SmolLM2-135M.

Over CMA the sender copies, in process_vm_writev: what that takes is compared as CPU time, which other work on the
machine disturbs least, with memmove and with the bare system call on the same pages. Times from order to arrival are
wall time of two processes: they mean little on a machine that has other work.
"""

import ctypes
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Row
from benchmarks.transfer_peer import (
    NUM_PAGES,
    PAGES_PER_WRITE,
    PLAIN,
    VERIFIED,
    Round,
    make_agents,
    make_ports,
    ranks_of,
    receive,
    smollm2,
)
from kvtransfer.layout import KvLayout
from kvtransfer.ports.agent import NixlAgent
from kvtransfer.ports.checksum import page_digest
from kvtransfer.ports.memory import KvMemory
from kvtransfer.ports.notes import Note, pack
from kvtransfer.ports.port import AgentPort
from kvtransfer.ports.rank_port import PeerRanks, WriteOrder
from kvtransfer.ports.transfer_agent import TransferState
from kvtransfer.types import PageIds

SECTION = "KV pages between two processes (CMA), {dtype}, {page_kib:.0f} KiB a page"
PROMPT_PAGES = 64
META = b"m" * 400
LIMIT_S = 60.0


class _IoVec(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_LIBC = ctypes.CDLL(None, use_errno=True)


def measure(*, quick: bool) -> list[Row]:
    """fp16 and fp32 pages."""
    rounds = 5 if quick else 21
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
    copy = np.ones_like(pool)
    memory = KvMemory.of_array(layout, pool)
    agents = make_agents(memory, "prefill")
    ports = make_ports(memory, agents)
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"the receiving process has not started in {LIMIT_S} s")
    peers: dict[str, PeerRanks] = pipe.recv()
    pipe.send(ranks_of(layout, "prefill", ports))
    for mode, port in ports.items():
        port.connect(peers[mode])
    seconds: dict[str, list[float]] = {}
    room = 0

    def keep(name: str, taken: float) -> None:
        seconds.setdefault(name, []).append(taken)

    for turn in range(rounds + 2):
        if turn == 2:
            seconds.clear()  # the first two connect and touch the memory
        keep("memmove", _time_copy(pool, copy, _scattered(rng), _scattered(rng)))
        keep("process_vm_writev", _time_system_call(pid, memory, peers[PLAIN], _scattered(rng), _scattered(rng)))
        for mode, port in ports.items():
            room += 1
            this = Round(mode=mode, room=room, pages=_scattered(rng))
            keep(mode, _time_write(pipe, port, peers[mode], this, _scattered(rng)))
        keep("posts", _time_posts(agents[PLAIN], peers[PLAIN], _scattered(rng), _scattered(rng)))
        keep("digests", _time_digests(pool, _scattered(rng)))
        for _ in range(5):
            room += 1
            this = Round(mode=VERIFIED, room=room, pages=_scattered(rng)[:1])
            keep("one page", _time_write(pipe, ports[VERIFIED], peers[VERIFIED], this, _scattered(rng)[:1]))
    return _rows(layout, seconds)


def _scattered(rng: np.random.Generator) -> PageIds:
    return (rng.permutation(NUM_PAGES - 1)[:PROMPT_PAGES] + 1).astype(np.int32)


def _time_copy(pool: npt.NDArray[np.uint8], copy: npt.NDArray[np.uint8], src: PageIds, dst: PageIds) -> float:
    """CPU time of the same pages by memmove, one at a time."""
    started = time.thread_time()
    for source, target in zip(src, dst, strict=True):
        copy[target] = pool[source]
    return time.thread_time() - started


def _time_system_call(pid: int, memory: KvMemory, peer: PeerRanks, src: PageIds, dst: PageIds) -> float:
    """CPU time of process_vm_writev, one call a page: what CMA is made of."""
    num_bytes = memory.layout.page_bytes
    ours, theirs = memory.base_address, peer.ranks[0].base_address
    started = time.thread_time()
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        local = _IoVec(ours + source * num_bytes, num_bytes)
        remote = _IoVec(theirs + target * num_bytes, num_bytes)
        one = ctypes.c_ulong(1)
        if _LIBC.process_vm_writev(pid, ctypes.byref(local), one, ctypes.byref(remote), one, 0) != num_bytes:
            raise OSError(ctypes.get_errno(), f"process_vm_writev: {os.strerror(ctypes.get_errno())}")
    return time.thread_time() - started


def _time_posts(agent: NixlAgent, peer: PeerRanks, src: PageIds, dst: PageIds) -> float:
    """CPU time of the posts alone, which copy over CMA; the notes are of a room that nobody expects."""
    (info,) = peer.ranks
    note = pack(Note(room=0, generation=0, src_rank=0, page_offset=0, num_pages=PAGES_PER_WRITE, last=False))
    started = time.thread_time()
    transfers = [
        agent.write(info.agent, src[start : start + PAGES_PER_WRITE], dst[start : start + PAGES_PER_WRITE], note)
        for start in range(0, len(src), PAGES_PER_WRITE)
    ]
    taken = time.thread_time() - started
    for transfer in transfers:
        while transfer.poll() is TransferState.POSTED:
            pass
        transfer.release()
    return taken


def _time_digests(pool: npt.NDArray[np.uint8], pages: PageIds) -> float:
    """CPU time of the digests of the pages."""
    spans = ((0, pool.shape[1]),)
    started = time.thread_time()
    for page in pages:
        page_digest(pool[page], spans)
    return time.thread_time() - started


def _time_write(pipe: Connection, port: AgentPort, peer: PeerRanks, this: Round, src: PageIds) -> float:
    """From the order until the receiver has all pages, verified as the mode says."""
    pipe.send(this)
    if not pipe.poll(LIMIT_S) or pipe.recv() != "ready":
        raise TimeoutError(f"the receiving process does not answer in {LIMIT_S} s")
    order = WriteOrder(
        order_id=this.room,
        incarnation=peer.incarnation,
        room=this.room,
        generation=0,
        page_offset=0,
        src_pages=src,
        dst_pages=this.pages,
        last=True,
        meta=META,
    )
    started = time.monotonic()
    port.write(order)
    while port.num_in_flight and time.monotonic() < started + LIMIT_S:
        port.poll()
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"{len(src)} pages have not arrived in {LIMIT_S} s")
    ended: float = pipe.recv()
    return ended - started


def _rows(layout: KvLayout, seconds: dict[str, list[float]]) -> list[Row]:
    section = SECTION.format(dtype=layout.dtype, page_kib=layout.page_bytes / 1024)
    num_bytes = PROMPT_PAGES * layout.page_bytes
    added = [with_it / without - 1 for with_it, without in zip(seconds[VERIFIED], seconds[PLAIN], strict=True)]

    def speed(name: str, key: str, *, target: str | None = None) -> Row:
        rates = [num_bytes / taken / 1e9 for taken in seconds[key]]
        best = min(seconds["memmove"]) / min(seconds[key])
        limit = float(np.median([num_bytes / taken / 1e9 for taken in seconds["memmove"]]))
        return Row.of(section, name, rates, "GB/s", limit=limit, target=target, note=f"best against best {best:.1%}")

    def wall(name: str, key: str, *, target: str | None = None, note: str = "") -> Row:
        return Row.of(section, name, [taken * 1e3 for taken in seconds[key]], "ms", target=target, note=note)

    return [
        speed("64 pages, memmove, CPU time", "memmove"),
        speed("64 pages, bare process_vm_writev, CPU time", "process_vm_writev"),
        speed("64 pages, NIXL posts, CPU time", "posts", target=">= 80 %"),
        speed("64 pages, XXH3-64 digests, CPU time", "digests"),
        wall("64 pages, order to arrival, no digests", PLAIN),
        wall("64 pages, order to arrival, verified", VERIFIED),
        Row.of(
            section,
            "what verification adds to a hand-off",
            [100 * part for part in added],
            "%",
            target="< 15 %",
            note=f"best against best {min(seconds[VERIFIED]) / min(seconds[PLAIN]) - 1:.1%}",
        ),
        wall("1 page + meta, order to arrival, verified", "one page", target="< 1 ms"),
    ]
