"""Which of the requests that wait should move to another replica, where they begin sooner.

Owns:      the order in which they are looked at, how often, and what a move is called. Whether one gains enough is the
           router's (`Router.choose_again`).
Never:     talks to a replica: the caller asks it, and its answer decides (deployments/dispatch).
Invariant: a request is asked for at most once in ASK_AGAIN_S, and not while it is being asked for. By the estimates, no
           move lets a request begin before an older one of its session or its API key.
Thread:    the router's own.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from routing.router import MOVE_GAIN, MOVE_GAIN_S, Router, Second
from routing.types import Decision, RouteQuery

Cause = Literal["join", "freed", "silent", "behind"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
LOOK_S = 0.25  # from one look to the next
ASK_AGAIN_S = 1.0
# Looked at in one look: the oldest; those behind them wait for more than a look. One costs as much as a choice, 0.1 to
# 0.3 ms.
MOST_LOOKED_AT = 64


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    """A request that its replica has not admitted, as far as is known."""

    query: RouteQuery
    decision: Decision
    arrived_s: float  # on the router's clock
    key: str = ""  # of the API, by its name
    asked_s: float = -math.inf  # when its replica was last asked to give it back
    is_asked: bool = False  # and has not answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A request whose replica is to be asked, and where it goes then: a decision that is open beside the first one."""

    waiting: Waiting
    decision: Decision
    cause: Cause
    wait_s: float  # until its prompt would begin where it is


def migrations(router: Router, waiting: Iterable[Waiting], now_s: float) -> Iterator[Migration]:
    """Yield what should move now, the oldest first."""
    looked_at = sorted(waiting, key=lambda each: each.arrived_s)[:MOST_LOOKED_AT]
    if not looked_at or not router.migrates or router.spread_s <= MOVE_GAIN_S:
        return
    begins_s: dict[tuple[str, str], float] = {}  # of each session and key: when the last of its older ones begins
    for each in looked_at:
        groups = [group for group in (("session", each.query.session_id), ("key", each.key)) if group[1]]
        too_soon = now_s - max(each.asked_s, each.decision.time_s) < ASK_AGAIN_S
        if each.is_asked or (too_soon and not groups):
            begins_s.update(dict.fromkeys(groups, math.inf))  # where it begins is open: no younger one goes before
            continue
        not_before_s = math.inf if too_soon else max((begins_s.get(group, 0.0) for group in groups), default=0.0)
        second = router.choose_again(each.decision, each.query, not_before_s=not_before_s)
        for group in groups:
            begins = second.wait_s if second.decision is None else second.begins_s
            begins_s[group] = max(begins_s.get(group, 0.0), begins)
        if second.decision is not None:
            each.asked_s = now_s
            cause = _cause(each.decision, second, router)
            yield Migration(waiting=each, decision=second.decision, cause=cause, wait_s=second.wait_s)


def _cause(first: Decision, second: Second, router: Router) -> Cause:
    """Say why the second decision is better than the first one was."""
    assert second.decision is not None
    there = {first.replica_id, first.prefill_id}
    if any(view.silent for view in router.views if view.replica_id in there):
        return "silent"
    if not {second.decision.replica_id, second.decision.prefill_id or ""} <= {*first.compared, ""}:
        return "join"
    late_s = second.decision.time_s - first.time_s + second.ttft_s - first.predicted_ttft_s
    return "behind" if late_s > max(MOVE_GAIN_S, MOVE_GAIN * first.predicted_ttft_s) else "freed"
