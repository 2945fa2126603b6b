"""What a router answers when the observatory asks (`RouterIngress.observe`, `find_request`).

Owns:   the form of the answers, which Ray pickles.
Never:  changes the router (fleet, dispatcher, settings are read alone); holds a prompt's text or ids.
Thread: the router's event loop.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.dispatch.dispatcher import Dispatcher
from deployments.fleet.fleet import Fleet
from deployments.fleet.peers import Body
from deployments.fleet.seen import GoneReplica, SeenReplica, Target
from deployments.record.route_forms import progress_of, record_body, request_row
from deployments.record.route_log import MOST_TOLD, OBJECTIVES, RouteRecord
from deployments.settings.roles import config_of, roles_of
from deployments.settings.schema import AppConfig
from kvtransfer.pages import PageKeys
from replicas.types import PdTransferReport, TallyCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterView:
    """A router's answer to `RouterIngress.observe(since)`; ``since``: by router, the ``seq`` of its last answer."""

    router_id: str
    node_id: str
    target: Target
    model: str  # its served name
    mode: str  # unified, disaggregated
    num_open: int
    replicas: tuple[SeenReplica, ...]
    requests: tuple[dict[str, Any], ...]  # rows (README.md of this folder) changed after ``since``, oldest first, the
    # newest route_log.MOST_TOLD, each with its ``key`` and ``kv_transfers`` (requests.py)
    progress: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # ``key`` of each request that runs and has
    # a token -> what of its row has grown (route_forms.progress_of)
    time_s: float | None  # by the router's clock, seconds since 1970; None: its clock is ours
    seq: int  # to be given as ``since`` next; 0 asks for all that are kept
    asks_for_key: bool = False  # it has an admin key or API keys: the observatory must not be open then either
    autoscaling: dict[str, dict[str, float]]  # role -> settings of its rule (min_replicas, max_replicas, objectives)
    objectives: Mapping[str, float] = field(default_factory=lambda: OBJECTIVES)
    counts: Mapping[str, int] = field(default_factory=dict)  # of requests since the router's start (RequestWatch)
    gaps: TallyCounts | None = None  # between tokens, since then; None where nobody counts them
    gone: tuple[GoneReplica, ...] = ()  # the last that have left
    batches: Sequence[Mapping[str, Any]] = ()  # that it runs (BatchRunner.progress)


RULE = ("min_replicas", "max_replicas", "ttft_objective_s", "pool_high", "running_high", "slack")


def router_view(
    *,
    dispatcher: Dispatcher,
    fleet: Fleet,
    config: AppConfig,
    node_id: str,
    target: Target,
    asks_for_key: bool = False,
    since: Mapping[str, int],
    batches: Sequence[Mapping[str, Any]] = (),
) -> RouterView:
    """Read one router. ``since``: by router, the ``seq`` of its last answer; each router looks up its own."""
    # if more than MOST_TOLD changed (all, on a first look), the newest are enough: no more are shown
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
                "kv_transfers": kv_transfers(record),
            }
            for record in records
        ),
        progress={record.rid: progress_of(record) for record in dispatcher.routes.running()},
        time_s=time.time(),
        seq=seq,
        autoscaling=scaling_rules(config),
        objectives=dispatcher.watch.objectives,
        counts=dict(dispatcher.watch.counts),
        gaps=None if dispatcher.watch.gaps is None else dispatcher.watch.gaps.read(),
        gone=fleet.gone,
        batches=batches,
    )


def request_body(dispatcher: Dispatcher, name: str) -> Body | None:
    """Return all that this router knows of request ``name``; of several routers the newest ``time`` counts."""
    record = dispatcher.routes.find(name)
    if record is None:
        return None
    return {
        "time": record.time_s,
        "row": request_row(record, router_id=dispatcher.router_id),
        "page_keys": shown_keys(record.tries[-1].decision.keys),
        "route": record_body(record, router_id=dispatcher.router_id),
    }


def kv_transfers(record: RouteRecord) -> list[dict[str, Any]]:
    """Return the fetches and KV transfers of the request that have ended, at most one of each a try."""
    ended: list[tuple[str, str, PdTransferReport | None]] = []
    for each in record.tries:
        decision, prefill_id = each.decision, each.decision.prefill_id
        if decision.fetch is not None:
            ended.append((decision.fetch.donor_id, prefill_id or decision.replica_id, each.fetch_report))
        if prefill_id is not None:
            ended.append((prefill_id, decision.replica_id, each.kv_transfer))
    return [
        {"from": sender, "to": receiver, "bytes": report.num_bytes, "ok": report.transferred}
        for sender, receiver, report in ended
        if report is not None
    ]


def scaling_rules(config: AppConfig) -> dict[str, dict[str, float]]:
    """Return the settings of the autoscaling rule by role, without roles whose number of replicas is fixed."""
    found = {}
    for role in roles_of(config):
        settings = config_of(config, role).replicas.autoscaling
        if settings is not None:
            found[role.value] = {name: float(getattr(settings, name)) for name in RULE}
    return found


def shown_keys(keys: PageKeys) -> list[str]:
    """Write the keys of a prompt's whole pages as hex, in order, for the observatory."""
    return [f"{key:016x}" for key in keys.tolist()]
