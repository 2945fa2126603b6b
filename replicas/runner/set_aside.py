"""The device memory that a rank on a GPU sets aside when it sizes the KV pool; none on a CPU.

Owns:      which of the formulas (runner/graphs.py, attention/workspace.py) apply under which settings.
Never:     allocates.
Invariant: FlashInfer is counted where `attention` may choose it, installed or not: the choice is made after the pool.
"""

import torch

from replicas.attention.workspace import INT_BYTES, MIN_BYTES, attention_bytes
from replicas.config import FP8_TENSOR, EngineConfig
from replicas.kernels.adapters.on_gpu import PER_RECORD_BYTES, between_bytes
from replicas.memory import sizing
from replicas.memory.allocator import ROW_SLACK, len_with_carried
from replicas.runner.graphs import SIZES, graph_bytes
from replicas.scheduler.plan import LOGITS_CHUNK

FLASHINFERS = ("float16", "bfloat16", FP8_TENSOR)


def graph_rows(config: EngineConfig) -> int:
    """Return the largest batch to capture CUDA graphs for; 0 where there are none: a module of Transformers may wait
    for the device in a step, and so does ``torch_native``."""
    if config.device != "cuda" or not config.cuda_graphs or config.model.implementation == "transformers":
        return 0
    if config.attention == "torch_native":
        return 0
    limit = config.scheduler.max_running_requests
    return SIZES[-1] if limit is None else min(limit, SIZES[-1])


def bytes_for_graphs(config: EngineConfig) -> int:
    rows, model = graph_rows(config), config.model
    if not rows:
        return 0
    return graph_bytes(
        rows,
        kinds=1 if config.adapters is None else 2,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.widest_inner,
        num_heads=model.num_heads,
        head_dim=model.head_dim,
    )


def bytes_for_attention(config: EngineConfig, num_ranks: int, *, num_sms: int) -> int:
    """Return the bytes of FlashInfer's workspace; Triton's backend keeps nothing between steps."""
    model = config.model
    if config.device != "cuda" or config.attention not in ("auto", "flashinfer") or config.kv_dtype not in FLASHINFERS:
        return 0
    if model.mla is not None:
        return MIN_BYTES + INT_BYTES  # of its one wrapper, which FlashInfer recommends for any shape
    return attention_bytes(
        num_heads=model.num_heads // num_ranks,
        num_kv_heads=max(1, model.num_kv_heads // num_ranks),
        head_dim=model.head_dim,
        graph_rows=graph_rows(config),
        num_sms=num_sms,
        max_pages=-(-(model.context_len + ROW_SLACK) // config.cache.page_size),
    )


def bytes_for_logits(config: EngineConfig, num_ranks: int) -> int:
    """Return the bytes of the most rows of logits that a step has of prompts: in the model's dtype and in fp32, or
    where ranks gather them their part, all parts, and these joined."""
    if config.device != "cuda":
        return 0
    itemsize: int = getattr(torch, config.model.dtype).itemsize
    copies = max(itemsize + torch.float32.itemsize, 0 if num_ranks == 1 else 3 * itemsize)
    return min(LOGITS_CHUNK, config.chunked_prefill_size) * config.model.vocab_size * copies


def bytes_for_adapters(config: EngineConfig, num_ranks: int) -> int:
    """Return the bytes of a rank's adapters: their weights, their records, and what lies between the kernels."""
    limits, model = config.adapters, config.model
    if config.device != "cuda" or limits is None:
        return 0
    records = limits.max_held * 4 * model.num_layers * PER_RECORD_BYTES
    return limits.host_bytes // num_ranks + records + between_bytes(graph_rows(config), limits.max_rank)


def bytes_for_table(config: EngineConfig, kv_bytes: int, cell_bytes: int) -> int:
    """Return the bytes of the ReqToTokenPool beside a pool of at most ``kv_bytes``: one row more than there are
    requests, one int32 a position."""
    if config.device != "cuda":
        return 0
    context_len, cap = config.model.context_len, sizing.token_cap(config)
    fit = kv_bytes // cell_bytes if cell_bytes else cap or 0
    tokens = fit if cap is None else min(fit, cap)
    rows = sizing.max_running_requests(tokens, context_len, config.scheduler.max_running_requests)
    positions = len_with_carried(context_len, config.cache.page_size, config.carried)
    return torch.int32.itemsize * (rows + 1) * (positions + ROW_SLACK)
