"""How many replicas ``replicas.count: auto`` means here. Pure; the caller measures.

Invariant: at least one; never more than the cores or the memory carry.
"""

from replicas.config import CPU_MEMORY_CAP, CPU_MEMORY_SHARE, CacheConfig

AUTO_MOST = 2  # shows routing and failover on a laptop; more is for those who ask
PROCESS_BYTES = 900 << 20  # a replica's process beside weights and KV: Python, torch, Ray


def auto_count(
    *, num_cpus: float, cpus_per_replica: float, available_bytes: int, bytes_per_replica: int
) -> tuple[int, str]:
    """(replicas, why)."""
    by_cpus = int(num_cpus // cpus_per_replica)
    by_memory = available_bytes // bytes_per_replica
    count = max(1, min(AUTO_MOST, by_cpus, by_memory))
    why = (
        f"{num_cpus:g} CPUs at {cpus_per_replica:g} each carry {by_cpus}, {available_bytes / 2**30:.1f} GiB of memory "
        f"at {bytes_per_replica / 2**30:.1f} each carry {by_memory}, auto takes at most {AUTO_MOST}"
    )
    return count, why


def replica_bytes(cache: CacheConfig, *, available_bytes: int, weights_bytes: int) -> int:
    """Memory of one replica on CPU: its budget for weights and KV, and its process."""
    budget = cache.device_memory_bytes
    if budget is None:
        budget = min(int(available_bytes * CPU_MEMORY_SHARE), CPU_MEMORY_CAP)
    return max(budget, weights_bytes) + PROCESS_BYTES
