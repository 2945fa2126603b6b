"""What changed from one state to the next, how to apply it, and the ring of pool use: the form is README.md's.

Pure. Invariant: ``applied(old, changes(old, new, used)) == new`` for any two states in order, with their history.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

KEPT_S = 300.0
Point = tuple[float, Mapping[str, float]]  # time, replica -> share of its pool that a new request cannot have


class History:
    """Pool use of the last KEPT_S, a point a second; `series` and `of_series` are each other's inverse.

    Points are in order of time, all within KEPT_S before the newest; if the clock goes back, the ring begins anew.
    """

    def __init__(self) -> None:
        self._points: deque[Point] = deque()

    def add(self, time_s: float, used: Mapping[str, float]) -> None:
        if self._points and time_s < self._points[-1][0]:
            self._points.clear()
        self._points.append((time_s, used))
        while time_s - self._points[0][0] >= KEPT_S:
            self._points.popleft()

    def series(self) -> dict[str, Any]:
        """Return ``{"times": [...], "used": {replica: [ratio or None, ...]}}``: a place for each point."""
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


Json = dict[str, Any]
MOST_ROWS = 50  # of requests
_WHOLE = ("model", "mode", "period_s", "routers", "links", "totals", "autoscaling")  # keys sent whole when they change


def by_role(replicas: Mapping[str, Json]) -> list[Json]:
    """Return replica rows in the order of the state."""
    return sorted(replicas.values(), key=lambda row: (row["role"], row["id"]))


def newest(rows: Mapping[str, Json]) -> list[Json]:
    """Return the latest requests, newest first."""
    return sorted(rows.values(), key=lambda row: (-row["time"], row["rid"]))[:MOST_ROWS]


def changes(old: Mapping[str, Any], new: Mapping[str, Any], used: Mapping[str, float]) -> Json:
    """Return the delta between two states; of their history only ``used``, the newest point, is looked at."""
    delta: Json = {"time": new["time"], "version": new["version"], "used": dict(used)}
    delta.update({name: new[name] for name in _WHOLE if new[name] != old[name]})
    replicas = _changed_replicas(_by(old["replicas"], "id"), _by(new["replicas"], "id"))
    if replicas:
        delta["replicas"] = replicas
    before = _by(old["requests"], "rid")
    requests = [row for row in new["requests"] if before.get(row["rid"]) != row]
    if requests:
        delta["requests"] = requests
    return delta


def applied(state: Mapping[str, Any], delta: Mapping[str, Any]) -> Json:
    """Return the state after ``delta``."""
    new = dict(state) | {name: delta[name] for name in ("time", "version", *_WHOLE) if name in delta}
    replicas = _by(state["replicas"], "id")
    for name, fields in delta.get("replicas", {}).items():
        if fields is None:
            del replicas[name]
        else:
            replicas[name] = replicas.get(name, {}) | fields
    new["replicas"] = by_role(replicas)
    new["requests"] = newest(_by(state["requests"], "rid") | _by(delta.get("requests", []), "rid"))
    history = History.of_series(state["history"])
    history.add(delta["time"], delta["used"])
    new["history"] = history.series()
    return new


def _changed_replicas(old: Mapping[str, Json], new: Mapping[str, Json]) -> dict[str, Json | None]:
    found: dict[str, Json | None] = {}
    for name, row in new.items():
        before = old.get(name, {})
        fields = {key: value for key, value in row.items() if key not in before or before[key] != value}
        if fields:
            found[name] = fields
    found.update(dict.fromkeys(old.keys() - new.keys()))
    return found


def _by(rows: list[Json], key: str) -> dict[str, Json]:
    return {row[key]: row for row in rows}
