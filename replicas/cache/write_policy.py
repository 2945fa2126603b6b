"""Which pages are copied from the device to the host, and when. To add a policy, give `RULES` an entry.

Owns:      what the replica knows of pages that it no longer has: a bounded list of their keys (ghosts), and of how long
           pages wait for their second use.
Never:     copies or evicts (cache/tiers.py).
Invariant: at most ``ghost_capacity`` ghosts and `SAMPLES` waits are kept.
Thread:    scheduler thread only.
"""

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.pages import PageKey, PageKeys

SAMPLES = 1000  # waits that are remembered
TYPICAL = 0.3  # of all second uses that come, so many have come after a time that is called typical here
LAST = 0.95  # and so many by the time after which no more is expected


class ReuseGaps:
    """The time from a page's first use to its second, where the device had lost it in between."""

    def __init__(self, ghost_capacity: int) -> None:
        self._capacity = ghost_capacity
        self._ghosts: OrderedDict[PageKey, float] = OrderedDict()  # page that every tier has lost -> its last use
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def dropped(self, keys: PageKeys, used_s: float) -> None:
        """Remember pages that have left every tier and were last used at ``used_s``."""
        for key in reversed(keys.tolist()):  # what a run begins with is forgotten last
            self._ghosts[key] = used_s
            self._ghosts.move_to_end(key)
        while len(self._ghosts) > self._capacity:
            self._ghosts.popitem(last=False)

    def computed(self, keys: PageKeys, now_s: float) -> int:
        """Take note of a run of pages that was computed at ``now_s``.

        Returns: how many pages it begins with that had been there before; they are one second use.
        """
        known = 0
        for key in keys.tolist():
            used_s = self._ghosts.pop(key, None)
            if used_s is None:
                break
            if not known:
                self.waited(now_s - used_s)
            known += 1
        return known

    def waited(self, gap_s: float) -> None:
        """Count a second use of a run of pages, which came ``gap_s`` after the first."""
        if len(self._recent) == SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(gap_s)
        insort(self._sorted, gap_s)

    def quantile(self, share: float) -> float | None:
        """Return the wait that ``share`` of the second uses did not exceed; None while there was none."""
        if not self._sorted:
            return None
        return self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))]

    def clear(self) -> None:
        """Forget the ghosts; what was learned of waits stays."""
        self._ghosts.clear()

    def check(self) -> None:
        assert len(self._ghosts) <= self._capacity, f"{len(self._ghosts)} ghosts, {self._capacity} were allowed"
        assert sorted(self._recent) == self._sorted, "the waits are not those that were counted"
        assert len(self._sorted) <= SAMPLES, f"{len(self._sorted)} waits are kept"


Admits = Callable[[ReuseGaps, int, float | None], bool]  # of the arguments of `WritePolicy.admits`


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRule:
    """When pages are copied to the host, by one policy."""

    insert_hits: int | None = None  # when a request inserts a page that was found so often; None: not then
    # when the device evicts it. Only then may the host drop first what the device has, since it gets it again
    at_eviction: bool = False
    idle_fraction: float = 0.0  # the share of the device's evictable pages that should have a copy, made in idle time
    admits: Admits | None = None  # which pages that the device evicts, or that could be copied in idle time; None: all


def _missed_sooner(gaps: ReuseGaps, hits: int, victim_idle_s: float | None) -> bool:
    """Admit a page that was used twice, or for one that has been idle for longer than a page typically waits for its
    second use: a small tier then keeps what is used again, and a large one keeps all."""
    typical_s = gaps.quantile(TYPICAL)
    return hits >= 1 or victim_idle_s is None or typical_s is None or victim_idle_s > typical_s


# the values of ``cache.write_policy``; the names are SGLang's (``--hicache-write-policy``), and one more
RULES: dict[str, WriteRule] = {
    "write_through": WriteRule(insert_hits=0),
    "write_through_selective": WriteRule(insert_hits=1),
    "write_back": WriteRule(at_eviction=True),
    "adaptive": WriteRule(at_eviction=True, idle_fraction=0.25, admits=_missed_sooner),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePolicy:
    """A rule, and what it knows of pages that have left."""

    rule: WriteRule
    gaps: ReuseGaps

    @staticmethod
    def make(name: str, *, ghost_capacity: int) -> "WritePolicy":
        """Raises: ValueError for an unknown name."""
        if name not in RULES:
            raise ValueError(f"unknown write policy {name!r}; allowed: {', '.join(RULES)}")
        return WritePolicy(rule=RULES[name], gaps=ReuseGaps(ghost_capacity))

    def at_insert(self, hits: int) -> bool:
        """Whether a page that was found ``hits`` times is copied when a request inserts it or the sequence it is in."""
        return self.rule.insert_hits is not None and hits >= self.rule.insert_hits

    def admits(self, *, hits: int, victim_idle_s: float | None) -> bool:
        """Whether pages that the device evicts, or that could be copied in idle time, are worth their room.

        Args: hits: second uses so far, one before the page was lost and computed again included.
              victim_idle_s: how long the page that would have to leave has been idle; None: none that would be missed.
        """
        if not self.rule.at_eviction or self.rule.admits is None:
            return self.rule.at_eviction
        return self.rule.admits(self.gaps, hits, victim_idle_s)
