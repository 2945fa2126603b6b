"""Merges the answers of several routers: each replica by its newest report, each router answering or not.

Owns:      the last answer of each router, the number of its last change, and how far its clock is from ours.
Invariant: a router that does not answer keeps its last answer for KEPT_S, so a moment's silence hides
           nothing; one that Serve no longer lists is forgotten at once. While any router answers, a replica that none
           of them has is gone, whatever the silent ones last reported.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.fleet.seen import GoneReplica, SeenReplica, Target
from deployments.watch.observatory.router_view import RouterView
from deployments.watch.observatory.serve_details import ROUTER, Listed

KEPT_S = 30.0
MOST_BATCHES = 12  # shown
DRIFT_S = 1.0  # an answer takes up to 0.8 s: a smaller difference of clocks cannot be measured
Row = dict[str, Any]  # of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """One router's last answer, and when it came."""

    time_s: float
    view: RouterView


class Merged:
    """What all routers of the application report, merged."""

    def __init__(self) -> None:
        self._heard: dict[str, Heard] = {}
        self._answering: frozenset[str] = frozenset()
        self._listed: dict[str, Listed] = {}  # routers, as Serve has them, those that drain too
        self._shifts: dict[str, float] = {}  # router -> seconds that our clock is before its
        self._now_s = 0.0

    @property
    def since(self) -> dict[str, int]:
        """By router, the number of the last change that was heard: ask for what came since."""
        return {name: heard.view.seq for name, heard in self._heard.items()}

    @property
    def heard_any(self) -> bool:
        """Whether any router has answered within KEPT_S; if not, the processes are not known."""
        return bool(self._heard)

    def take(
        self, views: Iterable[RouterView], listed: Collection[Listed] | None, now_s: float, time_s: float
    ) -> list[Row]:
        """Take the answers of one poll. Return the rows of requests in them, their times by our clock.

        Args:   listed: None if Serve did not answer; now_s: of a clock that never goes back; time_s: since 1970.
        """
        self._now_s = now_s
        fresh = {view.router_id: Heard(time_s=now_s, view=view) for view in views}
        self._heard.update(fresh)
        self._answering = frozenset(fresh)
        if listed is not None:
            self._listed = {each.replica_id: each for each in listed if each.role == ROUTER}
        for name, heard in list(self._heard.items()):
            left = bool(self._listed) and name not in self._listed and name not in fresh
            if left or now_s - heard.time_s > KEPT_S:
                del self._heard[name]
        for name in self._shifts.keys() - self._heard.keys():
            del self._shifts[name]
        return [row for heard in fresh.values() for row in self._by_our_clock(heard.view, time_s)]

    @property
    def routers(self) -> list[dict[str, Any]]:
        """The routers as the state shows them."""
        states = {name: listed.state for name, listed in self._listed.items()}
        running = {name for name, state in states.items() if state == "RUNNING"}
        heard = {name for name in self._heard if name in self._answering or states.get(name) != "STOPPING"}
        return [self._router(name) for name in sorted(running | heard)]

    @property
    def router_ids(self) -> frozenset[str]:
        """The routers that may still have requests, draining ones too."""
        return frozenset(self._heard.keys() | self._listed.keys())

    @property
    def latest(self) -> RouterView | None:
        """The newest answer, for what all routers report alike."""
        newest = max(self._heard.values(), key=lambda heard: (heard.time_s, heard.view.router_id), default=None)
        return None if newest is None else newest.view

    @property
    def batches(self) -> list[Mapping[str, Any]]:
        """The batches that routers run, the oldest first, each by the newest answer."""
        told = sorted(self._heard.values(), key=lambda heard: heard.time_s)
        found = {each["id"]: each for heard in told for each in heard.view.batches}
        return sorted(found.values(), key=lambda each: (each["created_at"], each["id"]))[:MOST_BATCHES]

    def replicas(self) -> dict[str, tuple[SeenReplica, float | None]]:
        """Return replicas by id, each by its newest report, and that report's age at the last poll."""
        found: dict[str, tuple[SeenReplica, float | None]] = {}
        there = {seen.replica_id for name in self._answering for seen in self._heard[name].view.replicas}
        for heard in self._heard.values():
            for seen in heard.view.replicas:
                if self._answering and seen.replica_id not in there:
                    continue  # only a router that hangs still has it
                age_s = None if seen.report_age_s is None else seen.report_age_s + self._now_s - heard.time_s
                before = found.get(seen.replica_id)
                if before is None or _newer(age_s, before[1]):
                    found[seen.replica_id] = (seen, age_s)
        return found

    def gone(self) -> list[GoneReplica]:
        """Return the replicas that have left; one has died if any router says so."""
        told = [each for heard in self._heard.values() for each in heard.view.gone]
        return list({each.replica_id: each for each in sorted(told, key=lambda each: each.died)}.values())

    def seen(self, replica_id: str) -> SeenReplica | None:
        """Return a replica by its newest report."""
        return self.replicas().get(replica_id, (None, None))[0]

    def targets(self) -> list[Target]:
        """Return where routers and replicas serve their metrics, sorted by process."""
        found = [heard.view.target for heard in self._heard.values()]
        for seen, _ in self.replicas().values():
            info = seen.info
            if info is not None and info.metrics is not None:
                found.append(
                    Target(address=info.metrics, role=seen.role, process_id=seen.replica_id, node_id=info.node_id)
                )
        return sorted(found, key=lambda each: each.process_id)

    def check(self) -> None:
        """Raises AssertionError if the answer of an answering router is not kept."""
        assert self._answering <= self._heard.keys()

    def _by_our_clock(self, view: RouterView, time_s: float) -> list[Row]:
        """Return a router's rows with times by our clock; small changes of the difference are ignored."""
        kept_s = self._shifts.get(view.router_id, 0.0)
        shift_s = time_s - view.time_s if view.time_s is not None else kept_s
        if abs(shift_s - kept_s) < DRIFT_S:
            shift_s = kept_s
        self._shifts[view.router_id] = shift_s
        return [row | {"time": row["time"] + shift_s} if shift_s else row for row in view.requests]

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
    """Shorten Ray's 56 hex digits to what tells nodes apart."""
    return node_id[:8]


def _newer(age_s: float | None, than_s: float | None) -> bool:
    return age_s is not None and (than_s is None or age_s < than_s)
