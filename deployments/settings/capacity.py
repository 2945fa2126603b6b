"""How many replicas a machine or a cluster has room for: the value of ``count: auto``, what cannot be placed, and what
cannot be put into the place of what serves there.

Never: measures anything; the caller does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deployments.settings.roles import DEPLOYMENTS, config_of, roles_of
from deployments.settings.schema import AppConfig
from replicas.config import CacheConfig
from replicas.resolve import CPU_MEMORY_CAP, CPU_MEMORY_SHARE
from routing.types import Role

AUTO_MOST = 2  # replicas on CPUs: shows routing and failover on a laptop; more only on request
PROCESS_BYTES = 900 << 20  # a replica's process beside weights and KV: Python, torch, Ray
SLACK = 1e-6  # shares of a CPU or a GPU are floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What Ray can give to replicas."""

    num_cpus: float
    num_gpus: float
    where: str  # in words: "this machine"
    nodes: tuple[tuple[float, float], ...] = ()  # the CPUs and GPUs of each node; (): there is only one


def auto_count(config: AppConfig, capacity: Capacity, *, available_bytes: int, weights_bytes: int) -> tuple[int, str]:
    """Choose the number of replicas for ``count: auto``, at least one: on GPUs as many as the cluster has room for, the
    ranks of a replica on one node; on CPUs as many as fit, at most AUTO_MOST.

    Args:    available_bytes: RAM, for replicas on the CPU; on a GPU a replica uses the GPU's memory.
    Returns: (replicas, the reason in words).
    """
    replicas, tp = config.replicas, config.parallel.tp
    cpus, gpus = replicas.cpus * tp, replicas.gpus * tp
    num_cpus = capacity.num_cpus - num_routers(config, capacity) * config.router.cpus
    by_cpus = int((num_cpus + SLACK) // cpus)
    whys = [f"{num_cpus:g} CPUs at {cpus:g} a replica carry {by_cpus}"]
    if gpus:
        nodes = capacity.nodes or ((capacity.num_cpus, capacity.num_gpus),)
        bound = sum(int(min((has_cpus + SLACK) // cpus, (has_gpus + SLACK) // gpus)) for has_cpus, has_gpus in nodes)
        whys.append(f"{capacity.num_gpus:g} GPUs at {gpus:g}, node by node, carry {bound}")
    else:
        need = replica_bytes(config.cache, available_bytes=available_bytes, weights_bytes=weights_bytes)
        bound = available_bytes // need
        whys.append(f"{available_bytes / 2**30:.1f} GiB of memory at {need / 2**30:.1f} carry {bound}")
        whys.append(f"auto takes at most {AUTO_MOST} on CPUs")
        bound = min(AUTO_MOST, bound)
    return max(1, min(by_cpus, bound)), ", ".join(whys)


def num_routers(config: AppConfig, capacity: Capacity) -> int:
    """Return ``router.count``; unless it is given, 2 where two nodes can run one each, else 1."""
    if config.router.count is not None:
        return config.router.count
    able = [cpus for cpus, _ in capacity.nodes if cpus + SLACK >= config.router.cpus]
    return 2 if len(able) > 1 else 1


def replica_bytes(cache: CacheConfig, *, available_bytes: int, weights_bytes: int) -> int:
    """Estimate the memory of one replica on a CPU: its budget for weights and KV, and its process."""
    budget = cache.device_memory_bytes
    if budget is None:
        budget = min(int(available_bytes * CPU_MEMORY_SHARE), CPU_MEMORY_CAP)
    return max(budget, weights_bytes) + PROCESS_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """The CPUs, or the GPUs, that the replicas of one role reserve."""

    setting: str  # of one rank's share
    count_setting: str
    count: int
    tp_setting: str
    tp: int
    each: float  # of one rank
    role: Role

    @property
    def total(self) -> float:
        return self.count * self.tp * self.each

    def blamed(self, have: float) -> str:
        """Name the setting that is too large: of one rank, of one replica, or, where one replica fits, the count."""
        if self.each > have + SLACK:
            return f"{self.setting} = {self.each:g}"
        if self.each * self.tp > have + SLACK:
            return f"{self.tp_setting} = {self.tp}"
        return f"{self.count_setting} = {self.count}"

    def describe(self) -> str:
        """Write the reservation in words."""
        kind = "" if self.role is Role.UNIFIED else f"{self.role.value} "
        ranks = f" of {self.tp} ranks" if self.tp > 1 else ""
        return f"{self.count} {kind}replica{'s' if self.count > 1 else ''}{ranks} at {self.each:g}"


def shortages(configs: Iterable[AppConfig], capacity: Capacity) -> list[str]:
    """List a sentence for CPUs and one for GPUs where ``capacity`` can never hold the replicas of these applications.

    ``count: auto`` counts as one replica here, and autoscaling as the number that it starts with.
    """
    configs = list(configs)
    found = []
    for kind, have in (("cpus", capacity.num_cpus), ("gpus", capacity.num_gpus)):
        wanted = [each for config in configs for each in _wanted(config, kind) if each.each]
        routers = sum(num_routers(each, capacity) * each.router.cpus for each in configs) if kind == "cpus" else 0.0
        need = sum(each.total for each in wanted) + routers
        if not wanted or need <= have + SLACK:
            continue
        # the largest reservation is the likeliest mistake
        blamed = max(wanted, key=lambda each: each.total).blamed(have)
        parts = [each.describe() for each in wanted] + ([f"routers at {routers:g} in all"] if routers else [])
        unit = kind[:-1].upper()
        needed = f"1 {unit} is needed" if need == 1 else f"{need:g} {unit}s are needed"
        found.append(f"{blamed}: {needed} ({' and '.join(parts)}), and {capacity.where} has {have:g}")
    return found


def too_wide(configs: Iterable[AppConfig], capacity: Capacity) -> list[str]:
    """List a sentence for each role of which no node can hold a replica: its ranks share a node.

    A cluster without any node that has GPUs, or CPUs where they compute, is given the chance to grow some.
    """
    found = []
    for config in configs:
        for role in roles_of(config):
            own = config_of(config, role)
            tp, cpus, gpus = own.parallel.tp, own.replicas.cpus, own.replicas.gpus
            able = [(has_cpus, has_gpus) for has_cpus, has_gpus in capacity.nodes if (has_gpus if gpus else has_cpus)]
            if tp == 1 or not able or any(
                cpus * tp <= has_cpus + SLACK and gpus * tp <= has_gpus + SLACK for has_cpus, has_gpus in able
            ):
                continue
            need = f"{cpus * tp:g} CPUs" + (f" and {gpus * tp:g} GPUs" if gpus else "")
            most_cpus, most_gpus = max(able, key=lambda node: (node[1], node[0]) if gpus else node)
            most = f"{most_cpus:g} CPUs" + (f" and {most_gpus:g} GPUs" if gpus else "")
            found.append(
                f"{_tp_setting(config, role)} = {tp}: the ranks of a replica share one node, which needs "
                f"{need}, and the largest node of {capacity.where} has {most}"
            )
    return found


def outages(config: AppConfig, serving: Mapping[str, int]) -> list[str]:
    """List a sentence for each change that makes Serve stop replicas before their successors are ready.

    Args: serving: the ranks of a replica, of each deployment of the application that has replicas now; {}: none has.
    """
    if config.allow_outage or not serving:
        return []
    advice = "start a second cluster and move the clients, or set allow_outage: true to have requests fail meanwhile"
    wanted = {DEPLOYMENTS[role]: role for role in roles_of(config)}
    if not serving.keys() <= wanted.keys():
        return [
            f"mode = {config.mode!r}: the application that serves has another mode, and Serve stops its replicas "
            f"before the new ones are ready: {advice}"
        ]
    found = []
    for name, num_ranks in serving.items():
        tp = config_of(config, wanted[name]).parallel.tp
        if tp != num_ranks:
            found.append(
                f"{_tp_setting(config, wanted[name])} = {tp}: the replicas that serve have {num_ranks}, and Serve "
                f"stops one of them before its successor is ready, which may find no room: {advice}"
            )
    return found


def _tp_setting(config: AppConfig, role: Role) -> str:
    given = role is not Role.UNIFIED and getattr(config, role.value).tp is not None
    return f"{role.value}.tp" if given else "parallel.tp"


def _wanted(config: AppConfig, kind: str) -> list[_Wanted]:
    found = []
    for role in roles_of(config):
        own = config_of(config, role)
        group = None if role is Role.UNIFIED else getattr(config, role.value)

        def named(setting: str, shared: str, group: object = group, role: Role = role) -> str:
            """Write the full name of ``setting``: in the role's own group where it is given there."""
            given = group is not None and getattr(group, setting) is not None
            return f"{role.value}.{setting}" if given else f"{shared}.{setting}"

        count, name = own.replicas.count, named("count", "replicas")
        if own.replicas.autoscaling is not None:
            scaled = own.replicas.autoscaling
            name = named("autoscaling", "replicas")
            name += ".min_replicas" if scaled.initial_replicas is None else ".initial_replicas"
            count = scaled.initial_replicas or scaled.min_replicas
        found.append(
            _Wanted(
                setting=named(kind, "replicas"),
                count_setting=name,
                count=1 if count == "auto" else count,
                tp_setting=named("tp", "parallel"),
                tp=own.parallel.tp,
                each=getattr(own.replicas, kind),
                role=role,
            )
        )
    return found
