"""What routers and Serve tell the observatory, as tests make it up."""

from dataclasses import replace
from typing import Any

from deployments.channel.frames import ReplicaReport
from deployments.fleet.seen import SeenReplica, Target
from deployments.watch.observatory.router_view import RouterView
from deployments.watch.observatory.serve_details import Listed, ServeDetails
from replicas.types import PoolStats
from tests.unit.deployments.sample_values import info, stats


def seen(
    replica_id: str, *, role: str = "unified", age_s: float | None = 0.1, used_pages: int = 0, **changes: Any
) -> SeenReplica:
    """A replica with a pool of 10 pages of 16 tokens; ``changes``: of its statistics. Starting where ``age_s`` is None.

    Its metrics are served at port 1000 of its own name.
    """
    if age_s is None:
        return SeenReplica(
            replica_id=replica_id, role=role, state="starting", info=None, report=None, report_age_s=None
        )
    pool = PoolStats(
        page_size=16, num_pages=10, free_pages=10 - used_pages, evictable_pages=0, protected_pages=used_pages,
        reserved_pages=0,
    )  # fmt: skip
    report = ReplicaReport(stats=replace(stats(**changes), pool=pool), error=None, num_open=0)
    return SeenReplica(
        replica_id=replica_id,
        role=role,
        state="accepting",
        info=replace(info(replica_id), metrics=f"{replica_id}:1000"),
        report=report,
        report_age_s=age_s,
    )


def view(router_id: str, *replicas: SeenReplica, rows: tuple[dict[str, Any], ...] = (), **changes: Any) -> RouterView:
    values: dict[str, Any] = {
        "router_id": router_id,
        "node_id": "0123456789abcdef",
        "target": Target(address=f"{router_id}:1000", role="router", process_id=router_id, node_id="0123456789abcdef"),
        "model": "tiny",
        "mode": "unified",
        "num_open": 0,
        "replicas": replicas,
        "requests": rows,
        "time_s": None,
        "seq": 7,
        "autoscaling": {},
    }
    return RouterView(**{**values, **changes})


def row(rid: str, *, time: float = 0.0, router: str = "one", **changes: Any) -> dict[str, Any]:
    """Of a finished request of 100 tokens, 40 of them reused, whose first token came after 0.5 s."""
    values = {
        "rid": rid, "router": router, "time": time, "endpoint": "chat", "outcome": "ok", "replica": "a",
        "prefill": None, "policy": "estimated_ttft", "reason": "only_candidate", "tries": 1, "prompt_tokens": 100,
        "output_tokens": 10, "cached_tokens": 40, "predicted_tokens": 48, "best_tokens": 48, "ttft_s": 0.5,
        "last_s": 1.0, "total_s": 1.0, "kv_transfers": [], "key": rid,
        "stages": {"route_s": 0.0, "queue_s": 0.1, "prefill_s": 0.4, "transfer_s": 0.0, "decode_s": 0.5},
        "tries_at": [{"replica": "a", "prefill": None, "start_s": 0.0, "end_s": 1.0, "failure": None}],
    }  # fmt: skip
    return {**values, **changes}


def kv_transfer(source: str, to: str, *, num_bytes: int = 1000, ok: bool = True) -> dict[str, Any]:
    return {"from": source, "to": to, "bytes": num_bytes, "ok": ok}


def details(*listed: Listed, **desired: int) -> ServeDetails:
    return ServeDetails(replicas=listed, desired=desired)


def listed(replica_id: str, role: str = "unified", state: str = "RUNNING") -> Listed:
    return Listed(replica_id=replica_id, role=role, node_id="0123456789abcdef", state=state)
