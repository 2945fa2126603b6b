"""The observatory's own metrics: viewers, polls, and what the autoscaler wants and why.

Owns:      which numbers become which series of dashboards/catalog.py.
Thread:    gauges are read on a scrape's thread, from lists that are replaced and never changed.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deployments.watch.metrics.emitter import Emitter, Value

Told = tuple[str, Mapping[str, str], Value]


class Emission:
    """Binds them all."""

    def __init__(
        self, emitter: Emitter, *, targets: Callable[[], list[dict[str, Any]]], num_viewers: Callable[[], int]
    ) -> None:
        """``targets``: of the autoscaler, as the state shows them."""
        self._targets = targets
        self._num_viewers = num_viewers
        self._poll = emitter.histogram("observatory_poll_duration_seconds")
        self._emitter = emitter
        emitter.counter("autoscaler_decisions_total", target_role="unified", direction="up")
        emitter.tell(
            ["autoscaler_replicas", "autoscaler_pressure_ratio", "observatory_viewers"], self._read
        )

    def polled(self, took_s: float) -> None:
        self._poll.observe(took_s)

    def scaled(self, role: str, direction: str) -> None:
        self._emitter.counter("autoscaler_decisions_total", target_role=role, direction=direction).inc()

    def _read(self) -> Iterator[Told]:
        yield "observatory_viewers", {}, self._num_viewers()
        for target in self._targets():
            role = target["role"]
            for kind in ("running", "desired", "minimum", "maximum"):
                yield "autoscaler_replicas", {"target_role": role, "kind": kind}, target[kind]
            for signal, pressure in target["pressure"].items():
                if pressure is not None:
                    yield "autoscaler_pressure_ratio", {"target_role": role, "signal": signal}, pressure
