"""A scheduler over a fake device with all three tiers: host memory and a file store whose disk fails as a test says.

A wrong page changes an answer, or fails an assertion of the fake device. Each page is page_size * (token, position).
"""

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kvtransfer.stores.file import FileMedium
from kvtransfer.stores.items import Item, StoreKey
from kvtransfer.stores.store import Store
from replicas.cache.host_pages import HostTier
from replicas.cache.kv import KvCache
from replicas.cache.store_tier import StoreTier
from replicas.cache.store_worker import FetchStage, Put, Worker
from replicas.config import SchedulerConfig
from replicas.memory.host import HostKVCache
from replicas.scheduler.plan import StepPlan
from replicas.scheduler.scheduler import Scheduler
from tests.fakes import FakeDevice
from tests.harness import Bench, Clock, pool_of

LAYOUT = b"fake:1:2"


class FakePages:
    """The Copier between a FakeDevice and host memory."""

    def __init__(self, device: FakeDevice, host: HostKVCache, page_size: int) -> None:
        self.host = host
        self._device, self._ps = device, page_size

    def backup(self, device_pages: np.ndarray, host_pages: np.ndarray, *, wait: bool = True) -> None:
        for page, at in zip(device_pages.tolist(), host_pages.tolist(), strict=True):
            slots = slice(page * self._ps, (page + 1) * self._ps)
            both = np.stack([self._device.tokens[slots], self._device.positions[slots]])
            self.host.view[at] = both.view(np.uint8).reshape(-1)
            self.host.seal(at)

    def load(self, host_pages: np.ndarray, device_pages: np.ndarray) -> np.ndarray:
        ok = np.array([self.host.intact(at) for at in host_pages.tolist()])
        for page, at in zip(device_pages.tolist(), host_pages.tolist(), strict=True):
            tokens, positions = self.host.view[at].view(np.int64).reshape(2, self._ps)
            self._device.tokens[page * self._ps : (page + 1) * self._ps] = tokens
            self._device.positions[page * self._ps : (page + 1) * self._ps] = positions
        return ok


class FaultyDisk(FileMedium):
    """A file store whose disk does what ``fault`` says: "" (well), "eio", "full", or "slow" (moves the clock)."""

    fault = ""
    slow_s = 1.0

    def __init__(self, root: Path, clock: Clock, capacity_bytes: int = 1 << 20) -> None:
        super().__init__(str(root), capacity_bytes=capacity_bytes, clock=clock)
        self._clock = clock
        self.meanwhile: Callable[[], None] = lambda: None  # what others do during a look

    def contains(self, keys: Sequence[StoreKey]) -> list[bool]:
        self._disturb()
        self.meanwhile()
        return super().contains(keys)

    def read(self, wanted: Iterable[Item]) -> Iterator[int]:
        for item in wanted:
            self._disturb()
            yield from super().read([item])

    def write(self, items: Iterable[Item]) -> Iterator[bool]:
        for item in items:
            self._disturb()
            if self.fault == "full":
                raise OSError(errno.ENOSPC, "no space left")
            yield from super().write([item])

    def _disturb(self) -> None:
        if self.fault == "eio":
            raise OSError(errno.EIO, "the disk fails")
        if self.fault == "slow":
            self._clock.now_s += self.slow_s


class HandWorker(Worker):
    """A store's thread without the thread: `turn` does one job."""

    def start(self) -> None: ...

    def turn(self) -> bool:
        """Returns: whether there was a job."""
        if self._reads:
            fetch = self._reads.popleft()
            if fetch.stage is FetchStage.LOOKING:
                self._look(fetch)
            else:
                self._read(fetch)
                fetch.stage = FetchStage.OVER
            return True
        if self._puts:
            put: Put = self._puts.popleft()
            self._write(put)
            self._done.append(put)
            return True
        return False


class TieredBench(Bench):
    """A Bench whose pages move between three tiers; the store's jobs run when `step` turns to them, or hang."""

    def __init__(
        self,
        root: Path,
        *,
        num_pages: int = 12,
        num_host: int = 24,
        page_size: int = 4,
        write: str = "write_back",
        policy: str = "wait_complete",
        compute_s_per_token: float = 0.01,
        threaded: bool = False,
    ) -> None:
        super().__init__(num_pages=num_pages, page_size=page_size)
        self.host = HostKVCache.create(num_host, rank_page_bytes=16 * page_size, tp=1)
        tier = HostTier(num_pages=num_host, copier=FakePages(self.device, self.host, page_size), write=write)
        self.kv = KvCache(
            size=pool_of(num_pages, page_size), max_requests=8, context_len=128, host=tier, clock=self.clock
        )
        self.scheduler = Scheduler(self.kv, SchedulerConfig(chunked_prefill_size=16), max_running=8, clock=self.clock)
        assert self.kv.store.tiers is not None
        self.tiers = self.kv.store.tiers
        self.tiers.compute_s_per_token = compute_s_per_token
        self.disk = FaultyDisk(root, self.clock)
        self.store = Store(self.disk, layout_digest=LAYOUT, clock=self.clock)
        self.worker = (Worker if threaded else HandWorker)(self.store, self.host, "fake", page_size, self.clock)
        self.hangs = False  # the store's thread does nothing
        self.store_tier = StoreTier(self.tiers, self.worker, name="fake", policy=policy, clock=self.clock)
        self.kv.store_tier = self.store_tier

    def step(self) -> StepPlan | None:
        if isinstance(self.worker, HandWorker) and not self.hangs:
            self.worker.turn()
        self.store_tier.poll()
        plan = super().step()
        self.store_tier.check()
        return plan

    def settle(self) -> None:
        """Let the store's thread finish, and the tiers take in what it did; idle copies are made."""
        assert isinstance(self.worker, HandWorker)
        assert not self.hangs
        while True:
            self.store_tier.poll()
            copied = self.tiers.copy_idle(8, to_store=True)
            if not self.worker.turn() and not copied:
                break
        self.store_tier.poll()

    def finish(self) -> None:
        """Run all to their ends: every answer is the oracle's, and no page of any tier is held."""
        self.run()
        self.settle()
        assert (self.tiers.host.coming, self.store_tier.num_taken) == (0, 0)
        self.kv.flush()
        assert self.tiers.host.num_free == self.tiers.host.num_pages
        self.tiers.check()
        self.store.check()

    def close(self) -> None:
        self.store_tier.close()
        self.host.close()
