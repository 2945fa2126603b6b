"""Owners: whose cached pages are, and which tenants have more of a tier than their share.

Owns:      the weight of each tenant and when it last used the cache. Whose a node is stands in `TreeNode.tenant`.
Never:     evicts, or keeps a page free: a share counts only while pages are short, in the order of evict.py.
Invariant: a node that requests of several tenants used is everybody's, and stays so; it counts as no one's.
Thread:    scheduler thread only.

A tenant has a share while it is active, so that pages of one that has gone protect nothing. A share is by weight of
what the active ones have cached in all; whoever is active alone may have everything.
"""

from collections import Counter
from collections.abc import Callable

EVERYBODY = "*"  # no tenant has this name (deployments/settings/tenants.py)
ACTIVE_S = 600.0  # since a tenant's last request began or ended its prompt


class Owners:
    """The tenants of one cache."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._weights: dict[str, float] = {}
        self._used_s: dict[str, float] = {}

    def used(self, tenant: str, weight: float) -> None:
        """Note that a request of ``tenant`` uses the cache."""
        self._weights[tenant], self._used_s[tenant] = weight, self._clock()

    def over(self, held: Counter[str]) -> frozenset[str]:
        """Return the tenants that have more than their share of a tier, whose pages are ``held`` by tenant. Where fewer
        than two are active, none has."""
        for tenant in [tenant for tenant, num_pages in held.items() if not num_pages]:
            del held[tenant]
        since_s = self._clock() - ACTIVE_S
        active = {tenant for tenant in held if self._used_s.get(tenant, since_s) > since_s}
        if len(active) < 2:
            return frozenset()
        share = sum(held[tenant] for tenant in active) / sum(self._weights[tenant] for tenant in active)
        gone = (tenant for tenant in held if tenant in self._used_s and tenant not in active)
        return frozenset([*gone, *(tenant for tenant in active if held[tenant] > share * self._weights[tenant])])
