"""Reads and writes the K/V of chosen slots, and copies pages to the host tier and back, on all ranks of an engine.

Owns:      the orders for it that rank 0 gives the others, beside the plans of steps.
Never:     chooses slots, or runs within a step.
Invariant: every rank runs the same order; orders are collectives, but for `GiveBack`: a copy is complete on all ranks
           when it returns, unless `HostKVCache` makes it in the background, which only a rank alone does. Where a rank
           cannot run its part, it says so to the others, and none waits for it.
Thread:    the runner's: engine thread on rank 0, the worker's main thread on the others.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.layout import KvLayout
from kvtransfer.replay.payload import Payload, Slots, payload_shape
from replicas.config import EngineConfig, kv_layout
from replicas.errors import Overloaded
from replicas.layers.tp_group import TpGroup
from replicas.loading.model_files import model_identity
from replicas.loading.panel_file import give_back_panels
from replicas.memory.allocator import Pages
from replicas.memory.host import HostKVCache
from replicas.memory.pool import MHATokenToKVPool
from replicas.memory.state_pool import StatePool
from replicas.runner.batch import within_memory
from replicas.types import StateCopy

log = logging.getLogger(__name__)
COPIED_BYTES = 64 << 20  # of windows, at once


@dataclass(frozen=True, slots=True, eq=False)
class ReadKv:
    """An order to every rank: give the K/V of your heads in ``slots`` to all."""

    slots: Slots  # [n]


@dataclass(frozen=True, slots=True, eq=False)
class WriteKv:
    """An order to every rank: write your heads of ``payload`` into ``slots``."""

    slots: Slots  # [n]
    payload: Payload  # [L, 2, n, K, token_bytes]


@dataclass(frozen=True, slots=True, eq=False)
class CopyPages:
    """An order to every rank: copy your part of device pages to the host tier, or back."""

    device_pages: Pages  # [n]
    host_pages: Pages  # [n]
    to_host: bool


@dataclass(frozen=True, slots=True, eq=False)
class CopyStates:
    """An order to every rank: make copies to snapshots of recurrent states and from them, before the next step."""

    copies: Sequence[StateCopy]


@dataclass(frozen=True, slots=True, eq=False)
class CarryWindows:
    """An order to every rank: copy your heads of parts of the window pool into pages that carry them, or back."""

    parts: Pages  # [n]
    pages: Pages  # of the pool
    to_pages: bool


@dataclass(frozen=True, slots=True)
class GiveBack:
    """An order to every rank: give memory back to the system (engine/occupation.py)."""

    parts: frozenset[str]  # kv_cache, weights


KvOrder = ReadKv | WriteKv | CopyPages | CopyStates | CarryWindows | GiveBack


def give_back_parts(order: GiveBack, pools: Sequence[MHATokenToKVPool]) -> None:
    """Run this rank's part."""
    if "kv_cache" in order.parts:
        for pool in pools:
            pool.give_back()
    if "weights" in order.parts:
        give_back_panels()


def copy_pages(
    order: CopyPages, pool: MHATokenToKVPool, host: HostKVCache, tp: TpGroup, *, wait: bool = True
) -> npt.NDArray[np.bool_]:
    """Run this rank's part. ``wait``: as of `HostKVCache.backup`. Returns: [n] whether the page was copied, and intact,
    on every rank; or is being copied."""
    ok = np.zeros(len(order.host_pages), dtype=np.bool_)
    try:
        if order.to_host:
            host.backup(pool, order.device_pages, order.host_pages, wait=wait)
            ok[:] = True
        else:
            ok = host.load(pool, order.host_pages, order.device_pages)
    except RuntimeError as error:  # a GPU's; the other ranks wait for this one
        log.warning("%d pages are not copied between the device and the host: %s", len(ok), error)
    if tp.size == 1:
        return ok
    of_ranks = tp.all_gather(torch.from_numpy(ok).to(tp.device, torch.uint8)[None], dim=0)
    return np.asarray(of_ranks.cpu().numpy().astype(np.bool_).all(axis=0))


class RankedCopier:
    """The replicas.cache.tiers.Copier of rank 0; ``send`` gives an order to the other ranks."""

    def __init__(
        self, pool: MHATokenToKVPool, host: HostKVCache, tp: TpGroup, send: Callable[[KvOrder], None]
    ) -> None:
        self.host = host
        self._pool = pool
        self._tp = tp
        self._send = send

    def backup(self, device_pages: Pages, host_pages: Pages, *, wait: bool = True) -> None:
        if not self._run(CopyPages(device_pages, host_pages, to_host=True), wait=wait).all():
            raise Overloaded(f"{len(host_pages)} pages were not copied to the host: the logs of the ranks say why")

    def load(self, host_pages: Pages, device_pages: Pages) -> npt.NDArray[np.bool_]:
        return self._run(CopyPages(device_pages, host_pages, to_host=False))

    def _run(self, order: CopyPages, *, wait: bool = True) -> npt.NDArray[np.bool_]:
        self._send(order)
        return copy_pages(order, self._pool, self.host, self._tp, wait=wait)


class CarriedWindows:
    """A replicas.disagg.roles.Carrier: K and V of window layers in the place of other layers of pages, layer by layer,
    on all ranks of ``tp``. ``send`` gives the others the order."""

    def __init__(
        self, pools: Sequence[MHATokenToKVPool], tp: TpGroup, send: Callable[[KvOrder], None] = lambda order: None
    ) -> None:
        """``pools``: that of full layers and that of windows."""
        self._pools, self._tp, self._send = pools, tp, send

    def put(self, row: int, num_tokens: int, parts: Pages, pages: Pages) -> None:
        self._run(CarryWindows(parts, pages, to_pages=True))

    def take(self, row: int, num_tokens: int, parts: Pages, pages: Pages) -> None:
        self._run(CarryWindows(parts, pages, to_pages=False))

    def _run(self, order: CarryWindows) -> None:
        if not self.run(order):
            raise Overloaded(f"windows in {len(order.pages)} pages were not copied: the logs of the ranks say why")

    def run(self, order: CarryWindows) -> bool:
        """Run this rank's part. Returns: whether it is complete on all ranks."""
        self._send(order)
        is_made = False
        try:
            self._copy(order)
            is_made = True
        except RuntimeError as error:  # the other ranks wait for this one
            log.warning("windows in %d pages are not copied: %s", len(order.pages), error)
        return bool(self._tp.min_int(is_made))

    @torch.inference_mode()
    def _copy(self, order: CarryWindows) -> None:
        """Copy layer by layer, a bounded number of bytes at a time."""
        full, windows = self._pools
        at = np.arange(len(order.parts) * windows.num_layers)
        pages, parts = (
            torch.from_numpy(held.astype(np.int64)[at // pool.num_layers] * pool.num_layers + at % pool.num_layers)
            for held, pool in ((order.pages, full), (order.parts, windows))
        )
        of_pages, of_parts = (
            pool.bytes_of_pages().view((pool.num_pages + 1) * pool.num_layers, -1) for pool in self._pools
        )
        step = max(1, COPIED_BYTES // of_parts.shape[1])
        for some in (slice(start, start + step) for start in range(0, len(at), step)):
            if order.to_pages:
                of_pages[pages[some]] = of_parts[parts[some]]
            else:
                of_parts[parts[some]] = of_pages[pages[some]]


class CarriedStates:
    """A replicas.disagg.roles.Carrier: the recurrent states of a request as bytes of pages, on one rank. ``send``
    gives the other ranks of ``tp`` the order for copies of snapshots, which all make."""

    def __init__(
        self,
        pool: MHATokenToKVPool,
        states: StatePool,
        tp: TpGroup,
        send: Callable[[KvOrder], None] = lambda order: None,
    ) -> None:
        self._rows = pool.bytes_of_pages()
        self._states = states
        self._tp = tp
        self._send = send

    def put(self, row: int, num_tokens: int, parts: Pages, pages: Pages) -> None:
        within_memory(lambda: self._put(row, num_tokens, pages), self._does_not_fit)

    def take(self, row: int, num_tokens: int, parts: Pages, pages: Pages) -> None:
        within_memory(lambda: self._take(row, num_tokens, pages), self._does_not_fit)

    def run(self, copies: Sequence[StateCopy]) -> list[int]:
        """Make copies to snapshots and from them, each on all ranks or on none. Returns: the numbers of those that
        could not be made. Where one was to go to a request, the step that needs it says so."""
        if copies:
            self._send(CopyStates(copies))
        lost = list[int]()
        for each in copies:
            is_made = False
            try:
                is_made = not within_memory(functools.partial(self._states.copy, [each]), self._does_not_fit)
            except (Overloaded, RuntimeError) as error:
                log.warning("recurrent states behind %d tokens are not copied: %s", each.num_tokens, error)
            if not self._tp.min_int(is_made):
                self._states.undo(each)
                lost.append(each.number)
        self._wait()
        return lost

    @torch.inference_mode()
    def _put(self, row: int, num_tokens: int, pages: Pages) -> None:
        states = self._states.read(row, num_tokens)
        filled = torch.zeros(len(pages) * self._rows.shape[1], dtype=torch.uint8, device=states.device)
        filled[: len(states)] = states
        self._rows[self._places(pages)] = filled.view(len(pages), -1)
        self._wait()

    @torch.inference_mode()
    def _take(self, row: int, num_tokens: int, pages: Pages) -> None:
        self._states.write(row, num_tokens, self._rows[self._places(pages)].flatten())
        self._wait()

    @property
    def _does_not_fit(self) -> str:
        return f"a copy of recurrent states did not fit into the memory of {self._rows.device}"

    def _places(self, pages: Pages) -> torch.Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self._rows.device)

    def _wait(self) -> None:
        """Wait for a GPU: peers read and write pages without its stream."""
        if self._rows.is_cuda:
            torch.cuda.current_stream(self._rows.device).synchronize()


def run_order(order: ReadKv | WriteKv, pool: MHATokenToKVPool, tp: TpGroup, num_kv_heads: int) -> Payload | None:
    """Run this rank's part. Returns: the bytes read, complete on every rank. ``num_kv_heads`` counts all ranks' heads.

    With more ranks than KV heads, each head lies on tp / num_kv_heads ranks in a row (layers/linear.py).
    Raises: Overloaded on every rank where one could not, as without memory for it.
    """
    own = torch.empty(0)
    is_made = False
    try:
        if isinstance(order, ReadKv):
            own = pool.read_slots(order.slots).contiguous().view(torch.uint8)
        else:
            first = tp.rank * num_kv_heads // tp.size
            payload = np.ascontiguousarray(order.payload[:, :, :, first : first + pool.num_kv_heads])
            pool.write_slots(order.slots, torch.from_numpy(payload).view(pool.buffer.dtype))
        is_made = True
    except (RuntimeError, MemoryError) as error:  # the other ranks wait for this one
        log.warning("K/V in %d slots is not read or written: %s", len(order.slots), error)
    if not tp.min_int(is_made):
        raise Overloaded(f"K/V in {len(order.slots)} slots was not read or written: the logs of the ranks say why")
    if isinstance(order, WriteKv):
        return None
    heads = tp.all_gather(own, dim=3)
    whole: Payload = heads[:, :, :, :: heads.shape[3] // num_kv_heads].cpu().numpy()
    return np.ascontiguousarray(whole)


class RankedKvBytes:
    """The kvtransfer.replay.payload.KvBytes of rank 0; ``send`` gives an order to the other ranks."""

    def __init__(
        self, config: EngineConfig, pool: MHATokenToKVPool, tp: TpGroup, send: Callable[[KvOrder], None]
    ) -> None:
        self._config = config
        self._pool = pool
        self._tp = tp
        self._send = send

    @functools.cached_property
    def layout(self) -> KvLayout:
        """The layout of K/V bytes, with the model's identity: samples its files, once."""
        return kv_layout(self._config, model_identity(self._config.model.path, self._config.model.quantization), tp=1)

    def read(self, slots: Slots) -> Payload:
        payload = self._run(ReadKv(slots))
        assert payload is not None
        return payload

    def write(self, slots: Slots, payload: Payload) -> None:
        wanted = payload_shape(self.layout, len(slots))
        if payload.shape != wanted or payload.dtype != np.uint8:
            raise ValueError(f"K/V bytes of shape {wanted} uint8 are wanted, got {payload.shape} {payload.dtype}")
        self._run(WriteKv(slots, payload))

    def _run(self, order: ReadKv | WriteKv) -> Payload | None:
        self._send(order)
        return run_order(order, self._pool, self._tp, self._config.model.num_kv_heads)
