"""Has replicas that leave push what they have cached to those that stay, and has a new one filled before it is used.

Owns:      when an order to push goes out, to whom, and how long it may last. What is worth moving, and what the others
           have already, the replicas find out among themselves (kvtransfer/migration).
Never:     sees pages; delays the attaching of a new replica by more than ``fill_s``.
Invariant: a replica that is a member again within BACK_S, as after a reconfiguration, is ordered nothing.
Thread:    the router's event loop.

The router orders, since it is the first to know: a replica is told of its end by its destructor alone, when it is
idle, and Serve accepts no calls to a replica that drains. The router's channel to it lasts as long as it does.
Several routers may order the same: a replica obeys one order at a time, and what has arrived is not sent again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from deployments.channel.frames import Asked, PushCache
from deployments.dispatch.leases import Leases, ReplicaCalls, ReplicaGone, ReplicaInfo
from kvtransfer.migration.wire import MigrationAddress
from replicas.errors import MantaError
from routing.types import ReplicaView

log = logging.getLogger(__name__)

BACK_S = 0.2  # within which a replica that only was reconfigured is back; Serve looks for idle ones after 0.5 s
MOST_TARGETS = 8
MOST_HOLDERS = 4  # that fill a new replica
HAND_OVER = 0.8  # of the drain time: what still runs then would be killed
FILL_SHARE = 0.5  # of a new replica's host tier that is filled


class CacheMigration:
    """The pushes that one router orders."""

    def __init__(self, leases: Leases, *, fill_s: float, push_s: float, drain_s: float) -> None:
        """``fill_s``: how long a new replica is filled; ``push_s``: how long one that leaves may push; 0: not at all.
        ``drain_s``: after which Serve kills it."""
        self._leases = leases
        self._fill_s = fill_s
        self._push_s = push_s
        self._drain_s = drain_s
        self._send: Callable[[str, Asked], None] = lambda replica_id, asked: None
        self.leaving: dict[str, asyncio.TimerHandle] = {}

    def start(self, send: Callable[[str, Asked], None]) -> None:
        """``send``: asks a replica over its channel; raises ReplicaGone."""
        self._send = send

    def left(self, gone: Iterable[ReplicaInfo], stay: Sequence[ReplicaInfo], load: Mapping[str, ReplicaView]) -> None:
        """Have ``gone`` push to those of ``stay`` that have least to do, unless they are `back` soon."""
        for info in gone:
            targets = _addresses(info, stay, load)[:MOST_TARGETS]
            if targets and self._push_s:
                order = PushCache(
                    targets=tuple(targets), most_s=self._push_s, hand_over_s=HAND_OVER * self._drain_s
                )
                timer = asyncio.get_running_loop().call_later(BACK_S, self._order, info.replica_id, order)
                self.leaving[info.replica_id] = timer

    def back(self, members: Container[str]) -> None:
        """Take back the orders to replicas that are ``members`` again."""
        for replica_id in [each for each in self.leaving if each in members]:
            self.leaving.pop(replica_id).cancel()

    def may_fill(self, new: ReplicaInfo) -> bool:
        """Whether `fill` could have anything pushed to ``new``."""
        return bool(self._fill_s) and new.migration is not None

    async def fill(self, new: ReplicaInfo, others: Sequence[ReplicaInfo], load: Mapping[str, ReplicaView]) -> None:
        """Have the least busy of ``others`` push to ``new``, if it has computed nothing yet; for at most ``fill_s``."""
        holders = {info.migration: info.replica_id for info in others}
        wanted = [holders[address] for address in _addresses(new, others, load)[:MOST_HOLDERS]]
        if not wanted or not self.may_fill(new) or new.migration is None:
            return
        most_bytes = int(FILL_SHARE * new.host_bytes / len(wanted))
        order = PushCache(targets=(new.migration,), most_s=self._fill_s, most_bytes=most_bytes, share=1.0)
        try:
            async with asyncio.timeout(self._fill_s):
                stats = (await self._leases.call(new.replica_id, ReplicaCalls.report)).stats
                if stats.num_extend_steps or stats.num_decode_steps:
                    return  # it is this router that is new
                calls = (self._leases.call(each, ReplicaCalls.push_cache, order) for each in wanted)
                for answer in await asyncio.gather(*calls, return_exceptions=True):
                    if isinstance(answer, BaseException):
                        log.warning("replica %s was not filled by another one: %r", new.replica_id, answer)
        except (TimeoutError, MantaError) as error:
            log.info("replica %s is used as far as it is filled: %r", new.replica_id, error)

    def stop(self) -> None:
        for timer in self.leaving.values():
            timer.cancel()
        self.leaving.clear()

    def check(self) -> None:
        """Raises AssertionError if an order waits that was taken back."""
        assert not any(timer.cancelled() for timer in self.leaving.values())

    def _order(self, replica_id: str, order: PushCache) -> None:
        del self.leaving[replica_id]
        log.info("replica %s leaves: it pushes its cached prefixes to %d others", replica_id, len(order.targets))
        with contextlib.suppress(ReplicaGone):  # it has died
            self._send(replica_id, order)


def _addresses(
    info: ReplicaInfo, others: Iterable[ReplicaInfo], load: Mapping[str, ReplicaView]
) -> list[MigrationAddress]:
    """Return where ``others`` of the role of ``info`` listen for pages, those with least to do first."""

    def busy(other: ReplicaInfo) -> tuple[int, int, str]:
        view = load.get(other.replica_id)
        return (0, 0, "") if view is None else (view.queued_uncached_tokens, view.num_running, other.replica_id)

    if info.migration is None:
        return []
    able = (each for each in others if each.role is info.role and each.replica_id != info.replica_id)
    return [each.migration for each in sorted(able, key=busy) if each.migration is not None]
