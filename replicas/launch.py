"""Builds an engine: settings, ranks, pools, and its transfer desk where it takes part in hand-offs.

Owns:      the order of start-up and of its undoing.
Never:     decides settings (config.resolve) or sizes (memory/sizing); starts followers itself (engine/ranks.py).
"""

import logging
import time
from dataclasses import replace

from kvtransfer.types import TransferSettings
from replicas.cache.kv import KvCache
from replicas.config import (
    Attention,
    CacheConfig,
    DType,
    ParallelConfig,
    ProductSetting,
    Quantization,
    SchedulerConfig,
    resolve,
)
from replicas.desk import open_desk, port_spec
from replicas.disagg.wake import Wake
from replicas.engine.engine import Engine
from replicas.engine.ranks import LocalWorkers, Ranks, WorkerLauncher
from replicas.runner.device import measure_hardware
from replicas.runner.port import MakeAgent
from replicas.runner.product_choice import choose_products
from replicas.runner.weights import load_model_config
from replicas.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def load_engine(
    model: str,
    *,
    cache: CacheConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    parallel: ParallelConfig | None = None,
    attention: Attention = "auto",
    products: ProductSetting = "auto",
    cuda_graphs: bool = True,
    num_threads: int | None = None,
    revision: str | None = None,
    dtype: DType | None = None,
    quantization: Quantization = "none",
    context_len: int | None = None,
    workers: WorkerLauncher | None = None,
    record_events: bool = False,
    transfer: TransferSettings | None = None,
    make_agent: MakeAgent | None = None,
) -> Engine:
    """An engine for the model in folder (or hub id) ``model``; rank 0 lives in this process.

    Args: revision: of a hub id: branch, tag or commit.
          products: for fp32 on a CPU: ours, PyTorch's BLAS for steps of many rows, or what is faster here.
          record_events: for a caller that drains them (loop.py does): what enters and leaves the prefix cache.
          transfer: for an engine that takes part in hand-offs; its peers reach it at ``transfer_address``.
          make_agent: another transfer library than NIXL; for one rank.

    Raises: InvalidConfig (UnsupportedModel) with what is wrong and what is allowed; EngineDead when a rank does not
            come up; TransferError or OSError when the transfer library or its address is not to be had.
    """
    started_s = time.monotonic()
    model_config = load_model_config(
        model, revision=revision, dtype=dtype, context_len=context_len, quantization=quantization
    )
    config = resolve(
        model_config,
        measure_hardware(),
        cache=cache,
        scheduler=scheduler,
        parallel=parallel,
        attention=attention,
        cuda_graphs=cuda_graphs,
        num_threads=num_threads,
    )
    chosen, why = choose_products(config, products)
    config = replace(config, products=chosen, origin={**config.origin, "model.products": why})
    for setting, source in config.origin.items():
        log.info("%s: %s", setting, source)
    tokenizer = Tokenizer(config.model.path)
    spec = port_spec(config, transfer) if transfer is not None else None
    ranks = Ranks(config, workers or LocalWorkers(), spec)
    runner = ranks.runner
    kv = KvCache(
        num_pages=runner.pool_size.num_pages,
        page_size=runner.pool_size.page_size,
        max_requests=runner.max_running,
        context_len=config.model.context_len,
        prefix_cache=config.cache.prefix_cache,
        eviction=config.cache.eviction,
        record_events=record_events,
    )
    wake, desk, terms = Wake(), None, None
    if spec is not None:
        try:
            desk, terms = open_desk(spec, lambda: ranks.ports(make_agent), wake)
        except BaseException:
            ranks.close()
            raise
    engine = Engine(
        config,
        kv=kv,
        max_running=runner.max_running,
        launch=ranks.launch,
        tokenizer=tokenizer,
        dead_rank=ranks.dead,
        close=ranks.close,
        kv_bytes=ranks.kv_bytes(config),
        desk=desk,
        terms=terms,
        wake=wake,
        attention=runner.attention_choice,
        start_times={**runner.start_times, "total": time.monotonic() - started_s},
    )
    log.info("KV pool: %s", engine.describe())
    return engine


