"""What changed from one state to the next, and how to apply it: the form is README.md's.

Pure. Invariant: ``applied(old, changes(old, new, used)) == new`` for any two states in order, with their history.
"""

from collections.abc import Mapping
from typing import Any

from deployments.watch.observatory.history import History

Json = dict[str, Any]
MOST_ROWS = 50  # of requests
_WHOLE = ("model", "mode", "period_s", "routers", "links", "totals", "autoscaling")  # sent whole when they change


def by_role(replicas: Mapping[str, Json]) -> list[Json]:
    """In the order of the state."""
    return sorted(replicas.values(), key=lambda row: (row["role"], row["id"]))


def newest(rows: Mapping[str, Json]) -> list[Json]:
    """The latest requests, newest first."""
    return sorted(rows.values(), key=lambda row: (-row["time"], row["rid"]))[:MOST_ROWS]


def changes(old: Mapping[str, Any], new: Mapping[str, Any], used: Mapping[str, float]) -> Json:
    """The delta between two states; their history is looked at only through ``used``, its newest point."""
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
    """The state after ``delta``."""
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
