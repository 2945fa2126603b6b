"""Builds an engine: settings, ranks, pools, and its transfer service where it takes part in KV transfers.

Owns:      the order of start-up and of its undoing.
Never:     decides settings (resolve.py) or sizes (memory/sizing); starts followers itself (engine/ranks.py).
"""

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvtransfer.ports.agent import may_pin
from kvtransfer.ports.rank_port import RankPort
from kvtransfer.rooms.kv_transfer import KvTransfer
from kvtransfer.stores.items import NO_SECRET, store_secret
from kvtransfer.stores.urls import name_of, open_store
from kvtransfer.types import TransferSettings
from replicas.cache.host_pages import HostTier
from replicas.cache.kv import KvCache
from replicas.cache.page_home import TieredPageHome
from replicas.cache.parts import SnapshotAllocator
from replicas.cache.store_tier import StoreTier
from replicas.cache.store_worker import Worker
from replicas.cache.tiers import HiRadixCache
from replicas.config import (
    STATE_DRAFT,
    AdapterLimits,
    Attention,
    CacheConfig,
    DType,
    EngineConfig,
    Implementation,
    ParallelConfig,
    Quantization,
    SchedulerConfig,
    kv_layout,
    load_extensions,
)
from replicas.disagg.roles import PdTransferTerms
from replicas.engine.adapters import HeldAdapters
from replicas.engine.engine import Engine, Executor, StartReport
from replicas.engine.ranks import LocalWorkers, Ranks, WorkerLauncher
from replicas.errors import InvalidConfig
from replicas.loading.device import measure_hardware
from replicas.loading.model_files import load_model_config, model_identity
from replicas.loading.product_choice import default_told, describe_products
from replicas.memory.host import HostKVCache
from replicas.ranks.port import MakeAgent, PortSpec
from replicas.resolve import resolve, transfer_problems
from replicas.runner.kv_access import RankedCopier
from replicas.runner.warm_up import time_decode
from replicas.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

COMMIT_S = 1.0  # that a start waits at most for the memory of a CPU's pool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is built from. Settings that are None are filled in by the model and the machine."""

    model: str  # a folder, or a hub id
    revision: str | None = None  # of a hub id: branch, tag or commit
    dtype: DType | None = None
    quantization: Quantization = "none"
    implementation: Implementation = "auto"  # whose code runs the model: ours, Transformers' module, or ours if we can
    context_len: int | None = None
    cache: CacheConfig | None = None
    scheduler: SchedulerConfig | None = None
    parallel: ParallelConfig | None = None
    attention: Attention = "auto"
    adapters: AdapterLimits | None = None  # None: none are served
    cuda_graphs: bool = True
    num_threads: int | None = None
    workers: WorkerLauncher | None = None  # starts the ranks above 0; by default processes of this host
    # for a caller that drains them (loop.py does): what enters and leaves the prefix cache
    record_events: bool = False
    transfer: TransferSettings | None = None  # takes part in KV transfers; peers reach it at its ``transfer_address``
    whole_pages: bool = False  # of models with windows: its KV transfers want all layers in one page
    make_agent: MakeAgent | None = None  # another transfer library than NIXL; for one rank
    # for an engine that serves: rank 0's KV pool has its memory, or the first of it, from the start, and what
    # constrained requests need of the tokenizer is made soon
    commit_pool: bool = False
    clock: Callable[[], float] = time.monotonic  # a benchmark may have its own


def load_engine(settings: EngineSettings) -> Engine:
    """Build an engine; rank 0 lives in this process.

    Raises: InvalidConfig (UnsupportedModel) with what is wrong and what is allowed; EngineDead when a rank does not
            come up; TransferError or OSError when the transfer library or its address is not available.
    """
    started_s = time.monotonic()
    load_extensions()
    config = _resolved(settings)
    tokenizer = Tokenizer(config.model.path)
    spec = port_spec(config, settings.transfer) if settings.transfer is not None else None
    ranks = Ranks(config, settings.workers or LocalWorkers(), spec)
    runner = ranks.runner
    if settings.commit_pool and config.device == "cpu":
        for pool in runner.pools:
            pool.commit(COMMIT_S)
    decode_s: dict[int, float] = {}
    if config.scheduler.speculation != "off":
        decode_s = _timed_decode(ranks, settings.clock)
    kv = _kv_cache(config, ranks, settings)
    connected = None
    if spec is not None:
        try:
            connected = open_transfer_service(spec, lambda: ranks.ports(settings.make_agent))
        except BaseException:
            ranks.close()
            raise
    engine = Engine(
        config,
        kv=kv,
        max_running=runner.max_running,
        executor=Executor(
            launch=ranks.launch,
            dead_rank=ranks.dead,
            close=ranks.close,
            kv_bytes=ranks.kv_bytes(config) if runner.pool_size.windows is None else None,
            page_home=_page_home(config, kv, ranks.host),
            give_back=ranks.give_back,
            adapters=None if config.adapters is None else HeldAdapters(ranks.adapters(config.adapters), settings.clock),
            carrier=None if spec is None else ranks.carrier(),
            between_layers=runner.between_layers if config.device == "cpu" and config.parallel.tp == 1 else None,
        ),
        tokenizer=tokenizer,
        transfer=connected,
        clock=settings.clock,
        started=StartReport(
            attention=runner.attention_choice,
            times={**runner.start_times, "total": time.monotonic() - started_s},
            decode_s=decode_s,
        ),
    )
    if settings.commit_pool:
        engine.grammars.warm_up()
    log.info("KV pool: %s", engine.describe())
    return engine


def _resolved(settings: EngineSettings) -> EngineConfig:
    """Check the settings, and fill in those that were left open. Raises: InvalidConfig."""
    model = load_model_config(
        settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        context_len=settings.context_len,
        quantization=settings.quantization,
        implementation=settings.implementation,
    )
    config = resolve(
        model,
        measure_hardware(),
        cache=settings.cache,
        scheduler=settings.scheduler,
        parallel=settings.parallel,
        attention=settings.attention,
        cuda_graphs=settings.cuda_graphs,
        num_threads=settings.num_threads,
    )
    one_order, products = describe_products(config)
    origin = dict(config.origin)
    is_default = settings.dtype is None and config.device == "cpu" and model.quantization == "none"
    if is_default and (told := default_told(model.dtype)):
        origin["model.dtype"] = told
    config = replace(
        config,
        products=products,
        one_order=one_order,
        adapters=settings.adapters,
        hands_off=settings.transfer is not None,
        whole_pages=settings.whole_pages,
        origin=origin,
    )
    for setting, source in config.origin.items():
        log.info("%s: %s", setting, source)
    return config


def _timed_decode(ranks: Ranks, clock: Callable[[], float]) -> dict[int, float]:
    """Time decode steps on all ranks (`time_decode`), which are closed if one of them fails."""
    run = functools.partial(
        time_decode, lambda plan: ranks.launch(plan).result(), row=ranks.runner.max_running, clock=clock
    )
    try:
        return ranks.watched(run, "while decode steps were timed")
    except BaseException:
        ranks.close()
        raise


def _kv_cache(config: EngineConfig, ranks: Ranks, settings: EngineSettings) -> KvCache:
    """Make the prefix cache over the ranks' pools, with its host tier and store where the settings have them."""
    copier, host = ranks.copier(), None
    if copier is not None:
        if settings.commit_pool:
            copier.host.commit(COMMIT_S)
        host = HostTier(
            num_pages=copier.host.memory.num_pages,
            copier=copier,
            eviction=config.cache.host_eviction,
            write=config.cache.write_policy,
        )
    kv = KvCache(
        size=ranks.runner.pool_size,
        max_requests=ranks.runner.max_running,
        context_len=config.model.context_len,
        cache=config.cache,
        host=host,
        record_events=settings.record_events,
        clock=settings.clock,
        carried=config.carried,
    )
    kv.window = config.model.window
    if config.model.states:
        kv.longest_draft = STATE_DRAFT
    if kv.store.size.snapshot_pages and (states := ranks.carried_states()) is not None:
        assert isinstance(kv.store.parts, SnapshotAllocator)
        kv.store.parts.run = states.run
    if copier is not None and kv.store.tiers is not None and config.cache.store is not None:
        kv.store_tier = open_store_tier(config, kv.store.tiers, copier)
    return kv


def open_store_tier(config: EngineConfig, tiers: HiRadixCache, copier: RankedCopier) -> StoreTier:
    """Open the store of the settings under the host tier. Raises: InvalidConfig when it cannot be had."""
    cache, tp = config.cache, config.num_kv_parts
    assert cache.store is not None
    # pages of all ranks as they lie in host memory: other parts, or heads that ranks share, are another layout
    fingerprint = f"{kv_layout(config, model_identity(config.model.path, config.model.quantization), tp=1).fingerprint}"
    fingerprint += f"|tp={tp}|page_bytes={copier.host.memory.page_bytes}|dtype={config.model.dtype}"
    secret = NO_SECRET if cache.store_key is None else store_secret(cache.store_key)
    if secret:  # stores of two keys, or of none, in one place do not delete each other's items
        fingerprint += f"|key={hashlib.blake2b(secret, digest_size=16).hexdigest()}"
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=8).digest()
    try:
        store = open_store(cache.store, layout_digest=digest, capacity_bytes=cache.store_bytes, secret=secret)
    except ValueError as error:
        raise InvalidConfig(f"cache.store: {error}") from error
    return StoreTier(
        tiers,
        Worker(store, copier.host, fingerprint, cache.page_size),
        name=name_of(cache.store),
        policy=cache.prefetch,
    )


def _page_home(config: EngineConfig, kv: KvCache, host: HostKVCache | None) -> TieredPageHome | None:
    """Make the home of pages that move between replicas; None without a host tier, where ranks share KV heads, or
    where a request needs recurrent states beside pages, which do not move."""
    tiers = kv.store.tiers
    if host is None or tiers is None or config.model.num_kv_heads % config.num_kv_parts or config.model.states:
        return None
    identity = model_identity(config.model.path, config.model.quantization)
    return TieredPageHome(tiers, host, kv_layout(config, identity))


def port_spec(config: EngineConfig, settings: TransferSettings) -> PortSpec:
    """Return what all ports agree on. Raises: InvalidConfig when this engine's pages cannot be handed over."""
    if problems := list(transfer_problems(config)):
        raise InvalidConfig(*problems)
    try:
        identity = model_identity(config.model.path, config.model.quantization)
        return PortSpec(layout=kv_layout(config, identity), settings=settings)
    except ValueError as error:
        raise InvalidConfig(
            f"K/V cannot be handed over with parallel.tp = {config.parallel.tp}: {error}; choose a tp that divides the "
            "KV heads, or serve this model without KV transfers"
        ) from error


def open_transfer_service(
    spec: PortSpec, make_ports: Callable[[], Sequence[RankPort]]
) -> tuple[KvTransfer, PdTransferTerms]:
    """Start the transfer service; ``make_ports`` is called on its thread. Returns: it, and the engine's terms.

    Raises: TransferError or OSError when the transfer library or the listening address is not available.
    """
    settings = spec.settings
    service = KvTransfer(settings, spec.layout, make_ports)
    service.start()
    terms = PdTransferTerms(
        fingerprint=spec.layout.fingerprint,
        open_timeout_s=settings.open_timeout_s,
        room_timeout_s=settings.room_timeout_s,
        pinned=may_pin(),  # as on the other ranks, which are on this machine
    )
    return service, terms
