"""What a router tells the observatory about itself, its replicas and its requests, once a second.

Owns:   the form of what travels between the two (pickled by Ray).
Never:  holds a prompt's text or ids.
"""

from dataclasses import dataclass
from typing import Any

from deployments.fleet.seen import SeenReplica, Target


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
