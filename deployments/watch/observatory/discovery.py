"""Who serves metrics, as Prometheus' ``http_sd`` wants to hear it.

Pure. Never: a ``job`` label, which would override the name of the scrape job.
"""

from collections.abc import Iterable
from typing import Any

from deployments.fleet.seen import Target


def service_discovery(targets: Iterable[Target]) -> list[dict[str, Any]]:
    """An entry a process. What it is, its series say themselves; where it runs, the label says."""
    return [{"targets": [each.address], "labels": {"node": each.node_id}} for each in targets]
