"""Which attention backend runs where."""

import logging

from replicas.attention.base import AttentionBackend
from replicas.attention.cpu import CpuAttention
from replicas.attention.torch_native import TorchNativeAttention
from replicas.memory.pool import MHATokenToKVPool

log = logging.getLogger(__name__)


def make_attention(
    name: str, pool: MHATokenToKVPool, *, num_heads: int, num_kv_heads: int, head_dim: int, num_threads: int
) -> AttentionBackend:
    """The backend called ``name``; ``auto`` takes the fast one of the pool's device.

    Args: num_heads, num_kv_heads: of this rank.
    """
    if name == "cpu" or (name == "auto" and pool.device.type == "cpu"):
        return CpuAttention(
            pool, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, num_threads=num_threads
        )
    log.info("attention: torch_native, the plain reference")
    return TorchNativeAttention(pool)
