"""What each key has used of late, and whether it may use more.

Owns:      the counts of a key's requests and tokens: this router's own, and those that the others have told.
Never:     asks another router on a request's way: each tells the others its own counts every TELL_S.
Invariant: a token counts from when it is delivered. Of a request that runs, the rest of its estimate counts as well. So
           a limit is exceeded by at most what runs when it is reached, and what one router takes between two tellings.
Thread:    the router's event loop.

A minute is a sliding one: the count of this minute, and of the one before the part that is still within 60 s. It is
exact if the minute before was used evenly. What exceeds the limit of a minute is owed: it counts in the next minute.
"""

import asyncio
import logging
import math
import operator
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from deployments.tenancy.tenants import OTHERS, TenantKey, TenantKeys
from replicas.errors import Fault, InvalidRequest, MantaError

log = logging.getLogger(__name__)

MINUTE_S = 60.0
TELL_S = 0.2  # from one look at the other routers' counts to the next
LOOK_S = 1.0  # from one look at the file of keys to the next
MOST_TENANTS = 100  # that metrics name; the rest is one
Kind = Literal["requests", "input_tokens", "output_tokens"]
KINDS: tuple[Kind, ...] = ("requests", "input_tokens", "output_tokens")
HEADERS = [tuple(f"x-ratelimit-{what}-{kind.replace('_', '-')}".encode() for what in ("limit", "remaining", "reset"))
           for kind in KINDS]  # fmt: skip
FIRST_OUTPUT_LEN = 128.0  # of a key's first answer, which counts among its last ones: before it, there is none
NUM_LENGTHS, QUANTILE = 64, 0.9  # a choice is expected to be as long as this part of a key's last ones were, at most
REST_LIMITS = 2  # a request that another router ran before goes on until its key has used so many limits
NOTHING = (0.0, 0.0, 0.0)
Used = dict[str, list[float]]  # name of a key -> of each of KINDS


class OverQuota(MantaError):
    """The key has used what it may in a minute."""

    fault = Fault.TOO_MANY
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BeyondLimit(InvalidRequest):
    """The request alone is more than its key may ever use at once: no waiting helps."""

    code = "request_beyond_limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one router tells the others."""

    used: Mapping[int, Used]  # in this minute and the one before
    expected: Mapping[str, Sequence[float]]  # of what runs there, beyond what it has used; by the key's name
    choices: Mapping[str, int]  # that run or wait there, by the key's name


class SoFar(NamedTuple):
    """What a request that runs has used so far."""

    input_tokens: int = 0
    output_tokens: int = 0
    longest: int = 0  # of its choices, in tokens


@dataclass(slots=True, kw_only=True, eq=False)
class Reserved:
    """What one request counts with while it runs: what it has used so far, and what is left of its estimate."""

    key: TenantKey
    minute: int  # in which it counts as a request
    estimate: tuple[float, float, float]  # of each of KINDS
    most: int  # tokens that a choice may have
    so_far: Callable[[], SoFar] = SoFar
    counted: SoFar = field(default_factory=SoFar)  # what of it stands in the minutes


class LastMinute(NamedTuple):
    """What a key has used, at all routers, of each of KINDS."""

    this: Sequence[float]  # minute, with what is owed from those before and what is expected of requests that run
    before: Sequence[float]  # in the minute before this one, without what is owed
    left: float  # the part of that one that is within 60 s

    def used(self, at: int) -> float:
        """Count what is within 60 s, or owed, of the kind at ``at``."""
        return self.this[at] + self.before[at] * self.left

    def wait_s(self, at: int, room: float, limit: int) -> float:
        """Return how long it takes until no more than ``room`` counts, if nothing more comes."""
        this, before = self.this[at], self.before[at]
        if this <= room:
            return MINUTE_S * (self.left - (room - this) / before)
        num = max(math.ceil((this - room) / limit), 1)  # minutes that begin until then: each pays a limit off
        before = min(this - (num - 1) * limit, limit)
        return MINUTE_S * (self.left + num - (room - max(this - num * limit, 0)) / before)


@dataclass(slots=True)
class Quotas:
    """The counts of all keys of one file."""

    keys: TenantKeys
    clock: Callable[[], float] = time.time  # of the day: routers must agree on the minute
    totals: Counter[tuple[str, str]] = field(default_factory=Counter)  # (tenant, kind), since the start, at this router
    _own: dict[int, Used] = field(default_factory=dict)
    _others: dict[str, Told] = field(default_factory=dict)
    _named: Sequence[str] = ()  # tenants by metrics: one is never dropped, so that no counter falls
    _lengths: dict[str, deque[float]] = field(  # of the last choices, by key
        default_factory=lambda: defaultdict(lambda: deque([FIRST_OUTPUT_LEN], NUM_LENGTHS))
    )
    _open: dict[str, list[Reserved]] = field(default_factory=lambda: defaultdict(list))  # by key
    _owed: Mapping[str, Sequence[float]] = field(default_factory=dict)  # in the minute before ``_since``
    _since: int = 0  # a minute; 0: nothing was asked yet

    def key_of(self, name: str) -> TenantKey | None:
        """Return the key of the caller ``name``; None for one that is not in the file."""
        return self.keys.by_name.get(name)

    def choices_elsewhere(self, name: str) -> int:
        """Count the choices of a key that run or wait at other routers."""
        return sum(told.choices.get(name, 0) for told in self._others.values())

    def used(self, name: str, kind: Kind) -> float:
        """Count what a key has used within a minute."""
        return self._last_minute(name).used(KINDS.index(kind))

    def reserve(
        self,
        key: TenantKey,
        *,
        input_tokens: int,
        output_tokens: int,
        choices: int,
        so_far: Callable[[], SoFar] = SoFar,
        is_rest: bool = False,
    ) -> Reserved:
        """Count a request that is about to be sent. ``output_tokens``: the most that a choice may have. ``so_far``:
        what it has used. ``is_rest``: of one that another router ran, which counted its beginning.

        Raises: OverQuota, and counts nothing, if the key may not; BeyondLimit if it never may.
        """
        window, most = self._last_minute(key.name), key.limits.output_tokens
        lengths = sorted(self._lengths[key.name])
        runs = max((each.counted.longest for each in self._open.get(key.name, ())), default=0)
        length = max(lengths[math.ceil(QUANTILE * len(lengths)) - 1], runs)
        # an estimate alone never keeps out a key that has used nothing
        output = min(min(float(output_tokens), length) * choices, math.inf if most is None else most)
        counts = (0.0, 0.0, output) if is_rest else (1.0, float(input_tokens), output)
        for at, (limit, more) in enumerate(zip(key.limits.a_minute, counts, strict=True)):
            room = math.inf if limit is None else limit * (REST_LIMITS if is_rest else 1) - more
            if limit is not None and window.used(at) > room:
                raise _over(window, at, more, limit, room=room)
        reserved = Reserved(key=key, minute=self._minute, estimate=counts, most=output_tokens, so_far=so_far)
        self._add(reserved.minute, key.name, (counts[0], 0.0, 0.0))
        self._open[key.name].append(reserved)
        return reserved

    def settle(self, reserved: Reserved, *, input_tokens: int, output_tokens: int, choices: int) -> None:
        """Count what a request has used that has ended, and no more of its estimate."""
        key, length = reserved.key, output_tokens / choices
        self._count(reserved, SoFar(input_tokens, output_tokens))
        self._close(reserved)
        if output_tokens and (length < reserved.most or length > max(self._lengths[key.name])):
            self._lengths[key.name].append(length)  # what was cut says nothing of how long a longer one is
        for kind, num in zip(KINDS, (round(reserved.estimate[0]), input_tokens, output_tokens), strict=True):
            self.totals[key.of, kind] += num

    def give_back(self, reserved: Reserved) -> None:
        """Count nothing for a request that has failed here before anything came of it."""
        self._close(reserved)
        self._add(reserved.minute, reserved.key.name, (-reserved.estimate[0], 0.0, 0.0))

    def told(self, choices: Mapping[str, int]) -> Told:
        """Return what to tell the other routers."""
        expected = {name: self._expected(name) for name in [*self._open]}  # first: it counts what was delivered
        return Told(used=self._own, expected=expected, choices=dict(choices))

    def hear(self, told: Mapping[str, Told]) -> None:
        """Take in what the other routers say, each under its id. Of one that says nothing, what it has used counts on
        while it is within a minute, and no request is open."""
        now = self._minute
        self._carry(now)
        for name in self._open:  # a token counts in the minute in which it came, though nobody asks
            self._expected(name)
        silent = {
            router: Told(used=each.used, expected={}, choices={})
            for router, each in self._others.items()
            if router not in told
        }
        recent = {router: each for router, each in silent.items() if max(each.used, default=0) >= now - 1}
        self._others = {**recent, **told}

    def figures(self) -> Iterator[tuple[str, Mapping[str, str], float]]:
        """Yield the metrics of the file and its tenants. On the scrape's thread."""
        yield "router_keys_file_failed", {}, float(bool(self.keys.error))
        totals, sums = self.totals.copy(), Counter[tuple[str, str]]()
        found = (*self._named, *self.keys.tenants, *(tenant for tenant, _ in totals))
        self._named = list(dict.fromkeys(found))[:MOST_TENANTS]
        named = set(self._named)
        for (tenant, kind), num in totals.items():
            sums[tenant if tenant in named else OTHERS, kind] += num
        for tenant in sorted({*named, OTHERS}):
            yield "tenant_requests_total", {"tenant": tenant}, sums[tenant, "requests"]
            for kind in KINDS[1:]:
                yield (
                    "tenant_tokens_total",
                    {"tenant": tenant, "kind": kind.removesuffix("_tokens")},
                    sums[tenant, kind],
                )

    def body(self, choices: Mapping[str, int]) -> dict[str, Any]:
        """Write the keys of the file, what they may use and what they have used within a minute."""
        return {
            "path": self.keys.path,
            "error": self.keys.error,
            "keys": [
                {
                    **key.model_dump(exclude={"sha256"}),
                    "tenant": key.of,
                    "used": {
                        **{kind: round(window.used(at)) for at, kind in enumerate(KINDS)},
                        "choices": choices.get(key.name, 0) + self.choices_elsewhere(key.name),
                    },
                }
                for key in self.keys.by_name.values()
                for window in [self._last_minute(key.name)]
            ],
        }

    def headers(self, key: TenantKey) -> list[tuple[bytes, bytes]]:
        """Write the headers that say how much is left, as ASGI has them."""
        shown: list[tuple[bytes, bytes]] = []
        window = self._last_minute(key.name)
        for at, limit in enumerate(key.limits.a_minute):
            if limit is None:
                continue
            of_limit, of_remaining, of_reset = HEADERS[at]
            num = math.ceil(window.this[at] / limit)  # minutes that must begin to pay it off
            free_s = MINUTE_S * (window.left + num) if window.this[at] or window.before[at] else 0.0
            left = max(0, int(limit - window.used(at)))
            shown += (of_limit, b"%d" % limit), (of_remaining, b"%d" % left), (of_reset, b"%.1fs" % free_s)
        return shown

    @property
    def _minute(self) -> int:
        return int(self.clock() // MINUTE_S)

    def _last_minute(self, name: str) -> LastMinute:
        minute, passed_s = divmod(self.clock(), MINUTE_S)
        now = int(minute)
        expected = self._expected(name)
        for told in self._others.values():
            expected = [*map(operator.add, expected, told.expected.get(name, NOTHING))]
        self._carry(now)
        owed, before = self._beyond(name, now - 1)
        this = self._sum(now, name)
        if owed is not NOTHING or expected is not NOTHING:
            this = [sum(each) for each in zip(this, owed, expected, strict=True)]
        return LastMinute(this, before, 1 - passed_s / MINUTE_S)

    def _carry(self, now: int) -> None:
        """Note, once a minute has passed, what each key owed in it. Where the clock steps back, debts stay until it
        has caught up."""
        if now <= self._since:
            return
        self._since = self._since or now
        for minute in range(self._since - 1, now - 1):
            found = {*self._owed, *(name for used in (self._own, *(each.used for each in self._others.values()))
                                    for name in used.get(minute, ()))}  # fmt: skip
            owed = {name: self._beyond(name, minute)[0] for name in found}
            self._owed = {name: each for name, each in owed.items() if any(each)}
        self._since = now

    def _beyond(self, name: str, minute: int) -> tuple[Sequence[float], Sequence[float]]:
        """Split what counts in ``minute``, which is the one behind which ``_owed`` is known, into what is beyond the
        limits of a key and what is not."""
        counts = self._sum(minute, name)
        if counts is NOTHING and name not in self._owed:
            return NOTHING, NOTHING
        key = self.keys.by_name.get(name)
        limits = (None,) * len(KINDS) if key is None else key.limits.a_minute
        counts = [*map(operator.add, counts, self._owed.get(name, NOTHING))]
        within = [num if limit is None else min(num, limit) for num, limit in zip(counts, limits, strict=True)]
        return [*map(operator.sub, counts, within)], within

    def _expected(self, name: str) -> Sequence[float]:
        """Count what the requests of a key have used so far; return what is left of their estimates."""
        if name not in self._open:
            return NOTHING
        left = [0.0] * len(KINDS)
        for reserved in self._open[name]:
            self._count(reserved, reserved.so_far())
            for at, num in enumerate(reserved.counted[:2], start=1):
                left[at] += max(reserved.estimate[at] - num, 0.0)
        return left

    def _count(self, reserved: Reserved, so_far: SoFar) -> None:
        before, reserved.counted = reserved.counted, so_far
        input_tokens, output_tokens = map(operator.sub, so_far[:2], before[:2])
        if input_tokens or output_tokens:
            self._add(self._minute, reserved.key.name, (0.0, input_tokens, output_tokens))

    def _close(self, reserved: Reserved) -> None:
        name = reserved.key.name
        self._open[name].remove(reserved)
        if not self._open[name]:
            del self._open[name]

    def _sum(self, minute: int, name: str) -> Sequence[float]:
        sums = self._own[minute].get(name, NOTHING) if minute in self._own else NOTHING
        for told in self._others.values():
            if minute in told.used and name in told.used[minute]:
                sums = [*map(operator.add, sums, told.used[minute][name])]
        return sums

    def _add(self, minute: int, name: str, counts: tuple[float, float, float]) -> None:
        now = self._minute
        self._carry(now)
        if minute < now - 1:
            return
        if minute not in self._own:
            self._own = {each: used for each, used in self._own.items() if each >= now - 1} | {minute: {}}
        used = self._own[minute].setdefault(name, [0.0] * len(KINDS))
        for at, num in enumerate(counts):
            used[at] += num


async def keep(quotas: Quotas, ask: Callable[[], Awaitable[Mapping[str, Told]]]) -> None:
    """Keep the counts in step with the other routers', and the keys with their file, until cancelled."""

    async def hear() -> None:
        quotas.hear(await ask())

    async with asyncio.TaskGroup() as group:  # apart: a router that hangs holds up no look at the file
        group.create_task(_again(hear, TELL_S, "the counts of the other routers"))
        group.create_task(_again(lambda: asyncio.to_thread(quotas.keys.refresh), LOOK_S, "the file of keys"))


async def _again(read: Callable[[], Awaitable[None]], every_s: float, what: str) -> None:
    failed = False
    while True:
        await asyncio.sleep(every_s)
        try:
            await read()
            failed = False
        except Exception:  # the edge: requests go on with what is known
            if not failed:
                log.exception("%s: not read; trying again", what)
            failed = True


def _over(window: LastMinute, at: int, more: float, limit: int, *, room: float) -> MantaError:
    """Say which limit ``more`` would exceed. ``room``: what may count before it."""
    words = KINDS[at].replace("_", " ")
    if more > limit:
        return BeyondLimit(
            f"the request counts as {more:,.0f} {words}, and this key may use {limit:,} a minute: send shorter "
            "prompts, or fewer at a time"
        )
    return OverQuota(
        f"this key has used {window.used(at):,.0f} of its {limit:,} {words} a minute, and the request needs "
        f"{more:,.0f}: try again later",
        retry_after_s=window.wait_s(at, room, limit),
    )
