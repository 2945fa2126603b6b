"""What Serve's autoscaler does, and why, as far as the replicas' reports explain it.

Owns:      the log of changes of the wanted number of replicas.
Never:     decides: autoscaling.py does, in Serve's controller. The pressures here are by its rule, from the reports.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deployments.autoscaling import Objective, Signals, loads, replica_stats, signals_of
from deployments.watch.observatory.serve_details import ServeDetails
from replicas.types import EngineStats

KEPT = 20  # changes
RECENT = 6  # looks over which the highest and lowest pressure explain a change: Serve delays and averages
ROLES = ("unified", "prefill", "decode")
Pressure = dict[str, float | None]
_ASKS = {
    "queue": "{tokens:,.0f} prompt tokens wait, {pressure:.2g} times the work of {replicas} in {objective.ttft_s:g} s",
    "kv_pool": "requests hold {pages:,.0f} KV pages, {pressure:.2g} times {objective.pool_high:.0%} of the pools",
    "slots": "{requests:,.0f} requests run or wait, {pressure:.2g} times {objective.running_high:.0%} of the slots",
}


class Scaling:
    """The targets of the autoscaler and its last changes; fed with each look at Serve and the reports."""

    def __init__(self, on_change: Callable[[str, str], None] = lambda role, direction: None) -> None:
        """``on_change``: called with role and direction (up, down) of each change."""
        self._on_change = on_change
        self._wanted: dict[str, int] = {}
        self._recent: dict[str, deque[dict[str, tuple[float, str]]]] = {}  # role -> signal -> pressure, in words
        self._log: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.targets: list[dict[str, Any]] = []  # replaced, never changed

    def take(
        self,
        details: ServeDetails,
        stats: Mapping[str, Sequence[EngineStats]],
        settings: Mapping[str, Mapping[str, float]],
        time_s: float,
    ) -> None:
        """Take one look. ``stats``: by role, the replicas' last; ``settings``: by role, only of autoscaled ones."""
        targets = []
        for role in (role for role in ROLES if role in details.desired):
            own, desired = settings.get(role, {}), details.desired[role]
            found = _pressures(stats.get(role, ()), _objective(own))
            self._recent.setdefault(role, deque(maxlen=RECENT)).append(found)
            self._note(role, desired, own, time_s)
            targets.append(
                {
                    "role": role,
                    "running": details.running(role),
                    "desired": desired,
                    "minimum": int(own.get("min_replicas", desired)),
                    "maximum": int(own.get("max_replicas", desired)),
                    "pressure": {name: round(found[name][0], 2) if name in found else None for name in _ASKS},
                }
            )
        self.targets = targets  # whole, since a scrape's thread reads it

    @property
    def state(self) -> dict[str, Any]:
        """Targets, and the log with the newest change first."""
        return {"targets": self.targets, "log": list(self._log)}

    def _note(self, role: str, desired: int, settings: Mapping[str, float], time_s: float) -> None:
        before = self._wanted.get(role)
        self._wanted[role] = desired
        if before is None or before == desired:
            return
        up = desired > before
        reason = self._why(role, up=up) if settings else "the settings were changed"
        self._log.appendleft({"time": time_s, "role": role, "from": before, "to": desired, "reason": reason})
        self._on_change(role, "up" if up else "down")

    def _why(self, role: str, *, up: bool) -> str:
        looks = [max(look.values()) for look in self._recent[role] if look]
        if not looks:
            return "no report came of its load"
        pressure, words = max(looks) if up else looks[-1]
        if up and pressure <= 1:
            return f"its bounds or its load a moment ago; the highest load seen: {words}"
        return words if up else f"less is needed: {words}"


def _objective(settings: Mapping[str, float]) -> Objective:
    renamed = {"ttft_s": "ttft_objective_s", "pool_high": "pool_high", "running_high": "running_high", "slack": "slack"}
    return Objective(**{name: settings[given] for name, given in renamed.items() if given in settings})


def _pressures(stats: Sequence[EngineStats], objective: Objective) -> dict[str, tuple[float, str]]:
    """Return, by signal, load over what these replicas carry, and that in words; empty if none has reported."""
    metrics: dict[str, dict[Any, float]] = {}
    for index, each in enumerate(stats):
        for name, value in replica_stats(each).items():
            metrics.setdefault(name, {})[index] = value
    signals = signals_of(len(stats), metrics)
    if signals is None:
        return {}
    found = {name: load / signals.num_replicas for name, load in loads(signals, objective).items()}
    return {name: (pressure, _in_words(name, pressure, signals, objective)) for name, pressure in found.items()}


def _in_words(name: str, pressure: float, signals: Signals, objective: Objective) -> str:
    count = signals.num_replicas
    return _ASKS[name].format(
        tokens=signals.queued_tokens,
        pages=signals.used_pages,
        requests=signals.num_requests,
        pressure=pressure,
        objective=objective,
        replicas=f"{count} replica{'s' if count != 1 else ''}",
    )
