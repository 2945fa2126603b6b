"""The newest requests, and the links between replicas: what is summed over the last seconds.

Owns:      the rows by rid, the version of the state in which each changed, what has been counted of each request, and
           the KV transfers of the last seconds.
Never:     shows what routers add to a row (router_view.py): ``key``, which no other request of that router has, and
           ``kv_transfers``: from, to, bytes and ok of each that ended.
Invariant: at most MOST_ROWS rows are shown, of requests with one rid the last; each request, first token and transfer
           counts once, even if another request has its rid.
Thread:    the observatory's event loop.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deployments.record.route_log import judged
from deployments.watch.observatory.figures import Recent, short

LINKS_S = 10.0
COUNTED_S = 60.0  # since a request's last change: a router may tell it again
MOST_ROWS = 1000
MOST_COUNTED = 100_000  # requests whose counts are kept
ENDED_UNTOLD = "unknown"  # outcome of a request whose router left before it reported the end
Row = dict[str, Any]
Key = tuple[str, str]  # router, and its own name of the request


@dataclass(frozen=True, slots=True, kw_only=True)
class PdTransferEnd:
    """One KV transfer that has ended."""

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
    kv_transfers: Counter[tuple[str, str]] = field(default_factory=Counter)  # by from and to


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The row that is shown under a rid: the request it is of, and the version of the state with its last change."""

    row: Row
    key: Key
    version: int


class Requests:
    """The latest rows of all routers. Ages are by ``now_s``, which never goes back; rows hold seconds since 1970."""

    def __init__(self, recent: Recent) -> None:
        self._shown: dict[str, Shown] = {}  # by rid
        self._counted: OrderedDict[Key, Counted] = OrderedDict()  # by last change
        self._recent = recent
        self._ends: deque[PdTransferEnd] = deque()

    def take(
        self, rows: Iterable[Row], now_s: float, time_s: float, *, version: int, objectives: Mapping[str, float]
    ) -> None:
        """Take rows that are new or changed, as of ``version``; ``time_s``: now, in seconds since 1970."""
        for row in rows:
            shown = dict(row)
            key, kv_transfers = (shown["router"], shown.pop("key")), shown.pop("kv_transfers")
            self._count(key, shown, kv_transfers, came_s=now_s - (time_s - shown["time"]), now_s=now_s)
            met = judged(shown["ttft_s"], shown.get("itl_s"), shown["outcome"], objectives)
            self._show(key, shown | {"missed": [slo for slo, in_time in met.items() if not in_time]}, version)
        if (surplus := len(self._shown) - MOST_ROWS) > 0:
            for rid in sorted(self._shown, key=lambda rid: self._shown[rid].row["time"])[:surplus]:
                del self._shown[rid]
        while self._ends and now_s - self._ends[0].seen_s > LINKS_S:
            self._ends.popleft()
        while self._counted and (
            len(self._counted) > MOST_COUNTED or now_s - next(iter(self._counted.values())).changed_s > COUNTED_S
        ):
            self._counted.popitem(last=False)

    def progress(self, router: str, grown: Mapping[str, Mapping[str, Any]], *, version: int) -> None:
        """Take what has grown of a router's running requests, by their ``key``."""
        if not grown:
            return
        for rid, shown in self._shown.items():
            of, name = shown.key
            row, new = shown.row, grown.get(name) if of == router else None
            if new is not None and row["outcome"] == "running" and row["last_s"] != new["last_s"]:
                self._shown[rid] = replace(shown, row={**row, **new}, version=version)

    def lose(self, routers: Collection[str], *, version: int) -> None:
        """End the running requests of all other routers, which have left, as `unknown`."""
        for rid, shown in self._shown.items():
            if shown.row["outcome"] == "running" and shown.row["router"] not in routers:
                self._shown[rid] = replace(shown, row=shown.row | {"outcome": ENDED_UNTOLD}, version=version)

    def rows(self, since: int = 0) -> list[Row]:
        """Return the rows that changed after version ``since``, oldest first."""
        changed = [shown.row for shown in self._shown.values() if shown.version > since]
        return sorted(changed, key=lambda row: (row["time"], row["rid"]))

    def row(self, rid: str) -> Row | None:
        shown = self._shown.get(rid)
        return None if shown is None else shown.row

    def went_on(self, replica_id: str) -> int:
        """Count the requests that went on elsewhere after a try on this replica had failed."""
        return sum(
            any(each["replica"] == replica_id and each["failure"] is not None for each in shown.row["tries_at"][:-1])
            for shown in self._shown.values()
        )

    def links(self) -> list[dict[str, Any]]:
        """Return the pairs of replicas between which KV transfers ended in the last LINKS_S."""
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
                "kv_transfers_per_s": short(ok[link] / LINKS_S),
                "failed_per_s": short(failed[link] / LINKS_S),
            }
            for link in sorted(ok.keys() | failed.keys())
        ]

    def check(self) -> None:
        """Raises AssertionError if a row is under another's rid, or changes or KV transfers are out of order."""
        for rid, shown in self._shown.items():
            assert rid == shown.row["rid"]
            assert not {"kv_transfers", "key"} & shown.row.keys()
        assert len(self._shown) <= MOST_ROWS
        assert len(self._counted) <= MOST_COUNTED
        for times in ([end.seen_s for end in self._ends], [each.changed_s for each in self._counted.values()]):
            assert times == sorted(times)

    def _show(self, key: Key, row: Row, version: int) -> None:
        before = self._shown.get(row["rid"])
        if before is None or before.key == key or before.row["time"] <= row["time"]:
            self._shown[row["rid"]] = Shown(row=row, key=key, version=version)

    def _count(
        self, key: Key, row: Row, kv_transfers: Collection[Mapping[str, Any]], *, came_s: float, now_s: float
    ) -> None:
        """Count what is new of this request, unless it is long over."""
        new = key not in self._counted
        counted = self._counted.setdefault(key, Counted(changed_s=now_s))
        counted.changed_s = now_s
        self._counted.move_to_end(key)
        if row["ttft_s"] is not None:
            first_s = came_s + row["ttft_s"]
            if not counted.first_token:
                counted.first_token = True
                self._recent.first_token(first_s, row["ttft_s"])
            if not counted.reuse and row["cached_tokens"] is not None:
                counted.reuse = True
                self._recent.reused(first_s, row["cached_tokens"], row["prompt_tokens"])
        before, counted.kv_transfers = counted.kv_transfers, Counter()
        for each in kv_transfers:  # a fetch that is told late stands before the transfer of its try
            link = (each["from"], each["to"])
            counted.kv_transfers[link] += 1
            if counted.kv_transfers[link] > before[link] and not (new and now_s - came_s > LINKS_S):  # not long over
                self._ends.append(PdTransferEnd(seen_s=now_s, link=link, num_bytes=each["bytes"], ok=each["ok"]))
