"""What a router answers when the observatory asks (`RouterIngress.observe`, `find_request`).

Owns:   the form of the answers, which Ray pickles.
Never:  changes the router (fleet, dispatcher, settings are read alone); holds a prompt's text or ids.
Thread: the router's event loop.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.dispatch.dispatcher import Dispatcher
from deployments.dispatch.route_log import MOST_TOLD, RouteRecord
from deployments.fleet.fleet import Fleet
from deployments.fleet.peers import Body
from deployments.fleet.seen import SeenReplica, Target
from deployments.http.routes import record_body, request_row
from deployments.settings.roles import config_of, roles_of
from deployments.settings.schema import AppConfig
from kvtransfer.pages import PageKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterView:
    """The answer of `RouterIngress.observe(since)`; ``since``: by router, the ``seq`` of its last answer."""

    router_id: str
    node_id: str
    target: Target | None  # None where metrics are off
    model: str  # served name
    mode: str  # unified, disaggregated
    num_open: int
    replicas: tuple[SeenReplica, ...]
    requests: tuple[dict[str, Any], ...]  # rows (README.md of this folder) changed after ``since``, oldest first, the
    # newest route_log.MOST_TOLD, each with its ``key`` and ``hand_offs`` (requests.py)
    time_s: float | None  # by the router's clock, seconds since 1970; None: its clock is ours
    seq: int  # to be given as ``since`` next; 0 asks for all that are kept
    asks_for_key: bool = False  # it has an admin key, or API keys: the observatory is then not everybody's either
    autoscaling: dict[str, dict[str, float]]  # role -> settings of its rule (min_replicas, max_replicas, objectives)


RULE = ("min_replicas", "max_replicas", "ttft_objective_s", "pool_high", "running_high", "slack")


def router_view(
    *,
    dispatcher: Dispatcher,
    fleet: Fleet,
    config: AppConfig,
    node_id: str,
    target: Target | None,
    asks_for_key: bool = False,
    since: Mapping[str, int],
) -> RouterView:
    """``since``: by router, the number that its last answer gave; all are called alike, and each looks for its own."""
    # of more than MOST_TOLD that changed (all, on a first look), only the newest are of use to who shows 50
    records, seq = dispatcher.routes.changed_since(since.get(dispatcher.router_id, 0), most=MOST_TOLD)
    return RouterView(
        router_id=dispatcher.router_id,
        node_id=node_id,
        target=target,
        asks_for_key=asks_for_key,
        model=config.model.name,
        mode=config.mode,
        num_open=dispatcher.num_open,
        replicas=fleet.seen(),
        requests=tuple(
            {
                **request_row(record, router_id=dispatcher.router_id),
                "key": record.rid,
                "hand_offs": hand_offs(record),
            }
            for record in records
        ),
        time_s=time.time(),
        seq=seq,
        autoscaling=scaling_rules(config),
    )


def request_body(dispatcher: Dispatcher, name: str) -> Body | None:
    """All that this router knows of the request called ``name``; the newest ``time`` of several routers counts."""
    record = dispatcher.routes.find(name)
    if record is None:
        return None
    return {
        "time": record.time_s,
        "row": request_row(record, router_id=dispatcher.router_id),
        "page_keys": shown_keys(record.tries[-1].decision.keys),
        "route": record_body(record, router_id=dispatcher.router_id),
    }


def hand_offs(record: RouteRecord) -> list[dict[str, Any]]:
    """Those of the request that have ended, one a try at most."""
    return [
        {
            "from": each.decision.prefill_id,
            "to": each.decision.replica_id,
            "bytes": each.hand_off.num_bytes,
            "ok": each.hand_off.transferred,
        }
        for each in record.tries
        if each.hand_off is not None
    ]


def scaling_rules(config: AppConfig) -> dict[str, dict[str, float]]:
    """By role, the settings of the rule; without roles whose number of replicas is fixed."""
    found = {}
    for role in roles_of(config):
        settings = config_of(config, role).replicas.autoscaling
        if settings is not None:
            found[role.value] = {name: float(getattr(settings, name)) for name in RULE}
    return found


def shown_keys(keys: PageKeys) -> list[str]:
    """Of a prompt's whole pages, in order, as routers tell the observatory."""
    return [f"{key:016x}" for key in keys.tolist()]
