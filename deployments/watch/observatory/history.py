"""Pool use of the last five minutes, a point a second.

Owns:      the ring of points.
Never:     holds points of a clock that has gone back since: the ring begins anew.
Invariant: points are in order of time, all within KEPT_S before the newest; a series has a place for each point,
           and at least one number.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

KEPT_S = 300.0
Point = tuple[float, Mapping[str, float]]  # time, replica -> share of its pool that a new request cannot have


class History:
    """The ring; `series` and `of_series` are each other's inverse."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque()

    def add(self, time_s: float, used: Mapping[str, float]) -> None:
        if self._points and time_s < self._points[-1][0]:
            self._points.clear()
        self._points.append((time_s, used))
        while time_s - self._points[0][0] >= KEPT_S:
            self._points.popleft()

    def series(self) -> dict[str, Any]:
        """``{"times": [...], "used": {replica: [ratio or None, ...]}}``"""
        names = sorted({name for _, used in self._points for name in used})
        return {
            "times": [time_s for time_s, _ in self._points],
            "used": {name: [used.get(name) for _, used in self._points] for name in names},
        }

    @classmethod
    def of_series(cls, series: Mapping[str, Any]) -> "History":
        history = cls()
        for index, time_s in enumerate(series["times"]):
            used = {name: values[index] for name, values in series["used"].items() if values[index] is not None}
            history._points.append((time_s, used))
        return history

    def check(self) -> None:
        """Raises AssertionError if a point is out of order or too old."""
        times = [time_s for time_s, _ in self._points]
        assert times == sorted(times)
        assert not times or times[-1] - times[0] < KEPT_S
