"""The latest requests, and what the last seconds of them tell: totals and the links between replicas.

Owns:      the rows by rid, and the hand-offs of the last seconds.
Never:     shows a row's ``hand_offs``: from, to, bytes and ok of each that ended, which routers add to rows.
Invariant: at most MOST_ROWS rows are shown; each hand-off counts once.
"""

import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.observatory.deltas import newest
from deployments.observatory.figures import quantile, short

TOTALS_S = 60.0
LINKS_S = 10.0
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffEnd:
    """One hand-off that has ended."""

    seen_s: float
    link: tuple[str, str]  # from, to
    num_bytes: int
    ok: bool


class Requests:
    """Rows as routers tell them; the clock's seconds are those of the rows' ``time``."""

    def __init__(self) -> None:
        self._shown: dict[str, Row] = {}
        self._recent: dict[str, tuple[float, Row]] = {}  # rid -> last change, row; by last change
        self._counted: dict[str, int] = {}  # rid -> hand-offs that are counted
        self._ends: deque[HandOffEnd] = deque()

    def take(self, rows: Iterable[Row], now_s: float) -> None:
        """Rows that are new or changed, and what time it is."""
        for row in rows:
            told = dict(row)
            shown = self._shown.get(told["rid"])
            if shown is not None and shown["time"] > told["time"]:
                continue  # a name that came twice means its last bearer
            self._count(told["rid"], told.pop("hand_offs", ()), told["time"], now_s)
            self._shown[told["rid"]] = told
            self._recent.pop(told["rid"], None)
            self._recent[told["rid"]] = (now_s, told)
        self._shown = {row["rid"]: row for row in newest(self._shown)}
        while self._ends and now_s - self._ends[0].seen_s > LINKS_S:
            self._ends.popleft()
        old = itertools.takewhile(lambda each: now_s - each[1][0] > TOTALS_S, self._recent.items())
        for rid in [rid for rid, _ in old]:
            del self._recent[rid]
        if len(self._counted) > 2 * len(self._recent) + 1000:
            self._counted = {rid: n for rid, n in self._counted.items() if rid in self._recent}

    def lose(self, routers: Collection[str]) -> None:
        """The requests of all other routers have ended with them."""
        for rid, row in list(self._shown.items()):
            if row["outcome"] == "running" and row["router"] not in routers:
                self._shown[rid] = row | {"outcome": "failed"}

    def rows(self) -> list[Row]:
        return newest(self._shown)

    def totals(self, now_s: float) -> dict[str, float | None]:
        """Of the last TOTALS_S; a request counts where its first token falls."""
        since_s = now_s - TOTALS_S
        rows = [row for _, row in self._recent.values()]
        begun = [row for row in rows if row["ttft_s"] is not None and row["time"] + row["ttft_s"] > since_s]
        ttfts = [row["ttft_s"] for row in begun]
        told = [row for row in begun if row["cached_tokens"] is not None]
        tokens = sum(row["prompt_tokens"] for row in told)
        p50, p90 = quantile(ttfts, 0.5), quantile(ttfts, 0.9)
        return {
            "requests_per_s": short(sum(row["time"] > since_s for row in rows) / TOTALS_S),
            "ttft_p50_s": None if p50 is None else short(p50),
            "ttft_p90_s": None if p90 is None else short(p90),
            "reuse_ratio": short(sum(row["cached_tokens"] for row in told) / tokens) if tokens else None,
        }

    def links(self) -> list[dict[str, Any]]:
        """Between whom hand-offs ended in the last LINKS_S."""
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
        """Raises AssertionError if a row is under another's rid, or hand-offs are out of order."""
        assert all(rid == row["rid"] for rid, row in self._shown.items())
        assert all("hand_offs" not in row for row in self._shown.values())
        times = [end.seen_s for end in self._ends]
        assert times == sorted(times)

    def _count(self, rid: str, hand_offs: Collection[Mapping[str, Any]], begun_s: float, now_s: float) -> None:
        before = self._counted.get(rid, 0)
        if len(hand_offs) <= before:
            return
        self._counted[rid] = len(hand_offs)
        if now_s - begun_s > LINKS_S and rid not in self._recent:
            return  # told by a router that is new to us, and long over
        for each in list(hand_offs)[before:]:
            link = (each["from"], each["to"])
            self._ends.append(HandOffEnd(seen_s=now_s, link=link, num_bytes=each["bytes"], ok=each["ok"]))
