"""The latest requests, and what is summed over the last seconds: totals, and the links between replicas.

Owns:      the rows by rid, what has been counted of each request, and the hand-offs of the last seconds.
Never:     shows what routers add to a row (router_view.py): ``key``, which no other request of that router has, and
           ``hand_offs``: from, to, bytes and ok of each that ended.
Invariant: at most MOST_ROWS rows are shown, of requests with one rid the last; each request, first token and hand-off
           counts once, even if another request has its rid. At most MOST_TTFTS times and TOTALS_S + 1 seconds are kept.
Thread:    the observatory's event loop.
"""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.watch.observatory.deltas import newest
from deployments.watch.observatory.rates import quantile, short

TOTALS_S = 60.0
MOST_TTFTS = 4096  # the quantiles are of the newest MOST_TTFTS


class Totals:
    """Sums over the last TOTALS_S, by whole second of ``now_s``, which never goes back; each event is added once."""

    def __init__(self) -> None:
        self._came: Counter[int] = Counter()  # by second
        self._cached: Counter[int] = Counter()  # tokens, by the second of the first token
        self._prompt: Counter[int] = Counter()
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=MOST_TTFTS)  # when it came, after how long

    def came(self, at_s: float) -> None:
        self._came[math.floor(at_s)] += 1

    def first_token(self, at_s: float, ttft_s: float) -> None:
        self._ttfts.append((at_s, ttft_s))

    def reused(self, at_s: float, cached_tokens: int, prompt_tokens: int) -> None:
        self._cached[math.floor(at_s)] += cached_tokens
        self._prompt[math.floor(at_s)] += prompt_tokens

    def of(self, now_s: float) -> dict[str, float | None]:
        """Return the totals of the last TOTALS_S; forgets what is older."""
        since_s = now_s - TOTALS_S
        for sums in (self._came, self._cached, self._prompt):
            for second in [second for second in sums if second <= since_s]:
                del sums[second]
        ttfts = sorted(ttft_s for at_s, ttft_s in self._ttfts if at_s > since_s)
        p50, p90 = quantile(ttfts, 0.5), quantile(ttfts, 0.9)
        tokens = self._prompt.total()
        return {
            "requests_per_s": short(self._came.total() / TOTALS_S),
            "ttft_p50_s": None if p50 is None else short(p50),
            "ttft_p90_s": None if p90 is None else short(p90),
            "reuse_ratio": short(self._cached.total() / tokens) if tokens else None,
        }

    def check(self) -> None:
        """Raises AssertionError if tokens were reused in a second without a prompt."""
        assert self._cached.keys() == self._prompt.keys()
        assert all(0 <= self._cached[second] <= self._prompt[second] for second in self._prompt)


LINKS_S = 10.0
MOST_COUNTED = 100_000  # requests whose counts are kept
ENDED_UNTOLD = "unknown"  # outcome of a request whose router left before it reported the end
Row = dict[str, Any]
Key = tuple[str, str]  # router, and its own name of the request


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffEnd:
    """One hand-off that has ended."""

    seen_s: float
    link: tuple[str, str]  # from, to
    num_bytes: int
    ok: bool


@dataclass(slots=True, kw_only=True)
class Counted:
    """The part of one request that has been counted."""

    changed_s: float
    first_token: bool = False
    reuse: bool = False
    hand_offs: int = 0


class Requests:
    """The latest rows of all routers. Ages are by ``now_s``, which never goes back; rows hold seconds since 1970."""

    def __init__(self) -> None:
        self._shown: dict[str, Row] = {}
        self._bearer: dict[str, Key] = {}  # rid -> the request whose row is shown
        self._counted: OrderedDict[Key, Counted] = OrderedDict()  # by last change
        self._totals = Totals()
        self._ends: deque[HandOffEnd] = deque()

    def take(self, rows: Iterable[Row], now_s: float, time_s: float) -> None:
        """Take rows that are new or changed; ``time_s``: now, in seconds since 1970."""
        for row in rows:
            shown = dict(row)
            key, hand_offs = (shown["router"], shown.pop("key")), shown.pop("hand_offs")
            self._count(key, shown, hand_offs, came_s=now_s - (time_s - shown["time"]), now_s=now_s)
            self._show(key, shown)
        self._shown = {row["rid"]: row for row in newest(self._shown)}
        self._bearer = {rid: self._bearer[rid] for rid in self._shown}
        while self._ends and now_s - self._ends[0].seen_s > LINKS_S:
            self._ends.popleft()
        while self._counted and (
            len(self._counted) > MOST_COUNTED or now_s - next(iter(self._counted.values())).changed_s > TOTALS_S
        ):
            self._counted.popitem(last=False)

    def lose(self, routers: Collection[str]) -> None:
        """End the running requests of all other routers, which have left, as `unknown`."""
        for rid, row in list(self._shown.items()):
            if row["outcome"] == "running" and row["router"] not in routers:
                self._shown[rid] = row | {"outcome": ENDED_UNTOLD}

    def rows(self) -> list[Row]:
        return newest(self._shown)

    def totals(self, now_s: float) -> dict[str, float | None]:
        """Return the totals of the last TOTALS_S; times and reuse count in the second of a request's first token."""
        return self._totals.of(now_s)

    def links(self) -> list[dict[str, Any]]:
        """Return the pairs of replicas between which hand-offs ended in the last LINKS_S."""
        ok = Counter(end.link for end in self._ends if end.ok)
        failed = Counter(end.link for end in self._ends if not end.ok)
        num_bytes: Counter[tuple[str, str]] = Counter()
        for end in self._ends:
            num_bytes[end.link] += end.num_bytes
        return [
            {
                "from": link[0],
                "to": link[1],
                "bytes_per_s": short(num_bytes[link] / LINKS_S),
                "hand_offs_per_s": short(ok[link] / LINKS_S),
                "failed_per_s": short(failed[link] / LINKS_S),
            }
            for link in sorted(ok.keys() | failed.keys())
        ]

    def check(self) -> None:
        """Raises AssertionError if a row is under another's rid, or changes or hand-offs are out of order."""
        assert all(rid == row["rid"] for rid, row in self._shown.items())
        assert all("hand_offs" not in row and "key" not in row for row in self._shown.values())
        assert self._bearer.keys() == self._shown.keys()
        assert len(self._counted) <= MOST_COUNTED
        for times in ([end.seen_s for end in self._ends], [each.changed_s for each in self._counted.values()]):
            assert times == sorted(times)
        self._totals.check()

    def _show(self, key: Key, row: Row) -> None:
        before = self._shown.get(row["rid"])
        if before is None or self._bearer[row["rid"]] == key or before["time"] <= row["time"]:
            self._shown[row["rid"]], self._bearer[row["rid"]] = row, key

    def _count(
        self, key: Key, row: Row, hand_offs: Collection[Mapping[str, Any]], *, came_s: float, now_s: float
    ) -> None:
        """Count what is new of this request, unless it is long over."""
        new = key not in self._counted
        counted = self._counted.setdefault(key, Counted(changed_s=now_s))
        counted.changed_s = now_s
        self._counted.move_to_end(key)
        if new:
            self._totals.came(came_s)
        if row["ttft_s"] is not None:
            first_s = came_s + row["ttft_s"]
            if not counted.first_token:
                counted.first_token = True
                self._totals.first_token(first_s, row["ttft_s"])
            if not counted.reuse and row["cached_tokens"] is not None:
                counted.reuse = True
                self._totals.reused(first_s, row["cached_tokens"], row["prompt_tokens"])
        ended = list(hand_offs)[counted.hand_offs :]
        counted.hand_offs = len(hand_offs)
        if new and now_s - came_s > LINKS_S:
            return  # long over: from a router that is new to us
        for each in ended:
            link = (each["from"], each["to"])
            self._ends.append(HandOffEnd(seen_s=now_s, link=link, num_bytes=each["bytes"], ok=each["ok"]))
