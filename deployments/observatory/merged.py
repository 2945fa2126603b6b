"""The answers of several routers as one: each replica by its newest report, each router answering or not.

Owns:      the last answer of each router, and how far its requests have been told.
Invariant: a router that does not answer keeps its last answer for KEPT_S, so that a moment's silence takes nothing
           away; one that Serve no longer lists is forgotten at once.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.observatory.serve_details import ROUTER, Listed
from deployments.observatory.view import RouterView, SeenReplica, Target

KEPT_S = 30.0
Row = dict[str, Any]  # of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What one router said, and when."""

    time_s: float
    view: RouterView


class Merged:
    """All routers of the application."""

    def __init__(self) -> None:
        self._heard: dict[str, Heard] = {}
        self._answering: frozenset[str] = frozenset()
        self._listed: dict[str, Listed] = {}  # routers, as Serve has them

    @property
    def since(self) -> dict[str, int]:
        """By router, what to ask each for next."""
        return {name: heard.view.seq for name, heard in self._heard.items()}

    def take(self, views: Iterable[RouterView], listed: Collection[Listed] | None, now_s: float) -> list[Row]:
        """The answers of one poll; the rows of requests in them. ``listed``: None where Serve was not heard."""
        fresh = {view.router_id: Heard(time_s=now_s, view=view) for view in views}
        self._heard.update(fresh)
        self._answering = frozenset(fresh)
        if listed is not None:
            routers = (each for each in listed if each.role == ROUTER and each.state != "STOPPING")
            self._listed = {each.replica_id: each for each in routers}
        for name, heard in list(self._heard.items()):
            left = bool(self._listed) and name not in self._listed and name not in fresh
            if left or now_s - heard.time_s > KEPT_S:
                del self._heard[name]
        return [row for heard in fresh.values() for row in heard.view.requests]

    @property
    def routers(self) -> list[dict[str, Any]]:
        """As the state shows them."""
        names = sorted(self._heard.keys() | {each for each, at in self._listed.items() if at.state == "RUNNING"})
        return [self._router(name) for name in names]

    @property
    def router_ids(self) -> frozenset[str]:
        return frozenset(self._heard.keys() | self._listed.keys())

    @property
    def latest(self) -> RouterView | None:
        """The newest answer, for what all routers say alike."""
        newest = max(self._heard.values(), key=lambda heard: (heard.time_s, heard.view.router_id), default=None)
        return None if newest is None else newest.view

    def replicas(self, now_s: float) -> dict[str, tuple[SeenReplica, float | None]]:
        """By id: as the router with the newest report sees it, and that report's age now."""
        found: dict[str, tuple[SeenReplica, float | None]] = {}
        for heard in self._heard.values():
            for seen in heard.view.replicas:
                age_s = None if seen.report_age_s is None else seen.report_age_s + now_s - heard.time_s
                before = found.get(seen.replica_id)
                if before is None or _newer(age_s, before[1]):
                    found[seen.replica_id] = (seen, age_s)
        return found

    def targets(self, now_s: float) -> list[Target]:
        """Where routers and replicas serve their metrics, by process."""
        found = [heard.view.target for heard in self._heard.values() if heard.view.target is not None]
        for seen, _ in self.replicas(now_s).values():
            info = seen.info
            if info is not None and info.metrics is not None:
                found.append(
                    Target(address=info.metrics, role=seen.role, process_id=seen.replica_id, node_id=info.node_id)
                )
        return sorted(found, key=lambda each: each.process_id)

    def check(self) -> None:
        """Raises AssertionError if a router answers whose answer is not kept."""
        assert self._answering <= self._heard.keys()

    def _router(self, name: str) -> dict[str, Any]:
        heard, listed = self._heard.get(name), self._listed.get(name)
        node_id = heard.view.node_id if heard is not None else listed.node_id if listed is not None else ""
        return {
            "id": name,
            "node": shown_node(node_id),
            "answering": name in self._answering,
            "open": heard.view.num_open if heard is not None else 0,
        }


def shown_node(node_id: str) -> str:
    """Ray's 56 hex digits, as people tell nodes apart."""
    return node_id[:8]


def settings_of(view: RouterView | None) -> Mapping[str, Mapping[str, float]]:
    """The autoscaling rule's settings by role."""
    return {} if view is None else view.autoscaling


def _newer(age_s: float | None, than_s: float | None) -> bool:
    return age_s is not None and (than_s is None or age_s < than_s)
